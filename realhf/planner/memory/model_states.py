"""Bytes of model states (weights, gradients, optimizer), and of the device memory that may hold them."""

from realhf.cluster import Cluster
from realhf.layout import ParallelStrategy
from realhf.planner.memory.shard import fullest_chunks, held_params, num_params
from realhf.planner.workload.problem import ModelRole
from realhf.realloc.schedule import STAGING_BYTES

CONTEXT_BYTES = 1 << 30
"""For CUDA's context, kernels and libraries' work space; a Python process on CPU needs as much."""
FRAGMENTATION = 0.05
"""The fraction of a device's memory that stays free, as the allocator cannot use all that is free."""
HOST_SHARE = 0.8
"""The fraction of a host's memory that offloaded weights, or offloaded optimizers, may take."""


def available_bytes(cluster: Cluster) -> float:
    """Return the bytes of a device's memory that plans may use: all but the fixed parts of the reserve."""
    return max(0.0, cluster.device_memory_bytes - sum(fixed_reserve(cluster).values()))


def fixed_reserve(cluster: Cluster) -> dict[str, float]:
    """Return the parts of the reserve that are the same for all plans, in bytes.

    Communicators are the part that depends on the plan (`communicator_memory.py`).
    """
    fragmentation = FRAGMENTATION * cluster.device_memory_bytes
    return {"context": CONTEXT_BYTES, "staging": STAGING_BYTES, "fragmentation": fragmentation}


def weights_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of one copy of the weights on the fullest rank of a stage, adapters included."""
    return base_weights_bytes(role, strategy, stage) + adapter_bytes(role, strategy, stage)


def base_weights_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of one copy of the weights without adapters."""
    return num_params(role.spec, strategy, stage) * role.itemsize


def adapter_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of one copy of the adapters."""
    return 0 if role.lora is None else trained_params(role, strategy, stage) * role.itemsize


def trained_params(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the number of parameters on the fullest rank of a stage that training changes."""
    return sum(held_params(role.config, strategy, stage, role.lora))


def training_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of gradients and optimizer, which training needs besides the weights."""
    return gradient_bytes(role, strategy, stage) + optimizer_bytes(role, strategy, stage)


def gradient_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of the buffer of gradients (float32), which exists during train steps only."""
    return trained_params(role, strategy, stage) * role.wide_itemsize


def optimizer_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of the optimizer.

    All of it is in float32 with ZeRO stage 1 (Rajbhandari et al. 2020): a replica has its share of the
    moments and, where the weights have a narrower dtype, of a master copy. The last replica has the most,
    because the others have equal, aligned chunks of each section. The optimizer of experts is shared by 1/ep
    as many replicas.
    """
    section_numel = role.trained_spec.section_numel
    sharded = fullest_chunks(role.config, strategy, stage, role.lora, section_numel)
    return num_states(role) * sharded * role.wide_itemsize


def num_states(role: ModelRole) -> int:
    """Return how many values the optimizer holds of a parameter: two moments, and a master copy of narrower
    weights."""
    return 2 + (role.itemsize < role.wide_itemsize)
