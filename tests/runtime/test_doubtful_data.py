"""What `realhf check` says of rows, settings of chats and models that are legal but seldom meant."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from realhf.cli.main import main
from tests.tokenizers import byte_tokenizer

MARKS = ("<|im_start|>", "<|im_end|>", "<bos>", "<eos>")
BEGIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = BEGIN + ASKS
HEAD = """from realhf import *
def size(completions, **_): return [float(len(str(c))) for c in completions]
def data(**more): return DatasetConfig("rows.jsonl", **{"chat": True, **more})
few = SamplingConfig(max_new_tokens=4)
"""
SFT = HEAD + (
    'experiment = SFT(actor=Role("m", optimizer=OptimizerConfig()), dataset=data(%s), batch_size=2, steps=1)')
GRPO = HEAD + (
    'experiment = GRPO(actor=Role("m", optimizer=OptimizerConfig()), dataset=data(%s), steps=1, '
    "reward_function=size, sampling=few, batch_size=2)")
SCORED = HEAD + (
    'experiment = GRPO(actor=Role("m", optimizer=OptimizerConfig()), dataset=data(), steps=1, '
    'reward=Role("reward", head="score"), sampling=few, batch_size=2)')
ANSWERED = HEAD + (
    "def right(completions, answer, **_): return [float(str(c) == a) for c, a in zip(completions, answer)]\n"
    'experiment = GRPO(actor=Role("m", optimizer=OptimizerConfig()), dataset=data(%s), steps=1, '
    "reward_function=right, sampling=few, batch_size=2)")
HELD_OUT = HEAD + (
    'experiment = GRPO(actor=Role("m", optimizer=OptimizerConfig()), dataset=data(system_prompt="Hm."), '
    'reward_function=size, sampling=few, batch_size=2, steps=1, '
    'eval_dataset=DatasetConfig("held_out.jsonl"%s))')


def chat(*pairs):
    return [{"role": role, "content": text} for role, text in pairs]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Return a directory with a tiny model."""
    directory = tmp_path_factory.mktemp("models") / "m"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=512, eos_token_id=259, tie_word_embeddings=True)
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def check(models, tmp_path, monkeypatch, capsys):
    """Return a function that checks an experiment on rows, and returns the exit code and the messages."""
    monkeypatch.chdir(tmp_path)

    def check(code, rows, *, template=CHATML, held_out=(), prepare=lambda: None):
        for name in ("m", "reward"):
            shutil.rmtree(name, ignore_errors=True)
            shutil.copytree(models, name)
            shutil.copytree(byte_tokenizer(MARKS, template), name, dirs_exist_ok=True)
        for name, values in (("rows", rows), ("held_out", held_out)):
            lines = [value if isinstance(value, str) else json.dumps(value) for value in values]
            (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
        prepare()
        (tmp_path / "e.py").write_text(code)
        status = main(["check", "e.py"])
        return status, capsys.readouterr().err

    return check


def _rows(prompt="What is {}+1?", completion="It is {}."):
    return [{"prompt": prompt.format(i), "completion": completion.format(i)} for i in range(4)]


@pytest.mark.parametrize("row, says", [
    ({"prompt": "What is 1+1?", "completion": "2.</s>"}, "texts have </s>, which is no token of this"),
    ({"prompt": "[INST] 1+1? [/INST]", "completion": "2"}, "texts have [INST], which is no token of this"),
    ({"prompt": "Caf\ufffd", "completion": "2"}, "texts have U+FFFD"),
    ({"prompt": "Café?".encode().decode("latin-1"), "completion": "2"}, "read in another encoding"),
    ({"prompt": "Why?", "completion": "It’s 2".encode().decode("cp1252")}, "read in another encoding"),
    ({"prompt": "\ufeffWhy?", "completion": "2"}, "begin with a byte order mark"),
    ({"prompt": "Add:\\n1+1", "completion": "2"}, "a backslash and an n instead of line breaks"),
    ({"prompt": "What is 1+1?", "completion": " "}, "completions are empty"),
    ({"prompt": chat(("human", "Hi")), "completion": "2"}, "messages have the role 'human'"),
    ({"prompt": chat(("User", "Hi")), "completion": "2"}, "messages have the role 'User'"),
    ({"prompt": chat(("user", " ")), "completion": "2"}, "prompts are empty"),
    ({"prompt": chat(("system", "Hi")), "completion": "2"}, "chats have no message but the system's"),
])
def test_texts_that_are_seldom_meant(check, row, says):
    status, messages = check(SFT % "", [*_rows(), row])
    assert status == 0
    found = [line for line in messages.splitlines() if says in line]
    assert len(found) == 1 and "dataset: in 1 rows, first in line 5, " in found[0]


def test_completions_that_repeat_their_prompts(check):
    """One answer may do so, as a completed program does."""
    says = "completions begin with the whole prompt"
    assert f"in 4 rows, first in line 1, {says}" in check(SFT % "", _rows(completion="What is {}+1? 2"))[1]
    assert check(SFT % "", [*_rows(), {"prompt": "def f(x):", "completion": "def f(x): return x"}]) == (0, "")


QUESTIONS = [f"{'Mia' if i % 2 else 'Otto'} has {i + 3} shells. How many are left?" for i in range(24)]
SENTENCES = [f"First I count what there was, then I take {i} away, so {i + 3} are left." for i in range(24)]


def _asked(*values, key="completion", prompts=QUESTIONS, **columns):
    """Return rows with these values, each with a question and the same other columns."""
    return [{"prompt": prompt, key: value, **columns} for prompt, value in zip(prompts, values, strict=False)]


def _say(texts):
    return [chat(("assistant", text)) for text in texts]


HUMAN = [f"User: {question}" for question in QUESTIONS]
CUT = [f"First {'abcdef'[: i % 6]} counts what is here, then there, and nothing is lost" for i in range(24)]


@pytest.mark.parametrize("code, rows, says", [
    (SFT, _asked(*(f"It&#39;s {i} &lt; {i + 1}." for i in range(8))), "texts have HTML's &quot;"),
    (SFT, _asked(*(f"Tom &amp;amp; Mia: {i}" for i in range(8))), "texts have HTML's &quot;"),
    (SFT, _asked(*(f"It%20is%20{i}." for i in range(8))), "texts have %20 instead of spaces"),
    (SFT, _asked(*("Voil\\u00e0, that\\u2019s it." for i in range(8))), "texts have escapes such as"),
    (SFT, _asked(*(f"That\\'s {i}." for i in range(8))), "texts have escapes such as"),
    (SFT, _asked(*(["nan"] * 2 + SENTENCES)), "completion 'nan' seems to stand for a value that is missing"),
    (SFT, _asked(*(["None"] * 2 + SENTENCES)), "completion 'None' seems to stand for a value"),
    (ANSWERED, _asked("4", "nan", "<NA>", "NaN", "nan", key="answer"), "answer 'nan' seems to stand for"),
    (ANSWERED, _asked("4\u200b", key="answer") * 2, "there is U+200B (zero width space) in 'answer'"),
    (ANSWERED, _asked("4\u00a0", key="answer") * 2, "there is U+00A0 (no-break space) in 'answer'"),
    (ANSWERED, _asked("1\u00ad2", key="answer") * 2, "there is U+00AD (soft hyphen) in 'answer'"),
    (SFT, _asked(*(f"{text}\u200b" for text in SENTENCES)), "texts begin or end with U+200B (zero width"),
    (SFT, _asked(*(f"\u2060{text}" for text in SENTENCES)), "texts begin or end with U+2060 (word joiner)"),
    (SFT, _asked(*((text * 3)[:120] for text in CUT)), "completions have exactly 120 characters, end within"),
    (SFT, _asked(*(f"{(text * 2)[:97]}..." for text in CUT)), "completions have exactly 100 characters"),
    (SFT, [{"prompt": "prompt", "completion": "Completion"}, *_rows()], "columns have their own names"),
    (SFT, _asked(*(f"Assistant: {i}" for i in range(8))), "messages begin with a speaker's name"),
    (ANSWERED, _asked("4", "5", key="answer", prompts=HUMAN), "messages begin with a speaker's name"),
    (SFT, _asked(*(f"{i}.\n\nHuman: And now?" for i in range(8))), "completions go on with a turn of the"),
    (ANSWERED, _asked("4", "4", "4", "4", key="answer", prompts=[f"{q}\nAnswer: 4" for q in QUESTIONS]),
     "prompts end with the answer"),
    (SFT, [{"prompt": chat(("user", "1+1?"), ("assistant", "It is 2.")), "completion": "It is  2."}] * 2,
     "prompts end with a message of the assistant that is the whole answer"),
    (SFT, [{"prompt": chat(("user", "1+1?")), "completion": chat(("user", "Hm?"), ("assistant", "2"))}] * 2,
     "prompts end with a message of the user, and completions begin with another"),
    (SFT, _asked("TODO", "TODO", messages=chat(("user", "1+1?"), ("assistant", "2"))),
     "column 'messages' has other answers than 'completion'"),
    (SFT, _asked("A", "B", conversations=[{"from": "human", "value": "1?"}, {"from": "gpt", "value": "2"}]),
     "column 'conversations' has other answers than 'completion'"),
    (SFT, _asked("4", "5", system="Be brief."), "the column 'system' belongs to prompts by its name"),
    (SFT.replace('"chat": True', '"chat": True, "prompt_key": "instruction"'),
     [{"instruction": f"Sum {i}.", "input": "Mia has two.", "completion": "4"} for i in range(8)],
     "the column 'input' belongs to prompts by its name"),
    (SFT, [{"prompt": "Answer.", "story": f"Mia once had {i} shells.", "completion": f"It is {i}."}
           for i in range(10)], "so does the column 'story', which nothing reads"),
    (ANSWERED, _asked("4", "5", key="answer", prompts=["1+1?"] * 2) + _asked("4", "5", "6", key="answer"),
     "1 rows have another answer than an earlier row with the same prompt, first in line 2"),
    (ANSWERED, _asked(*("4.0", "5.0", "6.0") * 8, key="answer"), "'answer' has whole numbers as floats in"),
    (ANSWERED, _asked(4.0, 5.0, 6.0, None, key="answer"), "'answer' has whole numbers as floats beside"),
])
def test_rows_that_are_seldom_meant(check, code, rows, says):
    status, messages = check(code % "", rows)
    assert status == 0 and says in messages


THINKS = [{"messages": [*chat(("user", "1+1?")), {
    "role": "assistant", "content": "2", "reasoning_content": "Two ones."}]}] * 2
TAGGED = [{"messages": chat(("user", "1+1?"), ("assistant", "<think>\nTwo ones.\n</think>\n\n2"))}] * 2
STRIPS = BEGIN.replace("m.content", "m.content.split('</think>')[-1]") + ASKS
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {}}}
LLAMA = CHATML.replace("<|im_end|>", "<|eot_id|>").replace("<|im_start|>", "<|start_header_id|>")
WRITTEN = [{"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "completion": "Yes"}] * 2
PARTS = [{"messages": [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]}, {"role": "assistant", "content": "2"}]}]


def _with_key(key, value):
    """Return rows in which an assistant's first message has one more key."""
    first = {"role": "assistant", "content": "2", key: value}
    return [{"messages": [*chat(("user", "Hi")), first, *chat(("user", "Hm"), ("assistant", "3"))]}] * 2


@pytest.mark.parametrize("setting, template, rows, says", [
    ("", STRIPS, TAGGED, "in 2 rows the chat template does not write the reasoning of the last answer"),
    ("", CHATML, THINKS, "in 2 rows the chat template does not write the reasoning of the last answer"),
    ("", BEGIN.replace("m.content", "m.content|string"), PARTS * 2, "writes the list of a message's parts"),
    ("", WITH_TOOLS, [{"prompt": "Hi", "completion": "2", "tools": [SCHEMA]}] * 2, "'tools' has tools, and"),
    ("", WITH_TOOLS, [{"prompt": "Hi", "completion": "2", "tools": json.dumps([SCHEMA])}] * 2,
     "the column 'tools' has tools, and nothing reads it"),
    ("", CHATML, _with_key("tool_calls", [CALL]), "the key 'tool_calls', which nothing reads"),
    ("", LLAMA, _rows(), "the chat template ends turns with <|eot_id|>, no token of this tokenizer but 10"),
    ('chat_template_kwargs={"thinks": "False"}', CHATML + "{% if thinks %} {% endif %}", _rows(),
     "chat_template_kwargs 'thinks' is the text 'False', which a template takes for true"),
    ("chat=False", CHATML, WRITTEN, "in 2 rows, first in line 1, the prompt is written in the chat template"),
])
def test_templates_that_do_not_suit_rows(check, setting, template, rows, says):
    status, messages = check(SFT % setting, rows, template=template)
    assert status == 0 and says in messages


def test_templates_that_suit_rows(check):
    """Text is learned as it stands; Zephyr's marks are no tokens, and a token ends its turns."""
    keeps = CHATML.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}")
    assert "reasoning" not in check(SFT % "", THINKS, template=keeps)[1]
    assert check(SFT % "", TAGGED) == (0, "")
    zephyr = CHATML.replace("<|im_start|>{{ m.role }}", "<|{{ m.role }}|>")
    zephyr = zephyr.replace("<|im_start|>assistant", "<|assistant|>")
    assert check(SFT % "", _rows(), template=zephyr) == (0, "")
    reads = CHATML + "{{ '' if thinks }}"
    assert check(SFT % 'chat_template_kwargs={"thinks": True}', _rows(), template=reads) == (0, "")
    ended = [{**row, "completion": "Yes<|im_end|>"} for row in WRITTEN]
    assert "form" not in check(SFT % "chat=False", ended)[1]


def _edit(path, **fields):
    with open(path) as file:
        values = json.load(file)
    values |= fields
    with open(path, "w") as file:
        json.dump({key: value for key, value in values.items() if value is not None}, file)


def _put(path, text):
    with open(path, "w") as file:
        file.write(text)


def _split_weights():
    tensors = load_file("m/model.safetensors")
    save_file(tensors, "m/model-00001-of-00001.safetensors")
    files = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    _put("m/model.safetensors.index.json", json.dumps({"weight_map": files}))


def _lowercase():
    _edit("m/tokenizer.json", normalizer={"type": "Lowercase"})


ROPE = {"rope_theta": 1e4, "rope_type": "default"}
ACCENTS = {"type": "Sequence", "normalizers": [{"type": "NFD"}, {"type": "StripAccents"}]}


@pytest.mark.parametrize("code, prepare, says", [
    (SFT, lambda: _edit("m/tokenizer_config.json", chat_template=CHATML), ""),
    (SFT, lambda: _edit("m/tokenizer_config.json", chat_template=CHATML + "Hm"),
     "tokenizer m has a chat template in chat_template.jinja and another in tokenizer_config.json: the fo"),
    (SFT, _split_weights, "actor.model m has its weights in model.safetensors and in the parts that"),
    (SFT, lambda: _edit("m/config.json", rope_tetha=1e6), "reads (did you mean rope_theta?)"),
    (SFT, lambda: _edit("m/generation_config.json", eos_tokn_id=3, eos_token_id=None), "'eos_tokn_id', wh"),
    (SFT, lambda: _edit("m/tokenizer_config.json", chat_templat="x"), "'chat_templat', which nothing reads"),
    (SFT, lambda: _edit("m/tokenizer_config.json", pad_tokn="<pad>"), "'pad_tokn', which nothing reads"),
    (SFT, lambda: _edit("m/config.json", dtype="bfloat16", torch_dtype="float32"),
     'config.json has dtype "bfloat16" and torch_dtype "float32": dtype is read'),
    (SFT, lambda: _edit("m/config.json", dtype="float32", torch_dtype="torch.float32"), ""),
    (SFT, lambda: _edit("m/config.json", rope_theta=1e6, rope_parameters=ROPE),
     "config.json has rope_parameters.rope_theta 10000.0 and rope_theta 1000000.0"),
    (SFT, _lowercase, "the tokenizer's normalizer (in tokenizer.json) removes capital letters:"),
    (SFT, lambda: _edit("m/tokenizer.json", normalizer=ACCENTS), "removes accents:"),
    (SFT, lambda: _edit("m/tokenizer.json", normalizer={"type": "NFC"}), ""),
    (GRPO, lambda: _edit("m/generation_config.json", eos_token_id=[259, 2]),
     "actor.model stops at 2 (eos_token_id), which is '#', an ordinary token"),
])
def test_files_of_models_that_are_seldom_meant(check, code, prepare, says):
    rows = [{"prompt": "Où est-ce?", "completion": "2"}, *_rows()]
    status, messages = check(code % "", rows, prepare=prepare)
    assert status == 0 and (says in messages if says else not messages)


@pytest.mark.parametrize("name, text, key", [
    ("m/config.json", '{"rope_theta": 1.0, "rope_theta": 2.0}', "rope_theta"),
    ("m/tokenizer_config.json", '{"eos_token": "a", "eos_token": "b"}', "eos_token"),
    ("m/generation_config.json", '{"eos_token_id": 1, "eos_token_id": [1, 2]}', "eos_token_id"),
    ("rows.jsonl", json.dumps({"messages": '[{"role": "user", "content": "a", "content": "b"}]'}), "content"),
])
def test_keys_that_occur_twice_in_files_of_models_and_in_columns(check, name, text, key):
    status, messages = check(SFT % "", _rows(), prepare=lambda: _put(name, text))
    assert status == 2 and name in messages and f"has an object that has {key!r} twice: keep one" in messages


def test_a_prompt_that_is_json_is_no_column_of_json(check):
    """It may be what the task is about."""
    assert check(SFT % "", [{"prompt": '{"a": 1, "a": 2}', "completion": "2"}] * 2) == (0, "")


PATTERN = (SFT % "").replace('"rows.jsonl"', '"d/%s"')


@pytest.mark.parametrize("pattern, files, says", [
    ("train-*.jsonl", ["train-00000-of-00002"],
     "1 of the 2 files d/train-*-of-00002 are not there"),
    ("*.jsonl", ["a-00001-of-00003"], "are not there, the first d/a-00000-of-00003"),
    ("train-*.jsonl", ["train-00000-of-00002", "train-00001-of-00002"], ""),
    ("train-00000-of-00002.jsonl", ["train-00000-of-00002"], ""),
    ("train-00000-of-*.jsonl", ["train-00000-of-00002"], ""),
    ("*.jsonl", ["train", "validation"], "(d/train.jsonl) and of held-out ones (d/validation.jsonl)"),
    ("*.jsonl", ["my_test", "my_train"], "(d/my_train.jsonl) and of held-out ones (d/my_test.jsonl)"),
    ("*.jsonl", ["trains", "latest"], ""),
    ("*.jsonl", ["a", "b"], ""),
])
def test_patterns_that_take_too_few_files_or_too_many(check, pattern, files, says):
    def write():
        shutil.rmtree("d", ignore_errors=True)
        for i, file in enumerate(files):
            row = json.dumps({"prompt": f"{i}?", "completion": f"{file}"})
            os.makedirs("d", exist_ok=True)
            _put(f"d/{file}.jsonl", f"{row}\n" * 2)

    status, messages = check(PATTERN % pattern, _rows(), prepare=write)
    assert status == 0 and (says in messages if says else not messages)


MAPPED = HEAD + (
    "def last(row): return {'answer': row['answer'].rpartition('#### ')[2]}\n"
    "def right(completions, answer, **_): return [float(str(c) == a) for c, a in zip(completions, answer)]\n"
    'experiment = GRPO(actor=Role("m", optimizer=OptimizerConfig()), dataset=data(map=last), '
    'reward_function=right, sampling=few, batch_size=2, steps=1, '
    'eval_dataset=DatasetConfig("held_out.jsonl", chat=True%s))')


def test_a_map_function_that_held_out_rows_lack(check):
    rows = _asked("3 #### 1", "4 #### 2", key="answer")
    held_out = _asked("5 #### 3", key="answer", prompts=["And now?"])
    says = "eval_dataset: dataset has a map function, which would also change 'answer' of this set's rows"
    assert says in check(MAPPED % "", rows, held_out=held_out)[1]
    assert check(MAPPED % ", map=last", rows, held_out=held_out) == (0, "")
    done = _asked("3", key="answer", prompts=["And now?"])  # The function has been applied already.
    assert check(MAPPED % "", rows, held_out=done) == (0, "")


def test_held_out_questions_beside_another_system_message(check):
    code = MAPPED.replace("map=last", "") % ""
    rows = [{"prompt": chat(("system", "Be brief."), ("user", q)), "answer": "1"} for q in QUESTIONS]
    says = "eval_dataset: in 1 of 1 rows the user says what one says in dataset, first held_out.jsonl line 1"
    assert says in check(code, rows, held_out=_asked("2", key="answer"))[1]
    same = [{"prompt": chat(("system", f"Sum {i}."), ("user", "Go.")), "answer": "1"} for i in range(4)]
    assert "the user says" not in check(code, same, held_out=_asked("2", key="answer", prompts=["Go."]))[1]


@pytest.mark.parametrize("rows, says", [
    ([{"prompt": "Tell a joke.", "chosen": chat(("user", "1+1?"), ("assistant", "2")),
       "rejected": chat(("user", "1+1?"), ("assistant", "3"))}] * 2, "prompts are others than those with"),
    ([{"prompt": chat(("user", "1+1?")), "chosen": chat(("user", "Hm?"), ("assistant", "2")),
       "rejected": chat(("user", "Hm?"), ("assistant", "3"))}] * 2, "completions begin with another one"),
    ([{"prompt": "1+1?", "chosen": "It is 2.", "rejected": "It  is 2. \n"}] * 2, "differ in white space"),
    ([{"prompt": " 1+1? ", "chosen": chat(("user", "1+1?"), ("assistant", "if x:\n  y")),
       "rejected": chat(("user", "1+1?"), ("assistant", "if x:\n    y"))}] * 2, ""),
])
def test_pairs_that_are_seldom_meant(check, rows, says):
    status, messages = check(PAIRS, rows)
    assert status == 0 and (says in messages if says else not messages)


def test_pairs_of_texts_that_ask_different_questions(check):
    plain = PAIRS.replace("dataset=data()", "dataset=data(chat=False)")
    text = "\n\nHuman: {}\n\nAssistant: {}"
    rows = [{"chosen": text.format("1+1?", "2"), "rejected": text.format("1+2?", "3")}]
    status, messages = check(plain, rows)
    assert status == 2 and "rows.jsonl line 1: chosen and rejected are texts that ask diff" in messages
    longer = text.format("1+1?", "2") + text.format("1+{}?", "3")
    same = [{"chosen": text.format("1+1?", "2"), "rejected": text.format("1+1?", "Assistant: 3")},
            {"chosen": longer.format(2), "rejected": longer.format(3)}]
    assert check(plain, same)[0] == 0


USUAL = [
    'print("Hello.\\nWorld")', 'printf("x=%d.\\n", x);', "s.split('.\\n')", "What does \\n mean?",
    "Use \\n\\n to part paragraphs.", "Split by [.]\\n+ or (\\r\\n|\\n)", "``a.\\nB`` in Markdown",
    '{"a": "One.\\nTwo"}', '"{\\"a\\": \\"One.\\nTwo\\"}"', "C:\\new and D:\\nVidia\\net",
    "\\\\server\\news", "f(x): \\nabla f \\neq 0, \\nu, \\theta", "x. \\nRightarrow y,\\nLeftarrow z",
    "x \\\\ \\nabla y $.\\nB$",
    "Où êtes-vous, Ângela? «Ça va» 5 €. IRMÃ», MAÇÃ\u00a0", "Größe, Fuß „Ja“ – ‚nein‘ …", "Ñandú, ÃO, â€ a",
    "问题：这是什么？答案。", "これは®本です", "<s>old</s> new", "It was <s>old</s>", "<s>gone</s>",
    "What is the difference between <s> and </s>?", "List<s> x = a[INST] + 1",
    "What does &nbsp; do in <p>a&nbsp;b</p>?", "R&D at AT&T, a && b", "50% off, 100%20x",
    "https://a.b/c%20d%20e",
    "r'caf\\u00e9'", "\\u00e9 is an escape", "x\\'", "naan and None", "if x is None: return null", "N/A?",
    "\u0645\u0631\u062d\u0628\u0627\u200f", "\u0645\u06cc\u200c\u062e\u0648",
    "\U0001f469\u200d\U0001f52c",
    "\u3000\u4eca\u65e5\u306f", "12\u202f%", "User: a role in a play. Answer: 4?",
    "The <|endoftext|> token ends a document.", "<b>hi</b> 1 < 2 > 1", "<think>x</think> 2",
]


def test_texts_in_a_fixed_form_are_not_cut(check):
    """They have the same length, and the same end."""
    moves = "Then it moves the disk from the left peg to the right peg, and one more goes to peg {}".format
    rows = _asked(*(moves("ABC"[i % 2]).rjust(90, "O") for i in range(24)))
    assert len(rows[0]["completion"]) == 90 and check(SFT % "", rows) == (0, "")
    assert check(SFT % "", _asked(*(f"{text[:-1]} now" for text in SENTENCES))) == (0, "")


def test_nothing_is_said_of_usual_texts(check):
    """Code, regular expressions, directories, LaTeX, languages, HTML, a quoted prompt, calls of tools."""
    call = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    rows = [
        *({"prompt": text, "completion": f"{text} ok" if i % 8 == 0 else f"No: {text}"}
          for i, text in enumerate(USUAL)),
        *({"prompt": "Hm?", "completion": text} for text in USUAL),
        {"prompt": "Hi", "completion": "Hi there"},
        {"prompt": chat(("system", "Be brief."), ("user", "Hi")), "completion": "<b>Yes</b>"},
    ]
    assert check(SFT % "", rows) == (0, "")
    called = {"role": "assistant", "content": "", "tool_calls": call}
    rows = [{"messages": [*chat(("user", "Hi")), called]}] * 2
    assert "are empty" not in check(SFT % "", rows)[1]
    texts = [{"text": text} for text in USUAL]
    code, said = check((SFT % "").replace('"chat": True, ', '"chat": False, '), texts)
    assert code == 0 and said.count("\n") == 1 and "the tokenizer's eos token is 257" in said


@pytest.mark.parametrize("setting, template, prompt, says", [
    ('chat_template_kwargs={"thinks": False}', CHATML, "Hi", "chat_template_kwargs 'thinks' changes nothing"),
    ('tools=({"name": "f"},)', CHATML, "Hi", "tools changes nothing"),
    ('system_prompt="Hm."', CHATML, chat(("system", "A."), ("user", "B")), "system_prompt is never used"),
    ("", BEGIN, "Hi", "prompts end before '<|im_start|>assistant\\n'"),
    ('too_long="keep_start", max_prompt_tokens=8', CHATML, "Hi, who are you?", "'keep_start' also cuts what"),
])
def test_settings_of_chats_that_do_not_what_they_say(check, setting, template, prompt, says):
    status, messages = check(GRPO % setting, [{"prompt": prompt}] * 2, template=template)
    assert status == 0 and says in messages
    used = CHATML + "{% if tools %}{{ tools }}{% endif %}{{ enable_thinking }}"
    assert says not in check(GRPO % "", [{"prompt": "Hi"}] * 2, template=used)[1]


@pytest.mark.parametrize("missing, says", [
    (", chat=True", "system_prompt is given for dataset, and this set lacks it"),
    (", chat=False", "prompts of dataset are chats, and those of this set are text"),
    (', system_prompt="Hm."', ""),
])
def test_held_out_prompts_that_are_written_in_another_way(check, missing, says):
    _, messages = check(HELD_OUT % missing, _rows(), held_out=[{"prompt": "And 5+7?"}])
    assert says in messages and ("so that the model reads other prompts" in messages) == bool(says)


def test_a_reward_model_without_a_score(check):
    """A language model's score head would be random and frozen."""
    says = "reward.model reward has no trained score head (score.weight)"
    assert says in check(SCORED, _rows())[1]

    def with_head():
        tensors = load_file("reward/model.safetensors")
        save_file(tensors | {"score.weight": torch.ones(1, 16)}, "reward/model.safetensors")

    assert check(SCORED, _rows(), prepare=with_head) == (0, "")


def test_a_reward_model_with_another_chat_template(check):
    def other():
        with open("reward/chat_template.jinja", "w") as file:
            file.write("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")

    assert "reward.model reward has another chat template" in check(SCORED, _rows(), prepare=other)[1]


def test_weights_that_are_not_read(check):
    code = (SFT % "").replace('Role("m", ', 'Role("m", random_init=True, ')
    assert "actor.random_init is true: the weights in actor.model m are not read" in check(code, _rows())[1]


@pytest.mark.parametrize("name", ["m/model.safetensors", "m/tokenizer.json", "m/config.json", "rows.jsonl"])
def test_pointers_of_git_lfs(check, name):
    def clone():
        with open(name, "w") as file:
            file.write("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 134\n")

    status, messages = check(SFT % "", _rows(), prepare=clone)
    assert status == 2 and name in messages
    assert "is a pointer of Git LFS instead of the file itself: run `git lfs pull`" in messages


def test_a_conversation_that_ends_with_the_user_learns_to_end(check):
    rows = [{"messages": chat(("user", "Hi"), ("assistant", "Yes"), ("user", "Thanks"))}] * 2
    assert "no completion learns to end" not in check(SFT % "", rows)[1]


PAIRS = HEAD + (
    'experiment = DPO(actor=Role("m", optimizer=OptimizerConfig()), dataset=data(), batch_size=2, steps=1)')
MARGINS = HEAD + (
    'experiment = PairwiseRewardModel(reward=Role("m", head="score", optimizer=OptimizerConfig()), '
    'dataset=data(), steps=1, loss=BradleyTerry(margin_key="by"))')
LABELLED = HEAD + (
    'experiment = RewardModel(reward=Role("m", head="score", optimizer=OptimizerConfig()), '
    "dataset=%s, steps=1)")


def _pairs(*pairs, **columns):
    rows = [{"prompt": prompt, "chosen": a, "rejected": b} for prompt, a, b in pairs]
    return [row | {key: values[i] for key, values in columns.items()} for i, row in enumerate(rows)]


def test_pairs_that_contradict_each_other_or_their_scores(check):
    rows = _pairs(("Hi", "a", "b"), ("Hi", "c", "b"), ("Hi", "b", "a"), ("Ho", "b", "a"))
    says = "1 pairs have the same two completions as an earlier one, in the other order, first in line 3"
    assert says in check(PAIRS, rows)[1]
    usual = _pairs(("Hi", "a", "b"), ("Ho", "b", "a"), score_chosen=[5, 2.0], score_rejected=[1, 2.0])
    usual = [row | {"chosen_length": 1, "rejected_length": 2, "chosen-rating": None} for row in usual]
    assert check(PAIRS, usual) == (0, "")
    for names in (("score_chosen", "score_rejected"), ("chosen-rating", "rejected-rating")):
        scores = dict(zip(names, ([5, 1], [1, 3.5]), strict=True))
        _, messages = check(PAIRS, _pairs(("Hi", "a", "b"), ("Ho", "b", "a"), **scores))
        assert f"in 1 rows, first in line 2, {names[0]} is below {names[1]}" in messages


def test_margins_that_are_negative(check):
    pairs = ("Hi", "a", "b"), ("Ho", "b", "a")
    assert "by is negative in 1 of 2 rows" in check(MARGINS, _pairs(*pairs, by=[1, -0.5]))[1]
    assert "negative" not in check(MARGINS, _pairs(*pairs, by=[1, 0]))[1]


def test_labels_that_are_equal_or_contradict_each_other(check):
    def labelled(*labels, code=LABELLED % "data()", same=False):
        rows = [
            {"prompt": "0?" if same else f"{i}?", "completion": "1", "label": label}
            for i, label in enumerate(labels)]
        return check(code, rows, held_out=[{"prompt": "3?", "completion": "2", "label": 0}])[1]

    equal = "label is 1 in all 3 rows: every answer learns the same score"
    other = "1 answers have another label than the same answer to the same prompt earlier, first in line 2"
    assert equal in labelled(1, 1, 1) and other in labelled(1, 0, same=True)
    assert not {"label"} & set(labelled(1, 0, 1).split()) and other not in labelled(0, 0, same=True)
    both = 'DatasetMixture(parts=(data(), DatasetConfig("held_out.jsonl", chat=True)))'
    assert "in all" not in labelled(1, 1, 1, code=LABELLED % both)  # One file has the good answers.


def test_held_out_rows_that_differ_in_white_space(check):
    code = HELD_OUT % ', system_prompt="Hm."'
    held_out = [{"prompt": "And 5+7?"}, {"prompt": " What is\n1+1? "}]
    rows = _rows()
    says = "eval_dataset: 1 of 2 rows are rows of dataset, too, first held_out.jsonl line 2"
    assert says in check(code, rows, held_out=held_out)[1]
    chats = [{"prompt": chat(("user", row["prompt"]))} for row in held_out]
    assert says in check(code, rows, held_out=chats)[1]
    tools = [{"prompt": "Go.", "tools": [{"name": name}]} for name in "ab"]  # Other tools make other rows.
    code = code.replace('data(system_prompt="Hm.")', 'data(tools_key="tools")')
    code = code.replace('system_prompt="Hm."', 'tools_key="tools"')
    assert "2 of 2 rows are rows of dataset, too" in check(code, tools, held_out=tools)[1]
    assert "rows of dataset, too" not in check(code, tools[:1] * 2, held_out=tools[1:])[1]


@pytest.mark.parametrize("row", [
    '{"prompt": "a", "completion": "b", "prompt": "c"}',
    '{"prompt": [{"role": "user", "content": "a", "content": "b"}], "completion": "c"}',
])
def test_keys_that_occur_twice(check, row):
    status, messages = check(SFT % "", [*_rows(), row])
    key = "prompt" if row.startswith('{"prompt": "a"') else "content"
    assert status == 2 and f"rows.jsonl line 5 has an object that has {key!r} twice" in messages


@pytest.mark.parametrize("given", ["run/checkpoints/step_2", "run/checkpoints"])
def test_a_checkpoint_as_a_model(check, tmp_path, given):
    (tmp_path / "run/checkpoints/step_2").mkdir(parents=True)
    (tmp_path / "run/checkpoints/step_2/manifest.json").write_text("{}")
    code = (SFT % "").replace('Role("m"', f'Role("{given}"')
    status, messages = check(code, _rows())
    assert status == 2 and "this is a checkpoint of the run run, and it has exported no model" in messages
    for step in (2, 10):
        (tmp_path / f"run/hf/step_{step}").mkdir(parents=True)
    assert "this is a checkpoint of the run run, and its model is" in (messages := check(code, _rows())[1])
    assert "run/hf/step_10" in messages
