"""Timings on a noisy machine, the facts about it that they depend on, and the memory that processes take."""

import importlib
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from realhf.cluster import host_memory_bytes, num_cores
from realhf.distributed.world import World

Key = TypeVar("Key", bound=Hashable)

_REPETITIONS = (3, 12)  # The smallest and the largest number of repetitions of all work.
_SHORT_SECONDS = 0.02  # Shorter work is repeated within a repetition, up to `_MOST_PER_REPETITION` times.
_MOST_PER_REPETITION = 3


class Clock:
    """A clock for work on all ranks at once.

    A rank's time is the median over repetitions, since the calls of a run vary as much as these do. On a CPU,
    work of one thread that does not communicate is timed by its CPU seconds. Other work on fewer cores than
    busy ranks takes longer by the crowding (see Cluster.crowding): its seconds are divided by that, but not
    below its CPU seconds, as in some repetitions a rank has its core for itself.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        is_cpu = world.device.type == "cpu"
        self._runs_alone = is_cpu and torch.get_num_threads() == 1
        self._cores = num_cores() if is_cpu else math.inf
        self.noise: dict[Any, float] = {}
        """The interquartile range of all work timed so far, relative to its median: the mean over ranks."""

    def seconds(
        self, work: Mapping[Key, Callable[[], object]], *, budget: float = 1.0, waits: bool = True,
        busy: Collection[int] = (),
    ) -> dict[Key, float]:
        """Time all of the work, again and again, for about `budget` seconds. Every rank must call this.

        The result is the mean over the ranks in `busy`, which take part in the work; if it is empty, over all
        ranks. `waits` tells whether the work communicates.
        """
        began = time.perf_counter()
        once = {key: [self._once(function, waits)[0]] for key, function in work.items()}  # Also warms up.
        each = self._agreed({"seconds": [(time.perf_counter() - began) / len(work)]}, busy)["seconds"]
        num_busy = min(len(busy) or self.world.size, self.world.ranks_per_host)
        crowding = 1.0 if self._runs_alone and not waits else self.crowding(num_busy)
        first = self._agreed(once, busy)
        counts = {
            key: max(1, min(_MOST_PER_REPETITION, round(_SHORT_SECONDS / max(seconds, 1e-9))))
            for key, seconds in first.items()}
        least, most = _REPETITIONS
        repetitions = round(budget / (each * sum(counts.values())))
        times: dict[Key, list[float]] = {key: [] for key in work}
        cpu_times: dict[Key, list[float]] = {key: [] for key in work}
        for _ in range(min(most, max(least, repetitions))):
            for key, function in work.items():
                for _ in range(counts[key]):
                    seconds, cpu_seconds = self._once(function, waits)
                    times[key].append(seconds)
                    cpu_times[key].append(cpu_seconds)
        self.noise.update(self._agreed(times, busy, of=relative_spread))
        uncrowded = {key: value / crowding for key, value in self._agreed(times, busy).items()}
        if crowding == 1:
            return uncrowded
        return {key: max(uncrowded[key], value) for key, value in self._agreed(cpu_times, busy).items()}

    def calm_share(self, work: Mapping[Key, Callable[[], object]]) -> float:
        """Return the seconds of work on as many ranks of each host as it has cores, relative to those on all
        ranks. Every rank must call this."""
        per_host = self.world.ranks_per_host
        busy = [rank for rank in range(self.world.size) if rank % per_host < self._cores]
        mine = work if self.world.rank in busy else dict.fromkeys(work, nothing)
        calm = self.seconds(mine, waits=False, busy=busy)
        return min(1.0, sum(calm.values()) / sum(self.seconds(work, waits=False).values()))

    def crowding(self, num_busy: int) -> float:
        """Return how many times longer work takes while so many ranks of a host are busy."""
        return max(1.0, num_busy / self._cores)

    def once(self, function: Callable[[], object], *, waits: bool = True) -> float:
        """Return the seconds on this rank, after all ranks began together."""
        return self._once(function, waits)[0]

    def mean_of_slowest(self, function: Callable[[], object], *, budget: float) -> float:
        """Return the mean seconds of the slowest rank over the repetitions that fit in `budget` seconds.

        A first one, to warm up, does not count. Every rank must call this.
        """
        least, most = _REPETITIONS
        (each,) = self._agreed({"once": [self._once(function, waits=True)[0]]}, ()).values()
        repetitions = max(least, min(most, round(budget / each)))
        mine = [self._once(function, waits=True)[0] for _ in range(repetitions)]
        slowest = map(max, zip(*self.world.control.all_gather_json(mine), strict=True))
        return statistics.fmean(slowest)

    def _once(self, function: Callable[[], object], waits: bool) -> tuple[float, float]:
        """Return the seconds on this rank, after all ranks began together, and its CPU seconds."""
        self.world.control.barrier()
        cpu_start = time.process_time()
        start = time.perf_counter()
        function()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        cpu_seconds = time.process_time() - cpu_start
        return cpu_seconds if self._runs_alone and not waits else seconds, cpu_seconds

    def _agreed(
        self, times: Mapping[Key, list[float]], busy: Collection[int],
        *, of: Callable[[list[float]], float] | None = None,
    ) -> dict[Key, float]:
        """Return a statistic of the times, by default the median: the mean over the busy ranks."""
        mine = [(of or statistics.median)(values) for values in times.values()]
        rows = self.world.control.all_gather_json(mine)
        columns = zip(*(row for rank, row in enumerate(rows) if not busy or rank in busy), strict=True)
        return dict(zip(times, map(statistics.fmean, columns), strict=True))


def nothing() -> None:
    """Do nothing, on a rank that has no part in the timed work."""


def relative_spread(times: list[float]) -> float:
    """Return the interquartile range of times relative to their median; 0 if there is only one."""
    if len(times) == 1:
        return 0.0
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return (high - low) / max(middle, 1e-9)


def describe(world: World) -> dict[str, Any]:
    """Return the facts about the machine and the software, before anything is measured."""
    package = importlib.import_module("realhf")
    cuda = torch.cuda.get_device_name() if world.device.type == "cuda" else None
    return {
        "platform": platform.platform(), "processor": _processor(), "cores": num_cores(),
        "device": cuda or "cpu", "hosts": world.size // world.ranks_per_host, "processes": world.size,
        "threads_per_process": torch.get_num_threads(), "load_before": round(os.getloadavg()[0], 2),
        "torch": str(torch.__version__), "python": platform.python_version(),
        "realhf": package.__version__, "commit": _commit(Path(__file__).parent)}


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _commit(directory: Path) -> str:
    """Return the commit of the clone that the directory is in, or that it is none."""
    try:
        words = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--exclude", "*"]
        described = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip() if described.returncode == 0 else "not a clone"


def device_bytes(world: World) -> float:
    """Return the memory of this rank's device, or on CPU its part of the host's memory."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info()[1]
    return host_memory_bytes() / world.ranks_per_host


def measure_memory(world: World) -> dict[str, float]:
    """Return the bytes that a rank's libraries take, and those of one more group of all ranks.

    They are those of the device, or on CPU the resident memory of the process. The result is empty where the
    system does not tell.
    """
    used = _device_use if world.device.type == "cuda" else _resident_bytes
    if used is _resident_bytes and not Path("/proc/self/statm").exists():
        return {}
    mine = [used(), _growth(world, used) if world.size > 1 else 0.0]
    context, communicator = (max(column) for column in zip(*world.control.all_gather_json(mine), strict=True))
    return {"context_bytes": context, "communicator_bytes": communicator}


def _growth(world: World, used: Callable[[], float]) -> float:
    """Return the bytes that a new group of all ranks takes, with its first messages."""
    before = used()
    group = world.group(range(world.size), purpose="profiled")
    group.all_reduce(torch.zeros(1 << 18, device=world.device))
    return max(0.0, used() - before)


def _device_use() -> float:
    """Return the bytes of the device that are taken by something else than tensors."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return float(total - free - torch.cuda.memory_reserved())


def _resident_bytes() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))
