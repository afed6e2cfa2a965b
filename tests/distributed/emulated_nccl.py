"""The operations of torch's NCCL communicator over gloo, so that the code for NCCL runs on a CPU."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType

from realhf.distributed.group import Group
from realhf.distributed.process import WatchedProcess
from realhf.distributed.world import OVER_GLOO, World
from tests.distributed.recording import Done, PostLog, RecordingBackend


class Emulated:
    """A communicator with NCCL's results: in-place collectives, and messages that complete together."""

    def __init__(self, gloo: Any, index: int, size: int) -> None:
        self._gloo = gloo
        self._index = index
        self._size = size

    def allreduce(self, tensors, *options):
        self._gloo.allreduce(tensors, *options).wait()
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
        self.log.communicators = self.process.communicators

    def group(self, ranks, *, purpose="data"):
        group = super().group(ranks, purpose=purpose)
        if purpose not in OVER_GLOO and group.size > 1 and not group._native:
            inner = Emulated(group._backend, group.index, group.size)
            name = f"{purpose} {list(group.ranks)}"
            group._backend = RecordingBackend(name, group.ranks, group.index, self.log, inner=inner)
            group._native = True
        return group


class DeviceThread:
    """A thread that executes posted work in its order, as the stream of a device would."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "device")
        self._posted: list[Future] = []
        self.aborted = threading.Event()

    def post(self, task):
        future = self._thread.submit(task)
        self._posted.append(future)
        return _Queued(future)

    def synchronize(self) -> None:
        """Wait, as a host waits for its device, until everything has been done or been aborted."""
        while not all(future.done() for future in self._posted):
            if self.aborted.wait(0.02):
                raise RuntimeError("NCCL communicator was aborted")


class _Queued:
    """A work of a DeviceThread; as on NCCL, waiting for it does not hold up the host."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return self._future.done()


class _OnDevice:
    """A communicator whose sums a DeviceThread executes, over gloo."""

    def __init__(self, gloo: Any, device: DeviceThread) -> None:
        self._gloo = gloo
        self._device = device

    def allreduce(self, tensors, *options):
        return self._device.post(lambda: self._gloo.allreduce(tensors, *options).wait())

    def get_error(self):
        return ErrorType.SUCCESS

    def abort(self):
        self._device.aborted.set()


def pretend_nccl(group: Group, device: DeviceThread, process: WatchedProcess) -> None:
    """Let a group over gloo take the code for NCCL, with work that a DeviceThread executes."""
    group._backend = _OnDevice(group._backend, device)
    group._native = True
    process.communicators.add(group._backend)
