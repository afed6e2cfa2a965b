"""RewardLimits: what a run does when a reward function raises, takes too long or returns no finite number."""

import random
from dataclasses import dataclass
from typing import Literal

from realhf.errors import UserError
from realhf.user_input.field_types import check_types, require

_MAX_WAIT_SECONDS = 60.0
"""Longest wait before a call is made again, unless the service asks for a longer one."""
_MAX_ASKED_SECONDS = 600.0
"""Longest wait that a service may ask for."""


class ServiceError(UserError):
    """A failure of a service that is away, or refuses to answer now, whatever the samples are.

    `wait_seconds` is the time after which it wants to be asked again, if it has named one. With `is_final`,
    it would refuse again.
    """

    def __init__(self, sentence: str, *, wait_seconds: float = 0.0, is_final: bool = False) -> None:
        super().__init__(sentence)
        self.wait_seconds = wait_seconds
        self.is_final = is_final


@dataclass(frozen=True)
class RewardLimits:
    """Settings for failures of a reward function."""

    timeout_seconds: float | None = 1800.0
    """Longest time of a call with all samples of a rank, or with one sample if the reward has a
    `concurrency`. The limit interrupts Python code, waits and system calls; it replaces what the function
    has set by `signal.alarm`, and the function's own alarm replaces it. With a `concurrency`, calls run in
    threads, and one that never returns keeps its thread. None: no limit."""
    retries: int = 0
    """How often a call that has failed is made again."""
    retry_seconds: float = 1.0
    """The wait before a call is made again, which doubles each time, up to a minute; a random part of up to
    half of it is left out. If a service asks for a longer wait (`Retry-After`), it gets up to ten minutes."""
    on_failure: Literal["stop", "drop"] = "stop"
    """`stop` ends the run with a sentence. `drop` leaves the samples that fail, and the groups that they
    belong to, out of the step; the metric `reward/failed` is their share."""
    max_failed_steps: int = 3
    """With `drop`: how many steps in a row may have no sample left, as all have failed. Such a step changes
    no weights. The next one ends the run."""

    def __post_init__(self) -> None:
        check_types(self, "reward_limits.")
        if self.timeout_seconds is not None:
            rule = "be above 0, or None for no limit"
            require(self.timeout_seconds > 0, "reward_limits.timeout_seconds", self.timeout_seconds, rule)
        for name in ("retries", "retry_seconds", "max_failed_steps"):
            value = getattr(self, name)
            require(value >= 0, f"reward_limits.{name}", value, "not be negative")

    def wait_seconds(self, error: BaseException, failures: int) -> float | None:
        """Return how long to wait after a call has failed so often; None if it is not made again."""
        if failures > self.retries or not isinstance(error, Exception):
            return None
        asked = 0.0
        if isinstance(error, ServiceError):
            if error.is_final:
                return None
            asked = min(error.wait_seconds, _MAX_ASKED_SECONDS)
        longest = min(self.retry_seconds * 2.0 ** min(failures - 1, 30), _MAX_WAIT_SECONDS)
        return max(asked, longest * random.SystemRandom().uniform(0.5, 1.0))
