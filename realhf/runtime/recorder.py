"""Recorder: what rank 0 writes into the run directory while the run goes on."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.plan import ExecutionPlan
from realhf.runtime.executor import StepRecord
from realhf.runtime.pictures import draw_pictures


def merge_metrics(records: Sequence[StepRecord]) -> dict[str, float]:
    """The step's metrics from all ranks' records: weighted means, slowest-rank times, summed bytes."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for record in records:
        for name, value, weight in record.metrics:
            sums[name] = sums.get(name, 0.0) + value * weight
            weights[name] = weights.get(name, 0.0) + weight
    merged = {name: total / weights[name] for name, total in sums.items()}
    trained_tokens: dict[str, float] = {}
    for event in (e for record in records for e in record.events):
        seconds, name = event["end"] - event["start"], event["name"]
        if event["kind"] == "realloc":
            _raise_to(merged, f"timing_s/realloc/{name}", seconds)
            merged[f"realloc_bytes/{name}"] = merged.get(f"realloc_bytes/{name}", 0.0) + event["sent_bytes"]
            _raise_to(merged, f"realloc_over_bound/{name}", event["over_bound"])
        elif event["kind"] != "move":
            _raise_to(merged, f"timing_s/{name}", seconds)
            if event["kind"] == "train_step":
                trained_tokens[name] = trained_tokens.get(name, 0.0) + event.get("num_tokens", 0)
    if trained_tokens:
        merged["perf/trained_tokens"] = next(iter(trained_tokens.values()))
    return merged


def _raise_to(values: dict[str, float], name: str, value: float) -> None:
    values[name] = max(values.get(name, value), value)


class Recorder:
    """metrics.jsonl, timeline.jsonl, TensorBoard, eval.jsonl and summary.json in `directory`."""

    def __init__(self, directory: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here, as it takes a second and only one rank needs it

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
        """Replaces eval.jsonl with this evaluation, one object per held-out prompt."""
        (self.directory / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def finish(self, summary: Mapping[str, Any]) -> None:
        (self.directory / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        self._metrics.close()
        self._timeline.close()
        self._tensorboard.close()
        draw_pictures(self.directory)
