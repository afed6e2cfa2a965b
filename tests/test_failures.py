"""What goes wrong in the middle of a run ends it with a sentence, and leaves no process behind."""

import os
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from realhf.checkpoint.hf import save_weights
from realhf.cli.main import main
from tests.cli_tools import (
    GRPO_LAYOUTS,
    REALHF,
    Command,
    ForkedCommand,
    read_jsonl,
    torchrun_on,
    wait_until,
    write_experiment,
    write_plan,
)
from tests.nn.tiny import build
from tests.runtime.tiny import HF_CONFIG, write_task
from tests.two_hosts import two_hosts_or_skip

MAX_SECONDS = 30  # Until all processes are gone.
REWARD = """
calls = []

def moody_reward(prompts, completions, completion_ids, answer):
    calls.append(len(prompts))
    scores = [float(len(ids)) for ids in completion_ids]
    if len(calls) > 2:  # The first is the evaluation, the second step 1.
        [1 // (not p.startswith('1')) for p in prompts]
    return scores

experiment.reward_function = moody_reward
"""
SAYS = (
    "reward function moody_reward raised ZeroDivisionError", "tiny_experiment.py:", "on sample ",
    "with the prompt '1",
)


def test_a_failure_of_a_single_process_names_the_last_checkpoint(tmp_path, capsys, monkeypatch):
    experiment = write_experiment(tmp_path, body=REWARD)
    words = ["run", str(experiment), "--checkpoint_every", "1", "--steps", "4"]
    monkeypatch.setattr("sys.argv", ["realhf", *words])
    for out, period in [(tmp_path / "with", "1"), (tmp_path / "without", "0")]:
        words[3] = period
        assert main([*words, "--out", str(out)]) == 2
        fault, *way_on = [x for x in capsys.readouterr().err.splitlines() if x.startswith("realhf: ")]
        assert "moody_reward raised ZeroDivisionError" in fault and "on_failure='drop' leaves such" in fault
        command = f"realhf run {experiment} --checkpoint_every 1 --steps 4 --resume --out {out}"
        says = f"realhf: the last checkpoint is that of step 1; to continue: {command}"
        assert way_on == ([says] if period == "1" else [])


@pytest.mark.slow
def test_reward_function(tmp_path):
    """tests/rewards/test_scoring.py has what else may be wrong with what one returns."""
    experiment = write_experiment(tmp_path, body=REWARD)
    plan, out = write_plan(tmp_path, {**GRPO_LAYOUTS, "reward_forward": "d2@2-3"}), tmp_path / "run"
    with ForkedCommand("run", experiment, "--plan", plan, "--out", out) as command:
        returncode, _, err = command.finish()
        assert wait_until(lambda: not command.processes(), seconds=MAX_SECONDS)
    assert returncode == 2, err
    assert "Traceback" not in err
    *sentences, way_on = [line for line in err.splitlines() if line.startswith("realhf: ")]
    assert 1 <= len(sentences) <= 2, err  # Two ranks run the function.
    assert "the last checkpoint is that of step 1" in way_on
    for sentence in sentences:
        for part in SAYS:
            assert part in sentence
    assert [step["step"] for step in read_jsonl(out / "metrics.jsonl")] == [0, 1]
    assert len(read_jsonl(out / "eval.jsonl")) == 5
    assert {event["step"] for event in read_jsonl(out / "timeline.jsonl")} >= {1}
    assert (out / "config.json").is_file() and (out / "plan.yaml").is_file()


SHRINK = """
import os
import time

path, find = Path({path!r}), experiment.tokenizer_dir
experiment.actor = replace(experiment.actor, model=str(path.parent), random_init=False)
calls = []

def tokenizer_dir():
    calls.append(1)
    if len(calls) == 2 and "RANK" in os.environ:  # Checked, and not read yet.
        size = path.stat().st_size
        path.with_name("checked." + os.environ["RANK"]).touch()
        while len(list(path.parent.glob("checked.*"))) < int(os.environ["WORLD_SIZE"]):
            time.sleep(0.05)
        if os.environ["RANK"] in {ranks}:
            os.truncate(path, size // 8 * 4)
    return find()

experiment.tokenizer_dir = tokenizer_dir
"""


@pytest.mark.slow
def test_weights_that_break_behind_the_check(tmp_path):
    weights = write_task(tmp_path / "weights")
    save_weights(weights, build(HF_CONFIG))
    body = SHRINK.format(path=str(weights / "model.safetensors"), ranks=("0", "1"))
    experiment, out = write_experiment(tmp_path, body=body), tmp_path / "run"
    plan = write_plan(tmp_path, {**dict.fromkeys(GRPO_LAYOUTS, "d2t2@0-3"), "ref_forward": "t2@2-3"})
    with ForkedCommand("run", experiment, "--plan", plan, "--out", out) as command:
        code, _, err = command.finish()
        assert wait_until(lambda: not command.processes(), seconds=MAX_SECONDS)
    assert code == 2, err
    assert "Traceback" not in err
    sentences = [line for line in err.splitlines() if line.startswith("realhf: ")]
    assert len(sentences) == 1, err
    assert sentences[0].startswith(f"realhf: actor.model: {weights}/model.safetensors is truncated: ")


@pytest.mark.slow
def test_killed_worker(tmp_path):
    experiment, out = write_experiment(tmp_path, steps=100_000), tmp_path / "run"
    with ForkedCommand("run", experiment, "--nproc", 2, "--out", out) as command:
        metrics = out / "metrics.jsonl"

        def has_begun() -> bool:
            return metrics.exists() and metrics.read_text().count("\n") > 2

        assert wait_until(lambda: has_begun() or command.ended, seconds=90)
        assert not command.ended, command.finish()
        os.kill(command.worker(rank=1), signal.SIGKILL)
        killed = time.monotonic()
        returncode, _, err = command.finish(timeout=MAX_SECONDS)
        assert wait_until(lambda: not command.processes(), seconds=killed + MAX_SECONDS - time.monotonic())
    assert returncode == 1, err
    assert "Traceback" not in err
    sentences = [line for line in err.splitlines() if line.startswith("realhf: ")]
    assert any("rank 1" in sentence and "SIGKILL" in sentence for sentence in sentences), err
    assert [step["step"] for step in read_jsonl(metrics)][:3] == [0, 1, 2]


ONE_RAISES = """
import os
if os.environ.get("RANK") == "1":
    raise RuntimeError("no data here")
"""


@pytest.mark.slow
def test_what_another_rank_raises_is_heard(tmp_path):
    experiment, out = write_experiment(tmp_path, body=ONE_RAISES), tmp_path / "run"
    with ForkedCommand("run", experiment, "--nproc", 2, "--out", out) as command:
        code, _, err = command.finish()
    line = experiment.read_text().splitlines().index('    raise RuntimeError("no data here")') + 1
    where = f"realhf: experiment {experiment} line {line}"
    assert (code, err) == (2, f"{where}: RuntimeError: no data here (rank 1)\n")


@pytest.mark.slow
def test_hosts_hear_one_another(tmp_path):
    """Data that only the second host lacks: both say so, and torchrun gives it as the reason."""
    body = """
import os
if os.environ.get("GROUP_RANK") == "1":
    experiment.dataset = replace(experiment.dataset, path="not/here.jsonl")
"""
    experiment, out = write_experiment(tmp_path, body=body), tmp_path / "run"
    fault = f"{experiment}: dataset.path 'not/here.jsonl': there is no such file"
    with ExitStack() as stack:
        hosts = stack.enter_context(two_hosts_or_skip())
        commands = [
            stack.enter_context(command)
            for command in torchrun_on(hosts, "-m", "realhf", "run", experiment, "--out", out, per_host=1)
        ]
        answers = [command.finish() for command in commands]
    for where, (code, _, err) in zip(("rank 1, host 1", "rank 1"), answers, strict=True):
        assert code == 1, err  # It is torchrun's.
        sentences = [line for line in err.splitlines() if line.startswith("realhf: ")]
        assert sentences == [f"realhf: {fault} ({where})"]
    # A torchrun whose peer, with the store, has ended first reports that instead.
    assert any(f"traceback : {fault}" in err for _, _, err in answers)


SLOW_REWARD = """
import time

def slow_reward(prompts, completions, completion_ids, answer):
    time.sleep({seconds})
    return [float(len(ids)) for ids in completion_ids]

experiment.reward_function, experiment.eval_dataset = slow_reward, None
"""


@pytest.mark.slow
def test_a_slow_reward_is_not_a_dead_peer(tmp_path):
    experiment = write_experiment(tmp_path, body=SLOW_REWARD.format(seconds=8), steps=1)
    out = tmp_path / "run"
    with ForkedCommand("run", experiment, "--nproc", 2, "--timeout", 5, "--out", out) as command:
        code, _, err = command.finish()
    assert code == 0, err
    assert read_jsonl(out / "metrics.jsonl")[0]["timing_s/reward_forward"] >= 8


@pytest.mark.slow
def test_a_stopped_worker_is_named(tmp_path):
    experiment = write_experiment(tmp_path, body=SLOW_REWARD.format(seconds=0.1), steps=100_000)
    out = tmp_path / "run"
    with ForkedCommand("run", experiment, "--nproc", 2, "--timeout", 3, "--out", out) as command:
        metrics = out / "metrics.jsonl"
        assert wait_until(lambda: command.ended or (metrics.exists() and metrics.read_text()), seconds=90)
        assert not command.ended, command.finish()
        reporter, stopped = command.worker(rank=0), command.worker(rank=1)
        os.kill(stopped, signal.SIGSTOP)
        assert wait_until(lambda: reporter not in command.processes(), seconds=MAX_SECONDS)
        os.kill(stopped, signal.SIGCONT)  # Else the launcher waits 30 s before it kills it.
        code, _, err = command.finish()
        assert wait_until(lambda: not command.processes(), seconds=MAX_SECONDS)
    assert code == 1
    says = [line for line in err.splitlines() if "no sign of life" in line]
    assert len(says) == 1 and says[0].startswith("realhf: rank 1 has given no sign of life for "), err
    assert "(--timeout); the last was of " in says[0]


@pytest.mark.parametrize(
    "environment",
    [{}, {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}],
    ids=["local", "torchrun"],
)
def test_run_directory_in_use(tmp_path, capsys, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    experiment, out = write_experiment(tmp_path), tmp_path / "run"
    (out / "hf").mkdir(parents=True)
    (out / "metrics.jsonl").write_text('{"step": 1}\n')
    (out / "hf" / "notes.txt").write_text("mine")
    before = _contents(out)
    assert main(["run", str(experiment), "--nproc", "2", "--out", str(out)]) == 2
    err = capsys.readouterr().err
    mend = "add --resume to continue it, choose another directory or remove it"
    assert err == f"realhf: --out {out} already holds a run: {mend}\n"
    assert _contents(out) == before


def _contents(directory: Path) -> dict[str, tuple[int, bytes]]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_out_that_is_a_file(tmp_path, capsys):
    (tmp_path / "run").write_text("")
    assert main(["run", str(write_experiment(tmp_path)), "--nproc", "2", "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"realhf: --out {tmp_path / 'run'} is a file: name a directory\n"


@pytest.mark.parametrize("threads", ["abc", "0", "-2", ""])
def test_number_of_threads(tmp_path, capsys, monkeypatch, threads):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert main(["check", str(write_experiment(tmp_path))]) == 2
    must = "it must be a whole number of at least 1"
    assert capsys.readouterr().err == f"realhf: OMP_NUM_THREADS is {threads!r}: {must}\n"


def test_traceback_on_request(tmp_path, capsys):
    experiment = write_experiment(tmp_path, body="1 / 0")
    assert main(["check", str(experiment), "--traceback"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err and f'File "{experiment}"' in err
    assert err.splitlines()[-1].startswith(f"realhf: experiment {experiment} line ")


@pytest.mark.slow
def test_host_without_loopback(tmp_path):
    experiment, out = write_experiment(tmp_path), tmp_path / "run"
    if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode != 0:
        pytest.skip("no network namespaces here")
    with Command("unshare", "-n", *REALHF, "run", experiment, "--nproc", 2, "--out", out) as command:
        code, _, err = command.finish()
    assert code == 2 and err.count("\n") == 1, err
    assert err.startswith("realhf: local workers meet on a free TCP port of localhost, and none can be ")


def test_interrupt_while_modules_are_loaded(tmp_path):
    """Ctrl-C before the workers start ends in a sentence."""
    begun = tmp_path / "begun"
    body = f"import time\nPath({str(begun)!r}).touch()\ntime.sleep(60)"
    experiment = write_experiment(tmp_path, body=body)
    with ForkedCommand("run", experiment, "--nproc", 2, "--out", tmp_path / "run") as command:
        assert wait_until(begun.exists, seconds=60)
        command.interrupt()
        code, _, err = command.finish()
    assert (code, err) == (1, "realhf: ended by SIGINT\n")


def test_a_deleted_run_directory_is_one_sentence(tmp_path):
    body = """
import shutil

def reward(prompts, completions, completion_ids, answer):
    if not calls.append(1) and len(calls) == 2:
        shutil.rmtree({out!r})
    return [float(len(ids)) for ids in completion_ids]

calls = []
experiment.reward_function, experiment.eval_dataset = reward, None
"""
    out = tmp_path / "run"
    experiment = write_experiment(tmp_path, body=body.format(out=str(out)), steps=9)
    with ForkedCommand("run", experiment, "--out", out) as command:
        code, _, err = command.finish()
    sentences = [line for line in err.splitlines() if line.startswith("realhf: ")]
    assert sentences == [f"realhf: --out {out} has been deleted while the run wrote to it"], err
    assert code == 2 and "Traceback" not in err and not out.exists()


def test_a_refused_resume_does_not_say_how_to_continue(grpo_run, tmp_path):
    """The run has nothing to do, or another holds its directory."""
    experiment, plan, run = grpo_run
    out = tmp_path / "run"
    shutil.copytree(run, out)
    (out / "summary.json").unlink()
    words = ["run", experiment, "--plan", plan, "--out", out, "--seed", 3, "--resume"]
    with ForkedCommand(*words, "--steps", 1) as command:
        code, _, err = command.finish()
    sentences = [line for line in err.splitlines() if line.startswith("realhf: ")]
    assert code == 2 and len(sentences) == 1 and "leaves nothing to do" in sentences[0], err


def test_out_of_memory(tmp_path, capsys):
    words = ["--sampling.max-new-tokens", str(10**14), "--eval-every", "0"]
    assert main(["run", str(write_experiment(tmp_path)), "--out", str(tmp_path / "run"), *words]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("realhf: call 'actor_generate' ran out of memory on rank 0 (")
    assert "sampling.max_new_tokens" in sentence and "enforce fail" not in sentence
