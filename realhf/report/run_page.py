"""The page of one run, and that of several runs beside each other."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from realhf.layout import DeviceMesh, Layout
from realhf.report import figures
from realhf.report.compare import RunComparison, shown
from realhf.report.findings import (
    call_seconds,
    cards,
    missed,
    reallocations,
    summary,
    waiting,
)
from realhf.report.page import (
    Card,
    FoldedText,
    HtmlPage,
    PageBlock,
    PageSection,
    Plot,
    Plots,
    SampleList,
    Sentences,
    StepPlots,
    TextTable,
    TokenStrips,
)
from realhf.report.run_data import RunFiles
from realhf.report.samples import Pieces, rollouts_to_show
from realhf.user_input.files import read_text
from realhf.user_input.units import format_seconds

_MOST_PANELS = 60
"""Panels of other metrics; a run may log hundreds."""
_MOST_WAITS = 16
_MOST_RANKS = 128
"""Ranks that have a row in timelines."""


def run_page(run: RunFiles, *, refresh_seconds: float | None = None) -> HtmlPage:
    """Return the page of a run."""
    names = run.metric_names
    learning, speed, others = figures.panels(names)
    sections = [
        PageSection(
            "summary", "In short", [Sentences(summary(run))],
            "From and to: means of the first and of the last tenth of a curve."),
        PageSection("curves", "Curves", [_panels([run], learning)], "Hover for values, drag to zoom."),
        *_time(run, speed), *_predictions(run), *_memory(run), *_weights(run), _rollouts(run),
        PageSection("more", "Other metrics", [_panels([run], others[:_MOST_PANELS])] if others else []),
        _about(run)]
    return HtmlPage(
        run.name, _subtitle(run), cards(run), [section for section in sections if section.blocks],
        refresh_seconds)


def runs_page(runs: Sequence[RunFiles], comparisons: Sequence[RunComparison]) -> HtmlPage:
    """Return the page of several runs: where the others part from the first, and their curves together."""
    names = list(dict.fromkeys(name for run in runs for name in run.metric_names))
    learning, speed, others = figures.panels(names)
    parting: list[PageBlock] = []
    for other, found in zip(runs[1:], comparisons, strict=True):
        parting += _parting(runs[0], other, found)
    ends = [(run.name, *(f"{card.title}: {card.value}" for card in cards(run)[:5])) for run in runs]
    width = max(map(len, ends))
    rows = [[*row, *[""] * (width - len(row))] for row in ends]
    sections = [
        PageSection("parting", "Where they part", parting),
        PageSection("settings", "What differs before the first step", [
            TextTable(("what", "field", runs[0].name, other.name), [
                (kind, one.name, shown(one.first), shown(one.other))
                for kind, one in found.differences.named()], f"{runs[0].name} and {other.name}")
            for other, found in zip(runs[1:], comparisons, strict=True)
            if any(True for _ in found.differences.named())] or [Sentences(["Nothing that is recorded."])]),
        PageSection("ends", "Headlines", [TextTable(("run", *[""] * (width - 1)), rows)]),
        PageSection("curves", "Curves", [_panels(runs, learning)], "One colour for each run."),
        PageSection("speed", "Speed", [_panels(runs, speed)]),
        PageSection("more", "Other metrics", [_panels(runs, others[:_MOST_PANELS])] if others else [])]
    first = comparisons[0]
    headline = [
        Card("First difference", "none" if first.parting is None else f"step {first.parting.step}",
             "" if first.parting is None else first.parting.call),
        Card("First differing token", "none found" if first.token is None else f"step {first.token.step}",
             "" if first.token is None or first.token.token is None else
             f"sample {first.token.sample}, token {first.token.token.index}"),
        Card("Likely cause", first.cause.kind, "")]
    subtitle = f"Page of {time.strftime('%Y-%m-%d %H:%M:%S')}."
    return HtmlPage(
        " and ".join(run.name for run in runs), subtitle, headline,
        [section for section in sections if section.blocks])


def _parting(run: RunFiles, other: RunFiles, found: RunComparison) -> list[PageBlock]:
    """Return where a run parts from the first one, with the tokens there."""
    lines = [f"{run.name} and {other.name}: {found.cause.sentence}"]
    if found.missing:
        lines.append(f"Samples cannot be compared: {found.missing}.")
    if found.parting is not None:
        lines.append(f"First difference: {found.parting.sentence}.")
    if found.token is not None and found.token != found.parting:
        lines.append(f"First differing token: {found.token.sentence}.")
    elif found.token is None and found.parting is not None:
        lines.append(f"No token differs in the {found.compared_steps:,} steps that both have recorded.")
    if found.token is None or (token := found.token.token) is None:
        return [Sentences(lines)]
    pieces = Pieces(run)
    rows = [(one.name, pieces.of(around) or [str(number) for number in around])
            for one, around in zip((run, other), token.around, strict=True)]
    note = (f"Sample {found.token.sample} of step {found.token.step} from token {token.start} on; "
            f"token {token.index} is the first that differs.")
    return [Sentences(lines), TokenStrips(rows, token.index - token.start, note)]


def _subtitle(run: RunFiles) -> str:
    ranks = run.about.get("num_ranks") or len(run.timeline.ranks)
    on = f" on {run.about['device']}" if "device" in run.about else ""
    written = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"{run.num_steps:,} steps, {ranks} {'ranks' if ranks != 1 else 'rank'}{on}. Page of {written}."


def _panels(runs: Sequence[RunFiles], panels: Iterable[figures.CurvePanel]) -> Plots:
    return Plots([figures.curves(runs, panel) for panel in panels], has_smoothing=True)


def _time(run: RunFiles, speed: Sequence[figures.CurvePanel]) -> list[PageSection]:
    timeline = run.timeline
    if not timeline.steps:
        return []
    ranks = timeline.ranks
    some = ""
    if len(ranks) > _MOST_RANKS:
        ranks = [ranks[i * len(ranks) // _MOST_RANKS] for i in range(_MOST_RANKS)]
        some = f" Of {len(timeline.ranks):,} ranks, {len(ranks)} at equal distances have a row."
    colors = figures.call_colors(timeline.kinds)
    seconds = {record["step"]: record["timing_s/step"] for record in run.steps}
    by_step = {
        f"{step} ({format_seconds(seconds[step]) if step in seconds else 'not ended'})": [
            figures.step_timeline(events, ranks, colors, run.predicted),
            figures.step_memory(events, ranks)]
        for step, events in sorted(timeline.steps.items()) if any(e["kind"] != "realloc" for e in events)}
    shown = [step for step in sorted(timeline.steps) if any(
        event["kind"] != "realloc" for event in timeline.steps[step])]
    first = list(by_step)[shown.index(run.median_step)] if run.median_step in shown else list(by_step)[0]
    note = ""
    if len(shown) < len(run.steps):
        note = (f"Of {len(run.steps):,} steps, {len(shown)} are in this page: the first and the last, the "
                "slowest, that of median length, and others at equal distances. Totals and curves have all.")
    blocks: list[PageBlock] = [
        StepPlots(["What each rank did", "Memory over the step (dotted: predicted)"], by_step, first, note)]
    lead = "A row is a rank. Narrow bars are what moves or waits beside the calls; gaps are idle."
    if "activities" in run.predicted:
        lead += " Below: the same step as the planner predicted it, on the same axis."
    lead += some
    sections = [PageSection("step", "One step, by rank", blocks, lead)]
    waits = waiting(run)
    groups: dict[tuple[str, str], list[int]] = {}
    for one in waits:
        causes = [f"{share:.0%} {cause}" for cause, share in list(one.causes.items())[:4] if share >= 0.005]
        groups.setdefault((f"{one.share:.0%}", "; ".join(causes)), []).append(one.rank)
    rows = [(rank_text(ranks), *group) for group, ranks in list(groups.items())[:_MOST_WAITS]]
    caption = "Ranks by the time in which they run no call, over all steps"
    if len(groups) > _MOST_WAITS:
        caption += f" (the first {_MOST_WAITS} of {len(groups)} groups)"
    sections.append(PageSection("time", "Where the time went", [
        Plots([Plot("Time of each rank, all steps", figures.time_by_rank(run, ranks, colors))], is_wide=True),
        TextTable(("ranks", "waits", "for what"), rows, caption), _panels([run], speed)]))
    return sections


def rank_text(ranks: Iterable[int]) -> str:
    """Return ranks as text: `0-3,8`."""
    return str(DeviceMesh(tuple(sorted(ranks))))


def _predictions(run: RunFiles) -> list[PageSection]:
    planned = run.predicted.get("calls", {})
    measured = call_seconds(run)
    rows = []
    for name, seconds in measured.items():
        of_plan = planned.get(name)
        rows.append((
            name, run.call(name).get("layout", ""), format_seconds(seconds),
            "" if of_plan is None else format_seconds(of_plan["seconds"]),
            "" if of_plan is None else f"{seconds / max(of_plan['seconds'], 1e-12):.2f}",
            "" if of_plan is None else of_plan["limit"]))
    head = ("call", "layout", "seconds", "predicted", "ratio", "predicted to be limited by")
    blocks: list[PageBlock] = [Sentences(missed(run), is_ranked=False)]
    if rows:
        blocks.append(TextTable(head, rows, "Median of a step, the slowest rank of each call"))
    return [PageSection("prediction", "What the prediction missed", blocks, "The largest difference first.")]


def _memory(run: RunFiles) -> list[PageSection]:
    if not run.timeline.memory:
        return []
    on_gpu = any("perf/memory_bytes" in name for name in run.metric_names)
    note = ("the peak of the allocator in the fullest call" if on_gpu else
            "what engines hold at the end of the fullest call; on a CPU, what passes take is not measured")
    return [PageSection("memory", "Memory of each rank", [
        Plots([Plot("The most in any call", figures.memory_by_rank(run), note)], is_wide=True)])]


def _weights(run: RunFiles) -> list[PageSection]:
    rows = reallocations(run)
    if not rows:
        return []
    head = (
        "role", "bytes into the busiest rank", "seconds", "measured", "bound, computed",
        "schedule over bound")
    links = run.about.get("links", "")
    lead = "The bound is that of the schedule" + (f", for {links}." if links else ".")
    return [PageSection("weights", "Weights on their way", [
        TextTable(head, rows, "Median of a step"), Plots(figures.bandwidths(run))], lead)]


def _rollouts(run: RunFiles) -> PageSection:
    rollouts, note = rollouts_to_show(run)
    blocks: list[PageBlock] = [SampleList(rollouts, note)] if rollouts else [Sentences([note])]
    return PageSection("rollouts", "Rollouts", blocks)


def _about(run: RunFiles) -> PageSection:
    about = run.about
    blocks: list[PageBlock] = []
    if commands := about.get("commands"):
        text = "\n".join(
            f"# {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(one['time']))}, in {one['directory']}\n"
            f"{one['command']}" for one in commands)
        blocks.append(FoldedText("Commands", text))
    if versions := about.get("versions"):
        on = {name: about.get(name, "") for name in ("host", "device", "cores")}
        blocks.append(FoldedText("Versions and machine", "\n".join(
            f"{name:<14} {value}" for name, value in (versions | on).items())))
    plan = run.plan
    if plan is not None:
        layouts = {name: call.layout for name, call in plan.calls.items() if not name.startswith("eval/")}
        blocks.append(plan_mesh(layouts, figures.call_colors(run.timeline.kinds or layouts), about))
        blocks.append(FoldedText("Plan", read_text(run.path / "plan.yaml")))
    if run.config:
        blocks.append(FoldedText("Settings", json.dumps(run.config, indent=2, ensure_ascii=False)))
    if run.summary:
        blocks.append(FoldedText("Summary", json.dumps(run.summary, indent=2, ensure_ascii=False)))
    return PageSection("about", "Plan, settings, versions, commands", blocks)


def plan_mesh(layouts: Mapping[str, Layout], colors: Mapping[str, str], about: Mapping[str, Any]) -> Plots:
    """Return the picture of the ranks of each call."""
    num_ranks = about.get("num_ranks") or 1 + max(max(layout.ranks) for layout in layouts.values())
    per_host = about.get("ranks_per_host") or num_ranks
    picture = figures.mesh(layouts, num_ranks, per_host, colors)
    note = "p: pipeline stage, d: data, c: context, t: tensor; dotted lines part the hosts"
    return Plots([Plot("Which ranks run which call", picture, note)], is_wide=True)


def runs_document(runs: Sequence[RunFiles], comparisons: Sequence[RunComparison]) -> dict[str, Any]:
    """Return the comparison of several runs as JSON."""
    return {
        "first": str(runs[0].path),
        "others": [{"run": str(other.path)} | found.document()
                   for other, found in zip(runs[1:], comparisons, strict=True)]}


def run_document(run: RunFiles) -> dict[str, Any]:
    """Return the figures and the sentences of a page as JSON."""
    return {
        "run": str(run.path), "steps": run.num_steps, "finished": bool(run.summary),
        "seconds": run.records[-1].get("perf/run_seconds") if run.records else None,
        "headline": [{"title": card.title, "value": card.value, "note": card.note} for card in cards(run)],
        "summary": summary(run), "missed": missed(run),
        "waiting": [
            {"rank": one.rank, "share": one.share, "causes": dict(one.causes)} for one in waiting(run)]}

