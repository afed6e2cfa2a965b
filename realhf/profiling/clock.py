"""A clock that times work on all ranks at once, since they share the machine's memory in a run, too."""

import math
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any, TypeVar

import torch

from realhf.cluster import num_cores
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
