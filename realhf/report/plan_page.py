"""The page of a plan: its step, the memory of its ranks, its mesh, and what other layouts would cost."""

import time
from collections.abc import Sequence

import plotly.graph_objects as go

from realhf.execution_plan import ExecutionPlan
from realhf.planner.comparisons import WhatIf
from realhf.planner.make import Planned, PricedPlan
from realhf.report import figures
from realhf.report.page import (
    Card,
    FoldedText,
    HtmlPage,
    PageBlock,
    PageSection,
    Plot,
    Plots,
    Sentences,
    TextTable,
)
from realhf.user_input.shipped import dump_yaml
from realhf.user_input.units import format_bytes, format_seconds

_MOST_ROWS = 64
"""Ranks that have rows of their own; of more, a row stands for neighbours with the same work."""


def plan_page(priced: PricedPlan, *, title: str, what_ifs: Sequence[WhatIf] = ()) -> HtmlPage:
    """Return the page of a plan that was searched for or priced."""
    cluster = priced.problem.cluster
    colors = figures.call_colors(call.name for call in priced.problem.graph.order)
    sections = [
        PageSection("calls", "Calls", [_calls(priced)]),
        _step(priced, colors),
        PageSection("memory", "Memory of each rank", [
            Plots([Plot("At its peak", _memory(priced), _memory_note(priced))], is_wide=True)]),
        PageSection("mesh", "Which ranks run which call", [Plots([Plot("", figures.mesh(
            {name: call.layout for name, call in priced.plan.calls.items()}, cluster.num_devices,
            cluster.devices_per_host, colors), "p: pipeline stage, d: data, c: context, t: tensor; "
            "dotted lines part the hosts")], is_wide=True)]),
        _alternatives(priced, what_ifs),
        PageSection("plan", "The plan file", [FoldedText("plan.yaml", _yaml(priced.plan))])]
    hosts = f"{cluster.num_hosts} {'hosts' if cluster.num_hosts != 1 else 'host'}"
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    subtitle = f"{cluster.num_devices} devices on {hosts}. Page of {written}."
    return HtmlPage(title, subtitle, _cards(priced), [section for section in sections if section.blocks])


def _yaml(plan: ExecutionPlan) -> str:
    return dump_yaml(plan.to_dict())


def _cards(priced: PricedPlan) -> list[Card]:
    peak = priced.memory.fullest
    found = [Card("One step", format_seconds(priced.step_seconds), "predicted")]
    if isinstance(priced, Planned):
        if priced.result.lower_bound_seconds > 0:
            found.append(Card(
                "Lower bound", format_seconds(priced.result.lower_bound_seconds),
                f"over the plans enumerated; the gap is {priced.result.gap:.1%} of a step"))
        if (usual := priced.heuristic) is not None and usual.fits:
            found.append(Card(
                "Beside one layout for all", f"{usual.seconds / priced.step_seconds:.2f} x as fast",
                f"which takes {format_seconds(usual.seconds)}"))
    found.append(Card("Devices idle", f"{priced.simulation.idle.mean():.0%}", "of the time"))
    fits = "" if priced.lacks is None else "; it does not fit"
    found.append(Card(
        "Fullest device", format_bytes(peak.num_bytes),
        f"rank {peak.rank} in {peak.call}, of {format_bytes(peak.available)} available{fits}"))
    return found


def _calls(priced: PricedPlan) -> TextTable:
    rows = []
    for call in priced.problem.graph.order:
        layout = str(priced.plan[call.name].layout)
        if (cost := priced.costs.get(call.name)) is None:
            rows.append((call.name, layout, "plain Python", "", "", ""))
            continue
        plan = priced.plan[call.name]
        batches = f"{cost.num_micro_batches} of {plan.micro_batch_tokens:,} tokens"
        if call.kind == "generate":
            batches = f"{plan.max_rows or priced.problem.workloads[call.name].max_rows} rows at once"
        rows.append((
            call.name, layout, ", ".join([batches, *plan.options]), format_seconds(cost.seconds),
            format_bytes(priced.memory.by_call[call.name].num_bytes), cost.limit))
    return TextTable(("call", "layout", "micro-batches", "seconds", "memory of a rank", "limited by"), rows)


def _step(priced: PricedPlan, colors: dict[str, str]) -> PageSection:
    simulation = priced.simulation
    number = priced.problem.cluster.num_devices
    ranks = list(range(number))
    lead = "A row is a rank; narrow bars are weights that move beside the calls, gaps are idle."
    if number > _MOST_ROWS:
        borders = {0} | {border for entry in simulation.timeline for border in (
            entry.first_rank, entry.first_rank + entry.num_ranks)}
        ranks = sorted(border for border in borders if border < number)
        lead = (f"A row stands for the ranks from its number up to the next row's, of {number:,}, which do "
                "the same; narrow bars are weights that move beside the calls.")
    predicted = {
        "step_seconds": simulation.step_seconds, "activities": [vars(entry) for entry in simulation.timeline]}
    bars = figures.predicted_bars(predicted, ranks, colors)
    figure = figures.timeline_figure([("predicted", bars)], ranks)
    return PageSection("step", "One step of the steady state", [Plots([Plot("", figure, (
        "What goes on beyond the end of the step is drawn at its beginning, beside the next step."))],
        is_wide=True)], lead)


def _memory(priced: PricedPlan) -> go.Figure:
    """Return what each rank needs at its peak, by part, below the line of what it has available."""
    peaks = priced.memory.peaks
    ranks = sorted(peaks)
    figure = go.Figure(layout=figures.layout(
        320, barmode="stack", bargap=0.2 if len(ranks) <= _MOST_ROWS else 0,
        xaxis={"title": {"text": "rank", "standoff": 6}},
        yaxis={"title": {"text": "GB"}, "rangemode": "tozero"}))
    parts = {rank: figures.memory_parts(peaks[rank].bytes_by_use) for rank in ranks}
    for part, color in figures.PART_COLORS.items():
        sizes = [parts[rank][part] / 1e9 for rank in ranks]
        if any(sizes):
            figure.add_bar(
                x=ranks, y=figures.rounded(sizes), name=part, marker={"color": color, "line": {"width": 0}},
                text=[f"rank {rank} in {peaks[rank].call}: {format_bytes(parts[rank][part])} {part}"
                      for rank in ranks], textposition="none", hovertemplate="%{text}<extra></extra>")
    figure.add_scatter(
        x=ranks, y=figures.rounded(peaks[rank].available / 1e9 for rank in ranks), name="available",
        mode="lines", line={"color": "#888", "dash": "dash", "width": 1.5, "shape": "hvh"})
    return figure


def _memory_note(priced: PricedPlan) -> str:
    if priced.lacks is not None:
        return priced.lacks
    return "Above what is available are the context and staging buffers of a device."


def _alternatives(priced: PricedPlan, what_ifs: Sequence[WhatIf]) -> PageSection:
    """Return what other layouts would cost, why each call has its own, and what changes would do."""
    blocks: list[PageBlock] = []
    if isinstance(priced, Planned):
        rows = []
        for name, reason in priced.reasons.items():
            if (other := reason.runner_up) is not None:
                rows.append((
                    name, str(priced.plan[name].layout), str(other.layout), f"{other.longer:+.1%}",
                    format_seconds(other.step_seconds), other.because))
            if (large := reason.too_large) is not None:
                rows.append((
                    name, str(priced.plan[name].layout), f"{large.layout}{large.options}",
                    f"{-large.shorter:+.1%}", "",
                    f"needs {format_bytes(large.lacking_bytes)} more per device"))
        if rows:
            blocks.append(TextTable(
                ("call", "has", "instead", "step", "seconds", "because"), rows,
                "The best other layout of each call, while all others keep theirs"))
        if priced.reasons:
            blocks.append(Sentences([
                f"{name}: {'; '.join(reason.lines)}." for name, reason in priced.reasons.items()]))
    if what_ifs:
        answers = [(
            found.name, _seconds(found.step_seconds), _seconds(found.best_step_seconds),
            ", ".join(f"{name} {layout}" for name, layout in found.best_layouts.items()),
            found.obstacle or found.best_obstacle or "") for found in what_ifs]
        blocks.append(TextTable(
            ("change", "this plan", "best plan then", "its layouts", ""), answers, "What changes would do"))
    return PageSection("others", "Other layouts, and what they would cost", blocks)


def _seconds(value: float | None) -> str:
    return "none" if value is None else format_seconds(value)
