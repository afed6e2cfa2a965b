"""Makes plans: searches, completes what was found, and says why it is so."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from realhf.graph import FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.plan import CallPlan, ExecutionPlan
from realhf.planner.candidates import Mesh
from realhf.planner.problem import Problem
from realhf.planner.proof import Proof, prove
from realhf.planner.rates import Rates, wide_bytes
from realhf.planner.search import Found, LocalSearch, Progress, search
from realhf.planner.simulate import Simulation, simulate
from realhf.planner.space import Space
from realhf.planner.unit import Candidate
from realhf.units import format_bytes

_SEARCHING = 0.9  # Of the time limit; the rest is for describing what was found.


class Heuristic(NamedTuple):
    """What people set up by hand, one candidate per unit; whether it `fits` in memory."""

    chosen: list[int]
    seconds: float
    fits: bool


@dataclass(frozen=True)
class Planned:
    """A plan, and all that is to be said about it."""

    problem: Problem
    space: Space
    plan: ExecutionPlan
    chosen: Mapping[str, Candidate]
    found: Found
    simulation: Simulation
    proof: Proof
    reasons: Mapping[str, str]
    heuristic: Heuristic | None
    search_seconds: float


def make_plan(
    problem: Problem, rates: Rates, *, time_limit: float, gap: float = 0.0, max_rounds: int | None = None,
    progress: Progress | None = None,
) -> Planned:  # fmt: skip
    """The best plan found within `time_limit` seconds of computing, or sooner when it is within `gap` of the
    best.

    Raises ValueError when nothing fits.
    """
    began = time.process_time()
    _require_divisible(problem)
    space = Space(problem, rates)
    _require_candidates(space)
    rule = heuristic(space)
    left = _SEARCHING * time_limit - (time.process_time() - began)
    found = search(
        space, time_limit=max(0.1, left), gap=gap, starts=[] if rule is None else [rule.chosen],
        max_rounds=max_rounds, progress=progress,
    )  # fmt: skip
    if found is None:
        raise ValueError(f"no plan fits: {_devices(space)}")
    chosen = np.array(found.chosen)
    simulation = simulate(space, chosen)
    by_call: dict[str, Candidate] = {}
    for unit, pick in zip(space.units, found.chosen, strict=True):
        by_call |= {space.calls[i].name: unit.candidates[pick] for i in unit.calls}
    plan = _execution_plan(space, chosen, found)
    proof = prove(problem, plan)
    reasons = _reasons(space, chosen, found)
    spent = time.process_time() - began
    return Planned(problem, space, plan, by_call, found, simulation, proof, reasons, rule, spent)


def heuristic(space: Space) -> Heuristic | None:
    """Every call on all devices, tensor parallelism inside hosts, a pipeline across them as deep as the model
    allows (the baseline of ReaL, Mei et al. 2024), with the best options that fit together, else the fastest.

    None where a call fits in no layout on all devices.
    """
    everywhere, ways = Mesh(0, space.problem.cluster.num_devices), []
    for unit in space.units:
        here = [i for i, candidate in enumerate(unit.candidates) if candidate.mesh == everywhere]
        if not here:
            return None
        strategies = {unit.candidates[i].strategy for i in here}
        chosen = max(strategies, key=lambda s: (min(s.tp, 8), -s.dp, -s.tp, -s.ep))
        ways.append(np.array([i for i in here if unit.candidates[i].strategy == chosen]))
    local = LocalSearch(space, ways)
    pairs = zip(space.units, ways, strict=True)
    local.improve(np.array([way[np.argmin((unit.resting + unit.running)[way])] for unit, way in pairs]))
    if local.best is not None:
        return Heuristic(local.best.tolist(), local.best_score, True)
    fastest = [int(way[0]) for way in ways]  # Candidates are in order of time.
    return Heuristic(fastest, float(space.exact_periods(np.array([fastest]))[0]), False)


def _execution_plan(space: Space, chosen: np.ndarray, found: Found) -> ExecutionPlan:
    calls: dict[str, CallPlan] = {}
    for unit, pick in zip(space.units, chosen.tolist(), strict=True):
        candidate = unit.candidates[pick]
        for i, variant in zip(unit.calls, candidate.variants, strict=True):
            options = variant.options
            calls[space.calls[i].name] = CallPlan(
                candidate.layout, options.micro_batch_tokens, options.max_rows, options.recompute,
                options.offload, {"seconds": _rounded(variant.cost.seconds)},
            )  # fmt: skip
    graph = space.problem.graph
    for call in graph.calls:
        if call.role is None:
            calls[call.name] = CallPlan(_host_layout(space.problem, call, calls))
    order = {call.name: calls[call.name] for call in graph.order}
    return ExecutionPlan(order, {
        "step_seconds": _rounded(found.step_seconds),
        "lower_bound_seconds": _rounded(found.lower_bound_seconds), "gap": _rounded(found.gap),
    })  # fmt: skip


def _rounded(number: float) -> float:
    return float(f"{number:.6g}")


def _host_layout(problem: Problem, call: FunctionCall, calls: Mapping[str, CallPlan]) -> Layout:
    """Plain Python runs where its data is: split over the heads of the call that it reads, if it can be; else
    on the first rank of a call that waits for it."""
    graph = problem.graph
    producers = [graph.producer(key) for key in call.inputs]
    before = [p.name for p in producers if p is not None and p.name in calls]
    after = [c.name for c in graph.order if set(c.inputs) & set(call.outputs) and c.name in calls]
    if before and getattr(call.work, "splittable", False):
        heads = calls[before[0]].layout.heads
        return Layout(ParallelStrategy(dp=len(heads)), DeviceMesh(heads))
    near = [*after, *before]
    return Layout.parse(f"d1@{calls[near[0]].layout.heads[0] if near else 0}")


def _reasons(space: Space, chosen: np.ndarray, found: Found) -> dict[str, str]:
    """For each call: what limits it, and what its next best layout would cost."""
    reasons = {}
    for u, unit in enumerate(space.units):
        mine = unit.candidates[chosen[u]]
        others = np.array([i for i, c in enumerate(unit.candidates) if c.layout_key != mine.layout_key])
        second = "no other layout fits"
        if len(others):
            plans = np.repeat(chosen[None], len(others), axis=0)
            plans[:, u] = others
            seconds = space.periods(space.units, plans)
            seconds[space.overflow(space.units, plans) > 0] = np.inf
            order = np.argsort(seconds, kind="stable")[:16]
            exact = np.where(np.isinf(seconds[order]), np.inf, space.exact_periods(plans[order]))
            best = int(np.argmin(exact))
            if np.isfinite(exact[best]):
                more = exact[best] / found.step_seconds - 1
                layout = unit.candidates[others[order[best]]].layout
                second = f"{layout} would make the step {more:.1%} longer"
                if more < 1e-3:
                    second = f"{layout} would do as well, with more device time"
        for i, variant in zip(unit.calls, mine.variants, strict=True):
            reasons[space.calls[i].name] = f"limited by {variant.cost.limit}; {second}"
    return reasons


# What cannot be planned


def _require_divisible(problem: Problem) -> None:
    for call in problem.model_calls:
        work = problem.workloads[call.name]
        prompts = work.num_samples // work.samples_per_prompt
        if work.minibatches > prompts:
            raise ValueError(
                f"call {call.name} cuts a batch of {prompts} into {work.minibatches} mini-batches: give at "
                "least one sample to each (minibatches, batch_size)"
            )
    for name, layout in problem.pins.items():
        call = problem.graph[name]
        problem.role_of(call).config.check_layout(layout)
        work = problem.workloads[name]
        most = work.num_samples // (work.samples_per_prompt if call.kind == "generate" else work.minibatches)
        if layout.dp > most:
            raise ValueError(f"--pin {name}={layout}: {most} samples cannot be split over dp={layout.dp}")


def _require_candidates(space: Space) -> None:
    """Raises ValueError about the first call that fits nowhere, even alone on all devices."""
    for unit in space.units:
        if unit.candidates:
            continue
        names = [space.calls[i].name for i in unit.calls]
        pinned = [name for name in names if name in space.problem.pins]
        where = f"as --pin {pinned[0]} says" if pinned else "in any layout, even alone"
        raise ValueError(f"call {' and '.join(names)} does not fit {where}: {_devices(space)}")


def _devices(space: Space) -> str:
    """What there is, against the weights, gradients and optimizers of all roles."""
    problem, total = space.problem, 0.0
    num_devices = problem.cluster.num_devices
    for role in problem.roles.values():
        total += role.spec.numel * (role.itemsize + (4 * wide_bytes(role) if role.trainable else 0))
    need, has = math.ceil(total / space.capacity), format_bytes(space.capacity)
    there_are = f"the cluster has {num_devices} devices with {has} available on each"
    takes = f"parameters, gradients and optimizers take {format_bytes(total)}"
    if need > num_devices:
        return f"{there_are}; {takes}: use at least {need} devices"
    what = "activations and KV cache do not fit beside"
    return f"{there_are}; {takes}, {what}: use more devices, smaller models or shorter sequences"
