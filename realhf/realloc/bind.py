"""Binds one rank's part of a Schedule to tensors: the memory that is sent, received and copied by round."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from realhf.dist.group import Group
from realhf.layout import Layout
from realhf.param_spec import ModelSpec
from realhf.realloc.schedule import Schedule
from realhf.region import Region, region_size

if TYPE_CHECKING:
    from realhf.realloc.host_memory_reads import HostMemoryReads

Shards = Mapping[str, Tensor]
"""The tensor of the region that this rank holds, by parameter name."""
Copies = tuple[list[Tensor], list[Tensor]]
"""Tensors to write and tensors to read, in pairs."""
LARGE_BYTES = 1 << 20
"""A box of at least this size has a message of its own, so that it needs no packing if it is contiguous in
memory. Smaller boxes to one peer share a message per round."""


class Message(NamedTuple):
    """Boxes, in global indices, that one rank sends to or receives from a peer, end to end.

    `forwarded` has the meaning that it has in Transfer.
    """

    peer: int
    sending: bool
    forwarded: bool
    boxes: list[tuple[str, Region]]


def messages_of(schedule: Schedule, rank: int) -> list[list[Message]]:
    """Return the messages of a rank, by round; sender and receiver list them in the same order.

    Each rank starts with the peers that follow it, so that not all ranks send to one port first.
    """
    rounds: list[list[Message]] = [[] for _ in range(schedule.num_rounds)]
    shared: dict[tuple[int, int, bool, bool], Message] = {}
    for number, (source, target, name, region, forwarded) in schedule.transfers(rank):
        sending = source == rank
        peer = target if sending else source
        key = (number, peer, sending, forwarded)
        is_large = region_size(region) * schedule.itemsize >= LARGE_BYTES
        if key in shared and not is_large:
            shared[key].boxes.append((name, region))
            continue
        message = Message(peer, sending, forwarded, [(name, region)])
        rounds[number].append(message)
        if not is_large:
            shared[key] = message
    for messages in rounds:
        messages.sort(key=lambda message: (message.peer <= rank, message.peer))
    return rounds


def shards_of(flat: Tensor, regions: Mapping[str, Region]) -> dict[str, Tensor]:
    """Return the regions as views of a flat tensor in which they lie end to end."""
    parts = flat.split([region_size(region) for region in regions.values()])
    shapes = ([stop - start for start, stop in region] for region in regions.values())
    return {n: part.view(shape) for n, part, shape in zip(regions, parts, shapes, strict=True)}


class Staging:
    """A buffer for messages that grows on request; Reallocators that never run concurrently may share it."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > len(self.bytes):
            self.bytes = self.bytes.new_zeros(num_bytes)  # Writes, so that the pages are mapped now.


@dataclass
class Round:
    """The messages that one rank exchanges at the same time.

    Boxes that are not contiguous in memory are packed before they are sent and unpacked on arrival.
    """

    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    recvs: list[tuple[int, Tensor]] = field(default_factory=list)
    pack: Copies = field(default_factory=lambda: ([], []))
    unpack: Copies = field(default_factory=lambda: ([], []))


@dataclass(frozen=True)
class Binding:
    """The rounds of one rank on given tensors, and the local copies, which wait for no message."""

    source: Shards | None
    target: Shards | None
    staging: Tensor
    rounds: list[Round]
    local: Copies


class Ends:
    """The two layouts between which a model moves.

    With `in_place`, received elements overwrite the target's; otherwise they are averaged into it.
    """

    def __init__(
        self, spec: ModelSpec, source: Layout, target: Layout, dtype: torch.dtype, *, sharded: bool,
        in_place: bool,
    ) -> None:  # fmt: skip
        self.dtype = dtype
        self.in_place = in_place
        self._spec = spec
        self._ends = ((source, sharded), (target, False))
        self._regions: dict[tuple[int, bool], dict[str, Region]] = {}

    def index(self, rank: int, name: str, region: Region, *, of_target: bool) -> tuple[slice, ...]:
        """Return `region` as an index into a rank's shard of the source layout, or of the target layout."""
        key = (rank, of_target)
        if key not in self._regions:
            layout, sharded = self._ends[of_target]
            self._regions[key] = self._spec.held_by(layout, rank, sharded=sharded)
        spans = zip(region, self._regions[key][name], strict=True)
        return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in spans)


class Binder:
    """A map from the messages of one rank to its tensors, with as few and as large copies as possible.

    Ranks on the same host read each other's memory where they can. A forwarded box then still needs a
    message, which says that the box has arrived in the memory that is to be read.
    """

    def __init__(
        self, ends: Ends, source: Shards | None, target: Shards | None, *, group: Group,
        host_memory: "HostMemoryReads", device: torch.device,
    ) -> None:  # fmt: skip
        self._ends = ends
        self._group = group
        self._host_memory = host_memory
        self._device = device
        self._rank = group.ranks[group.index]
        self._given = (source, target)
        self._shards = [{n: t.detach() for n, t in (side or {}).items()} for side in (source, target)]
        for name, tensor in self._shards[True].items():
            assert tensor.dtype == ends.dtype, f"target {name} is {tensor.dtype}, not {ends.dtype}"

    def bind(
        self, rounds: Sequence[Sequence[Message]], copies: Iterable[tuple[str, Region]], staging: Staging
    ) -> Binding:
        """Return the rounds and local copies on the tensors; grow `staging` to what they need."""
        local = self._local(copies)
        steps = [Round() for _ in rounds]
        for step, messages in zip(steps, rounds, strict=True):
            self._share([message for message in messages if self._is_shared(message)], step, local)
        sent = [[(m, self._parts(m)) for m in messages if not self._is_shared(m)] for messages in rounds]
        # Rounds alternate between two halves of the memory: one is packed while the other is in flight.
        sizes = [sum(_numel(parts) for m, parts in some if self._is_staged(m, parts)) for some in sent]
        halves = [max(sizes[parity::2], default=0) for parity in (0, 1)]
        itemsize = self._ends.dtype.itemsize
        staging.reserve(sum(halves) * itemsize)
        memory = staging.bytes[: sum(halves) * itemsize].view(self._ends.dtype)
        for number, (step, some) in enumerate(zip(steps, sent, strict=True)):
            self._exchange(some, step, memory[halves[0] * (number % 2) :])
        return Binding(*self._given, staging.bytes, steps, local)

    def _local(self, local_copies: Iterable[tuple[str, Region]]) -> Copies:
        """Return the copies within this rank, except those of a tensor onto itself."""
        copies: Copies = ([], [])
        for name, region in local_copies:
            old, new = (self._own(name, region, of_target=side) for side in (False, True))
            if new.data_ptr() != old.data_ptr() or new.stride() != old.stride():
                _extend(copies, [new], [old])
        return _join_pairs(*copies)

    def _is_shared(self, message: Message) -> bool:
        return self._host_memory.reads(message) or self._host_memory.is_read(message)

    def _share(self, messages: Sequence[Message], step: Round, local: Copies) -> None:
        """Add the copies from other ranks' memory to `local`, or to `step` if the box is forwarded."""
        notice = torch.zeros(1, dtype=torch.uint8)
        for message in messages:
            peer = self._group.ranks.index(message.peer)
            if not message.sending:
                _extend(step.unpack if message.forwarded else local, *self._reading(message))
            if message.forwarded:
                (step.sends if message.sending else step.recvs).append((peer, notice.clone()))

    def _exchange(
        self, messages: Sequence[tuple[Message, list[Tensor]]], step: Round, memory: Tensor
    ) -> None:
        """Add the messages that are sent or received to `step`, staged in `memory` where necessary."""
        for message, parts in messages:
            flat = parts[0]
            if self._is_staged(message, parts):
                flat, memory = memory.tensor_split([_numel(parts)])
                pieces = flat.split([part.numel() for part in parts])
                staged = [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
                if message.sending:
                    _extend(step.pack, staged, parts)
                else:
                    _extend(step.unpack, parts, staged)
            peer = self._group.ranks.index(message.peer)
            (step.sends if message.sending else step.recvs).append((peer, flat))

    def _own(self, name: str, region: Region, *, of_target: bool) -> Tensor:
        index = self._ends.index(self._rank, name, region, of_target=of_target)
        return self._shards[of_target][name][index]

    def _parts(self, message: Message) -> list[Tensor]:
        """Return the tensors of a message in this rank's memory."""
        of_target = not message.sending or message.forwarded
        parts = [self._own(name, region, of_target=of_target) for name, region in message.boxes]
        return _join_pairs(parts, list(parts))[0]

    def _reading(self, message: Message) -> Copies:
        """Return the copies that read the boxes of a message from the peer's memory."""
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        peer = message.peer
        forwarded = message.forwarded
        for name, region in message.boxes:
            theirs = self._host_memory.tensor(peer, name, forwarded=forwarded)
            sources.append(theirs[self._ends.index(peer, name, region, of_target=forwarded)])
            targets.append(self._own(name, region, of_target=True))
        return _join_pairs(targets, sources)

    def _is_staged(self, message: Message, parts: Sequence[Tensor]) -> bool:
        direct = len(parts) == 1 and parts[0].is_contiguous()
        direct = direct and (parts[0].dtype, parts[0].device) == (self._ends.dtype, self._device)
        return not direct or not (message.sending or self._ends.in_place)


def _numel(parts: Sequence[Tensor]) -> int:
    return sum(part.numel() for part in parts)


def _extend(copies: Copies, targets: list[Tensor], sources: list[Tensor]) -> None:
    copies[0].extend(targets)
    copies[1].extend(sources)


def _join_pairs(targets: list[Tensor], sources: list[Tensor]) -> Copies:
    """Join copies that are contiguous on both sides into flat ones."""
    joined: Copies = ([], [])
    ends: tuple[int, int] | None = None
    for pair in zip(targets, sources, strict=True):
        if not (pair[0].is_contiguous() and pair[1].is_contiguous()):
            ends = None
            _extend(joined, [pair[0]], [pair[1]])
            continue
        if ends == (pair[0].data_ptr(), pair[1].data_ptr()) and _continues(joined, pair):
            for side, part in zip(joined, pair, strict=True):
                side.append((last := side.pop()).as_strided((last.numel() + part.numel(),), (1,)))
        else:
            _extend(joined, [pair[0].view(-1)], [pair[1].view(-1)])
        ends = (pair[0].data_ptr() + pair[0].nbytes, pair[1].data_ptr() + pair[1].nbytes)
    return joined


def _continues(joined: Copies, pair: tuple[Tensor, Tensor]) -> bool:
    """Return whether the pair has the same storages and dtypes as the last copy."""
    return all(
        side[-1].untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        and side[-1].dtype == part.dtype
        for side, part in zip(joined, pair, strict=True)
    )
