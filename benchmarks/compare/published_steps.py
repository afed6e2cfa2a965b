"""Predicts published GRPO steps of NeMo RL in its own layouts, and what our planner would choose instead.

Errors are given by release: the constants stand on v0.4, and the rows of v0.6 are predicted with them.

    python benchmarks/compare/published_steps.py
    python benchmarks/compare/published_steps.py --no-plans --json

All rows share the efficiencies of `h100` (planner/efficiencies.py) and the description of NeMo RL's
engine (published_rows.py); nothing is set for a single row. The exit code is 1 if a goal was missed.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from rich.table import Table
from scipy.special import ndtr

from benchmarks.compare.published_rows import (
    DEVICE_BYTES,
    HOST_SECONDS,
    NEWER_ROWS,
    PAGEABLE_BYTES_PER_SECOND,
    PROMPT_TOKENS,
    ROWS,
    TENSOR_SECONDS,
    UPDATE_SAMPLES,
    VLLM_RESERVE_BYTES,
    WAKE_SECONDS,
    PublishedStep,
)
from benchmarks.harness import Goal, geometric_mean, machine, progress, report
from realhf import GRPO, Expected, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.execution_plan import CallPlan
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.planner.call_cost import call_cost
from realhf.planner.efficiencies import EFFICIENCIES, Efficiencies
from realhf.planner.lengths import Lengths
from realhf.planner.make import make_plan
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.rates import Rates
from realhf.planner.shard import weights_bytes, widths

_TRAINING = ("actor_forward", "ref_forward", "actor_train")
_FULL = "full batch"  # Of the parts, the one that is no part of the step: it runs beside them.
LENGTHS_DEVIATION = 0.6
"""Standard deviation of the logarithm of response lengths before they are cut off: an assumption, as the page
has only means and limits."""
RATIOS = (0.67, 1.5)
MEANS = (0.8, 1.25)
NEWER_RATIOS = (0.8, 1.25)
NEWER_MEANS = (0.92, 1.08)


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
    )


def problem_for(row: PublishedStep) -> Problem:
    """Return the planning problem, with log-normal lengths, and with shares of prompts that stay as they are:
    replicas of vLLM take nothing from each other."""
    cluster = Cluster.load("h100-8x8")
    cluster = replace(cluster, num_hosts=row.devices // cluster.devices_per_host)
    problem = problem_of(experiment_of(row), cluster)
    work = problem.workloads["actor_generate"]
    lengths = log_normal(work.response_tokens, work.max_new_tokens)
    workloads = {
        call.name: replace(
            problem.workloads[call.name], response_lengths=lengths, response_tokens=lengths.mean,
            work_stealing=False)
        for call in problem.model_calls
    }
    return replace(problem, workloads={**problem.workloads, **workloads})


@lru_cache(maxsize=16)
def log_normal(mean: float, limit: int, deviation: float = LENGTHS_DEVIATION) -> Lengths:
    """Return log-normal lengths that are cut off at the limit and then have this mean."""
    tokens = np.arange(limit) + 0.5
    low, high = 1.0, 1e9  # Bisection on the median.
    for _ in range(80):
        median = math.sqrt(low * high)
        survival = ndtr(-np.log(tokens / median) / deviation)
        low, high = (median, high) if survival.sum() < mean else (low, median)
    return Lengths(survival)


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
    }


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


def peer_seconds(row: PublishedStep, efficiencies: Efficiencies | None = None) -> dict[str, float]:
    """Return the seconds of each part of the peer's step."""
    problem = problem_for(row)
    rates = Rates(problem.cluster, efficiencies, row.path)
    plans = call_plans(row, problem)
    role = problem.roles["actor"]
    per_host = problem.cluster.devices_per_host
    parts = {
        call.name: call_cost(
            rates, call, problem.model_role(call), problem.workloads[call.name], plans[call.name],
            per_host=per_host,
        ).seconds
        for call in problem.model_calls
    }
    strategy = plans["actor_train"].layout.strategy
    shard = weights_bytes(role, strategy, 0)
    # The reference's weights wait in host memory: they come to the device, the policy's go and come back.
    parts["swap"] = 3 * shard / PAGEABLE_BYTES_PER_SECOND
    parts["refit"] = refit_seconds(rates, role)
    if row.is_lagged:
        parts[_FULL] = full_batch_seconds(rates, row, problem, plans["actor_generate"])
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


def full_batch_seconds(
    rates: Rates, row: PublishedStep, problem: Problem, call_plan: CallPlan
) -> float:
    """Return the seconds in which a generator that is always full makes the tokens of a batch."""
    work = problem.workloads["actor_generate"]
    num_tokens = max(1, round(work.response_tokens))
    equal = replace(
        work, response_lengths=Lengths(np.ones(num_tokens)), response_tokens=float(num_tokens),
        max_new_tokens=num_tokens)
    call = next(call for call in problem.model_calls if call.name == "actor_generate")
    return call_cost(
        rates, call, problem.model_role(call), equal, call_plan,
        per_host=problem.cluster.devices_per_host).seconds


def step_seconds(row: PublishedStep, parts: dict[str, float]) -> float:
    """Return the peer's step: parts one after the other; with a lag, generation beside the rest.

    With a lag (nemo_rl/algorithms/async_utils.py), a batch is begun when the weights before the last are
    there, so two steps hold a batch, a training and two transfers of weights, which stop the generator
    without ending its rows (`in_flight_weight_updates` of all these recipes). A batch's first rows run beside
    the last ones of the batch before, and at most as many as one batch has: the generator's own limit is that
    it is always full.
    """
    if not row.is_lagged:
        return sum(parts.values())
    generation, full, refit = (parts[name] for name in ("actor_generate", _FULL, "refit"))
    training = sum(parts.values()) - generation - full - refit
    return max(training + refit, (training + generation) / 2 + refit, full + refit)


# What the planner would choose


def planned_row(row: PublishedStep, *, time_limit: float) -> dict[str, Any]:
    """Return the planner's step for the same work, on the peer's engine and on ours.

    On the peer's engine its other parts are added, so that only layouts differ.
    """
    problem = problem_for(row)
    others = {name: part for name, part in peer_seconds(row).items()
              if name not in problem.workloads and name != _FULL}
    figures: dict[str, Any] = {}
    for engine, rates in (("peer", Rates(problem.cluster, path=row.path)), ("ours", Rates(problem.cluster))):
        try:
            planned = make_plan(problem, rates, time_limit=time_limit, gap=0.01)
        except ValueError as error:
            return {"plan_reason": str(error)}
        seconds = planned.result.step_seconds + (sum(others.values()) if engine == "peer" else 0.0)
        layouts = {call.name: str(planned.plan[call.name].layout) for call in problem.model_calls}
        figures |= {f"plan_on_{engine}_seconds": float(seconds), f"plan_on_{engine}": layouts}
    return figures


# All rows


def predicted(row: PublishedStep) -> dict[str, Any]:
    parts = peer_seconds(row)
    seconds = step_seconds(row, parts)
    return {
        "name": row.name, "published_seconds": row.seconds, "predicted_seconds": seconds,
        "ratio": seconds / row.seconds, "parts": parts,
    }


def sensitivity() -> list[dict[str, Any]]:
    """Return the mean and the range of the ratios when one efficiency is a quarter lower or higher."""
    usual = EFFICIENCIES["h100"]
    changed_ratios = []
    for name in (field.name for field in fields(Efficiencies)):
        if name in ("tile", "units"):
            continue
        for factor in (0.75, 1.25):
            changed = replace(usual, **{name: getattr(usual, name) * factor})
            ratios = [step_seconds(row, peer_seconds(row, changed)) / row.seconds for row in ROWS]
            changed_ratios.append({"figure": name, "factor": factor, "mean": geometric_mean(ratios),
                          "least": min(ratios), "most": max(ratios)})
    return changed_ratios


def goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals of v0.4: every ratio, their geometric mean, and the faster of the two modes of models.

    One model may be missed: v0.6 has Qwen3-30B's modes in the other order than v0.4."""
    ranked = [
        (a["predicted_seconds"] < b["predicted_seconds"]) == (a["published_seconds"] < b["published_seconds"])
        for a, b in zip(rows[::2], rows[1::2], strict=True)
    ]
    return [
        *_ratio_goals("v0.4", rows, RATIOS, MEANS),
        Goal("v0.4: models whose faster mode is predicted, of 5", float(sum(ranked)), at_least=4),
    ]


def newer_goals(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals of v0.6: every ratio, their mean, and the gain from twice the devices."""
    half, whole = (
        next(row for row in rows if row["name"] == f"qwen3-235b-a22b, on policy, {n}") for n in (128, 256))
    gains = [half[key] / whole[key] for key in ("predicted_seconds", "published_seconds")]
    return [
        *_ratio_goals("v0.6", rows, NEWER_RATIOS, NEWER_MEANS),
        Goal("v0.6: gain of 256 over 128 devices, predicted / published", gains[0] / gains[1],
             at_least=0.85, at_most=1.15),
    ]


def _ratio_goals(
    version: str, rows: Sequence[dict[str, Any]], ratios: tuple[float, float], means: tuple[float, float]
) -> list[Goal]:
    low = min(rows, key=lambda row: row["ratio"])
    high = max(rows, key=lambda row: row["ratio"])
    mean = geometric_mean([row["ratio"] for row in rows])
    return [
        Goal(f"{version}: predicted / published, least ({low['name']})", low["ratio"], at_least=ratios[0]),
        Goal(f"{version}: predicted / published, most ({high['name']})", high["ratio"], at_most=ratios[1]),
        Goal(f"{version}: the same, geometric mean", mean, at_least=means[0], at_most=means[1]),
    ]


def table(version: str, rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of the rows of a release; gains are those over the peer's predicted step."""
    steps_table = Table(title=f"Steps of NeMo RL v{version} on DGX-H100", padding=(0, 1, 0, 0))
    titles = ("published s", "predicted s", "ratio", "generation", "training side", "other", "gain",
              "the planner's layouts")
    for title in ("row", *titles):
        steps_table.add_column(title, justify="left" if title in (titles[-1], "row") else "right")
    for row in rows:
        parts = row["parts"]
        sides = [parts["actor_generate"], sum(v for k, v in parts.items() if k in _TRAINING)]
        sides.append(sum(parts.values()) - parts.get(_FULL, 0.0) - sum(sides))
        steps_table.add_row(
            row["name"], f"{row['published_seconds']:g}", f"{row['predicted_seconds']:.1f}",
            f"{row['ratio']:.2f}", *(f"{side:.1f}" for side in sides), *_planned_cells(row),
        )
    return steps_table


def _planned_cells(row: dict[str, Any]) -> tuple[str, str]:
    if "plan_on_peer_seconds" not in row:
        return "-", row.get("plan_reason", "")
    gain = row["predicted_seconds"] / row["plan_on_peer_seconds"]
    layouts = row["plan_on_peer"]
    return f"{gain:.2f} x", f"generates {layouts['actor_generate']}, trains {layouts['actor_train']}"


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--no-plans", action="store_true", help="without the planner's own choices, which take longest")
    add("--time-limit", type=float, default=10.0, metavar="S", help="seconds of each search (default 10)")
    add("--sensitivity", action="store_true", help="also with each efficiency a quarter lower and higher")
    add("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    rows = []
    for row in (*ROWS, *NEWER_ROWS):
        progress(row.name)
        plans = {} if args.no_plans else planned_row(row, time_limit=args.time_limit)
        rows.append(predicted(row) | plans)
    older, newer = rows[: len(ROWS)], rows[len(ROWS) :]
    changed = sensitivity() if args.sensitivity else []
    document = {
        "benchmark": "published_steps", "machine": machine(), "settings": vars(args), "rows": rows,
        "sensitivity": changed,
    }
    tables = [table("0.4", older), table("0.6", newer), *([_sensitivity_table(changed)] if changed else [])]
    return report(document, tables=tables, goals=[*goals(older), *newer_goals(newer)], as_json=args.json)


def _sensitivity_table(changed: Sequence[dict[str, Any]]) -> Table:
    ratios_table = Table(title="Ratios with one efficiency changed", padding=(0, 1, 0, 0))
    for title in ("efficiency", "factor", "geometric mean", "least", "most"):
        ratios_table.add_column(title, justify="left" if title == "efficiency" else "right")
    for row in changed:
        figures = [f"{row[name]:.2f}" for name in ("factor", "mean", "least", "most")]
        ratios_table.add_row(row["figure"], *figures)
    return ratios_table


if __name__ == "__main__":
    sys.exit(main())
