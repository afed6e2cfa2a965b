"""Conversations in rows, and which of their tokens are learned: compared with TRL's preparation of data."""

import json
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from realhf.data.dataset import DatasetConfig
from realhf.data.light_tokenizer import LightTokenizer
from realhf.data.loader import load_tokenizer
from realhf.data.rows import load_rows
from realhf.data.tokenized import TokenizedRows
from realhf.data.tokenizer_process import render_chat
from realhf.errors import UserError
from tests.samples import drawn
from tests.tokenizers import byte_tokenizer, llama_tokenizer

SEQUENCE = ("prompt_ids", "prompt", "sequence_ids", "response_mask")
PAIR = (*SEQUENCE, "is_chosen")


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {
    "role": "assistant", "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}],
}
RESULT = {"role": "tool", "name": "add", "content": "3"}
TOOLS = [{"type": "function", "function": {
    "name": "add", "description": "Adds.", "parameters": {
        "type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}}}]
CHATS = {
    "one turn": [user("Hi?"), answer("Yes.")],
    "several turns": [
        user("Hi"), answer("Hello!"), user("Bye"), answer("Goodbye!"), user("?"), answer("No.")],
    "system": [SYSTEM, user("Hi"), answer("Hello!")],
    "tools": [user("1+2?"), CALL, RESULT, answer("It is 3.")],
    "tools, then a question": [user("1+2?"), CALL, RESULT, answer("It is 3."), user("Sure?"), answer("Yes.")],
    "thinking": [user("1+2?"), answer("3", reasoning_content="One and two."),
                 user("Sure?"), answer("Yes.", reasoning_content="I counted.")],
    "an empty turn": [user("Hi"), answer(""), user("Hm?"), answer("Hello!")],
    "an empty last turn": [user("Hi"), answer("")],
}
TEMPLATES = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
NAMES = sorted(path.stem.removesuffix("_training") for path in TEMPLATES.glob("*_training.jinja"))
OTHERS = ("deepseek", "diffusion", "glm4", "idefics", "llava", "smolvlm")
"""Their training templates write other texts than the ones of the models, or mark no turns of text."""


@cache
def _with_template(name):
    """Return a tokenizer with a template of a model, as TRL ships it, and a token for each of its markers."""
    template = (TEMPLATES / f"{name}.jinja").read_text()
    markers = re.findall(r"<\|[^|<>'\"]+\|>|<(?:start|end)_of_turn>|</s>|<SPECIAL_\d+>|\[/?INST\]", template)
    return byte_tokenizer(tuple(sorted({*markers, "<bos>", "<eos>"})), template)


def _tokenized(tmp_path, row, tokenizer, keys=SEQUENCE, **settings):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return TokenizedRows(DatasetConfig(str(path), **settings), keys=keys, tokenizer=tokenizer)


def _learned(tokenizer, ids, mask):
    """Return the texts of the learned ranges of tokens."""
    texts = [[]]
    for token, is_learned in zip(ids, mask, strict=True):
        texts[-1].append(token) if is_learned else texts.append([])
    return [tokenizer.decode(ids) for ids in texts if ids]


def _of_trl(tokenizer, row, *, assistant_only):
    """Return the tokens of a row and which of them TRL's supervised trainer learns."""
    from datasets import Dataset
    from trl import SFTTrainer

    trainer = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=None, completion_only_loss="completion" in row)
    args = SimpleNamespace(
        dataset_num_proc=None, dataset_text_field="text", assistant_only_loss=assistant_only, max_length=None,
        shuffle_dataset=False)
    made = SFTTrainer._prepare_dataset(
        trainer, Dataset.from_list([row]), tokenizer, args, False, None, "train")[0]
    return made["input_ids"], [int(label != -100) for label in made["labels"]]


def _pair_of_trl(tokenizer, row):
    """Return the tokens of the prompt, and those that TRL's DPO trainer learns of chosen and rejected."""
    from datasets import Dataset
    from trl import DPOTrainer

    trainer = SimpleNamespace(_tokenizer=tokenizer)
    args = SimpleNamespace(dataset_num_proc=None, max_length=None)
    made = DPOTrainer._prepare_dataset(trainer, Dataset.from_list([row]), tokenizer, args, "train")[0]
    return made["prompt_ids"], made["chosen_ids"], made["rejected_ids"]


SKY = [user("What color is the sky?")]
ROWS = {
    "text": {"prompt": "The sky is", "completion": " blue."},
    "text that ends": {"prompt": "The sky is", "completion": " blue.<eos>"},
    "messages": {"messages": [*SKY, answer("It is blue.")]},
    "prompt and completion": {"prompt": SKY, "completion": [answer("It is blue.")]},
    "several turns": {"prompt": SKY, "completion": [answer("Blue."), user("Always?"), answer("No.")]},
    "earlier turns": {"prompt": [SYSTEM, *CHATS["several turns"][:-1]], "completion": [answer("No.")]},
    "whole": {"messages": [SYSTEM, *CHATS["several turns"]]},
    "tools": {"messages": CHATS["tools, then a question"]},
}


@pytest.mark.parametrize("assistant_only", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_learned_tokens_are_those_of_trl(tmp_path, name, assistant_only):
    """The template marks the assistant's turns, as TRL needs it."""
    row = ROWS[name]
    tokenizer = load_tokenizer(_with_template("qwen3_training"))
    light = LightTokenizer(_with_template("qwen3_training"))
    is_text = "text" in name
    ids, mask = _of_trl(tokenizer, row, assistant_only=assistant_only and not is_text)
    assert 1 in mask and (0 in mask or (not assistant_only and "messages" in row))
    for ours in (tokenizer, light):
        made = _tokenized(tmp_path, row, ours, assistant_only=assistant_only).rows[0]
        assert made["sequence_ids"] == ids
        assert made["response_mask"][1:] == mask[1:]  # Nothing precedes the first token.


@pytest.mark.parametrize("name", drawn((name for name in NAMES if not name.startswith(OTHERS)), 8))
def test_turns_without_markers_are_those_of_templates_with_markers(tmp_path, name):
    """TRL ships templates of models, and the same ones with {% generation %}.

    Its markers may include the header of a turn, which we leave out, as it is in the generation prompt.
    """
    tokenizer = LightTokenizer(_with_template(name))
    marked = load_tokenizer(_with_template(f"{name}_training"))
    num_compared = 0
    for messages in CHATS.values():
        try:
            theirs = marked.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True)
            same = marked.apply_chat_template(messages, tokenize=False) == render_chat(tokenizer, messages)[0]
            prompt, _ = render_chat(tokenizer, [user("Hi")], add_generation_prompt=True)
        except Exception:  # The template refuses these messages.
            continue
        if not same:  # The training template keeps reasoning that the model's own leaves out.
            continue
        made = _tokenized(tmp_path, {"messages": messages}, tokenizer).rows[0]
        ours = _learned(tokenizer, made["sequence_ids"], made["response_mask"])
        expected = _learned(marked, theirs["input_ids"], theirs["assistant_masks"])
        assert len(ours) == len(expected)
        for our_turn, turn in zip(ours, expected, strict=True):
            assert turn.endswith(our_turn) and turn.removesuffix(our_turn) in prompt
        num_compared += 1
    assert num_compared >= 3


@pytest.mark.parametrize("template", ["qwen3", "qwen3_training"])
def test_messages_have_weights(tmp_path, template):
    """The mask is that of the same row without weights, times the weight of each answer."""
    tokenizer = LightTokenizer(_with_template(template))
    plain = [*SKY, answer("Blue."), user("Sure?"), answer("Yes."), user("?"), answer("No.")]
    more = ({"weight": 0}, {"weight": 0.5}, {"train": False})
    weights = iter(more)
    weighted = [{**m, **(next(weights) if m["role"] == "assistant" else {})} for m in plain]
    first, second = (_tokenized(tmp_path, {"messages": chat}, tokenizer) for chat in (plain, weighted))
    ours, before = second.rows[0], first.rows[0]
    assert ours["sequence_ids"] == before["sequence_ids"]
    turns = [0]
    for earlier, is_learned in zip([0, *before["response_mask"][:-1]], before["response_mask"], strict=True):
        turns.append(turns[-1] + (is_learned and not earlier))
    expected = [m * (0, 0, 0.5, 0)[turn] for m, turn in zip(before["response_mask"], turns[1:], strict=True)]
    assert ours["response_mask"] == expected and sum(expected) > 0
    assert not second.oddities.unread
    others = _tokenized(tmp_path, {"messages": weighted}, tokenizer, assistant_only=False)
    assert set(others.oddities.unread) == {"weight", "train"}


@pytest.mark.parametrize("more, sentence", [
    ({"weight": 0}, "all answers in messages have the weight 0, so that nothing would be learned"),
    ({"weight": -1}, "completion has a message whose weight is -1: it must be a number from 0 on"),
    ({"train": 1}, "completion has a message whose train is 1: it must be true or false"),
])
def test_weights_that_are_refused(tmp_path, more, sentence):
    with pytest.raises(UserError, match=sentence):
        _tokenized(tmp_path, {"messages": [*SKY, answer("Blue.", **more)]}, _with_light())


def _with_light():
    return LightTokenizer(_with_template("qwen3"))


def test_answers_that_the_template_rewrites_when_messages_follow(tmp_path):
    """Qwen3's template leaves out reasoning of earlier turns: the whole text tells what is learned."""
    tokenizer = LightTokenizer(_with_template("qwen3"))
    rows = _tokenized(tmp_path, {"messages": CHATS["thinking"]}, tokenizer)
    assert _learned(tokenizer, rows.rows[0]["sequence_ids"], rows.rows[0]["response_mask"]) == [
        "3<|im_end|>\n", "<think>\nI counted.\n</think>\n\nYes.<|im_end|>\n"]
    assert rows.oddities.num_rewritten == 1


def test_a_template_whose_turns_cannot_be_told(tmp_path):
    """Plain text without special tokens, in which earlier answers are written in another way."""
    template = (
        "{% for m in messages %}{{ m.role }}: "
        "{{ m.content | upper if m.role == 'assistant' and not loop.last else m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}")
    tokenizer = LightTokenizer(byte_tokenizer(("<eos>",), template))
    row = {"messages": [user("Hi"), answer("a"), user("b"), answer("c")]}
    with pytest.raises(UserError, match=r"line 1: .* mark them in the template with {% gener"):
        _tokenized(tmp_path, row, tokenizer)
    made = _tokenized(tmp_path, row, tokenizer, assistant_only=False).rows[0]
    assert sum(made["response_mask"]) == len(made["sequence_ids"]) - 1
    made = _tokenized(tmp_path, {"messages": row["messages"][:2]}, tokenizer).rows[0]
    assert _learned(tokenizer, made["sequence_ids"], made["response_mask"]) == ["a\n"]


BLUE = [*SKY, answer("It is blue.")]
GREEN = [*SKY, answer("It is green.")]
LONG = [SYSTEM, *SKY, answer("Guess."), user("Well.")]
PAIRS = {
    "explicit": {"prompt": SKY, "chosen": BLUE[1:], "rejected": GREEN[1:]},
    "implicit": {"chosen": BLUE, "rejected": GREEN},
    "implicit, several turns": {"chosen": [*LONG, answer("Blue.")], "rejected": [*LONG, answer("Red.")]},
    "tools": {"prompt": SKY, "chosen": [CALL, RESULT, answer("Blue.")], "rejected": [answer("Red.")]},
    "text": {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."},
    "implicit text": {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    "implicit text within a word": {"chosen": "The sky is blue.", "rejected": "The sky is black."},
}


@pytest.mark.parametrize("name", PAIRS)
def test_pairs_are_those_of_trl(tmp_path, name):
    tokenizer = load_tokenizer(_with_template("qwen3_training"))
    prompt, chosen, rejected = _pair_of_trl(tokenizer, PAIRS[name])
    for ours in (tokenizer, LightTokenizer(_with_template("qwen3_training"))):
        samples = _tokenized(tmp_path, PAIRS[name], ours, PAIR, assistant_only=False).samples[0]
        for sample, completion in zip(samples, (chosen, rejected), strict=True):
            assert sample["sequence_ids"] == [*prompt, *completion]
            assert sample["response_mask"] == [0] * len(prompt) + [1] * len(completion)


@pytest.mark.parametrize("prompt", [None, "What color is the sky?", SKY])
def test_whole_conversations_of_pairs_with_and_without_a_prompt(tmp_path, prompt):
    """TRL repeats the question if the prompt is a list; here it is the prompt once, in every form."""
    tokenizer = LightTokenizer(_with_template("qwen3_training"))
    row = {"chosen": BLUE, "rejected": GREEN} | ({} if prompt is None else {"prompt": prompt})
    samples = _tokenized(tmp_path, row, tokenizer, PAIR).samples[0]
    expected = _tokenized(tmp_path, PAIRS["explicit"], tokenizer, PAIR).samples[0]
    assert [{**s, "prompt": 0} for s in samples] == [{**s, "prompt": 0} for s in expected]
    assert samples[0]["prompt"] == SKY


def test_tool_results_of_pairs_are_not_learned(tmp_path):
    tokenizer = LightTokenizer(_with_template("qwen3_training"))
    chosen, _ = _tokenized(tmp_path, PAIRS["tools"], tokenizer, PAIR).samples[0]
    texts = _learned(tokenizer, chosen["sequence_ids"], chosen["response_mask"])
    assert len(texts) == 2 and "tool_response" not in "".join(texts)
    assert texts[1].endswith("Blue.<|im_end|>\n")


def test_completions_that_repeat_the_prompt(tmp_path):
    tokenizer = LightTokenizer(_with_template("qwen2_5"))
    whole = _tokenized(tmp_path, {"prompt": SKY, "completion": BLUE}, tokenizer).rows[0]
    assert whole == _tokenized(tmp_path, {"prompt": SKY, "completion": BLUE[1:]}, tokenizer).rows[0]


OPEN = [user("Count."), answer("1 2")]


@pytest.mark.parametrize("name", ["qwen2_5", "llama3", "gemma"])
def test_a_prompt_that_ends_with_an_answer_is_continued(tmp_path, name):
    """As in TRL's `apply_chat_template`, which its trainers of reinforcement learning use."""
    theirs = load_tokenizer(_with_template(name))
    before = theirs.apply_chat_template(OPEN, tokenize=False, continue_final_message=True)
    whole = theirs.apply_chat_template([OPEN[0], answer("1 2 3 4")], tokenize=False)
    for tokenizer in (theirs, LightTokenizer(_with_template(name))):
        (prompt,) = _tokenized(tmp_path, {"prompt": OPEN}, tokenizer, ("prompt_ids",)).rows
        assert theirs.decode(prompt["prompt_ids"]) == before and before.endswith("1 2")
        for completion in (" 3 4", [answer(" 3 4")]):
            made = _tokenized(tmp_path, {"prompt": OPEN, "completion": completion}, tokenizer).rows[0]
            assert theirs.decode(made["sequence_ids"]) == whole
            (learned,) = _learned(theirs, made["sequence_ids"], made["response_mask"])
            assert before + learned == whole
        row = {"prompt": OPEN, "chosen": [answer(" 3 4")], "rejected": [answer(" 4")]}
        chosen, rejected = _tokenized(tmp_path, row, tokenizer, PAIR).samples[0]
        assert theirs.decode(chosen["sequence_ids"]) == whole
        assert theirs.decode(rejected["sequence_ids"]) == whole.replace("3 ", "")
        assert rejected["prompt_ids"] == prompt["prompt_ids"]
    # An answer that a question follows is complete.
    row = {"prompt": OPEN, "completion": [user("On."), answer("3")]}
    made = _tokenized(tmp_path, row, theirs).rows[0]
    chat = theirs.apply_chat_template([*OPEN, user("On."), answer("3")], tokenize=False)
    assert theirs.decode(made["sequence_ids"]) == chat
    (learned,) = _learned(theirs, made["sequence_ids"], made["response_mask"])
    assert learned.startswith("3<") and chat.endswith(learned)


def test_prompts_that_cannot_be_continued_and_rows_that_teach_nothing(tmp_path):
    tokenizer = LightTokenizer(_with_template("qwen2_5"))
    call = {"role": "assistant", "tool_calls": CALL["tool_calls"]}
    for row, keys, sentence in [
        ({"prompt": [user("1+2?"), call]}, ("prompt_ids",), "prompt ends with an assistant's message that"),
        ({"messages": [SYSTEM, user("Hi")]}, SEQUENCE, "messages has no message with the role assistant"),
        ({"prompt": SKY, "completion": [user("?")]}, SEQUENCE, "completion has no message with the role as"),
        ({"messages": [answer("Hi")]}, SEQUENCE, "messages has nothing before its only answer"),
        ({"messages": [{"from": "human", "value": "Hi"}]}, SEQUENCE, "messages has no message with the role"),
        ({"messages": [{"from": "human", "text": "Hi"}]}, SEQUENCE, "messages has .*rename `from` to role"),
        ({"body": "Hi"}, SEQUENCE, "there is no column 'prompt'; .*; prompt_key and messages_key and"),
        ({"chosen": [answer("a")], "rejected": [answer("b")]}, PAIR, "there is no column 'prompt'"),
        ({"chosen": [user("a"), answer("1")], "rejected": [user("b"), answer("2")]}, PAIR,
         "chosen and rejected are conversations that begin with different messages of user and user: both"),
        ({"chosen": [SYSTEM, user("a"), answer("1")], "rejected": [SYSTEM, user("b"), answer("2")]}, PAIR,
         "chosen and rejected are conversations that go on with different messages"),
        ({"prompt": SKY, "chosen": [*SKY, answer("1")], "rejected": [answer("2")]}, PAIR,
         "chosen and rejected are conversations that go on with different messages of .* and assistant"),
        ({"chosen": "Q: a A: b", "rejected": "What is a? b"}, PAIR,
         "chosen and rejected are texts with different beginnings, .* give it in a column 'prompt'"),
    ]:
        with pytest.raises(UserError, match=f"line 1: {sentence}"):
            _tokenized(tmp_path, row, tokenizer, keys)
    row = {"prompt": [user("1+2?"), call], "completion": [RESULT, answer("3")]}
    made = _tokenized(tmp_path, row, tokenizer).rows[0]
    assert _learned(tokenizer, made["sequence_ids"], made["response_mask"]) == ["3<|im_end|>\n"]


def test_messages_that_are_json_text(tmp_path):
    tokenizer = LightTokenizer(_with_template("qwen3"))
    plain = {"prompt": SKY, "completion": BLUE[1:], "tools": TOOLS}
    written = {key: json.dumps(value) for key, value in plain.items()}
    made = [_tokenized(tmp_path, row, tokenizer, tools_key="tools").rows[0] for row in (plain, written)]
    assert made[0] == made[1] and made[1]["prompt"] == SKY
    made = [_tokenized(tmp_path, {"messages": m}, tokenizer).rows[0] for m in (BLUE, json.dumps(BLUE))]
    assert made[0] == made[1]
    for text in (str(SKY), json.dumps(SKY[0])):  # As Python shows a list, and a single message.
        made = _tokenized(tmp_path, {"prompt": text}, tokenizer, ("prompt_ids", "prompt")).rows[0]
        assert made["prompt"] == SKY
    text = "[1, 2] + [3] is"  # A text that only begins like JSON.
    made = _tokenized(tmp_path, {"prompt": text}, tokenizer, ("prompt_ids", "prompt"))
    assert made.rows[0]["prompt"] == text


def test_parquet_has_the_messages_and_schemas_of_jsonl(tmp_path):
    """Arrow gives every struct the keys of all others, with nulls."""
    other = {"type": "function", "function": {"name": "now", "parameters": {
        "type": "object", "properties": {"zone": {"type": "string", "enum": ["a"]}}, "required": ["zone"]}}}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {"zone": "a"}}}]}
    rows = [
        {"messages": CHATS["tools"], "tools": TOOLS},
        {"messages": [user("Now?"), call, RESULT, answer("Four.", thinking="Hm.")], "tools": [other, *TOOLS]},
        {"messages": BLUE, "tools": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "null" in json.dumps(pyarrow.parquet.read_table(tmp_path / "rows.parquet").to_pylist()[0])
    for template in ("qwen3", "llama3_1"):
        tokenizer = LightTokenizer(_with_template(template))
        made = [
            TokenizedRows(
                DatasetConfig(str(tmp_path / f"rows.{suffix}"), tools_key="tools"), keys=SEQUENCE,
                tokenizer=tokenizer).rows
            for suffix in ("jsonl", "parquet")]
        assert made[0] == made[1] and "null" not in tokenizer.decode(made[1][0]["sequence_ids"])
    loaded = load_rows(DatasetConfig(str(tmp_path / "rows.parquet")), SEQUENCE)
    assert [row["messages"] for row in loaded] == [row["messages"] for row in rows]
    kept = {"prompt": [user("1+2?")], "completion": [answer(None, tool_calls=[
        {"function": {"name": "add", "arguments": {"a": None}}}])]}
    assert '"a": null' in LightTokenizer(_with_template("qwen3")).decode(  # It is the row's own.
        _tokenized(tmp_path, kept, LightTokenizer(_with_template("qwen3"))).rows[0]["sequence_ids"])


@pytest.mark.parametrize("prompt, completion, is_torn", [
    ("The sky is", " blue.", False), ("1+1=", "2", False), ("The sky is ", "blue.", True),
    ("The sky is bl", "ue.", True), ("one\n", "two", False),
])
@pytest.mark.parametrize("make", [llama_tokenizer, lambda: byte_tokenizer(("<eos>",), None, merges=True)])
def test_the_text_of_a_row_and_nothing_else_is_learned(tmp_path, make, prompt, completion, is_torn):
    """The learned tokens follow the prompt as it is read when answers are drawn, and add the completion."""
    directory = make()
    theirs = load_tokenizer(directory)
    for tokenizer in (theirs, LightTokenizer(directory)):
        rows = _tokenized(tmp_path, {"prompt": prompt, "completion": completion}, tokenizer)
        made = rows.rows[0]
        before = [t for t, mask in zip(made["sequence_ids"], made["response_mask"], strict=True) if not mask]
        learned = made["sequence_ids"][len(before) :]
        assert before == made["prompt_ids"] == theirs.encode(prompt)
        assert learned[-1] == theirs.eos_token_id and theirs.eos_token_id not in learned[:-1]
        text = theirs.decode(made["sequence_ids"][:-1], skip_special_tokens=True)
        assert text == prompt + completion
        assert rows.oddities.num_torn == is_torn
        if not is_torn:
            ids, mask = _of_trl(theirs, {"prompt": prompt, "completion": completion}, assistant_only=False)
            assert (ids, mask[1:]) == (made["sequence_ids"], made["response_mask"][1:])


def test_special_tokens_are_not_repeated(tmp_path):
    """A text that a template has written begins with bos and ends with eos already."""
    tokenizer = LightTokenizer(llama_tokenizer())
    plain = _tokenized(tmp_path, {"prompt": "1+1=", "completion": "2"}, tokenizer).rows[0]
    written = _tokenized(tmp_path, {"prompt": "<s>1+1=", "completion": "2</s>"}, tokenizer).rows[0]
    assert written["sequence_ids"] == plain["sequence_ids"]
    assert plain["sequence_ids"].count(tokenizer.encode("")[0]) == 1
    closed = LightTokenizer(llama_tokenizer(closes=True))  # It ends every text with eos.
    assert closed.encode("1+1=")[-1] == closed.eos_token_id
    made = _tokenized(tmp_path, {"prompt": "1+1=", "completion": "2"}, closed).rows[0]
    assert made["prompt_ids"] == plain["prompt_ids"] and made["sequence_ids"] == plain["sequence_ids"]


@pytest.mark.parametrize("template, is_quoted", [("qwen2_5", True), ("qwen3", False)])
def test_messages_that_are_read_otherwise(tmp_path, template, is_quoted):
    """Qwen2.5's template writes text of arguments as a JSON string, and Qwen3's as it is."""
    tokenizer = LightTokenizer(_with_template(template))
    call = answer("", tool_calls=[{"type": "function", "function": {
        "name": "add", "arguments": json.dumps({"a": 1})}}])
    for row, keys in (({"messages": [*SKY, call, RESULT, answer("3")]}, SEQUENCE),
                      ({"prompt": [*SKY, call, RESULT]}, ("prompt_ids",)),
                      ({"prompt": SKY, "chosen": [call], "rejected": [answer("3")]}, PAIR)):
        rows = _tokenized(tmp_path, row, tokenizer, keys)
        assert (rows.oddities.num_quoted, rows.oddities.num_special) == (int(is_quoted), 0)
    for text, is_special in (("a<|im_end|>", 1), ("<b>", 0), ("a <think> b", 0)):
        row = {"prompt": [user("Hi"), answer(text), user("?")]}
        rows = _tokenized(tmp_path, row, tokenizer, ("prompt_ids",))
        assert rows.oddities.num_special == is_special


@pytest.mark.parametrize("template, row, count", [
    ("qwen3", {"prompt": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, 1),
    ("qwen3", {"prompt": [user(" Hi\n")]}, 0),  # White space may go.
    ("qwen3", {"prompt": [user("Hi"), answer("<think>Hm.</think>Yes."), user("?")]}, 0),
    ("phi3", {"prompt": [user("1+2?"), answer("add"), RESULT]}, 1),  # It has no results of tools.
    ("llama3_1", {"prompt": [user("1+2?"), CALL, RESULT | {"content": 'a "b"'}]}, 0),  # It writes JSON.
    ("qwen3", {"messages": [user("Hi"), {"role": "narrator", "content": "He smiles."}, answer("Yes.")]}, 1),
])
def test_what_a_template_leaves_out(tmp_path, template, row, count):
    tokenizer = LightTokenizer(_with_template(template))
    keys = SEQUENCE if "messages" in row else ("prompt_ids",)
    assert _tokenized(tmp_path, row, tokenizer, keys).oddities.num_left_out == count


def test_limits_of_whole_conversations(tmp_path):
    """The prompt of a whole conversation is what comes before its last answer."""
    tokenizer = LightTokenizer(_with_template("qwen2_5"))
    row = {"messages": [SYSTEM, *CHATS["several turns"]]}
    whole = _tokenized(tmp_path, row, tokenizer).rows[0]
    cut = _tokenized(tmp_path, row, tokenizer, max_prompt_tokens=60, too_long="keep_end").rows[0]
    assert cut["sequence_ids"] == whole["sequence_ids"][-len(cut["sequence_ids"]) :]
    assert cut["response_mask"] == whole["response_mask"][-len(cut["sequence_ids"]) :]
    assert len(cut["prompt_ids"]) == 60 and cut["prompt"] == row["messages"][:-1]
    assert _learned(tokenizer, cut["sequence_ids"], cut["response_mask"])[-1] == "No.<|im_end|>\n"


SHAREGPT = [{"from": "system", "value": "Be brief."}, {"from": "user", "value": "Hi"},
            {"from": "assistant", "value": "Hello!"}, {"from": "user", "value": "Bye"},
            {"from": "assistant", "value": "Goodbye!"}]


@pytest.mark.parametrize("column", ["conversations", "messages"])
@pytest.mark.parametrize("name", NAMES[:3])
def test_messages_with_from_and_value_are_those_of_trl(name, column, tmp_path):
    from trl import maybe_convert_to_chatml

    tokenizer = LightTokenizer(_with_template(name))
    theirs = maybe_convert_to_chatml({column: [dict(message) for message in SHAREGPT]})
    made = [_tokenized(tmp_path, row, tokenizer).rows[0] for row in ({column: SHAREGPT}, theirs)]
    assert made[0] == made[1] and any(made[0]["response_mask"])
    others = {"user": "human", "assistant": "gpt"}
    human = [{"from": others.get(m["from"], m["from"]), "value": m["value"]} for m in SHAREGPT]
    for given in (human, json.dumps(human)):
        assert _tokenized(tmp_path, {column: given}, tokenizer).rows[0] == made[0]


@pytest.mark.parametrize("columns", [("prompt", "completion"), ("prompt", "chosen", "rejected")])
def test_prompts_and_completions_with_from_and_value(columns, tmp_path):
    from trl import maybe_convert_to_chatml

    tokenizer = LightTokenizer(_with_template("qwen3"))
    row = {"prompt": SHAREGPT[:2]} | {
        column: [{"from": "assistant", "value": column}] for column in columns[1:]}
    keys = PAIR if len(columns) > 2 else SEQUENCE
    made = _tokenized(tmp_path, row, tokenizer, keys).rows
    theirs = maybe_convert_to_chatml(json.loads(json.dumps(row)))
    assert [*made] == [*_tokenized(tmp_path, theirs, tokenizer, keys).rows]


@pytest.mark.parametrize("kind", ["llama", "chat"])
def test_whole_texts_are_learned_as_trl_does(kind, tmp_path):
    """TRL ends a text with the eos token, encodes it with special tokens, and learns all of it."""
    directory = llama_tokenizer() if kind == "llama" else _with_template("qwen3")
    tokenizer = LightTokenizer(directory)
    theirs = AutoTokenizer.from_pretrained(directory)
    text = "The sky is blue.\nSo is the sea."
    ids = theirs(text + theirs.eos_token)["input_ids"]
    settings = [{}] if kind == "llama" else [{}, {"chat": True}, {"system_prompt": "Be brief."}]
    for column, more in [("text", one) for one in settings] + [("body", {"text_key": "body"})]:
        made = _tokenized(tmp_path, {column: text}, tokenizer, SEQUENCE[2:], **more).rows[0]
        assert made["sequence_ids"] == ids
        assert made["response_mask"] == [0, *[1] * (len(ids) - 1)]  # Nothing comes before the first token.


@pytest.mark.parametrize("end", [0, 1])
def test_prompts_of_whole_conversations_without_a_learned_answer(end, tmp_path):
    """The prompt goes up to the user's last message, whether an answer or calls of tools follow it."""
    tokenizer = LightTokenizer(_with_template("qwen3"))
    keys = ("prompt_ids", "prompt")
    for chat in (CHATS["several turns"], CHATS["tools"], CHATS["system"]):
        last = max(i for i, message in enumerate(chat) if message["role"] == "user")
        rows = _tokenized(tmp_path, {"messages": chat if end else chat[: last + 1]}, tokenizer, keys)
        plain = _tokenized(tmp_path, {"prompt": chat[: last + 1]}, tokenizer, keys)
        assert rows.rows[0]["prompt_ids"] == plain.rows[0]["prompt_ids"]
        assert rows.oddities.num_questions == 1 and plain.oddities.num_questions == 0
