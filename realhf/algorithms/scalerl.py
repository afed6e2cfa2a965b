"""ScaleRL ("The Art of Scaling Reinforcement Learning Compute for LLMs", 2025, arXiv:2510.13786).

The recipe: generation runs up to 8 updates ahead, and its cache outlives the weights (PipelineRL); CISPO's
loss, averaged over prompts; advantages r_i - mean of the group, divided by the deviation of the batch; logits
in float32; prompts whose samples all have the same score do not count; prompts that the model answers well
are dropped for good; over-long thinking is interrupted by a phrase. docs/scaling.md says how each part is
done.

A prompt is dropped by its pass rate: the share of its samples whose score has reached a threshold, over all
of its visits. The rates are in `run.state`, so that all ranks agree on them and checkpoints hold them; they
go by the number of the prompt's row in the dataset.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from realhf.algorithms.advantages import Normalize
from realhf.algorithms.critic_free import CISPO
from realhf.calls import DECISION, KEEP, HostFunction, OptimizerConfig
from realhf.data.dataset import DATASET_ROW
from realhf.experiment import Role, lagged_parts
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
    """A host function that prompts pass whose pass rates are below the limit."""

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


def scalerl_actor(model: str = "", **changes: Any) -> Role:
    """Return the role of the recipe's actor, with changes of its fields."""
    optimizer = OptimizerConfig(lr=5e-7, eps=1e-15, weight_decay=0.01, warmup_steps=100)
    role = Role(model, dtype="bfloat16", float32_head=True, optimizer=optimizer)
    return replace(role, **changes)


@dataclass
class ScaleRL(CISPO):
    """The ScaleRL recipe with its published settings; `scalerl_actor` has those of the actor.

    `interruption` is None by default, because the phrase and its place depend on the model.
    """

    actor: Role = field(default_factory=scalerl_actor)
    batch_size: int = 48
    group_size: int = 16
    max_lag: int = 8
    cache_on_update: Literal["recompute", "keep"] = "keep"
    checkpoint_every: int | str = 50
    """Steps between checkpoints; minutes are not legal with kept caches, which a checkpoint drops."""
    normalize: Normalize = "batch"
    filter_groups: bool = True
    pass_rate_limit: PassRateLimit | None = field(default_factory=PassRateLimit)
    """Which prompts are dropped for good, because the model answers them well; None: none are."""
    max_draws: int = 64
    """Most times that a step draws prompts from the dataset in the place of dropped ones."""

    def graph(self) -> DataflowGraph:
        require(self.max_draws >= 1, "max_draws", self.max_draws, "be at least 1")
        graph = super().graph()
        if self.pass_rate_limit is None:
            return graph
        *before, train = graph.calls
        return DataflowGraph((*before, *self.pass_rate_limit.calls(), train), (*graph.inputs, DATASET_ROW))

    def parts(self, graph: DataflowGraph) -> dict[str, tuple[str, ...]]:
        """Return the parts `select`, `rollout`, `score` and `train`.

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

    def step(self, run: StepRunner) -> None:
        """Begin the next wanted prompts, and train on those whose answers are complete."""
        begun = self._next_prompts(run)
        generated = run.pool("generated")
        if self.overlaps:
            due = generated.take(self.batch_size) if len(generated) else None
            run("score", due)
            run.send("train", due)  # So that training does not wait for the next round of generation.
            generated.add(run("rollout", begun))
        else:
            due = run("rollout", begun)
            run("score", due)
        run("train", due)
        if self.pass_rate_limit is not None and due is not None:
            self.pass_rate_limit.count(run)

    def _next_prompts(self, run: StepRunner) -> Samples | None:
        if self.pass_rate_limit is None:
            return run.prompts(self.batch_size)
        return self.pass_rate_limit.take_wanted(
            run, self.batch_size, part="select", max_draws=self.max_draws)
