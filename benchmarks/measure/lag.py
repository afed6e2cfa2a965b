"""Compares lagged steps, in which generation and training overlap, with synchronous steps on two processes.

    python benchmarks/measure/lag.py [--json] [--repeats 3] [--keep DIR]

The experiment is GRPO on a random model in float32 whose answers have geometric lengths; the learning rate is
0, so that all steps do the same work. Rank 0 generates, and rank 1 scores and trains (disjoint meshes). The
rivals are synchronous steps on the same meshes, and synchronous steps of which both ranks do a half
(colocated). The runs take turns.

Figures are those of the steady state: the warm-up and the last `max_lag` steps, which begin no answers, do
not count. Idle is the share of the time in which a rank runs no call. "quartile" is the lower quartile of the
seconds of all steps, as other work on the machine can only make a step longer. Runs in which other work had
the cores for more than a tenth of the time of generation and forward passes do not count; the column "runs"
shows how many are left.

Two cores may share caches, memory and, as hyper-threads, arithmetic units, so that each is slower when both
work. The table shows by how much: "calls" is the sum of the seconds of all calls, divided by that of the
synchronous run on the same meshes. It is above 1 where overlapping calls slow each other.

The exit code is 1 if a goal was missed.
"""

import statistics
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro
from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from benchmarks.measure.lag_task import NUM_RANKS, Setting, SteadyState, lower_quartile, measure, write_task

RIVALS = {
    "synchronous, disjoint": (0, "disjoint"),
    "synchronous, colocated": (0, "colocated"),
    "lag 1": (1, "disjoint"),
    "lag 2": (2, "disjoint"),
    "lag 4": (4, "disjoint"),
}
"""Name -> max_lag and plan."""
BASE = "synchronous, disjoint"
_MOST_PREEMPTED = 0.1


@dataclass
class Options:
    repeats: int = 3
    """Runs of every rival."""
    steps: int = 20
    keep: Path | None = None
    """Directory for the runs; runs that exist in it are evaluated and not repeated."""
    json: bool = False
    """Print one JSON document."""


def run_all(directory: Path, options: Options) -> dict[str, list[SteadyState]]:
    """Run all rivals in turns; each repetition starts with another one."""
    write_task(directory, Setting())
    states: dict[str, list[SteadyState]] = {name: [] for name in RIVALS}
    names = list(RIVALS)
    for repeat in range(options.repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            max_lag, plan = RIVALS[name]
            state = measure(directory, plan=plan, max_lag=max_lag, repeat=repeat, steps=options.steps)
            states[name].append(state)
            progress(f"run {repeat + 1}, {name}: {state.tokens_per_second:.0f} tokens/s")
    return states


def undisturbed(by_rival: dict[str, list[SteadyState]]) -> dict[str, list[SteadyState]]:
    """Return the runs that count."""
    left = {name: [s for s in states if s.preempted <= _MOST_PREEMPTED] for name, states in by_rival.items()}
    if missing := [name for name, states in left.items() if not states]:
        sys.exit(f"other work disturbed all runs of {', '.join(missing)}: repeat them on a quieter machine")
    return left


def side_seconds(state: SteadyState) -> tuple[float, float]:
    """Return the seconds of generation, and of all other calls, in one step."""
    generation = state.calls["actor_generate"]
    return generation, sum(state.calls.values()) - generation


def summary(by_rival: dict[str, list[SteadyState]]) -> dict[str, dict[str, float]]:
    """Return the medians over the runs that count of what the table shows, by rival."""
    rows: dict[str, dict[str, float]] = {}
    for name, states in undisturbed(by_rival).items():
        sides = [side_seconds(state) for state in states]
        rows[name] = {
            "tokens_per_second": statistics.median(state.tokens_per_second for state in states),
            "step_seconds": statistics.median(state.step_seconds for state in states),
            "quartile_seconds": lower_quartile(states),
            "generation_seconds": statistics.median(generation for generation, _ in sides),
            "training_seconds": statistics.median(training for _, training in sides),
            "least_idle": statistics.median(state.least_idle for state in states),
            **{f"idle_{rank}": statistics.median(s.idle[rank] for s in states) for rank in range(NUM_RANKS)},
            "runs": len(states),
        }
    for row in rows.values():
        for key, base in (("ratio", BASE), ("ratio_to_colocated", "synchronous, colocated")):
            row[key] = row["tokens_per_second"] / rows[base]["tokens_per_second"]
        row["quartile_ratio"] = rows[BASE]["quartile_seconds"] / row["quartile_seconds"]
        sides = ("generation_seconds", "training_seconds")
        row["call_ratio"] = sum(row[side] for side in sides) / sum(rows[BASE][side] for side in sides)
    return rows


def table_of(rows: dict[str, dict[str, float]]) -> Table:
    columns = {
        "tokens/s": ("tokens_per_second", ".0f"), "s/step": ("step_seconds", ".3f"),
        "quartile": ("quartile_seconds", ".3f"), "to disjoint": ("ratio", ".2f"),
        "by quartile": ("quartile_ratio", ".2f"), "to colocated": ("ratio_to_colocated", ".2f"),
        "generate s": ("generation_seconds", ".3f"), "score, train s": ("training_seconds", ".3f"),
        "calls": ("call_ratio", ".2f"), "idle rank 0": ("idle_0", ".0%"), "idle rank 1": ("idle_1", ".0%"),
        "runs": ("runs", "d"),
    }
    table = Table(title="Steady state, medians over runs")
    table.add_column("steps")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(format(row[key], form) for key, form in columns.values()))
    return table


def goals_of(rows: dict[str, dict[str, float]]) -> list[Goal]:
    lagged = [name for name in rows if name.startswith("lag")]
    return [
        *(Goal(f"{name}: throughput to {BASE}", rows[name]["ratio"], at_least=1.5) for name in lagged),
        *(Goal(f"{name}: idle share of the slower side", rows[name]["least_idle"], at_most=0.1)
          for name in lagged),
    ]


def main(options: Options) -> int:
    before = machine()
    with tempfile.TemporaryDirectory(prefix="lag-") as scratch:
        directory = Path(scratch) if options.keep is None else options.keep
        by_rival = run_all(directory, options)
    rows = summary(by_rival)
    document = {
        "benchmark": "lag", "machine": before, "setting": asdict(Setting()), "rows": rows,
        "repetitions": {name: [asdict(state) for state in states] for name, states in by_rival.items()},
    }
    return report(document, tables=[table_of(rows)], goals=goals_of(rows), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
