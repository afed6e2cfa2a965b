"""How much of a device's memory plans may use."""

from realhf.cluster import Cluster
from realhf.realloc.schedule import STAGING_BYTES

_FRAGMENTATION = 0.05  # Share of a device's memory that the allocator cannot use.
_CONTEXT_BYTES = 1 << 30  # Of libraries and of communication buffers; a Python process on CPU takes no less.


def available_bytes(cluster: Cluster) -> float:
    """Of a device's memory, what plans may use.

    The rest is for fragmentation (5 %), libraries and communication buffers (1 GiB) and what is on its way
    in a reallocation.
    """
    usable = (1 - _FRAGMENTATION) * cluster.device_memory_bytes - _CONTEXT_BYTES - STAGING_BYTES
    return max(0.0, usable)
