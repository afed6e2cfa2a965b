"""Multicast: brings one parcel from its suppliers to some domains, by stripes where domains hand it on."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from realhf.realloc.balance import Demand

ONE = 1 << 22
"""A whole parcel, or slice of one; positions on it are integers."""
_STEPS = 512
Shares = Sequence[tuple[int, float]]
"""Ranks, each with its weight."""


class Leg(NamedTuple):
    """Part [start, stop) of ONE of a parcel goes from `source` to `target`.

    It has all that it needs when the legs of earlier stages have arrived; holders start at stage 0.
    """

    parcel: int
    source: int
    target: int
    start: int
    stop: int
    stage: int


@dataclass
class Multicast:
    """Brings a parcel to every domain once; a domain is entered through its ranks, by weight.

    Suppliers are (rank, stage from which it can send). They serve groups of domains. Within a team of a group
    each domain gets a stripe, as wide as it can hand on, and the others of the team get it from there; the
    first team is served by the suppliers, each further one by the team before it.
    """

    parcel: int
    size: int
    suppliers: list[tuple[int, int]]
    domains: list[Shares]
    first: Demand
    rest: Demand

    @property
    def forwards(self) -> bool:
        """Whether domains hand the parcel on."""
        return len(self.rest.ports) > len(self.suppliers)

    def legs(self, *, max_team: int) -> Iterator[Leg]:
        assert self.first.share is not None and self.rest.share is not None
        num = len(self.suppliers)
        give = self.first.share + self.rest.share[:num]
        forwards = self._forwards(self.rest.share[num:].tolist())
        order = sorted(range(len(self.domains)), key=lambda i: -sum(forwards[i]))  # groups that can do alike
        copies = float(give.sum()) / self.size
        low = min(len(self.domains), max(1, int(copies + 0.01)))
        upper = 0 if copies - low < 0.01 or low == len(self.domains) else round((copies - low) * ONE)
        for start, stop, num_groups in ((0, upper, low + 1), (upper, ONE, low)):
            if start < stop:
                supply = _Supply(self.suppliers, give.tolist(), total=num_groups * (stop - start))
                for group in range(num_groups):
                    members = _hand(order, num_groups, group)
                    num_teams = -(-len(members) // max_team)
                    served_by = supply
                    for team in (_hand(members, num_teams, i) for i in range(num_teams)):
                        legs = list(self._serve(team, forwards, served_by, start, stop))
                        yield from legs
                        served_by = self._team_supply(team, legs, forwards, total=stop - start)

    def _team_supply(
        self, team: list[int], legs: list[Leg], forwards: list[list[float]], *, total: int
    ) -> "_Supply":
        """The ranks of a team as suppliers, from when all of them have the whole."""
        gathering = any(len(self.domains[i]) > 1 for i in team)  # behind the gates of a domain
        stage = max(leg.stage for leg in legs) + 1 + gathering
        ranks = [(rank, stage) for i in team for rank, _ in self.domains[i]]
        return _Supply(ranks, [amount for i in team for amount in forwards[i]], total=total)

    def _forwards(self, shares: list[float]) -> list[list[float]]:
        """What each rank of each domain is to hand on."""
        found, of = [[0.0] * len(domain) for domain in self.domains], iter(shares)
        if shares:
            found = [[next(of) for _ in domain] for domain in self.domains]
        return found

    def _serve(
        self, members: list[int], forwards: list[list[float]], supply: "_Supply", start: int, stop: int
    ) -> Iterator[Leg]:
        """Brings [start, stop) to a group of domains."""
        stripes = _cut(start, stop, [sum(forwards[i]) for i in members])
        own, foreign = dict[int, Shares](), dict[int, Shares]()
        for i, (left, right) in zip(members, stripes, strict=True):
            own[i], foreign[i] = _entries(self.domains[i], forwards[i], right - left, stop - start)
        for home, (left, right) in zip(members, stripes, strict=True):
            gates = {
                i: _gates((own if i == home else foreign)[i], left, right) for i in members if left < right
            }
            for rank, first, last in gates.get(home, ()):
                for sender, begin, end, stage in supply.take(first, last):
                    yield Leg(self.parcel, sender, rank, begin, end, stage)
                    for other in members:
                        for to, a, b in gates[other] if other != home else ():
                            if max(begin, a) < min(end, b):
                                yield Leg(self.parcel, rank, to, max(begin, a), min(end, b), stage + 1)


def _hand(items: list[int], num_hands: int, hand: int) -> list[int]:
    """What one of them gets when items are dealt to hands to and fro, so that each gets as good ones."""
    rows = (items[at : at + num_hands] for at in range(0, len(items), num_hands))
    places = (hand if number % 2 == 0 else num_hands - 1 - hand for number in itertools.count())
    return [row[place] for row, place in zip(rows, places, strict=False) if place < len(row)]


class _Supply:
    """Hands out senders: each in turn until it has sent its part of `total`."""

    def __init__(
        self, suppliers: Sequence[tuple[int, int]], amounts: Sequence[float], *, total: int
    ) -> None:
        ends = [stop for _, stop in _cut(0, total, amounts)]
        self._queue = [(rank, end, stage) for (rank, stage), end in zip(suppliers, ends, strict=True)]
        self._at = self._number = 0

    def take(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(sender, start, stop, stage) pieces that cover [start, stop)."""
        while start < stop:
            rank, end, stage = self._queue[self._number]
            if end <= self._at:
                self._number += 1
                continue
            length = min(stop - start, end - self._at)
            yield rank, start, start + length, stage
            start, self._at = start + length, self._at + length


def _entries(domain: Shares, forwards: list[float], stripe: int, whole: int) -> tuple[Shares, Shares]:
    """A domain's weights for its own stripe, which the same ranks hand on, and for the rest of the whole."""
    weights = np.array([weight for _, weight in domain])
    weights = weights if weights.sum() > 0 else np.ones(len(domain))
    room = weights * (whole / weights.sum())
    wanted = np.array(forwards) * (stripe / sum(forwards)) if sum(forwards) > 0 else room * (stripe / whole)
    own = np.minimum(wanted, room)
    own += (room - own) * ((stripe - own.sum()) / max(whole - own.sum(), 1e-9))
    ranks = [rank for rank, _ in domain]
    rest = np.maximum(room - own, 0.0)
    return list(zip(ranks, own.tolist(), strict=True)), list(zip(ranks, rest.tolist(), strict=True))


def _gates(domain: Shares, start: int, stop: int) -> list[tuple[int, int, int]]:
    """(rank, start, stop): by which rank of a domain each part comes in."""
    parts = _cut(start, stop, [weight for _, weight in domain])
    return [(rank, a, b) for (rank, _), (a, b) in zip(domain, parts, strict=True) if a < b]


def _cut(start: int, stop: int, weights: Sequence[float]) -> list[tuple[int, int]]:
    """[start, stop) in parts proportional to the weights; equal ones when all are 0."""
    total = sum(weights)
    if total <= 0:
        weights, total = [1.0] * len(weights), float(len(weights))
    steps = _STEPS * len(weights)  # coarse enough to make one cut of those that differ by rounding only
    parts = [round(x / total * steps) / steps for x in accumulate(weights, initial=0.0)]
    edges = [start + round((stop - start) * part) for part in parts]
    edges[-1] = stop
    return list(zip(edges, edges[1:], strict=False))
