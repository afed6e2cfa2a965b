"""The dependencies of calls: samples of other calls, reallocated weights, ranks of plain Python calls."""

import numpy as np

from realhf.graph import FunctionCall
from realhf.planner.activation_memory import top_bytes
from realhf.planner.parameter_boxes import ContiguousLayout, Model
from realhf.planner.problem import ModelRole, Problem
from realhf.planner.rates import Rates
from realhf.planner.throughput import NEVER, Dependencies
from realhf.planner.transfer import estimate_movement
from realhf.realloc.links import Links

SAMPLE_BYTES = 40  # Bytes per token of samples between calls: ids and a few float columns.


def dependencies(problem: Problem, rates: Rates) -> Dependencies:
    """Return the dependencies among the calls, in the order in which ranks run them."""
    calls = problem.calls
    index = {call.name: i for i, call in enumerate(calls)}
    data, late_data = (np.full((len(calls), len(calls)), NEVER) for _ in range(2))
    for i, call in enumerate(calls):
        work = problem.workloads[call.name]
        for producer in filter(None, map(problem.graph.producer, call.inputs)):
            j = index[producer.name]
            is_late = producer.name in problem.ahead and call.name not in problem.ahead
            num_tokens = work.num_samples * work.tokens
            token_bytes = SAMPLE_BYTES + (top_bytes(work) if call.kind == "train_step" else 0)
            (late_data if is_late else data)[i, j] = rates.samples(num_tokens * token_bytes)
        if call.kind == "generate" and work.rounds > 1:
            num_tokens = work.num_samples * float(work.round.ages[1:].sum()) * work.tokens
            late_data[i, i] = rates.samples(num_tokens * SAMPLE_BYTES)
    weights = []
    for j, trainer in enumerate(calls):
        for i, user in enumerate(calls):
            if trainer.kind != "train_step" or user.role is None or user.kind == "train_step":
                continue
            if user.role == trainer.role or problem.model_role(user).follows == trainer.role:
                weights.append((i, j, 0 if j < i else 1))
    return Dependencies(data, late_data, tuple(weights), in_place=bool(problem.ahead))


def reallocation_seconds(
    rates: Rates, role: ModelRole, source: ContiguousLayout, target: ContiguousLayout
) -> float:
    """Return the seconds to move the trained parameters of a role from where it trains to another layout."""
    model = Model(role.config, role.lora, role.trained_spec.section_numel)
    links = Links.of_cluster(rates.cluster)
    movement = estimate_movement(
        links, model, source, target, itemsize=role.itemsize, sharded=source.strategy.num_replicas > 1)
    return movement.seconds / rates.assume.link + movement.num_waves * links.latency_seconds


def host_anchor(problem: Problem, call: FunctionCall) -> tuple[str | None, bool]:
    """Return the model call on whose result ranks a plain Python call runs, and whether it is split over
    them.

    A call that can be split runs where its inputs are. Any other runs where a call waits for its outputs.
    Without such a model call it runs on rank 0. If some calls run ahead, the others stay off their ranks, and
    run where a role is trained rather than there.
    """
    graph = problem.graph
    is_ahead = call.name in problem.ahead
    model_calls = [c for c in graph.order if c.role is not None and (c.name in problem.ahead) == is_ahead]
    producers = filter(None, map(graph.producer, call.inputs))
    before = [producer.name for producer in producers if producer in model_calls]
    after = [c.name for c in model_calls if set(c.inputs) & set(call.outputs)]
    if problem.ahead and not is_ahead:
        after += [c.name for c in model_calls if c.kind == "train_step"]
    is_split = getattr(call.work, "splittable", False) and bool(before or problem.ahead)
    anchors = [*before, *after] if is_split else [*after, *before]
    return next(iter(anchors), None), is_split
