"""HostMemoryReads: reads the shards of other ranks on the same host from shared memory, without messages."""

from collections.abc import Sequence
from typing import Any

import torch

from realhf.dist.group import Group, World
from realhf.dist.shared_memory import Mapped
from realhf.realloc.bind import Message, Shards

_DONE = torch.zeros(1, dtype=torch.uint8)


class HostMemoryReads:
    """The shared shards of one reallocation: this rank's, and those of ranks on this host that it reads.

    No rank reads a shard before its owner has called `start`, and the owner returns from `finish` only when
    all readers are done. An owner whose shards are not in shared memory sends messages instead.
    """

    def __init__(self, messages: Sequence[Sequence[Message]], group: Group, world: World) -> None:
        self._group = group
        self._memory = world.memory
        near = set(world.ranks_on_host(world.rank)) if world.memory is not None else set()
        peers = {(m.sending, m.peer) for some in messages for m in some if m.peer in near}
        self._readers = sorted(peer for sending, peer in peers if sending)
        self._writers = sorted(peer for sending, peer in peers if not sending)
        self._version = self._sent_version = 0
        self._published: dict[str, Any] | None = None
        self._versions: dict[int, int] = {}
        self._tensors: dict[int, dict[tuple[bool, str], torch.Tensor]] = {}

    def publish(self, source: Shards, target: Shards) -> None:
        """Set this rank's shards; readers learn of them at the next `start`."""
        self._version += 1
        if self._memory is None or not self._readers:
            return
        shards = (source, target)
        sides = [{name: self._memory.describe(tensor) for name, tensor in side.items()} for side in shards]
        whole = all(description is not None for side in sides for description in side.values())
        self._published = {"source": sides[0], "target": sides[1]} if whole else None

    def start(self) -> bool:
        """Wait until the owners that this rank reads have started; return whether their shards are new."""
        version = torch.tensor([self._version])
        index = self._group.ranks.index
        changed = False
        pending = [self._group.post([(index(peer), version) for peer in self._readers], [])]
        if self._sent_version != self._version and self._readers:
            pending.append(self._group.send_json(self._published, [index(peer) for peer in self._readers]))
            self._sent_version = self._version
        for peer in self._writers:
            received = torch.zeros(1, dtype=torch.int64)
            self._group.exchange([], [(index(peer), received)])
            if self._versions.get(peer) != int(received):
                self._versions[peer] = int(received)
                changed = True
                self._map(peer, self._group.recv_json(index(peer)))
        for posted in pending:
            posted.wait()
        return changed

    def _map(self, peer: int, published: dict[str, Any] | None) -> None:
        self._tensors.pop(peer, None)
        if published is not None:
            mapped = Mapped()
            self._tensors[peer] = {
                (side == "target", name): mapped.tensor(description)
                for side in ("source", "target") for name, description in published[side].items()
            }  # fmt: skip

    def reads(self, message: Message) -> bool:
        """Return whether this rank reads the sender's memory instead of receiving the message."""
        return not message.sending and message.peer in self._tensors

    def is_read(self, message: Message) -> bool:
        """Return whether the receiver of the message reads this rank's memory instead."""
        return message.sending and message.peer in self._readers and self._published is not None

    def tensor(self, peer: int, name: str, *, forwarded: bool) -> torch.Tensor:
        """Return a peer's shard of the source layout, or of the target layout for what it forwards."""
        return self._tensors[peer][forwarded, name]

    def finish(self) -> None:
        """Tell the owners that this rank has read, and wait until all readers of its shards have."""
        index = self._group.ranks.index
        readers = self._readers if self._published is not None else []
        dones = [(index(peer), torch.empty_like(_DONE)) for peer in readers]
        self._group.exchange([(index(peer), _DONE) for peer in self._tensors], dones)
