"""Curves, timelines, memory and meshes as figures of plotly; the page adds its light or dark colours."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from realhf.layout import Layout
from realhf.report.page import Plot
from realhf.report.run_data import RankMemory, RunFiles, thinned
from realhf.runtime.records.pictures import TimedEvent, held_out_curves, without_waits
from realhf.user_input.units import format_bytes, format_seconds

PALETTE = ("#4a7fc1", "#d98a3d", "#3f9f7f", "#b0679f", "#c65d57", "#6f7fd0", "#a08a3c", "#4fa3b8", "#8a6d5a")
_MOVE, _MOVE_COLOR = "samples on their way, or awaited", "#b9c0c7"
_ENVIRONMENT, _ENVIRONMENT_COLOR = "waits for environments", "#8c6bb1"
_REALLOC_COLOR, _OFFLOAD_COLOR = "#e0b84c", "#8a6d5a"
_MOST_POINTS = 1500
"""Most points of a curve on a page."""
_MANY_POINTS = 40
"""Curves with fewer points have markers, and are not smoothed."""
_DIGITS = 6
_BAR, _NARROW_BAR = 0.8, 0.34
_FEWEST_ROWS = 4
"""Timelines are as high as if they had so many ranks."""
_MOST_LINES = 8
"""Most ranks whose memory is shown at first."""


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Return numbers with as many digits as a picture can show."""
    return [None if value is None else float(f"{value:.{_DIGITS}g}") for value in values]


def layout(height: int, **fields: Any) -> dict[str, Any]:
    """Return the layout that all figures share."""
    return {
        "height": height, "template": {}, "hovermode": "closest",
        "margin": {"l": 56, "r": 12, "t": 8, "b": 38},
        "font": {"family": "system-ui, 'DejaVu Sans', sans-serif", "size": 12},
        "legend": {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top", "font": {"size": 11}},
        "meta": {"narrow_margin": {"l": 44, "r": 6}}} | fields


# Curves


@dataclass(frozen=True)
class CurvePanel:
    """A panel of curves: its title, its metrics with their labels, and a note."""

    title: str
    metrics: Mapping[str, str]
    note: str = ""
    band: tuple[str, str] | None = None
    """Metrics of a mean and a spread, between which the panel is shaded."""
    is_share: bool = False


_FLAT = 0.05  # Curves that change by no more than this share of themselves begin at zero.
_PANELS: tuple[tuple[str, str, str], ...] = (
    ("Response length", r"response_length/(?:mean|max)|(?:response_length)/p\d+", "tokens"),
    ("Cut off at max_new_tokens", r"response_length/clip_ratio", "share of the responses"),
    ("Groups without spread", r"reward/zero_std_groups|reward/failed", "share; nothing is learned from them"),
    ("KL", r"actor/(?:ref_kl|approx_kl|reverse_kl)|reward/kl|mismatch/kl", "nats"),
    ("Entropy", r"\w+/entropy", "nats at each token"),
    ("Clipped tokens", r"\w+/clip_fraction\w*", "share of the tokens of an update"),
    ("Loss", r"\w+/(?:loss|pg_loss|vf_loss|sft_loss)", ""),
    ("Accuracy and margin", r"(?:reward|rewards)/(?:accuracy|accuracies|margin|margins)", ""),
    ("Gradient norm", r"\w+/grad_norm", "before clipping"),
    ("Learning rate", r"\w+/lr", ""),
    ("Value function", r"critic/explained_variance", ""),
    ("Staleness", r"staleness/.+", "updates between sampling and training"),
    ("Mismatch of sampling and training", r"mismatch/(?:max|ess|updates)", ""),
    ("Environments", r"environment/(?:turns|seconds)|environment_wait_s/.+", ""),
    ("Why rollouts ended", r"environment/stop/.+", "share"),
)
"""Titles, patterns of metrics, and notes of panels, beside those of rewards, evaluations and speed."""
_SPEED: tuple[tuple[str, str, str], ...] = (
    ("Seconds of a step", r"timing_s/.+", "the slowest rank of each call"),
    ("Tokens per second", r"perf/(?:\w+_)?tokens_per_s", "generated and trained: while the call runs"),
    ("Waiting before a call", r"bubble/.+", "share of the step, mean over its ranks"),
    ("Model FLOPs utilisation", r"perf/mfu", ""),
)


def panels(names: Sequence[str]) -> tuple[list[CurvePanel], list[CurvePanel], list[CurvePanel]]:
    """Return the panels of learning, of speed, and of all other metrics, by the beginning of their names."""
    learning: list[CurvePanel] = []
    if "reward/mean" in names:
        band = ("reward/mean", "reward/group_std") if "reward/group_std" in names else None
        note = "shaded: the mean, plus and minus the spread within groups" if band else ""
        learning.append(CurvePanel("Mean reward", {"reward/mean": "reward"}, note, band))
    rewards = {name: match[1] for name in names if (match := re.fullmatch("reward/(.+)/mean", name))}
    if len(rewards) > 1:
        learning.append(CurvePanel("Rewards by name", rewards))
    spread = {name: label for name, label in {
        "reward/group_std": "within groups", "reward/std": "of all samples"}.items() if name in names}
    if spread:
        learning.append(CurvePanel("Spread of the reward", spread, "standard deviation"))
    if scores := dict(held_out_curves(names)):
        learning.append(CurvePanel("Held-out score", scores, "pass@k: the largest k that was evaluated"))
    learning += _matching(_PANELS, names)
    speed = _matching(_SPEED, names)
    shown = {metric for panel in (*learning, *speed) for metric in panel.metrics}
    rest: dict[str, dict[str, str]] = {}
    for name in names:
        if name not in shown:
            group, slash, label = name.partition("/")
            rest.setdefault(group if slash else "other", {})[name] = label or name
    return learning, speed, [CurvePanel(group, metrics) for group, metrics in rest.items()]


def _matching(table: Sequence[tuple[str, str, str]], names: Sequence[str]) -> list[CurvePanel]:
    found = []
    for title, text, note in table:
        metrics = [name for name in names if re.fullmatch(text, name)]
        prefixes = {name.partition("/")[0] for name in metrics}
        labels = {name: name.partition("/")[2] if len(prefixes) == 1 else name for name in metrics}
        if metrics:
            found.append(CurvePanel(title, labels, note))
    return found


def curves(runs: Sequence[RunFiles], panel: CurvePanel) -> Plot:
    """Return a panel with the curves of one run or of several; the latter have a colour for each run."""
    figure = go.Figure(layout=layout(260, xaxis={"title": {"text": "step", "standoff": 6}}))
    width = 1
    several = len(runs) > 1
    drawn: list[float] = []
    for number, run in enumerate(runs):
        for index, (metric, label) in enumerate(panel.metrics.items()):
            steps, values = run.metric(metric)
            if not steps:
                continue
            steps, values, width = thinned(steps, values, _MOST_POINTS)
            drawn += values
            name = f"{run.name}: {label}" if several and len(panel.metrics) > 1 else (
                run.name if several else label)
            _add_curve(
                figure, steps, values, name, color=PALETTE[(number if several else index) % len(PALETTE)],
                dash=("solid", "dash", "dot", "dashdot")[index % 4 if several else 0])
        if panel.band is not None and not several:
            _add_band(figure, run, *panel.band)
    note = f"each point is the mean of {width} steps" if width > 1 else ""
    figure.update_yaxes(exponentformat="e")
    if drawn and 0 <= max(drawn) - min(drawn) <= _FLAT * min(drawn):
        figure.update_yaxes(rangemode="tozero")  # Flat curves show how large they are.
    elif drawn and min(drawn) == max(drawn) == 0:
        figure.update_yaxes(range=[0, 1])
    named = sum(curve.showlegend is not False for curve in figure.data)
    figure.update_layout(showlegend=named > 1 or several)
    of_panel = "" if several and panel.band is not None else panel.note
    return Plot(panel.title, figure, "; ".join(filter(None, [of_panel, note])))


def _add_curve(
    figure: go.Figure, steps: Sequence[int], values: Sequence[float], name: str, *, color: str, dash: str
) -> None:
    """Add a curve as it is, pale, and one that the page smoothes; short ones once, with markers."""
    y = rounded(values)
    if len(steps) < _MANY_POINTS:
        figure.add_scatter(
            x=list(steps), y=y, name=name, mode="lines+markers", marker={"size": 5},
            line={"color": color, "dash": dash, "width": 1.6})
        return
    figure.add_scatter(
        x=list(steps), y=y, mode="lines", line={"color": color, "width": 1}, opacity=0.25, showlegend=False,
        hoverinfo="skip", legendgroup=name)
    figure.add_scatter(
        x=list(steps), y=y, name=name, mode="lines", line={"color": color, "dash": dash, "width": 1.8},
        legendgroup=name, meta={"smooth": True})


def _add_band(figure: go.Figure, run: RunFiles, mean: str, spread: str) -> None:
    pairs = [(record["step"], record[mean], record[spread]) for record in run.records
             if mean in record and spread in record]
    steps = [step for step, _, _ in pairs]
    for sign, fill in ((1, None), (-1, "tonexty")):
        x, y, _ = thinned(steps, [value + sign * width for _, value, width in pairs], _MOST_POINTS)
        figure.add_scatter(
            x=x, y=rounded(y), mode="lines", line={"width": 0}, fill=fill, fillcolor="rgba(74,127,193,0.13)",
            showlegend=False, hoverinfo="skip")


# Timelines


def call_colors(names: Iterable[str]) -> dict[str, str]:
    return {name: PALETTE[i % len(PALETTE)] for i, name in enumerate(dict.fromkeys(names))}


@dataclass(frozen=True)
class _Bars:
    """Bars of one colour in a timeline: for each of them its rank, its start and its seconds."""

    label: str
    color: str
    width: float
    ranks: list[int]
    starts: list[float]
    seconds: list[float]
    texts: list[str]


def step_timeline(
    events: Sequence[TimedEvent], ranks: Sequence[int], colors: Mapping[str, str],
    predicted: Mapping[str, Any],
) -> go.Figure:
    """Return what each rank did in a step, and below it what the planner predicted."""
    events = without_waits(list(events))
    begin = min(event["start"] for event in events if event["kind"] != "realloc")
    known = set(ranks)
    measured = _measured_bars([event for event in events if event["rank"] in known], begin, colors)
    planned = predicted_bars(predicted, ranks, colors)
    return timeline_figure(
        [("measured", measured), *([("predicted", planned)] if planned else [])], ranks)


def timeline_figure(parts: Sequence[tuple[str, Sequence[_Bars]]], ranks: Sequence[int]) -> go.Figure:
    """Return timelines one below the other on one axis of seconds, with a row for each rank."""
    row = 26 if len(ranks) <= 16 else 13
    fixed = 110 + 26 * (len(parts) - 1)
    figure = make_subplots(
        rows=len(parts), cols=1, shared_xaxes=True, vertical_spacing=0.11 if len(ranks) <= 16 else 0.03)
    named: set[str] = set()
    for number, (_, bars) in enumerate(parts, start=1):
        for one in bars:
            figure.add_bar(
                x=rounded(one.seconds), base=rounded(one.starts), y=[str(rank) for rank in one.ranks],
                orientation="h", width=one.width, name=one.label, legendgroup=one.label,
                showlegend=one.label not in named, marker={"color": one.color, "line": {"width": 0}},
                text=one.texts, textposition="none", hovertemplate="%{text}<extra></extra>",
                meta={"rank": one.ranks}, row=number, col=1)
            named.add(one.label)
        axis: dict[str, Any] = {
            "type": "category", "categoryorder": "array", "categoryarray": [str(rank) for rank in ranks],
            "autorange": "reversed", "showgrid": False, "fixedrange": True,
            "title": {"text": f"{parts[number - 1][0]}, rank" if len(parts) > 1 else "rank", "standoff": 4}}
        figure.update_yaxes(**axis, row=number, col=1)
    figure.update_xaxes(title={"text": "seconds", "standoff": 6}, rangemode="tozero", row=len(parts), col=1)
    figure.update_layout(**layout(
        fixed + row * max(_FEWEST_ROWS, len(ranks)) * len(parts), barmode="overlay", bargap=0,
        legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": {"size": 11}},
        margin={"l": 64, "r": 12, "t": 52, "b": 40},
        meta={"row_height": row, "fixed_height": fixed, "panels": len(parts),
              "narrow_margin": {"l": 52, "r": 6, "t": 8, "b": 150}}))
    return figure


def _measured_bars(
    events: Sequence[TimedEvent], begin: float, colors: Mapping[str, str]
) -> list[_Bars]:
    """Return the bars of a step: first what waits, then calls, and in front what runs beside them."""
    bars: dict[str, _Bars] = {}

    def add(label: str, color: str, width: float, rank: int, start: float, end: float, text: str) -> None:
        one = bars.setdefault(label, _Bars(label, color, width, [], [], [], []))
        one.ranks.append(rank)
        one.starts.append(max(0.0, start - begin))
        one.seconds.append(end - begin - one.starts[-1])
        one.texts.append(text)

    def order(event: TimedEvent) -> tuple[int, float]:
        return {"move": 0, "realloc": 2, "offload": 2}.get(event["kind"], 1), event["start"]

    for event in sorted(events, key=order):
        rank, name, kind, start, end = (
            event["rank"], event["name"], event["kind"], event["start"], event["end"])
        if end - begin <= max(0.0, start - begin):
            continue
        took = format_seconds(end - start)
        if kind == "move":
            add(_MOVE, _MOVE_COLOR, _NARROW_BAR, rank, start, end, f"rank {rank}: samples for {name}, {took}")
        elif kind == "realloc":
            moved = (f"rank {rank}: weights of {name}, {event['transfer']}, {took}, "
                     f"{format_bytes(event['received_bytes'])} received")
            add(f"reallocates {name}", _REALLOC_COLOR, _NARROW_BAR, rank, start, end, moved)
        elif kind == "offload":
            text = f"rank {rank}: {event.get('what', 'load')}s weights of {name}, {took}"
            add(f"loads, releases {name}", _OFFLOAD_COLOR, _NARROW_BAR, rank, start, end, text)
        else:
            tokens = f", {event['num_tokens']:,} tokens" if "num_tokens" in event else ""
            waited = f", after waiting {format_seconds(event['waited'])}" if event.get("waited") else ""
            text = f"rank {rank}: {name}, {took}{tokens}{waited}"
            add(name, colors.get(name, PALETTE[0]), _BAR, rank, start, end, text)
    for event in events:
        for start, end in event.get("environment_waits", ()):
            text = f"rank {event['rank']}: waits for environments, {format_seconds(end - start)}"
            add(_ENVIRONMENT, _ENVIRONMENT_COLOR, _NARROW_BAR, event["rank"], start, end, text)
    return list(bars.values())


def predicted_bars(
    predicted: Mapping[str, Any], ranks: Sequence[int], colors: Mapping[str, str]
) -> list[_Bars]:
    """Return the bars of the predicted step; what goes on over its end is drawn at its beginning, too."""
    bars: dict[str, _Bars] = {}
    period = predicted.get("step_seconds", 0.0)
    known = set(ranks)
    for entry in predicted.get("activities", ()):
        is_move = entry["kind"] == "realloc"
        label = f"reallocates {entry['name'].partition(' for ')[0]}" if is_move else entry["name"]
        color = _REALLOC_COLOR if is_move else colors.get(entry["name"], PALETTE[0])
        one = bars.setdefault(label, _Bars(label, color, _NARROW_BAR if is_move else _BAR, [], [], [], []))
        first = int(entry["first_rank"])
        pieces = [(entry["start"], min(entry["end"], period))]
        if entry["end"] > period:
            pieces.append((0.0, entry["end"] - period))
        for rank in range(first, first + int(entry["num_ranks"])):
            for start, end in pieces if rank in known else ():
                if end > start:
                    one.ranks.append(rank)
                    one.starts.append(start)
                    one.seconds.append(end - start)
                    one.texts.append(
                        f"predicted, rank {rank}: {label}, {format_seconds(entry['end'] - entry['start'])}")
    return sorted(bars.values(), key=lambda one: -one.width)


def time_by_rank(run: RunFiles, ranks: Sequence[int], colors: Mapping[str, str]) -> go.Figure:
    """Return what each rank did with its time, as shares of all steps."""
    times = run.timeline.times
    total = sum(record["timing_s/step"] for record in run.steps) or 1.0
    parts: dict[str, tuple[str, list[float]]] = {}
    for call, kind in run.timeline.kinds.items():
        parts[call] = (colors.get(call, PALETTE[0]), [times[rank].calls[call] for rank in ranks])
        if kind == "generate":
            waits = [times[rank].environments[call] for rank in ranks]
            parts[_ENVIRONMENT] = (_ENVIRONMENT_COLOR, waits)
    parts["waits for weights"] = (_REALLOC_COLOR, [sum(times[rank].weights.values()) for rank in ranks])
    moves = [sum(times[rank].inputs.values()) + times[rank].sending for rank in ranks]
    parts[_MOVE] = (_MOVE_COLOR, moves)
    parts["loads, releases weights"] = (_OFFLOAD_COLOR, [times[rank].offload for rank in ranks])
    parts["nothing to do"] = (
        "rgba(128,128,128,0.14)", [max(0.0, total - times[rank].known) for rank in ranks])
    row = 26 if len(ranks) <= 16 else 13
    figure = go.Figure(layout=layout(
        120 + row * max(_FEWEST_ROWS, len(ranks)), barmode="stack", bargap=0.25,
        margin={"l": 56, "r": 12, "t": 50, "b": 40},
        legend={"traceorder": "normal", "orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom",
                "font": {"size": 11}},
        meta={"narrow_margin": {"l": 44, "r": 6, "t": 8, "b": 150}},
        xaxis={"tickformat": ".0%", "range": [0, 1]},
        yaxis={"type": "category", "autorange": "reversed", "title": {"text": "rank", "standoff": 4}}))
    for label, (color, seconds) in parts.items():
        if max(seconds, default=0.0) > 1e-4 * total:
            figure.add_bar(
                x=rounded(one / total for one in seconds), y=[str(rank) for rank in ranks], orientation="h",
                name=label, marker={"color": color, "line": {"width": 0}},
                hovertemplate=f"rank %{{y}}: %{{x:.1%}} {label}<extra></extra>")
    return figure


# Memory


_PARTS = {
    "weights": "weights", "copy": "weights", "merged": "weights", "packed": "weights",
    "adapters": "weights", "gradients": "gradients", "optimizer": "optimizer", "cache": "cache",
    "kv_cache": "cache"}
"""The last word of a part of a rank's memory -> what the page calls it."""
PART_COLORS = {
    "weights": PALETTE[0], "gradients": PALETTE[3], "optimizer": PALETTE[1], "cache": PALETTE[2],
    "passes and the rest": PALETTE[8]}


def memory_parts(by_use: Mapping[str, float]) -> dict[str, float]:
    """Return bytes by use as those by part."""
    found = dict.fromkeys(PART_COLORS, 0.0)
    for use, size in by_use.items():
        found[_PARTS.get(use.split()[-1], "passes and the rest")] += size
    return found


def memory_unit(most: float) -> tuple[float, str]:
    """Return the bytes of the unit in which so many bytes are shown, and its name."""
    return (1e9, "GB") if most >= 1e9 else (1e6, "MB")


def memory_by_rank(run: RunFiles) -> go.Figure:
    """Return the most that each rank held in a call by part, with a line where the prediction is."""
    fullest: dict[int, RankMemory] = {}
    for (rank, _), one in run.timeline.memory.items():
        if rank not in fullest or one.measured > fullest[rank].measured:
            fullest[rank] = one
    ranks = sorted(fullest)
    measured: list[dict[str, float]] = []
    for rank in ranks:
        parts = memory_parts(fullest[rank].parts)
        parts["passes and the rest"] += max(0.0, fullest[rank].measured - sum(parts.values()))
        measured.append(parts)
    size_of, unit = memory_unit(max((one.measured for one in fullest.values()), default=0.0))
    figure = go.Figure(layout=layout(
        300, barmode="stack", bargap=0.35, yaxis={"title": {"text": unit}, "rangemode": "tozero"},
        xaxis={"type": "category", "title": {"text": "rank", "standoff": 6}}))
    names = [str(rank) for rank in ranks]
    for part, color in PART_COLORS.items():
        sizes = [parts[part] / size_of for parts in measured]
        if any(sizes):
            figure.add_bar(
                x=names, y=rounded(sizes), name=part, marker={"color": color, "line": {"width": 0}},
                hovertemplate=f"rank %{{x}}: %{{y:.3g}} {unit} {part}<extra></extra>")
    planned = {rank: one.predicted for rank, one in fullest.items() if one.predicted is not None}
    if planned:
        figure.add_scatter(
            x=[str(rank) for rank in planned], y=rounded(size / size_of for size in planned.values()),
            name="predicted", mode="markers",
            hovertemplate=f"rank %{{x}}: %{{y:.3g}} {unit} predicted<extra></extra>",
            marker={"symbol": "line-ew-open", "size": 18 if len(ranks) <= 16 else 9, "color": "#888",
                    "line": {"width": 3}})
    return figure


def step_memory(events: Sequence[TimedEvent], ranks: Sequence[int]) -> go.Figure:
    """Return the memory of ranks over a step: measured in each call, and dotted what was predicted."""
    begin = min(event["start"] for event in events if event["kind"] != "realloc")
    sizes = [_measured(event) for event in events]
    size_of, unit = memory_unit(max(sizes, default=0))
    figure = go.Figure(layout=layout(
        280, xaxis={"title": {"text": "seconds", "standoff": 6}, "rangemode": "tozero"},
        yaxis={"title": {"text": unit}, "rangemode": "tozero"}))
    of_calls: dict[int, list[TimedEvent]] = {}
    for event in sorted(events, key=lambda event: event["start"]):
        if "counted_bytes" in event or "memory_bytes" in event:
            of_calls.setdefault(event["rank"], []).append(event)
    most = {rank: max(_measured(event) for event in found) for rank, found in of_calls.items()}
    at_first = set(sorted(most, key=lambda rank: -most[rank])[:_MOST_LINES])
    for index, rank in enumerate(rank for rank in ranks if rank in of_calls):
        for kind in ("measured", "predicted"):
            x: list[float | None] = []
            y: list[float | None] = []
            texts: list[str] = []
            for event in of_calls[rank]:
                size = _measured(event) if kind == "measured" else event.get(
                    "predicted_memory_bytes", event.get("predicted_counted_bytes"))
                if size is not None:
                    x += [event["start"] - begin, event["end"] - begin, None]
                    y += [size / size_of, size / size_of, None]
                    texts += [f"rank {rank} in {event['name']}: {format_bytes(size)} {kind}"] * 2 + [""]
            if x:
                figure.add_scatter(
                    x=rounded(x), y=rounded(y), mode="lines", text=texts,
                    hovertemplate="%{text}<extra></extra>",
                    name=f"rank {rank}" if kind == "measured" else f"rank {rank}, predicted",
                    legendgroup=str(rank), showlegend=kind == "measured", meta={"rank": rank},
                    visible=True if rank in at_first else "legendonly",
                    line={"color": PALETTE[index % len(PALETTE)], "width": 3 if kind == "measured" else 1.5,
                          "dash": "solid" if kind == "measured" else "dot"})
    return figure


def _measured(event: TimedEvent) -> int:
    return event.get("memory_bytes", event.get("counted_bytes", 0))


# Weights on their way


def bandwidths(run: RunFiles) -> list[Plot]:
    """Return for each role the bandwidth of its reallocations, beside the bound's."""
    found = []
    for role in dict.fromkeys(one.role for one in run.timeline.movements):
        moved = [one for one in run.timeline.movements if one.role == role]
        figure = go.Figure(layout=layout(
            260, xaxis={"title": {"text": "step", "standoff": 6}},
            yaxis={"title": {"text": "GB/s"}, "rangemode": "tozero"}))
        curves_of = {
            "measured": [one.received_bytes / one.seconds / 1e9 for one in moved],
            "bound, computed": [one.received_bytes / one.bound_seconds / 1e9 for one in moved
                                if one.bound_seconds]}
        width = 1
        for index, (name, rates) in enumerate(curves_of.items()):
            if len(rates) == len(moved):
                steps, values, width = thinned([one.step for one in moved], rates, _MOST_POINTS)
                figure.add_scatter(
                    x=steps, y=rounded(values), name=name,
                    mode="lines+markers" if len(moved) < _MANY_POINTS else "lines",
                    line={"color": PALETTE[index], "dash": "dash" if index else "solid", "width": 1.8})
        note = "into the rank that receives most"
        note += f"; each point is the mean of {width} reallocations" if width > 1 else ""
        found.append(Plot(f"Weights of {role}", figure, note))
    return found


# Meshes


def mesh(
    layouts: Mapping[str, Layout], num_ranks: int, per_host: int, colors: Mapping[str, str]
) -> go.Figure:
    """Return which ranks run each call, with their places on the axes of its layout; lines part the hosts."""
    names = list(layouts)
    figure = go.Figure(layout=layout(
        90 + 34 * len(names), showlegend=False, margin={"l": 130, "r": 12, "t": 8, "b": 40},
        xaxis={"title": {"text": "rank", "standoff": 6}, "range": [-0.6, num_ranks - 0.4], "showgrid": False,
               "zeroline": False},
        yaxis={"type": "category", "categoryorder": "array", "categoryarray": names, "autorange": "reversed",
               "showgrid": False},
        meta={"narrow_margin": {"l": 104, "r": 6}}))
    for host in range(1, -(-num_ranks // max(1, per_host))):
        figure.add_vline(x=host * per_host - 0.5, line={"width": 1, "dash": "dot", "color": "#888"})
    for name, placed in layouts.items():
        grid = placed.grid
        places = {}
        for index, rank in np.ndenumerate(grid):
            axes = [f"{axis} {place}" for axis, place, size in zip("pdct", index, grid.shape, strict=True)
                    if size > 1]
            places[int(rank)] = ", ".join(axes) or "whole"
        ranks = sorted(places)
        figure.add_scatter(
            x=ranks, y=[name] * len(ranks), mode="markers+text" if num_ranks <= 16 else "markers",
            marker={"symbol": "square", "size": 26 if num_ranks <= 16 else 11, "opacity": 0.85,
                    "color": colors.get(name, PALETTE[0])},
            text=[_short(places[rank]) for rank in ranks], textfont={"size": 10, "color": "#fff"},
            customdata=[places[rank] for rank in ranks],
            hovertemplate=f"{name} {placed}, rank %{{x}}: %{{customdata}}<extra></extra>")
    return figure


def _short(place: str) -> str:
    return "" if place == "whole" else place.replace(" ", "").replace(",", " ")
