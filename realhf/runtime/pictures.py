"""Pictures of a run from what it wrote: the reward curve, and the timeline of one step per rank."""

import json
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Patch

_MOVE = "move data, or wait for it"
_CURVES = (("reward/mean", "mean reward"), ("actor/loss", "loss"))


def draw_pictures(run: Path) -> list[Path]:
    """Writes reward.png and timeline.png into the run directory and returns their paths."""
    steps = _read(run / "metrics.jsonl")
    return [
        _draw_curve(steps, run / "reward.png"),
        _draw_timeline(_read(run / "timeline.jsonl"), run / "timeline.png"),
    ]


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _draw_curve(steps: list[dict[str, Any]], path: Path) -> Path:
    name, title = next(((n, t) for n, t in _CURVES if any(n in s for s in steps)), _CURVES[-1])
    figure = Figure(figsize=(8, 4.5), dpi=120)
    axes = figure.subplots()
    axes.plot(
        [s["step"] for s in steps if name in s],
        [s[name] for s in steps if name in s],
        label=f"{title} (training)",
    )
    evaluated = [s for s in steps if "eval/score" in s]
    if evaluated:
        x, y = [s["step"] for s in evaluated], [s["eval/score"] for s in evaluated]
        axes.plot(x, y, "o--", color="tab:red", label="held-out score (greedy)")
    axes.set(xlabel="step", ylabel=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return _save(figure, path)


def _draw_timeline(events: list[dict[str, Any]], path: Path) -> Path:
    """Who did what when, in the step of median length among those where most different things happened."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        by_step.setdefault(event["step"], []).append(event)
    kinds = {step: len({_label(e) for e in chosen}) for step, chosen in by_step.items()}
    fullest = {s: es for s, es in by_step.items() if kinds[s] == max(kinds.values())}
    spans = {s: max(e["end"] for e in es) - min(e["start"] for e in es) for s, es in fullest.items()}
    figure = Figure(figsize=(10, 1.6 + 0.5 * len({e["rank"] for e in events})), dpi=120)
    axes = figure.subplots()
    if spans:
        step = sorted(spans, key=spans.__getitem__)[len(spans) // 2]
        chosen = by_step[step]
        origin = min(e["start"] for e in chosen)
        labels = list(dict.fromkeys(_label(e) for e in sorted(chosen, key=lambda e: e["start"])))
        palette = iter(matplotlib.color_sequences["tab20"])
        colors = {label: "0.85" if label == _MOVE else next(palette, "0.3") for label in labels}
        for event in chosen:
            width = event["end"] - event["start"]
            height = 0.35 if event["kind"] == "move" else 0.8
            axes.barh(event["rank"], width, height, left=event["start"] - origin, color=colors[_label(event)])
        handles = [Patch(color=color) for color in colors.values()]
        axes.legend(handles, list(colors), loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
        axes.set_yticks(sorted({e["rank"] for e in chosen}))
        axes.set(title=f"step {step}", xlabel="seconds", ylabel="rank")
        axes.invert_yaxis()
    return _save(figure, path)


def _label(event: dict[str, Any]) -> str:
    if event["kind"] == "realloc":
        return f"reallocate {event['name']}"
    return _MOVE if event["kind"] == "move" else event["name"]


def _save(figure: Figure, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path)
    return path
