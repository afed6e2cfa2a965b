"""Show a plan to programs and to people: a table, a timeline in letters, and the reasons."""

import math
import string
import textwrap
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from realhf.planner.candidates import pins_outside
from realhf.planner.make import Planned, PricedPlan, TimelineEntry
from realhf.planner.search import SearchResult, gap_of
from realhf.user_input.units import format_bytes, format_seconds

_NARROWEST, _WIDEST = 24, 96  # Columns of the timeline's bars.
_NARROWEST_TEXT = 60
_MOST_ROWS = 16
_IDLE = "."
_SAME = 1e-3  # Relative difference below which two steps count as equally long.
_EQUAL = 1e-6  # The gap up to which a step is said to equal the bound.


def document(planned: Planned) -> dict[str, Any]:
    """Return the output of `realhf plan --json`, in seconds and bytes."""
    priced = priced_document(planned)
    for name, reason in planned.reasons.items():
        priced["calls"][name]["reason"] = reason.document()
    return priced | {
        "lower_bound_seconds": planned.result.lower_bound_seconds,
        "gap": planned.result.gap,
        "pins_outside": {name: str(layout) for name, layout in pins_outside(planned.problem).items()},
        "fastest_found_seconds": min(
            planned.result.step_seconds,
            math.inf if planned.preference is None else planned.preference.fastest_seconds),
        "search_seconds": planned.search_seconds,
        "heuristic_step_seconds": planned.heuristic and planned.heuristic.seconds,
        "heuristic_fits": planned.heuristic is not None and planned.heuristic.fits,
    }


def priced_document(priced: PricedPlan) -> dict[str, Any]:
    """Return the output of `realhf plan --price --json`, in seconds and bytes."""
    calls: dict[str, Any] = {}
    for call in priced.problem.graph.order:
        if call.name not in priced.costs:  # It is plain Python.
            calls[call.name] = {"layout": str(priced.plan[call.name].layout)}
            continue
        cost = priced.costs[call.name]
        call_plan = priced.plan[call.name]
        calls[call.name] = {
            "layout": str(call_plan.layout), "micro_batch_tokens": call_plan.micro_batch_tokens,
            "max_rows": call_plan.max_rows, "kv_cache_gib": call_plan.kv_cache_gib,
            "recompute": call_plan.recompute, "offload": call_plan.offload,
            "seconds": cost.seconds, "parts": dict(cost.seconds_by_cause), "limit": cost.limit,
            "num_micro_batches": cost.num_micro_batches, "num_devices": len(call_plan.layout.ranks)}
        if (turns := priced.problem.workloads[call.name].turns) is not None:
            calls[call.name]["turns"] = {
                "mean": turns.counts.mean, "drawn_tokens": turns.lengths.mean,
                "observation_tokens": turns.observation_tokens, "env_seconds": turns.seconds}
    return {
        "step_seconds": priced.step_seconds,
        "fits": priced.lacks is None,
        "lacks": priced.lacks,
        "calls": calls,
        "memory": priced.memory.document(),
        "ports": priced.ports._asdict(),
        "timeline": {
            "activities": [vars(entry) for entry in priced.simulation.timeline],
            "idle": priced.simulation.idle.tolist(),
        },
    }


def format_gap(step_seconds: float, lower_bound_seconds: float) -> str:
    """Return the gap for people: "no bound" if none was found in the time."""
    return f"{gap_of(step_seconds, lower_bound_seconds):.1%}" if lower_bound_seconds > 0 else "no bound"


def nearness(result: SearchResult, *, among: str = "the plans enumerated") -> str:
    """Return how near a step is to the lower bound, in words."""
    if result.lower_bound_seconds <= 0:
        return "no lower bound was found in the time"
    bound = f"the lower bound over {among}"
    if result.gap <= _EQUAL:
        return f"equal to {bound}"
    return f"a gap of {result.gap:.2%} to {format_seconds(result.lower_bound_seconds)}, {bound}"


def render(planned: Planned, *, columns: int) -> Group:
    """Return the plan that was found for people, on a terminal with `columns` columns."""
    return Group(
        _calls_table(planned), Text(), planned.memory.render(), Text(), *_summary(planned), Text(),
        *timeline(planned, columns=columns), Text(),
        *(Text(line) for line in explanation(planned, columns=columns)))


def render_priced(priced: PricedPlan, *, columns: int) -> Group:
    """Return a given plan for people, on a terminal with `columns` columns."""
    fits = "it fits in memory" if priced.lacks is None else f"it does not fit in memory: {priced.lacks}"
    lines = textwrap.wrap(
        f"{format_seconds(priced.step_seconds)} per step; {fits}", max(_NARROWEST_TEXT, columns),
        subsequent_indent="    ", break_on_hyphens=False)
    return Group(
        _calls_table(priced), Text(), priced.memory.render(), Text(), *map(Text, lines),
        *_use_of_devices(priced), Text(), *timeline(priced, columns=columns))


def _calls_table(priced: PricedPlan) -> Table:
    """Return the table with the layout, the seconds and the memory of each call on a model."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("call", "layout", "micro-batches", "seconds", "memory", "limited by"):
        table.add_column(title, justify="right" if title in ("seconds", "memory") else "left")
    for name, cost in priced.costs.items():
        call_plan = priced.plan[name]
        work = priced.problem.workloads[name]
        steps = work.minibatches * work.epochs
        times = f"{steps} x " if steps > 1 else ""
        micro_batches = f"{times}{cost.num_micro_batches} of {call_plan.micro_batch_tokens} tokens"
        options = [micro_batches, *call_plan.options]
        if priced.problem.graph[name].kind == "generate":
            rows = f"{call_plan.max_rows or work.max_rows} rows at once"
            cache = call_plan.kv_cache_gib
            rows += "" if cache is None else f" in {cache:.3g} GiB"
            rows += "" if work.turns is None else f", {work.turns.counts.mean:.3g} turns"
            options = [rows, *call_plan.options]
        memory = format_bytes(priced.memory.by_call[name].num_bytes)
        layout = str(call_plan.layout)
        table.add_row(name, layout, ", ".join(options), f"{cost.seconds:.3g}", memory, cost.limit)
    return table


def explanation(planned: Planned, *, columns: int) -> list[str]:
    """Return lines that say for each call why it has its layout."""
    lines = []
    for name, reason in planned.reasons.items():
        first, *others = reason.lines
        for text in (f"{name}: {first}", *(f"  {line}" for line in others)):
            width = max(_NARROWEST_TEXT, columns)
            lines += textwrap.wrap(text, width, subsequent_indent="    ", break_on_hyphens=False)
    return lines


def _summary(planned: Planned) -> list[Text]:
    result = planned.result
    is_tied = planned.problem.pins or planned.problem.together
    enumerated = "the plans enumerated" + " with what is pinned or kept together" * bool(is_tied)
    outside = ", ".join(f"{name}={layout}" for name, layout in pins_outside(planned.problem).items())
    took = f"found in {format_seconds(planned.search_seconds)}"
    lines = [f"{format_seconds(result.step_seconds)} per step: {nearness(result, among=enumerated)}, {took}"]
    if not planned.space.is_whole:
        lines.append(
            "the time limit left meshes of some sizes out, so there may be better plans: give it more time "
            "(--time-limit)")
    if planned.preference is not None:
        lines.append(planned.preference.sentence)
    lines += _ports(planned)
    if outside:
        lines.append(f"a search without pins does not enumerate {outside}: its bound may be above this step")
    if (baseline := planned.heuristic) is not None and planned.problem.cluster.num_devices > 1:
        usual = "tensor parallelism inside hosts and a pipeline across them for all calls"
        ranks = planned.space.groups[0].candidates[baseline.chosen[0]].layout.ranks
        if len(planned.problem.cluster.kinds) > 1:
            usual += f" on ranks {ranks.start}-{ranks.stop - 1}"
        times = f"{baseline.seconds / result.step_seconds:.2f} x as fast as {usual}"
        lines.append(times if baseline.fits else f"{usual} does not fit in memory")
    return [*map(Text, lines), *_use_of_devices(planned)]


def _use_of_devices(priced: PricedPlan) -> list[Text]:
    peak = priced.memory.fullest
    has = f"{format_bytes(peak.num_bytes)} of {format_bytes(peak.available)} available"
    has += ", besides context and staging buffers"
    return [
        Text(f"fullest device: rank {peak.rank} during {peak.call}, {has}"),
        Text(f"devices idle {priced.simulation.idle.mean():.0%} of the time")]


def timeline(priced: PricedPlan, *, columns: int) -> list[Text]:
    """Return the lines that draw one step of the steady state, a row per range of ranks with equal work.

    A call that continues beyond the end of the step is drawn at its beginning, where the call of the step
    before continues.
    """
    simulation = priced.simulation
    calls = [a for a in simulation.timeline if a.kind != "realloc" and a.end > a.start]
    letters = {a.name: string.ascii_uppercase[i % 26] for i, a in enumerate(calls)}
    borders = sorted({x for a in calls for x in (a.first_rank, a.first_rank + a.num_ranks)})
    borders = sorted({*borders, 0, priced.problem.cluster.num_devices})
    rows = list(zip(borders, borders[1:], strict=False))
    width = len(f"{borders[-1]}-{borders[-1]}")
    cells = max(_NARROWEST, min(_WIDEST, columns - width - len("  100% idle")))
    lines = []
    for first, stop in rows[:_MOST_ROWS]:
        here = [a for a in calls if a.first_rank <= first < a.first_rank + a.num_ranks]
        bar = _bar(here, letters, simulation.step_seconds, cells)
        name = f"{first}-{stop - 1}" if stop - first > 1 else f"{first}"
        idle = float(simulation.idle[first:stop].mean())
        lines.append(Text(f"{name:>{width}} {bar} {idle:4.0%} idle"))
    if len(rows) > _MOST_ROWS:
        lines.append(Text(f"({len(rows) - _MOST_ROWS} more groups of ranks)"))
    lines.append(Text(f"{'':>{width}} 0 s{format_seconds(simulation.step_seconds):>{cells - 3}}"))
    lines.append(Text("(A: it begins; a: it goes on, over the end at the beginning, beside the next step)"))
    lines += [Text(f"  {letter} {name}") for name, letter in letters.items()]
    for move in (a for a in simulation.timeline if a.kind == "realloc"):
        took = format_seconds(move.end - move.start)
        lines.append(Text(f"  reallocation of {move.name}: {took}, beside the calls"))
    return lines


def _bar(entries: Sequence[TimelineEntry], letters: dict[str, str], step_seconds: float, width: int) -> str:
    """Return a row of letters: upper case where a call begins, lower case while it continues."""
    cells = [_IDLE] * width
    for entry in sorted(entries, key=lambda entry: entry.start):
        first = round(entry.start / step_seconds * width)
        last = max(first + 1, round(entry.end / step_seconds * width))
        for cell in range(first, last):
            cells[cell % width] = letters[entry.name] if cell == first else letters[entry.name].lower()
    return "".join(cells)


def _ports(priced: PricedPlan) -> list[str]:
    """Return the sentence about traffic that meets at ports of hosts, if there is any to speak of."""
    least, most = priced.ports.least_seconds, priced.ports.most_seconds
    if most <= priced.step_seconds * (1 + _SAME):
        return []
    why = "as traffic of several activities meets at the ports of hosts"
    return [f"at least {format_seconds(least)}, and {format_seconds(most)} if it takes turns, {why}"]
