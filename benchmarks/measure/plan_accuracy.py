"""Compares the planner's costs, with profiles of this machine, with real runs of one and of four processes.

    python benchmarks/measure/plan_accuracy.py [--json] [--only ppo "sft, long tail"] [--keep DIR]

There are twelve experiments (accuracy_task.py). Each model shape is profiled once per number of processes.
Every experiment then runs on one process, and on four under a handful of plans and the planner's own. Means
of the measured steps and calls are compared with the predictions. It takes about 25 minutes on two cores.
With --keep DIR --seconds 280, each call does as much as fits in that time and goes on from the last one.
"""

import dataclasses
import math
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tyro
import yaml
from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from benchmarks.measure.accuracy_runs import WARM_UP, Measured, realhf
from benchmarks.measure.accuracy_task import CASES, Case, expected_of, profiled_case, write_experiment
from benchmarks.measure.shared_cores import seconds_beside_others
from realhf.cli.experiment_file import load_experiment
from realhf.cli.planning_problem import problem_of
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.experiment import Experiment
from realhf.planner.make import make_plan
from realhf.planner.problem import Problem
from realhf.planner.profile import Profile
from realhf.planner.profiled_rates import ProfiledRates
from realhf.planner.rates import Rates
from realhf.planner.step_time import predict

THE_PLANNERS = "the planner's"


@dataclass
class Options:
    only: tuple[str, ...] = ()
    """Names of the experiments to run; none: all of them."""
    experiments: int | None = None
    """Run the first so many of them."""
    processes: tuple[int, ...] = (1, 4)
    steps: int = 6
    """Measured steps of each run, after two that do not count."""
    rounds: int = 1
    """Number of runs of every plan, in turns."""
    keep: Path | None = None
    """Directory for profiles and runs; those that exist in it are not repeated."""
    seconds: float | None = None
    """Start no further profile and no further run after this time, and report on what there is; with --keep,
    a later call goes on from there."""
    json: bool = False
    """Print one JSON document."""


@dataclass
class Row:
    """A plan of an experiment: predicted and measured seconds of the step and of its calls."""

    experiment: str
    processes: int
    plan: str
    predicted: float
    measured: float
    calls: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def call_errors(self) -> list[float]:
        return [predicted / measured - 1 for predicted, measured in self.calls.values()]


class OutOfTimeError(Exception):
    """The time of this call is over; a later one goes on."""


class _Budget:
    """The time in which profiles and runs may begin."""

    def __init__(self, seconds: float | None) -> None:
        self._end = math.inf if seconds is None else time.monotonic() + seconds

    def require_left(self) -> None:
        if time.monotonic() > self._end:
            raise OutOfTimeError


def plans_of(case: Case, processes: int) -> dict[str, dict[str, str]]:
    """Return name -> call -> layout; `*` stands for all other calls."""
    if processes == 1:
        return {"d1": {"*": "d1@0"}}
    plans: dict[str, dict[str, str]] = {"d4": {"*": "d4@0-3"}, "d2t2": {"*": "d2t2@0-3"}}
    if case.generates:
        plans["d4, trains d2p2"] = {"*": "d4@0-3", "actor_train": "d2p2@0-3"}
        apart = {"actor_train": "d2@0-1", "critic_train": "d2@2-3", "ref_forward": "d2@2-3"}
        plans["apart"] = {"*": "d4@0-3", **apart, "critic_forward": "d2@0-1"}
    else:
        plans["d2p2"] = {"*": "d2p2@0-3"}
        plans["d2"] = {"*": "d2@0-1"}
    if "expert" in case.shape:
        plans["d4e2"] = {"*": "d4e2@0-3"}
    return plans


def profile_of(directory: Path, shape: str, processes: int, budget: _Budget) -> Profile:
    """Return the profile of a model shape, measured unless the directory has it."""
    path = directory / f"{processes} processes, {shape}.yaml"
    if not path.exists():
        budget.require_left()
        progress(f"profiling {shape} on {processes}")
        experiment = write_experiment(directory / f"profiled, {shape}", profiled_case(shape), steps=1)
        realhf("profile", experiment, "-o", path, processes=processes, log=path.with_suffix(".log"))
    return Profile.load(str(path))


def write_plan(path: Path, experiment: Experiment, layouts: Mapping[str, str]) -> ExecutionPlan:
    calls = {
        call.name: {"layout": layouts.get(call.name, layouts["*"])}
        for call in experiment.graph().calls if call.role is not None
    }
    path.write_text(yaml.safe_dump({"calls": calls}))
    return ExecutionPlan.load(str(path))


def save_plan(plan: ExecutionPlan, place: Path, number: int) -> None:
    """Save a plan, and remove runs of another plan under this number."""
    path = place / f"plan-{number}.yaml"
    if path.exists() and _options(ExecutionPlan.load(str(path))) != _options(plan):
        for run in place.glob(f"run-*-{number}"):
            shutil.rmtree(run)
    plan.save(path)


def _options(plan: ExecutionPlan) -> dict[str, CallPlan]:
    """Return the plan of each call on a model without predictions."""
    return {name: dataclasses.replace(call, predicted={}) for name, call in plan.calls.items()}


def compare(
    directory: Path, name: str, processes: int, options: Options, budget: _Budget
) -> Iterator[Row]:
    """Run all plans of an experiment in turns, and yield a row for each."""
    case = CASES[name]
    rates = ProfiledRates(profile_of(directory, case.shape, processes, budget))
    place = directory / f"{processes} processes, {name}"
    path = write_experiment(place, case, warm_up=WARM_UP, steps=options.steps)
    experiment = load_experiment(str(path))
    experiment.expected = expected_of(case, place)
    plans = {
        plan: write_plan(place / f"plan-{number}.yaml", experiment, layouts)
        for number, (plan, layouts) in enumerate(plans_of(case, processes).items())
    }
    if processes > 1:
        problem = problem_of(experiment, rates.cluster)
        plans[THE_PLANNERS] = make_plan(problem, rates, time_limit=10.0, gap=0.001, explain=False).plan
        save_plan(plans[THE_PLANNERS], place, len(plans) - 1)
    measured = {plan: Measured() for plan in plans}
    for turn in range(options.rounds):
        for number, plan in enumerate(plans):
            out = place / f"run-{turn}-{number}"
            if not (out / "summary.json").exists():
                budget.require_left()
                shutil.rmtree(out, ignore_errors=True)  # Another call may have been ended in it.
                words = ("run", path, "--plan", place / f"plan-{number}.yaml", "--out", out)
                realhf(*words, processes=processes, log=out.with_suffix(".log"))
            measured[plan].add(out)
            progress(f"{name}, {processes} processes, {plan}: {measured[plan].step_seconds:.3f} s")
    problem = problem_of(_with_host_seconds(experiment, measured), rates.cluster)
    for plan, taken in measured.items():
        yield _row(problem, rates, plans[plan], taken, (name, processes, plan))


def _with_host_seconds(experiment: Experiment, measured: Mapping[str, Measured]) -> Experiment:
    """Return the experiment with the measured seconds of its plain Python, which a user would give."""
    host = [call.name for call in experiment.graph().calls if call.role is None]
    seconds = [taken.call_seconds(name) for taken in measured.values() for name in host]
    expected = dataclasses.replace(experiment.expected, host_seconds=statistics.fmean(seconds or [0.0]))
    return dataclasses.replace(experiment, expected=expected)


def _row(
    problem: Problem, rates: Rates, plan: ExecutionPlan, taken: Measured, about: tuple[str, int, str]
) -> Row:
    predicted = predict(problem, rates, plan)
    alone = {name: cost.seconds for name, cost in predicted.calls.items()}
    beside = seconds_beside_others(problem, rates, plan, alone)
    calls = {name: (beside[name], taken.call_seconds(name)) for name in alone}
    return Row(*about, predicted.step_seconds, taken.step_seconds, calls)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    return float(np.corrcoef(*(np.argsort(np.argsort(values)) for values in (a, b)))[0, 1])


def _correlation(rows: Sequence[Row]) -> float:
    return spearman([row.predicted for row in rows], [row.measured for row in rows])


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each experiment on several processes."""
    names = dict.fromkeys(row.experiment for row in rows if row.processes > 1)
    return {name: [row for row in rows if row.processes > 1 and row.experiment == name] for name in names}


def show(rows: Sequence[Row], about: dict[str, Any], options: Options) -> int:
    """Print the rows and the goals, and return the exit code."""
    groups = _groups(rows)
    chosen = {
        name: next(row.measured for row in group if row.plan == THE_PLANNERS)
        / min(row.measured for row in group)
        for name, group in groups.items()
    }
    call_errors = [abs(error) for row in rows for error in row.call_errors]
    goals = [
        Goal("median relative error of steps", statistics.median(abs(r.error) for r in rows), at_most=0.1),
        Goal("median relative error of calls", statistics.median(call_errors), at_most=0.15),
    ]
    if len(rows) > 2:
        goals.append(Goal("rank correlation of all steps (Spearman)", _correlation(rows), at_least=0.95))
    if groups:
        within = statistics.median(_correlation(group) for group in groups.values())
        goals.append(Goal("median rank correlation of an experiment's plans", within, at_least=0.9))
        most = max(chosen.values())
        goals.append(Goal("planner's plan, multiple of the fastest measured", most, at_most=1.03))
    steps = Table("experiment", "processes", "plan", "predicted", "measured", "error", "errors of calls")
    for row in rows:
        calls = "  ".join(f"{e:+.0%}" for e in row.call_errors)
        numbers = (f"{row.predicted:.3f}", f"{row.measured:.3f}", f"{row.error:+.0%}")
        steps.add_row(row.experiment, str(row.processes), row.plan, *numbers, calls)
    for name, ratio in chosen.items():
        progress(f"{name}: rank correlation {_correlation(groups[name]):.2f}, planner's plan {ratio:.2f}")
    document = {**about, "rows": [dataclasses.asdict(row) for row in rows], "chosen": chosen}
    return report(document, tables=[steps], goals=goals, as_json=options.json)


def main(options: Options) -> int:
    before = machine()
    if before["load_before"] > 0.5:
        progress(f"the load is {before['load_before']:.1f}: other work on the machine disturbs the figures")
    names = [name for name in CASES if not options.only or name in options.only][: options.experiments]
    if unknown := [name for name in options.only if name not in CASES]:
        sys.exit(f"--only {unknown[0]}: the experiments are {', '.join(CASES)}")
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-") as scratch:
        directory = (options.keep or Path(scratch)).resolve()
        budget = _Budget(options.seconds)
        rows: list[Row] = []
        for processes, name in product(options.processes, names):
            try:
                rows += compare(directory, name, processes, options, budget)
            except OutOfTimeError:
                progress(f"out of time: {name} on {processes}")
    if not rows:
        return 1
    return show(rows, {"machine": before}, options)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
