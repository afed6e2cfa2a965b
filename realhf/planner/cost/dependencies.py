"""The dependencies of calls: samples of other calls, reallocated weights, ranks of plain Python calls."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from realhf.cluster import Cluster
from realhf.graph import FunctionCall
from realhf.planner.cost.parameter_boxes import ContiguousLayout, MovedModel
from realhf.planner.cost.rates import Rates
from realhf.planner.cost.throughput import NEVER, Dependencies
from realhf.planner.cost.transfer import covers, estimate_movement
from realhf.planner.memory.activation_memory import top_bytes
from realhf.planner.workload.problem import ModelRole, Problem
from realhf.realloc.links import Links

SAMPLE_BYTES = 40  # Bytes per token of samples between calls: ids and a few float columns.


def dependencies(problem: Problem, rates: Rates) -> Dependencies:
    """Return the dependencies among the calls, in the order in which ranks run them."""
    calls = problem.calls
    index = {call.name: i for i, call in enumerate(calls)}
    data, late_data = (np.full((len(calls), len(calls)), NEVER) for _ in range(2))
    receiving = np.zeros(len(calls))
    for i, call in enumerate(calls):
        work = problem.workloads[call.name]
        token_bytes = SAMPLE_BYTES + (top_bytes(work) if call.kind == "train_step" else 0)
        num_bytes = work.num_samples * work.tokens * token_bytes
        for producer in filter(None, map(problem.graph.producer, call.inputs)):
            j = index[producer.name]
            is_late = producer.name in problem.ahead and call.name not in problem.ahead
            (late_data if is_late else data)[i, j] = rates.sending(num_bytes)
            receiving[i] = rates.samples(num_bytes)  # All at once: some ranks get them, and deal them out.
        if call.kind == "generate" and work.rounds > 1:
            num_tokens = work.num_samples * float(work.round.ages[1:].sum()) * work.tokens
            late_data[i, i] = rates.samples(num_tokens * SAMPLE_BYTES)
    weights = []
    for trainer, call in enumerate(calls):
        if call.kind == "train_step":
            weights += [(user, trainer, 0 if trainer < user else 1) for user in _users(problem, trainer)]
    return Dependencies(
        data, late_data, tuple(weights), receiving, busy_shares(rates.cluster), in_place=bool(problem.ahead))


def _users(problem: Problem, trainer: int) -> list[int]:
    """Return the calls that use what a call trains, the role's next train step last.

    That step needs the weights at home: where replicas share the optimizer, each has updated only a shard.
    """
    role = problem.calls[trainer].role
    users = []
    trainers = []
    for i, call in enumerate(problem.calls):
        if call.kind == "train_step":
            trainers += [i] if call.role == role else []
        elif call.role is not None and role in (call.role, problem.model_role(call).follows):
            users.append(i)
    next_trainer = trainers[(trainers.index(trainer) + 1) % len(trainers)]
    return [*users, next_trainer]


def busy_shares(cluster: Cluster) -> tuple[float, float]:
    """Return the shares of a reallocation's seconds in which a sending and a receiving rank compute nothing.

    A GPU gives some of its multiprocessors to communication: 20 of 132 in DeepSeek-V3's training
    (arXiv:2412.19437, section 3.2.2). On CPU the receiver copies from the sender's memory with the cores that
    would compute; between hosts the sender packs and sends with its cores, too.
    """
    if cluster.device_type == "cpu":
        return float(cluster.num_hosts > 1), 1.0
    return 20 / 132, 20 / 132


def arrivals(
    rates: Rates, problem: Problem, trainer: FunctionCall, home: ContiguousLayout,
    copies: Sequence[tuple[FunctionCall, ContiguousLayout | None]],
) -> tuple[float, ...]:
    """Return for each copy of trained weights how long after training it is complete.

    A rank makes its copies one after the other. If replicas share the optimizer, a copy costs nothing where
    ranks already have all of it from an earlier copy (runtime/compile/actions.py). Otherwise each replica has
    updated all weights, and the home is complete at once. For example, with copies that take 2 s, 3 s and
    again the first layout, the times are 2, 5 and 2 s.

    A layout that is None is not decided: that copy and later ones count 0 seconds, less than they take.
    """
    role = problem.model_role(trainer)
    complete_at: dict[tuple[str | None, ContiguousLayout], float] = {}
    is_sharded = home.strategy.num_replicas > 1
    if not is_sharded:
        complete_at[trainer.role, home] = 0.0
    elapsed = 0.0
    times: list[float] = []
    for call, layout in copies:
        if layout is None:
            break
        if (call.role, layout) not in complete_at:
            earlier = [held for name, held in complete_at if name == call.role] if is_sharded else []
            if not any(covers(_moved(role), held, layout) for held in earlier):
                elapsed += reallocation_seconds(rates, role, home, layout)
            complete_at[call.role, layout] = elapsed
        times.append(complete_at[call.role, layout])
    return (*times, *[0.0] * (len(copies) - len(times)))


def reallocation_seconds(
    rates: Rates, role: ModelRole, source: ContiguousLayout, target: ContiguousLayout
) -> float:
    """Return the seconds to move the trained parameters of a role from where it trains to another layout."""
    cluster = rates.cluster
    first = min(source.ranks[0], target.ranks[0])
    last = max(source.ranks[-1], target.ranks[-1])
    leaf = cluster.devices_per_host * (cluster.hosts_per_leaf or cluster.num_hosts)
    slowdown = 1.0 if first // leaf == last // leaf else cluster.slowdown(cluster.num_hosts)
    rates = rates.at((first, last))
    links = Links.of_cluster(rates.cluster)
    links = replace(links, nic=links.nic / slowdown, host=links.host / slowdown)
    movement = estimate_movement(
        links, _moved(role), source, target, itemsize=role.itemsize,
        sharded=source.strategy.num_replicas > 1)
    return movement.seconds / rates.efficiencies.link + movement.num_waves * links.latency_seconds


def _moved(role: ModelRole) -> MovedModel:
    """Return the parameters that training changes."""
    return MovedModel(role.config, role.lora, role.trained_spec.section_numel)


def moving_seconds(
    rates: Rates, problem: Problem, needs: Dependencies, layouts: Mapping[int, ContiguousLayout]
) -> np.ndarray:
    """Return the seconds from the end of training until each copy of the weights is complete in one plan,
    shape (1, number of `needs.weights`); `layouts` are those of calls by their position."""
    moving = np.zeros((1, len(needs.weights)))
    for trainer, numbers in needs.copies.items():
        users = [needs.weights[number][0] for number in numbers]
        copies = [(problem.calls[user], layouts[user]) for user in users]
        moving[0, numbers] = arrivals(rates, problem, problem.calls[trainer], layouts[trainer], copies)
    return moving


def host_anchor(problem: Problem, call: FunctionCall) -> tuple[str | None, bool]:
    """Return the model call on whose result ranks a plain Python call runs, and whether it is split over
    them.

    A call that can be split runs with the call that makes its inputs. Any other runs with the call that reads
    its outputs. If there is no such model call, the name is None and it runs on rank 0. If some calls run
    ahead, the others do not run with one of them, but with a call that trains a role.
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
