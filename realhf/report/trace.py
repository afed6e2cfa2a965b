"""The events of a run as a trace for Perfetto (ui.perfetto.dev): all ranks, on the clock of rank 0."""

import gzip
import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from realhf.errors import UserError
from realhf.report.run_data import RunFiles, read_events
from realhf.runtime.records.about import PROFILES
from realhf.runtime.records.pictures import TimedEvent
from realhf.user_input.files import open_regular
from realhf.user_input.units import format_bytes

_PROFILE = re.compile(r"step_(\d+)_rank_(\d+)\.json\.gz")
_MOST_EVENTS = 2_000_000
_MOST_PROFILE_BYTES = 1_000_000_000
_CALLS, _BESIDE, _ENVIRONMENTS = 0, 1, 2
_THREADS = {_CALLS: "calls and samples", _BESIDE: "weights", _ENVIRONMENTS: "waits for environments"}
_ABOUT = ("num_tokens", "flops", "waited", "cpu_seconds", "counted_bytes", "memory_bytes", "process_bytes",
          "transfer", "sent_bytes", "received_bytes", "senders", "over_bound", "bytes", "what")
_PROFILED_THREADS = 1000
"""Added to the thread numbers of torch's profiler, beside which the events of a rank are."""


def write_trace(run: RunFiles, path: Path, *, steps: Collection[int] | None = None) -> int:
    """Write the events of all ranks, of some steps or of all; return how many there are.

    A name that ends with .gz is compressed. Traces of torch's profiler are added to their ranks. Raises
    UserError if there are no such events, or too many for the viewer.
    """
    ahead = {int(rank): seconds for rank, seconds in run.about.get("clocks", {}).items()}
    found = [event for event in read_events(run.path / "timeline.jsonl")
             if steps is None or event["step"] in steps]
    if not found:
        raise UserError(f"{run.path}: its timeline.jsonl has no events of these steps")
    if len(found) > _MOST_EVENTS:
        many = f"{len(found):,} events, too many for a viewer"
        raise UserError(f"{run.path} has {many}: choose some steps (--steps 1-50)")
    begin = min(event["start"] - ahead.get(event["rank"], 0.0) for event in found)
    ranks = sorted({event["rank"] for event in found})
    events = [*_names(ranks), *(one for event in found for one in _of_event(event, begin, ahead))]
    for profile, step, rank in _profiles(run.path):
        if steps is None or step in steps:
            events += _of_profile(profile, rank, begin + ahead.get(rank, 0.0))
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")).encode()
    path.write_bytes(gzip.compress(text, 6) if path.suffix == ".gz" else text)
    return len(found)


def _names(ranks: Iterable[int]) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        about = {"ph": "M", "pid": rank}
        yield {**about, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {**about, "name": "process_sort_index", "args": {"sort_index": rank}}
        for thread, name in _THREADS.items():
            yield {**about, "tid": thread, "name": "thread_name", "args": {"name": name}}


def _of_event(event: TimedEvent, begin: float, ahead: dict[int, float]) -> Iterator[dict[str, Any]]:
    """Yield the slices of an event, in microseconds since the beginning, and its memory as a counter."""
    rank, kind = event["rank"], event["kind"]
    origin = begin + ahead.get(rank, 0.0)
    name = {"move": f"samples for {event['name']}", "realloc": f"weights of {event['name']}"}.get(
        kind, event["name"])
    args = {key: event[key] for key in _ABOUT if key in event}  # type: ignore[literal-required]
    yield {
        "ph": "X", "pid": rank, "tid": _BESIDE if kind in ("realloc", "offload") else _CALLS, "name": name,
        "cat": kind, "ts": _micro(event["start"] - origin), "dur": _micro(event["end"] - event["start"]),
        "args": {"step": event["step"], **args}}
    for start, end in event.get("environment_waits", ()):
        yield {
            "ph": "X", "pid": rank, "tid": _ENVIRONMENTS, "name": "waits for environments",
            "cat": "environments", "ts": _micro(start - origin), "dur": _micro(end - start),
            "args": {"step": event["step"]}}
    if (size := event.get("memory_bytes", event.get("counted_bytes"))) is not None:
        yield {"ph": "C", "pid": rank, "name": "memory", "ts": _micro(event["end"] - origin),
               "args": {"bytes": size}}


def _micro(seconds: float) -> float:
    return round(1e6 * seconds, 3)


def _profiles(run: Path) -> Iterator[tuple[Path, int, int]]:
    for path in sorted((run / PROFILES).glob("*.json.gz")):
        if (match := _PROFILE.fullmatch(path.name)) is not None:
            yield path, int(match[1]), int(match[2])


def _of_profile(path: Path, rank: int, origin: float) -> list[dict[str, Any]]:
    """Return the events of torch's profiler on a rank, whose times count from another beginning."""
    with open_regular(path) as file, gzip.GzipFile(fileobj=file) as unpacked:
        text = unpacked.read(_MOST_PROFILE_BYTES + 1)
    if len(text) > _MOST_PROFILE_BYTES:
        raise UserError(f"{path} has more than {format_bytes(_MOST_PROFILE_BYTES)}: profile fewer steps")
    document = json.loads(text)
    base = document.get("baseTimeNanoseconds", 0) / 1e9
    events = []
    for event in document.get("traceEvents", ()):
        if event.get("ph") not in ("X", "i") or "ts" not in event or not isinstance(event.get("tid"), int):
            continue
        events.append({**event, "pid": rank, "tid": _PROFILED_THREADS + event["tid"] % 1_000_000,
                       "ts": round(event["ts"] + 1e6 * (base - origin), 3)})
    return events
