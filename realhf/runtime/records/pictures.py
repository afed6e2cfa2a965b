"""Draws pictures of a run from its files: the reward curve, and the timeline of a step by rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from realhf.runtime.records.step_record import Event
from realhf.user_input.files import read_json_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

_MOVE = "move data, or wait for it"
_ENVIRONMENTS = "wait for environments"
_EVALUATION = "eval/"
"""Beginning of the names of calls of an evaluation, which the timeline of a step leaves out."""
_HELD_OUT = re.compile(r"eval/(?:(?P<set>[^/]+)/)?(?:score|pass@(?P<k>\d+))")
_REWARD = re.compile("reward/(.+)/mean")
_PANELS = (
    ("mean reward", ("reward/mean",)),
    ("loss", ("reward/loss", "actor/loss")),
    ("accuracy", ("reward/accuracy", "rewards/accuracies")),
    ("reverse KL to the teacher", ("actor/reverse_kl",)),
)
"""Titles of panels, and their metrics in training; each panel has the same metric of held-out rows, too."""


class TimedEvent(Event):
    """A line of timeline.jsonl: an event, and its step."""

    step: int


def draw_pictures(run: Path) -> None:
    """Write reward.png and timeline.png into the run directory."""
    steps = [row for _, row in read_json_lines(run / "metrics.jsonl")]
    curves(steps).savefig(run / "reward.png")
    timeline = [cast(TimedEvent, row) for _, row in read_json_lines(run / "timeline.jsonl")]
    if events := of_training(timeline):
        _draw_timeline(events, run / "timeline.png")


def of_training(events: Iterable[TimedEvent]) -> list[TimedEvent]:
    """Return the events that belong to no evaluation."""
    return [event for event in events if not event["name"].startswith(_EVALUATION)]


@dataclass(frozen=True)
class Panel:
    """A panel of reward.png: its title, and the metrics of its curves with their labels."""

    title: str
    training: Mapping[str, str]
    held_out: Mapping[str, str]


def panels_of(names: Iterable[str]) -> list[Panel]:
    """Return the panels of a run with these metrics: what it learns from, and if there are several rewards
    or teachers, each of them, too."""
    names = list(dict.fromkeys(names))
    scores = dict(held_out_curves(names))
    panels = []
    for title, metrics in _PANELS:
        if not (found := [name for name in metrics if name in names]) or _is_policy_gradient(found[0], names):
            continue
        parts = {name: name.removeprefix(f"{found[0]}/") for name in names if name.startswith(f"{found[0]}/")}
        is_reward = title == "mean reward"
        held_out = scores if is_reward else _held_out(found[0].rpartition("/")[2], names)
        panels.append(Panel(title, {found[0]: "training", **parts}, held_out))
    rewards = {name: match[1] for name in names if (match := _REWARD.fullmatch(name)) is not None}
    for name, reward in rewards.items() if len(rewards) > 1 else ():
        panels.append(Panel(reward, {name: "training"}, _held_out(reward, names)))
    if scores and not any(panel.held_out == scores for panel in panels):
        panels.append(Panel("held-out score", {}, scores))
    return panels


def _is_policy_gradient(name: str, names: Sequence[str]) -> bool:
    """Return whether a metric is the loss of a policy gradient, whose value tells nothing."""
    return name == "actor/loss" and bool({"actor/pg_loss", "actor/reverse_kl"} & set(names))


def _held_out(metric: str, names: Sequence[str]) -> dict[str, str]:
    """Return a metric of held-out rows, of each set if there are several, with its label."""
    pattern = re.compile(rf"eval/(?:(?P<set>[^/]+)/)?(?:.+/)?{re.escape(metric)}")
    found = {name: match["set"] for name in names if (match := pattern.fullmatch(name)) is not None}
    several = len(found) > 1
    return {name: f"held out ({of_set})" if several else "held out" for name, of_set in found.items()}


def curves(steps: Sequence[Mapping[str, Any]], *, kind: type[Figure] | None = None) -> Figure:
    """Return the figure of reward.png, an object of `kind`, for these records of metrics.jsonl."""
    from matplotlib.figure import Figure  # Imported here, as it is slow and only rank 0 draws.
    from matplotlib.ticker import MaxNLocator

    panels = panels_of(key for step in steps for key in step) or [Panel("", {}, {})]
    heights = [4.5, *[2.2] * (len(panels) - 1)]
    figure = (kind or Figure)(figsize=(8, sum(heights)), dpi=120)
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=heights)
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        for style, curves in (("-", panel.training), ("o--", panel.held_out)):
            for name, label in curves.items():
                points = [(step["step"], step[name]) for step in steps if name in step]
                axes.plot(*zip(*points, strict=True), style, label=label)
        axes.set_title(panel.title, loc="left", fontsize="medium")
        axes.grid(alpha=0.3)
        if panel.training or panel.held_out:
            axes.legend(fontsize="small")
    grid[-1, 0].set(xlabel="step")
    grid[-1, 0].xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.tight_layout()
    return figure


def held_out_curves(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the metrics of evaluations to draw, with labels: scores, and the pass@k of the largest k."""
    labels: dict[str, str] = {}
    largest: dict[str, int] = {}
    for name in dict.fromkeys(names):
        if match := _HELD_OUT.fullmatch(name):
            of_set = match["set"] or ""
            if match["k"] is None:
                labels[name] = "held-out score" + (f" ({of_set})" if of_set else "")
            else:
                largest[of_set] = max(largest.get(of_set, 0), int(match["k"]))
    for of_set, k in largest.items():
        prefix = f"{_EVALUATION}{of_set}/" if of_set else _EVALUATION
        labels[f"{prefix}pass@{k}"] = f"held-out pass@{k}" + (f" ({of_set})" if of_set else "")
    return list(labels.items())


def steps_to_draw(events: list[TimedEvent]) -> list[int]:
    """Return the step of median length among those with the most kinds of events.

    If some rank generates while another trains, as only a lag allows, add the steps before and after it.
    """
    by_step: dict[int, list[TimedEvent]] = {}
    for event in events:
        by_step.setdefault(event["step"], []).append(event)
    kinds = {step: len({_label(e) for e in chosen}) for step, chosen in by_step.items()}
    spans = {
        step: max(e["end"] for e in chosen) - min(e["start"] for e in chosen)
        for step, chosen in by_step.items()
        if kinds[step] == max(kinds.values())
    }
    step = sorted(spans, key=spans.__getitem__)[len(spans) // 2]
    generating = [e for e in by_step[step] if e["kind"] == "generate"]
    training = [e for e in by_step[step] if e["kind"] == "train_step"]
    overlaps = any(g["start"] < t["end"] and t["start"] < g["end"] for g in generating for t in training)
    return [s for s in range(step - 1, step + 2) if s in by_step] if overlaps else [step]


def _draw_timeline(events: list[TimedEvent], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.6 + 0.5 * len({event["rank"] for event in events})), dpi=120)
    axes = figure.subplots()
    axes.legend(handles=draw_steps(events, axes), loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def draw_steps(events: list[TimedEvent], axes: Axes) -> list[Patch]:
    """Draw the timeline of the steps that `steps_to_draw` chooses; return the handles of a legend."""
    import matplotlib
    from matplotlib.patches import Patch

    events = [*without_waits(events), *_environment_waits(events)]
    steps = steps_to_draw(events)
    chosen = sorted((e for e in events if e["step"] in steps), key=lambda e: e["start"])
    palette = iter(matplotlib.color_sequences["tab20"])
    labels = dict.fromkeys(_label(event) for event in chosen)
    colors = {label: "0.85" if label == _MOVE else next(palette, "0.3") for label in labels}
    _draw_bars(axes, chosen, colors, is_numbered=len(steps) > 1)
    title = f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    axes.set(title=title, xlabel="seconds", ylabel="rank", yticks=sorted({e["rank"] for e in chosen}))
    axes.invert_yaxis()
    return [Patch(color=color, label=label) for label, color in colors.items()]


def _draw_bars(
    axes: Axes, events: list[TimedEvent], colors: dict[str, Any], *, is_numbered: bool
) -> None:
    """Draw a bar for each event, by rank; transfers are narrow, as they may run beside a call.

    With `is_numbered`, several steps are drawn: bars have numbers, and what moves before them is left out.
    """
    begin = min(event["start"] for event in events if event["kind"] != "move" or not is_numbered)
    whole = max(event["end"] for event in events) - begin
    for event in events:
        start = max(0.0, event["start"] - begin)
        width = event["end"] - begin - start
        is_transfer = event["kind"] in ("move", "realloc", _ENVIRONMENTS)
        if width <= 0:
            continue
        axes.barh(
            event["rank"], width, 0.35 if is_transfer else 0.8, left=start, color=colors[_label(event)],
            zorder=3 if event["kind"] in ("realloc", _ENVIRONMENTS) else 2)
        if is_numbered and not is_transfer and width > 0.03 * whole:
            number = str(event["step"])
            axes.text(start + width / 2, event["rank"], number, ha="center", va="center", zorder=4)


def without_waits(events: list[TimedEvent]) -> list[TimedEvent]:
    """Return the events with reallocations that begin when the rank no longer waits for others.

    It waits until all ranks that send to it, and one of those that it sends to, have begun, too.
    """
    transfers: dict[tuple[Any, ...], dict[int, TimedEvent]] = {}
    for event in events:
        if event["kind"] == "realloc":
            transfers.setdefault(_transfer(event), {})[event["rank"]] = event
    cut = []
    for event in events:
        if event["kind"] == "realloc":
            by_rank = transfers[_transfer(event)]
            senders = [by_rank[rank]["start"] for rank in event["senders"] if rank in by_rank]
            receivers = [e["start"] for e in by_rank.values() if event["rank"] in e["senders"]]
            start = max(event["start"], *senders, min(receivers, default=event["start"]))
            event = {**event, "start": min(start, event["end"])}
        cut.append(event)
    return cut


def _environment_waits(events: list[TimedEvent]) -> list[TimedEvent]:
    """Return an event for each time in which a generating rank waited for environments and ran nothing."""
    return [
        {**event, "kind": _ENVIRONMENTS, "name": _ENVIRONMENTS, "start": start, "end": stop}
        for event in events for start, stop in event.get("environment_waits", ())]


def _transfer(event: TimedEvent) -> tuple[Any, ...]:
    return event["step"], event["name"], event["transfer"]


def _label(event: TimedEvent) -> str:
    if event["kind"] == "realloc":
        return f"reallocate {event['name']}"
    if event["kind"] == "offload":
        return f"load, release {event['name']}"
    return _MOVE if event["kind"] == "move" else event["name"]
