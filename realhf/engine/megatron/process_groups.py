"""Process groups for Megatron-Core: the communicators of our Groups, registered with torch.distributed.

Megatron-Core calls the functions of torch.distributed, which know only registered groups. Registering ours
makes no second communicator. Its operations are no part of the chain of posts
(distributed/communicators.py): they begin after all posts of the chain, in Megatron-Core's own order. The
watch knows them as it knows ours.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from realhf.distributed.communicators import Operation, gloo_backend
from realhf.distributed.group import Group, peer_errors
from realhf.distributed.process import WatchedProcess
from realhf.distributed.world import ParallelGroups, World

_BACKEND = "realhf"
_UNUSED = ("hcp", "inter_dist_opt")
"""Groups that Megatron-Core looks up and this engine does not need."""
_OPERATIONS = (
    "allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter", "send", "recv",
    "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "all_gather_single_coalesced",
    "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single", "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single",
)
"""Methods of a process group that post operations, under the names of all versions of torch."""


class _NoCollectives(dist.ProcessGroup):
    """The default group, which tells the rank and raises in every collective.

    All communication names its group, because several layouts exist at once.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]

    def getBackendName(self) -> str:  # noqa: N802 (the name is torch's)
        return _BACKEND


class _Followed:
    """A posted operation; the watch sees who waits for it, and whether the device has come to it."""

    def __init__(self, work: Any, operation: Operation, watched: "_Watched") -> None:
        self._work = work
        self._operation = operation
        self._watched = watched

    def wait(self, *timeout: timedelta) -> Any:
        group = self._watched.group
        with self._watched.process.waiting(group.ranks, self._operation), peer_errors(group.ranks):
            done = self._work.wait(*timeout)
        group.note(self._operation, self._work)
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Watched(dist.ProcessGroup):
    """A process group that lets another one carry out its operations, and the watch know them."""

    def __init__(self, inner: dist.ProcessGroup, group: Group, process: WatchedProcess) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]
        self.inner = inner
        self.group = group
        self.process = process

    def getBackendName(self) -> str:  # noqa: N802 (the name is torch's)
        return _BACKEND

    @property
    def _device_types(self) -> list[torch.device]:
        return self.inner._device_types

    def _get_backend(self, device: torch.device) -> Any:
        return self.inner._get_backend(device)

    def post(self, name: str, *args: Any, **options: Any) -> Any:
        """Post an operation after all posts of the chain; return its work, or None if there is none."""
        self.group.require_working()
        self.process.communicators.join()
        operation = self.group.new_operation(name.strip("_"))
        with peer_errors(self.group.ranks):
            work = getattr(self.inner, name)(*args, **options)
        if work is not None:
            return _Followed(work, operation, self)
        self.group.note(operation)  # The current stream executes it.
        return None


def _posting(name: str) -> Callable[..., Any]:
    """Return the method of this name of a watched group."""

    def post(self: _Watched, *args: Any, **options: Any) -> Any:
        return self.post(name, *args, **options)

    return post


for _name in _OPERATIONS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(_Watched, _name, _posting(_name))


class StageMessages(P2PCommunicator):
    """The messages between pipeline stages, for which the current stream waits; over gloo, the host does.

    Two interleaved stages send both hidden states and gradients to each other, and messages between two ranks
    arrive in the order in which they were sent. Megatron-Core's order has one rank receive a gradient as
    hidden states. The group must be a plain one: only of such a group does torch join what is posted
    together.
    """

    def __init__(self, groups: ParallelGroups, pp: dist.ProcessGroup, config: ModelParallelConfig) -> None:
        super().__init__(pp, config)
        self._group = groups.pp
        self._process = groups.world.process

    def _communicate(
        self, *, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool,
        recv_next: bool, tensor_shape: Any, wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, None]:
        """Exchange messages with both neighbours; return the tensors from the previous and the next stage.

        Every rank sends hidden states before gradients, and receives them in this order.
        """
        self._group.require_working()
        self._process.communicators.join()
        from_prev, from_next = (
            self._buffer(tensor_shape) if wanted else None for wanted in (recv_prev, recv_next))
        ops = [
            dist.P2POp(operation, tensor, peer, self.pp_group)
            for operation, tensor, peer in (
                (dist.isend, tensor_send_next, self.next_rank), (dist.irecv, from_prev, self.prev_rank),
                (dist.isend, tensor_send_prev, self.prev_rank), (dist.irecv, from_next, self.next_rank),
            ) if tensor is not None
        ]
        operation = self._group.new_operation("messages")
        ranks = self._group.ranks
        with self._process.waiting(ranks, operation), peer_errors(ranks):
            for request in dist.batch_isend_irecv(ops) if ops else ():
                request.wait()
        self._group.note(operation)  # The current stream waits for them, if the host has not.
        return from_prev, from_next, None

    def _buffer(self, shape: Any) -> Tensor:
        device = torch.cuda.current_device()
        return torch.empty(shape, requires_grad=True, device=device, dtype=self.config.pipeline_dtype)


def _backend_of(options: Any, communicator: Any) -> Any:
    """Return the communicator that `new_group` was given, or the group to watch. Without, return the default
    group."""
    if communicator is None:
        return _NoCollectives(options.group_rank, options.group_size)
    if not isinstance(communicator, tuple):
        return communicator
    group, process = communicator
    inner = dist.ProcessGroup(options.store, options.group_rank, options.group_size)
    custom = dist.ProcessGroup.BackendType.CUSTOM
    inner._set_default_backend(custom)
    for device in ("cpu", "cuda"):
        inner._register_backend(torch.device(device), custom, group.backend)
    return _Watched(inner, group, process)


def _start(world: World) -> None:
    """Make the default group, without which torch.distributed refuses to work, unless there is one."""
    # A barrier after each new group would use the store of the default group, which only this process has.
    os.environ["TORCH_DIST_INIT_BARRIER"] = "0"
    if _BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_BACKEND, _backend_of, extended_api=True, devices=["cpu", "cuda"])
    if not dist.is_initialized():
        dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=world.rank, world_size=world.size)


def _register(world: World, ranks: Sequence[int], *, is_watched: bool) -> dist.ProcessGroup:
    """Return the registered group of these ranks, which rise."""
    group = world.group(ranks)
    options = group.backend or _alone(world)
    if is_watched and group.size > 1:
        options = group, world.process
    registered = dist.new_group(
        list(ranks), backend=_BACKEND, pg_options=options, use_local_synchronization=True)
    assert isinstance(registered, dist.ProcessGroup)
    return registered


def _alone(world: World) -> Any:
    """Return a communicator of this rank alone: Megatron-Core communicates in groups of one, too."""
    if world.device.type == "cpu":
        return gloo_backend(dist.HashStore(), 0, 1, timedelta(minutes=1))
    return dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())


def make_collection(groups: ParallelGroups) -> ProcessGroupCollection:
    """Return the groups of this rank under its layout, without context parallelism.

    All ranks of the layout must call this, in the same order relative to their other group requests.
    """
    _start(groups.world)
    layout = groups.layout
    grid = layout.grid
    at = groups.at
    first = at.dp - at.dp % layout.ep
    shard = slice(first, first + layout.ep)
    ranks = {
        "tp": grid[at.pp, at.dp, 0, :],
        "pp": grid[:, at.dp, 0, at.tp],
        "mp": grid[:, at.dp, 0, :],
        "cp": grid[at.pp, at.dp, :, at.tp],
        "ep": grid[at.pp, shard, 0, at.tp],
        "tp_ep": grid[at.pp, shard, 0, :],
        "tp_ep_pp": grid[:, shard, 0, :],
        "dp": grid[at.pp, :, 0, at.tp],
        "expt_dp": grid[at.pp, at.dp % layout.ep :: layout.ep, 0, at.tp],
        "tp_dp_cp": grid[at.pp, :, 0, :],
        "intra_dist_opt": grid,
    }
    process_groups = {
        name: _register(groups.world, members.ravel().tolist(), is_watched=name != "pp")
        for name, members in ranks.items()
    }
    # Groups of one for tied embeddings, whose gradients the engine sums itself; without any, Megatron-Core
    # would ask its globals.
    same = {"embd": "cp", "pos_embd": "cp"}
    same |= {"tp_cp": "tp", "expt_tp": "tp", "dp_cp": "dp", "intra_dp_cp": "dp", "intra_expt_dp": "expt_dp"}
    process_groups |= {name: process_groups[other] for name, other in same.items()}
    return ProcessGroupCollection(**process_groups, **dict.fromkeys(_UNUSED))
