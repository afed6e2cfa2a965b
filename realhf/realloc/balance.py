"""Balances what ranks send over their ports as evenly as bandwidths allow, and bounds how even it can be.

A *port* is a rank's way to send (or receive). A *demand* is a number of elements that may leave through any
of certain ports; its *share* is how many leave through each. A port's *load* is the sum of all shares on it.
Example: ports 0 and 1 are alike, a demand of 3 may use both, and one of 1 only port 0. Then the first has the
shares 1 and 2, and both ports have a load of 2.

`spread` fills every demand to one level over its ports, again and again, which minimises the sum of squares
of the loads. This solution also has the smallest maximum of all (it is the least majorised base of the flow
polymatroid, Fujishige 1980). The most loaded ports then form a minimum cut of the flow network demands ->
ports, which proves the bound: the demands inside the cut can use no other port.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_MAX_SWEEPS = 60
_TOLERANCE = 1e-4
_MAX_THRESHOLDS = 200


@dataclass
class Demand:
    """A number of elements, and the indices of the ports that may carry them; `share` is in their order."""

    ports: np.ndarray
    amount: float
    share: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.share = np.zeros(len(self.ports))


def spread(demands: Sequence[Demand], *, bandwidth: np.ndarray, load: np.ndarray) -> None:
    """Set the shares of all demands, which are 0 at first, and add them to `load`, in elements per port."""
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
    """Split `amount` over ports with a load, so that all ports that get a part finish at the same time."""
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
) -> tuple[float, np.ndarray]:
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
