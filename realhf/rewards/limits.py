"""RewardLimits: what a run does when a reward function raises, takes too long or returns no finite number."""

from dataclasses import dataclass
from typing import Literal

from realhf.user_input.field_types import check_types


@dataclass(frozen=True)
class RewardLimits:
    """Settings for failures of a reward function."""

    timeout_seconds: float | None = None
    """Longest time of a call with all samples of a rank, or with one sample if the reward has a
    `concurrency`. With a limit the function runs in a thread of its own, in which Python's `signal.alarm`
    does not work. A function that never returns keeps its thread. None: no limit."""
    retries: int = 0
    """How often a call that has failed is made again."""
    on_failure: Literal["stop", "drop"] = "stop"
    """`stop` ends the run with a sentence. `drop` leaves the samples that fail, and the groups that they
    belong to, out of the step; the metric `reward/failed` is their share."""

    def __post_init__(self) -> None:
        check_types(self, "reward_limits.")
        if self.timeout_seconds is not None and not self.timeout_seconds > 0:
            raise ValueError(
                f"reward_limits.timeout_seconds is {self.timeout_seconds}: "
                "it must be above 0, or None for no limit")
        if self.retries < 0:
            raise ValueError(f"reward_limits.retries is {self.retries}: it must not be negative")
