"""Runs of plan_accuracy.py: realhf's commands on freshly forked workers, and what they have measured."""

import json
import multiprocessing
import os
import socket
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf.cli.main import main as realhf_main

_PRELOAD = ["torch", "torch.distributed", "transformers", "realhf.cli.worker", "accuracy_runs"]
WARM_UP = 2
"""The first steps of each run do not count."""


def realhf(*words: Any, processes: int, log: Path) -> None:
    """Run a command of realhf on that many workers, with their output in a file; end the program if it fails.

    The workers are what `realhf run` starts, but forked from a server that has already imported torch.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # As realhf's commands set it before they import torch.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*map(str, words), "--nproc", str(processes)]
    log.parent.mkdir(exist_ok=True, parents=True)
    workers = [
        context.Process(target=_work, args=(command, rank, processes, port, str(log)))
        for rank in range(processes)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if any(worker.exitcode for worker in workers):
        sys.exit(f"realhf {' '.join(command)}\n{log.read_text()}")


def _work(command: list[str], rank: int, processes: int, port: int, log: str) -> None:
    """Run a command as the worker of this rank."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // processes))
    if processes > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "GROUP_RANK": "0",
            "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "plan_accuracy",
        }
    sys.exit(realhf_main(command))


@dataclass
class Measured:
    """The seconds of steps and, by name, of calls; a call takes as long as its slowest rank."""

    steps: list[float] = field(default_factory=list)
    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, run: Path) -> None:
        """Add the steps of a run, without those that warm it up."""
        events = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
        ends: dict[int, float] = defaultdict(float)
        spans: dict[tuple[int, str], list[float]] = defaultdict(list)
        for event in events:
            if event["kind"] not in ("move", "realloc", "offload"):
                ends[event["step"]] = max(ends[event["step"]], event["end"])
                spans[event["step"], event["name"]].append(event["end"] - event["start"])
        for step in sorted(ends)[WARM_UP:]:
            self.steps.append(ends[step] - ends[step - 1])
        for (step, name), seconds in spans.items():
            if step > WARM_UP:
                self.calls[name].append(max(seconds))

    @property
    def step_seconds(self) -> float:
        return statistics.fmean(self.steps)

    def call_seconds(self, name: str) -> float:
        return statistics.fmean(self.calls[name])
