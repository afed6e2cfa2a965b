"""Multicast: sends one bundle from its senders to several domains, which may forward it to one another.

    sender  a rank that has the bundle, and the depth of its first hop (see Hop): 0 for a holder
    domain  ranks that need one copy between them: a single receiver, or the receivers on one host
    team    domains that get one copy between them and forward it to one another
    stripe  the part of that copy that a domain of the team gets first, and forwards to the others

The senders send some number of copies of each range of elements, and every copy goes to a team of its own.
If there are too many domains for one team per copy, each team also sends the copy to a next team.

Example: ranks 0 and 1 hold a bundle that ranks 2, 3, 4 and 5 lack; all ports are alike.

1. Every receiver is a domain. They need 4 copies, and 6 ranks can send, so each sends 2/3 of the bundle.
2. Ranks 0 and 1 thus send 4/3 copies between them: two copies of [0, 1/3), and one copy of [1/3, 1).
3. The two copies of [0, 1/3) go to the teams {2, 5} and {3, 4}. In {2, 5}, rank 0 sends the stripe [0, 1/6)
   to rank 2 and [1/6, 1/3) to rank 5 (depth 0); ranks 2 and 5 forward their stripes to each other (depth 1).
4. The copy of [1/3, 1) goes to the team {2, 3, 4, 5}. Each rank gets a stripe of 1/6 from rank 0 or 1 and
   forwards it to the three others.
5. So every receiver forwards 1/6 to one rank and 1/6 to three ranks: 2/3 of the bundle, as it should.

Ranks that send are balanced as evenly as bandwidths allow, and how even that can be is bounded. A *port* is a
rank's way to send (or receive). A *demand* is a number of elements that may leave through any of certain
ports; its *share* is how many leave through each. A port's *load* is the sum of all shares on it. Example:
ports 0 and 1 are alike, a demand of 3 may use both, and one of 1 only port 0. Then the first has the shares 1
and 2, and both ports have a load of 2.

`spread` fills every demand to one level over its ports, again and again, which minimises the sum of squares
of the loads. This solution also has the smallest maximum of all (it is the least majorised base of the flow
polymatroid, Fujishige 1980). The most loaded ports then form a minimum cut of the flow network demands ->
ports, which proves the bound: the demands inside the cut can use no other port.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from typing import NamedTuple

import numpy as np

from realhf.realloc.links import ONE, Hop

_MAX_SWEEPS = 60
_TOLERANCE = 1e-4
_MAX_THRESHOLDS = 200
_STEPS = 512
"""Splits are rounded to this many steps per part, so that nearly equal weights yield equal parts."""
_NEGLIGIBLE = 0.01
"""The senders may send this part of a copy too little or too much, so that they send whole copies."""


# Balance


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


# Multicast


class Sender(NamedTuple):
    """A rank and the depth of its first hop."""

    rank: int
    depth: int


class ReceivedRange(NamedTuple):
    """Elements [start, stop) of a bundle, in units of 1 / ONE, that a rank receives."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Domain:
    """Ranks that need one copy between them; each receives a part in proportion to its weight."""

    ranks: Sequence[int]
    weights: Sequence[float]
    forwards: Sequence[float] = ()  # How many elements each rank is to forward.


@dataclass
class Multicast:
    """The sending of one bundle to every domain once.

    `first_copy` says how much of one copy each sender sends. `other_copies` says how much of all further
    copies each sender and, if domains forward, each rank of a domain sends, in this order.
    """

    bundle: int
    size: int
    senders: list[Sender]
    domains: list[Domain]
    first_copy: Demand
    other_copies: Demand

    def hops(self, *, max_team: int) -> Iterator[Hop]:
        """Yield hops in which each rank sends about as much as the demands' shares say."""
        num_senders = len(self.senders)
        sends = self.first_copy.share + self.other_copies.share[:num_senders]
        domains = self._with_forwards(self.other_copies.share[num_senders:].tolist())
        for start, stop, num_copies in self._ranges(copies=float(sends.sum()) / self.size):
            queue = _SendQueue(self.senders, sends.tolist(), total=num_copies * (stop - start))
            for copy in range(num_copies):
                receivers = _deal(domains, num_copies, copy)
                yield from self._send_copy(receivers, queue, start, stop, max_team)

    def _with_forwards(self, shares: Sequence[float]) -> list[Domain]:
        """Return the domains with what their ranks forward (nothing without shares), the largest first.

        Dealing them out in this order lets the receivers of each copy forward about equally much.
        """
        remaining = iter(shares)
        domains = [
            replace(domain, forwards=[next(remaining, 0.0) for _ in domain.ranks]) for domain in self.domains
        ]
        return sorted(domains, key=lambda domain: -sum(domain.forwards))

    def _ranges(self, *, copies: float) -> list[tuple[int, int, int]]:
        """Return (start, stop, number of copies to send) of ranges that need `copies` copies in all."""
        fewest = min(len(self.domains), max(1, int(copies + _NEGLIGIBLE)))
        extra = copies - fewest
        border = 0 if extra < _NEGLIGIBLE or fewest == len(self.domains) else round(extra * ONE)
        ranges = [(0, border, fewest + 1), (border, ONE, fewest)]
        return [(start, stop, num_copies) for start, stop, num_copies in ranges if start < stop]

    def _send_copy(
        self, receivers: list[Domain], queue: "_SendQueue", start: int, stop: int, max_team: int
    ) -> Iterator[Hop]:
        """Yield the hops of one copy of [start, stop): from the senders to a team, from it to the next."""
        num_teams = -(-len(receivers) // max_team)
        for team_index in range(num_teams):
            team = _deal(receivers, num_teams, team_index)
            hops = list(self._serve_team(team, queue, start, stop))
            yield from hops
            queue = _queue_of(team, hops, total=stop - start)

    def _serve_team(
        self, team: list[Domain], queue: "_SendQueue", start: int, stop: int
    ) -> Iterator[Hop]:
        """Yield the hops by which each domain of a team gets a stripe of [start, stop) and forwards it."""
        stripes = _split(start, stop, [sum(domain.forwards) for domain in team])
        weights = [
            _receive_weights(domain, right - left, stop - start)
            for domain, (left, right) in zip(team, stripes, strict=True)
        ]
        for home, (left, right) in enumerate(stripes):
            if left >= right:
                continue
            others = [
                forwarded for i, domain in enumerate(team) if i != home
                for forwarded in _received_ranges(domain.ranks, weights[i].of_others, left, right)]
            for received in _received_ranges(team[home].ranks, weights[home].of_own, left, right):
                yield from self._receive_and_forward(received, others, queue)

    def _receive_and_forward(
        self, received: ReceivedRange, others: list[ReceivedRange], queue: "_SendQueue"
    ) -> Iterator[Hop]:
        """Yield the hops of a part of a stripe: to the rank that gets it first, then to the other domains."""
        for sender, start, stop in queue.take(received.start, received.stop):
            yield Hop(self.bundle, sender.rank, received.rank, start, stop, sender.depth)
            for other in others:
                first = max(start, other.start)
                last = min(stop, other.stop)
                if first < last:
                    yield Hop(self.bundle, received.rank, other.rank, first, last, sender.depth + 1)


class _SendQueue:
    """Takes elements from the first sender until it has sent its part of `total`, then from the next."""

    def __init__(self, senders: Sequence[Sender], amounts: Sequence[float], *, total: int) -> None:
        ends = [stop for _, stop in _split(0, total, amounts)]
        self._queue = list(zip(senders, ends, strict=True))
        self._current = 0
        self._num_sent = 0

    def take(self, start: int, stop: int) -> Iterator[tuple[Sender, int, int]]:
        """Yield who sends the next elements: (sender, start, stop) for parts that make up [start, stop)."""
        while start < stop:
            sender, end = self._queue[self._current]
            if end <= self._num_sent:
                self._current += 1
                continue
            length = min(stop - start, end - self._num_sent)
            yield sender, start, start + length
            start += length
            self._num_sent += length


def _queue_of(team: list[Domain], hops: list[Hop], *, total: int) -> _SendQueue:
    """Return the ranks of a team as senders, at the depth at which each has received its whole part."""
    gathers = any(len(domain.ranks) > 1 for domain in team)  # The ranks of a domain exchange their parts.
    depth = max(hop.depth for hop in hops) + (2 if gathers else 1)
    senders = [Sender(rank, depth) for domain in team for rank in domain.ranks]
    return _SendQueue(senders, [amount for domain in team for amount in domain.forwards], total=total)


def _deal(items: list[Domain], num_hands: int, hand: int) -> list[Domain]:
    """Return the items of one hand, dealt like cards, forwards and backwards: of 8 items for 4 hands, hand 0
    gets 0 and 7. So the hands get about equally much of sorted items."""
    rows = (items[first : first + num_hands] for first in range(0, len(items), num_hands))
    columns = (hand if row % 2 == 0 else num_hands - 1 - hand for row in count())
    return [row[column] for row, column in zip(rows, columns, strict=False) if column < len(row)]


class _ReceiveWeights(NamedTuple):
    """The share that each rank of a domain receives of the domain's own stripe, and of the others."""

    of_own: list[float]
    of_others: list[float]


def _receive_weights(domain: Domain, stripe: int, whole: int) -> _ReceiveWeights:
    """Return the weights of a domain's ranks, given the lengths of its stripe and of the team's whole copy.

    A rank receives as much of the stripe as it forwards, but no more than it receives of the whole.
    """
    weights = np.array(domain.weights)
    weights = weights if weights.sum() > 0 else np.ones(len(weights))
    limit = weights * (whole / weights.sum())
    forwards = sum(domain.forwards)
    wanted = np.array(domain.forwards) * (stripe / forwards) if forwards > 0 else limit * (stripe / whole)
    of_stripe = np.minimum(wanted, limit)
    of_stripe += (limit - of_stripe) * ((stripe - of_stripe.sum()) / max(whole - of_stripe.sum(), 1e-9))
    return _ReceiveWeights(of_stripe.tolist(), np.maximum(limit - of_stripe, 0.0).tolist())


def _received_ranges(
    ranks: Sequence[int], weights: Sequence[float], start: int, stop: int
) -> list[ReceivedRange]:
    """Return the part of [start, stop) that each rank receives, except empty ones."""
    spans = _split(start, stop, weights)
    pairs = zip(ranks, spans, strict=True)
    return [ReceivedRange(rank, first, last) for rank, (first, last) in pairs if first < last]


def _split(start: int, stop: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Split [start, stop) into parts proportional to the weights, or into equal parts when all are 0."""
    total = sum(weights)
    if total <= 0:
        weights = [1.0] * len(weights)
        total = float(len(weights))
    steps = _STEPS * len(weights)
    fractions = [round(x / total * steps) / steps for x in accumulate(weights, initial=0.0)]
    edges = [start + round((stop - start) * fraction) for fraction in fractions]
    edges[-1] = stop
    return list(zip(edges, edges[1:], strict=False))
