"""Binds one rank's part of a Schedule to tensors: the memory that is sent, received and copied by wave."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from realhf.distributed.group import Group
from realhf.distributed.pieces import Shards, detached, in_row_major_order, pairs
from realhf.realloc.host_memory_reads import HostMemoryReads, Side
from realhf.realloc.schedule import Message, Schedule

Copies = list[tuple[Tensor, Tensor]]
"""Tensors to write, each with the tensor to read."""


class Staging:
    """A buffer for messages that grows on request. Reallocators that never run at once may share it."""

    def __init__(self, device: torch.device) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def reserve(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the first elements of the buffer."""
        num_bytes = numel * dtype.itemsize
        if num_bytes > len(self.bytes):
            self.bytes = self.bytes.new_zeros(num_bytes)  # Writes, so that the pages are mapped now.
        return self.bytes[:num_bytes].view(dtype)


@dataclass
class Wave:
    """The messages that one rank exchanges at the same time.

    Boxes that are not contiguous in memory are packed before they are sent and unpacked on arrival.
    """

    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    recvs: list[tuple[int, Tensor]] = field(default_factory=list)
    pack: Copies = field(default_factory=list)
    unpack: Copies = field(default_factory=list)


@dataclass(frozen=True)
class Binding:
    """The waves of one rank on given tensors, and the local copies, which wait for no message."""

    source: Shards | None
    target: Shards | None
    staging: Tensor
    waves: list[Wave]
    local: Copies


class Binder:
    """Maps the messages of one rank to its tensors, with as few and as large copies as possible.

    Ranks on the same host read each other's memory where they can. A rank that reads a box which its peer has
    to receive first waits for a message of one byte, by which the peer says that the box has arrived. With
    `in_place`, received elements overwrite the target's; otherwise they are averaged into it. A box is cut
    where the pieces of this rank end; a message has its elements in row-major order, however it is cut.
    """

    def __init__(
        self, schedule: Schedule, messages: Sequence[Sequence[Message]], *, group: Group,
        host_memory: HostMemoryReads, dtype: torch.dtype, device: torch.device, in_place: bool,
    ) -> None:
        self._schedule = schedule
        self._messages = messages
        self._group = group
        self._rank = group.ranks[group.index]
        self._host_memory = host_memory
        self._dtype = dtype
        self._device = device
        self._in_place = in_place
        self._shards: Mapping[Side, Shards] = {}

    def bind(self, source: Shards | None, target: Shards | None, staging: Staging) -> Binding:
        """Return the waves and local copies on the tensors; grow `staging` to what they need."""
        self._shards = {"source": detached(source), "target": detached(target)}
        for name, pieces in self._shards["target"].items():
            for _, tensor in pieces:
                assert tensor.dtype == self._dtype, f"target {name} is {tensor.dtype}, not {self._dtype}"
        local = self._local_copies()
        waves = [Wave() for _ in self._messages]
        sent: list[list[tuple[Message, list[Tensor]]]] = [[] for _ in waves]
        for wave, sent_in_wave, messages in zip(waves, sent, self._messages, strict=True):
            for message in messages:
                if self._host_memory.replaces(message):
                    self._share(message, wave, local)
                else:
                    sent_in_wave.append((message, self._tensors(message)))
        # Waves alternate between two halves of the memory: one is packed while the other is in flight.
        sizes = [
            sum(_numel(tensors) for message, tensors in sent_in_wave if self._is_staged(message, tensors))
            for sent_in_wave in sent
        ]
        halves = [max(sizes[parity::2], default=0) for parity in (0, 1)]
        memory = staging.reserve(sum(halves), self._dtype)
        for index, (wave, sent_in_wave) in enumerate(zip(waves, sent, strict=True)):
            self._exchange(sent_in_wave, wave, memory[halves[0] * (index % 2) :])
        return Binding(source, target, staging.bytes, waves, local)

    def _local_copies(self) -> Copies:
        """Return the copies within this rank, except those of a tensor onto itself."""
        copies: Copies = []
        for name, region in self._schedule.local_copies(self._rank):
            old = self._shards["source"][name]
            copies += (
                (ours, theirs) for ours, theirs in pairs(self._shards["target"][name], old, region)
                if ours.data_ptr() != theirs.data_ptr() or ours.stride() != theirs.stride())
        return _join(copies)

    def _share(self, message: Message, wave: Wave, local: Copies) -> None:
        """Add copies from the peer's memory: to `local`, or to `wave` if the peer must first receive them."""
        if not message.sending:
            (wave.unpack if message.forwarded else local).extend(self._reading(message))
        if message.forwarded:
            self._post(message, torch.zeros(1, dtype=torch.uint8), wave)

    def _exchange(
        self, messages: Sequence[tuple[Message, list[Tensor]]], wave: Wave, memory: Tensor
    ) -> None:
        """Add the messages that are sent or received to `wave`, staged in `memory` where necessary."""
        for message, tensors in messages:
            flat = tensors[0]
            if self._is_staged(message, tensors):
                flat, memory = memory.tensor_split([_numel(tensors)])
                slots = flat.split([tensor.numel() for tensor in tensors])
                staged = [slot.view_as(tensor) for slot, tensor in zip(slots, tensors, strict=True)]
                if message.sending:
                    wave.pack.extend(zip(staged, tensors, strict=True))
                else:
                    wave.unpack.extend(zip(tensors, staged, strict=True))
            self._post(message, flat, wave)

    def _post(self, message: Message, tensor: Tensor, wave: Wave) -> None:
        peer = self._group.ranks.index(message.peer)
        (wave.sends if message.sending else wave.recvs).append((peer, tensor))

    def _tensors(self, message: Message) -> list[Tensor]:
        """Return the tensors of a message in this rank's memory, in the order of the message."""
        side: Side = "source" if message.sending and not message.forwarded else "target"
        boxes = [
            tensor
            for name, region in message.boxes
            for tensor in in_row_major_order(self._shards[side][name], region)
        ]
        return [tensor for tensor, _ in _join([(box, box) for box in boxes])]

    def _reading(self, message: Message) -> Copies:
        """Return the copies that read the boxes of a message from the peer's memory."""
        peer = message.peer
        side: Side = "target" if message.forwarded else "source"
        copies: Copies = []
        for name, region in message.boxes:
            theirs = self._host_memory.pieces(peer, side, name)
            copies += pairs(self._shards["target"][name], theirs, region)
        return _join(copies)

    def _is_staged(self, message: Message, tensors: Sequence[Tensor]) -> bool:
        """Return whether a message travels through staging memory rather than from or to the tensors."""
        first = tensors[0]
        is_direct = len(tensors) == 1 and first.is_contiguous()
        is_direct = is_direct and (first.dtype, first.device) == (self._dtype, self._device)
        return not is_direct or not (message.sending or self._in_place)


def _numel(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _join(copies: Copies) -> Copies:
    """Make copies that are contiguous on both sides flat, and join those that follow one another."""
    joined: Copies = []
    for target, source in copies:
        if target.is_contiguous() and source.is_contiguous():
            target = target.view(-1)
            source = source.view(-1)
            if joined and _follows(target, joined[-1][0]) and _follows(source, joined[-1][1]):
                before = joined.pop()
                target = _extended(before[0], target.numel())
                source = _extended(before[1], source.numel())
        joined.append((target, source))
    return joined


def _follows(flat: Tensor, before: Tensor) -> bool:
    """Return whether a flat tensor begins where the other, of the same storage and dtype, ends."""
    return (
        before.is_contiguous()
        and before.data_ptr() + before.nbytes == flat.data_ptr()
        and before.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        and before.dtype == flat.dtype
    )


def _extended(flat: Tensor, numel: int) -> Tensor:
    return flat.as_strided((flat.numel() + numel,), (1,))
