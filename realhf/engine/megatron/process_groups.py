"""Process groups for Megatron-Core: the communicators of our Groups, registered with torch.distributed.

Megatron-Core calls the functions of torch.distributed, which know only registered groups. Registering ours
makes no second communicator.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from realhf.dist.parallel import ParallelGroups
from realhf.dist.world import World

_BACKEND = "realhf"
_UNUSED = ("hcp", "inter_dist_opt")
"""Groups that Megatron-Core looks up and this engine does not need."""


class _NoCollectives(dist.ProcessGroup):
    """The default group, which tells the rank and raises in every collective.

    All communication names its group, because several layouts exist at once.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]

    def getBackendName(self) -> str:  # noqa: N802 (the name is torch's)
        return _BACKEND


def _backend_of(options: Any, backend: Any) -> Any:
    """Return the communicator that `new_group` was given, or the default group if there is none."""
    return _NoCollectives(options.group_rank, options.group_size) if backend is None else backend


def _start(world: World) -> None:
    """Make the default group, without which torch.distributed refuses to work, unless there is one."""
    if _BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_BACKEND, _backend_of, extended_api=True, devices=["cpu", "cuda"])
    if not dist.is_initialized():
        dist.init_process_group(_BACKEND, store=dist.HashStore(), rank=world.rank, world_size=world.size)


def _register(world: World, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return the registered group of these ranks, which rise."""
    backend = world.group(ranks).backend or _alone(world)
    group = dist.new_group(
        list(ranks), backend=_BACKEND, pg_options=backend, use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)
    return group


def _alone(world: World) -> Any:
    """Return a communicator of this rank alone: Megatron-Core communicates in groups of one, too."""
    if world.device.type == "cpu":
        return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(minutes=1))
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
    made = {name: _register(groups.world, members.ravel().tolist()) for name, members in ranks.items()}
    # Groups of one for tied embeddings, whose gradients the engine sums itself; without any, Megatron-Core
    # would ask its globals.
    same = {"embd": "cp", "pos_embd": "cp"}
    same |= {"tp_cp": "tp", "expt_tp": "tp", "dp_cp": "dp", "intra_dp_cp": "dp", "intra_expt_dp": "expt_dp"}
    made |= {name: made[other] for name, other in same.items()}
    return ProcessGroupCollection(**made, **dict.fromkeys(_UNUSED))
