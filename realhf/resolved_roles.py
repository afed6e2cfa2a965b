"""Fills in settings that roles leave open: dtype, learning rate, length of the schedule. Free of torch."""

import math
from collections.abc import Mapping
from dataclasses import replace

from realhf.calls import OptimizerConfig
from realhf.experiment import Experiment, Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.learning_rates import default_rates


def resolved_roles(
    experiment: Experiment, roles: Mapping[str, Role], graph: DataflowGraph
) -> dict[str, Role]:
    """Return the roles with a dtype, and with optimizers whose learning rate is known at every step.

    Raises ValueError if a role's config.json names a dtype that is not legal.
    """
    resolved = {}
    for name, role in roles.items():
        trains = [call for call in graph.of_role(name) if call.kind == "train_step"]
        optimizer = role.optimizer
        if optimizer is not None:
            num_steps = experiment.steps * sum(map(optimizer_steps, trains))
            optimizer = _resolved(optimizer, role, trains, num_steps=num_steps)
        resolved[name] = replace(role, dtype=role.weights_dtype, optimizer=optimizer)
    return resolved


def optimizer_steps(call: FunctionCall) -> int:
    """Return the optimizer steps that a train step takes each time it runs."""
    return call.work.num_minibatches * call.work.epochs


def _resolved(
    optimizer: OptimizerConfig, role: Role, trains: list[FunctionCall], *, num_steps: int
) -> OptimizerConfig:
    """Return the settings of a role that takes `num_steps` optimizer steps in the whole run."""
    if optimizer.lr is None:
        rates = default_rates(trains[0].work.loss if trains else None)
        optimizer = replace(optimizer, lr=rates.full if role.lora is None else rates.lora)
    needs_total = optimizer.schedule != "constant" or optimizer.warmup_ratio > 0
    if needs_total and optimizer.total_steps == 0:
        optimizer = replace(optimizer, total_steps=num_steps)
    if optimizer.warmup_ratio > 0:
        warmup_steps = math.ceil(optimizer.warmup_ratio * optimizer.total_steps)
        optimizer = replace(optimizer, warmup_steps=warmup_steps, warmup_ratio=0.0)
    return optimizer
