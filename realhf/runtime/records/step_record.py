"""StepRecord: the metrics and timed events of one rank in one step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class StepRecord:
    """Metrics and timed events of one rank in one step, as JSON values. Times are Unix seconds.

    `metrics` are (name, value, weight); equal names of several ranks are averaged by weight.
    """

    metrics: list[tuple[str, float, float]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    """This rank's descriptions of logged answers (see RolloutCollector)."""

    @contextmanager
    def timed(self, **event: Any) -> Iterator[dict[str, Any]]:
        """Add an event with its start, its end and the CPU seconds of this process in between."""
        event["start"] = time.time()
        cpu_start = time.process_time()
        yield event
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()  # Reallocations have their own stream.
        cpu_seconds = time.process_time() - cpu_start
        self.events.append({**event, "end": time.time(), "cpu_seconds": cpu_seconds})
