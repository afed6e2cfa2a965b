"""HostMemoryReads: ranks on this host whose memory is read in place of messages."""

from collections.abc import Sequence
from typing import Any

import torch

from realhf.dist.group import Group, World
from realhf.dist.shared_memory import Mapped
from realhf.realloc.bind import Shards
from realhf.realloc.messages import Message

_DONE = torch.zeros(1, dtype=torch.uint8)


class HostMemoryReads:
    """Tells the readers where this rank's shards are, learns where the writers' are, and keeps the peace:
    nobody reads before the owner has come to `meet`, and no owner leaves `finish` before all have read.

    A writer whose shards are not in shared memory sends messages as if it were on another host.
    """

    def __init__(self, messages: Sequence[Sequence[Message]], group: Group, world: World) -> None:
        self._group, self._memory = group, world.memory
        near = set(world.ranks_on_host(world.rank)) if world.memory is not None else set()
        peers = {(m.sending, m.peer) for some in messages for m in some if m.peer in near}
        self._readers = sorted(peer for sending, peer in peers if sending)
        self._writers = sorted(peer for sending, peer in peers if not sending)
        self._version, self._told = 0, 0
        self._shown: dict[str, Any] | None = None
        self._seen: dict[int, int] = {}
        self._tensors: dict[int, dict[tuple[bool, str], torch.Tensor]] = {}

    def show(self, source: Shards, target: Shards) -> None:
        """From the next meeting on, these are this rank's shards."""
        self._version += 1
        if self._memory is None or not self._readers:
            return
        shards = (source, target)
        sides = [{name: self._memory.describe(tensor) for name, tensor in side.items()} for side in shards]
        whole = all(description is not None for side in sides for description in side.values())
        self._shown = {"source": sides[0], "target": sides[1]} if whole else None

    def meet(self) -> bool:
        """Waits until the writers are here too. Whether any of their shards have moved."""
        version = torch.tensor([self._version])
        index, news = self._group.ranks.index, False
        pending = [self._group.post([(index(peer), version) for peer in self._readers], [])]
        if self._told != self._version and self._readers:
            pending.append(self._group.send_json(self._shown, [index(peer) for peer in self._readers]))
            self._told = self._version
        for peer in self._writers:
            seen = torch.zeros(1, dtype=torch.int64)
            self._group.exchange([], [(index(peer), seen)])
            if self._seen.get(peer) != int(seen):
                self._seen[peer], news = int(seen), True
                self._learn(peer, self._group.recv_json(index(peer)))
        for posted in pending:
            posted.wait()
        return news

    def _learn(self, peer: int, shown: dict[str, Any] | None) -> None:
        self._tensors.pop(peer, None)
        if shown is not None:
            mapped = Mapped()
            self._tensors[peer] = {
                (side == "target", name): mapped.tensor(description)
                for side in ("source", "target") for name, description in shown[side].items()
            }  # fmt: skip

    def reads(self, message: Message) -> bool:
        """Whether this rank looks into the sender's memory instead of receiving the message,"""
        return not message.sending and message.peer in self._tensors

    def is_read(self, message: Message) -> bool:
        """and whether the receiver does so with this rank's."""
        return message.sending and message.peer in self._readers and self._shown is not None

    def tensor(self, peer: int, name: str, *, forwarded: bool) -> torch.Tensor:
        """A neighbour's shard: of the source layout, or of the target's what it got itself."""
        return self._tensors[peer][forwarded, name]

    def finish(self) -> None:
        """Waits until all readers have read."""
        index = self._group.ranks.index
        readers = self._readers if self._shown is not None else []
        dones = [(index(peer), torch.empty_like(_DONE)) for peer in readers]
        self._group.exchange([(index(peer), _DONE) for peer in self._tensors], dones)
