"""Runs that are killed or told to stop continue as if nothing had happened (more: benchmarks/fuzz/faults.py).

What `--resume` cannot do, it says in a sentence.
"""

import json
import os
import random
import signal
import time

import pytest
import yaml

from realhf.checkpoint.run_state import Manifest
from realhf.cli.main import main
from tests.cli_tools import ForkedCommand, wait_until, write_experiment
from tests.kills import Tally, Workers, make_case, newest, result, torture, uninterrupted

SLOW_REWARD = """
import os
import time

def slow_reward(prompts, completions, completion_ids, answer):
    time.sleep(float(os.environ.get("TEST_SECONDS", "0")))
    return [float(len(ids)) for ids in completion_ids]

experiment.reward_function = slow_reward
"""


MOODY_REWARD = """
import json
import os

calls = []

def moody_reward(prompts, completions, completion_ids, answer):
    calls.append(len(prompts))
    fails = Path(__file__).with_name("fails.json")
    if fails.exists():
        about = json.loads(fails.read_text())
        if len(calls) >= about["at"] and int(os.environ["RANK"]) in about["ranks"]:
            raise ConnectionError("the judge is away")
    return [sum(ids) % 7 / 7 for ids in completion_ids]

experiment.reward_function = moody_reward
"""
MOODY_LOSS = """
import json
import os

graph = experiment.graph()
train = graph["actor_train"]

class MoodyLoss(type(train.work.loss)):
    def __call__(self, outputs, batch, totals):
        calls.append(len(batch))
        fails = Path(__file__).with_name("fails.json")
        # The third step of two mini-batches; a class that a user wrote is tried three times before the first.
        if fails.exists() and len(calls) >= 3 + 2 * 2 + 1 and int(os.environ["RANK"]) == 1:
            raise ArithmeticError("it is moody")
        return super().__call__(outputs, batch, totals)

calls = []
work = replace(train.work, loss=MoodyLoss(train.work.loss.config))
calls_of_graph = [replace(call, work=work) if call is train else call for call in graph.calls]
graph = DataflowGraph(calls_of_graph, graph.inputs)
experiment.graph = lambda: graph
"""


def tortured(case, directory, *, kills: int, seed: int = 0, **how) -> Tally:
    expected, seconds = uninterrupted(case, directory / "whole")
    rng, tally = random.Random(seed), Tally()
    while tally.kills < kills and not tally.differences:
        where = directory / f"run_{tally.runs}"
        left = min(10, kills - tally.kills)
        torture(case, expected, where, rng, tally, max_kills=left, seconds=seconds, **how)
    return tally


def test_a_run_survives_kills(tmp_path):
    """The moments are after the first part of a checkpoint, before it gets its name, and so on."""
    case = make_case("grpo", 2, tmp_path / "case", steps=4)
    moments = ("part", "manifest", "renamed")
    tally = tortured(case, tmp_path, kills=2, moments=moments, patient_share=0.0)
    assert (tally.differences, tally.kills) == ([], 2)
    assert max(tally.repeated) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_ranks"), [("ppo", 2), ("grpo", 1), ("ppo", 1)])
def test_runs_survive_many_kills(tmp_path, kind, num_ranks):
    tally = tortured(make_case(kind, num_ranks, tmp_path / "case"), tmp_path, kills=15, seed=1)
    assert (tally.differences, tally.kills) == ([], 15)
    assert max(tally.repeated) <= 2


@pytest.mark.parametrize(("kind", "ranks"), [
    ("grpo", (0,)), *(pytest.param(kind, ranks, marks=pytest.mark.slow) for kind, ranks in [
        ("grpo", (1,)), ("grpo", (0, 1)), ("async", (0,)), ("async", (0, 1))])])
def test_a_run_that_fails_saves_its_last_finished_step(tmp_path, kind, ranks):
    """One of two ranks, or both, fail in step 3; what continues then is what nothing has ended."""
    case = make_case(
        kind, 2, tmp_path / "case", body=MOODY_REWARD, checkpoint_every="1h", export_every=0, steps=4)
    plan = tmp_path / "case/plan.yaml"
    layouts = yaml.safe_load(plan.read_text())
    layouts["calls"]["reward_forward"] = {"layout": "d2@0-1" if ranks == (0, 1) else f"d1@{ranks[0]}"}
    plan.write_text(yaml.safe_dump(layouts))
    expected = uninterrupted(case, tmp_path / "whole")[0]
    fails = tmp_path / "case/fails.json"
    fails.write_text(json.dumps({"at": 4, "ranks": ranks}))  # After the evaluation before step 1.
    out = tmp_path / "run"
    with Workers([*case.words, "--out", out], 2, tmp_path) as workers:
        assert set(workers.join()) <= {1, 2}, workers.log.read_text()
        said = workers.log.read_text()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_2"], said
    assert "moody_reward raised ConnectionError: the judge is away" in said and "Traceback" not in said
    fails.unlink()
    assert resumed(case, out, tmp_path) == expected


@pytest.mark.slow
def test_a_loss_that_fails_on_one_rank_loses_no_step(tmp_path):
    """The other rank waits for it in the middle of a train step, in which nothing has been updated yet."""
    settings = {"checkpoint_every": "1h", "export_every": 0, "steps": 4}
    case = make_case("grpo", 2, tmp_path / "case", body=MOODY_LOSS, **settings)
    expected = uninterrupted(case, tmp_path / "whole")[0]
    fails = tmp_path / "case/fails.json"
    fails.write_text("{}")
    out = tmp_path / "run"
    with Workers([*case.words, "--out", out], 2, tmp_path) as workers:
        assert set(workers.join()) <= {1, 2}, workers.log.read_text()
        said = workers.log.read_text()
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_2"], said
    assert "it is moody" in said
    fails.unlink()
    assert resumed(case, out, tmp_path) == expected


@pytest.fixture(scope="module")
def slow_case(tmp_path_factory):
    """Return a case whose steps take TEST_SECONDS, and the result of a run that nothing has interrupted."""
    directory = tmp_path_factory.mktemp("slow")
    case = make_case("grpo", 2, directory / "case", body=SLOW_REWARD)
    return case, uninterrupted(case, directory / "whole")[0]


def resumed(case, out, tmp_path):
    """Resume a run on two ranks and return its result."""
    with Workers([*case.words, "--out", out, "--resume"], 2, tmp_path) as workers:
        assert workers.join() == [0, 0], workers.log.read_text()
    return result(out)


def sentences(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("realhf: ")]


@pytest.mark.slow
def test_a_signal_saves_and_stops(tmp_path, slow_case):
    case, expected = slow_case
    out = tmp_path / "run"
    with ForkedCommand(*case.words, "--nproc", 2, "--out", out, TEST_SECONDS="0.5") as command:
        assert wait_until(lambda: newest(out) >= 2 or command.ended, seconds=90)
        command.interrupt(signal.SIGTERM)
        code, _, err = command.finish()
        assert wait_until(lambda: not command.processes(), seconds=10)
    assert code == 1 and "Traceback" not in err, err
    step = newest(out)
    assert Manifest.load(out / f"checkpoints/step_{step}").step == step < 6
    assert f"realhf: ended after step {step} of 6\n" in err and "realhf: ended by SIGTERM\n" in err, err
    last = sentences(err)[-1]
    what = f"the last checkpoint is that of step {step}; to continue: realhf run "
    assert last.startswith(f"realhf: {what}"), err
    assert last.endswith(f" --resume --out {out}"), err
    assert resumed(case, out, tmp_path) == expected


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path, slow_case):
    case, expected = slow_case
    out = tmp_path / "run"
    with ForkedCommand(*case.words, "--nproc", 2, "--out", out, TEST_SECONDS="2") as command:
        assert wait_until(lambda: newest(out) >= 1 or command.ended, seconds=90)
        command.interrupt(signal.SIGTERM)
        time.sleep(0.3)
        command.interrupt(signal.SIGTERM)
        began = time.monotonic()
        code, _, err = command.finish()
        assert wait_until(lambda: not command.processes(), seconds=10)
    assert code == 1 and time.monotonic() - began < 8, err
    assert "Traceback" not in err, err
    assert resumed(case, out, tmp_path) == expected


@pytest.mark.slow
def test_a_killed_worker_is_started_again(tmp_path, slow_case):
    case, expected = slow_case
    out = tmp_path / "run"
    words = [*case.words, "--nproc", 2, "--restarts", 1, "--out", out]
    with ForkedCommand(*words, TEST_SECONDS="0.3") as command:
        assert wait_until(lambda: newest(out) >= 2 or command.ended, seconds=90)
        os.kill(command.worker(rank=1), signal.SIGKILL)
        code, _, err = command.finish()
    assert code == 0, err
    assert "(restart 1 after a failure)" in err
    assert result(out) == expected


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Return the experiment file and the run directory of a run of two steps in one process."""
    directory = tmp_path_factory.mktemp("finished")
    settings = {"checkpoint_every": 1, "eval_dataset": None, "batch_size": 2}
    experiment = write_experiment(directory, steps=2, **settings)
    assert main(["run", str(experiment), "--out", str(directory / "run")]) == 0
    return str(experiment), directory / "run"


def test_a_finished_run_stays_as_it_is(finished, capsys):
    experiment, out = finished
    before = (out / "summary.json").read_bytes()
    for source in (out, out / "checkpoints"):
        capsys.readouterr()
        assert main(["run", experiment, "--resume", str(source)]) == 0
        said = capsys.readouterr().err
        assert said == f"realhf: the run {out} has ended after step 2: raise --steps to train further\n"
    assert (out / "summary.json").read_bytes() == before
    assert not (out / "checkpoints" / "metrics.jsonl").exists()


def test_a_branch_with_nothing_to_do(finished, tmp_path, capsys):
    experiment, out = finished
    last = out / "checkpoints/step_2"
    capsys.readouterr()
    assert main(["run", experiment, "--resume", str(last), "--out", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"realhf: checkpoint {last} leaves nothing to do, as steps is 2: raise --steps")


def test_a_branch_of_another_experiment_is_named(finished, tmp_path, capsys):
    experiment, out = finished
    first, branch = out / "checkpoints/step_1", tmp_path / "branch"
    words = ["--seed", "7", "--batch-size", "3", "--actor.optimizer.lr", "0.5", "--steps", "3"]
    capsys.readouterr()
    assert main(["run", experiment, "--resume", str(first), "--out", str(branch), *words]) == 0
    said = capsys.readouterr().err
    lines = [line for line in said.splitlines() if "continues as another experiment: " in line]
    assert len(lines) == 1 and lines[0].startswith("realhf: warning: the run ")
    changes = ["batch_size was 2 and is 3", "seed was 0 and is 7", "actor.optimizer.lr was 0.003 and is 0.5"]
    assert sorted(lines[0].partition(": the run continues as another experiment: ")[2].split(", ")) == sorted(
        changes
    )
    assert json.loads((branch / "summary.json").read_text())["steps"] == 3


def test_another_model_is_refused(finished, tmp_path, capsys):
    experiment, out = finished
    other = write_experiment(tmp_path, model={"hidden_size": 64}, steps=3, batch_size=2, eval_dataset=None)
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    capsys.readouterr()
    assert main(["run", str(other), "--resume", "--out", str(out)]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith(f"realhf: checkpoint {out}/checkpoints/step_2 is of another model: ")
    assert "hidden_size" in said
    after = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    changed = [name for name in before if before[name] != after.get(name)]
    assert changed == ["run.lock"] or not changed, changed
