"""Groups of ranks that communicate, and how many of their ranks lie on each host."""

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from realhf.cluster import Cluster
from realhf.layout import ParallelStrategy


class Span(NamedTuple):
    """A group of `size` ranks, with `per_host` of them on each host."""

    size: int
    per_host: int

    @property
    def hosts(self) -> int:
        return -(-self.size // self.per_host)


class RankGroups(NamedTuple):
    """The rank groups of a strategy on contiguous ranks, with `per_host` of the ranks on each host."""

    tp: Span
    replicas: Span
    expert_replicas: Span
    cp: Span
    ep: Span
    stages_meet_in_host: bool

    @property
    def within(self) -> str:
        """The name under which communication inside a block is reported."""
        axes = (("tensor", self.tp), ("context", self.cp), ("expert", self.ep))
        used = [name for name, span in axes if span.size > 1]
        return f"{' and '.join(used) or 'tensor'} parallel"


def ranks_per_host(cluster: Cluster, ranks: Iterable[int]) -> int:
    """Return the largest n for which no group lies on two hosts if a mesh is split into groups of n ranks.

    If the mesh begins or ends inside a host, n may be less than the mesh has on any host.
    """
    return math.gcd(*cluster.count_by_host(ranks).values())


@lru_cache(maxsize=1 << 14)
def rank_groups(strategy: ParallelStrategy, per_host: int) -> RankGroups:
    """Return the rank groups of a strategy on a mesh with `per_host` ranks on each host."""
    s = strategy
    near = max(1, per_host // s.tp)  # Number of tp groups on one host.
    replicas = s.num_replicas
    experts = s.num_expert_replicas
    return RankGroups(
        tp=Span(s.tp, math.gcd(s.tp, per_host)),
        replicas=Span(replicas, min(replicas, near)),
        # The ranks of a cp group have the same experts, and next to it are groups with other experts.
        expert_replicas=Span(experts, min(experts, max(min(s.cp, near), near // s.ep))),
        cp=Span(s.cp, min(s.cp, near)),
        ep=Span(s.ep, max(1, min(s.ep, near // s.cp))),
        stages_meet_in_host=s.num_ranks <= per_host)
