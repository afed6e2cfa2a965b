"""No-positive-resampling (ScaleRL, arXiv:2510.13786): prompts that the model answers well are dropped for
good.

A sample passes if its score reaches a threshold. The pass rate of a prompt is the share of its samples that
have passed, over all of its visits. The rates are in `run.state`, so that all ranks agree on them and
checkpoints hold them; they go by the number of the prompt's row in the dataset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realhf.calls import DECISION, KEEP, HostFunction
from realhf.data.dataset import DATASET_ROW
from realhf.graph import FunctionCall
from realhf.steps.sample_pool import Samples
from realhf.steps.step_runner import StepRunner
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from realhf.data.batch import Batch

WANTED = "wanted_prompts"
"""The call that keeps the prompts that are not dropped."""
COUNT = "count_passes"
"""The call that counts the samples that pass."""
_STATE = "pass_rates"
"""Key of `run.state`: row -> numbers of samples that passed and of all samples."""


@dataclass(frozen=True)
class PassRateLimit:
    """Which prompts are dropped: those with a pass rate of at least `max_pass_rate`."""

    max_pass_rate: float = 0.9
    pass_score: float = 1.0  # A sample with at least this score passes.

    def __post_init__(self) -> None:
        check_types(self, "pass_rate_limit.")
        rate = self.max_pass_rate
        require(0 < rate <= 1, "pass_rate_limit.max_pass_rate", rate, "be above 0 and at most 1")

    def drops(self, counts: list[int]) -> bool:
        """Return whether a prompt with these numbers of passed and of all samples is dropped."""
        passed, total = counts
        return total > 0 and passed / total >= self.max_pass_rate

    def calls(self) -> tuple[FunctionCall, FunctionCall]:
        """Return the calls that keep wanted prompts, and that count passes."""
        wanted = HostFunction(WantedPrompts(self), filters=True)
        count = HostFunction(CountPasses(self.pass_score), decides=True, example={})
        return (
            FunctionCall(WANTED, inputs=(DATASET_ROW,), work=wanted),
            FunctionCall(COUNT, inputs=(DATASET_ROW, "score"), work=count))

    def take_wanted(self, run: StepRunner, count: int, *, part: str, max_draws: int) -> Samples | None:
        """Return the next `count` prompts that are not dropped, or fewer if `max_draws` draws do not find
        them; `part` has the call that keeps them.

        Return None if there are none, or if nothing new is to begin.
        """
        wanted = run.pool("wanted")
        for _ in range(max_draws):
            drawn = run.prompts(count - len(wanted))
            if drawn is None:
                return None
            run(part, drawn)
            wanted.add(drawn, where=WANTED)
            if len(wanted) == count:
                break
        run.log("prompts/none_left", float(not len(wanted)))
        return wanted.take(count)

    def count(self, run: StepRunner) -> None:
        """Add the passes that `count_passes` has counted in this step to the rates."""
        rates = run.state.setdefault(_STATE, {})
        for row, (passed, total) in run.agree(COUNT).items():
            before = rates.get(row, [0, 0])
            rates[row] = [before[0] + passed, before[1] + total]
        run.log("prompts/seen", len(rates))
        run.log("prompts/dropped", sum(self.drops(counts) for counts in rates.values()))


@dataclass(frozen=True)
class WantedPrompts:
    """A host function that keeps the prompts whose pass rates are below the limit."""

    limit: PassRateLimit

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        rates = context.run_state.get(_STATE, {})
        counts = [rates.get(str(row), [0, 0]) for row in batch[DATASET_ROW]]
        return {KEEP: [not self.limit.drops(counted) for counted in counts]}


@dataclass(frozen=True)
class CountPasses:
    """A host function that decides on {row: [samples that passed, samples]}, without failed rewards."""

    pass_score: float

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        counts: dict[str, list[int]] = {}
        for row, score in zip(batch[DATASET_ROW], batch["score"].tolist(), strict=True):
            if score == score:  # The score of a failed reward is NaN.
                counted = counts.setdefault(str(row), [0, 0])
                counted[0] += score >= self.pass_score
                counted[1] += 1
        return {DECISION: counts}
