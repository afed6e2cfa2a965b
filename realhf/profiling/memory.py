"""The memory of a rank."""

import torch

from realhf.cluster import host_memory_bytes
from realhf.dist.world import World


def device_bytes(world: World) -> float:
    """Return the memory of this rank's device, or on CPU its part of the host's memory."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info()[1]
    return host_memory_bytes() / world.ranks_per_host
