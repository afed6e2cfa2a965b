"""Draws pictures of a run from its files: the reward curve, and the timeline of one step by rank."""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

_MOVE = "move data, or wait for it"
_CURVES = (("reward/mean", "mean reward"), ("actor/loss", "loss"), ("reward/accuracy", "accuracy"))


def draw_pictures(run: Path) -> None:
    """Write reward.png and timeline.png into the run directory."""
    steps, events = (
        [json.loads(line) for line in (run / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "timeline.jsonl")
    )
    _draw_curve(steps, run / "reward.png")
    if events:
        _draw_timeline(events, run / "timeline.png")


def _draw_curve(steps: list[dict[str, Any]], path: Path) -> None:
    name, title = next(((n, t) for n, t in _CURVES if any(n in s for s in steps)), _CURVES[-1])
    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.subplots()
    curves = ((name, f"{title} (training)", "-"), ("eval/score", "held-out score (greedy)", "o--"))
    for key, label, style in curves:
        points = [(s["step"], s[key]) for s in steps if key in s]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="step", ylabel=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def _draw_timeline(events: list[dict[str, Any]], path: Path) -> None:
    """Draw the timeline of the step of median length among those with the most kinds of events."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        by_step.setdefault(event["step"], []).append(event)
    kinds = {step: len({_label(e) for e in chosen}) for step, chosen in by_step.items()}
    spans = {
        step: max(e["end"] for e in chosen) - min(e["start"] for e in chosen)
        for step, chosen in by_step.items()
        if kinds[step] == max(kinds.values())
    }
    step = sorted(spans, key=spans.__getitem__)[len(spans) // 2]
    chosen = sorted(by_step[step], key=lambda e: e["start"])
    palette = iter(matplotlib.color_sequences["tab20"])
    labels = dict.fromkeys(_label(event) for event in chosen)
    colors = {label: "0.85" if label == _MOVE else next(palette, "0.3") for label in labels}
    ranks = sorted({event["rank"] for event in chosen})
    figure = Figure(figsize=(10, 1.6 + 0.5 * len(ranks)), dpi=120)
    axes = figure.subplots()
    for event in chosen:
        start = event["start"] - chosen[0]["start"]
        width = event["end"] - event["start"]
        height = 0.35 if event["kind"] == "move" else 0.8
        axes.barh(event["rank"], width, height, left=start, color=colors[_label(event)])
    handles = [Patch(color=color) for color in colors.values()]
    axes.legend(handles, list(colors), loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
    axes.set(title=f"step {step}", xlabel="seconds", ylabel="rank", yticks=ranks)
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


def _label(event: dict[str, Any]) -> str:
    if event["kind"] == "realloc":
        return f"reallocate {event['name']}"
    if event["kind"] == "offload":
        return f"load, release {event['name']}"
    return _MOVE if event["kind"] == "move" else event["name"]
