"""A clock that times work on all ranks at once, since they share the machine's memory in a run, too."""

import statistics
import time
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TypeVar

import torch

from realhf.dist.world import World

Key = TypeVar("Key", bound=Hashable)

_REPETITIONS = (3, 12)  # The smallest and the largest number of repetitions of all work.
_SHORT_SECONDS = 0.02  # Shorter work is repeated within a repetition, up to `_MOST_PER_REPETITION` times.
_MOST_PER_REPETITION = 3


class Clock:
    """A clock for work on all ranks at once.

    A rank's time is the lower quartile over repetitions, as other processes can only slow some of them down.
    Work of one thread on a CPU that does not communicate is timed by its CPU seconds.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._runs_alone = world.device.type == "cpu" and torch.get_num_threads() == 1

    def seconds(
        self, work: Mapping[Key, Callable[[], object]], *, budget: float = 1.0, waits: bool = True,
        busy: Collection[int] = (),
    ) -> dict[Key, float]:  # fmt: skip
        """Time all of the work, again and again, for about `budget` seconds. Every rank must call this.

        The result is the mean over the ranks in `busy`, which take part in the work; if it is empty, over all
        ranks. `waits` tells whether the work communicates.
        """
        began = time.perf_counter()
        once = {key: [self.once(function, waits=waits)] for key, function in work.items()}  # Also warms up.
        (each,) = self._agreed({"seconds": [(time.perf_counter() - began) / len(work)]}, busy).values()
        first = self._agreed(once, busy)
        counts = {
            key: max(1, min(_MOST_PER_REPETITION, round(_SHORT_SECONDS / max(seconds, 1e-9))))
            for key, seconds in first.items()
        }
        least, most = _REPETITIONS
        repetitions = round(budget / (each * sum(counts.values())))
        taken: dict[Key, list[float]] = {key: [] for key in work}
        for _ in range(min(most, max(least, repetitions))):
            for key, function in work.items():
                taken[key] += [self.once(function, waits=waits) for _ in range(counts[key])]
        return self._agreed(taken, busy)

    def once(self, function: Callable[[], object], *, waits: bool = True) -> float:
        """Return the seconds on this rank, after all ranks began together."""
        now = time.process_time if self._runs_alone and not waits else time.perf_counter
        self.world.control.barrier()
        start = now()
        function()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return now() - start

    def _agreed(self, taken: Mapping[Key, list[float]], busy: Collection[int]) -> dict[Key, float]:
        mine = [_lower_quartile(times) for times in taken.values()]
        rows = self.world.control.all_gather_json(mine)
        columns = zip(*(row for rank, row in enumerate(rows) if not busy or rank in busy), strict=True)
        return dict(zip(taken, map(statistics.fmean, columns), strict=True))


def _lower_quartile(times: list[float]) -> float:
    return times[0] if len(times) == 1 else statistics.quantiles(times, n=4, method="inclusive")[0]
