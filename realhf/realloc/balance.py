"""Balances demands over ports as evenly as their bandwidths allow, and bounds how even any solution can be.

Each demand is a number of elements that may leave (or enter) through any of its own ports. Repeatedly
filling every demand to one level over its ports minimises the sum of squares of the loads. Among all
solutions that one also has the smallest maximum (it is the least majorised base of the flow polymatroid,
Fujishige 1980). The most loaded ports then form a minimum cut of the flow network demands -> ports, which
proves the bound: the demands inside the cut can use no other port.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_MAX_SWEEPS = 60
_TOLERANCE = 1e-4
_MAX_THRESHOLDS = 200


@dataclass
class Demand:
    """A number of elements that may use any of `ports`; `share` is the part of each port, in their order."""

    ports: np.ndarray
    amount: float
    share: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.share = np.zeros(len(self.ports))


def spread(demands: Sequence[Demand], *, bandwidth: np.ndarray, load: np.ndarray) -> None:
    """Set the `share` of every demand, at first 0, and add it to `load`, in elements per port."""
    in_order = sorted(demands, key=lambda demand: (len(demand.ports), -demand.amount))
    for sweep in range(_MAX_SWEEPS):
        moved = 0.0
        for demand in in_order:
            old = demand.share
            load[demand.ports] -= old
            demand.share = fill(load[demand.ports], bandwidth[demand.ports], demand.amount)
            load[demand.ports] += demand.share
            moved = max(moved, float(np.abs((demand.share - old) / bandwidth[demand.ports]).max()))
        if not demands or sweep and moved <= _TOLERANCE * float((load / bandwidth).max()):
            break


def fill(load: np.ndarray, bandwidth: np.ndarray, amount: float) -> np.ndarray:
    """Split `amount` over ports so that all ports that get a part finish at the same time."""
    seconds = load / bandwidth
    order = np.argsort(seconds, kind="stable")
    level = seconds[order]
    width = np.cumsum(bandwidth[order])
    # Raising the first i ports to the level of port i takes needed[i] elements.
    needed = level * width - np.cumsum(level * bandwidth[order])
    used = int(np.searchsorted(needed, amount, side="right"))
    top = (amount + float((level * bandwidth[order])[:used].sum())) / width[used - 1]
    return np.maximum(0.0, top - seconds) * bandwidth


def least_seconds(
    demands: Sequence[Demand], *, load: np.ndarray, bandwidth: np.ndarray, host: np.ndarray,
    host_bandwidth: float,
) -> tuple[float, np.ndarray]:  # fmt: skip
    """Return a lower bound in seconds for any way to spread the demands, and the ports that prove it.

    The ports of one `host` together carry at most `host_bandwidth`. Every set of ports yields a valid bound.
    The sets tried are the ports of each host and the ports whose load, as found by `spread`, exceeds a
    threshold; the largest bound wins.
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
