"""Measures what recording costs a step: hashes of samples, and the tokens of logged rollouts.

    python benchmarks/measure/recording.py               # examples/grpo.py, 16 x 8 samples, one process
    python benchmarks/measure/recording.py --steps 160 --json

One run records in two steps, leaves it out in the next two, and so on, so that a busier time of the machine
meets both kinds. The second step of each pair counts, because rank 0 writes a step while the next one runs.
The cost is the difference between the medians of `timing_s/step` of both kinds, in percent; beside it is the
share of the steps in which the recording functions themselves ran, which varies far less. The exit code is 1
if a goal was missed.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from rich.table import Table

from benchmarks import harness
from benchmarks.measure.checkpoints import prepare
from realhf.cli.main import main as realhf
from realhf.runtime.execute.executor import Executor
from realhf.runtime.records.digest_file import DigestFile
from realhf.runtime.samples.digests import DigestTaker

REPO = Path(__file__).parents[2]
_WARM_UP = 4
_MAX_PERCENT = 2.0


class Switch:
    """Lets functions run in two of every four steps, and adds up their seconds."""

    def __init__(self) -> None:
        self.step = 0
        self.seconds: dict[int, float] = {}

    @property
    def is_on(self) -> bool:
        return self.step % 4 in (1, 2)

    def counted(self, function: Callable[..., Any], instead: Any) -> Callable[..., Any]:
        """Return a function that runs in steps that are on, and returns `instead` in others."""

        def run(*values: Any, **named: Any) -> Any:
            if not self.is_on:
                return instead
            start = time.perf_counter()
            step = self.step
            result = function(*values, **named)
            self.seconds[step] = self.seconds.get(step, 0.0) + time.perf_counter() - start
            return result

        return run

    def begin(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that counts steps."""

        def run(*values: Any, **named: Any) -> Any:
            self.step += 1
            return function(*values, **named)

        return run


def run(directory: Path, *, steps: int) -> tuple[Switch, dict[int, float]]:
    """Run GRPO and return the switch, and the seconds of each step."""
    task = prepare(directory / "task")
    switch = Switch()
    words = [
        "run", "examples/grpo.py", "--nproc", 1, "--out", directory / "run", "--steps", steps,
        "--eval-every", 0, "--checkpoint-every", 0, "--dataset.path", task / "prompts.jsonl",
        "--eval-dataset.path", task / "held_out.jsonl", "--actor.model", task / "model",
        "--actor.random-init", "--batch-size", 16]
    os.chdir(REPO)
    with (
        patch.object(Executor, "begin_step", switch.begin(Executor.begin_step)),
        patch.object(DigestTaker, "of_call", switch.counted(DigestTaker.of_call, [])),
        patch.object(DigestTaker, "of_rows", switch.counted(DigestTaker.of_rows, [])),
        patch.object(DigestFile, "add", switch.counted(DigestFile.add, None)),
    ):
        assert realhf([str(word) for word in words]) == 0
    records = [json.loads(line) for line in (directory / "run/metrics.jsonl").read_text().splitlines()]
    return switch, {record["step"]: record["timing_s/step"] for record in records if record["step"]}


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    hardware = harness.machine()
    with harness.scratch_directory(1 << 30) as scratch:
        switch, seconds = run(Path(scratch), steps=args.steps)
        num_bytes = (Path(scratch) / "run/digests.jsonl").stat().st_size
    counted = {step: value for step, value in seconds.items() if step > _WARM_UP}
    on = [value for step, value in counted.items() if step % 4 == 2]
    off = [value for step, value in counted.items() if step % 4 == 0]
    percent = 100 * (statistics.median(on) / statistics.median(off) - 1)
    recorded = sum(value for step, value in seconds.items() if step % 4 in (1, 2))
    share = 100 * sum(switch.seconds.values()) / recorded
    goals = [harness.Goal("percent of a step in recording", share, at_most=_MAX_PERCENT)]
    table = Table("steps", "median s", "fastest", "slowest", title="Time of a step")
    for name, times in (("recorded", on), ("not recorded", off)):
        table.add_row(name, *(f"{value:.4f}" for value in (statistics.median(times), min(times), max(times))))
    document: dict[str, Any] = {
        "benchmark": "recording", "machine": hardware, "settings": vars(args), "recorded": on,
        "not_recorded": off, "percent_longer": percent, "percent_in_recording": share,
        "digest_bytes": num_bytes}
    if not args.json:
        harness.progress(f"recorded steps are {percent:+.2f}% longer; digests have {num_bytes:,} bytes")
    return harness.report(document, tables=[table], goals=goals, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
