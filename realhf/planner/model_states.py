"""Bytes of a role's model states on a rank: weights, gradients and optimizer."""

from realhf.layout import ParallelStrategy
from realhf.planner.problem import ModelRole
from realhf.planner.shard import held_params, num_params


def weights_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """One copy of the weights on the fullest rank of a stage, adapters included."""
    adapters = 0 if role.lora is None else trained_params(role, strategy, stage)
    return (num_params(role.spec, strategy, stage) + adapters) * role.itemsize


def trained_params(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Parameters on the fullest rank of a stage that training changes."""
    return sum(held_params(role.config, strategy, stage, role.lora))


def training_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """What training holds all the time besides the weights: gradients, and a replica's share of moments and,
    where the weights are not that themselves, of a master copy.

    ZeRO stage 1 (Rajbhandari et al. 2020) with all of it in float32. Shards end at whole rows of a parameter,
    hence one row on top (in each section, up or down). Of experts 1/ep as many replicas share the optimizer.
    """
    shared, experts = held_params(role.config, strategy, stage, role.lora)
    replicas, expert_replicas = strategy.num_replicas, strategy.num_expert_replicas
    row = max(role.config.hidden_size, role.config.intermediate_size // strategy.tp) if replicas > 1 else 0
    sharded = -(-shared // replicas) + -(-experts // expert_replicas) + row
    num_copies = 2 + (role.itemsize < role.wide_itemsize)
    return (shared + experts + num_copies * sharded) * role.wide_itemsize
