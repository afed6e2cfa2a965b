"""Clock: times what all ranks do at once, since they share the machine's memory in a run, too."""

import statistics
import time
from collections.abc import Callable

import torch

from realhf.dist.group import World

_SECONDS, _REPEATS = 0.6, (3, 9)  # Rivals are repeated for so long, at least and at most so often.


class Clock:
    def __init__(self, world: World) -> None:
        self.world = world

    def seconds(self, *rivals: Callable[[], object]) -> list[float]:
        """Median of each over repetitions in turns, mean over ranks; every rank must call this."""
        first = self._agree([self._one(rival) for rival in rivals])  # Also warms up.
        least, most = _REPEATS
        repeats = min(most, max(least, round(_SECONDS / max(sum(first), 1e-9))))
        taken = [[self._one(rival) for rival in rivals] for _ in range(repeats)]
        return self._agree([statistics.median(times) for times in zip(*taken, strict=True)])

    def _one(self, rival: Callable[[], object]) -> float:
        self.world.control.barrier()
        start = time.perf_counter()
        rival()
        if self.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def _agree(self, times: list[float]) -> list[float]:
        by_rank = self.world.control.all_gather_json(times)
        return [statistics.fmean(column) for column in zip(*by_rank, strict=True)]
