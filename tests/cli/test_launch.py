"""Local workers: what the process imports from which they are forked, and what becomes of them and of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fuzz.signals import AIMED, disturb
from realhf.cli.launch import WORKER_NAME
from tests.cli_tools import REALHF, REPO, Command, ForkedCommand, wait_until, write_experiment
from tests.samples import marked

NO_DEVICE = """
import importlib, torch
def refuse(*args, **kwargs):
    raise AssertionError("asks for a device")
for name in ("is_available", "device_count", "current_device", "get_device_capability",
             "get_device_properties", "get_device_name", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
torch._C._cuda_getDeviceCount = torch.accelerator.is_available = refuse
from realhf.cli.launch import PRELOAD
for module in PRELOAD:
    importlib.import_module(module)
try:
    torch.cuda.is_available()
except AssertionError:
    print("nobody has asked")
"""


@pytest.mark.slow
def test_what_workers_are_forked_from_has_asked_for_no_device():
    """A fork of a process that has initialized CUDA could not use it."""
    done = subprocess.run([sys.executable, "-c", NO_DEVICE], capture_output=True, text=True, cwd=REPO)
    assert (done.stdout, done.returncode) == ("nobody has asked\n", 0), done.stderr


def _names(command: Command) -> dict[str, int]:
    """Return name -> process id of the command's processes."""
    return {Path(f"/proc/{pid}/comm").read_text().strip(): pid for pid in command.processes()}


@pytest.mark.slow
@pytest.mark.parametrize("number", marked([signal.SIGINT, signal.SIGTERM], quick=[0]))
def test_a_signal_to_all_processes_of_the_job_is_as_one_to_the_launcher(number, tmp_path):
    """Terminals send it to the launcher's process group, in which no other process is; supervisors send it to
    all processes. The workers save and end, and nothing is left."""
    experiment = write_experiment(tmp_path, steps=1000, eval_dataset=None, checkpoint_every=500)
    out = tmp_path / "run"
    with Command(*REALHF, "run", experiment, "--nproc", 2, "--out", out) as command:
        metrics = out / "metrics.jsonl"
        assert wait_until(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, seconds=60)
        names = _names(command)
        assert {f"{WORKER_NAME}{rank}" for rank in range(2)} <= set(names)
        workers = [names[f"{WORKER_NAME}{rank}"] for rank in range(2)]
        rest = [pid for pid in command.processes() if pid not in workers]
        launcher = min(rest)
        assert all(os.getpgid(pid) == pid for pid in workers) and len(rest) == 3
        assert {os.getsid(pid) for pid in command.processes() if pid != launcher} == {os.getsid(workers[0])}
        assert os.getsid(launcher) != os.getsid(workers[0])
        for pid in command.processes():
            os.kill(pid, number)
        code, _, err = command.finish(timeout=60)
        assert wait_until(lambda: not command.processes(), seconds=10)
    assert code == 1 and f"realhf: ended by {number.name}\n" in err and "the last checkpoint is" in err, err
    assert list((out / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("moment", "number"),
    marked(
        [(moment, number) for moment in AIMED for number in (signal.SIGINT, signal.SIGTERM)], quick=[3, 6]
    ),
)
def test_no_signal_is_lost(moment, number, tmp_path):
    """benchmarks/fuzz/signals.py sends hundreds at random moments."""
    experiment = write_experiment(tmp_path, steps=6, checkpoint_every=2, eval_dataset=None)
    result = disturb(
        experiment, tmp_path / "run", num_ranks=2, number=number, wait=moment, jitter=0.0, to_all=True,
        start=ForkedCommand)
    assert set(result.faults) <= {"late sentence"}, (result.faults, result.text)  # On a busy machine.
    is_done = (tmp_path / "run/summary.json").exists()
    assert is_done or result.code == 1 and f"realhf: ended by {number.name}\n" in result.text, result.text


@pytest.mark.parametrize("number", marked([signal.SIGINT, signal.SIGTERM], quick=[1]))
def test_without_checkpoints_a_signal_ends_a_run_at_once(number, tmp_path):
    experiment = write_experiment(tmp_path, steps=1000, checkpoint_every=0, eval_dataset=None)
    out = tmp_path / "run"
    moment = "the first step has ended"
    result = disturb(
        experiment, out, num_ranks=1, number=number, wait=moment, jitter=0.3, to_all=False,
        start=ForkedCommand)
    assert set(result.faults) <= {"late sentence"}, result
    assert result.text.endswith(f"realhf: ended by {number.name}\n"), result


@pytest.mark.slow
def test_what_nohup_ignores_stays_ignored(tmp_path):
    experiment = write_experiment(tmp_path, steps=30, eval_dataset=None)
    out = tmp_path / "run"
    words = [*REALHF, "run", experiment, "--nproc", 2, "--out", out]
    with Command("sh", "-c", 'trap "" HUP; exec "$@"', "sh", *words) as command:
        metrics = out / "metrics.jsonl"
        assert wait_until(lambda: command.ended or (metrics.exists() and metrics.read_text()), seconds=90)
        for pid in command.processes():
            os.kill(pid, signal.SIGHUP)
        code, _, err = command.finish()
    assert code == 0 and (out / "summary.json").exists(), err
