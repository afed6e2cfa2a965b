"""Bytes of a role's model states on a rank: weights, gradients and optimizer."""

from realhf.layout import ParallelStrategy
from realhf.planner.problem import ModelRole
from realhf.planner.shard import held_params, num_params


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
