"""`realhf eval RUN` asks as the run was trained; what rewards log of answers reaches files and `rollouts`.

One run is made by the trainer, with a system prompt, a stop text and two held-out sets.
"""

import json
import shutil
from argparse import Namespace
from dataclasses import replace

import pytest

from realhf import GRPO, DatasetConfig, Evaluation, OptimizerConfig, Role, SamplingConfig
from realhf.cli.eval import _of_model, find_run
from realhf.cli.main import main
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import read_jsonl
from tests.hub import model_repository

REWARDS = """
def told(completions, log_extra):
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    log_extra("size", [float(len(text)) for text in texts])
    log_extra("kind", ["even" if len(text) % 2 == 0 else "odd" for text in texts])
    log_extra("share", [float("nan") for text in texts])
    return [-0.0 for text in texts]

def length(completion_ids):
    return [len(ids) / 100 for ids in completion_ids]
"""


def unchanged(row):
    return row


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a directory with the model `model`, the rows data.jsonl, rewards.py and the run `run`."""
    directory = tmp_path_factory.mktemp("chats")
    (directory / "model").mkdir()
    for name, content in model_repository().files.items():
        (directory / "model" / name).write_bytes(content)
    rows = [{"question": f"{i}+{i}?", "answer": str(2 * i)} for i in range(6)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "rewards.py").write_text(REWARDS)
    rewards: dict = {}
    exec(REWARDS, rewards)
    data = DatasetConfig(str(directory / "data.jsonl"), prompt_key="question", system_prompt="sort:",
                         chat_template_kwargs={"enable_thinking": False})
    mapped = DatasetConfig(data.path, prompt_key="question", chat=True, map=unchanged)
    own = SamplingConfig(max_new_tokens=9, temperature=0.7, top_k=50)
    experiment = GRPO(
        actor=Role(str(directory / "model"), dtype="float64", optimizer=OptimizerConfig(lr=1e-3)),
        dataset=data, eval_dataset={"plain": data, "mapped": Evaluation(mapped, samples=2, sampling=own)},
        reward_function=rewards["told"], steps=1, batch_size=4, group_size=2, checkpoint_every=0,
        sampling=SamplingConfig(max_new_tokens=12, stop=("\n", "0"), repetition_penalty=1.5))
    program = compile_program(experiment, None, world_size=1)
    Trainer(program, World(), out=directory / "run", quiet=True).run()
    return directory


def evaluate(place, capsys, *words, target="run"):
    """Return the printed document, standard error and the answers by set."""
    out = place / f"out-{len(list(place.iterdir()))}"
    words = ("eval", place / target, "--actor.dtype", "float64", "--json", "--out", out, *words)
    assert main([str(word) for word in words]) == 0
    printed = capsys.readouterr()
    answers = {path.parent.name: read_jsonl(path) for path in out.rglob("step_0.jsonl")}
    return json.loads(printed.out), printed.err, answers


def completions(rows):
    return [row["completion"] for row in rows]


def test_a_run_is_asked_as_in_training(place, capsys):
    """Without --data: the sets of the run; with it: the set of this name, of the file, or the first one."""
    data, reward = place / "data.jsonl", f"{place}/rewards.py:told"
    _, err, answers = evaluate(place, capsys, "--reward", reward)
    for name in ("plain", "mapped"):
        expected = read_jsonl(place / f"run/evals/{name}/step_1.jsonl")
        assert completions(answers[name]) == completions(expected)
        assert [row["length"] for row in answers[name]] == [row["length"] for row in expected]
    lost = "its own map function and reward are in its experiment file, and `realhf eval EXP.py --model "
    assert err.startswith(
        f"realhf: eval_dataset.plain as in {place}/run: prompt_key 'question', system_prompt 'sort:', "
        "chat_template_kwargs {'enable_thinking': False}, samples 1, max_new_tokens 12, temperature 0.0, "
        f"stop ('\\n', '0'), repetition_penalty 1.5; eval_dataset.mapped as in {place}/run: prompt_key "
        "'question', chat True, samples 2, max_new_tokens 9, temperature 0.7, top_k 50; "
        f"{lost}{place}/run` applies them\n")
    words = ("--data", f"mapped={data}", "--reward", reward)
    _, err, one = evaluate(place, capsys, *words, target="run/hf/step_1")
    assert one == {"mapped": answers["mapped"]} and "plain" not in err
    _, _, other = evaluate(place, capsys, "--data", data, "--reward", reward)
    assert completions(*other.values()) == completions(answers["plain"])


def test_overrides_come_after_the_run(place, capsys):
    """With chats switched off and other limits, it answers as the same weights do with all settings given."""
    data = f"mapped={place}/data.jsonl"
    chosen = "--eval-dataset.mapped"
    words = ("--data", data, "--reward", f"{place}/rewards.py:length", f"{chosen}.dataset.chat", "False",
             f"{chosen}.sampling.max-new-tokens", 5, f"{chosen}.sampling.stop", "zz")
    _, err, of_run = evaluate(place, capsys, *words)
    assert "chat False, samples 2, max_new_tokens 5, temperature 0.7, top_k 50, stop ('zz',)" in err
    shutil.copytree(place / "run/hf/step_1", place / "copy")
    words += (f"{chosen}.dataset.prompt-key", "question", f"{chosen}.samples", 2,
              f"{chosen}.sampling.temperature", 0.7, f"{chosen}.sampling.top-k", 50)
    _, err, of_model = evaluate(place, capsys, *words, target="copy")
    assert "as in" not in err and of_run == of_model
    assert {row["length"] for row in of_run["mapped"]} <= set(range(1, 6))


def test_a_plain_model_with_a_chat_template_is_warned_about_once(place, capsys):
    words = ["--data", f"a={place}/data.jsonl", "--data", f"b={place}/data.jsonl"]
    words += ["--sampling.max-new-tokens", 4]
    for name in "ab":
        rows = f"--eval-dataset.{name}"
        words += [f"{rows}.dataset.prompt-key", "question", f"{rows}.max-rows", 2]
    _, err, raw = evaluate(place, capsys, *words, target="model")
    assert "eval_dataset.a and eval_dataset.b: prompts are text, and the tokenizer has a chat template" in err
    assert err.count("warning") == 1 and "chat=True makes chats of them" in err
    chat = [word for name in "ab" for word in (f"--eval-dataset.{name}.dataset.chat", "True")]
    _, err, chats = evaluate(place, capsys, *words, *chat, target="model")
    assert err == ""
    assert completions(raw["a"]) != completions(chats["a"])


def test_several_rewards_are_logged_by_name(place, capsys):
    words = ("--data", f"plain={place}/data.jsonl", "--reward", f"{place}/rewards.py:length", "--reward",
             f"quiet={place}/rewards.py:told", "--eval-dataset.plain.samples", 2, "--sampling.top-k", 40)
    document, _, answers = evaluate(place, capsys, *words)
    (rows,) = answers.values()
    lengths = [row["scores"]["length"] for row in rows]
    assert lengths == [row["length"] / 100 for row in rows]
    assert document["metrics"]["eval/plain/length"] == pytest.approx(sum(lengths) / 12)
    assert document["metrics"]["eval/plain/quiet"] == 0 and [row["score"] for row in rows] == lengths


def test_a_training_set_stands_in_for_a_held_out_one(tmp_path):
    """Also a mixture, of which the first part counts; several sets are told apart by name and file."""

    def of_run(held_out, *data):
        options = Namespace(data=data, reward=None, model=None, help=False)
        saved = {"dataset": training, "eval_dataset": held_out, "seed": 3, "sampling": {"stop": ["x"]}}
        return _of_model("model", options, saved)

    (tmp_path / "hf").mkdir()
    assert find_run(str(tmp_path)) is None
    (tmp_path / "config.json").write_text("{}")
    assert find_run(str(tmp_path)) == find_run(str(tmp_path / "hf/step_2")) == tmp_path
    part = {"path": "a.jsonl", "prompt_key": "q", "map": "m.keep", "split": "x", "unknown": 1}
    training = {"parts": [part, {"prompt_key": "r"}]}
    found = of_run(None, "b.jsonl")
    assert found.eval_dataset == Evaluation(DatasetConfig("b.jsonl", prompt_key="q"))
    assert (found.seed, found.sampling) == (3, SamplingConfig(stop=("x",)))
    same = DatasetConfig("a.jsonl", prompt_key="q", split="x")
    assert of_run(None, "a.jsonl").eval_dataset == Evaluation(same)
    with pytest.raises(UserError, match="needs --data FILE, the rows to evaluate: the run has no held-out"):
        of_run(None)
    sets = {"one": {"path": "1", "prompt_key": "p1"}, "two": {
        "dataset": {"path": "2", "prompt_key": "p2"}, "correct_above": 0.5, "sampling": {"temperature": 0.5},
        "samples": 3}}
    one = Evaluation(DatasetConfig("1", prompt_key="p1"))
    two = Evaluation(DatasetConfig("2", prompt_key="p2"), samples=3, sampling=SamplingConfig(temperature=0.5))
    assert of_run(sets).eval_dataset == {"one": one, "two": two}
    assert of_run(sets, "two=1").eval_dataset["two"] == replace(two, dataset=replace(two.dataset, path="1"))
    assert of_run(sets, "2").eval_dataset == two
    assert of_run(sets, "3").eval_dataset.dataset.prompt_key == "p1"


def test_what_rewards_log_of_an_answer_is_kept_and_shown(place, capsys):
    trained = read_jsonl(place / "run/rollouts.jsonl")
    held_out = read_jsonl(place / "run/evals/plain/step_1.jsonl")
    for row in trained + held_out:
        size = len(row["completion"])
        assert row["extra"] == {"size": size, "kind": "odd" if size % 2 else "even", "share": None}
    assert {str(row["score"]) for row in trained} == {"0.0"}
    for source, rows in (((), trained), (("--eval", "plain"), held_out)):
        words = ["rollouts", str(place / "run"), *source]
        assert main([*words, "--where", "kind == 'odd'", "--sort", "-size", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)["rollouts"]
        sizes = [row["extra"]["size"] for row in shown]
        lengths = [len(row["completion"]) for row in rows]
        assert sizes == sorted((length for length in lengths if length % 2), reverse=True)
        assert main([*words, "--where", "extra.size >= 0", "--full", "--limit", "1"]) == 0
        out = capsys.readouterr().out
        assert "kind: " in out and "size: " in out and "score 0" in out and " -0" not in out


def test_a_reward_that_fails_is_called_again(place, capsys):
    marks = place / "calls"
    (place / "flaky.py").write_text(
        "from pathlib import Path\n\n\n"
        "def flaky(completions):\n"
        f"    marks = Path({str(marks)!r})\n"
        "    marks.write_text((marks.read_text() if marks.exists() else '') + '.')\n"
        "    if len(marks.read_text()) < 2:\n"
        "        raise ConnectionError('away')\n"
        "    return [1.0] * len(completions)\n")
    words = ("--data", f"plain={place}/data.jsonl", "--reward", f"{place / 'flaky.py'}:flaky",
             "--eval-dataset.plain.max-rows", 2)
    document, _, _ = evaluate(place, capsys, *words, "--reward-limits.retries", 1)
    assert document["metrics"]["eval/plain/score"] == 1.0
    assert marks.read_text() == ".."
