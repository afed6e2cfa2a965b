"""Spreads demands over ports as evenly as their bandwidths allow, and proves how even that can be.

A demand of some elements may leave (or enter) by any of its own ports. Filling every demand to one level over
its ports, again and again, minimises the sum of squares of the ports' loads; of all solutions that one also
has the least maximum (it is the least majorised base of the flow polymatroid, Fujishige 1980). The ports at
the top then are a minimum cut of the flow network demands -> ports: what can only go through them must take
that long, which is the certificate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MAX_SWEEPS = 60
_TOLERANCE = 1e-4
_MAX_THRESHOLDS = 200


@dataclass
class Demand:
    """`amount` elements for any of `ports`; `share` is what each of them takes, aligned with `ports`."""

    ports: np.ndarray
    amount: float
    share: np.ndarray | None = None


def spread(demands: Sequence[Demand], *, bandwidth: np.ndarray, load: np.ndarray) -> None:
    """Sets every demand's `share` and adds it to `load`, elements per port."""
    order = sorted(range(len(demands)), key=lambda i: (len(demands[i].ports), -demands[i].amount))
    for sweep in range(_MAX_SWEEPS):
        moved = 0.0
        for demand in (demands[i] for i in order):
            old = demand.share
            if old is not None:
                load[demand.ports] -= old
            demand.share = fill(load[demand.ports], bandwidth[demand.ports], demand.amount)
            load[demand.ports] += demand.share
            if old is not None:
                moved = max(moved, float(np.abs((demand.share - old) / bandwidth[demand.ports]).max()))
        if not demands or sweep and moved <= _TOLERANCE * float((load / bandwidth).max()):
            break


def fill(load: np.ndarray, bandwidth: np.ndarray, amount: float) -> np.ndarray:
    """What each port takes of `amount` so that those that take any end at the same time."""
    seconds = load / bandwidth
    order = np.argsort(seconds, kind="stable")
    level, width = seconds[order], np.cumsum(bandwidth[order])
    # Filling the first i ports up to where port i stands takes room[i] elements.
    room = level * width - np.cumsum(level * bandwidth[order])
    used = int(np.searchsorted(room, amount, side="right"))
    top = (amount + float((level * bandwidth[order])[:used].sum())) / width[used - 1]
    return np.maximum(0.0, top - seconds) * bandwidth


def least_seconds(
    demands: Sequence[Demand], *, load: np.ndarray, bandwidth: np.ndarray, host: np.ndarray,
    host_bandwidth: float,
) -> tuple[float, np.ndarray]:  # fmt: skip
    """A lower bound under any spreading, and the ports that prove it: the cut with the largest quotient.

    Ports of one `host` together carry at most `host_bandwidth`. Any set of ports gives a valid bound; tried
    are the ports of each host, and those whose loads, as found by `spread`, stand above a threshold.
    """
    if not demands:
        return 0.0, np.zeros(0, dtype=int)
    amounts = np.array([demand.amount for demand in demands])
    hosts = [host[demand.ports] for demand in demands]
    only = np.array([h[0] if (h == h[0]).all() else -1 for h in hosts])
    cuts = [(np.flatnonzero(host == number), only == number) for number in range(int(host.max()) + 1)]
    seconds = np.round(load / bandwidth / max(float((load / bandwidth).max()), 1e-300), 3)
    lowest = np.array([seconds[demand.ports].min() for demand in demands])
    for threshold in np.unique(lowest)[::-1][:_MAX_THRESHOLDS]:
        cuts.append((np.flatnonzero(seconds >= threshold), lowest >= threshold))

    def bound(cut: tuple[np.ndarray, np.ndarray]) -> float:
        ports, inside = cut
        per_host = np.bincount(host[ports], weights=bandwidth[ports])
        return float(amounts[inside].sum() / np.minimum(per_host, host_bandwidth).sum())

    best = max(cuts, key=bound)
    return bound(best), best[0]
