"""Moves a model's parameters between two layouts: packed messages through preallocated staging memory."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from realhf.dist.group import Group, Pending, World
from realhf.layout import Layout
from realhf.param_spec import ModelSpec, Region, region_size
from realhf.realloc.schedule import Transfer, make_schedule

DEFAULT_STAGING_BYTES = 256 << 20
"""Staging memory per rank, for what it sends and receives together."""

Shards = Mapping[str, torch.Tensor]
"""Parameter name -> the region of it that this rank holds."""


@dataclass(frozen=True)
class ReallocStats:
    """One run as a rank saw it; `bytes_moved` is over all ranks, `over_bound` busiest port / lower bound."""

    bytes_sent: int
    bytes_received: int
    seconds: float
    bytes_moved: int
    over_bound: float


class Staging:
    """Memory that grows on request and is kept; Reallocators that never run at the same time may share it."""

    def __init__(self, device: torch.device) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > self.num_bytes:
            self._bytes = self._bytes.new_zeros(num_bytes)  # written to, so that no run waits for fresh pages

    @property
    def num_bytes(self) -> int:
        return self._bytes.numel()

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole buffer as a flat tensor of `dtype`."""
        return self._bytes[: self.num_bytes // dtype.itemsize * dtype.itemsize].view(dtype)


class _Piece(NamedTuple):
    """A box of a shard, in the shard's own indices, staged from element `start` of the buffer on."""

    name: str
    box: tuple[slice, ...]
    start: int

    def staged(self, part: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """The place of this piece, which is `part` of its shard, in the buffer."""
        return buffer[self.start : self.start + part.numel()].view(part.shape)


@dataclass
class Round:
    """What one rank sends and receives at once: one message (peer, start, stop) per peer and direction."""

    sends: list[tuple[int, int, int]] = field(default_factory=list)
    recvs: list[tuple[int, int, int]] = field(default_factory=list)
    pack: list[_Piece] = field(default_factory=list)
    unpack: list[_Piece] = field(default_factory=list)


class Reallocator:
    """Carries one model from layout `source` to layout `target`, any number of times.

    Every rank of either layout constructs it and calls `run`, in the same order among its other requests for
    groups and its other messages. Parameters travel in `dtype`, the dtype of the target's tensors.
    """

    def __init__(
        self, spec: ModelSpec, *, source: Layout, target: Layout, world: World, dtype: torch.dtype,
        staging_bytes: int = DEFAULT_STAGING_BYTES, staging: Staging | None = None,
    ) -> None:  # fmt: skip
        self.schedule = make_schedule(spec, source=source, target=target)
        self.dtype, self._rank, self._device = dtype, world.rank, world.device
        held, wanted = spec.held_by(source, self._rank), spec.held_by(target, self._rank)
        self._local = [
            (t.name, _within(t.region, held[t.name]), _within(t.region, wanted[t.name]))
            for t in self.schedule.local_copies
            if t.target == self._rank
        ]
        self._group: Group | None = None
        self.rounds: list[Round] = []
        used = 0
        if self.schedule.transfers and (held or wanted):
            ranks = (*source.ranks, *(rank for rank in target.ranks if rank not in source))
            self._group = world.group(ranks, purpose="realloc")
            # Rounds alternate between two halves of the memory, so that one is packed while the other flies.
            half = max(1, staging_bytes // dtype.itemsize // 2)
            for transfers in self.schedule.rounds(half):
                mine = [t for t in transfers if self._rank in (t.source, t.target)]
                if mine:
                    offset = half * (len(self.rounds) % 2)
                    step, stop = _plan_round(mine, group=self._group, held=held, wanted=wanted, offset=offset)
                    self.rounds.append(step)
                    used = max(used, stop)
        self.staging = staging or Staging(world.device)
        self.staging.reserve(used * dtype.itemsize)

    def run(
        self, source_shards: Shards | None, target_shards: Shards | None, *, eta: float = 1.0
    ) -> ReallocStats:
        """Writes target = eta * source + (1 - eta) * target.

        Ranks of the source layout give `source_shards`, those of the target layout `target_shards`. A target
        may be a view of its source's memory where both mean the same elements; these are left as they are.
        """
        begin = time.perf_counter()
        source, target = source_shards or {}, target_shards or {}
        with torch.no_grad():
            buffer = self.staging.view(self.dtype)
            pending = self._post(0, source, buffer)
            for name, source_box, target_box in self._local:
                self._write(target[name][target_box], source[name][source_box], eta)
            for number, step in enumerate(self.rounds):
                following = self._post(number + 1, source, buffer)
                pending.wait()
                for piece in step.unpack:
                    part = target[piece.name][piece.box]
                    self._write(part, piece.staged(part, buffer), eta)
                pending = following
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        itemsize = self.dtype.itemsize
        return ReallocStats(
            bytes_sent=self.schedule.sent_elements(self._rank) * itemsize,
            bytes_received=self.schedule.received_elements(self._rank) * itemsize,
            seconds=time.perf_counter() - begin,
            bytes_moved=self.schedule.bytes_total(itemsize),
            over_bound=self.schedule.over_bound,
        )

    def _post(self, number: int, source: Shards, buffer: torch.Tensor) -> Pending:
        """Packs round `number` and sends it off; nothing when there is no such round."""
        if self._group is None or number >= len(self.rounds):
            return Pending()
        step = self.rounds[number]
        for piece in step.pack:
            part = source[piece.name][piece.box]
            piece.staged(part, buffer).copy_(part)
        sends = [(peer, buffer[start:stop]) for peer, start, stop in step.sends]
        return self._group.post(sends, [(peer, buffer[start:stop]) for peer, start, stop in step.recvs])

    def _write(self, target: torch.Tensor, source: torch.Tensor, eta: float) -> None:
        assert target.dtype == self.dtype, f"the target is {target.dtype}, not {self.dtype}"
        if target.data_ptr() == source.data_ptr() and target.stride() == source.stride():
            return
        if eta == 1:
            target.copy_(source)
        else:  # product and sum are rounded one by one, so that local and received elements get the same bits
            target.mul_(1 - eta).add_(source.to(device=target.device, dtype=self.dtype) * eta)


def _plan_round(
    transfers: Iterable[Transfer],
    *, group: Group, held: Mapping[str, Region], wanted: Mapping[str, Region], offset: int,
) -> tuple[Round, int]:  # fmt: skip
    """This rank's part of a round, staged from element `offset` on, and where in the memory it ends."""
    rank = group.ranks[group.index]
    messages: dict[tuple[bool, int], list[Transfer]] = {}
    for transfer in transfers:
        receiving = transfer.target == rank
        peer = group.ranks.index(transfer.source if receiving else transfer.target)
        messages.setdefault((receiving, (peer - group.index) % group.size), []).append(transfer)
    step = Round()
    for receiving, distance in sorted(messages):  # each begins behind itself: no port is everybody's first
        start, shards = offset, wanted if receiving else held
        for transfer in messages[receiving, distance]:
            piece = _Piece(transfer.name, _within(transfer.region, shards[transfer.name]), offset)
            (step.unpack if receiving else step.pack).append(piece)
            offset += region_size(transfer.region)
        message = (group.index + distance) % group.size, start, offset
        (step.recvs if receiving else step.sends).append(message)
    return step, offset


def _within(region: Region, box: Region) -> tuple[slice, ...]:
    """`region` as an index into the tensor that holds `box`."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(region, box, strict=True))
