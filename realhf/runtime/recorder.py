"""Recorder: writes metrics and events of a run into its directory, on rank 0."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.plan import ExecutionPlan
from realhf.runtime.executor import StepRecord
from realhf.runtime.pictures import draw_pictures

_OF_ROLES = ("realloc", "offload")
"""Kinds of events that are named after a role; the others are named after a call."""


def merge_metrics(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return a step's metrics over all ranks: weighted means, slowest times, sums of bytes and tokens."""
    parts: dict[str, list[tuple[float, float]]] = {}
    for name, value, weight in (metric for record in records for metric in record.metrics):
        parts.setdefault(name, []).append((value, weight))
    merged = {n: sum(v * w for v, w in part) / sum(w for _, w in part) for n, part in parts.items()}
    tokens: dict[str, int] = {}
    for event in (e for record in records for e in record.events if e["kind"] != "move"):
        name = event["name"]
        timing = f"timing_s/{event['kind']}/{name}" if event["kind"] in _OF_ROLES else f"timing_s/{name}"
        merged[timing] = max(merged.get(timing, 0.0), event["end"] - event["start"])
        if event["kind"] == "realloc":
            total = f"realloc_bytes/{name}"
            merged[total] = merged.get(total, 0.0) + event["sent_bytes"]
            over = f"realloc_over_bound/{name}"
            merged[over] = max(merged.get(over, 1.0), event["over_bound"])  # Computed, not measured.
        elif event["kind"] == "train_step":
            tokens[name] = tokens.get(name, 0) + event.get("num_tokens", 0)
    if tokens:
        merged["perf/trained_tokens"] = float(next(iter(tokens.values())))
    return merged | _bandwidths(records)


def _bandwidths(records: Sequence[StepRecord]) -> dict[str, float]:
    """Return each role's measured bandwidth in GB/s, as `perf/realloc_gbytes_per_s/<role>`.

    A reallocation counts for the rank that receives most: its bytes, divided by the seconds from when it and
    its senders were ready until it had received everything.
    """
    movements: dict[tuple[str, str, int], dict[int, Mapping[str, Any]]] = {}
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


class Recorder:
    """The writer of metrics.jsonl, timeline.jsonl, TensorBoard files, eval.jsonl and summary.json."""

    def __init__(self, directory: Path) -> None:
        # Imported here, as it takes a second and only rank 0 needs it.
        from torch.utils.tensorboard import SummaryWriter

        self.directory = directory
        self._metrics = (directory / "metrics.jsonl").open("w")
        self._timeline = (directory / "timeline.jsonl").open("w")
        self._tensorboard = SummaryWriter(str(directory / "tensorboard"))

    def start(self, config: Mapping[str, Any], plan: ExecutionPlan) -> None:
        (self.directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        plan.save(self.directory / "plan.yaml")

    def step(self, step: int, metrics: Mapping[str, float], records: Sequence[StepRecord]) -> None:
        self._metrics.write(json.dumps({"step": step, **metrics}) + "\n")
        self._metrics.flush()
        for event in (e for record in records for e in record.events):
            self._timeline.write(json.dumps({"step": step, **event}) + "\n")
        self._timeline.flush()
        for name, value in metrics.items():
            self._tensorboard.add_scalar(name, value, step)

    def evaluation(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace eval.jsonl with this evaluation: one object per held-out prompt."""
        (self.directory / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def finish(self, summary: Mapping[str, Any]) -> None:
        (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self._metrics.close()
        self._timeline.close()
        self._tensorboard.close()
        draw_pictures(self.directory)
