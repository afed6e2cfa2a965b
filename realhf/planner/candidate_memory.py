"""Bytes of one call under one strategy, as the search's bounds need them: at most what the account counts."""

from typing import NamedTuple

import numpy as np

from realhf.graph import FunctionCall
from realhf.layout import ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.call_memory import running_memory
from realhf.planner.model_states import adapter_bytes, gradient_bytes, optimizer_bytes, weights_bytes
from realhf.planner.problem import ModelRole, PlannedCall, Problem


class Held(NamedTuple):
    """Bytes of the home of a role, of a copy, and of what a call adds."""

    home: float
    copy: float
    call: float


class StateBytes(NamedTuple):
    """Bytes of the home and of a copy on some stages, of which the first stage is the first.

    `own_home` and `own_copy` leave out what may be in the memory of another role with equal frozen weights.
    """

    stages: tuple[int, ...]
    home: np.ndarray
    copy: np.ndarray
    own_home: np.ndarray
    own_copy: np.ndarray


class CandidateMemory(NamedTuple):
    """The most bytes of a rank, those of the first stage, and the least of any stage.

    `by_stage` are the bytes that the call adds on each of the stages of `StateBytes`, and `alone` is what the
    fullest rank needs if it holds nothing else.
    """

    fullest: Held
    start: Held
    least: Held
    by_stage: tuple[float, ...]
    alone: float


def state_bytes(problem: Problem, call: FunctionCall, strategy: ParallelStrategy) -> StateBytes:
    """Return the bytes of the states of a call's role."""
    role = problem.model_role(call)
    stages = _telling_stages(role, strategy, trains=call.kind == "train_step")
    copy = np.array([weights_bytes(role, strategy, stage) for stage in stages], float)
    adapters = np.array([adapter_bytes(role, strategy, stage) for stage in stages], float)
    training = np.zeros(len(stages))
    if role.trainable and not problem.offloads_optimizer(role):
        training += [optimizer_bytes(role, strategy, stage) for stage in stages]
    equal = [name for name, other in problem.roles.items() if role.source and other.source == role.source]
    is_first = equal[:1] in ([], [call.role])
    own_home = (copy if is_first else adapters) + training
    return StateBytes(stages, copy + training, copy, own_home, copy if len(equal) < 2 else adapters)


def candidate_memory(
    problem: Problem, call: FunctionCall, states: StateBytes, running: np.ndarray, *, offload: bool
) -> CandidateMemory:
    """Return the bytes of a call that adds `running` on each stage, and its weights if it is offloaded."""
    rests = 0.0 if offload else 1.0
    home, copy, own_home, own_copy = (rests * array for array in states[1:])
    if offload and not _may_share(problem, call):
        running = running + states.copy
    alone = (home if call.kind == "train_step" else copy) + running
    return CandidateMemory(
        Held(home.max(), copy.max(), running.max()), Held(own_home[0], own_copy[0], running[0]),
        Held(own_home.min(), own_copy.min(), running.min()),
        tuple(running.tolist()), alone.max())


def running_bytes(
    problem: Problem, call: FunctionCall, call_plan: CallPlan, states: StateBytes
) -> np.ndarray:
    """Return the least bytes that the call, or an evaluation in its layout, adds on each of the stages,
    without offloaded weights."""
    at_home = CallPlan(call_plan.layout)
    planned = [(problem.planned(call), call_plan)]
    planned += [
        (beside, call_plan if has_options else at_home)
        for beside, has_options in problem.evaluations_beside(call)
    ]
    needs = [
        [_least_running(problem, some, plan, stage) for stage in states.stages] for some, plan in planned
    ]
    return np.array(needs).max(axis=0)


def _may_share(problem: Problem, call: FunctionCall) -> bool:
    """Return whether a role's weights may be in the memory of another role."""
    source = problem.model_role(call).source
    return source is not None and sum(role.source == source for role in problem.roles.values()) > 1


def _least_running(problem: Problem, planned: PlannedCall, call_plan: CallPlan, stage: int) -> float:
    memory = running_memory(problem, planned, call_plan, stage)
    if planned.kind == "generate" and planned.waits_for_blocks(call_plan):
        rows = call_plan.max_rows or planned.workload.max_rows
        memory = memory._replace(kv_cache=memory.kv_cache / rows)
    gradients = 0.0
    if planned.kind == "train_step":
        gradients = gradient_bytes(problem.roles[planned.role], call_plan.layout.strategy, stage)
    return memory.num_bytes + gradients


def _telling_stages(role: ModelRole, strategy: ParallelStrategy, *, trains: bool) -> tuple[int, ...]:
    """Return stages among which those with the most and the least bytes are, the first one first.

    Between the ends, stages with equally many blocks differ only by the micro-batches in flight of a train
    step, of which later ones have fewer. With experts, blocks may differ, so these are all stages.
    """
    if role.config.moe is not None:
        return tuple(range(strategy.pp))
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for stage in range(1, strategy.pp - 1):
        num_blocks = len(role.spec.stage_layers(strategy, stage))
        first.setdefault(num_blocks, stage)
        last[num_blocks] = stage if trains else first[num_blocks]
    return tuple(sorted({0, *first.values(), *last.values(), strategy.pp - 1}))
