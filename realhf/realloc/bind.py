"""Binds a rank's messages to tensors: which memory is sent, received and copied in each round."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from realhf.dist.group import Group
from realhf.layout import Layout
from realhf.param_spec import ModelSpec
from realhf.realloc.messages import Message
from realhf.region import Region, region_size

if TYPE_CHECKING:
    from realhf.realloc.host_memory_reads import HostMemoryReads

Shards = Mapping[str, Tensor]
"""Parameter name -> the region of it that this rank holds."""
Copies = tuple[list[Tensor], list[Tensor]]
"""Where to and where from."""


def shards_of(flat: Tensor, regions: Mapping[str, Region]) -> dict[str, Tensor]:
    """The regions as views of a flat tensor in which they lie end to end."""
    parts = flat.split([region_size(region) for region in regions.values()])
    shapes = ([stop - start for start, stop in region] for region in regions.values())
    return {n: part.view(shape) for n, part, shape in zip(regions, parts, shapes, strict=True)}


class Staging:
    """Memory that grows on request and is kept; Reallocators that never run at the same time may share it."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, num_bytes: int) -> None:
        if num_bytes > len(self.bytes):
            self.bytes = self.bytes.new_zeros(num_bytes)  # written to, so that no run waits for fresh pages


@dataclass
class Round:
    """What one rank sends and receives at once; what does not lie end to end in memory is staged."""

    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    recvs: list[tuple[int, Tensor]] = field(default_factory=list)
    pack: Copies = field(default_factory=lambda: ([], []))
    unpack: Copies = field(default_factory=lambda: ([], []))


@dataclass(frozen=True)
class Binding:
    """All rounds of one rank on given tensors, and what it copies without waiting for any."""

    source: Shards | None
    target: Shards | None
    staging: Tensor
    rounds: list[Round]
    local: Copies


class Ends:
    """The two layouts between which a model moves, and how: `in_place` where targets are overwritten."""

    def __init__(
        self, spec: ModelSpec, source: Layout, target: Layout, dtype: torch.dtype, *, sharded: bool,
        in_place: bool,
    ) -> None:  # fmt: skip
        self.dtype, self.in_place = dtype, in_place
        self._spec, self._ends = spec, ((source, sharded), (target, False))
        self._regions: dict[tuple[int, bool], dict[str, Region]] = {}

    def index(self, rank: int, name: str, region: Region, *, of_target: bool) -> tuple[slice, ...]:
        """`region` as an index into the shard that a rank holds."""
        key = (rank, of_target)
        if key not in self._regions:
            layout, sharded = self._ends[of_target]
            self._regions[key] = self._spec.held_by(layout, rank, sharded=sharded)
        spans = zip(region, self._regions[key][name], strict=True)
        return tuple(slice(start - low, stop - low) for (start, stop), (low, _) in spans)


class Binder:
    """Looks up a rank's tensors. What lies end to end in memory becomes one; what neighbours read needs no
    message, but for the word that it has come where it goes forwarded."""

    def __init__(
        self, ends: Ends, source: Shards | None, target: Shards | None, *, group: Group,
        host_memory: "HostMemoryReads", device: torch.device,
    ) -> None:  # fmt: skip
        self._ends, self._group, self._host_memory, self._device = ends, group, host_memory, device
        self._rank, self._given = group.ranks[group.index], (source, target)
        self._shards = [{n: t.detach() for n, t in (side or {}).items()} for side in (source, target)]
        for name, tensor in self._shards[True].items():
            assert tensor.dtype == ends.dtype, f"target {name} is {tensor.dtype}, not {ends.dtype}"

    def bind(
        self, rounds: Sequence[Sequence[Message]], copies: Iterable[tuple[str, Region]], staging: Staging
    ) -> Binding:
        local = self._local(copies)
        steps = [Round() for _ in rounds]
        for step, messages in zip(steps, rounds, strict=True):
            self._share([message for message in messages if self._is_shared(message)], step, local)
        wired = [[(m, self._parts(m)) for m in messages if not self._is_shared(m)] for messages in rounds]
        # Rounds alternate between two parts of the memory, so that one is packed while the other flies.
        sizes = [sum(_numel(parts) for m, parts in some if self._is_staged(m, parts)) for some in wired]
        halves = [max(sizes[parity::2], default=0) for parity in (0, 1)]
        itemsize = self._ends.dtype.itemsize
        staging.reserve(sum(halves) * itemsize)
        memory = staging.bytes[: sum(halves) * itemsize].view(self._ends.dtype)
        for number, (step, some) in enumerate(zip(steps, wired, strict=True)):
            self._wire(some, step, memory[halves[0] * (number % 2) :])
        return Binding(*self._given, staging.bytes, steps, local)

    def _local(self, local_copies: Iterable[tuple[str, Region]]) -> Copies:
        """The copies within this rank, but for what is there already."""
        copies: Copies = ([], [])
        for name, region in local_copies:
            old, new = (self._own(name, region, of_target=side) for side in (False, True))
            if new.data_ptr() != old.data_ptr() or new.stride() != old.stride():
                _extend(copies, [new], [old])
        return _join_pairs(*copies)

    def _is_shared(self, message: Message) -> bool:
        return self._host_memory.reads(message) or self._host_memory.is_read(message)

    def _share(self, messages: Sequence[Message], step: Round, local: Copies) -> None:
        """Copies out of a neighbour's memory: at once, or when its word comes."""
        word = torch.zeros(1, dtype=torch.uint8)
        for message in messages:
            peer = self._group.ranks.index(message.peer)
            if not message.sending:
                _extend(step.unpack if message.forwarded else local, *self._reading(message))
            if message.forwarded:
                (step.sends if message.sending else step.recvs).append((peer, word.clone()))

    def _wire(self, messages: Sequence[tuple[Message, list[Tensor]]], step: Round, memory: Tensor) -> None:
        """Sends and receives, through the start of `memory` where needed."""
        for message, parts in messages:
            flat = parts[0]
            if self._is_staged(message, parts):
                flat, memory = memory.tensor_split([_numel(parts)])
                pieces = flat.split([part.numel() for part in parts])
                places = [piece.view_as(part) for piece, part in zip(pieces, parts, strict=True)]
                if message.sending:
                    _extend(step.pack, places, parts)
                else:
                    _extend(step.unpack, parts, places)
            peer = self._group.ranks.index(message.peer)
            (step.sends if message.sending else step.recvs).append((peer, flat))

    def _own(self, name: str, region: Region, *, of_target: bool) -> Tensor:
        index = self._ends.index(self._rank, name, region, of_target=of_target)
        return self._shards[of_target][name][index]

    def _parts(self, message: Message) -> list[Tensor]:
        """A message in this rank's memory."""
        of_target = not message.sending or message.forwarded
        parts = [self._own(name, region, of_target=of_target) for name, region in message.boxes]
        return _join_pairs(parts, list(parts))[0]

    def _reading(self, message: Message) -> Copies:
        """The copies that take a neighbour's message out of its memory."""
        targets, sources = [], []
        peer, forwarded = message.peer, message.forwarded
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
    """The same copies, as few: flat ones wherever memory is contiguous on both sides."""
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
    """Whether the pair lies in the same memory as the last copy."""
    return all(
        side[-1].untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
        and side[-1].dtype == part.dtype
        for side, part in zip(joined, pair, strict=True)
    )
