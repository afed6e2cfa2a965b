"""`realhf check` on data: rows that no run could use, and reward functions that fail."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from realhf import DatasetConfig, PolicyLossConfig
from realhf.cli.dry_run import FirstPrompt
from realhf.cli.main import main
from realhf.cli.run import _require_calls
from realhf.data.light_tokenizer import LightTokenizer
from realhf.data.loader import load_tokenizer
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from realhf.user_input.shipped import shipped_dir
from tests.cli_tools import REPO
from tests.runtime.tiny import HF_CONFIG, make_experiment, write_task
from tests.samples import marked

ROW = {"prompt": "1+1=", "answer": "2", "completion": "2"}
REWARD = """
import json
def reward(prompts, completions, completion_ids, answer):
    {}
experiment.reward_function = reward
"""


@pytest.fixture(scope="module")
def shared_task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture
def check(shared_task, tmp_path, capsys):
    """Return a function that runs `realhf check` on rows and a reward function, and returns its answer."""

    def run(
        rows: list[Any], body: str = "", *, kind: str = "grpo", task: Path | None = None, **settings: Any
    ) -> tuple[int, str, str]:
        task = task or shared_task
        data = tmp_path / "rows.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        settings = {"eval_dataset": None, "batch_size": 2, **settings}
        (tmp_path / "mine.py").write_text(
            "from pathlib import Path\nfrom dataclasses import replace\nfrom realhf import DatasetConfig\n"
            "from tests.runtime.tiny import make_experiment\n\n"
            f"dataset = DatasetConfig({str(data)!r})\n"
            f"experiment = make_experiment({kind!r}, Path({str(task)!r}), dataset=dataset, **{settings!r})\n"
            f"{body}\n"
        )
        code = main(["check", str(tmp_path / "mine.py")])
        return code, *capsys.readouterr()

    return run


def _reward(*lines: str) -> str:
    return REWARD.format("\n    ".join(lines))


def test_nothing_is_said_of_what_is_sound(check):
    reward = _reward("print('hello')", "return [float(len(c)) for c in completions]")
    code, out, err = check([ROW] * 3, reward)
    assert (code, err) == (0, "hello\n") and "mine.py is sound on 1 rank:" in out
    assert check([ROW] * 3, kind="sft")[0] == 0


@pytest.mark.parametrize(("value", "says"), [
    ("0.5 * right", "the highest value is 0.5, so that no sample counts as right"),
    ("right - 1.0", "the highest value is 0, so that no sample counts as right"),
    ("100.0 * right + 3", "samples with values from 3 to 103 all count as right"),
    ("1.0 * right", None), ("0.6 * right + 0.1", None), ("2.0 * right - 1", None),
])
def test_scores_by_which_no_answer_is_right_or_every_one(check, tmp_path, value, says):
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "3", "answer": "4"}) + "\n")
    reward = _reward(f"score = lambda text, right: {value}",
                     "return [score(text, text == a) for text, a in zip(completions, answer)]")
    body = "from realhf import Evaluation\n" + reward + (
        f"held_out = DatasetConfig({str(tmp_path / 'held_out.jsonl')!r})\n"
        "experiment.eval_dataset = {'hard': Evaluation(held_out, %s)}")
    code, _, err = check([ROW] * 3, body % "samples=2")
    start = "realhf: warning: eval_dataset.hard: by correct_above 0.5 of reward reward, "
    end = ": set Evaluation.correct_above (of completions that check made up)\n"
    expected = "" if says is None else start + says + end
    assert (code, err) == (0, expected)
    limit = {"0.5 * right": 0.4, "right - 1.0": -0.5}.get(value, 50)
    if says is not None:
        assert check([ROW] * 3, body % "samples=1")[::2] == (0, "")  # There is no pass@k.
        assert check([ROW] * 3, body % f"samples=2, correct_above={limit}")[::2] == (0, "")


def test_a_reward_that_does_not_repeat_is_warned_of(check):
    says = "realhf: warning: reward function reward returned other values when check called it again"
    code, _, err = check([ROW] * 3, _reward("import random", "return [random.random() for _ in completions]"))
    assert code == 0 and err.startswith(says) and err.count("\n") == 1
    code, _, err = check([ROW] * 3, _reward("print('x')", "return [len(c) / 7 for c in completions]"))
    assert (code, err) == (0, "x\n")


def test_few_of_many_made_up_completions_are_shown(check):
    code, _, err = check([ROW] * 3, _reward("return [0.0] * min(len(completions), 29)"))
    assert code == 2 and "returned 29 values for 30 samples" in err
    shown = err.partition("made-up completions ")[2]
    assert shown.startswith("'2', 'Let me see.") and shown.count("', ") == 3
    assert shown.endswith("' and 26 others\n")


@pytest.mark.parametrize(
    "lines, sentence",
    [
        (["return [json.loads(c)['x'] for c in completions]"], "raised TypeError: 'int' object is not"),
        (["import sys", "sys.exit(0)"], "raised SystemExit: 0"),
        (["return ['1' for c in completions]"], "returned '1' for sample 0"),
        (["return 1.0"], "returned float for"),
        (["return [float('nan') for c in completions]"], "returned nan for sample 0"),
    ],
)
def test_a_reward_function_that_fails_is_found(check, lines, sentence):
    code, out, err = check([ROW] * 3, _reward(*lines))
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err.startswith("realhf: ") and f"mine.py: reward function reward {sentence}" in err
    assert "check called it with the made-up completions '2'" in err


def test_a_reward_function_of_another_form_is_refused(check):
    body = "experiment.reward_function = lambda answer: [0.0 for a in answer]"
    code, _, err = check([ROW] * 3, body)
    assert code == 2 and "has no parameter `completions` or `completion_ids`: its form is f(prompts" in err


def test_the_one_of_several_reward_functions_that_fails_is_named(check):
    body = (
        "from realhf import ExactMatch, Reward\n"
        "def broken(completions):\n    return [len(c) / 0 for c in completions]\n"
        "experiment.reward_function = [ExactMatch(), Reward(broken, weight=0.5, concurrency=2)]")
    code, out, err = check([ROW] * 3, body)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "reward function broken raised ZeroDivisionError: division by zero" in err and "sample 0" in err
    code, _, err = check([ROW] * 3, body.replace("Reward(broken, weight=0.5, concurrency=2)", "ExactMatch()"))
    assert code == 2 and "2 reward functions are named 'exact_match': give them names by Reward(f" in err
    assert check([ROW] * 3, body.replace(" / 0", " / 1"))[0] == 0


def test_a_reward_function_gets_a_row_with_null(check):
    rows = [*[ROW] * 6, {**ROW, "answer": None}, *[ROW] * 6]
    code, _, err = check(rows, _reward("return [float(len(a)) for a in answer]"))
    assert code == 2 and "TypeError: object of type 'NoneType' has no len()" in err and "mine.py:" in err
    code, _, err = check(rows, _reward("return [float(a is None) for a in answer]"))
    assert (code, err) == (
        0, "realhf: warning: dataset: column 'answer' is null in 1 of 13 rows, first in line 7\n")


def test_none_is_warned_of(check):
    code, _, err = check([ROW] * 3, _reward("return [None for c in completions]"))
    none, never = err.splitlines()
    assert code == 0 and none.startswith("realhf: warning: reward function reward returned None for 3 of 3")
    assert "returned None for all 33 completions" in never and "a reward that never differs" in never
    some = _reward("return [None if len(c) > 3 else 1.0 for c in completions]")
    assert "never differs" not in check([ROW] * 3, some)[2]


def test_a_reward_that_never_differs_is_warned_of(check, tmp_path):
    """Text is searched in messages, which has no error; an answer that is a number is compared with text."""
    task = write_task(tmp_path)
    (task / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    boxed = _reward("return [float('\\\\boxed{' in text) for text in completions]")
    chats = [{**ROW, "prompt": [{"role": "user", "content": f"{i}+1="}]} for i in range(3)]
    code, _, err = check(chats, boxed, task=task)
    says = "realhf: warning: reward function reward returned 0 for all 33 completions that check made up, "
    assert code == 0 and err.startswith(says) and err.count("\n") == 1
    assert err.endswith("completions of chats are lists of messages, as in TRL: the text is completion[-1]"
                        "['content']\n")
    assert check([ROW] * 3, boxed)[2] == ""  # On text it does differ.
    equal = _reward("return [float(text == right) for text, right in zip(completions, answer)]")
    assert check([ROW] * 3, equal)[2] == ""
    code, _, err = check([ROW | {"answer": 2}] * 3, equal)
    assert code == 0 and err.startswith(says) and "TRL" not in err
    slow = _reward("import time", "time.sleep(0.4 * len(completions))", "return [0.0] * len(completions)")
    assert "never differs" not in check([ROW], slow.replace("0.4", "2.1"))[2]  # It would take too long.


LEAVE = "def leave(row):\n    import os; {}\nexperiment.dataset = replace(dataset, map=leave)"
ENDS = {
    "reward function reward raised SystemExit: os._exit(3) (": _reward("import os", "os._exit(3)"),
    "check was ended by SIGSEGV: a reward or other code": _reward("import ctypes", "ctypes.string_at(0)"),
    "reward function reward raised SystemExit: os._exit(0) (": _reward("import os", "os._exit(0)"),
    "line 1: map function leave failed with SystemExit: os._exit(3) (": LEAVE.format("os._exit(3)"),
    "line 1: map function leave failed with SystemExit: 0 (": LEAVE.format("raise SystemExit(0)"),
    "check was ended by SIGKILL: a reward or other code": LEAVE.format("os.kill(os.getpid(), 9)"),
    "mine.py line 7: SystemExit: os._exit(3)": "import os; os._exit(3)",
    "line 7: SystemExit: 0": "def graph(): raise SystemExit(0)\nexperiment.graph = graph",
}
"""Part of the sentence -> code that ends the process."""


@pytest.mark.parametrize("says", marked(ENDS, quick=[0, 1]))
def test_what_ends_the_process_is_named(shared_task, tmp_path, says):
    (tmp_path / "rows.jsonl").write_text(2 * (json.dumps(ROW) + "\n"))
    (tmp_path / "mine.py").write_text(
        "from dataclasses import replace\nfrom pathlib import Path\n\n"
        "from realhf import DatasetConfig\nfrom tests.runtime.tiny import make_experiment\n"
        f"dataset = DatasetConfig('{tmp_path}/rows.jsonl'); "
        f"experiment = make_experiment('grpo', Path({str(shared_task)!r}), dataset=dataset, batch_size=2)\n"
        f"{ENDS[says]}\n")
    command = [sys.executable, "-m", "realhf", "check", str(tmp_path / "mine.py")]
    env = os.environ | {"PYTHONPATH": str(REPO)}
    ended = subprocess.run(command, env=env, capture_output=True, text=True)
    lines = ended.stderr.splitlines()
    assert (ended.returncode, ended.stdout) == (2, "") and says in lines[-1], ended.stderr
    assert len(lines) == 1 or "SIGSEGV" in says  # Python shows the lines that led to a crash.


def test_evaluation_gets_the_columns_of_its_own_rows(check, tmp_path):
    """Try a function that takes any columns, and one that has a default for a column."""
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "1", "level": 3}) + "\n")
    body = (
        "def reward(completions, prompts, answer='none', **columns):\n"
        "    assert (answer == 'none') == ('level' in columns) == (len(columns) == 2), columns\n"
        "    return [float(len(c)) for c in completions]\n"
        "experiment.reward_function = reward\n"
        f"experiment.eval_dataset = DatasetConfig({str(tmp_path / 'held_out.jsonl')!r})"
    )
    code, _, err = check([ROW] * 3, body)
    assert (code, err) == (0, "")


def test_rows_and_rewards_of_all_sets_are_tried(check, tmp_path):
    (tmp_path / "hard.jsonl").write_text(json.dumps({"prompt": "1", "answer": 3}) + "\n")
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "1" * 9, "answer": "3"}) + "\n")
    path = f"DatasetConfig({str(tmp_path / 'hard.jsonl')!r})"
    body = (
        "from realhf import Evaluation\n"
        "def lengths(completions, answer):\n"
        "    return [float(len(a)) for a in answer]\n"
        f"experiment.eval_dataset = {{'easy': dataset, 'hard': Evaluation({path}, function=lengths)}}\n"
    )
    code, _, err = check([ROW] * 3, body)
    assert code == 2 and "mine.py: eval_dataset.hard: reward function lengths raised TypeError" in err
    path = f"DatasetConfig({str(tmp_path / 'long.jsonl')!r}, max_prompt_tokens=3)"
    code, _, err = check([ROW] * 3, f"experiment.eval_dataset = {{'easy': dataset, 'long': {path}}}")
    assert code == 2 and f"eval_dataset.long {tmp_path / 'long.jsonl'}: every prompt is longer than" in err


def test_a_column_may_have_the_name_of_a_key(check):
    row = {**ROW, "score": 1, "values": "x", "response_mask": [2]}
    body = (
        "def reward(completions, **columns):\n"
        "    assert columns['score'][0] == 1 and columns['response_mask'][0] == [2], columns\n"
        "    assert 'completion' not in columns and 'prompt' not in columns\n"
        "    return [float(len(c)) for c in completions]\n"
        "experiment.reward_function = reward"
    )
    code, _, err = check([row] * 3, body)
    assert (code, err) == (0, "")


def test_prompts_that_are_all_too_long(check):
    body = "experiment.dataset = replace(dataset, max_prompt_tokens=3)"
    code, _, err = check([ROW] * 3, body)
    assert code == 2
    assert "rows.jsonl: every prompt is longer than max_prompt_tokens 3 (the shortest has 4 tokens)" in err
    code, _, err = check([*[ROW] * 3, {**ROW, "prompt": "1"}], body)
    assert code == 0 and "dataset: 3 of 4 rows are left out" in err


def test_a_row_that_fits_is_found_beyond_the_sample(check, monkeypatch):
    monkeypatch.setattr("realhf.cli.dry_run._ROWS", 2)
    body = "experiment.dataset = replace(dataset, max_prompt_tokens=3)"
    code, _, err = check([ROW, {**ROW, "prompt": "1"}, ROW, {**ROW, "prompt": "1"}], body)
    assert code == 0 and "2 of 4 rows are left out" in err


def test_chats_without_a_template(check, tmp_path):
    rows = [{**ROW, "prompt": [{"role": "user", "content": "1+1="}]}] * 3
    code, _, err = check(rows)
    assert code == 2 and "has chat prompts, and the tokenizer has no chat template: give" in err
    task = write_task(tmp_path)
    (task / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    expected = "assert completions[0] == [{'role': 'assistant', 'content': '2'}]"
    reward = _reward(expected, "return [float(len(c[0]['content'])) for c in completions]")
    code, _, err = check(rows, reward, task=task)
    assert (code, err) == (0, "")


def test_the_setting_that_makes_chats_is_named(check):
    for settings, names in (("system_prompt='Add.'", "system_prompt"),
                            ("chat=True, tools_key='t'", "chat and tools_key")):
        code, _, err = check([{**ROW, "t": None}], f"experiment.dataset = replace(dataset, {settings})")
        says = f"sets {names}, which makes chats of its prompts, and the tokenizer has no chat template"
        assert code == 2 and f"{says}: leave {names} out, or add a template to it" in err, err


def test_the_first_prompt_is_shown_as_the_model_reads_it(check, tmp_path):
    assert "\nthe first prompt has 4 tokens: 1+1=\n" in check([ROW, {**ROW, "prompt": "1"}])[1]
    task = write_task(tmp_path)
    (task / "chat_template.jinja").write_text(
        "{% for m in messages %}= {{ m.content }}<eos>{% endfor %}{{ eos_token }}")
    code, out, err = check([ROW] * 2, "experiment.dataset = replace(dataset, chat=True)", task=task)
    assert code == 0 and err.count("\n") == 1 and "the template ignores add_generation_prompt" in err
    assert "\nthe first prompt has 8 tokens: = 1+1=<eos><eos>\n" in out
    assert str(FirstPrompt(r"a\nb", 1)) == r"the first prompt has 1 token: a\\nb"
    assert str(FirstPrompt("a\n\x1b[2Jé", 1)) == r"the first prompt has 1 token: a\n\x1b[2Jé"
    out = check([{**ROW, "prompt": "1+" * 999 + "2="}])[1]
    assert "the first prompt has 2000 tokens: 1+1+" in out and " ... 1+1+" in out and "+2=\n" in out
    assert max(map(len, out.splitlines())) < 700


def test_text_that_the_tokenizer_does_not_know_is_warned_of(check, tmp_path):
    task = write_task(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # It knows digits, "," and "=".
        (task / name).write_text((shipped_dir("templates") / "common" / "model" / name).read_text())
    data = tmp_path / "held_out.jsonl"
    row = {**ROW, "prompt": "1,1="}
    data.write_text(json.dumps({**ROW, "prompt": "3^4="}) + "\n")
    rows = [row, {**row, "prompt": "1~1="}, {**row, "prompt": "~"}]
    code, _, err = check(rows, f"experiment.eval_dataset = DatasetConfig({str(data)!r})", task=task)
    knows = "rows have text that the tokenizer does not know, first"
    assert code == 0 and f"warning: dataset: 2 of 3 {knows} {tmp_path / 'rows.jsonl'} line 2: " in err
    assert f"warning: eval_dataset: 1 of 1 {knows} {data} line 1: " in err
    code, _, err = check([row, {**row, "completion": "é"}], kind="sft", task=task)
    assert code == 0 and f"dataset: 1 of 2 {knows} {tmp_path / 'rows.jsonl'} line 2: " in err
    assert check([row] * 2, kind="sft", task=task)[::2] == (0, "")


def test_answers_that_never_end(check, tmp_path):
    task = write_task(tmp_path)
    (task / "config.json").write_text(json.dumps({**HF_CONFIG, "eos_token_id": None}))
    code, _, err = check([ROW] * 3, task=task)
    assert code == 0 and "realhf: warning: actor.model has no eos_token_id" in err


def test_a_tokenizer_that_check_cannot_read_is_named(check, tmp_path):
    task = write_task(tmp_path)
    (task / "tokenizer.json").unlink()
    code, _, err = check([ROW] * 3, task=task)
    assert code == 0 and f"warning: tokenizer {task} has no tokenizer.json: neither data nor reward" in err


def test_a_group_of_one(check):
    code, _, err = check([ROW] * 3, group_size=1)
    assert code == 2 and "group_size is 1: it must be at least 2, as GRPO compares" in err
    assert check([ROW] * 3, group_size=1, kind="ppo")[0] == 0


def test_a_call_without_inputs(check):
    body = (
        "from realhf import FunctionCall, HostFunction\n"
        "call = FunctionCall('mine', 'host', (), work=HostFunction(print))\n"
        "graph = experiment.graph().add(call)\n"
        "experiment.graph = lambda: graph"
    )
    code, _, err = check([ROW] * 3, body)
    assert code == 2 and "call 'mine' has no inputs: it must read at least one key" in err


CHATML = (
    "{% for m in messages %}={{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}={% endif %}")
"""A chat template of the characters that the tiny tokenizer knows."""


def _chat_task(directory: Path, template: str = CHATML) -> Path:
    task = write_task(directory)
    (task / "chat_template.jinja").write_text(template)
    return task


def test_text_prompts_of_a_tokenizer_with_a_chat_template(check, tmp_path, capsys):
    """`check` and `run` say the same; test_eval_run.py has `eval`."""
    task = _chat_task(tmp_path)
    rows = [ROW] * 3
    what = "warning: dataset: prompts are text, and the tokenizer has a chat template, which is not applied"
    for kind in ("grpo", "sft"):
        assert what in check(rows, kind=kind, task=task)[2]
        for chat in (True, False):  # It was decided on.
            err = check(rows, f"experiment.dataset = replace(dataset, chat={chat})", kind=kind, task=task)[2]
            assert what not in err
    chat = [{**ROW, "prompt": [{"role": "user", "content": "1+1="}]}] * 3
    assert what not in check(chat, task=task)[2]
    assert what not in check([{**ROW, "prompt": "=1+1=<eos>="}] * 3, task=task)[2]  # A template wrote it.
    experiment = make_experiment(
        "grpo", task, dataset=DatasetConfig(str(tmp_path / "rows.jsonl")), eval_dataset=None, batch_size=2)
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    Trainer(compile_program(experiment, None, world_size=1), World())
    assert what in capsys.readouterr().err


def test_prompts_that_end_with_an_answer_are_told(check, tmp_path):
    task = _chat_task(tmp_path)
    prompt = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "1+"}]
    code, out, err = check([{**ROW, "prompt": prompt}] * 3, task=task)
    assert code == 0 and "\nthe first prompt has 9 tokens: =1+1=<eos>=1+\n" in out
    assert "dataset: 3 prompts end with a message of the assistant, which answers continue" in err


def test_lengths_in_a_tokenizer_file_change_nothing(check, tmp_path):
    """transformers neither cuts nor pads a text as tokenizer.json says, unless it is told to."""
    task = write_task(tmp_path)
    before = check([ROW] * 3, task=task)
    path = task / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "<pad>"}
    path.write_text(json.dumps(content))
    ours = LightTokenizer(str(task))
    assert ours.encode("1+1=") == load_tokenizer(str(task)).encode("1+1=") and len(ours.encode("1+1=")) == 4
    assert check([ROW] * 3, task=task) == before and "the first prompt has 4 tokens: 1+1=\n" in before[1]


def test_rows_of_whole_conversations(check, tmp_path):
    """SFT and DPO read the forms of public data sets, and their evaluations do, too."""
    task = _chat_task(tmp_path)
    question = {"role": "user", "content": "1+1="}
    chosen = [question, {"role": "assistant", "content": "2"}]
    rejected = [question, {"role": "assistant", "content": "3"}]
    rows = [{"messages": chosen, "answer": "2"}] * 3
    code, out, err = check(rows, "experiment.eval_dataset = dataset", kind="sft", task=task)
    assert code == 0 and err.count("\n") == 1 and "3 of 3 rows are rows of dataset, too" in err
    assert "the first prompt has 7 tokens: =1+1=<eos>=\n" in out
    assert "\n2 tokens are learned of the first row: 2<eos>\n" in out
    rows = [{"messages": [*chosen, question, rejected[1]], "answer": "2"}] * 3
    out = check(rows, kind="sft", task=task)[1]
    assert "\n4 tokens are learned of the first row: 2<eos> ... 3<eos>\n" in out
    pairs = [{"chosen": chosen, "rejected": rejected, "prompt": "1+1="}] * 3
    body = "from realhf import DPO\nexperiment = DPO(actor=experiment.actor, dataset=dataset, batch_size=2)"
    code, out, err = check(pairs, body, task=task)
    assert (code, err) == (0, "") and "the first prompt has 7 tokens: =1+1=<eos>=\n" in out


@pytest.mark.parametrize(("value", "is_told"), [
    ("float(text != right)", True), ("abs(len(text) - 1) + 2.0 * (right not in text)", True),
    ("-10.0 * (right in text)", True), ("float(text == right)", False), ("-float(len(text))", False),
    ("float('boxed' in text)", False), ("float(len(right + text))", False),
    ("-abs(float(text) - float(right)) if text.isdigit() else -9.0", False),
])
def test_rewards_that_are_turned_around(check, value, is_told):
    """What depends on the text alone, such as its length, is no sign; what right answers get is."""
    rows = [ROW, {"prompt": "2+2=", "answer": "4"}, {"prompt": "3+4=", "answer": "7"}]
    reward = _reward(f"score = lambda text, right: {value}",
                     "return [score(text, right) for text, right in zip(completions, answer)]")
    code, _, err = check(rows, reward)
    told = "realhf: warning: reward reward gives right answers less than wrong ones" in err
    assert (code, told, err.count("\n")) == (0, is_told, int(is_told)), err


def test_the_weight_of_a_reward_may_turn_it_around(check):
    rows = [ROW, {"prompt": "2+2=", "answer": "4"}]
    body = "from realhf import Reward\n" + _reward(
        "return [float(text == right) for text, right in zip(completions, answer)]")
    assert check(rows, body)[::2] == (0, "")
    code, _, err = check(rows, body + "experiment.reward_function = Reward(reward, weight=-1)")
    assert code == 0 and "gives right answers, with the weight -1, less than wrong ones" in err


def test_rewards_in_percent_beside_shares(check):
    rows = [ROW, {"prompt": "2+2=", "answer": "4"}]
    body = "from realhf import Reward\n" + _reward(
        "return [float(text == right) for text, right in zip(completions, answer)]") + (
        "def percent(completions, answer):\n"
        "    return [100.0 * (right in text) for text, right in zip(completions, answer)]\n"
        "experiment.reward_function = [reward, Reward(percent, weight=%s)]")
    code, _, err = check(rows, body % 1)
    says = "rewards percent and reward have other scales: for the same completions the first differs by up to"
    assert code == 0 and says in err
    assert check(rows, body % 0.01)[::2] == (0, "")


def test_values_in_another_order_when_called_again(check):
    reward = _reward("reward.calls = getattr(reward, 'calls', 0) + 1",
                     "values = [float(t == '2') for t in completions]",
                     "return values if reward.calls == 1 else values[::-1]")
    code, _, err = check([ROW, ROW, {"prompt": "2+2=", "answer": "4"}], reward)
    assert code == 0 and "returned the same values in another order when check called it again" in err


LOSS = """
from dataclasses import dataclass
from realhf.calls import Loss
from tests.runtime.tiny import GRPO

@dataclass(frozen=True)
class Mine(Loss):
    output = "logprobs"

    def totals(self, batch):
        return {{"tokens": {total}}}

    def __call__(self, outputs, batch, totals):
        mask = batch["response_mask"].values
        return -(outputs["logprobs"] * batch["advantages"].values * mask).sum() / {divisor}, {{}}

graph = experiment.graph()
train = graph["actor_train"]
graph = graph.replace(replace(train, work=replace(train.work, loss=Mine())))
experiment.graph = lambda: graph
"""


def test_losses_of_users_are_tried(check):
    count = 'batch["response_mask"].values.sum().item()'
    rows = [ROW, {"prompt": "2+2=", "answer": "4"}]
    assert check(rows, LOSS.format(total=count, divisor="totals['tokens']"))[::2] == (0, "")
    code, _, err = check(rows, LOSS.format(total=count, divisor="mask.sum()"))
    assert code == 0 and "call 'actor_train': Mine.__call__(): the loss of a batch is" in err
    code, _, err = check(rows, LOSS.format(total=count.removesuffix(".item()"), divisor="mask.sum()"))
    assert code == 2 and "call 'actor_train': Mine.totals() returned a tensor for 'tokens'" in err


@pytest.mark.parametrize(("name", "lines", "says"), [
    ("advantages", "def mine(scores, groups): return scores.max(1)", "returned an object of type max"),
    ("advantages", "def mine(scores, groups): return scores.amax(1)", "it must return a tensor of shape"),
    ("advantages", "def mine(scores, groups): return scores * float('nan')", "NaN for all samples"),
    ("advantages", "def mine(scores, groups): return scores - scores.mean(1, keepdim=True)", ""),
    ("on_step", "def mine(): pass", "on_step: mine cannot be called with one argument, the StepEvent"),
    ("on_evaluation", "def mine(event, more): pass", "on_evaluation: mine cannot be called with one"),
    ("on_checkpoint", "mine = 3", "on_checkpoint")])
def test_hooks_of_users_are_tried(check, name, lines, says):
    rows = [ROW, {"prompt": "2+2=", "answer": "4"}]
    code, _, err = check(rows, f"{lines}\nexperiment = replace(experiment, {name}=mine)")
    assert code == (2 if says and "NaN" not in says else 0), err
    assert says in err and (says or not err)


def test_a_map_that_makes_other_rows_is_refused(check):
    body = (
        "import random\nother = lambda row: row | {'prompt': str(random.random())}\n"
        "experiment.dataset = replace(dataset, map=other)")
    code, _, err = check([ROW] * 3, body)
    assert code == 2 and "the map function, called twice, made different rows of it" in err


def test_files_that_the_experiment_does_not_mean(check, tmp_path, monkeypatch):
    """A relative path that names another file here, and a file beside the experiment that a package hides."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    body = "experiment.dataset = DatasetConfig('rows.jsonl')\nimport yaml\n"
    rows = [json.dumps(ROW | {"prompt": f"{i}="}) + "\n" for i in range(3)]
    (elsewhere / "rows.jsonl").write_text("".join(rows))
    (tmp_path / "yaml.py").write_text("LIMIT = 1\n")
    code, _, err = check([ROW] * 3, body)
    assert code == 0 and f"dataset.path rows.jsonl is {elsewhere / 'rows.jsonl'}, below the current" in err
    assert f"{tmp_path / 'yaml.py'} is not what `import yaml` finds" in err
    code, _, err = check([ROW] * 3, "from yaml import LIMIT")
    assert code == 2 and f"{tmp_path / 'yaml.py'} is not what `import yaml` finds" in err


def test_options_that_are_given_twice(check, tmp_path, capsys):
    check([ROW] * 3)
    mine = str(tmp_path / "mine.py")
    words = ["--steps", "2", "--steps=3", "--nproc", "1", "--nproc", "1", "--seed", "1", "--seed", "1"]
    assert main(["check", mine, *words]) == 0
    says = "realhf: warning: --steps is given 2 times, as 2 and 3: the last one counts\n"
    assert capsys.readouterr().err == says
    assert main(["check", mine, "--nproc", "1", "--nproc", "2"]) == 0
    assert "--nproc is given 2 times, as 1 and 2" in capsys.readouterr().err


def test_a_run_of_another_experiment_is_not_continued(shared_task):
    """A plan of a run that lacks calls of the experiment is that of another one."""
    without_reference = make_experiment("grpo", shared_task, loss=PolicyLossConfig())
    plan = compile_program(without_reference, None, world_size=1).plan
    _require_calls(without_reference, plan, Path("runs/a"))
    with pytest.raises(UserError, match="runs/a is the run of another .* no call ref_forward"):
        _require_calls(make_experiment("grpo", shared_task), plan, Path("runs/a"))


def test_settings_that_are_changed_in_place(check):
    code, _, err = check([ROW], "experiment.sampling.temprature = 0.7")
    assert code == 2 and "settings such as sampling, loss and dataset never change" in err
    assert "(did you mean temperature?)" in err
