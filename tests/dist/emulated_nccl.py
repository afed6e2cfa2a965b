"""The operations of torch's NCCL communicator over gloo, so that the code for NCCL runs on a CPU."""

from typing import Any

import torch
import torch.distributed as dist

from realhf.dist.world import OVER_GLOO, World
from tests.dist.recording import Done, PostLog, RecordingBackend


class Emulated:
    """A communicator with NCCL's results: in-place collectives, and messages that complete together."""

    def __init__(self, gloo: Any, index: int, size: int) -> None:
        self._gloo = gloo
        self._index = index
        self._size = size

    def allreduce(self, tensors):
        self._gloo.allreduce(tensors).wait()
        return Done()

    def broadcast(self, tensor, root):
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._gloo.broadcast([tensor], options).wait()
        return Done()

    def _allgather_base(self, out, own):
        parts = [torch.empty_like(own) for _ in range(self._size)]
        self._gloo.allgather([parts], [own.clone()]).wait()
        out.copy_(torch.cat(parts).view_as(out))
        return Done()

    def _reduce_scatter_base(self, own, whole):
        total = whole.clone()
        self._gloo.allreduce([total]).wait()
        own.copy_(total.view(self._size, -1)[self._index].view_as(own))
        return Done()

    def exchange(self, messages):
        works = []
        for sending, peer, tensor in sorted(messages, key=lambda message: message[0]):
            works.append((self._gloo.send if sending else self._gloo.recv)([tensor], peer, 0))
        for work in works:
            work.wait()
        return Done()


class NcclWorld(World):
    """A World whose data groups take the code for NCCL, over gloo, and record what they post."""

    def __init__(self, **options: Any) -> None:
        self.log = PostLog()
        super().__init__(**options)

    def group(self, ranks, *, purpose="data"):
        group = super().group(ranks, purpose=purpose)
        if purpose not in OVER_GLOO and group.size > 1 and not group._native:
            inner = Emulated(group._backend, group.index, group.size)
            name = f"{purpose} {list(group.ranks)}"
            group._backend = RecordingBackend(name, group.ranks, group.index, self.log, inner=inner)
            group._native = True
        return group
