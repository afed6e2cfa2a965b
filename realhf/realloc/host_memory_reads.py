"""HostMemoryReads: reads the shards of other ranks on the same host from shared memory, without messages."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from realhf.distributed.group import Group
from realhf.distributed.pieces import Piece, Shards
from realhf.distributed.shared_memory import Mapped
from realhf.distributed.world import World
from realhf.realloc.schedule import Message

Side = Literal["source", "target"]
"""The side of a reallocation whose layout a shard belongs to."""
_DONE = torch.zeros(1, dtype=torch.uint8)


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
        """Return a peer's pieces of a parameter on one side."""
        return self._pieces[peer][side, name]

    def finish(self) -> None:
        """Tell the owners that this rank has read their shards; wait until its own have been read."""
        index = self._group.ranks.index
        readers = self._readers if self._published is not None else []
        dones = [(index(peer), torch.empty_like(_DONE)) for peer in readers]
        self._group.exchange([(index(peer), _DONE) for peer in self._pieces], dones)
