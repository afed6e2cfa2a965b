"""Settings of chats and limits of lengths, compared with transformers' own templates and plain slices."""

import json

import pytest

from realhf.data.dataset import DatasetConfig
from realhf.data.light_tokenizer import LightTokenizer
from realhf.data.loader import Loader, load_tokenizer
from realhf.data.tokenized import TokenizedRows
from realhf.errors import UserError
from tests.hub import byte_tokenizer_files

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "1+1?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "2"}
OFF = {"enable_thinking": False}
PROMPT = ("prompt_ids", "prompt")
PAIR = ("prompt_ids", "sequence_ids", "response_mask")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    for name, content in byte_tokenizer_files().items():
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture(scope="module")
def tokenizers(directory):
    return LightTokenizer(str(directory)), load_tokenizer(str(directory))


def _rows(tmp_path, row, tokenizer, keys, **settings):
    """Return the tokenised samples of a file with one row."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return TokenizedRows(DatasetConfig(str(path), **settings), keys=keys, tokenizer=tokenizer).rows[0]


@pytest.mark.parametrize(
    "prompt, settings, messages, arguments",
    [
        ("1+1?", {"chat": True}, [USER], {}),
        ("1+1?", {"system_prompt": "Be brief."}, [SYSTEM, USER], {}),
        ([USER], {"system_prompt": "Be brief."}, [SYSTEM, USER], {}),
        ([SYSTEM, USER], {"system_prompt": "Another."}, [SYSTEM, USER], {}),
        ("1+1?", {"tools": TOOLS}, [USER], {"tools": TOOLS}),
        ("1+1?", {"tools_key": "functions"}, [USER], {"tools": TOOLS}),
        ("1+1?", {"tools_key": "nothing", "chat": True}, [USER], {}),
        ("1+1?", {"chat_template_kwargs": OFF}, [USER], OFF),
        ([USER], {"chat_template_kwargs": OFF, "tools": TOOLS}, [USER], {"tools": TOOLS, **OFF}),
    ],
)
def test_prompts_are_what_the_template_writes(tmp_path, tokenizers, prompt, settings, messages, arguments):
    theirs = tokenizers[1]
    written = theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **arguments)
    row = {"prompt": prompt, "functions": TOOLS, "nothing": None}
    for tokenizer in tokenizers:
        made = _rows(tmp_path, row, tokenizer, PROMPT, **settings)
        assert theirs.decode(made["prompt_ids"]) == written
        assert made["prompt"] == prompt  # Reward functions get what the row has.


def test_text_with_a_completion_becomes_a_chat_of_both(tmp_path, tokenizers):
    """The loss counts what the template writes after the generation prompt."""
    theirs = tokenizers[1]
    whole = theirs.apply_chat_template([SYSTEM, USER, ANSWER], tokenize=False)
    prompt = theirs.apply_chat_template([SYSTEM, USER], tokenize=False, add_generation_prompt=True)
    for tokenizer in tokenizers:
        for completion in ("2", [ANSWER]):
            row = {"prompt": "1+1?", "completion": completion}
            made = _rows(tmp_path, row, tokenizer, PAIR, system_prompt="Be brief.")
            assert theirs.decode(made["sequence_ids"]) == whole
            learned = [t for t, mask in zip(made["sequence_ids"], made["response_mask"], strict=True) if mask]
            assert theirs.decode(learned) == whole.removeprefix(prompt)


def test_templates_with_a_name_of_their_own_for_tools(tmp_path, directory):
    for name, content in byte_tokenizer_files().items():
        if name != "chat_template.jinja":
            (tmp_path / name).write_bytes(content)
    path = tmp_path / "tokenizer_config.json"
    templates = [
        {"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }}"}]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": templates}))
    for tokenizer in (LightTokenizer(str(tmp_path)), load_tokenizer(str(tmp_path))):
        for tools, text in ((None, "plain"), (TOOLS, "1")):
            row = {"prompt": [USER], "functions": tools}
            made = _rows(tmp_path, row, tokenizer, PROMPT, tools_key="functions")
            assert tokenizer.decode(made["prompt_ids"]) == text


def test_arguments_that_cannot_be_set(tmp_path, tokenizers):
    with pytest.raises(ValueError, match="chat_template_kwargs has 'add_generation_prompt', which it cannot"):
        DatasetConfig("d", chat_template_kwargs={"add_generation_prompt": False})
    with pytest.raises(ValueError, match="tools_key is 'functions': it must be left out if tools are given"):
        DatasetConfig("d", tools=TOOLS, tools_key="functions")
    with pytest.raises(UserError, match="line 1: functions is 3: it must be null, or a list of JSON schemas"):
        _rows(tmp_path, {"prompt": "1", "functions": 3}, tokenizers[0], PROMPT, tools_key="functions")


@pytest.mark.parametrize("preload", [True, False])
def test_prompts_beyond_their_limit(tmp_path, tokenizers, preload):
    path = tmp_path / "rows.jsonl"
    texts = ["abcdef", "ab", "abcde"]
    path.write_text("".join(json.dumps({"prompt": text, "completion": "!"}) + "\n" for text in texts))

    def tokenized(how, keys=PROMPT):
        config = DatasetConfig(
            str(path), max_prompt_tokens=4, too_long=how, preload=preload, shuffle=False)
        return Loader(config, keys=keys, tokenizer=tokenizers[1], group_size=1, seed=0)

    def prompts(loader, count):
        return [tokenizers[1].decode(ids) for ids in loader.batch(range(count))["prompt_ids"].split()]

    assert prompts(tokenized("keep_end"), 3) == ["cdef", "ab", "bcde"]
    assert prompts(tokenized("keep_start"), 3) == ["abcd", "ab", "abcd"]
    assert prompts(tokenized("drop"), 1) == ["ab"] and tokenized("drop").counts.long_prompts == 2
    assert tokenized("keep_end").counts.cut == 2
    whole = tokenized("keep_end", PAIR).batch([0])["sequence_ids"].values
    assert tokenizers[1].decode(whole) == "cdef!<|im_end|>"
    with pytest.raises(UserError, match="line 1: the prompt has 6 tokens, and max_prompt_tokens is 4"):
        tokenized("error")


def test_completions_beyond_their_limit(tmp_path, tokenizers):
    path = tmp_path / "rows.jsonl"
    texts = ["abcdef", "ab", "abcd"]
    path.write_text("".join(json.dumps({"prompt": "?", "completion": text}) + "\n" for text in texts))

    def learned(how):
        config = DatasetConfig(str(path), max_completion_tokens=4, completion_too_long=how)
        rows = TokenizedRows(config, keys=PAIR, tokenizer=tokenizers[0])
        return rows, [tokenizers[0].decode(row["sequence_ids"][1:]) for row in rows.rows]

    rows, texts = learned("keep_start")  # Only a whole completion ends with the eos token.
    assert texts == ["abcd", "ab<|im_end|>", "abcd"] and rows.counts.cut == 2
    assert all(sum(row["response_mask"]) == len(row["sequence_ids"]) - 1 for row in rows.rows)
    rows, texts = learned("drop")
    assert texts == ["ab<|im_end|>"] and rows.counts.long_completions == 2
    with pytest.raises(UserError, match="the completion has 7 tokens, and max_completion_tokens is 4"):
        learned("error")
