"""Plans PPO and GRPO of 7B to 70B models on 8 to 1024 H100s: quality of the plans, gaps and search times.

    python benchmarks/planner.py --no-metropolis
    python benchmarks/planner.py --only ppo-70b --devices 64
    python benchmarks/planner.py --write scenarios
    python benchmarks/planner.py --ablation --cpu-seconds 4

With `--ablation`, other scenarios (VARIED) are each planned by the whole search and without each of its parts
(WITHOUT) in turn, in equal CPU seconds after the candidates have been found. It prints what each part is
worth: without it, how much larger the gap is at the end, how much longer the step, and how much longer it
takes to reach the gap that both reach.

Only the search runs: seconds per step are those of the cost model. Plans are compared with

- (a) the heuristic of ReaL's evaluation: tp=8 in every host and the rest a pipeline, for every call on all
  devices, with the best options that fit together ("-" if none do);
- (b) the best single layout of all calls on all devices;
- (c) ReaL's search by Metropolis-Hastings on our costs, with ten times our search time.

Seconds of a search are CPU seconds of one core, and so is its limit. "To goal" are those until the gap is at
most what the goals allow. The exit code is 1 if a goal was missed.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

import numpy as np  # noqa: E402 - after the number of threads is set
from rich.table import Table  # noqa: E402

import realhf.planner.search as search_module  # noqa: E402
from benchmarks.compare.metropolis import metropolis  # noqa: E402
from benchmarks.harness import Goal, geometric_mean, machine, progress, report  # noqa: E402
from realhf import (  # noqa: E402
    GRPO,
    PPO,
    Expected,
    OptimizerConfig,
    PolicyLossConfig,
    Role,
    SamplingConfig,
    ScaleRL,
    scalerl_actor,
)
from realhf.cli.planning_problem import problem_of  # noqa: E402
from realhf.cluster import Cluster  # noqa: E402
from realhf.execution_plan import ExecutionPlan  # noqa: E402
from realhf.experiment import Experiment  # noqa: E402
from realhf.planner import make  # noqa: E402
from realhf.planner.deadline import Deadline  # noqa: E402
from realhf.planner.links import ContiguousLayout  # noqa: E402
from realhf.planner.make import Planned, make_plan  # noqa: E402
from realhf.planner.memory_account import check_memory  # noqa: E402
from realhf.planner.memory_bounds import MemoryBounds  # noqa: E402
from realhf.planner.problem import Problem  # noqa: E402
from realhf.planner.rates import Rates  # noqa: E402
from realhf.planner.search import LocalSearch  # noqa: E402
from realhf.planner.search_space import SearchSpace  # noqa: E402
from realhf.planner.step_time import predict  # noqa: E402

GAP = 0.001  # The search ends at this gap.
NO_SLOWER = 1 - 1e-6
HEURISTIC_MEAN = 1.35  # The mean of ReaL's published speedups over its heuristic.
GAPS = {64: 0.01, 128: 0.02, 1024: 0.02}
"""Number of devices -> the largest gap allowed on that many (and fewer)."""
SECONDS = {64: 10.0, 128: 20.0, 1024: 60.0}
"""Number of devices -> the CPU seconds in which this gap must be reached."""
START_SECONDS = 0.5
METROPOLIS_TIMES = 10
_SHIPPED = {
    "0.5b": "qwen2.5-0.5b", "7b": "llama-7b", "13b": "llama-13b", "32b": "qwen2.5-32b",
    "34b": "codellama-34b", "70b": "llama-70b", "30b-a3b": "qwen3-30b-a3b", "8x7b": "mixtral-8x7b",
    "235b-a22b": "qwen3-235b-a22b"}
_CLUSTERS = {8: "h100-1x8", 16: "h100-2x8", 64: "h100-8x8", 128: "h100-16x8", 1024: "h100-128x8"}
_PROMPT_TOKENS = 1024
_GROUP_SIZE = 8
_RIVALS = {"heuristic": "(a) heuristic", "symmetric": "(b) one layout", "metropolis": "(c) Metropolis"}


def _nothing(*_: object, **__: object) -> None:
    """Stand in for a part of the search that changes only the best plan."""


def _order_without(number: int) -> Callable[[], None]:
    """Return what leaves out one of the trees, by its number."""
    orders = search_module._orders

    def leave_out() -> None:
        def others(space: SearchSpace) -> Any:
            found = orders(space)
            return [order for i, order in enumerate(found) if i != number or len(found) == 1]

        search_module._orders = others

    return leave_out


def _replace(owner: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _no_memory_bounds() -> None:
    """Let only the account of complete plans say what does not fit."""

    def excess(self: MemoryBounds, choices: np.ndarray, *, exact: bool = True) -> np.ndarray:
        found = np.full(len(choices), -1.0)
        complete = [group.is_candidate(choice) for group, choice in zip(self._groups, choices.T, strict=True)]
        for k in np.flatnonzero(np.all(complete, axis=0)) if exact else ():
            found[k] = self.counted_excess(tuple(choices[k].tolist()))
        return found

    MemoryBounds.excess = excess  # type: ignore[method-assign]


WITHOUT: dict[str, Callable[[], None]] = {
    "tree-meshes": _order_without(0),
    "tree-resting": _order_without(1),
    "tree-large": _order_without(2),
    "beams": _replace(search_module._Tree, "search_beam", _nothing),
    "common-starts": _replace(LocalSearch, "start_from_common_layouts", _nothing),
    "simple-starts": _replace(LocalSearch, "starts", lambda self: []),
    "heuristic-start": _replace(make, "heuristic", _nothing),
    "kind-starts": _replace(make, "starts_by_kind", lambda *_, **__: []),
    "calls-between": _replace(search_module, "find_calls_between", lambda needs: []),
    "memory-bounds": _no_memory_bounds,
}
"""Part of the search -> what makes searches do without it:

- the tree that decides all meshes first, and those that decide large groups first (`tree-resting` then those
  that need memory between calls);
- beam searches; starts from common layouts, from simple plans, from the heuristic, and from plans on one kind
  of hosts;
- bounds from calls between two others; all bounds of memory.
"""


class Scenario(NamedTuple):
    """An experiment and its cluster.

    `models` are PPO's actor and critic, or the actor of others. References and reward models have their
    sizes. A context is the tokens of prompt and response.
    """

    algorithm: str
    models: tuple[str, ...]
    cluster_name: str
    context: str
    sequences: int

    @property
    def name(self) -> str:
        return "-".join([self.algorithm, *self.models, self.cluster_name, self.context])

    @property
    def cluster(self) -> Cluster:
        if self.cluster_name == "cpu-8":  # Eight processes share two cores.
            return replace(
                Cluster.load("cpu-laptop"), devices_per_host=8, cores_per_host=2, device_memory_bytes=8e9)
        return Cluster.load(self.cluster_name)

    @property
    def devices(self) -> int:
        return self.cluster.num_devices

    @property
    def response_tokens(self) -> int:
        return {"2k": 1024, "8k": 7168}[self.context]


def _sequences(devices: int, context: str) -> int:
    if context == "2k":
        return 512 if devices <= 128 else 4096
    return {128: 256, 1024: 2048}.get(devices, 128)


_MODELS = [("ppo", ("7b", "7b")), ("ppo", ("13b", "7b")), ("ppo", ("34b", "7b")), ("ppo", ("70b", "7b")),
           ("ppo", ("70b", "70b")), ("grpo", ("7b",)), ("grpo", ("32b",)), ("grpo", ("70b",))]
SCENARIOS = [
    Scenario(algorithm, models, cluster, context, _sequences(devices, context))
    for algorithm, models in _MODELS for devices, cluster in _CLUSTERS.items() for context in ("2k", "8k")
]
VARIED = [
    Scenario("ppo", ("7b", "7b"), "h100-1x8", "2k", 512),
    Scenario("ppo", ("13b", "7b"), "h100-1x8", "8k", 128),
    Scenario("ppo", ("13b", "7b"), "h100-2x8", "2k", 512),
    Scenario("ppo", ("34b", "7b"), "h100-2x8", "2k", 512),
    Scenario("ppo", ("34b", "7b"), "h100-8x8", "2k", 512),
    Scenario("ppo", ("70b", "7b"), "h100-8x8", "2k", 512),
    Scenario("ppo", ("70b", "70b"), "h100-8x8", "8k", 128),
    Scenario("ppo", ("8x7b", "7b"), "h100-8x8", "2k", 512),
    Scenario("grpo", ("30b-a3b",), "h100-8x8", "8k", 128),
    Scenario("scalerl", ("7b",), "h100-8x8", "2k", 512),
    Scenario("ppo", ("13b", "7b"), "h100-a100-4x8", "2k", 512),
    Scenario("ppo", ("34b", "7b"), "h100-a100-4x8", "8k", 128),
    Scenario("ppo", ("13b", "7b"), "h100-16x8", "2k", 512),
    Scenario("grpo", ("70b",), "h100-16x8", "8k", 256),
    Scenario("grpo", ("235b-a22b",), "h100-16x8", "8k", 256),
    Scenario("grpo", ("32b",), "h100-128x8", "8k", 2048),
    Scenario("ppo", ("70b", "70b"), "h100-128x8", "2k", 4096),
    Scenario("grpo", ("0.5b",), "cpu-8", "2k", 64),
]
"""Scenarios that differ in all that the search treats differently: kinds of hosts, experts, lag, memory."""


def right(completions: list[str], answer: list[str]) -> list[float]:
    """Stand in for a reward function; it is never called."""
    raise NotImplementedError


def experiment_of(case: Scenario) -> Experiment:
    """Return the experiment as a user would write it."""
    make_actor = scalerl_actor if case.algorithm == "scalerl" else Role
    actor = make_actor(_SHIPPED[case.models[0]], dtype="bfloat16", optimizer=OptimizerConfig())
    common: dict[str, Any] = {
        "sampling": SamplingConfig(max_new_tokens=case.response_tokens),
        "expected": Expected(prompt_tokens=_PROMPT_TOKENS),
    }
    if case.algorithm == "grpo":
        return GRPO(
            actor=actor, reward_function=right, loss=PolicyLossConfig(kl_coef=0.001),
            batch_size=case.sequences // _GROUP_SIZE, group_size=_GROUP_SIZE, **common,
        )
    if case.algorithm == "scalerl":
        return ScaleRL(
            actor=actor, reward_function=right, batch_size=case.sequences // 16, group_size=16, **common)
    critic = Role(_SHIPPED[case.models[1]], head="score", dtype="bfloat16", optimizer=OptimizerConfig())
    reward = Role(_SHIPPED[case.models[1]], head="score", dtype="bfloat16")
    return PPO(actor=actor, critic=critic, reward=reward, batch_size=case.sequences, **common)


# One row of the results


def limit_for(num_devices: int, limits: dict[int, float]) -> float:
    """Return the limit that holds for this number of devices."""
    return next(limit for devices, limit in limits.items() if num_devices <= devices)


class Stopwatch:
    """Notes the CPU seconds after which a search's gap was at most a goal."""

    def __init__(self, goal: float) -> None:
        self._goal = goal
        self._began = time.process_time()
        self.seconds: float | None = None

    def __call__(self, best: float, bound: float, seconds: float) -> None:
        if self.seconds is None and bound >= best * (1 - self._goal):
            self.seconds = self.spent

    @property
    def spent(self) -> float:
        return time.process_time() - self._began


def run(
    case: Scenario, *, most_seconds: float, write: Path | None, cpu_seconds: float = np.inf,
    num_edits: int = 0,
) -> dict[str, Any]:
    """Return the row of a scenario; if nothing fits, the row has the reason and no numbers.

    The search ends after `cpu_seconds`, and the baseline (c) after `most_seconds`; 0: it does not run.
    """
    problem = problem_of(experiment_of(case), case.cluster)
    rates = Rates(problem.cluster)
    row = {"name": case.name, "devices": case.devices, "context": case.context, "fits": False}
    started = time.monotonic()
    watch = Stopwatch(limit_for(case.devices, GAPS))
    limit = min(limit_for(case.devices, SECONDS), cpu_seconds) / make._SEARCHING
    try:
        planned = make_plan(
            problem, rates, time_limit=limit, gap=GAP, progress=watch, explain=False,
            clock=time.process_time)
    except ValueError as error:
        return {**row, "reason": str(error)}
    spent = watch.spent
    wall = time.monotonic() - started
    ours = float(planned.result.step_seconds)
    gap = float(planned.result.gap)
    if write is not None:
        planned.plan.save(write / f"{case.name}.yaml")
    space = planned.space
    rule = planned.heuristic
    rival = {"heuristic": rule.seconds if rule is not None and rule.fits else None}
    rival["symmetric"] = symmetric_seconds(space)
    walked = dict[str, float]()
    if most_seconds:
        cpu_seconds = min(METROPOLIS_TIMES * spent, most_seconds)
        result = metropolis(space, cpu_seconds=cpu_seconds)
        rival["metropolis"] = None if result.chosen is None else result.step_seconds
        walked |= {"metropolis_search_seconds": cpu_seconds, "metropolis_plans": result.num_plans}
    edit = best_edit(planned, number=num_edits) if num_edits else None
    if edit is not None and planned.result.lower_bound_seconds > 0:
        walked["edit_over_bound"] = edit[0] / planned.result.lower_bound_seconds
    rival = {name: None if seconds is None else float(seconds) for name, seconds in rival.items()}
    return {
        **row, "fits": True, "step_seconds": ours, "gap": gap, "cpu_seconds": spent,
        "goal_seconds": spent if watch.seconds is None else watch.seconds, "search_seconds": wall,
        "expanded": planned.result.num_expanded,
        "is_whole": space.is_whole,
        **walked,
        **{f"{name}_seconds": seconds for name, seconds in rival.items()},
        **{f"over_{name}": None if seconds is None else seconds / ours for name, seconds in rival.items()},
        "layouts": _layouts(planned),
    }


def _layouts(planned: Planned) -> dict[str, str]:
    calls = planned.problem.model_calls
    return {call.name: str(planned.plan[call.name].layout) for call in calls}


def symmetric_seconds(space: SearchSpace) -> float | None:
    """Return the step's seconds with the best single layout of all calls on all devices; None if none fits.

    Each call has the options that are best for the whole step.
    """
    everywhere = range(space.problem.cluster.num_devices)
    best = np.inf
    common = set.intersection(
        *({c.layout.strategy for c in unit.candidates if c.layout.ranks == everywhere}
          for unit in space.groups)
    )
    for strategy in sorted(common, key=str):
        best = min(best, _best_options(space, ContiguousLayout(strategy, 0), below=best))
    return best if np.isfinite(best) else None


def _best_options(space: SearchSpace, layout: ContiguousLayout, *, below: float) -> float:
    """Return the shortest step with all calls in this layout, which is on all devices.

    Returns infinity if no plan fits that takes less than `below`.
    """
    picks = [
        np.array([i for i, c in enumerate(unit.candidates) if c.layout == layout]) for unit in space.groups
    ]
    columns = list(zip(space.groups, picks, strict=True))
    resting = sum(unit.resting[pick].min() for unit, pick in columns)
    if resting + max(unit.running[pick].min() for unit, pick in columns) > space.capacity:
        return np.inf
    plans = np.stack(np.meshgrid(*picks, indexing="ij"), axis=-1).reshape(-1, len(picks))
    # All calls share their devices, so that a step takes at least the sum of its calls.
    columns = list(zip(space.groups, plans.T, strict=True))
    best = np.inf
    least = np.sum([unit.seconds[pick].sum(axis=1) for unit, pick in columns], axis=0)
    order = np.argsort(least, kind="stable")
    for part in np.array_split(order, len(order) // 2048 + 1):
        part = part[least[part] < below]
        if not len(part):
            break
        fitting = part[space.memory.excess(plans[part]) <= 0]
        if len(fitting):
            best = min(best, float(space.exact_periods(plans[fitting]).min()))
            below = min(below, best)
    return best


def start_seconds(*arguments: str) -> float:
    """Return the median of five times in seconds that a `realhf` command takes in the shell."""
    seconds = []
    for _ in range(5):
        began = time.monotonic()
        command = [sys.executable, "-m", "realhf", *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


# Ablation


class Searched(NamedTuple):
    """The outcome of a search, and CPU seconds, step and bound at the beginning of each of its rounds."""

    step_seconds: float
    lower_bound_seconds: float
    rounds: list[tuple[float, float, float]]

    @property
    def gap(self) -> float:
        return 1 - self.lower_bound_seconds / self.step_seconds

    def seconds_to(self, gap: float) -> float:
        """Return the CPU seconds after which the gap was at most this."""
        reached = (spent for spent, best, bound in self.rounds if bound >= best * (1 - gap) - 1e-9)
        return next(reached, self.rounds[-1][0])


def ablation(
    cases: Sequence[Scenario], parts: Sequence[str], *, cpu_seconds: float
) -> Iterator[tuple[Scenario, dict[str, Searched]]]:
    """Yield what the whole search ("") finds of each scenario, and the search without each of the parts."""
    for case in cases:
        problem = problem_of(experiment_of(case), case.cluster)
        space = SearchSpace(problem, Rates(problem.cluster))
        found = {part: _in_a_fork(space, part, cpu_seconds) for part in ("", *parts)}
        for part, one in found.items():
            progress(f"{case.name} {part or 'whole'}: {one.step_seconds:.3f} s, gap {one.gap:.2%}")
        yield case, found


def _in_a_fork(space: SearchSpace, part: str, cpu_seconds: float) -> Searched:
    """Return what a process finds that has the candidates already, and in which the part is left out."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            with os.fdopen(writing, "w") as file:
                file.write(json.dumps(_searched(space, part, cpu_seconds)))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        found = Searched(*json.load(file))
    os.waitpid(pid, 0)
    return found


def _searched(space: SearchSpace, part: str, cpu_seconds: float) -> Searched:
    if part:
        WITHOUT[part]()
    began = time.process_time()

    def space_of(problem: Problem, rates: Rates, deadline: Deadline) -> SearchSpace:
        if problem is not space.problem:
            return SearchSpace(problem, rates, deadline)
        space.deadline = space.memory.account.deadline = deadline
        return space

    make.SearchSpace = space_of  # type: ignore[assignment, misc]
    rounds = []

    def note(best: float, bound: float, _: float) -> None:
        rounds.append((time.process_time() - began, float(best), float(bound)))

    result = make_plan(
        space.problem, space.rates, time_limit=cpu_seconds / make._SEARCHING, gap=GAP, explain=False,
        progress=note, clock=time.process_time).result
    note(result.step_seconds, result.lower_bound_seconds, 0.0)
    return Searched(float(result.step_seconds), float(result.lower_bound_seconds), rounds)


def ablation_table(found: Sequence[tuple[Scenario, dict[str, Searched]]]) -> Table:
    """Return for each part the most that it is worth in any scenario, and the mean of times."""
    shown = Table(title="Without each part")
    for column in ("part", "gap, points more", "in", "step longer", "in", "mean time to the same gap"):
        shown.add_column(column)
    for part in found[0][1] if found else ():
        if not part:
            continue
        gaps = [(100 * (of[part].gap - of[""].gap), case.name) for case, of in found]
        steps = [(of[part].step_seconds / of[""].step_seconds - 1, case.name) for case, of in found]
        times = []
        for _, of in found:
            gap = max(of[part].gap, of[""].gap)
            times.append(of[part].seconds_to(gap) / of[""].seconds_to(gap))
        (gap, where), (longer, there) = max(gaps), max(steps)
        row = (part, f"{gap:+.2f}", where, f"{longer:+.2%}", there, f"x {geometric_mean(times):.2f}")
        shown.add_row(*row)
    return shown


# Edits of plans by hand


def edited(planned: Planned, rng: random.Random, *, micro_batches: bool = True) -> ExecutionPlan:
    """Return the plan with other rows and caches, and other `micro_batches`, in some of its calls."""
    problem = planned.problem
    calls = dict(planned.plan.calls)
    for call in problem.model_calls:
        plan = calls[call.name]
        work = problem.workloads[call.name]
        if rng.random() < 0.3:
            continue
        if call.kind == "generate":
            rows = rng.choice([plan.max_rows or work.max_rows, round(2 ** rng.uniform(0, 9))])
            gib = rng.choice([None, plan.kv_cache_gib, round(2 ** rng.uniform(0, 6), 3)])
            calls[call.name] = replace(plan, max_rows=min(rows, work.max_rows), kv_cache_gib=gib)
        elif micro_batches:
            tokens = round(plan.micro_batch_tokens * 2 ** rng.uniform(-3, 3))
            calls[call.name] = replace(plan, micro_batch_tokens=max(1, tokens))
    return replace(planned.plan, calls=calls)


def best_edit(
    planned: Planned, *, number: int, seed: int = 0, micro_batches: bool = True
) -> tuple[float, ExecutionPlan] | None:
    """Return the shortest step of random edits of a plan that fit, and the plan; None if none fits."""
    rng = random.Random(seed)
    best = None
    for _ in range(number):
        plan = edited(planned, rng, micro_batches=micro_batches)
        if check_memory(planned.problem, plan).fits:
            seconds = predict(planned.problem, planned.space.rates, plan).step_seconds
            if best is None or seconds < best[0]:
                best = (seconds, plan)
    return best


# All rows


def goals(rows: Sequence[dict[str, Any]], starts: dict[str, float]) -> list[Goal]:
    """Return the goals that the rows at hand can decide, each with its worst row."""
    found = []
    for rival, title in _RIVALS.items():
        key = f"over_{rival}"
        if some := [row for row in rows if row.get(key) is not None]:
            worst = min(some, key=lambda row: row[key])
            what = f"speed relative to {title}, worst row ({worst['name']})"
            found.append(Goal(what, worst[key], at_least=NO_SLOWER))
    if over := [row["over_heuristic"] for row in rows if row["over_heuristic"] is not None]:
        found.append(Goal("the same to (a), geometric mean", geometric_mean(over), at_least=HEURISTIC_MEAN))
    if edits := [row for row in rows if "edit_over_bound" in row]:
        worst = min(edits, key=lambda row: row["edit_over_bound"])
        what = f"best edit relative to the bound, worst row ({worst['name']})"
        found.append(Goal(what, worst["edit_over_bound"], at_least=NO_SLOWER))
    found.append(Goal(
        "scenarios whose gap is over a part of the meshes only", sum(not row["is_whole"] for row in rows),
        at_most=0))
    found += _worst(rows, "gap", "gap in percent", {n: 100 * gap for n, gap in GAPS.items()}, scale=100)
    found += _worst(rows, "goal_seconds", "CPU seconds until this gap", SECONDS)
    for command, seconds in starts.items():
        found.append(Goal(f"seconds until {command} is done", seconds, at_most=START_SECONDS))
    return found


def _worst(
    rows: Sequence[dict[str, Any]], key: str, title: str, most: dict[int, float], scale: float = 1.0
) -> list[Goal]:
    """Return a goal for every range of numbers of devices, with the worst row of each."""
    found = []
    fewer = 0
    for devices, limit in most.items():
        if some := [row for row in rows if fewer < row["devices"] <= devices]:
            worst = max(some, key=lambda row: row[key])
            what = f"{title}, {fewer + 1} to {devices} devices, worst row ({worst['name']})"
            found.append(Goal(what, scale * worst[key], at_most=limit))
        fewer = devices
    return found


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return a table of all rows."""
    title = f"Plans, and their speed relative to:\n{', '.join(_RIVALS.values())}"
    plans = Table(title=title, padding=(0, 1, 0, 0))
    for column in ("scenario", "step s", "gap %", "wall s", "CPU s", "to goal", "(a)", "(b)", "(c)"):
        plans.add_column(column, justify="left" if column == "scenario" else "right")
    for row in rows:
        if not row["fits"]:
            plans.add_row(row["name"], "does not fit")
            continue
        plans.add_row(
            row["name"], f"{row['step_seconds']:.2f}", f"{100 * row['gap']:.2f}",
            f"{row['search_seconds']:.1f}", f"{row['cpu_seconds']:.1f}", f"{row['goal_seconds']:.1f}",
            *(_shown(row.get(f"over_{rival}")) for rival in _RIVALS),
        )
    return plans


def _shown(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.3f}"


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--only", nargs="+", default=[""], metavar="TEXT", help="scenarios with one of these in their names")
    add("--devices", nargs="+", type=int, default=list(_CLUSTERS), choices=list(_CLUSTERS))
    add("--no-metropolis", action="store_true", help="without baseline (c), which takes most of the time")
    text = "CPU seconds that baseline (c) gets at most (default: 120, as in its paper)"
    add("--most-seconds", type=float, default=120.0, metavar="S", help=text)
    add("--cpu-seconds", type=float, default=np.inf, metavar="S", help="end searches after these")
    add("--ablation", nargs="*", choices=list(WITHOUT), metavar="PART",
        help=f"what parts of the search are worth, by default all of them: {', '.join(WITHOUT)}")
    add("--edits", type=int, default=0, metavar="N",
        help="price so many random edits of the plan of each scenario and compare the best with the bound")
    add("--write", type=Path, metavar="DIR", help="write the plans there")
    add("--verbose", action="store_true", help="say why scenarios do not fit")
    add("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
    if args.ablation is not None:
        cases = [case for case in VARIED if any(text in case.name for text in args.only)]
        found = list(ablation(cases, args.ablation or list(WITHOUT), cpu_seconds=args.cpu_seconds))
        by_case = {case.name: {part: one._asdict() for part, one in of.items()} for case, of in found}
        document = {"benchmark": "planner", "machine": machine(), "ablation": by_case}
        return report(document, tables=[ablation_table(found)], goals=[], as_json=args.json)
    hardware = machine()
    rows = list[dict[str, Any]]()
    starts = {f"realhf {words}": start_seconds(*words.split()) for words in ("--help", "plan --help")}
    most_seconds = 0.0 if args.no_metropolis else args.most_seconds
    for case in SCENARIOS:
        if case.devices not in args.devices or not any(text in case.name for text in args.only):
            continue
        row = run(case, most_seconds=most_seconds, write=args.write, cpu_seconds=args.cpu_seconds,
                  num_edits=args.edits)
        rows.append(row)
        why = f": {row['reason']}" if args.verbose and not row["fits"] else ""
        progress(f"{case.name}: {_line(row)}{why}")
    settings = {key: str(value) if key == "write" else value for key, value in vars(args).items()}
    document = {
        "benchmark": "planner", "machine": hardware, "settings": settings, "start_seconds": starts,
        "rows": rows,
    }
    fitting = [row for row in rows if row["fits"]]
    return report(document, tables=[table(rows)], goals=goals(fitting, starts), as_json=args.json)


def _line(row: dict[str, Any]) -> str:
    if not row["fits"]:
        return "does not fit"
    over = ", ".join(f"{title} {_shown(row.get(f'over_{rival}'))}" for rival, title in _RIVALS.items())
    part = "" if row["is_whole"] else " over a part of the meshes"
    return f"{row['step_seconds']:.2f} s, gap {row['gap']:.2%}{part}, CPU {row['goal_seconds']:.1f} s; {over}"


if __name__ == "__main__":
    sys.exit(main())
