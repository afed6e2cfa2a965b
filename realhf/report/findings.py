"""Finds what a reader of a report should know first: sentences about rewards, waits and wrong predictions."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from re import compile as pattern
from statistics import fmean, median

from realhf.report.page import Card
from realhf.report.run_data import RunFiles
from realhf.runtime.records.pictures import held_out_curves
from realhf.user_input.units import format_bytes, format_seconds

_REWARD = pattern("reward/(.+)/mean")
_ENDS = 0.1
"""Share of the steps at each end of a run that a trend compares."""
_FLAT = 0.02
"""Changes below this share of the larger end are no trend."""
_CLOSE = 0.1
"""A prediction within this share of the measurement is right."""
_NEGLIGIBLE = 0.01
"""Seconds below this share of a step are not worth a sentence."""


def number(value: float) -> str:
    """Return a figure with three digits, and large ones whole."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return "0" if abs(value) < 1e-9 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """Return seconds in words, those above a minute with minutes and hours."""
    if seconds < 60:
        return format_seconds(seconds)
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


@dataclass(frozen=True)
class Trend:
    """A metric at the beginning and at the end of a run, each as the mean of some steps."""

    name: str
    first: float
    last: float

    @property
    def verb(self) -> str:
        change = self.last - self.first
        if abs(change) <= _FLAT * max(abs(self.first), abs(self.last)):
            return "stayed"
        return "rose" if change > 0 else "fell"

    def __str__(self) -> str:
        if self.verb == "stayed":
            return f"{self.name} stayed at {number(self.last)}"
        return f"{self.name} {self.verb} from {number(self.first)} to {number(self.last)}"


def trend(run: RunFiles, metric: str, name: str) -> Trend | None:
    """Return the trend of a metric; None without it."""
    _, values = run.metric(metric)
    if not values:
        return None
    width = max(1, round(_ENDS * len(values)))
    return Trend(name, fmean(values[:width]), fmean(values[-width:]))


def reward_names(run: RunFiles) -> dict[str, str]:
    """Return the metrics of single rewards, and their names."""
    return {metric: match[1] for metric in run.metric_names if (match := _REWARD.fullmatch(metric))}


# Headline


def cards(run: RunFiles) -> list[Card]:
    """Return the headline figures of a run."""
    found = [_state(run)]
    if (reward := trend(run, "reward/mean", "reward")) is not None:
        found.append(_ends("Mean reward", reward))
    for metric, label in held_out_curves(run.metric_names)[:2]:
        _, values = run.metric(metric)
        found.append(_ends(label.capitalize(), Trend(label, values[0], values[-1])))
    if run.steps:
        found.append(_step_card(run))
        rates = [record["perf/generated_tokens_per_s"] for record in run.steps
                 if "perf/generated_tokens_per_s" in record]
        total = sum(record.get("tokens/generated", 0.0) for record in run.steps)
        trained = sum(record.get("tokens/trained", 0.0) for record in run.steps)
        if rates:
            note = f"{number(median(rates))} tokens/s while generating"
            found.append(Card("Generated", f"{number(total)} tokens", note))
        elif trained:
            found.append(Card("Trained on", f"{number(trained)} tokens"))
    if (idle := _idle_share(run)) is not None:
        planned = run.predicted.get("idle")
        note = "" if planned is None else f"{fmean(planned):.0%} predicted"
        found.append(Card("Waiting or idle", f"{idle:.0%} of rank time", note))
    if memory := run.timeline.memory:
        (rank, call), most = max(memory.items(), key=lambda item: item[1].measured)
        beside = "" if most.predicted is None else f", {format_bytes(most.predicted)} predicted"
        found.append(Card("Fullest rank", format_bytes(most.measured), f"rank {rank} in {call}{beside}"))
    return found


def _ends(title: str, ends: Trend) -> Card:
    return Card(title, number(ends.last), f"{number(ends.first)} at first")


def _state(run: RunFiles) -> Card:
    last = run.num_steps
    of = f"step {last:,} of {run.wanted_steps:,}"
    seconds = run.records[-1].get("perf/run_seconds") if run.records else None
    took = "" if seconds is None else f" in {duration(seconds)}"
    if run.summary:
        return Card("Finished", f"{last:,} steps", took.strip())
    if run.is_running:
        rates = [record["timing_s/step"] for record in run.steps[-20:]]
        left = f"about {duration(median(rates) * max(0, run.wanted_steps - last))} left" if rates else ""
        return Card("Goes on", of, left)
    return Card("Ended early", of, took.strip())


def _step_card(run: RunFiles) -> Card:
    seconds = median(record["timing_s/step"] for record in run.steps)
    planned = run.predicted.get("step_seconds")
    return Card(
        "One step", format_seconds(seconds),
        "median" if planned is None else f"median; {format_seconds(planned)} predicted")


def _idle_share(run: RunFiles) -> float | None:
    """Return the share of the ranks' time in which they run no call; None if it is unknown."""
    total = sum(record["timing_s/step"] for record in run.steps)
    times = run.timeline.times.values()
    if not total or not times:
        return None
    return min(1.0, max(0.0, 1 - fmean(sum(time.calls.values()) for time in times) / total))


# Sentences


def summary(run: RunFiles) -> list[str]:
    """Return what has happened in a run: how it ended, what it learned, where its time went."""
    lines = [f"The run ended early: {run.failure}"] if run.failure else []
    rewards = reward_names(run)
    several = rewards if len(rewards) > 1 else {"reward/mean": "The mean reward"}
    weights = _reward_weights(run)
    trends = [
        found for metric, name in several.items()
        if (found := trend(run, metric, name + weights.get(name, ""))) is not None]
    if len(rewards) > 1 and trends:
        order = {"fell": 0, "rose": 1, "stayed": 2}
        parts = [str(found) for found in sorted(trends, key=lambda found: order[found.verb])]
        lines.append(f"Rewards by name: {'; '.join(parts)}.")
    elif trends:
        lines.append(f"{trends[0]}.")
    for metric, label in held_out_curves(run.metric_names):
        steps, values = run.metric(metric)
        if len(values) > 1:
            best = max(range(len(values)), key=values.__getitem__)
            lines.append(
                f"{Trend(f'The {label}', values[0], values[-1])}; its best was {number(values[best])} after "
                f"step {steps[best]}.")
    lines += _signs(run)
    if calls := call_seconds(run):
        slowest = max(calls, key=calls.__getitem__)
        whole = median(record["timing_s/step"] for record in run.steps[1:] or run.steps)
        lines.append(
            f"{slowest} takes longest: {format_seconds(calls[slowest])} of a step of "
            f"{format_seconds(whole)}, {calls[slowest] / whole:.0%}.")
    if waits := waiting(run):
        lines.append(waits[0].sentence)
    return lines


def _reward_weights(run: RunFiles) -> dict[str, str]:
    """Return, by name, the weights of rewards other than 1, in words."""
    functions = run.config.get("reward_function")
    found = {}
    for one in functions if isinstance(functions, list) else [functions]:
        if isinstance(one, dict) and one.get("weight", 1.0) != 1.0:
            function = one.get("function")
            called = function.rpartition(".")[2] if isinstance(function, str) else ""
            found[one.get("name") or called] = f" (weight {number(one['weight'])})"
    return found


def _signs(run: RunFiles) -> list[str]:
    """Return sentences about metrics that tell of trouble."""
    lines = []
    checks = (
        ("response_length/clip_ratio", 0.2, "{:.0%} of the last responses were cut off at max_new_tokens."),
        ("reward/zero_std_groups", 0.7, "{:.0%} of the last groups had one reward for all samples, so that "
                                        "nothing was learned from them."),
        ("actor/clip_fraction", 0.3, "{:.0%} of the last tokens were clipped: updates are large."),
        ("reward/failed", 0.02, "The reward of {:.0%} of the last samples failed."),
        ("staleness/left_out", 0.2, "{:.0%} of the last response tokens were left out: they were too old."))
    for metric, limit, text in checks:
        found = trend(run, metric, metric)
        if found is not None and found.last > limit:
            lines.append(text.format(found.last))
    entropy = trend(run, "actor/entropy", "entropy")
    if entropy is not None and entropy.first > 0 and entropy.last < 0.1 * entropy.first:
        lines.append(
            f"The entropy fell from {number(entropy.first)} to {number(entropy.last)}: the model explores "
            "little by now.")
    return lines


@dataclass(frozen=True)
class Waiting:
    """The time of a rank in which it ran no call, as shares of all steps."""

    rank: int
    share: float
    causes: Mapping[str, float]
    """What it waited for, in words -> share."""

    @property
    def sentence(self) -> str:
        parts = [f"{share:.0%} {cause}" for cause, share in list(self.causes.items())[:3] if share >= 0.005]
        return f"Rank {self.rank} waits longest, {self.share:.0%} of its time: {', '.join(parts)}."


def waiting(run: RunFiles) -> list[Waiting]:
    """Return for each rank what it waited for, the rank that waited longest first."""
    total = sum(record["timing_s/step"] for record in run.steps)
    found = []
    for rank, time in run.timeline.times.items() if total else ():
        causes: dict[str, float] = defaultdict(float)
        for name, seconds in time.inputs.items():
            sources = [f"{call} on {layout.partition('@')[2]}" for call in run.producers(name)
                       if (layout := run.call(call).get("layout", ""))]
            source = f" (from {', '.join(sources)})" if sources else ""
            causes[f"for the inputs of {name}{source}"] += seconds / total
        for name, seconds in time.weights.items():
            causes[f"for the weights of {name}"] += seconds / total
        for name, seconds in time.environments.items():
            causes[f"for environments in {name}"] += seconds / total
        causes["with nothing to do"] = max(0.0, 1 - time.known / total)
        causes["sending samples"] = time.sending / total
        causes["loading and releasing weights"] = time.offload / total
        share = sum(causes.values())
        ordered = sorted(causes.items(), key=lambda item: -item[1])
        found.append(Waiting(rank, share, {cause: part for cause, part in ordered if part > 0}))
    return sorted(found, key=lambda waits: (-waits.share, waits.rank))


# Predictions


@dataclass(frozen=True)
class Missed:
    """A difference between prediction and measurement, in seconds of a step; the sentence says it."""

    seconds: float
    sentence: str


def call_seconds(run: RunFiles) -> dict[str, float]:
    """Return the median seconds of each call in a step, after the first step, which also warms up."""
    steps = run.steps[1:] or run.steps
    found = {}
    for name in run.timeline.kinds:
        values = [record[f"timing_s/{name}"] for record in steps if f"timing_s/{name}" in record]
        if values:
            found[name] = median(values)
    return found


def missed(run: RunFiles) -> list[str]:
    """Return sentences about what the prediction missed, the largest first."""
    predicted = run.predicted
    if "step_seconds" not in predicted or not run.steps:
        why = predicted.get("missing", "the run has not ended its first step")
        return [f"There is no prediction: {why}."]
    steps = run.steps[1:] or run.steps
    whole = median(record["timing_s/step"] for record in steps)
    found = []
    measured = call_seconds(run)
    for name, seconds in measured.items():
        planned = predicted["calls"].get(name)
        if planned is None:
            if seconds >= _NEGLIGIBLE * whole:
                found.append(Missed(seconds, (
                    f"{name} took {format_seconds(seconds)} a step, and calls in plain Python are predicted "
                    "to take no time unless `expected` says so.")))
            continue
        found.append(_of_call(name, seconds, planned["seconds"], whole))
    busy = sum(measured.values())
    planned_busy = sum(call["seconds"] for call in predicted["calls"].values())
    outside = (whole - predicted["step_seconds"]) - (busy - planned_busy)
    if abs(outside) > _CLOSE * whole:
        direction = "more" if outside > 0 else "less"
        found.append(Missed(abs(outside), (
            f"Between the calls, {format_seconds(abs(outside))} {direction} of a step went by than "
            "predicted: waits, samples and weights on their way, and calls that did not overlap.")))
    found = sorted((one for one in found if one.seconds >= _NEGLIGIBLE * whole), key=lambda one: -one.seconds)
    factor = whole / predicted["step_seconds"]
    origin = predicted.get("origin", "a cluster file")
    how = f"It rests on what was measured for {origin}." if predicted.get("is_measured") else (
        f"It rests on {origin} and no measurement; `realhf profile` makes one.")
    head = (
        f"A step took {format_seconds(whole)}, {_times(factor)} the predicted "
        f"{format_seconds(predicted['step_seconds'])}. {how}")
    return [head, *(one.sentence for one in found), *_memory_missed(run)]


def _of_call(name: str, seconds: float, planned: float, whole: float) -> Missed:
    difference = seconds - planned
    if abs(difference) <= _CLOSE * max(seconds, planned):
        return Missed(0.0, "")
    side = "longer" if difference > 0 else "shorter"
    return Missed(abs(difference), (
        f"{name} took {format_seconds(seconds)}, {_times(seconds / max(planned, 1e-12))} the predicted "
        f"{format_seconds(planned)}: {format_seconds(abs(difference))} of a step {side}, "
        f"{abs(difference) / whole:.0%} of it."))


def _times(factor: float) -> str:
    return f"{factor:.2f} times" if 0.1 < factor < 10 else f"{factor:.2g} times"


def _memory_missed(run: RunFiles) -> list[str]:
    known = {key: found for key, found in run.timeline.memory.items() if found.predicted}
    over = {key: found.measured - (found.predicted or 0.0) for key, found in known.items()}
    if not over:
        return []
    (rank, call), excess = max(over.items(), key=lambda item: item[1])
    found = known[rank, call]
    assert found.predicted is not None
    if excess <= 0.02 * found.predicted:
        worst = min(over.values())
        return ["The memory of every rank was as predicted, or less"
                + (f" (by {format_bytes(-worst)} at most)." if worst < 0 else ".")]
    return [
        f"Rank {rank} held {format_bytes(found.measured)} in {call}, {format_bytes(excess)} more than the "
        f"predicted {format_bytes(found.predicted)}."]


def reallocations(run: RunFiles) -> list[Sequence[str]]:
    """Return a row for each role: bytes, seconds, measured bandwidth, and the bound's."""
    rows: list[Sequence[str]] = []
    for role in dict.fromkeys(movement.role for movement in run.timeline.movements):
        moved = [one for one in run.timeline.movements if one.role == role]
        moved = moved[1:] or moved  # In the first step frozen parameters move, too.
        seconds = median(one.seconds for one in moved)
        rate = median(one.received_bytes / one.seconds for one in moved)
        bounds = [one.received_bytes / one.bound_seconds for one in moved if one.bound_seconds]
        bound = f"{format_bytes(median(bounds))}/s" if bounds else "unknown"
        rows.append((
            role, format_bytes(median(one.received_bytes for one in moved)), format_seconds(seconds),
            f"{format_bytes(rate)}/s", bound, f"{max(one.over_bound for one in moved):.2f}"))
    return rows
