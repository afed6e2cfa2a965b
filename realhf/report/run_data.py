"""The files of a run, read for a page, and thinned where they are too much for one."""

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.records.about import ABOUT
from realhf.runtime.records.pictures import TimedEvent, of_training
from realhf.runtime.records.run_directory import require_free
from realhf.user_input.files import MAX_TABLE_BYTES, read_json_lines, read_lines, read_object, read_text

_MOST_BARS = 24_000
"""Events of single steps that a page holds."""
_BYTES_OF_EVENT = 300
_FEWEST_STEPS, _MOST_STEPS = 4, 40
_CALLS = ("generate", "forward", "train_step", "host")


@dataclass
class RankTime:
    """The seconds of a rank in all steps: in calls, in waits by the call that it waited for, and the rest."""

    calls: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    inputs: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Receiving the samples of a call, or waiting for them."""
    weights: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Waiting for the weights of a call."""
    environments: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sending: float = 0.0
    offload: float = 0.0

    @property
    def known(self) -> float:
        """Seconds in which the rank did, or waited for, something that is named here."""
        parts = (self.calls, self.inputs, self.weights, self.environments)
        return sum(sum(part.values()) for part in parts) + self.sending + self.offload


@dataclass
class RankMemory:
    """The most bytes that a rank held in a call, by part, beside the same of the prediction."""

    call: str
    measured: float
    parts: Mapping[str, float]
    predicted: float | None
    """The bytes that are predicted of what is measured."""


@dataclass(frozen=True)
class MovedWeights:
    """A role's reallocation in a step, on the rank that receives most: seconds, bytes, and the bound."""

    step: int
    role: str
    seconds: float
    received_bytes: int
    bound_seconds: float
    over_bound: float


@dataclass
class Timeline:
    """The content of timeline.jsonl: totals over all steps, and all events of some steps."""

    times: dict[int, RankTime] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    """Call -> its kind, in the order in which calls first came up."""
    memory: dict[tuple[int, str], RankMemory] = field(default_factory=dict)
    movements: list[MovedWeights] = field(default_factory=list)
    steps: dict[int, list[TimedEvent]] = field(default_factory=dict)
    """The events of the steps that a page shows."""
    num_events: int = 0

    @property
    def ranks(self) -> list[int]:
        return sorted(self.times)


class RunFiles:
    """A run directory. Raises UserError if it is none, or if a file of it cannot be understood."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise UserError(f"{path}: there is no such run directory")
        if not (path / "metrics.jsonl").is_file():
            raise UserError(f"{path} has no metrics.jsonl: it is no run directory, or its run has not begun")
        self.path = path
        self.name = path.resolve().name
        records = [record for _, record in read_json_lines(path / "metrics.jsonl")]
        self.records = [record for record in records if isinstance(record.get("step"), int)]
        self.steps = [record for record in self.records if record["step"] > 0 and "timing_s/step" in record]
        self.config = self._object("config.json")
        self.summary = self._object("summary.json")
        self.about = self._object(ABOUT)

    def _object(self, name: str) -> dict[str, Any]:
        path = self.path / name
        return read_object(path, most=MAX_TABLE_BYTES) if path.is_file() else {}

    @cached_property
    def plan(self) -> ExecutionPlan | None:
        path = self.path / "plan.yaml"
        return ExecutionPlan.load(str(path)) if path.is_file() else None

    @property
    def predicted(self) -> Mapping[str, Any]:
        """The planner's prediction of a step, or `missing`: why there is nothing."""
        return self.about.get("predicted") or {"missing": "the run has recorded no prediction"}

    @property
    def num_steps(self) -> int:
        """The last step that was recorded."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def wanted_steps(self) -> int:
        return int(self.config.get("steps") or self.num_steps)

    @cached_property
    def is_running(self) -> bool:
        """Whether a process writes into the directory."""
        try:
            require_free(self.path)
        except UserError:
            return True
        return False

    @property
    def failure(self) -> str:
        """The sentence with which the run has ended early; empty if there is none."""
        if self.summary:
            return ""
        for path in sorted((self.path / "failures").glob("rank_*.txt")):
            first = read_text(path).partition("\n")[0]
            if " ends: " in first:
                return first.partition(" ends: ")[2]
        return ""

    def call(self, name: str) -> Mapping[str, Any]:
        """Return what about.json says of a call; empty if it says nothing."""
        return next((call for call in self.about.get("calls", []) if call["name"] == name), {})

    def producers(self, name: str) -> list[str]:
        """Return the calls whose outputs a call reads."""
        inputs = set(self.call(name).get("inputs", []))
        return [call["name"] for call in self.about.get("calls", []) if inputs & set(call["outputs"])]

    def metric(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps that have a metric, and its values."""
        pairs = [(record["step"], record[name]) for record in self.records
                 if isinstance(record.get(name), int | float)]
        return [step for step, _ in pairs], [value for _, value in pairs]

    @cached_property
    def metric_names(self) -> list[str]:
        names = dict.fromkeys(name for record in self.records for name in record)
        return [name for name in names if name != "step"]

    @cached_property
    def timeline(self) -> Timeline:
        path = self.path / "timeline.jsonl"
        if not path.is_file():
            return Timeline()
        return read_timeline(path, self._steps_to_show(path.stat().st_size))

    def _steps_to_show(self, size: int) -> set[int]:
        """Return the steps whose events a page holds: the first and the last, the slowest, that of median
        length, and others at equal distances, as far as there is room."""
        seconds = {record["step"]: record["timing_s/step"] for record in self.steps}
        if not seconds:
            return set()
        per_step = max(1.0, size / _BYTES_OF_EVENT / len(seconds))
        number = max(_FEWEST_STEPS, min(_MOST_STEPS, int(_MOST_BARS / per_step)))
        steps = sorted(seconds)
        if len(steps) <= number:
            return set(steps)
        by_length = sorted(steps, key=seconds.__getitem__)
        chosen = {steps[0], steps[-1], by_length[-1], self.median_step}
        others = number - len(chosen)
        chosen |= {steps[round((i + 1) * (len(steps) - 1) / (others + 1))] for i in range(others)}
        return chosen

    @property
    def median_step(self) -> int:
        """The step of median length among those after the first, which also warms up."""
        steps = self.steps[1:] or self.steps
        by_length = sorted(steps, key=lambda record: record["timing_s/step"])
        return int(by_length[len(by_length) // 2]["step"]) if by_length else 0


def read_timeline(path: Path, kept: set[int]) -> Timeline:
    """Add up the events of a timeline.jsonl, a step at a time; keep those of the steps `kept`."""
    found = Timeline()
    events: list[TimedEvent] = []
    for event in read_events(path):
        if events and event["step"] != events[0]["step"]:
            _add_step(found, events, keeps=events[0]["step"] in kept)
            events = []
        events.append(event)
    if events:
        _add_step(found, events, keeps=events[0]["step"] in kept)
    return found


def read_events(path: Path) -> Iterator[TimedEvent]:
    """Yield the events of a file, without a last line that is incomplete. It may have millions of lines."""
    number = 0
    try:
        for line in read_lines(path):
            number += 1
            if line.endswith(b"\n"):
                yield json.loads(line)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} line {number} cannot be read: {error}") from error


def _add_step(found: Timeline, events: Sequence[TimedEvent], *, keeps: bool) -> None:
    events = of_training(events)
    found.num_events += len(events)
    if keeps and events:
        found.steps.setdefault(events[0]["step"], []).extend(events)
    receiving: dict[tuple[int, str], float] = defaultdict(float)
    realloc: dict[tuple[str, str], list[TimedEvent]] = {}
    runs = {(event["rank"], event["name"]) for event in events if event["kind"] in _CALLS}
    for event in events:
        rank, name, kind = event["rank"], event["name"], event["kind"]
        time = found.times.setdefault(rank, RankTime())
        seconds = event["end"] - event["start"]
        if kind == "move":
            if (rank, name) in runs:
                time.inputs[name] += seconds
                receiving[rank, name] += seconds
            else:
                time.sending += seconds
        elif kind == "offload":
            time.offload += seconds
        elif kind == "realloc":
            realloc.setdefault((name, event["transfer"]), []).append(event)
        else:
            found.kinds.setdefault(name, kind)
            idle = sum(stop - start for start, stop in event.get("environment_waits", ()))
            time.calls[name] += seconds - idle
            if idle:
                time.environments[name] += idle
            late = event.get("waited", 0.0) - receiving.pop((rank, name), 0.0)
            if late > 0:
                time.weights[name] += late
            _add_memory(found, event)
    for (role, _), moved in realloc.items():
        _add_movement(found, role, moved)


def _add_memory(found: Timeline, event: TimedEvent) -> None:
    measured = event.get("memory_bytes", event.get("counted_bytes"))
    if measured is None:
        return
    key = (event["rank"], event["name"])
    if key not in found.memory or measured > found.memory[key].measured:
        predicted = event.get("predicted_memory_bytes", event.get("predicted_counted_bytes"))
        found.memory[key] = RankMemory(event["name"], measured, event.get("memory", {}), predicted)


def _add_movement(found: Timeline, role: str, events: Sequence[TimedEvent]) -> None:
    """Add a reallocation as the rank sees it that receives most, from when its senders were ready."""
    most = max(events, key=lambda event: (event["received_bytes"], event["end"]))
    if not most["received_bytes"]:
        return
    begun = {event["rank"]: event["start"] for event in events}
    ready = max(begun[rank] for rank in (most["rank"], *most["senders"]) if rank in begun)
    found.movements.append(MovedWeights(
        most["step"], role, max(most["end"] - ready, 1e-9), most["received_bytes"],
        most.get("bound_seconds", 0.0), most["over_bound"]))


def thinned(
    steps: Sequence[int], values: Sequence[float], most: int
) -> tuple[list[int], list[float], int]:
    """Return at most `most` points, each the mean of equally many steps, and how many these are."""
    width = max(1, math.ceil(len(steps) / most))
    if width == 1:
        return list(steps), list(values), 1
    places = range(0, len(steps), width)
    return (
        [steps[min(i + width, len(steps)) - 1] for i in places],
        [sum(values[i : i + width]) / len(values[i : i + width]) for i in places], width)
