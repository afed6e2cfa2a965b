"""Makes plans: searches, completes what was found, and says why it is so."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from realhf.plan import ExecutionPlan
from realhf.planner.candidates import Mesh
from realhf.planner.cost import CallCost
from realhf.planner.evaluate import Space
from realhf.planner.memory_check import Proof, prove
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.refusals import nothing_fits, require_candidates, require_known
from realhf.planner.search import Found, LocalSearch, Progress, search
from realhf.planner.simulate import Simulation, simulate

_SEARCHING = 0.8  # Of the time limit; the rest is for describing what was found.


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
    costs: Mapping[str, CallCost]
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
    """Return the best plan found within `time_limit` seconds, or sooner when it is within `gap` of the lower
    bound over the plans enumerated.

    Raises ValueError when nothing fits.
    """
    began = time.monotonic()
    require_known(problem, rates)
    space = Space(problem, rates)
    require_candidates(space)
    rule = heuristic(space)
    left = _SEARCHING * time_limit - (time.monotonic() - began)
    found = search(
        space, time_limit=max(0.1, left), gap=gap, starts=[] if rule is None else [rule.chosen],
        max_rounds=max_rounds, progress=progress,
    )  # fmt: skip
    if found is None:
        raise ValueError(nothing_fits(space))
    chosen = np.array(found.chosen)
    simulation = simulate(space, chosen)
    costs: dict[str, CallCost] = {}
    for unit, pick in zip(space.units, found.chosen, strict=True):
        variants = unit.candidates[pick].variants
        costs |= {space.calls[i].name: v.cost for i, v in zip(unit.calls, variants, strict=True)}
    plan = _execution_plan(space, found)
    proof = prove(problem, plan)
    assert proof.fits, f"the search counts less memory than the proof: {proof.fullest}"
    reasons = _reasons(space, chosen, found)
    spent = time.monotonic() - began
    return Planned(problem, space, plan, costs, found, simulation, proof, reasons, rule, spent)


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


def _execution_plan(space: Space, found: Found) -> ExecutionPlan:
    figures = {
        "step_seconds": found.step_seconds, "lower_bound_seconds": found.lower_bound_seconds,
        "gap": found.gap,
    }  # fmt: skip
    predicted = {name: float(f"{figure:.6g}") for name, figure in figures.items()}
    return ExecutionPlan(space.call_plans(found.chosen), predicted)


def _reasons(space: Space, chosen: np.ndarray, found: Found) -> dict[str, str]:
    """For each call: what limits it, and what its next best layout would cost."""
    reasons = {}
    for u, unit in enumerate(space.units):
        mine = unit.candidates[chosen[u]]
        others = np.array([i for i, c in enumerate(unit.candidates) if c.layout_key != mine.layout_key])
        if any(space.calls[i].name in space.problem.pins for i in unit.calls):
            second = "pinned"
        else:
            second = "no other layout fits beside the rest of this plan" if len(others) else "the only layout"
        if len(others):
            plans = np.repeat(chosen[None], len(others), axis=0)
            plans[:, u] = others
            seconds = space.periods(space.units, plans, exact=False)
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
