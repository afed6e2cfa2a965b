"""Compares lagged steps, in which generation and training overlap, with synchronous steps on two processes.

    python benchmarks/lag.py [--json] [--repeats 3] [--keep DIR]

The experiment is GRPO on a random model in float32 whose answers have geometric lengths; the learning rate is
0, so that all steps do the same work. Rank 0 generates, and rank 1 scores and trains (disjoint meshes). The
rivals are synchronous steps on the same meshes, and synchronous steps of which both ranks do a half
(colocated). The runs take turns.

Figures are those of the steady state: the warm-up and the last `max_lag` steps, which begin no answers, do
not count. Idle is the share of the time in which a rank runs no call. "quartile" is the lower quartile of the
seconds of all steps. On a machine that is not idle it is a better guide, as other work can only make a step
longer.

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
from harness import Goal, machine, progress, report
from lag_task import NUM_RANKS, Setting, SteadyState, lower_quartile, measure, write_task
from rich.table import Table

RIVALS = {
    "synchronous, disjoint": (0, "disjoint"),
    "synchronous, colocated": (0, "colocated"),
    "lag 1": (1, "disjoint"),
    "lag 2": (2, "disjoint"),
    "lag 4": (4, "disjoint"),
}
"""Name -> max_lag and plan."""
BASE = "synchronous, disjoint"


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
    found: dict[str, list[SteadyState]] = {name: [] for name in RIVALS}
    names = list(RIVALS)
    for repeat in range(options.repeats):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            max_lag, plan = RIVALS[name]
            state = measure(directory, plan=plan, max_lag=max_lag, repeat=repeat, steps=options.steps)
            found[name].append(state)
            progress(f"run {repeat + 1}, {name}: {state.tokens_per_second:.0f} tokens/s")
    return found


def median_ratio(found: dict[str, list[SteadyState]], name: str, base: str) -> float:
    """Return the median over repetitions of one rival's throughput to another's."""
    pairs = zip(found[name], found[base], strict=True)
    return statistics.median(one.tokens_per_second / other.tokens_per_second for one, other in pairs)


def side_seconds(state: SteadyState) -> tuple[float, float]:
    """Return the seconds of generation, and of all other calls, in one step."""
    generation = state.calls["actor_generate"]
    return generation, sum(state.calls.values()) - generation


def summary(found: dict[str, list[SteadyState]]) -> dict[str, dict[str, float]]:
    """Return the medians over repetitions of what the table shows, by rival."""
    rows = {}
    for name, states in found.items():
        sides = [side_seconds(state) for state in states]
        rows[name] = {
            "tokens_per_second": statistics.median(state.tokens_per_second for state in states),
            "step_seconds": statistics.median(state.step_seconds for state in states),
            "quartile_seconds": lower_quartile(states),
            "ratio": median_ratio(found, name, BASE),
            "ratio_to_colocated": median_ratio(found, name, "synchronous, colocated"),
            "generation_seconds": statistics.median(generation for generation, _ in sides),
            "training_seconds": statistics.median(training for _, training in sides),
            "call_ratio": statistics.median(
                sum(one.calls.values()) / sum(base.calls.values())
                for one, base in zip(states, found[BASE], strict=True)),
            "least_idle": statistics.median(state.least_idle for state in states),
            **{f"idle_{rank}": statistics.median(s.idle[rank] for s in states) for rank in range(NUM_RANKS)},
        }  # fmt: skip
    return rows


def table_of(rows: dict[str, dict[str, float]]) -> Table:
    columns = {
        "tokens/s": ("tokens_per_second", ".0f"), "s/step": ("step_seconds", ".3f"),
        "quartile": ("quartile_seconds", ".3f"), "to disjoint": ("ratio", ".2f"),
        "to colocated": ("ratio_to_colocated", ".2f"),
        "generate s": ("generation_seconds", ".3f"), "score, train s": ("training_seconds", ".3f"),
        "calls": ("call_ratio", ".2f"), "idle rank 0": ("idle_0", ".0%"), "idle rank 1": ("idle_1", ".0%"),
    }  # fmt: skip
    table = Table(title="Steady state, medians over repetitions")
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
    ]  # fmt: skip


def main(options: Options) -> int:
    before = machine()
    with tempfile.TemporaryDirectory(prefix="lag-") as scratch:
        directory = Path(scratch) if options.keep is None else options.keep
        found = run_all(directory, options)
    rows = summary(found)
    document = {
        "benchmark": "lag", "machine": before, "setting": asdict(Setting()), "rows": rows,
        "repetitions": {name: [asdict(state) for state in states] for name, states in found.items()},
    }  # fmt: skip
    return report(document, tables=[table_of(rows)], goals=goals_of(rows), as_json=options.json)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
