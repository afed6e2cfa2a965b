"""How much memory a rank has."""

import os

import torch

from realhf.dist.group import World


def device_bytes(world: World) -> float:
    """Memory of this rank's device, or its part of the host's."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info()[1]
    return host_bytes() / world.ranks_per_host


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
