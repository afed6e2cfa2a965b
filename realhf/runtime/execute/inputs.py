"""The inputs of an Executor: the state of its rank, the parts to run, and what to observe of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from realhf.data.batch import Batch
from realhf.distributed.group import Outbox
from realhf.distributed.world import World
from realhf.models.model_flops import ModelFlops
from realhf.plan import ExecutionPlan
from realhf.runtime.compile.actions import Action
from realhf.runtime.compile.program import PredictedMemory
from realhf.runtime.execute.host_context import HostContext
from realhf.runtime.samples.rollout_collector import RolloutCollector
from realhf.runtime.samples.sample_store import SampleStore
from realhf.runtime.weights.model_store import ModelStore


@dataclass(frozen=True)
class RankState:
    """The state of a rank while calls run: models, samples, and messages that are still being sent."""

    world: World
    models: ModelStore
    context: HostContext
    samples: SampleStore = field(default_factory=SampleStore)
    outbox: Outbox = field(default_factory=Outbox)


@dataclass(frozen=True)
class PartsProgram:
    """The parts of one graph and the dataset on which they run."""

    parts: Mapping[str, Sequence[Action]]
    plan: ExecutionPlan
    read: Callable[[Sequence[int]], Batch] | None
    """Returns the batch of some prompts; None on ranks that do not hold the dataset."""
    group_size: int = 1
    num_rounds: int = 1
    """Rounds in which an answer is generated; each may add an equal share of its tokens."""
    is_evaluation: bool = False
    prefix: str = ""
    """The beginning of the names under which its host calls have their states."""


@dataclass(frozen=True)
class Observations:
    """The records of a run's calls besides times and metrics; an evaluation makes none of them."""

    flops: Mapping[str, ModelFlops] = field(default_factory=dict)
    """Role -> its model's FLOPs; they are counted for the calls of these roles."""
    predicted_memory: PredictedMemory = field(default_factory=dict)
    failures: Path | None = None
    """The directory for the samples of updates that were skipped."""
    rollouts: RolloutCollector | None = None
    note: Callable[[int, str, str], None] | None = None
    """Tells the watcher each operation: its number, its text, and the digest of all so far."""
