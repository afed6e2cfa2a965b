"""Multicast: sends one block from its senders to several domains, which may forward it to one another.

A domain is a set of ranks that need one copy between them, such as the receivers on one host.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from realhf.realloc.balance import Demand

ONE = 1 << 22
"""Length of a whole block, or of a whole slice, in the units in which hops start and stop."""
_STEPS = 512
"""Splits are rounded to this many steps per part, so that nearly equal weights yield equal splits."""
Shares = Sequence[tuple[int, float]]
"""Ranks with their weights."""


class Hop(NamedTuple):
    """Part [start, stop) of a block, in units of 1 / ONE, that rank `source` sends to rank `target`.

    The source has it once the hops of all earlier stages have arrived. Holders send at stage 0.
    """

    block: int
    source: int
    target: int
    start: int
    stop: int
    stage: int


@dataclass
class Multicast:
    """The sending of one block to every domain once, received by the ranks of a domain by weight.

    A sender is a rank and the first stage at which it can send. The senders serve groups of domains, and each
    group consists of teams. Each domain of a team gets a stripe of the block, as wide as it can forward, and
    sends it to the others of the team. The senders serve the first team of a group, and each team serves the
    next. `first` is the demand of the first copy, `rest` that of all others.
    """

    block: int
    size: int
    senders: list[tuple[int, int]]
    domains: list[Shares]
    first: Demand
    rest: Demand

    def hops(self, *, max_team: int) -> Iterator[Hop]:
        """Yield the hops that follow the demands' shares as closely as they can."""
        num = len(self.senders)
        give = self.first.share + self.rest.share[:num]
        remaining = iter(self.rest.share[num:].tolist())
        # How many elements each rank of each domain forwards.
        forwards = [[next(remaining, 0.0) for _ in domain] for domain in self.domains]
        # Dealing sorted domains makes every group able to forward about as much as any other.
        order = sorted(range(len(self.domains)), key=lambda i: -sum(forwards[i]))
        copies = float(give.sum()) / self.size
        low = min(len(self.domains), max(1, int(copies + 0.01)))
        upper = 0 if copies - low < 0.01 or low == len(self.domains) else round((copies - low) * ONE)
        for start, stop, num_groups in ((0, upper, low + 1), (upper, ONE, low)):
            if start < stop:
                queue = _SendQueue(self.senders, give.tolist(), total=num_groups * (stop - start))
                for group in range(num_groups):
                    members = _deal(order, num_groups, group)
                    num_teams = -(-len(members) // max_team)
                    served_by = queue
                    for team in (_deal(members, num_teams, i) for i in range(num_teams)):
                        hops = list(self._serve(team, forwards, served_by, start, stop))
                        yield from hops
                        served_by = self._queue_of(team, hops, forwards, total=stop - start)

    def _queue_of(
        self, team: list[int], hops: list[Hop], forwards: list[list[float]], *, total: int
    ) -> "_SendQueue":
        """Return the ranks of a team as senders, from the stage at which each has the whole part."""
        gathers = any(len(self.domains[i]) > 1 for i in team)  # The ranks of a domain exchange their parts.
        stage = max(hop.stage for hop in hops) + 1 + gathers
        ranks = [(rank, stage) for i in team for rank, _ in self.domains[i]]
        return _SendQueue(ranks, [amount for i in team for amount in forwards[i]], total=total)

    def _serve(
        self, members: list[int], forwards: list[list[float]], queue: "_SendQueue", start: int, stop: int
    ) -> Iterator[Hop]:
        """Yield the hops that bring [start, stop) to the domains of a team."""
        stripes = _split(start, stop, [sum(forwards[i]) for i in members])
        weights = {
            i: _weights(self.domains[i], forwards[i], right - left, stop - start)
            for i, (left, right) in zip(members, stripes, strict=True)
        }
        for home, (left, right) in zip(members, stripes, strict=True):
            if left >= right:
                continue
            parts = {i: _parts(weights[i][i != home], left, right) for i in members}
            for rank, first, last in parts.pop(home):
                for sender, begin, end, stage in queue.take(first, last):
                    yield Hop(self.block, sender, rank, begin, end, stage)
                    for to, a, b in itertools.chain(*parts.values()):
                        if max(begin, a) < min(end, b):
                            yield Hop(self.block, rank, to, max(begin, a), min(end, b), stage + 1)


def _deal(items: list[int], num_hands: int, hand: int) -> list[int]:
    """Return the items of one hand, dealt in alternating directions so that sorted items spread evenly."""
    rows = (items[at : at + num_hands] for at in range(0, len(items), num_hands))
    columns = (hand if number % 2 == 0 else num_hands - 1 - hand for number in itertools.count())
    return [row[column] for row, column in zip(rows, columns, strict=False) if column < len(row)]


class _SendQueue:
    """A queue of senders that assigns each in turn, until it has sent its part of `total`."""

    def __init__(self, senders: Sequence[tuple[int, int]], amounts: Sequence[float], *, total: int) -> None:
        ends = [stop for _, stop in _split(0, total, amounts)]
        self._queue = [(rank, end, stage) for (rank, stage), end in zip(senders, ends, strict=True)]
        self._at = self._number = 0

    def take(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield (sender, start, stop, stage) for parts that cover [start, stop)."""
        while start < stop:
            rank, end, stage = self._queue[self._number]
            if end <= self._at:
                self._number += 1
                continue
            length = min(stop - start, end - self._at)
            yield rank, start, start + length, stage
            start += length
            self._at += length


def _weights(domain: Shares, forwards: list[float], stripe: int, whole: int) -> tuple[Shares, Shares]:
    """Return the weights of a domain's ranks for its own stripe and for the rest of the whole.

    A rank receives as much of the stripe as it forwards, within what it receives of the whole.
    """
    weights = np.array([weight for _, weight in domain])
    weights = weights if weights.sum() > 0 else np.ones(len(domain))
    limit = weights * (whole / weights.sum())
    wanted = np.array(forwards) * (stripe / sum(forwards)) if sum(forwards) > 0 else limit * (stripe / whole)
    own = np.minimum(wanted, limit)
    own += (limit - own) * ((stripe - own.sum()) / max(whole - own.sum(), 1e-9))
    ranks = [rank for rank, _ in domain]
    rest = np.maximum(limit - own, 0.0)
    return list(zip(ranks, own.tolist(), strict=True)), list(zip(ranks, rest.tolist(), strict=True))


def _parts(domain: Shares, start: int, stop: int) -> list[tuple[int, int, int]]:
    """Return (rank, start, stop) for the part of [start, stop) that each rank of a domain receives."""
    parts = _split(start, stop, [weight for _, weight in domain])
    return [(rank, a, b) for (rank, _), (a, b) in zip(domain, parts, strict=True) if a < b]


def _split(start: int, stop: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """Split [start, stop) into parts proportional to the weights, or into equal parts when all are 0."""
    total = sum(weights)
    if total <= 0:
        weights = [1.0] * len(weights)
        total = float(len(weights))
    steps = _STEPS * len(weights)
    parts = [round(x / total * steps) / steps for x in accumulate(weights, initial=0.0)]
    edges = [start + round((stop - start) * part) for part in parts]
    edges[-1] = stop
    return list(zip(edges, edges[1:], strict=False))
