"""Bytes of one call under one strategy, as the search's bounds need them: at most what the account counts."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from realhf.graph import FunctionCall
from realhf.layout import ParallelStrategy
from realhf.models.model_config import ModelConfig
from realhf.plan import CallPlan
from realhf.planner.memory.call_memory import RunningMemory
from realhf.planner.memory.model_states import adapter_bytes, gradient_bytes, optimizer_bytes, weights_bytes
from realhf.planner.workload.problem import ModelRole, PlannedCall, Problem, parameter_table

PARTS = 8  # The most parts into which the ranks of a layout are cut, in the order of pipeline stages.
PLACES = 2 * PARTS  # The places of a layout: any rank of each part, then the first rank of each part.


def part_size(num_ranks: int) -> int:
    """Return the ranks of a part: a power of two, as most meshes begin at a multiple of one."""
    return 1 << (-(-num_ranks // PARTS) - 1).bit_length()


class Held(NamedTuple):
    """Bytes of the home of a role, of a copy, and of what a call adds."""

    home: Any
    copy: Any
    call: Any


class StateBytes(NamedTuple):
    """Bytes of the home and of a copy on some stages, of which the first stage is the first.

    `own_home` and `own_copy` leave out what may be in the memory of another role with equal frozen weights.
    `by_place` has for each place which of these stages have no more bytes than any stage there.
    """

    stages: tuple[int, ...]
    by_place: np.ndarray
    home: np.ndarray
    copy: np.ndarray
    own_home: np.ndarray
    own_copy: np.ndarray
    gradients: np.ndarray  # They exist during train steps only.

    def least_by_place(self, by_stage: np.ndarray) -> np.ndarray:
        """Return the least bytes at each place, (..., PLACES), from those of stages, (..., stages)."""
        least: np.ndarray = np.where(self.by_place, by_stage[..., None, :], np.inf).min(axis=-1)
        return least


class CandidateMemory(NamedTuple):
    """The most bytes of a rank, and the least of a rank at each place.

    `by_stage` are the bytes that the call adds on each of the stages of `StateBytes`, and `alone` is what the
    fullest rank needs if it holds nothing else.
    """

    fullest: Held
    by_place: Held
    by_stage: tuple[float, ...]
    alone: float


def state_bytes(problem: Problem, call: FunctionCall, strategy: ParallelStrategy) -> StateBytes:
    """Return the bytes of the states of a call's role."""
    role = problem.model_role(call)
    stages, by_place = _telling_stages(role, strategy, trains=call.kind == "train_step")
    copy = np.array([weights_bytes(role, strategy, stage) for stage in stages], float)
    adapters = np.array([adapter_bytes(role, strategy, stage) for stage in stages], float)
    training, gradients = np.zeros((2, len(stages)))
    if call.kind == "train_step":
        gradients += [gradient_bytes(role, strategy, stage) for stage in stages]
    if role.trainable and not problem.offloads_optimizer(role):
        training += [optimizer_bytes(role, strategy, stage) for stage in stages]
    equal = [name for name, other in problem.roles.items() if role.source and other.source == role.source]
    is_first = equal[:1] in ([], [call.role])
    own_home = (copy if is_first else adapters) + training
    own_copy = copy if len(equal) < 2 else adapters
    return StateBytes(stages, by_place, copy + training, copy, own_home, own_copy, gradients)


def candidate_memory(
    problem: Problem, call: FunctionCall, states: StateBytes, running: np.ndarray, *, offload: bool
) -> list[CandidateMemory]:
    """Return the bytes of a call with each of several options, which add `running`, (options, stages)."""
    rests = 0.0 if offload else 1.0
    home, copy, own_home, own_copy = (rests * array for array in states[2:6])
    if offload and not _may_share(problem, call):
        running = running + states.copy
    alone = (home if call.kind == "train_step" else copy) + running
    least_home, least_copy = map(states.least_by_place, (own_home, own_copy))
    columns = (running, running.max(axis=1), states.least_by_place(running), alone.max(axis=1))
    return [
        CandidateMemory(
            Held(home.max(), copy.max(), most), Held(least_home, least_copy, least), tuple(by_stage), need)
        for by_stage, most, least, need in zip(*(array.tolist() for array in columns), strict=True)]


def running_bytes(
    problem: Problem, call: FunctionCall, call_plan: CallPlan, states: StateBytes, *,
    at_most: float = math.inf,
) -> list[float] | None:
    """Return the least bytes that the call, or an evaluation in its layout, adds on each of the stages,
    without offloaded weights; None if it adds more than `at_most` on the first stage."""
    at_home = CallPlan(call_plan.layout)
    planned_calls = [(problem.planned(call), call_plan)]
    if problem.evaluations:
        planned_calls += [
            (beside, call_plan if has_options else at_home)
            for beside, has_options in problem.evaluations_beside(call)]
    own, *others = [_least_running(problem, beside, plan) for beside, plan in planned_calls]
    needs: list[float] = []
    for stage, gradients in zip(states.stages, states.gradients.tolist(), strict=True):
        needs.append(max([own(stage) + gradients, *(bytes_on(stage) for bytes_on in others)]))
        if needs[0] > at_most:
            return None
    return needs


def _may_share(problem: Problem, call: FunctionCall) -> bool:
    """Return whether a role's weights may be in the memory of another role."""
    source = problem.model_role(call).source
    return source is not None and sum(role.source == source for role in problem.roles.values()) > 1


def _least_running(problem: Problem, planned: PlannedCall, call_plan: CallPlan) -> Callable[[int], float]:
    """Return a function that returns the least bytes that a call adds on a stage besides gradients."""
    running = RunningMemory(problem, planned, call_plan)
    waits = planned.kind == "generate" and planned.waits_for_blocks(call_plan)
    rows = call_plan.max_rows or planned.workload.max_rows

    def bytes_on(stage: int) -> float:
        memory = running.on(stage)
        if waits:
            memory = memory._replace(kv_cache=memory.kv_cache / rows)
        return float(memory.num_bytes)

    return bytes_on


@lru_cache(maxsize=1 << 10)
def _blocks_by_stage(config: ModelConfig, pp: int, vp: int) -> tuple[tuple[int, int], ...]:
    """Return the number of blocks and of experts' blocks on each stage."""
    strategy = ParallelStrategy(pp=pp, vp=vp)
    stages = (parameter_table(config).stage_layers(strategy, stage) for stage in range(pp))
    return tuple((len(layers), sum(map(config.has_experts, layers))) for layers in stages)


@lru_cache(maxsize=1 << 12)
def _stages_of(
    contents: tuple[tuple[int, int], ...], num_ranks: int, trains: bool
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the same as `_telling_stages` for stages with these numbers of blocks and of experts' blocks."""
    pp = len(contents)
    stands_for: dict[tuple[object, ...], int] = {}
    keys: list[tuple[object, ...]] = []
    for stage, blocks in enumerate(contents):
        is_end = stage in (0, pp - 1)
        part = stage * (num_ranks // pp) // part_size(num_ranks) if trains else 0
        keys.append((stage,) if is_end else (-1, blocks, part))
        stands_for[keys[-1]] = stage  # Later stages of a train step have fewer micro-batches in flight.
        first = (-2, blocks)
        if not is_end and first not in stands_for:  # The one with the most.
            stands_for[first] = stage
    stages = tuple(sorted({*stands_for.values()}))
    by_place = np.zeros((PLACES, len(stages)), bool)
    for place, there in enumerate(_stages_by_place(num_ranks, pp)):
        by_place[place, [stages.index(stands_for[keys[stage]]) for stage in there]] = True
    return stages, by_place


def _stages_by_place(num_ranks: int, pp: int) -> list[range]:
    """Return the stages of each place. Parts after the last rank count as the last rank."""
    size = part_size(num_ranks)
    per_stage = num_ranks // pp
    firsts = [min(part * size, num_ranks - 1) for part in range(PARTS)]
    stops = [min(first + size, num_ranks) for first in firsts]
    parts = [range(a // per_stage, -(-b // per_stage)) for a, b in zip(firsts, stops, strict=True)]
    return parts + [stages[:1] for stages in parts]


def _telling_stages(
    role: ModelRole, strategy: ParallelStrategy, *, trains: bool
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the stages that may have the most bytes, in order, and which of them have the least bytes at
    each place, (PLACES, stages).

    Between the ends, stages with equally many blocks of each kind differ only by the micro-batches in flight
    of a train step, of which later ones have fewer.
    """
    contents = _blocks_by_stage(role.config, strategy.pp, strategy.vp)
    return _stages_of(contents, strategy.num_ranks, trains)
