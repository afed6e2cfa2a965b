"""Moves a model's parameters between two layouts: binds a rank's part of a Schedule to tensors, and runs it.

Between hosts and between devices, parameters travel as messages: in place where they are contiguous,
otherwise through preallocated staging memory. CPU processes on one host copy from each other's memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from realhf.distributed.group import Group, PeerError, Pending
from realhf.distributed.pieces import Piece, Shards, detached, in_row_major_order, pairs, pieces_of
from realhf.distributed.world import Mapped, World
from realhf.models.param_spec import region_size
from realhf.realloc.links import Links
from realhf.realloc.schedule import Message, Schedule

Side = Literal["source", "target"]
"""The side of a reallocation whose layout a shard belongs to."""
Copies = list[tuple[Tensor, Tensor]]
"""Tensors to write, each with the tensor to read."""
_DONE = torch.zeros(1, dtype=torch.uint8)
_AVERAGED = 1 << 18
"""Number of elements of a moving average that are computed at a time."""


# Shards of other ranks on the same host


class HostMemoryReads:
    """The shards of one reallocation in shared memory: this rank's, and those that it reads on this host.

    No rank reads a shard before its owner has called `start`, and the owner returns from `finish` only when
    all readers are done. An owner whose shards are not in shared memory sends messages instead.
    """

    def __init__(self, messages: Sequence[Sequence[Message]], group: Group, world: World) -> None:
        self._group = group
        self._memory = world.memory
        near = set(world.ranks_on_host(world.rank)) if world.memory is not None else set()
        peers = {(m.sending, m.peer) for in_wave in messages for m in in_wave if m.peer in near}
        self._readers = sorted(peer for sending, peer in peers if sending)
        self._owners = sorted(peer for sending, peer in peers if not sending)
        self._published: Any = None
        self._pieces: dict[int, dict[tuple[Side, str], list[Piece]]] = {}

    def start(self, shards: Mapping[Side, Shards] | None) -> bool:
        """Wait until the owners that this rank reads have started; return whether their shards are new.

        `shards` are this rank's on each side, or None if they are the same as before.
        """
        index = self._group.ranks.index
        if shards is not None:
            self._published = self._describe(shards)
        news = [] if shards is None else [self._published]
        pending = self._group.send_json(news, [index(peer) for peer in self._readers])
        changed = False
        for peer in self._owners:
            for published in self._group.recv_json(index(peer)):
                changed = True
                self._map(peer, published)
        pending.wait()
        return changed

    def _describe(self, shards: Mapping[Side, Shards]) -> list[Any] | None:
        """Return the pieces' descriptions for the readers; None if some are not in shared memory."""
        if self._memory is None or not self._readers:
            return None
        described = [
            (side, name, region, self._memory.describe(tensor)) for side, by_name in shards.items()
            for name, pieces in by_name.items() for region, tensor in pieces]
        return described if all(description for *_, description in described) else None

    def _map(self, peer: int, published: Any) -> None:
        self._pieces.pop(peer, None)
        if published is None:
            return
        mapped = Mapped()
        pieces_of_peer = self._pieces[peer] = {}
        for side, name, region, description in published:
            box = tuple((start, stop) for start, stop in region)
            pieces_of_peer.setdefault((side, name), []).append((box, mapped.tensor(description)))

    def replaces(self, message: Message) -> bool:
        """Return whether the receiver reads the sender's memory instead of getting the message."""
        if message.sending:
            return message.peer in self._readers and self._published is not None
        return message.peer in self._pieces

    def pieces(self, peer: int, side: Side, name: str) -> Sequence[Piece]:
        return self._pieces[peer][side, name]

    def finish(self) -> None:
        """Tell the owners that this rank has read their shards; wait until its own have been read."""
        index = self._group.ranks.index
        readers = self._readers if self._published is not None else []
        dones = [(index(peer), torch.empty_like(_DONE)) for peer in readers]
        self._group.exchange([(index(peer), _DONE) for peer in self._pieces], dones)


# The memory that is sent, received and copied in each wave


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


# A schedule at work


@dataclass(frozen=True)
class ReallocStats:
    """The traffic of one rank in one run.

    `senders` are the ranks that it receives from. `over_bound` is not measured: it is the time that the
    schedule should take divided by its lower bound, `bound_seconds`, both computed for the schedule's links.
    """

    bytes_sent: int
    bytes_received: int
    over_bound: float
    senders: tuple[int, ...] = ()
    bound_seconds: float = 0.0


def agreed_links(world: World, links: Links | None) -> Links:
    """Return the links that all ranks schedule for: those of rank 0, or assumed ones if rank 0 has None.

    Every rank must call this.
    """
    fields = world.control.all_gather_json(links and asdict(links))[0]
    if fields is None:
        return assumed_links(world)
    return replace(Links(**fields), devices_per_host=world.ranks_per_host)


def assumed_links(world: World) -> Links:
    """Return the links of usual hosts, as many ranks to a host as this world has."""
    return Links.of_hosts(world.ranks_per_host, cuda=world.device.type == "cuda")


class Reallocator:
    """Moves a model as a schedule says, any number of times.

    Every rank of either layout must construct it and call `run`, in the same order relative to its other
    group requests and messages. A run sets the target to follow_rate * source + (1 - follow_rate) * target.
    The source may be on another device. Parameters travel in `dtype`, the dtype of the target's tensors.
    `role` names the model in errors. With `posts`, ranks may call `wait_until_ready`.
    """

    def __init__(
        self, schedule: Schedule, world: World, *, dtype: torch.dtype, follow_rate: float = 1.0,
        staging: Staging | None = None, role: str = "a model", posts: bool = False,
    ) -> None:
        source = schedule.source
        target = schedule.target
        self.schedule = schedule
        self.follow_rate = follow_rate
        self._rank = world.rank
        self._device = world.device
        self.messages = schedule.messages(self._rank)
        ranks = dict.fromkeys((*source.ranks, *target.ranks)) if schedule.bundles else {}
        self._group = world.group(tuple(ranks) if self._rank in ranks else (self._rank,), purpose="realloc")
        self._ready = world.group(self._group.ranks, purpose="ready") if posts else None
        self._host_memory = HostMemoryReads(self.messages, self._group, world)
        # Ranks must forward the source's values, not the average, so these first arrive in separate memory.
        arrives_apart = follow_rate != 1 and schedule.num_waves > schedule.num_slices
        self._in_place = follow_rate == 1 or arrives_apart
        self._binder = Binder(
            schedule, self.messages, group=self._group, host_memory=self._host_memory, dtype=dtype,
            device=world.device, in_place=self._in_place)
        boxes = schedule.spec.boxes_held_by(target, self._rank) if arrives_apart else {}
        numel = sum(region_size(box) for regions in boxes.values() for box in regions)
        self._apart = pieces_of(world.zeros(numel, dtype), boxes)
        self.staging = staging or Staging(world.device)
        self._binding: Binding | None = None
        self._what = f"reallocation of {role} from {source} to {target}"
        sent, received = (ports[self._rank] for ports in schedule.port_bytes)
        senders = {m.peer for messages in self.messages for m in messages if not m.sending}
        self._stats = ReallocStats(
            sent, received, schedule.over_bound, tuple(sorted(senders)), schedule.bound_seconds)

    def run(self, source: Shards | None, target: Shards | None) -> ReallocStats:
        """Move the parameters and return this rank's traffic; see `post`. The host waits for the device."""
        stats = self.post(source, target)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return stats

    def wait_until_ready(self) -> None:
        """Wait, on the host, until all ranks of the reallocation have called this.

        On CUDA this comes before `post`, because a device that waits for a busy peer could do nothing else.
        """
        if self._ready is not None and self._ready.size > 1:
            with self._explained("start"):
                self._ready.barrier()

    @torch.no_grad()
    def post(self, source: Shards | None, target: Shards | None) -> ReallocStats:
        """Move the parameters and return this rank's traffic.

        On CUDA, all copies and messages are enqueued on the current stream, and the host does not wait.
        Messages alternate between two halves of the staging memory, in the order of the stream.
        Each rank passes its shards; passing the same mappings again saves time. Where a target is a view of
        the same elements of its source, nothing is copied. Raises PeerError when another rank fails.
        """
        self._move(source, self._apart or target)
        if target and self._apart:
            written = detached(target)
            self._mix([
                pair for name, pieces in self._apart.items() for box, _ in pieces
                for pair in pairs(written[name], pieces, box)
            ])
        return self._stats

    def _move(self, source: Shards | None, target: Shards | None) -> None:
        with self._explained("start"):
            binding = self._bind(source, target)
        write = self._copy if self._in_place else self._mix
        pending = self._post(binding, 0)
        write(binding.local)
        for number, wave in enumerate(binding.waves):
            following = self._post(binding, number + 1)
            with self._explained(f"wave {number + 1} of {len(binding.waves)}"):
                pending.wait()
            write(wave.unpack)
            pending = following
        with self._explained("end"):
            self._host_memory.finish()

    def _bind(self, source: Shards | None, target: Shards | None) -> Binding:
        """Return the binding to these tensors; make a new one only if they or other ranks' have changed."""
        binding = self._binding
        are_new = binding is None or binding.source is not source or binding.target is not target
        shards: Mapping[Side, Shards] = {"source": source or {}, "target": target or {}}
        others_are_new = self._host_memory.start(shards if are_new else None)
        if binding is None or are_new or others_are_new or binding.staging is not self.staging.bytes:
            binding = self._binding = self._binder.bind(source, target, self.staging)
        return binding

    def _post(self, binding: Binding, number: int) -> Pending:
        """Pack wave `number` and post its messages; do nothing if there is no such wave."""
        if number >= len(binding.waves):
            return Pending()
        wave = binding.waves[number]
        self._copy(wave.pack)
        with self._explained(f"wave {number + 1} of {len(binding.waves)}"):
            return self._group.post(wave.sends, wave.recvs)

    def _copy(self, copies: Copies) -> None:
        if copies:
            targets, sources = zip(*copies, strict=True)
            torch._foreach_copy_(targets, sources)

    def _mix(self, copies: Copies) -> None:
        """Average sources into targets, in chunks of rows, to bound the memory for the products."""
        for pair in copies:
            rows = max(1, _AVERAGED * len(pair[0]) // max(1, pair[0].numel()))
            for target, source in zip(*(part.split(rows) for part in pair), strict=True):
                # Rounding product and sum separately yields equal bits for local and received elements.
                source = source.to(device=target.device, dtype=target.dtype)
                target.mul_(1 - self.follow_rate).add_(source * self.follow_rate)

    @contextmanager
    def _explained(self, when: str) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            raise PeerError(f"{self._what}, {when}: {error}") from error
