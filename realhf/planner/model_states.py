"""Bytes of model states (weights, gradients, optimizer), and of the device memory that may hold them."""

from realhf.cluster import Cluster
from realhf.layout import Layout, ParallelStrategy
from realhf.planner.problem import ModelRole
from realhf.planner.shard import held_params, num_params
from realhf.realloc.schedule import STAGING_BYTES

_FRAGMENTATION = 0.05  # The fraction of a device's memory that the allocator cannot use.
_CONTEXT_BYTES = 1 << 30  # For libraries and communication buffers; a Python process on CPU needs as much.


def available_bytes(cluster: Cluster) -> float:
    """Return the bytes of a device's memory that plans may use.

    The rest is for fragmentation (5 %), libraries and communication buffers (1 GiB) and reallocations in
    flight.
    """
    usable = (1 - _FRAGMENTATION) * cluster.device_memory_bytes - _CONTEXT_BYTES - STAGING_BYTES
    return max(0.0, usable)


def shard_of(layout: Layout, rank: int) -> tuple[int, ...]:
    """Return a key that is equal for equal shards of a model."""
    coordinate = layout.coordinate(rank)
    expert_index = coordinate.dp % layout.ep
    return (layout.pp, coordinate.pp, layout.tp, coordinate.tp, layout.ep, expert_index)


def home_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes that a rank of a stage always holds in the home of a role."""
    training = training_bytes(role, strategy, stage) if role.trainable else 0
    return weights_bytes(role, strategy, stage) + training


def weights_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of one copy of the weights on the fullest rank of a stage, adapters included."""
    adapters = 0 if role.lora is None else trained_params(role, strategy, stage)
    return (num_params(role.spec, strategy, stage) + adapters) * role.itemsize


def trained_params(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the number of parameters on the fullest rank of a stage that training changes."""
    return sum(held_params(role.config, strategy, stage, role.lora))


def training_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of gradients and optimizer, which training always holds besides the weights.

    All of it is in float32 with ZeRO stage 1 (Rajbhandari et al. 2020): a replica has its share of the
    moments and, where the weights have a narrower dtype, of a master copy. Shards end at whole rows of a
    parameter, hence one extra row (in each section rounding may go either way). The optimizer of experts is
    shared by 1/ep as many replicas.
    """
    shared, experts = held_params(role.config, strategy, stage, role.lora)
    replicas, expert_replicas = strategy.num_replicas, strategy.num_expert_replicas
    row = max(role.config.hidden_size, role.config.intermediate_size // strategy.tp) if replicas > 1 else 0
    sharded = -(-shared // replicas) + -(-experts // expert_replicas) + row
    num_copies = 2 + (role.itemsize < role.wide_itemsize)
    return (shared + experts + num_copies * sharded) * role.wide_itemsize
