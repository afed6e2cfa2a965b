"""Compares what the planner predicts of lagged and of synchronous steps with runs of two processes.

    python benchmarks/measure/lag_plans.py [--json] [--repeats 2] [--keep DIR]

Each configuration of lag_task.py runs with a lag of 1 on disjoint meshes (rank 0 generates, rank 1 scores and
trains), and synchronously with a half of every call on each rank. With a profile of this machine, the planner
predicts the seconds of both, and so which is faster. The configurations differ in how long generation takes
beside training.

The prediction gets the mean length of the answers, and the seconds of the host calls, from the runs. Measured
seconds are the lower quartile of the steps in the steady state, as in the profile, because other work on the
machine can only make a step longer.

The exit code is 1 if a goal was missed.
"""

import dataclasses
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from benchmarks.measure.lag_task import (
    NUM_RANKS,
    PLANS,
    Setting,
    SteadyState,
    lower_quartile,
    measure,
    realhf,
    write_task,
)
from realhf.cli.experiment_file import load_experiment
from realhf.cli.planning_problem import problem_of
from realhf.execution_plan import ExecutionPlan
from realhf.planner.profile import Profile
from realhf.planner.profiled_rates import ProfiledRates
from realhf.planner.step_time import predict, step_seconds

CONFIGURATIONS = {
    "balanced": Setting(),
    "few rows": Setting(prompts=4),
    "long prompts": Setting(prompt_tokens=64),
    "long answers": Setting(prompts=8, mean_tokens=96, new_tokens=288),
    "large groups": Setting(prompts=8, group=16, prompt_tokens=32),
    "three epochs": Setting(epochs=3),
    "wider model": Setting(hidden=256),
}
RIVALS = {"lagged": ("disjoint", 1), "synchronous": ("colocated", 0)}
"""Name -> plan and max_lag."""
_CLOSE = 0.05
"""Relative difference of the measured seconds below which neither of two counts as faster."""


@dataclass
class Options:
    repeats: int = 2
    """Runs of every configuration and plan."""
    steps: int = 16
    keep: Path | None = None
    """Directory for the profiles and the runs; those that exist in it are evaluated and not repeated."""
    cpu_clock: bool = False
    """For a machine that others use: take the CPU seconds of calls, and combine them to steps as the planner
    does. This leaves out waits, and cannot show whether steps overlap as they should."""
    json: bool = False
    """Print one JSON document."""


def profiles(directory: Path) -> dict[int, ProfiledRates]:
    """Return the rates of this machine by the model's width, measured at the longest sequences."""
    rates = {}
    for hidden in sorted({setting.hidden for setting in CONFIGURATIONS.values()}):
        settings = [setting for setting in CONFIGURATIONS.values() if setting.hidden == hidden]
        longest = max(settings, key=lambda setting: setting.prompt_tokens + setting.new_tokens)
        path = directory / f"profile-{hidden}.yaml"
        if not path.exists():
            progress(f"profiling, hidden size {hidden}")
            experiment = write_task(directory / f"profile-{hidden}", longest)
            realhf("profile", experiment, "--nproc", NUM_RANKS, "-o", path)
        rates[hidden] = ProfiledRates(Profile.load(str(path)))
    return rates


def run_all(directory: Path, options: Options) -> dict[str, dict[str, list[SteadyState]]]:
    """Run all configurations with both plans, in turns."""
    states: dict[str, dict[str, list[SteadyState]]] = {
        name: {rival: [] for rival in RIVALS} for name in CONFIGURATIONS
    }
    for name, setting in CONFIGURATIONS.items():
        write_task(directory / name.replace(" ", "-"), setting)
    for repeat in range(options.repeats):
        for name in CONFIGURATIONS:
            for rival in list(RIVALS)[:: -1 if repeat % 2 else 1]:
                plan, max_lag = RIVALS[rival]
                state = measure(
                    directory / name.replace(" ", "-"), plan=plan, max_lag=max_lag, repeat=repeat,
                    steps=options.steps)
                states[name][rival].append(state)
                progress(f"run {repeat + 1}, {name}, {rival}: {state.step_seconds:.3f} s")
    return states


def row_of(
    name: str, states: dict[str, list[SteadyState]], rates: ProfiledRates, directory: Path, *, cpu_clock: bool
) -> dict[str, Any]:
    """Return predicted and measured seconds of a configuration's two plans."""
    experiment = load_experiment(str(directory / "lag.py"))
    every = [state for group in states.values() for state in group]
    host = [call.name for call in experiment.graph().calls if call.kind == "host"]
    expected = dataclasses.replace(
        experiment.expected, response_tokens=round(statistics.fmean(s.response_tokens for s in every)),
        host_seconds=statistics.fmean(state.calls[call] for state in every for call in host))
    measured = {rival: lower_quartile(group) for rival, group in states.items()}
    medians = {rival: statistics.median(x for s in group for x in s.steps) for rival, group in states.items()}
    predicted, calls = {}, {}
    for rival, (plan, max_lag) in RIVALS.items():
        varied = dataclasses.replace(experiment, max_lag=max_lag, expected=expected)
        problem = problem_of(varied, rates.cluster)
        layouts = ExecutionPlan.load(str(directory / f"{plan}.yaml"))
        prediction = predict(problem, rates, layouts)
        predicted[rival] = prediction.step_seconds
        seconds = {
            call: min(state.cpu_seconds[call] if cpu_clock else state.calls[call] for state in states[rival])
            for call in prediction.calls
        }
        if cpu_clock:
            measured[rival] = step_seconds(problem, rates, layouts, seconds)
        calls[rival] = {
            call: {"predicted_seconds": cost.seconds, "measured_seconds": seconds[call]}
            for call, cost in prediction.calls.items()
        }
    return {
        "configuration": name, "setting": dataclasses.asdict(CONFIGURATIONS[name]), "predicted": predicted,
        "measured": measured, "medians": medians, "calls": calls, "response_tokens": expected.response_tokens,
        "faster_predicted": min(predicted, key=predicted.__getitem__),
        "faster_measured": min(measured, key=measured.__getitem__),
    }


def is_close(row: dict[str, Any]) -> bool:
    """Return whether both plans took about equally long, so that no prediction can be wrong."""
    return max(row["measured"].values()) <= (1 + _CLOSE) * min(row["measured"].values())


def table_of(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Seconds per step in the steady state, predicted / measured")
    for column in ("configuration", *RIVALS, "predicted", "measured", "right"):
        table.add_column(column)
    for row in rows:
        pairs = (f"{row['predicted'][rival]:.3f} / {row['measured'][rival]:.3f}" for rival in RIVALS)
        ratios = (row[kind]["synchronous"] / row[kind]["lagged"] for kind in ("predicted", "measured"))
        words = (f"lag {ratio:.2f} x as fast" for ratio in ratios)
        right = "yes" if row["faster_predicted"] == row["faster_measured"] else "no"
        table.add_row(row["configuration"], *pairs, *words, f"{right}, close" if is_close(row) else right)
    return table


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    clear = [row for row in rows if not is_close(row)]
    right = [row["faster_predicted"] == row["faster_measured"] for row in clear]
    errors = [abs(row["predicted"][r] / row["measured"][r] - 1) for row in rows for r in RIVALS]
    what = f"share of right predictions, in the {len(clear)} of {len(rows)} that differ by 5 %"
    return [
        Goal(what, statistics.fmean(right) if right else 1.0, at_least=1.0),
        Goal("median relative error of steps", statistics.median(errors), at_most=0.15),
    ]


def main(options: Options) -> int:
    before = machine()
    with tempfile.TemporaryDirectory(prefix="lag-plans-") as scratch:
        directory = Path(scratch) if options.keep is None else options.keep
        directory.mkdir(parents=True, exist_ok=True)
        rates = profiles(directory)
        states = run_all(directory, options)
        rows = [
            row_of(
                name, states[name], rates[setting.hidden], directory / name.replace(" ", "-"),
                cpu_clock=options.cpu_clock)
            for name, setting in CONFIGURATIONS.items()
        ]
    document = {"benchmark": "lag_plans", "machine": before, "plans": PLANS, "rows": rows}
    return report(document, tables=[table_of(rows)], goals=goals_of(rows), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
