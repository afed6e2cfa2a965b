"""Sends signals to short runs at random moments and at aimed ones, from their start to their end.

Each run must answer at once with a sentence, end with exit code 1 and no traceback, and leave no process
behind; or it had already done all its steps. Runs have one process or two, with checkpoints or not.
Signals go to the launcher alone or, as from some supervisors, to all processes.
"""

import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.cli_tools import Command, realhf, wait_until, write_experiment

_STEPS = 6
_BEFORE_PYTHON_SECONDS = 0.12
"""Python itself starts within this time; it ends by the signal then, without a sentence of ours."""
_LEFT_SECONDS = 10.0
"""Time in which all processes must have gone."""


@dataclass
class Result:
    """The end of a run to which a signal was sent, and what was wrong with it."""

    number: signal.Signals
    num_ranks: int
    moment: str
    code: int
    seconds_to_sentence: float | None
    seconds_to_end: float
    faults: list[str] = field(default_factory=list)
    text: str = ""


class Run:
    """A run whose standard error is read line by line, each with the time at which it came."""

    def __init__(self, command: Command, out: Path) -> None:
        self.command = command
        self.out = out
        self.began = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.command.stderr:
            self.lines.append((time.monotonic(), line))

    def finish(self, timeout: float) -> int:
        code = self.command.wait(timeout)
        self._reader.join(1.0)  # A process that is left may hold the pipe.
        return code

    def processes(self) -> list[int]:
        """Return the ids of all living processes of this run."""
        return list(self.command.processes())


AIMED: dict[str, Callable[[Run], bool]] = {
    "the fork server has started": lambda run: len(run.processes()) >= 2,
    "workers have started": lambda run: len(run.processes()) >= 4,
    "the directory is claimed": lambda run: run.out.is_dir(),
    "the first step has ended": lambda run: (run.out / "metrics.jsonl").exists(),
    "a checkpoint is there": lambda run: any(run.out.glob("checkpoints/step_*")),
    "the model is exported": lambda run: (run.out / "hf").is_dir(),
    "the summary is written": lambda run: (run.out / "summary.json").exists(),
}


def disturb(experiment: Path, out: Path, *, num_ranks: int, number: signal.Signals, wait: float | str,
            jitter: float, to_all: bool, start: Callable[..., Command] = realhf) -> Result:
    """Start a run by `start`, and send it a signal after `wait` seconds or at the aimed moment `wait`."""
    with start("run", experiment, "--nproc", num_ranks, "--out", out) as command:
        return _disturb(Run(command, out), num_ranks, number, wait, jitter, to_all)


def _disturb(
    run: Run, num_ranks: int, number: signal.Signals, wait: float | str, jitter: float, to_all: bool
) -> Result:
    try:
        if isinstance(wait, str):
            while not AIMED[wait](run) and not run.command.ended:
                time.sleep(0.005)
            time.sleep(jitter)
        else:
            time.sleep(wait)
        if run.command.ended:
            return Result(number, num_ranks, "ended before", run.finish(0.0), None, 0.0)
        sent = time.monotonic()
        for pid in run.processes() if to_all else [run.command.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        code = run.finish(120.0)
        ended = time.monotonic()
        later = [(at, line) for at, line in run.lines if at >= sent and line.startswith("realhf: ")]
        says = [at for at, line in later if number.name in line or "a second signal" in line]
        text = "".join(line for _, line in run.lines)
        moment = wait if isinstance(wait, str) else f"{sent - run.began:.2f} s"
        first = says[0] - sent if says else None
        result = Result(number, num_ranks, moment, code, first, ended - sent, text=text)
        is_done = (run.out / "summary.json").exists()
        if "Traceback" in text or "Exception ignored" in text:
            result.faults.append("traceback")
        if not is_done and code == 0:
            result.faults.append("lost")
        if not is_done and sent - run.began > _BEFORE_PYTHON_SECONDS:
            result.faults += ["no sentence"] * (first is None) + [f"code {code}"] * (code not in (0, 1))
        if first is not None and first > 1.0:
            result.faults.append("late sentence")
        if not wait_until(lambda: not run.processes(), seconds=_LEFT_SECONDS):
            result.faults.append(f"{len(run.processes())} processes left")
        return result
    except TimeoutError:
        text = "".join(line for _, line in run.lines)
        return Result(number, num_ranks, str(wait), -1, None, 120.0, ["goes on"], text)


def main() -> int:
    """Send the signals and print a table; return 1 if one of them has led to a fault."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--signals", type=int, default=200, help="of SIGINT, and as many of SIGTERM")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as base:
        for name in ("with", "without"):
            Path(base, name).mkdir()
        experiment, without = (
            write_experiment(Path(base, name), steps=_STEPS, checkpoint_every=period, eval_every=3)
            for name, period in (("with", 2), ("without", 0)))
        lengths = {}
        for num_ranks in (1, 2):
            out = Path(base, f"whole-{num_ranks}")
            with realhf("run", experiment, "--nproc", num_ranks, "--out", out) as command:
                run = Run(command, out)
                assert run.finish(300.0) == 0, run.lines
                lengths[num_ranks] = time.monotonic() - run.began
        for i in range(2 * options.signals):
            num_ranks = rng.choice((1, 2))
            wait: float | str = rng.uniform(0.0, lengths[num_ranks])
            if rng.random() < 0.3:
                wait = rng.choice(list(AIMED)[0 if num_ranks == 2 else 2 :])
            out = Path(base, f"run-{i}")
            chosen = without if rng.random() < 0.2 and wait != "a checkpoint is there" else experiment
            result = disturb(
                chosen, out, num_ranks=num_ranks, wait=wait, to_all=rng.random() < 0.5,
                jitter=rng.uniform(0, 0.1), number=(signal.SIGINT, signal.SIGTERM)[i % 2])
            results.append(result)
            if result.faults:
                print(result.number.name, result.num_ranks, result.moment, result.code, result.faults,
                      result.text, file=sys.stderr, flush=True)
    sent = [result for result in results if result.moment != "ended before"]
    said = sorted(result.seconds_to_sentence for result in sent if result.seconds_to_sentence is not None)
    report = {
        "sent": dict(Counter(f"{result.number.name}, {result.num_ranks} ranks" for result in sent)),
        "faults": dict(Counter(fault for result in results for fault in result.faults)),
        "seconds_to_sentence": {"median": said[len(said) // 2], "max": said[-1]},
        "seconds_of_a_whole_run": lengths,
    }
    if options.json:
        print(json.dumps(report))
    else:
        for name, value in report.items():
            print(f"{name}: {value}")
    return int(bool(report["faults"]))


if __name__ == "__main__":
    sys.exit(main())
