"""A search is shown while it runs, and real signals end it with the best plan so far."""

import json
import re
import signal
import threading
import time

import pytest

from realhf.execution_plan import ExecutionPlan
from tests.cli_tools import REPO, ForkedCommand, wait_until
from tests.samples import marked

PPO = ["plan", REPO / "examples/ppo_7b.py", "--json", "--gap", "0"]
LONG = [*PPO, "--cluster", "h100-1x8", "--time-limit", "3000"]
"""A search that would go on for an hour."""


class Watched:
    """A command whose standard error is read while it runs."""

    def __init__(self, command):
        self.lines = []
        self._stream = command.stderr
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self._stream:
            self.lines.append(line.rstrip())


@pytest.mark.parametrize("number", marked([signal.SIGINT, signal.SIGTERM], quick=[0]))
def test_a_signal_takes_the_best_plan_so_far(number, tmp_path):
    path = tmp_path / "plan.yaml"
    with ForkedCommand(*LONG, "-o", path) as command:
        read = Watched(command)
        assert wait_until(lambda: read.lines or command.ended, seconds=120)
        shown = r"realhf: searching for \d+\.\d s: best (\S+) s per step, lower bound .* s, gap \d+\.\d%"
        first = re.fullmatch(shown, read.lines[0])
        assert first, read.lines
        command.interrupt(number)
        assert command.wait(120) == 0
        answer = json.loads(command.stdout.read())
    assert read.lines[-1] == f"realhf: the search is ended by {number.name}: this is the best plan so far"
    assert answer["gap"] > 0 and answer["step_seconds"] <= float(first[1]) * 1.01
    layouts = {name: str(call.layout) for name, call in ExecutionPlan.load(str(path)).calls.items()}
    assert layouts == {name: call["layout"] for name, call in answer["calls"].items()}


def test_a_second_signal_ends_the_command(tmp_path):
    path = tmp_path / "plan.yaml"
    with ForkedCommand(*LONG, "-o", path) as command:
        read = Watched(command)
        assert wait_until(lambda: read.lines or command.ended, seconds=120)
        command.interrupt()
        time.sleep(0.05)
        command.interrupt()
        assert command.wait(120) == 1
    assert wait_until(lambda: "ended by SIGINT; no plan is taken" in read.lines[-1], seconds=5), read.lines
    assert not path.exists()


def test_before_there_is_a_plan_a_signal_ends_the_command():
    """The candidates of 1,024 devices take seconds to enumerate."""
    with ForkedCommand(*PPO, "--cluster", "h100-128x8") as command:
        pid = command.pid
        assert wait_until(lambda: _handles_signals(pid), seconds=60)
        time.sleep(1.5)
        command.interrupt()
        code, out, err = command.finish()
    assert (code, out) == (1, "")
    assert re.fullmatch("realhf: ended by SIGINT( before there was a plan)?\n", err), err


def _handles_signals(pid):
    """Return whether the process handles SIGTERM, which it does as soon as Python has started."""
    with open(f"/proc/{pid}/status") as status:
        caught = next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)
