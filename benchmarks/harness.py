"""Shared parts of the benchmarks: starting ranks, timing rivals in turns, goals, and the report."""

import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table


def run_ranks(fn: Callable[..., Any], num_ranks: int, *args: Any) -> list[Any]:
    """Run `fn(rank, num_ranks, store, *args)` in a fresh process of one thread per rank; return the results.

    This process keeps the store alive, on a port that the system chooses. The first exception of a rank ends
    the others and is raised here with its traceback as a note.
    """
    os.environ["OMP_NUM_THREADS"] = "1"  # before the fork server imports torch
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = [], []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            processes.append(context.Process(
                target=_rank_main, args=(theirs, fn, rank, num_ranks, store.port, args), daemon=True
            ))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        return _collect(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        for pipe in wait([pipe for rank, pipe in enumerate(pipes) if rank not in results]):
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                error, results[rank] = pipe.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died without a word (out of memory?)") from None
            if error is not None:
                raise RuntimeError(f"rank {rank} failed:\n{error}")
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection, fn: Callable[..., Any], rank: int, num_ranks: int, port: int, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    orphaned = threading.Thread(target=_end_with_parent, daemon=True)
    orphaned.start()
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        pipe.send((None, fn(rank, num_ranks, store, *args)))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    orphaned.join()  # The parent ends this process: to leave early would break the others' connections.


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def scratch_directory(need_bytes: int) -> Iterator[str]:
    """Make a directory, in memory (tmpfs) if there is enough; even a run that is terminated removes it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    shared = "/dev/shm"
    in_memory = os.path.isdir(shared) and shutil.disk_usage(shared).free > need_bytes
    if not in_memory:
        progress(f"{shared} lacks {need_bytes >> 20} MiB: checkpoints go to {tempfile.gettempdir()}")
    with tempfile.TemporaryDirectory(prefix="benchmark-", dir=shared if in_memory else None) as path:
        yield path


def time_interleaved(
    rivals: Mapping[str, Callable[[], object]], *, repeats: int, barrier: Callable[[], object]
) -> dict[str, list[float]]:
    """Return this rank's seconds per rival and repetition.

    Every repetition runs all rivals and starts with another one, so that a slow moment affects all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    names = list(rivals)
    for repeat in range(repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            barrier()
            start = time.perf_counter()
            rivals[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median_of_slowest(by_rank: Sequence[Sequence[float]]) -> float:
    """Return the median over repetitions, each of which takes as long as its slowest rank."""
    return statistics.median(max(times) for times in zip(*by_rank, strict=True))


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def machine() -> dict[str, Any]:
    """Return the properties of the machine and the software that timings depend on."""
    cores = len(os.sched_getaffinity(0))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": cores, "memory_gib": round(memory_gib, 1), "torch": torch.__version__, "backend": "gloo",
        "python": platform.python_version(), "load_before": os.getloadavg()[0],
    }


@dataclass(frozen=True)
class Goal:
    """A goal of a benchmark: `value` is at least `at_least` and at most `at_most`, where given."""

    what: str
    value: float
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        low, high = self.at_least, self.at_most
        return bool((low is None or self.value >= low) and (high is None or self.value <= high))


def progress(text: str) -> None:
    """Print a line on standard error; standard output is for the result."""
    print(text, file=sys.stderr, flush=True)


def report(document: dict[str, Any], *, tables: Sequence[Table], goals: Sequence[Goal], as_json: bool) -> int:
    """Print one JSON document, or tables and goals; return the exit code, which is 1 if a goal is missed."""
    if as_json:
        document = {**document, "goals": [{**asdict(goal), "met": goal.met} for goal in goals]}
        print(json.dumps(document, indent=2))
    else:
        console = Console(width=None if sys.stdout.isatty() else 160)
        for table in tables:
            console.print(table)
        verdicts = Table("goal", "wanted", "measured", "", title="Goals")
        for goal in goals:
            verdict = "[green]met" if goal.met else "[red]missed"
            ends = ((">=", goal.at_least), ("<=", goal.at_most))
            wanted = ", ".join(f"{sign} {end:.2f}" for sign, end in ends if end is not None)
            verdicts.add_row(goal.what, wanted, f"{goal.value:.2f}", verdict)
        console.print(verdicts)
        console.print("  ".join(f"{key}: {value}" for key, value in document["machine"].items()))
    return int(not all(goal.met for goal in goals))
