"""Compares the planner's costs, with a profile of this machine, with real runs of two processes.

    python benchmarks/plan_accuracy.py [--json] [--size small|demo] [--algorithm ppo|grpo]

It profiles the machine, runs plans of one experiment in turns, and compares seconds of steps and of calls.
The lower quartile of the measured steps counts, as in the profile, because other work on the machine can only
make a step longer.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
import yaml
from accuracy_task import SIZES, write_experiment
from harness import Goal, machine, progress, report
from rich.table import Table

from realhf.cli.experiment_file import load_experiment
from realhf.cli.planning_problem import problem_of
from realhf.experiment import Experiment
from realhf.plan import ExecutionPlan
from realhf.planner.make import make_plan
from realhf.planner.predict import predict, step_seconds
from realhf.planner.profile import Profile, ProfiledRates

NUM_RANKS = 2
WARM_UP = 2  # The first steps of each run do not count.


def plans_of(algorithm: str, tokens: int) -> dict[str, dict[str, str | tuple[str, int]]]:
    """Return name -> call -> layout, or layout and micro-batch tokens; `*` stands for all other calls."""
    plans: dict[str, dict[str, Any]] = {
        "one rank": {"*": "d1@0"},
        "data": {"*": "d2@0-1"},
        "tensor": {"*": "t2@0-1"},
        "pipeline": {"*": ("p2@0-1", tokens // 4)},
        "data, small micro-batches": {"*": ("d2@0-1", tokens // 8)},
        "generate data, train tensor": {"*": "d2@0-1", "actor_train": "t2@0-1"},
        "generate tensor, rest data": {"*": "d2@0-1", "actor_generate": "t2@0-1"},
        "pipelined training": {"*": "d2@0-1", "actor_train": ("p2@0-1", tokens // 4)},
        "reference elsewhere": {"*": "d2@0-1", "ref_forward": "d1@1"},
    }
    if algorithm == "ppo":
        apart = {"reward_forward": "d1@0", "ref_forward": "d1@1", "critic_forward": "d1@1"}
        plans["actor here, critic there"] = {"*": "d1@0", **apart, "critic_train": "d1@1"}
        plans["scores apart, rest data"] = {"*": "d2@0-1", **apart, "critic_forward": "d1@0"}
        plans["train apart"] = {"*": "d2@0-1", "actor_train": "d1@0", "critic_train": "d1@1"}
    return plans


@dataclass
class Options:
    size: Literal["small", "demo"] = "small"
    algorithm: Literal["ppo", "grpo"] = "ppo"
    rounds: int = 3
    """Number of runs of every plan."""
    steps: int = 8
    profile: Path | None = None
    """Use this profile instead of measuring one."""
    keep: Path | None = None
    """Directory for the runs; runs that exist in it are evaluated and not repeated."""
    cpu_clock: bool = False
    """For a machine that others use: take the CPU seconds of calls, and sum them up to steps. This leaves out
    waits: bubbles of pipelines, latencies of tensor parallelism."""
    json: bool = False
    """Print one JSON document."""


@dataclass
class Measured:
    """The seconds of steps and, by name, of calls; a call takes as long as its slowest rank."""

    steps: list[float] = field(default_factory=list)
    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    response_tokens: list[float] = field(default_factory=list)

    def add(self, run: Path, *, cpu_clock: bool) -> None:
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        self.response_tokens += [m["response_length/mean"] for m in metrics if "response_length/mean" in m]
        events = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
        ends: dict[int, float] = defaultdict(float)
        spans: dict[tuple[int, str], list[float]] = defaultdict(list)
        for event in events:
            if event["kind"] not in ("move", "realloc", "offload"):
                ends[event["step"]] = max(ends[event["step"]], event["end"])
                wall = event["end"] - event["start"]
                spans[event["step"], event["name"]].append(event["cpu_seconds"] if cpu_clock else wall)
        for step in sorted(ends)[WARM_UP:]:
            self.steps.append(ends[step] - ends[step - 1])
        for (step, name), seconds in spans.items():
            if step > WARM_UP:
                self.calls[name].append(max(seconds))


def lower_quartile(times: list[float]) -> float:
    return times[0] if len(times) == 1 else statistics.quantiles(times, n=4, method="inclusive")[0]


def realhf(*words: Any) -> None:
    command = [sys.executable, "-m", "realhf", *map(str, words)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")


def write_plan(path: Path, experiment: Experiment, layouts: dict[str, Any]) -> None:
    calls = {}
    for call in experiment.graph().calls:
        if call.role is not None:
            layout, *tokens = np.atleast_1d(np.array(layouts.get(call.name, layouts["*"]), dtype=object))
            calls[call.name] = {"layout": layout} | ({"micro_batch_tokens": int(tokens[0])} if tokens else {})
    path.write_text(yaml.safe_dump({"calls": calls}))


def ranks_of(values: np.ndarray) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def spearman(a: list[float], b: list[float]) -> float:
    return float(np.corrcoef(ranks_of(np.array(a)), ranks_of(np.array(b)))[0, 1])


def run_all(
    directory: Path, experiment: Path, plans: dict[str, ExecutionPlan], options: Options
) -> dict[str, Measured]:
    """Run all plans in turns."""
    measured = {name: Measured() for name in plans}
    for turn in range(options.rounds):
        for number, name in enumerate(plans):
            out = directory / f"run-{turn}-{number}"
            plan = directory / f"plan-{number}.yaml"
            if not (out / "summary.json").exists():
                realhf("run", experiment, "--nproc", NUM_RANKS, "--plan", plan, "--out", out)
            measured[name].add(out, cpu_clock=options.cpu_clock)
            progress(f"round {turn + 1}, {name}: {lower_quartile(measured[name].steps):.3f} s")
    return measured


def show(rows: list[dict[str, Any]], about: dict[str, Any], options: Options) -> int:
    errors = [row["predicted_seconds"] / row["measured_seconds"] - 1 for row in rows]
    every_call = [call for row in rows for call in row["calls"].values()]
    call_errors = [call["predicted_seconds"] / call["measured_seconds"] - 1 for call in every_call]
    fastest = min(row["measured_seconds"] for row in rows)
    chosen = min(rows, key=lambda row: row["predicted_seconds"])["measured_seconds"] / fastest
    given = [row for row in rows if row["plan"] != "the planner's"]
    rank = spearman(*([row[f"{x}_seconds"] for row in given] for x in ("predicted", "measured")))
    goals = [
        Goal("rank correlation of predicted and measured steps (Spearman)", rank, at_least=0.9),
        Goal("median relative error of steps", statistics.median(map(abs, errors)), at_most=0.15),
        Goal("median relative error of calls", statistics.median(map(abs, call_errors)), at_most=0.15),
        Goal("best predicted plan, multiple of the fastest measured", chosen, at_most=1.05),
    ]
    steps = Table("plan", "predicted", "measured", "error", "median", title="Seconds per step")
    calls = Table("plan", *rows[0]["calls"], title="Seconds per call, predicted / measured")
    for row, error in zip(rows, errors, strict=True):
        numbers = (row[f"{x}_seconds"] for x in ("predicted", "measured"))
        words = (*(f"{x:.3f}" for x in numbers), f"{error:+.0%}", f"{row['median_seconds']:.3f}")
        steps.add_row(row["plan"], *words)
        pairs = [(c["predicted_seconds"], c["measured_seconds"]) for c in row["calls"].values()]
        calls.add_row(row["plan"], *(f"{a:.3f}/{b:.3f}" for a, b in pairs))
    document = {**about, "plans": rows}
    return report(document, tables=[steps, calls], goals=goals, as_json=options.json)


def main(options: Options) -> int:
    before = machine()
    size = SIZES[options.size]
    with tempfile.TemporaryDirectory(prefix="plan-accuracy-") as scratch:
        directory = Path(scratch) if options.keep is None else options.keep
        directory.mkdir(exist_ok=True, parents=True)
        path = write_experiment(directory, algorithm=options.algorithm, size=size, steps=options.steps)
        experiment = load_experiment(str(path))
        profile_path = options.profile
        if profile_path is None:
            profile_path = directory / "profile.yaml"
            progress("profiling")
            realhf("profile", path, "--nproc", NUM_RANKS, "-o", profile_path)
        rates = ProfiledRates(Profile.load(str(profile_path)))
        tokens = size.prompts * size.group * (size.prompt_tokens[1] + size.new_tokens)
        plans: dict[str, ExecutionPlan] = {}
        for number, (name, layouts) in enumerate(plans_of(options.algorithm, tokens).items()):
            write_plan(directory / f"plan-{number}.yaml", experiment, layouts)
            plans[name] = ExecutionPlan.load(str(directory / f"plan-{number}.yaml"))
        planned = make_plan(problem_of(experiment, rates.cluster), rates, time_limit=10.0, gap=0.001).plan
        plans["the planner's"] = planned
        planned.save(directory / f"plan-{len(plans) - 1}.yaml")
        measured = run_all(directory, path, plans, options)
        lengths = [x for m in measured.values() for x in m.response_tokens]
        taken = measured["data"].calls  # In an experiment, the user gives the seconds of host functions.
        host = [lower_quartile(taken[call.name]) for call in experiment.graph().calls if call.kind == "host"]
        expected = dataclasses.replace(
            experiment.expected, response_tokens=statistics.fmean(lengths),
            host_seconds=statistics.fmean(host))
        problem = problem_of(dataclasses.replace(experiment, expected=expected), rates.cluster)
    rows = []
    for name, plan in plans.items():
        predicted = predict(problem, rates, plan)
        own = measured[name]
        if options.cpu_clock:
            taken = {call.name: lower_quartile(own.calls[call.name]) for call in problem.model_calls}
            own.steps = [step_seconds(problem, rates, plan, taken)]
        rows.append({
            "plan": name, "predicted_seconds": predicted.step_seconds,
            "measured_seconds": lower_quartile(own.steps),
            "median_seconds": statistics.median(own.steps),
            "calls": {
                call: {
                    "predicted_seconds": cost.seconds,
                    "measured_seconds": lower_quartile(own.calls[call]),
                } for call, cost in predicted.calls.items()
            },
        })  # fmt: skip
    return show(rows, {"machine": before, "size": options.size, "algorithm": options.algorithm}, options)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
