"""Predicts published GRPO steps of NeMo RL in its own layouts, and what our planner would choose instead.

    python benchmarks/published_steps.py
    python benchmarks/published_steps.py --no-plans --json

All rows share the efficiencies of `h100` (planner/efficiencies.py) and the description of NeMo RL's engine
(published_rows.py); nothing is set for a single row. The exit code is 1 if a goal was missed.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness import Goal, geometric_mean, machine, progress, report
from published_rows import (
    DEVICE_BYTES,
    HOST_SECONDS,
    PAGEABLE_BYTES_PER_SECOND,
    PROMPT_TOKENS,
    ROWS,
    TENSOR_SECONDS,
    UPDATE_SAMPLES,
    VLLM_RESERVE_BYTES,
    WAKE_SECONDS,
    PublishedStep,
)
from rich.table import Table

from realhf import GRPO, Expected, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.cost import call_cost
from realhf.planner.make import make_plan
from realhf.planner.model_states import weights_bytes
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.rates import Rates
from realhf.planner.shard import widths

RATIOS = (0.67, 1.5)
MEANS = (0.8, 1.25)


def right(completions: list[str], answer: list[str]) -> list[float]:
    """Stand in for a reward function; it is never called."""
    raise NotImplementedError


def experiment_of(row: PublishedStep) -> GRPO:
    """Return the step as an experiment: log-probs are recomputed, and there is a reference model."""
    return GRPO(
        actor=Role(row.model, dtype="bfloat16", optimizer=OptimizerConfig()),
        reward_function=right,
        loss=PolicyLossConfig(kl_coef=0.01, proximal="recomputed"),
        sampling=SamplingConfig(max_new_tokens=row.max_tokens - PROMPT_TOKENS),
        expected=Expected(prompt_tokens=PROMPT_TOKENS, response_tokens=row.mean_tokens - PROMPT_TOKENS),
        batch_size=row.samples // row.group_size, group_size=row.group_size,
        minibatches=row.samples // UPDATE_SAMPLES, max_lag=int(row.is_lagged),
    )  # fmt: skip


def problem_for(row: PublishedStep) -> Problem:
    cluster = Cluster.load("h100-8x8")
    return problem_of(experiment_of(row), replace(cluster, num_hosts=row.devices // cluster.devices_per_host))


# The step of the peer


def call_plans(row: PublishedStep, problem: Problem) -> dict[str, CallPlan]:
    """Return the peer's layouts: generation and training on all devices, or each on half of them.

    Megatron spreads experts over dp, cp and tp. Here ep divides dp, and the ranks of tp join it because the
    peer's path does not split experts; where dp is then too small, ep is dp.
    """
    tp, cp, ep, pp = row.train
    size = row.devices // (1 + row.is_lagged)
    dp = size // (tp * cp * pp)
    train = ParallelStrategy(pp=pp, dp=dp, cp=cp, tp=tp, ep=min(dp, max(1, ep // tp)))
    mesh = DeviceMesh(tuple(range(row.devices - size, row.devices)))
    trained = CallPlan(Layout(train, mesh), row.max_tokens)
    generate = ParallelStrategy(dp=size // row.generation_tp, tp=row.generation_tp)
    return {
        "actor_generate": CallPlan(
            Layout(generate, DeviceMesh(tuple(range(size)))), max_rows=cached_rows(row, problem)),
        "actor_forward": trained,
        "ref_forward": trained,
        "actor_train": replace(trained, recompute=row.recompute),
    }  # fmt: skip


def cached_rows(row: PublishedStep, problem: Problem) -> int:
    """Return how many sequences vLLM's cache holds on average: it admits rows without reserving their ends.

    vLLM takes 0.6 of a device that it shares with training and 0.8 of its own (gpu_memory_utilization).
    """
    role = problem.roles["actor"]
    work = problem.workloads["actor_generate"]
    tp = row.generation_tp
    share = (0.8 if row.is_lagged else 0.6) * DEVICE_BYTES
    free = share - weights_bytes(role, ParallelStrategy(tp=tp), 0) - VLLM_RESERVE_BYTES
    token_bytes = widths(role.config, tp).cached * role.itemsize * role.config.num_layers
    mean = work.prompt_tokens + mean_context(work)
    return max(1, int(free / (token_bytes * mean)))


def mean_context(work: Workload) -> float:
    """Return the tokens of its response that a decoding row has cached, on average over steps."""
    alive = work.survival
    return float((alive * range(1, len(alive) + 1)).sum() / alive.sum())


def peer_seconds(row: PublishedStep) -> dict[str, float]:
    """Return the seconds of each part of the peer's step."""
    problem = problem_for(row)
    rates = Rates(problem.cluster, path=row.path)
    plans = call_plans(row, problem)
    role = problem.roles["actor"]
    per_host = problem.cluster.devices_per_host
    parts = {
        call.name: call_cost(
            rates, call, problem.model_role(call), problem.workloads[call.name], plans[call.name],
            per_host=per_host,
        ).seconds
        for call in problem.model_calls
    }  # fmt: skip
    strategy = plans["actor_train"].layout.strategy
    shard = weights_bytes(role, strategy, 0)
    # The reference's weights wait in host memory: they come to the device, the policy's go and come back.
    parts["swap"] = 3 * shard / PAGEABLE_BYTES_PER_SECOND
    parts["refit"] = refit_seconds(rates, role)
    parts["host"] = HOST_SECONDS
    if not row.is_lagged:
        owned = 12 * role.spec.numel / strategy.num_ranks
        parts["offload"] = WAKE_SECONDS + 2 * owned / PAGEABLE_BYTES_PER_SECOND
    return parts


def refit_seconds(rates: Rates, role: ModelRole) -> float:
    """Return the seconds of new weights for the generator: every host receives the whole model, tensor by
    tensor."""
    tensors = len(role.spec.params)
    return tensors * TENSOR_SECONDS + rates.send(role.spec.numel * role.itemsize, within_host=False)


def step_seconds(row: PublishedStep, parts: dict[str, float]) -> float:
    """Return the peer's step: parts one after the other; with a lag, generation beside the rest."""
    if not row.is_lagged:
        return sum(parts.values())
    generation = parts["actor_generate"]
    return max(generation, sum(parts.values()) - generation - parts["refit"]) + parts["refit"]
