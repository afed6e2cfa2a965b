"""Device memory of the communicators that a rank takes part in, for all layouts of a plan.

The runtime makes one communicator for every distinct group of ranks and purpose: those of each layout
(`distributed/world.py`, `nn/parameters.py`, `engine/optimizer.py`), and one for each reallocation
(`realloc/execute.py`). If two layouts have a group in common, it counts for both, so that the sum is an upper
limit. Over gloo, communicators take next to nothing. NCCL allocates buffers when ranks first exchange data:

- A channel's receiving buffer has 10 MiB (4 MiB of NCCL_BUFFSIZE, and those of the two protocols for short
  messages, in pages of 2 MiB), and its sending side 2 MiB: the sizes in issue 1685 of NVIDIA/nccl, where an
  all-to-all among eight H100s connects 32 channels to each peer and takes 3.3 GB.
- A collective connects its channels in a ring and a tree. Issue 964 measured 544 MB in groups of two A100s
  and 688 MB in larger ones: 24 channels of 22 or 28 MiB, and 16 MiB.
- Messages to other hosts share one pool per communicator: 16 slots of 128 KiB for every channel, to send and
  to receive.

NCCL uses two channels for every 20 GB/s to a device of the same host, and at most 32.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from realhf.cluster import Cluster
from realhf.layout import MAX_RANKS, Layout, ParallelStrategy
from realhf.planner.problem import ModelRole

_MIB = 1 << 20
_BASE_BYTES = 16 * _MIB
_PEER_CHANNEL_BYTES = 12 * _MIB
_PAIR_CHANNEL_BYTES = 22 * _MIB
_RING_CHANNEL_BYTES = 28 * _MIB
_POOL_CHANNEL_BYTES = 2 * 16 * (128 << 10)
_CHANNEL_BYTES_PER_SECOND = 10e9
_MOST_CHANNELS = 32
_MOST_COLLECTIVE_CHANNELS = 24

_PURPOSES = ("data", "realloc")
_RANDOM = np.random.default_rng(0)
_FACTORS = _RANDOM.integers(1 << 62, size=MAX_RANKS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_SALTS = _RANDOM.integers(1 << 62, size=(len(_PURPOSES), 2), dtype=np.uint64)


class Use(NamedTuple):
    """The properties of a layout's engines that decide which groups exchange what."""

    trains: bool = False
    is_tied: bool = False  # The first and the last stage both hold the embedding.
    num_kv_heads: int = MAX_RANKS  # Ranks over tp that share a head sum its gradients.

    def joined(self, other: "Use") -> "Use":
        """Return the use of a layout that has both."""
        num_kv_heads = min(self.num_kv_heads, other.num_kv_heads)
        return Use(self.trains or other.trains, self.is_tied or other.is_tied, num_kv_heads)


def use_of(role: ModelRole, *, trains: bool) -> Use:
    num_kv_heads = role.config.num_kv_heads if role.config.mla is None else MAX_RANKS
    return Use(trains, role.config.tied and role.lora is None, num_kv_heads)


class _Traffic(NamedTuple):
    """The use of a group: collectives, or messages to at most `most_peers` of its members."""

    collective: bool = False
    most_peers: int = 0
    has_pool: bool = False  # Messages to other hosts only.


_Group = tuple[np.ndarray, _Traffic, str]
"""Disjoint groups of equal size, shape (groups, size), with their traffic and purpose."""


class CommunicatorBytes(NamedTuple):
    """The least bytes of communicators that a candidate of the search adds on any of its ranks.

    They are those of its layout, those in addition if a role trains there, and those of reallocations from
    there if something moves; numbers, or arrays over candidates.
    """

    layout: Any
    training: Any
    reallocation: Any


class CommunicatorMemory:
    """The groups of layouts and reallocations on a cluster, as the runtime makes them."""

    def __init__(self, cluster: Cluster, num_ranks: int, *, first_rank: int = 0) -> None:
        """Set up those of `num_ranks` ranks, which count from 0 and lie from `first_rank` of the cluster."""
        self._cluster = cluster
        self.num_ranks = num_ranks
        self._hosts = np.arange(first_rank, first_rank + num_ranks) // cluster.devices_per_host
        self._channels = np.full(num_ranks, _num_channels(cluster))
        for ranks, kind in cluster.ranks_by_kind:
            self._channels[ranks.start : ranks.stop] = _num_channels(kind)
        self._least: dict[tuple[ParallelStrategy, Use], CommunicatorBytes] = {}
        self._known: dict[tuple[Layout, Use] | tuple[int, ...], np.ndarray] = {}

    def of_layout(self, layout: Layout, use: Use) -> np.ndarray:
        """Return each rank's bytes for the groups of a layout and of its engines."""
        if (layout, use) not in self._known:
            self._known[layout, use] = self._summed(groups_of(layout, use))
        return self._known[layout, use]

    def of_moves(self, moves: Iterable[tuple[int, ...]]) -> np.ndarray:
        """Return each rank's bytes for all reallocations, each among the ranks of one tuple.

        Each has a communicator. A rank exchanges messages with few ranks of its host in one reallocation, so
        that all of them together are assumed to connect it with each of these once.
        """
        total = np.zeros(self.num_ranks)
        near = np.zeros(self.num_ranks)
        for ranks in moves:
            if ranks not in self._known:
                group = (np.array([ranks]), _Traffic(most_peers=len(ranks)), "realloc")
                remote = (np.array([ranks]), _Traffic(most_peers=0, has_pool=True), "realloc")
                self._known[ranks] = np.stack([self._summed([remote]), self._summed([group])])
            without, whole = self._known[ranks]
            total += without
            near = np.maximum(near, whole - without)
        return total + near

    def least(self, layout: Layout, use: Use) -> CommunicatorBytes:
        """Return the bytes that this layout adds at least on any of its ranks."""
        if layout.tp <= use.num_kv_heads:  # No ranks share a head, however many there are.
            use = use._replace(num_kv_heads=MAX_RANKS)
        key = (layout.strategy, use)
        if key not in self._least:
            self._least[key] = self._counted_least(layout, use)
        return self._least[key]

    def _counted_least(self, layout: Layout, use: Use) -> CommunicatorBytes:
        ranks = list(layout.ranks)
        without = self.of_layout(layout, use._replace(trains=False))[ranks].min()
        if not use.trains:
            return CommunicatorBytes(without, 0.0, 0.0)
        training = self.of_layout(layout, use)[ranks].min() - without
        return CommunicatorBytes(without, training, self.of_moves([layout.ranks])[ranks].min())

    def _summed(self, groups: Iterable[_Group]) -> np.ndarray:
        """Return the sum of each rank's bytes; of groups that occur twice, the larger ones count."""
        if self._cluster.device_type != "cuda":
            return np.zeros(self.num_ranks)
        rows = [self.keys_and_bytes(*group) for group in groups]
        keys = np.stack([row[0] for row in rows])
        num_bytes = np.stack([row[1] for row in rows])
        order = np.lexsort((num_bytes, keys), axis=0)
        keys = np.take_along_axis(keys, order, axis=0)
        counts = keys != 0
        counts[:-1] &= keys[:-1] != keys[1:]
        return (np.take_along_axis(num_bytes, order, axis=0) * counts).sum(axis=0)

    def keys_and_bytes(
        self, members: np.ndarray, traffic: _Traffic, purpose: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each rank's key and bytes for disjoint groups of equal size; `members` is (groups, size).

        Equal groups of equal purpose have equal keys, and 0 is the key of ranks in no group.
        """
        keys = np.zeros(self.num_ranks, np.uint64)
        num_bytes = np.zeros(self.num_ranks)
        size = members.shape[1]
        if size == 1:
            return keys, num_bytes
        factor, summand = _SALTS[_PURPOSES.index(purpose)]
        hashed = ((members.astype(np.uint64) + np.uint64(1)) * _FACTORS[:size]).sum(axis=1) * factor + summand
        keys[members] = (hashed | np.uint64(1))[:, None]
        num_bytes[members] = self._bytes(members, traffic)
        return keys, num_bytes

    def _bytes(self, members: np.ndarray, traffic: _Traffic) -> np.ndarray:
        """Return the bytes of a communicator on each of its members."""
        num_bytes = np.full(members.shape, float(_BASE_BYTES))
        channels = self._channels[members]
        if traffic.collective:
            of_channel = _PAIR_CHANNEL_BYTES if members.shape[1] == 2 else _RING_CHANNEL_BYTES
            num_bytes += np.minimum(channels, _MOST_COLLECTIVE_CHANNELS) * of_channel
        if traffic.most_peers or traffic.has_pool:
            on_host = _counts_by_value(self._hosts[members])
            near = np.minimum(on_host - 1, traffic.most_peers)
            num_bytes += near * channels * _PEER_CHANNEL_BYTES
            num_bytes += (on_host < members.shape[1]) * channels * _POOL_CHANNEL_BYTES
        return num_bytes


def _num_channels(cluster: Cluster) -> int:
    """Return how many channels connect two devices of a host."""
    channels = math.ceil(cluster.intra_host.bandwidth_bytes_per_second / _CHANNEL_BYTES_PER_SECOND)
    return min(_MOST_CHANNELS, 1 << max(1, (channels - 1).bit_length()))


def _counts_by_value(values: np.ndarray) -> np.ndarray:
    """Return how often each element's value occurs in its row."""
    rows = np.arange(len(values))[:, None] * (values.max() + 1)
    return np.bincount((rows + values).ravel())[rows + values]


def groups_of(layout: Layout, use: Use) -> Iterator[_Group]:
    """Yield the groups of a layout and of its engines."""
    grid = layout.grid  # (pp, dp, cp, tp)
    pp, dp, cp, tp = grid.shape
    ep = layout.ep
    ends = _Traffic(collective=use.trains and use.is_tied)
    yield grid.reshape(-1, tp), _Traffic(collective=True), "data"
    yield np.moveaxis(grid, 2, -1).reshape(-1, cp), _Traffic(most_peers=cp), "data"
    stages = np.moveaxis(grid, 0, -1).reshape(-1, pp)
    yield stages, _Traffic(most_peers=2), "data"
    yield np.moveaxis(grid, 1, -1).reshape(-1, ep), _Traffic(most_peers=ep), "data"
    yield grid.reshape(1, -1), _Traffic(collective=use.trains), "data"
    if pp > 1:
        yield stages[:, [0, -1]], ends, "data"
    if use.trains:
        by_replica = np.moveaxis(grid, 3, 1).reshape(pp * tp, dp * cp)
        yield by_replica, _Traffic(collective=True), "data"
        if ep > 1:
            experts = grid.reshape(pp, dp // ep, ep, cp, tp).transpose(0, 2, 4, 1, 3)
            yield experts.reshape(-1, dp // ep * cp), _Traffic(collective=True), "data"
    if tp > use.num_kv_heads:
        yield grid.reshape(-1, tp // use.num_kv_heads), _Traffic(collective=use.trains), "data"
