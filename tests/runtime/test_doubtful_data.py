"""What `realhf check` says of rows, settings of chats and models that are legal but seldom meant."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
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
])  # fmt: skip
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


USUAL = [
    'print("Hello.\\nWorld")', 'printf("x=%d.\\n", x);', "s.split('.\\n')", "What does \\n mean?",
    "Use \\n\\n to part paragraphs.", "Split by [.]\\n+ or (\\r\\n|\\n)", "``a.\\nB`` in Markdown",
    '{"a": "One.\\nTwo"}', '"{\\"a\\": \\"One.\\nTwo\\"}"', "C:\\new and D:\\nVidia\\net",
    "\\\\server\\news", "f(x): \\nabla f \\neq 0, \\nu, \\theta", "x. \\nRightarrow y,\\nLeftarrow z",
    "x \\\\ \\nabla y $.\\nB$",
    "Où êtes-vous, Ângela? «Ça va» 5 €. IRMÃ», MAÇÃ\u00a0", "Größe, Fuß „Ja“ – ‚nein‘ …", "Ñandú, ÃO, â€ a",
    "问题：这是什么？答案。", "これは®本です", "<s>old</s> new", "It was <s>old</s>", "<s>gone</s>",
    "What is the difference between <s> and </s>?", "List<s> x = a[INST] + 1",
    "The <|endoftext|> token ends a document.", "<b>hi</b> 1 < 2 > 1", "<think>x</think> 2",
]


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
])  # fmt: skip
def test_settings_of_chats_that_do_not_what_they_say(check, setting, template, prompt, says):
    status, messages = check(GRPO % setting, [{"prompt": prompt}] * 2, template=template)
    assert status == 0 and says in messages
    used = CHATML + "{% if tools %}{{ tools }}{% endif %}{{ enable_thinking }}"
    assert says not in check(GRPO % "", [{"prompt": "Hi"}] * 2, template=used)[1]


@pytest.mark.parametrize("missing, says", [
    (", chat=True", "system_prompt is given for dataset, and this set lacks it"),
    (", chat=False", "prompts of dataset are chats, and those of this set are text"),
    (', system_prompt="Hm."', ""),
])  # fmt: skip
def test_held_out_prompts_that_are_written_in_another_way(check, missing, says):
    _, messages = check(HELD_OUT % missing, _rows(), held_out=[{"prompt": "And 5+7?"}])
    assert says in messages and ("so that the model reads other prompts" in messages) == bool(says)


def test_a_reward_model_without_a_score(check):
    """A language model's score head would be random and frozen."""
    says = "reward.model reward has no trained score head (score.weight)"
    assert says in check(SCORED, _rows())[1]

    def with_head():
        from safetensors.torch import load_file

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
])  # fmt: skip
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
