"""StepRecord: what one rank has measured in a step; merge_metrics: the metrics of a step over all ranks."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal, NotRequired, TypedDict, Unpack

from realhf.runtime.records.digest_file import DigestPiece

_Size = Literal[
    "memory_bytes", "predicted_memory_bytes", "counted_bytes", "predicted_counted_bytes", "process_bytes",
    "predicted_process_bytes"]
_OF_CALLS: tuple[_Size, ...] = (
    "memory_bytes", "predicted_memory_bytes", "counted_bytes", "predicted_counted_bytes")
_OF_PROCESSES: tuple[_Size, ...] = ("process_bytes", "predicted_process_bytes")
"""Sizes in events, see MemoryMeter: those of the call, and those of the process."""
_OF_ROLES = ("realloc", "offload")
"""Kinds of events that are named after a role; the others are named after a call."""


class EventOf(TypedDict):
    """The rank and the work of an event, and what is known of it when it begins."""

    rank: int
    name: str
    """The call, or the role of a reallocation or an offload; in an evaluation the call follows `eval/`."""
    kind: str
    """That of a call; or `move` (of samples), `realloc`, or `offload` (weights are loaded or released)."""
    waited: NotRequired[float]
    """Seconds for which the rank waited before a call."""
    what: NotRequired[Literal["load", "release"]]
    """Whether an offload loads or releases weights."""
    bytes: NotRequired[int]
    """Size of the weights that an offload loads."""


class Event(EventOf):
    """The work of a rank in a stretch of time, as JSON: a line of timeline.jsonl, but for its step.

    `start` and `end` are in Unix seconds, sizes in bytes.
    """

    start: float
    end: float
    cpu_seconds: NotRequired[float]
    """CPU seconds of this process in between; a reallocation has none, as it runs beside other work."""

    asking: NotRequired[dict[str, Any]]
    """Answers of this rank, and what a call that asks has measured (see runtime.execute.asking.Answers)."""

    # A call on a model; MemoryMeter measures its memory.
    num_tokens: NotRequired[int]
    """Tokens sampled or trained on."""
    flops: NotRequired[int]
    environment_seconds: NotRequired[float]
    environment_waits: NotRequired[list[tuple[float, float]]]
    """When the rank waited for environments and ran nothing: start and end of each time."""
    memory: NotRequired[dict[str, int]]
    memory_bytes: NotRequired[int]
    counted_bytes: NotRequired[int]
    process_bytes: NotRequired[int]
    predicted_memory_bytes: NotRequired[int]
    predicted_counted_bytes: NotRequired[int]
    predicted_process_bytes: NotRequired[int]

    # A reallocation
    transfer: NotRequired[str]
    """Its layouts, as in "d2@0-1->d1t2@0-1"."""
    sent_bytes: NotRequired[int]
    received_bytes: NotRequired[int]
    senders: NotRequired[list[int]]
    """The ranks that send to this one."""
    over_bound: NotRequired[float]
    """The schedule's ratio to its lower bound."""
    bound_seconds: NotRequired[float]
    """The schedule's lower bound, computed for the links that it was made for."""


@dataclass
class StepRecord:
    """Metrics and timed events of one rank in one step, as JSON values. Times are Unix seconds.

    `metrics` are (name, value, weight); equal names of several ranks are averaged by weight.
    """

    metrics: list[tuple[str, float, float]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """This rank's descriptions of logged samples (see RolloutCollector)."""
    digests: list[DigestPiece] = field(default_factory=list)
    """Hashes of what this rank's calls have computed (see DigestTaker)."""

    def __post_init__(self) -> None:
        self._marks: list[tuple[Event, Any]] = []
        """Events whose work a GPU may not have ended, and CUDA events behind that work."""

    @contextmanager
    def timed(self, **about: Unpack[EventOf]) -> Iterator[Event]:
        """Add an event with its start, its end and the CPU seconds of this process in between.

        They are the times of the host, which runs ahead of a GPU, until `settle`.
        """
        from torch import cuda  # Pictures of a run need its events, and no torch.

        now = time.time()
        cpu_start = time.process_time()
        event: Event = {**about, "start": now, "end": now}
        yield event
        if cuda.is_available():
            mark = cuda.Event(enable_timing=True)
            mark.record()  # In the stream of calls; reallocations have their own.
            self._marks.append((event, mark))
        event["cpu_seconds"] = time.process_time() - cpu_start
        event["end"] = time.time()
        self.events.append(event)

    def settle(self) -> None:
        """Wait until a GPU has ended all work, and set the events to the times at which it ran it.

        Work begins when that before it has ended, and not before the host has asked for it.
        """
        if not self._marks:
            return
        from torch import cuda

        last = cuda.Event(enable_timing=True)
        last.record()
        last.synchronize()
        now = time.time()
        before = 0.0
        for event, mark in self._marks:
            event["end"] = max(event["end"], now - mark.elapsed_time(last) / 1000)
            event["start"] = min(max(event["start"], before), event["end"])
            before = event["end"]
        self._marks = []


def merge_metrics(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return a step's metrics over all ranks: weighted means, slowest times, sums of bytes and tokens."""
    parts: dict[str, list[tuple[float, float]]] = {}
    for name, value, weight in (metric for record in records for metric in record.metrics):
        parts.setdefault(name, []).append((value, weight))
    merged = {name: _merged(name, part) for name, part in parts.items()}
    tokens: dict[str, dict[str, int]] = {}
    seconds: dict[tuple[str, int], float] = {}
    for event in (e for record in records for e in record.events if e["kind"] != "move"):
        name = event["name"]
        if event["kind"] in _OF_ROLES:
            timing = f"timing_s/{event['kind']}/{name}"
            merged[timing] = max(merged.get(timing, 0.0), event["end"] - event["start"])
        else:  # A step may run a call several times.
            run = (name, event["rank"])
            seconds[run] = seconds.get(run, 0.0) + event["end"] - event["start"]
        if "environment_waits" in event:
            waited = sum(stop - start for start, stop in event["environment_waits"])
            merged[f"environment_wait_s/{name}"] = max(merged.get(f"environment_wait_s/{name}", 0.0), waited)
        sizes: dict[str, _Size] = {f"perf/{size}/{name}": size for size in _OF_CALLS}
        sizes |= {f"perf/{size}": size for size in _OF_PROCESSES}
        for key, size in sizes.items():
            if size in event:
                merged[key] = max(merged.get(key, 0.0), float(event[size]))
        if event["kind"] == "realloc":
            total = f"realloc_bytes/{name}"
            merged[total] = merged.get(total, 0.0) + event["sent_bytes"]
            over = f"realloc_over_bound/{name}"
            merged[over] = max(merged.get(over, 1.0), event["over_bound"])  # Computed, not measured.
        elif "num_tokens" in event:
            of_kind = tokens.setdefault(event["kind"], {})
            of_kind[name] = of_kind.get(name, 0) + event["num_tokens"]
    for (name, _), spent in seconds.items():
        merged[f"timing_s/{name}"] = max(merged.get(f"timing_s/{name}", 0.0), spent)
    for kind, of_kind in tokens.items():
        merged |= _tokens(kind, of_kind, {name: merged[f"timing_s/{name}"] for name in of_kind})
    return merged | _bandwidths(records) | _waits(records)


def finite(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the metrics that are finite numbers, and the others: JSON has neither NaN nor infinity."""
    known = {name: value for name, value in metrics.items() if isfinite(value)}
    return known, {name: value for name, value in metrics.items() if name not in known}


def _tokens(kind: str, tokens: Mapping[str, int], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the tokens that the calls of a kind have sampled or trained on, and how many in a second.

    The seconds are those of the calls alone. Tokens on which several roles train count once.
    """
    if kind == "generate":
        total = sum(tokens.values())
        rate = total / max(sum(seconds.values()), 1e-9)
        return {"tokens/generated": float(total), "perf/generated_tokens_per_s": rate}
    most = max(tokens, key=lambda name: (tokens[name], seconds[name]))
    rate = tokens[most] / max(seconds[most], 1e-9)
    return {"tokens/trained": float(tokens[most]), "perf/trained_tokens_per_s": rate}


def _merged(name: str, part: Sequence[tuple[float, float]]) -> float:
    """Merge the (value, weight) pairs of a metric from several ranks or runs of a call.

    The result is the weighted mean or, for names that end with "/max", the largest value.
    """
    if name.endswith("/max"):
        return max(value for value, _ in part)
    return sum(value * weight for value, weight in part) / sum(weight for _, weight in part)


def _waits(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return as `bubble/<call>` the seconds that a rank of the call waited before it, as a mean over ranks.

    It waited for the call's inputs, for its weights, or for ranks that were still busy.
    """
    waits: dict[str, dict[int, float]] = {}
    for event in (event for record in records for event in record.events if "waited" in event):
        ranks = waits.setdefault(event["name"], {})
        ranks[event["rank"]] = ranks.get(event["rank"], 0.0) + event["waited"]
    return {f"bubble/{name}": sum(ranks.values()) / len(ranks) for name, ranks in waits.items()}


def _bandwidths(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return each role's measured bandwidth in GB/s, as `perf/realloc_gbytes_per_s/<role>`.

    A reallocation counts for the rank that receives most: its bytes, divided by the seconds from when it and
    its senders were ready until it had received everything.
    """
    movements: dict[tuple[str, str, int], dict[int, Event]] = {}
    for record in records:
        seen = Counter[tuple[str, str]]()  # A step may repeat a transfer.
        for event in record.events:
            if event["kind"] == "realloc":
                way = event["name"], event["transfer"]
                movements.setdefault((*way, seen[way]), {})[event["rank"]] = event
                seen[way] += 1
    totals: dict[str, list[float]] = {}
    for (role, _, _), by_rank in movements.items():
        most = max(by_rank.values(), key=lambda event: (event["received_bytes"], event["end"]))
        ready = max(by_rank[rank]["start"] for rank in (most["rank"], *most["senders"]) if rank in by_rank)
        if most["received_bytes"]:
            total = totals.setdefault(role, [0.0, 0.0])
            total[0] += most["received_bytes"]
            total[1] += max(most["end"] - ready, 1e-9)
    return {f"perf/realloc_gbytes_per_s/{role}": n / s / 1e9 for role, (n, s) in totals.items()}
