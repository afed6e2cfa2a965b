"""Plans PPO and GRPO of 7B to 70B models on 8 to 1024 H100s: quality of the plans, gaps and search times.

    python benchmarks/planner.py --no-metropolis
    python benchmarks/planner.py --only ppo-70b --devices 64
    python benchmarks/planner.py --write scenarios
    python benchmarks/planner.py --no-metropolis --cpu-seconds 8 --without beams

With `--without`, the search does without some of its parts (see WITHOUT), to tell what they are worth.

Only the search runs: seconds per step are those of the cost model. Plans are compared with

- (a) the heuristic of ReaL's evaluation: tp=8 in every host and the rest a pipeline, for every call on all
  devices, with the best options that fit together ("-" if none do);
- (b) the best single layout of all calls on all devices;
- (c) ReaL's search by Metropolis-Hastings on our costs, with ten times our search time.

Seconds of a search are CPU seconds of one core, though its limit counts wall time. "To goal" are those until
the gap is at most what the goals allow. The exit code is 1 if a goal was missed.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}

import numpy as np  # noqa: E402 - after the number of threads is set
from rich.table import Table  # noqa: E402

from benchmarks.compare.metropolis import metropolis  # noqa: E402
from benchmarks.harness import Goal, geometric_mean, machine, progress, report  # noqa: E402
from realhf import GRPO, PPO, Expected, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig  # noqa: E402
from realhf.cli.planning_problem import problem_of  # noqa: E402
from realhf.cluster import Cluster  # noqa: E402
from realhf.experiment import Experiment  # noqa: E402
from realhf.planner import make, tree_search  # noqa: E402
from realhf.planner.links import ContiguousLayout  # noqa: E402
from realhf.planner.local_search import LocalSearch  # noqa: E402
from realhf.planner.make import Planned, make_plan  # noqa: E402
from realhf.planner.memory_bounds import MemoryBounds  # noqa: E402
from realhf.planner.rates import Rates  # noqa: E402
from realhf.planner.search_space import SearchSpace  # noqa: E402

GAP = 0.001  # The search ends at this gap.
NO_SLOWER = 1 - 1e-6
HEURISTIC_MEAN = 1.35  # The mean of ReaL's published speedups over its heuristic.
GAPS = {64: 0.01, 128: 0.02, 1024: 0.05}
"""Number of devices -> the largest gap allowed on that many (and fewer)."""
SECONDS = {64: 10.0, 128: 20.0, 1024: 60.0}
"""Number of devices -> the CPU seconds in which this gap must be reached."""
WALL_TIMES = 5  # The wall time after which a search ends, relative to them: other processes may run, too.
START_SECONDS = 0.5
METROPOLIS_TIMES = 10
_SHIPPED = {"7b": "llama-7b", "13b": "llama-13b", "32b": "qwen2.5-32b", "34b": "codellama-34b",
            "70b": "llama-70b"}  # fmt: skip
_CLUSTERS = {8: "h100-1x8", 16: "h100-2x8", 64: "h100-8x8", 128: "h100-16x8", 1024: "h100-128x8"}
_PROMPT_TOKENS = 1024
_GROUP_SIZE = 8
_RIVALS = {"heuristic": "(a) heuristic", "symmetric": "(b) one layout", "metropolis": "(c) Metropolis"}


def _nothing(*_: object, **__: object) -> None:
    """Stand in for a part of the search that changes only the best plan."""


def _order_without(number: int) -> Callable[[], None]:
    """Return what leaves out one of the trees, by its number."""
    orders = tree_search._orders

    def leave_out() -> None:
        def others(space: SearchSpace) -> Any:
            found = orders(space)
            return [steps for i, steps in enumerate(found) if i != number or len(found) == 1]

        tree_search._orders = others

    return leave_out


def _replace(owner: object, name: str, value: object) -> Callable[[], None]:
    return lambda: setattr(owner, name, value)


def _no_seconds_from_memory() -> None:
    limits = MemoryBounds.limits

    def excess_only(self: MemoryBounds, *arguments: Any) -> Any:
        excess, seconds = limits(self, *arguments)
        return excess, np.zeros_like(seconds)

    MemoryBounds.limits = excess_only  # type: ignore[method-assign]


def _no_memory_bounds() -> None:
    """Let only the account of complete plans say what does not fit."""

    def excess(self: MemoryBounds, choices: np.ndarray, capacity: float, *, exact: bool) -> np.ndarray:
        found = np.full(len(choices), -1.0)
        complete = [group.is_candidate(choice) for group, choice in zip(self._groups, choices.T, strict=True)]
        for k in np.flatnonzero(np.all(complete, axis=0)) if exact else ():
            found[k] = self.counted_excess(tuple(choices[k].tolist()))
        return found

    def limits(self: MemoryBounds, choices: np.ndarray, capacity: float, num_calls: int) -> Any:
        return np.full(len(choices), -1.0), np.zeros((len(choices), num_calls))

    MemoryBounds.excess = excess  # type: ignore[method-assign]
    MemoryBounds.limits = limits  # type: ignore[method-assign]
    MemoryBounds.estimate = lambda self, choices, _: np.zeros(len(choices))  # type: ignore[method-assign]


WITHOUT: dict[str, Callable[[], None]] = {
    "tree-meshes": _order_without(0),
    "tree-holding": _order_without(1),
    "tree-heavy": _order_without(2),
    "beams": _replace(tree_search._Tree, "dive", _nothing),
    "aims": _replace(tree_search, "_AIMS", (1.0,)),
    "estimates": _replace(MemoryBounds, "estimate", lambda self, choices, _: np.zeros(len(choices))),
    "settled": _replace(tree_search, "_SETTLED", 0),
    "pairs": _replace(LocalSearch, "_best_of_pair", _nothing),
    "common-starts": _replace(LocalSearch, "start_from_common_layouts", _nothing),
    "simple-starts": _replace(LocalSearch, "starts", lambda self: []),
    "heuristic-start": _replace(make, "heuristic", _nothing),
    "kind-starts": _replace(make, "starts_by_kind", lambda *_, **__: []),
    "calls-between": _replace(tree_search, "find_calls_between", lambda needs: []),
    "crowded": _replace(tree_search._Tree, "_crowded", lambda self, choices, _: np.zeros(len(choices))),
    "memory-seconds": _no_seconds_from_memory,
    "memory-bounds": _no_memory_bounds,
}
"""Part of the search -> what makes searches do without it:

- the tree that decides all meshes first, and those that decide heavy groups first (`tree-holding` then those
  that hold memory between calls);
- beam searches; their closer aims; their estimates of memory, by which they also keep lean plans; local
  search within the meshes that they settle;
- changes of two heavy groups at once; starts from common layouts, from simple plans, from the heuristic, and
  from plans on one kind of hosts;
- bounds from calls between two others; from device seconds of calls that memory makes longer; from the
  seconds that memory leaves; all bounds of memory.
"""


class Scenario(NamedTuple):
    """An experiment and its cluster.

    `models` are PPO's actor and critic, or GRPO's actor. References and reward models have their sizes.
    """

    algorithm: str
    models: tuple[str, ...]
    devices: int
    context: str

    @property
    def name(self) -> str:
        return "-".join([self.algorithm, *self.models, _CLUSTERS[self.devices], self.context])

    @property
    def response_tokens(self) -> int:
        return {"2k": 1024, "8k": 7168}[self.context]

    @property
    def sequences(self) -> int:
        """Return the number of sequences per step."""
        if self.context == "2k":
            return 512 if self.devices <= 128 else 4096
        return {128: 256, 1024: 2048}.get(self.devices, 128)


_MODELS = [("ppo", ("7b", "7b")), ("ppo", ("13b", "7b")), ("ppo", ("34b", "7b")), ("ppo", ("70b", "7b")),
           ("ppo", ("70b", "70b")), ("grpo", ("7b",)), ("grpo", ("32b",)), ("grpo", ("70b",))]  # fmt: skip
SCENARIOS = [
    Scenario(algorithm, models, devices, context)
    for algorithm, models in _MODELS for devices in _CLUSTERS for context in ("2k", "8k")
]  # fmt: skip


def right(completions: list[str], answer: list[str]) -> list[float]:
    """Stand in for a reward function; it is never called."""
    raise NotImplementedError


def experiment_of(case: Scenario) -> Experiment:
    """Return the experiment as a user would write it."""
    actor = Role(_SHIPPED[case.models[0]], dtype="bfloat16", optimizer=OptimizerConfig())
    common: dict[str, Any] = {
        "sampling": SamplingConfig(max_new_tokens=case.response_tokens),
        "expected": Expected(prompt_tokens=_PROMPT_TOKENS),
    }
    if case.algorithm == "grpo":
        return GRPO(
            actor=actor, reward_function=right, loss=PolicyLossConfig(kl_coef=0.001),
            batch_size=case.sequences // _GROUP_SIZE, group_size=_GROUP_SIZE, **common,
        )  # fmt: skip
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
    case: Scenario, *, most_seconds: float, write: Path | None, cpu_seconds: float = np.inf
) -> dict[str, Any]:
    """Return the row of a scenario; if nothing fits, the row has the reason and no numbers.

    The search ends after `cpu_seconds`, and the baseline (c) after `most_seconds`; 0: it does not run.
    """
    cluster = Cluster.load(_CLUSTERS[case.devices])
    problem = problem_of(experiment_of(case), cluster)
    rates = Rates(cluster)
    row = {"name": case.name, "devices": case.devices, "context": case.context, "fits": False}
    started = time.monotonic()
    watch = Stopwatch(limit_for(case.devices, GAPS))
    limit = WALL_TIMES * limit_for(case.devices, SECONDS)
    try:
        planned = make_plan(
            problem, rates, time_limit=limit, gap=GAP, progress=watch, explain=False,
            should_stop=lambda: watch.spent > cpu_seconds)
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
    walked = {}
    if most_seconds:
        cpu_seconds = min(METROPOLIS_TIMES * spent, most_seconds)
        result = metropolis(space, cpu_seconds=cpu_seconds)
        rival["metropolis"] = None if result.chosen is None else result.step_seconds
        walked = {"metropolis_search_seconds": cpu_seconds, "metropolis_plans": result.num_plans}
    rival = {name: None if seconds is None else float(seconds) for name, seconds in rival.items()}
    return {
        **row, "fits": True, "step_seconds": ours, "gap": gap, "cpu_seconds": spent,
        "goal_seconds": spent if watch.seconds is None else watch.seconds, "search_seconds": wall,
        "expanded": planned.result.num_expanded,
        **walked,
        **{f"{name}_seconds": seconds for name, seconds in rival.items()},
        **{f"over_{name}": None if seconds is None else seconds / ours for name, seconds in rival.items()},
        "layouts": _layouts(planned),
    }  # fmt: skip


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
        fitting = part[space.excess_bytes(plans[part]) <= 0]
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
        )  # fmt: skip
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
    add("--without", nargs="+", default=[], choices=list(WITHOUT), metavar="PART",
        help=f"parts that the search does without: {', '.join(WITHOUT)}")
    add("--write", type=Path, metavar="DIR", help="write the plans there")
    add("--verbose", action="store_true", help="say why scenarios do not fit")
    add("--json", action="store_true", help="one JSON document on standard output")
    args = parser.parse_args()
    if args.write is not None:
        args.write.mkdir(parents=True, exist_ok=True)
    for part in args.without:
        WITHOUT[part]()
    hardware = machine()
    rows = list[dict[str, Any]]()
    starts = {f"realhf {words}": start_seconds(*words.split()) for words in ("--help", "plan --help")}
    most_seconds = 0.0 if args.no_metropolis else args.most_seconds
    for case in SCENARIOS:
        if case.devices not in args.devices or not any(text in case.name for text in args.only):
            continue
        row = run(case, most_seconds=most_seconds, write=args.write, cpu_seconds=args.cpu_seconds)
        rows.append(row)
        why = f": {row['reason']}" if args.verbose and not row["fits"] else ""
        progress(f"{case.name}: {_line(row)}{why}")
    settings = {key: str(value) if key == "write" else value for key, value in vars(args).items()}
    document = {
        "benchmark": "planner", "machine": hardware, "settings": settings, "start_seconds": starts,
        "rows": rows,
    }  # fmt: skip
    fitting = [row for row in rows if row["fits"]]
    return report(document, tables=[table(rows)], goals=goals(fitting, starts), as_json=args.json)


def _line(row: dict[str, Any]) -> str:
    if not row["fits"]:
        return "does not fit"
    over = ", ".join(f"{title} {_shown(row.get(f'over_{rival}'))}" for rival, title in _RIVALS.items())
    return f"{row['step_seconds']:.2f} s, gap {row['gap']:.2%}, CPU {row['goal_seconds']:.1f} s; {over}"


if __name__ == "__main__":
    sys.exit(main())
