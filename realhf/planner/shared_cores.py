"""SharedCores: how much longer calls take on cores that processes share, and how cores bound a step.

On CPU a cluster's devices are processes, and a host may have fewer cores than processes. Cores are shared
evenly among all processes that could be busy.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from realhf.cluster import Cluster


class SharedCores:
    """The cores of a cluster's hosts; `are_shared` is False where each device has its own."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.are_shared = cluster.cores_per_host is not None

    @staticmethod
    def of_call(
        seconds: float, by_cause: Mapping[str, float], *, waiting: str, crowding: Sequence[float],
        mean_share: float,
    ) -> tuple[float, dict[str, float]]:
        """Return the seconds of a call whose ranks share cores, in all and by cause.

        While k replicas are at work, work takes `crowding[k - 1]` times as long. The slowest replica has the
        work 1, and the mean is `mean_share`. The works of the others are assumed to be spread evenly around
        their mean. For example, two others with mean 0.5 have the works 0.25 and 0.75: all three replicas are
        at work for the first quarter of the slowest one's work, two of them for the next half, and the
        slowest alone for the last quarter.

        Ranks that work use the cores of those that wait, so the call takes as long as with cores for all
        ranks, or as long as its work, whichever is longer; the cause `waiting` is the rest.
        """
        replicas = len(crowding)
        works = np.ones(replicas)
        if replicas > 1:
            mean = max(0.0, (replicas * mean_share - 1) / (replicas - 1))
            places = (np.arange(replicas - 1) + 0.5) / (replicas - 1)
            works[:-1] = mean + min(mean, 1 - mean) * (2 * places - 1)
        slowdown = float(np.diff(works, prepend=0.0) @ np.array(crowding)[::-1])
        working = {cause: taken * slowdown for cause, taken in by_cause.items() if cause != waiting}
        at_work = sum(working.values())
        seconds = max(seconds * min(1.0, slowdown), at_work)
        return seconds, {**working, waiting: seconds - at_work}

    def busiest_host(self, seconds: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the seconds for which the cores of the busiest host work in each of K plans, shape (K,).

        They are 0 unless devices share cores. `seconds`, `first` and `stop` (K, N) are those of calls, and of
        the ranks on which they run. A call on fewer ranks than cores leaves the others to calls on other
        ranks. Ranks below 0, which are not decided, count on a lone host.
        """
        cluster = self._cluster
        busiest = np.zeros(len(seconds))
        for ranks, kind in cluster.ranks_by_kind:
            for begin in ranks[:: cluster.devices_per_host] if kind.cores_per_host is not None else ():
                on_host = stop - first
                if cluster.num_hosts > 1:
                    end = begin + cluster.devices_per_host
                    on_host = np.clip(np.minimum(stop, end) - np.maximum(first, begin), 0, None)
                shares = np.minimum(1.0, on_host / kind.cores_per_host)
                busiest = np.maximum(busiest, (seconds * shares).sum(axis=1))
        return busiest
