"""Pass rates: which prompts are drawn, by how often they have been answered well.

A sample passes if its score has reached a threshold; the pass rate of a prompt is the share of its samples
that passed, over all of its visits. The rates are in `run.state`, so that all ranks agree on them and
checkpoints hold them; they go by the number of the prompt's row in the dataset. Dropping what the model
answers well is ScaleRL's no-positive-resampling (arXiv:2510.13786); what it answers half of the time teaches
most, as the variance p (1 - p) of the score is largest there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from realhf.calls import DECISION, KEEP, HostFunction
from realhf.data.dataset import DATASET_ROW
from realhf.experiment import lagged_parts
from realhf.graph import DataflowGraph, FunctionCall
from realhf.steps.sample_pool import Samples
from realhf.steps.step_runner import StepRunner
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from realhf.data.batch import Batch


WANTED = "wanted_prompts"
"""The call that only prompts pass that are not dropped."""
COUNT = "count_passes"
"""The call that counts the samples that pass."""
_STATE = "pass_rates"
"""Key of `run.state`: row -> numbers of samples that passed and of all samples."""


@dataclass(frozen=True)
class PassRateLimit:
    """Which prompts are drawn, by their pass rates: a curriculum that the model's own answers make."""

    max_pass_rate: float = 0.9  # Prompts with at least this rate are dropped for good; above 1: none are.
    pass_score: float = 1.0  # A sample with at least this score passes.
    choose_from: int = 1
    """How many times as many prompts are drawn as a step needs. Those begin whose rates are nearest to 1/2;
    new prompts count as 1/2. The others come again in the next epoch."""

    def __post_init__(self) -> None:
        check_types(self, "pass_rate_limit.")
        rate = self.max_pass_rate
        require(
            0 < rate <= 2, "pass_rate_limit.max_pass_rate", rate,
            "be above 0 and at most 2 (0.9 is 90 %; above 1, no prompt is dropped)")
        require(self.choose_from >= 1, "pass_rate_limit.choose_from", self.choose_from, "be at least 1")

    def drops(self, counts: list[int]) -> bool:
        """Return whether a prompt with these numbers of passed and of all samples is dropped."""
        passed, total = counts
        return total > 0 and passed / total >= self.max_pass_rate

    def calls(self) -> tuple[FunctionCall, FunctionCall]:
        """Return the calls that only wanted prompts pass, and that count passes."""
        wanted = HostFunction(WantedPrompts(self), filters=True)
        count = HostFunction(CountPasses(self.pass_score), decides=True, example={})
        return (
            FunctionCall(WANTED, inputs=(DATASET_ROW,), work=wanted),
            FunctionCall(COUNT, inputs=(DATASET_ROW, "score"), work=count))

    def take_wanted(self, run: StepRunner, count: int, *, part: str, max_draws: int) -> Samples | None:
        """Return the next `count` prompts that are not dropped, or fewer if `max_draws` draws do not find
        them; `part` has the call that they pass.

        Return None if there are none, or if nothing new is to begin.
        """
        wanted = run.pool("wanted")
        for _ in range(max_draws):
            if len(wanted) >= count:  # Every rank chooses from its own prompts, and rounds up.
                break
            drawn = run.prompts((count - len(wanted)) * self.choose_from)
            if drawn is None:
                return None
            run(part, drawn)
            wanted.add(drawn, where=WANTED)
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
    """A host function that prompts pass whose pass rates are below the limit, the best of them first."""

    limit: PassRateLimit

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        rates = context.run_state.get(_STATE, {})
        counts = {row: rates.get(str(row), [0, 0]) for row in batch[DATASET_ROW]}
        wanted = [row for row, counted in counts.items() if not self.limit.drops(counted)]
        if self.limit.choose_from > 1:
            wanted.sort(key=lambda row: _distance(*counts[row]))  # Equal ones stay in their order.
            wanted = wanted[: -(-len(counts) // self.limit.choose_from)]
        return {KEEP: [row in wanted for row in batch[DATASET_ROW]]}


def _distance(passed: int, total: int) -> float:
    """Return how far a pass rate is from 1/2; that of a new prompt is there."""
    return abs(passed / total - 0.5) if total else 0.0


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


def with_pass_rates(graph: DataflowGraph, limit: PassRateLimit) -> DataflowGraph:
    """Return the graph with the calls that wanted prompts pass, and that count passes, before it trains."""
    first = next(i for i, call in enumerate(graph.calls) if call.kind == "train_step")
    calls = (*graph.calls[:first], *limit.calls(), *graph.calls[first:])
    return DataflowGraph(calls, tuple(dict.fromkeys((*graph.inputs, DATASET_ROW))))


def lagged_parts_by_rates(graph: DataflowGraph) -> dict[str, tuple[str, ...]]:
    """Return the parts `select`, `rollout`, `score` and `train` of a graph whose generation runs ahead.

    Passes are counted in the last one, so that no rank waits for scores before it generates.
    """
    parts = lagged_parts(graph)
    train = {"advantages", COUNT, *parts["train"]}
    names = [call.name for call in graph.order]
    cut = {
        "select": tuple(name for name in names if name == WANTED),
        "rollout": parts["rollout"],
        "score": tuple(name for name in parts["score"] if name not in train and name != WANTED),
        "train": tuple(name for name in names if name in train)}
    return {part: calls for part, calls in cut.items() if calls}
