"""Events that a user's functions see after a step, with what they may change. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from realhf.errors import UserError
from realhf.user_input.field_types import check_types, require
from realhf.user_input.suggest import did_you_mean


@dataclass
class StepEvent:
    """The argument of `on_step`, `on_evaluation` and `on_checkpoint`, which rank 0 calls between two steps.

    `stop` and `set` hold on all ranks from the next step on, and checkpoints hold what was set.
    """

    step: int
    steps: int  # The number of steps of the run.
    metrics: Mapping[str, float]
    """The metrics of the step, by their names in metrics.jsonl, with those of an evaluation after it."""
    evaluations: Mapping[int, Mapping[str, float]]
    """The metrics of all evaluations so far, by the step that they follow."""
    out: Path | None
    """The run directory."""
    values: Mapping[str, float]
    """What `set` may change, with the present values: learning rates such as `actor.lr`, which schedules
    multiply, and numbers of a call's loss such as `actor_train.kl_coef`. A coefficient that is 0 in the
    experiment is not among them, as the graph leaves out what it needs."""
    checkpoint: Path | None = None  # The checkpoint that is complete now, in `on_checkpoint`.
    changes: dict[str, float] = field(default_factory=dict)
    """What has been set."""
    stops: str | None = None
    """Why the run is to end, if it is."""

    def stop(self, reason: str = "a hook") -> None:
        """End the run after this step, with an export and a summary, as after its last step."""
        self.stops = reason

    def set(self, name: str, value: float) -> None:
        """Change one of `values`. Raises UserError if it is none of them, or if the value is not legal."""
        if name not in self.values:
            meant = did_you_mean(name, [*self.values])
            raise UserError(f"set({name!r}) names no value{meant}: legal are {', '.join(self.values)}")
        legal = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
        if not legal:
            raise UserError(f"set({name!r}, {value!r}): it must be a number from 0 on")
        self.changes[name] = float(value)


Hook = Callable[[StepEvent], None]


@dataclass(frozen=True)
class EarlyStopping:
    """Ends a run when an evaluation's metric has not become better for `patience` evaluations."""

    metric: str = "eval/score"
    patience: int = 3
    min_change: float = 0.0  # A smaller improvement does not count.
    mode: Literal["max", "min"] = "max"  # Whether higher or lower values are better.

    def __post_init__(self) -> None:
        check_types(self, "early_stopping.")
        require(self.patience >= 1, "early_stopping.patience", self.patience, "be at least 1")
        require(self.min_change >= 0, "early_stopping.min_change", self.min_change, "not be negative")

    def reason(self, evaluations: Mapping[int, Mapping[str, float]]) -> str | None:
        """Return why the run is to end after these evaluations, by step; None if it goes on."""
        sign = 1 if self.mode == "max" else -1
        best_step = None
        best = -math.inf
        since = 0
        for step, metrics in evaluations.items():
            value = sign * value_of(metrics, self.metric, field="early_stopping.metric")
            since += 1
            if best_step is None or value > best + self.min_change:
                best = value
                best_step = step
                since = 0
        if since < self.patience:
            return None
        return f"{self.metric} has not become better than {sign * best:.4g}, that of step {best_step}"


def best_step(evaluations: Mapping[int, Mapping[str, float]], metric: str) -> int:
    """Return the step whose evaluation has the highest value of a metric, or the lowest of a loss."""
    is_loss = metric.rpartition("/")[2] in ("loss", "perplexity")
    values = {step: value_of(m, metric, field="best_by") for step, m in evaluations.items()}
    return (min if is_loss else max)(values, key=values.__getitem__)


def value_of(metrics: Mapping[str, float], metric: str, *, field: str) -> float:
    """Return a metric of an evaluation. Raises UserError, which names the field, if there is none."""
    if metric not in metrics:
        meant = did_you_mean(metric, list(metrics))
        raise UserError(f"{field} is {metric!r}, which no evaluation has{meant}: it has {', '.join(metrics)}")
    return metrics[metric]
