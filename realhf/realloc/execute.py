"""Moves a model's parameters between two layouts: packed messages through preallocated staging memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from realhf.dist.group import Pending, World
from realhf.layout import Layout
from realhf.param_spec import ModelSpec, Region, region_size
from realhf.realloc.schedule import Transfer, make_schedule

Shards = Mapping[str, torch.Tensor]
"""Parameter name -> the region of it that this rank holds."""
Regions = Mapping[str, Region]


@dataclass(frozen=True)
class ReallocStats:
    """One run as a rank saw it; `over_bound` is the busiest port's load over its lower bound."""

    bytes_sent: int
    bytes_received: int
    over_bound: float


class Staging:
    """Memory that grows on request and is kept; Reallocators that never run at the same time may share it."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > len(self.bytes):
            self.bytes = self.bytes.new_zeros(num_bytes)  # written to, so that no run waits for fresh pages

    def view(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole buffer as a flat tensor of `dtype`."""
        return self.bytes[: len(self.bytes) // dtype.itemsize * dtype.itemsize].view(dtype)


class _Piece(NamedTuple):
    """A box of a shard, in the shard's own indices, staged from element `start` of the buffer on."""

    name: str
    box: tuple[slice, ...]
    start: int

    def part_and_place(self, shards: Shards, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This piece in its shard, and its place in the buffer."""
        part = shards[self.name][self.box]
        return part, buffer[self.start :][: part.numel()].view(part.shape)


@dataclass
class Round:
    """What one rank sends and receives at once: one message (peer, start, stop) per peer and direction."""

    sends: list[tuple[int, int, int]] = field(default_factory=list)
    recvs: list[tuple[int, int, int]] = field(default_factory=list)
    pack: list[_Piece] = field(default_factory=list)
    unpack: list[_Piece] = field(default_factory=list)
    stop: int = 0


class Reallocator:
    """Carries one model from layout `source` to layout `target`, any number of times.

    Every rank of either layout constructs it and calls `run`, in the same order among its other requests for
    groups and its other messages. Parameters travel in `dtype`, the dtype of the target's tensors;
    `staging_bytes` caps the memory for what a rank sends and receives at once.
    """

    def __init__(
        self, spec: ModelSpec, *, source: Layout, target: Layout, world: World, dtype: torch.dtype,
        staging_bytes: int = 256 << 20, staging: Staging | None = None,
    ) -> None:  # fmt: skip
        self.schedule = make_schedule(spec, source=source, target=target)
        self.dtype, self._rank, self._device = dtype, world.rank, world.device
        held, wanted = spec.held_by(source, self._rank), spec.held_by(target, self._rank)
        local = [t for t in self.schedule.local_copies if t.target == self._rank]
        self._local = [(n, _within(box, held[n]), _within(box, wanted[n])) for _, _, n, box in local]
        involved = self.schedule.transfers and (held or wanted)
        ranks = dict.fromkeys((*source.ranks, *target.ranks)) if involved else (self._rank,)
        self._group = world.group(tuple(ranks), purpose="realloc")
        # Rounds alternate between two halves of the memory, so that one is packed while the other flies.
        half = max(1, staging_bytes // dtype.itemsize // 2)
        rounds = enumerate(self.schedule.rounds(half))
        self.rounds = [self._plan(some, held, wanted, start=half * (number % 2)) for number, some in rounds]
        self.staging = staging or Staging(world.device)
        self.staging.reserve(max((step.stop for step in self.rounds), default=0) * dtype.itemsize)

    def _plan(self, transfers: list[Transfer], held: Regions, wanted: Regions, *, start: int) -> Round:
        """This rank's part of a round, staged from element `start` on."""
        group, step, stop = self._group, Round(), start
        messages: dict[tuple[bool, int], list[Transfer]] = {}
        for transfer in transfers:
            if self._rank in (transfer.source, transfer.target):
                receiving = transfer.target == self._rank
                peer = group.ranks.index(transfer.source if receiving else transfer.target)
                messages.setdefault((receiving, (peer - group.index) % group.size), []).append(transfer)
        for receiving, distance in sorted(messages):  # starting behind itself: no port is first for all
            start, shards = stop, wanted if receiving else held
            for _, _, name, region in messages[receiving, distance]:
                piece = _Piece(name, _within(region, shards[name]), stop)
                (step.unpack if receiving else step.pack).append(piece)
                stop += region_size(region)
            message = (group.index + distance) % group.size, start, stop
            (step.recvs if receiving else step.sends).append(message)
            step.stop = stop
        return step

    @torch.no_grad()
    def run(self, source: Shards | None, target: Shards | None, *, eta: float = 1.0) -> ReallocStats:
        """Writes target = eta * source + (1 - eta) * target.

        Ranks of either layout give their shards. A target may be a view of its source's memory where both
        mean the same elements; these are left as they are.
        """
        source, target, buffer = source or {}, target or {}, self.staging.view(self.dtype)
        pending = self._post(0, source, buffer)
        for name, source_box, target_box in self._local:
            self._write(target[name][target_box], source[name][source_box], eta)
        for number, step in enumerate(self.rounds):
            following = self._post(number + 1, source, buffer)
            pending.wait()
            for piece in step.unpack:
                self._write(*piece.part_and_place(target, buffer), eta)
            pending = following
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        loads = (self.schedule.sent_elements, self.schedule.received_elements)
        sent, received = (load.get(self._rank, 0) * self.dtype.itemsize for load in loads)
        return ReallocStats(sent, received, self.schedule.over_bound)

    def _post(self, number: int, source: Shards, buffer: torch.Tensor) -> Pending:
        """Packs round `number` and sends it off; nothing when there is no such round."""
        step = self.rounds[number] if number < len(self.rounds) else Round()
        for piece in step.pack:
            part, place = piece.part_and_place(source, buffer)
            place.copy_(part)
        messages = (step.sends, step.recvs)
        return self._group.post(*([(peer, buffer[a:b]) for peer, a, b in side] for side in messages))

    def _write(self, target: torch.Tensor, source: torch.Tensor, eta: float) -> None:
        assert target.dtype == self.dtype, f"the target is {target.dtype}, not {self.dtype}"
        if target.data_ptr() == source.data_ptr() and target.stride() == source.stride():
            return
        if eta == 1:
            target.copy_(source)
        else:  # product and sum are rounded one by one, so that local and received elements get the same bits
            target.mul_(1 - eta).add_(source.to(device=target.device, dtype=self.dtype) * eta)


def _within(region: Region, box: Region) -> tuple[slice, ...]:
    """`region` as an index into the tensor that holds `box`."""
    return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(region, box, strict=True))
