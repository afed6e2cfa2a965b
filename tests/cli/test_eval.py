"""`realhf eval`: a model, a run or an experiment, without training; wrong input ends with one sentence."""

import dataclasses
import json
import shutil

import pytest

from realhf import GRPO, DatasetConfig, Evaluation, LoraConfig, Role, SamplingConfig
from realhf.cli.eval import reward_by_name
from realhf.cli.main import main
from realhf.cli.overrides import override
from realhf.errors import UserError
from realhf.runtime.evaluations import evaluated_model
from tests.cli_tools import ForkedCommand, read_jsonl, write_experiment
from tests.runtime.tiny import some_reward
from tests.samples import marked

DATA = DatasetConfig("data.jsonl")
REWARD = "from tests.runtime.tiny import some_reward\n\nVALUE = 3\n"
SETS = """
from realhf import Evaluation

data = experiment.eval_dataset
experiment.eval_dataset = {"first": data, "second": Evaluation(data, samples=2, max_rows=2)}
"""


@pytest.fixture(scope="module")
def run(grpo_run):
    """Return the directory of a finished run."""
    return grpo_run[2]


@pytest.fixture(scope="module")
def data(run):
    return json.loads((run / "config.json").read_text())["dataset"]["path"]


@pytest.fixture(scope="module")
def reward(tmp_path_factory):
    path = tmp_path_factory.mktemp("reward") / "my_rewards.py"
    path.write_text(REWARD)
    return f"{path}:some_reward"


def _words(run, data, out, *more):
    words = ("eval", run, "--data", data, "--sampling.max-new-tokens", 7, "--out", out, *more)
    return [str(word) for word in words]


def test_a_run_is_evaluated_as_at_its_end(run, data, reward, tmp_path, capsys):
    """The run's own evaluation was greedy on its five held-out rows, in float64."""
    out = tmp_path / "out"
    words = ("--reward", reward, "--json", "--actor.dtype", "float64")
    data = json.loads((run / "config.json").read_text())["eval_dataset"]["path"]
    assert main(_words(run, data, out, *words)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["out"] == str(out) and answer["model"] == str(run / "hf/step_2")
    found, expected = read_jsonl(out / "evals/step_0.jsonl"), read_jsonl(run / "eval.jsonl")
    assert [row["completion"] for row in found[:5]] == [row["completion"] for row in expected]
    assert [row["score"] for row in found[:5]] == pytest.approx([row["score"] for row in expected])
    assert answer["metrics"]["eval/score"] == pytest.approx(sum(row["score"] for row in found) / 5)
    assert answer["sets"] == {"": {"path": data, "prompts": 5, "samples": 1}}
    assert json.loads((out / "summary.json").read_text()).items() <= answer.items()


@pytest.mark.slow
def test_two_processes_give_the_same_answers(run, data, reward, tmp_path):
    options = ("--data", f"again={data}", "--reward", reward, "--actor.dtype", "float64")
    for name in ("data", "again"):
        options += (f"--eval-dataset.{name}.samples", 3, f"--eval-dataset.{name}.max-rows", 4)
    assert main(_words(run, data, tmp_path / "one", *options, "--json")) == 0
    words = _words(run, data, tmp_path / "two", *options, "--nproc", 2)
    with ForkedCommand(*words) as command:
        code, out, err = command.finish()
    assert code == 0, err
    assert "pass@3" in out and "again" in out and "4 x 3" in out
    for name in ("data", "again"):
        found, expected = (read_jsonl(tmp_path / n / f"evals/{name}/step_0.jsonl") for n in ("two", "one"))
        assert found == expected and len(found) == 12
    names = {name: len({row["completion"] for row in found}) for name in ("data", "again")}
    assert min(names.values()) > 4


def test_the_sets_of_an_experiment_are_evaluated(run, tmp_path, capsys):
    path = write_experiment(tmp_path, body=SETS)
    out = tmp_path / "out"
    assert main(["eval", str(path), "--model", str(run), "--json", "--out", str(out), "--seed", "3"]) == 0
    answer = json.loads(capsys.readouterr().out)
    last = json.loads((run / "summary.json").read_text())["eval_last"]
    assert answer["metrics"]["eval/first/score"] == pytest.approx(last)
    assert answer["eval_metric"] == "eval/first/score" and "eval/second/pass@2" in answer["metrics"]
    assert main(["eval", str(path), "--out", str(out)]) == 2
    assert f"--out {out} already holds an evaluation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    marked([
        ("--eval-dataset.first.path x.jsonl", "first", DatasetConfig("x.jsonl")),
        ("--eval-dataset.second.samples 5 --steps 9", "second", Evaluation(DATA, samples=5)),
        ("--eval-dataset.second.dataset.max-rows 7", "second",
         Evaluation(DatasetConfig("data.jsonl", max_rows=7), samples=2)),
        ("--eval-dataset.second.sampling.temperature 0.5", "second",
         Evaluation(DATA, samples=2, sampling=SamplingConfig(temperature=0.5))),
    ], quick=[1]),
)
def test_fields_of_named_sets_can_be_overridden(words, name, expected):
    sets = {"first": DATA, "second": Evaluation(DATA, samples=2)}
    experiment = GRPO(eval_dataset=sets, reward_function=some_reward)
    found = override(experiment, words.split()).eval_dataset
    assert found == {**sets, name: expected}
    sets = {name: Evaluation(DATA) for name in ("easy", "hard", "long", "math")}
    with pytest.raises(UserError, match="did you mean --eval-dataset.math.samples\\?$"):
        override(GRPO(eval_dataset=sets), ["--eval-dataset.mtah.samples", "8"])
    one = GRPO(eval_dataset=Evaluation(DATA))
    with pytest.raises(UserError, match="did you mean --eval-dataset.dataset.path\\?$"):
        override(one, ["--eval-dataset.path", "x"])
    with pytest.raises(UserError, match="unknown override '--eval-dataset.third.path': did you mean --eval-"):
        override(experiment, ["--eval-dataset.third.path", "x"])


def test_fields_of_a_single_set_can_be_overridden():
    for held_out, words, expected in [
        (DATA, "--eval-dataset.path x.jsonl", DatasetConfig("x.jsonl")),
        (None, "--eval-dataset.path x.jsonl", DatasetConfig("x.jsonl")),
        (Evaluation(DATA), "--eval-dataset.samples 4", Evaluation(DATA, samples=4)),
        (Evaluation(DATA), "--eval-dataset.dataset.path x", Evaluation(DatasetConfig("x"))),
    ]:
        assert override(GRPO(eval_dataset=held_out), words.split()).eval_dataset == expected


FAULTS = {
    "model": "realhf eval model needs --data FILE, the rows to evaluate: a model has none",
    "/nowhere --data {data}": "actor.model: '/nowhere' is neither a path nor a shipped name",
    "{tmp} --data {data}": "actor.model: model {tmp}: there is no {tmp}/config.json",
    "{run} --data nowhere.jsonl": "{run}: eval_dataset.path 'nowhere.jsonl': there is no such file",
    "{run} --data a=nowhere.jsonl --data {data}": "eval_dataset.a.path 'nowhere.jsonl': there is no",
    "{run} --data {data} --data {data}": "--data {data}: there are two sets named 'data': write NAME=FILE",
    "{run} --data {data} --eval-dataset.dataset.prompt-key x": "{data} line 1: there is no column 'x'",
    "{run} --data {data} --eval-dataset.dataset.name main": "eval_dataset.name is 'main': it must be left",
    "{run} --data {data} --reward exact:x": "there is no column 'x'",
    "{run} --data {data} --reward exct": "--reward 'exct' (did you mean exact?): legal are exact",
    "{run} --data {data} --reward nowhere.py:f": "there is no file nowhere.py",
    "{run} --data {data} --reward {rewards}:nothing": "the file's functions are some_reward",
    "{run} --data {data} --reward-limits.retries -1": "retries is -1: it must not be negative",
    "{run} --eval-dataset.samples 0": "samples is 0: it must be at least 1",
    "{run} --eval-dataset.samples 2 --sampling.temperature 0": "temperature is 0.0: it must be above 0",
    "{run} --sampling.top-p 2": "sampling.top_p is 2.0: it must be above 0 and at most 1",
    "{run} --sampling.min-new-tokens 300": "sampling.min_new_tokens is 300: it must be from 0",
    "{run} --actor.dtype int": "--actor.dtype",
    "{run} --samples 3": "unknown override '--samples': did you mean --eval-dataset.samples?",
    "{run} --temperature 3": "unknown override '--temperature': did you mean --sampling.temperature or",
    "{run} --max-new-tokens 3": "did you mean --sampling.max-new-tokens or",
    "{run} --prompt-key x": "or --eval-dataset.dataset.prompt-key?",
    "{run} --dtype float64": "did you mean --actor.dtype?",
    "{run} --dataset.prompt-key x": "--dataset.prompt-key: evaluations read eval_dataset, and not dataset",
    "--sampling.top-p 1 {run}": "realhf eval needs",
    "{run} --data {data} --model x": "--model is for an experiment file",
    "{run} --data {data} --nproc 0": "--nproc is 0: it must be at least 1",
    "{run} --data {data} --out {run}": "--out {run} already holds a run",
    "{run} --data {data} --plan {plan}": "calls.actor_train: the evaluation has no such call",
    "{experiment} --data {data}": "--data is for a model: an experiment has its own eval_dataset",
}


@pytest.mark.parametrize("words", FAULTS)
def test_wrong_input_is_a_sentence(grpo_run, run, data, reward, tmp_path, capsys, words):
    experiment, plan, _ = grpo_run
    names = {"run": run, "data": data, "tmp": tmp_path, "rewards": reward.partition(":")[0], "plan": plan,
             "experiment": experiment}
    out = [] if "--out" in words else ["--out", str(tmp_path / "out")]
    assert main(["eval", *words.format(**names).split(), *out]) == 2
    err = capsys.readouterr().err.strip()
    assert FAULTS[words].format(**names) in err and "\n" not in err


def test_what_is_probably_not_meant_is_told(run, data, tmp_path, capsys):
    """A copy of the run has a checkpoint of a later step than its exported model."""
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    assert main(["eval", str(copy / "checkpoints/step_2"), "--data", data]) == 2
    assert capsys.readouterr().err.endswith(f"exported models are in {copy / 'hf'}\n")
    (copy / "checkpoints/step_2").rename(copy / "checkpoints/step_7")
    words = ["--actor.dtype", "float64", "--sampling.max-new-tokens", "2", "--out", str(tmp_path / "out")]
    assert main(["eval", str(copy), "--data", data, *words]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert f"realhf: warning: --data {data}: {copy} was trained on rows of it: what" in " ".join(lines)
    assert "the newest exported model is of step 2, and the newest checkpoint of step 7" in " ".join(lines)


def test_help_has_the_fields_of_a_model(run, data, capsys):
    assert main(["eval", str(run), "--data", data, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(SamplingConfig):
        if type(field.default) in (int, float):
            assert f"--sampling.{field.name.replace('_', '-')} " in shown
    for option in ("--eval-dataset.samples INT", "--eval-dataset.dataset.prompt-key STR", "--reward REWARD"):
        assert option in shown


def test_the_shipped_reward_is_one_for_the_answer_alone():
    exact = reward_by_name("exact:ground_truth")
    texts = [" 7\n", "8", [{"role": "assistant", "content": "7"}]]
    assert exact(texts, ground_truth=[7, "7", "7"]) == [1.0, 0.0, 1.0]
    assert (exact.answer_of(" 7 "), exact.answer_of(" ")) == ("7", None)


def test_a_reward_may_be_a_function_of_a_file(reward):
    found = reward_by_name(reward)
    ids = [[3, 4], [5]]
    assert found(None, ["a", "b"], ids, None) == some_reward(None, ["a", "b"], ids, None)


def test_a_summary_names_the_adapters_that_are_evaluated():
    assert evaluated_model(Role("base", lora=LoraConfig(adapter="run/hf/step_3"))) == "run/hf/step_3"
    assert evaluated_model(Role("base", lora=LoraConfig())) == evaluated_model(Role("base")) == "base"
