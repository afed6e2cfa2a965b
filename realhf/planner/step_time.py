"""Seconds of a step in the steady state, which are called the period: of many plans, or of a given one.

Ranks run their calls in one order, step after step without a barrier. A call starts when its ranks are free
and its inputs and weights have arrived. Such a system is linear in the max-plus algebra: its period is the
largest mean weight of a cycle of constraints, that is weight over the number of steps that the cycle spans
(Baccelli et al. 1992).

Shapes: K plans, N calls in the order in which ranks run them. A constraint `wait[i, j, k]` says that in plan
k call i starts at least that many seconds after call j starts; -inf means no constraint. Plans are the last
axis, so that operations on all of them read contiguous memory.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from realhf.calls import HostFunction
from realhf.cluster import Cluster
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.planner.call_cost import CallCost, call_cost
from realhf.planner.call_memory import top_bytes
from realhf.planner.links import ContiguousLayout, ranks_per_host
from realhf.planner.memory_account import with_caches
from realhf.planner.problem import Problem, Workload
from realhf.planner.rates import Rates
from realhf.planner.reallocation import arrivals
from realhf.planner.shared_cores import SharedCores
from realhf.planner.slices import AnswerPlace, QuestionSeconds

NEVER = -np.inf
MOVED_BYTES_PER_TOKEN = 40  # Of samples between calls: ids and a few float columns.
_RANK_0 = Layout.parse("d1@0")


# What calls wait for


class TrainedCopy(NamedTuple):
    """The weights of `role` that the call `user` uses, its own or those of a role that it reads.

    The call `trainer` trains that role, or the one that it follows, in the same step (lag 0) or the one
    before (lag 1).
    """

    user: int
    trainer: int
    lag: int
    role: str


@dataclass(frozen=True)
class Dependencies:
    """The outputs and weights that calls wait for.

    `data[i, j]` are the seconds from the end of call j until its outputs reach call i of the same step, -inf
    where i reads nothing of j; `late_data` is the same for outputs that call i reads in the next step.
    `weights` has the copies of one trainer next to each other, in the order in which they are made.
    `receiving[i]` are the seconds in which the ranks of call i exchange its inputs before it starts.

    With `in_place`, the weights of the step before replace those with which other calls may still run. So
    they move only when the calls before call j that share ranks with call i have ended, and call j waits
    until they have moved. Without it, calls wait for each other's outputs anyway.
    """

    data: np.ndarray
    late_data: np.ndarray
    weights: tuple[TrainedCopy, ...]
    receiving: np.ndarray
    busy_shares: tuple[float, float] = (0.0, 0.0)
    """The shares of a reallocation's seconds in which a rank that only sends, or one that receives, computes
    nothing."""
    in_place: bool = False

    @property
    def copies(self) -> dict[int, list[int]]:
        """Return trainer -> the numbers of the `weights` that it trains, in the order of their copies."""
        copies: dict[int, list[int]] = {}
        for number, copy in enumerate(self.weights):
            copies.setdefault(copy.trainer, []).append(number)
        return copies

    def durations(self, moving: np.ndarray) -> np.ndarray:
        """Return how long each reallocation takes by itself, as copies of one trainer are made in turn."""
        durations = np.zeros_like(moving)
        for numbers in self.copies.values():
            arrived = np.maximum.accumulate(moving[:, numbers], axis=1)
            durations[:, numbers] = np.diff(arrived, axis=1, prepend=0.0)
        return durations

    def busy(self, moving: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the seconds that reallocations take from ranks between two calls that share them.

        Calls run on ranks from `first` to `stop` (K, N). In the result (K, N, N), call i comes after call j.
        A rank that only sends does so directly after the trainer; one that receives does so before the user.
        """
        sending, receiving = (share * self.durations(moving) for share in self.busy_shares)
        num_plans, num_calls = first.shape
        busy = np.zeros((num_calls, num_calls, num_plans)).transpose(2, 0, 1)  # Plans are last in memory.
        for number, (user, *_) in enumerate(self.weights):
            busy[:, user] += receiving[:, number, None]
        for j, numbers in self.copies.items():
            users = [self.weights[number].user for number in numbers]
            low = np.maximum(first, first[:, j, None])
            high = np.minimum(stop, stop[:, j, None])
            most = np.zeros(low.shape)
            # A rank that sends most is the first shared one, or the one where some target stops.
            for rank in (low, *(np.broadcast_to(stop[:, user, None], low.shape) for user in users)):
                sent = np.zeros(low.shape)
                for number, user in zip(numbers, users, strict=True):
                    outside = (rank < first[:, user, None]) | (rank >= stop[:, user, None])
                    sent += np.where(outside, sending[:, number, None], 0.0)
                most = np.maximum(most, np.where((low <= rank) & (rank < high), sent, 0.0))
            busy[:, :, j] += most
        return busy


def dependencies(problem: Problem, rates: Rates) -> Dependencies:
    """Return the dependencies among the calls, in the order in which ranks run them."""
    calls = problem.calls
    index = {call.name: i for i, call in enumerate(calls)}
    data, late_data = (np.full((len(calls), len(calls)), NEVER) for _ in range(2))
    receiving = np.zeros(len(calls))
    for i, call in enumerate(calls):
        work = problem.workloads[call.name]
        token_bytes = MOVED_BYTES_PER_TOKEN + (top_bytes(work) if call.kind == "train_step" else 0)
        num_bytes = work.num_samples * work.tokens * token_bytes
        for producer in filter(None, map(problem.graph.producer, call.inputs)):
            j = index[producer.name]
            is_late = producer.name in problem.ahead and call.name not in problem.ahead
            (late_data if is_late else data)[i, j] = rates.sending(num_bytes)
            receiving[i] = rates.samples(num_bytes)  # All at once: some ranks get them, and deal them out.
        if call.kind == "generate" and work.rounds > 1:
            num_tokens = work.num_samples * float(work.round.ages[1:].sum()) * work.tokens
            late_data[i, i] = rates.samples(num_tokens * MOVED_BYTES_PER_TOKEN)
    weights = []
    for trainer, call in enumerate(calls):
        if call.kind == "train_step":
            weights += [
                TrainedCopy(user, trainer, 0 if trainer < user else 1, role)
                for user, role in _users(problem, trainer)]
    return Dependencies(
        data, late_data, tuple(weights), receiving, busy_shares(rates.cluster), in_place=bool(problem.ahead))


def _users(problem: Problem, trainer: int) -> list[tuple[int, str]]:
    """Return the calls that use what a call trains, each with the role whose weights it uses: its own one, or
    one that it reads. The role's next train step is last.

    That step needs the weights at home: where replicas share the optimizer, each has updated only a shard.
    """
    role = problem.calls[trainer].role
    assert role is not None
    users = []
    trainers = []
    for i, call in enumerate(problem.calls):
        if call.kind == "train_step" and call.role == role:
            trainers.append(i)
        used = call.roles if call.kind != "train_step" else call.reads
        users += [(i, name) for name in used if role in (name, problem.roles[name].follows)]
    next_trainer = trainers[(trainers.index(trainer) + 1) % len(trainers)]
    return [*users, (next_trainer, role)]


def busy_shares(cluster: Cluster) -> tuple[float, float]:
    """Return the shares of a reallocation's seconds in which a sending and a receiving rank compute nothing.

    A GPU gives some of its multiprocessors to communication: 20 of 132 in DeepSeek-V3's training
    (arXiv:2412.19437, section 3.2.2). On CPU the receiver copies from the sender's memory with the cores that
    would compute; between hosts the sender packs and sends with its cores, too.
    """
    if cluster.device_type == "cpu":
        return float(cluster.num_hosts > 1), 1.0
    return 20 / 132, 20 / 132


def moving_seconds(
    rates: Rates, problem: Problem, needs: Dependencies, layouts: Mapping[int, ContiguousLayout]
) -> np.ndarray:
    """Return the seconds from the end of training until each copy of the weights is complete in one plan,
    shape (1, number of `needs.weights`); `layouts` are those of calls by their position."""
    moving = np.zeros((1, len(needs.weights)))
    for trainer, numbers in needs.copies.items():
        copies = [
            (problem.used_role(problem.calls[user], role), layouts[user])
            for user, _, _, role in (needs.weights[number] for number in numbers)]
        moving[0, numbers] = arrivals(rates, problem, problem.calls[trainer], layouts[trainer], copies)
    return moving


def host_seconds(problem: Problem, rates: Rates, plan: ExecutionPlan, call: FunctionCall) -> float:
    """Return the seconds of a call in plain Python, with those of its questions and their answers.

    Its environments take turns as `planner.slices` says, if a run has measured them. Otherwise questions
    to other ranks add the time of their messages: a ring has so many of them under way at a time.
    """
    workload = problem.workloads[call.name]
    if call.name not in plan.calls:
        return workload.seconds_on(1)
    num_ranks = plan[call.name].layout.dp
    places = _places(problem, rates, plan, call)
    if workload.slices is not None and places:
        slices = plan[call.name].ring or workload.slices.num_slices
        return workload.slices.seconds(slices, places, cores=problem.cluster.cores_per_host)
    far = [place.messages for place in places if place.messages is not None]
    message = max((sum(messages) for messages in far), default=0.0)
    of_questions = workload.questions / num_ranks * message / (plan[call.name].ring or 1)
    return workload.seconds_on(num_ranks) + of_questions


def _places(problem: Problem, rates: Rates, plan: ExecutionPlan, call: FunctionCall) -> list[AnswerPlace]:
    """Return where each rank of a call that asks is answered; nothing if it asks none that the plan has.

    If several calls are asked, all questions count as those to the farthest.
    """
    asks = call.work.asks if isinstance(call.work, HostFunction) else ()
    workload = problem.workloads[call.name]
    askers = plan[call.name].layout.ranks
    per_host = problem.cluster.devices_per_host
    places: list[AnswerPlace] = []
    for name in (name for name in asks if name in plan.calls):
        answering = plan[name].layout.ranks
        of_rank = [rank if rank in answering else answering[i % len(answering)]
                   for i, rank in enumerate(askers)]
        found = []
        for rank, other in zip(askers, of_rank, strict=True):
            within_host = rank // per_host == other // per_host
            messages = None
            if rank != other:
                latency = 2 * rates.send(workload.question_bytes / 2, within_host=within_host)
                messages = QuestionSeconds(*_handling(workload, rates), latency)
            others = sum(far == rank != asker for asker, far in zip(askers, of_rank, strict=True))
            found.append(AnswerPlace(messages, of_rank.count(other), others, within_host))
        places = max(found, places, key=lambda one: sum(place.messages is not None for place in one))
    return places


def _handling(workload: Workload, rates: Rates) -> tuple[float, float]:
    """Return the seconds in which the process that asks handles the messages of a question, and that which
    answers: as measured, or else as estimated."""
    if workload.slices is not None and workload.slices.messages is not None:
        return workload.slices.messages.asking, workload.slices.messages.answering
    return (rates.efficiencies.question_seconds,) * 2


def host_anchor(problem: Problem, call: FunctionCall) -> tuple[str | None, bool]:
    """Return the model call on whose result ranks a plain Python call runs, and whether it is split over
    them.

    A call that asks another runs with that one, so that no question is a message; it is not split, as its
    function may need certain rows together. A call that can be split runs with the call that makes its
    inputs. Any other runs with the call that reads its outputs. If there is no such model call, the name is
    None and it runs on rank 0. If some calls run ahead, the others do not run with one of them, but with a
    call that trains a role.
    """
    graph = problem.graph
    if isinstance(call.work, HostFunction) and call.work.asks:
        return call.work.asks[0], False
    is_ahead = call.name in problem.ahead
    model_calls = [c for c in graph.order if c.role is not None and (c.name in problem.ahead) == is_ahead]
    producers = filter(None, map(graph.producer, call.inputs))
    before = [producer.name for producer in producers if producer in model_calls]
    after = [c.name for c in model_calls if set(c.inputs) & set(call.outputs)]
    if problem.ahead and not is_ahead:
        after += [c.name for c in model_calls if c.kind == "train_step"]
    is_split = isinstance(call.work, HostFunction) and call.work.splittable and bool(before or problem.ahead)
    anchors = [*before, *after] if is_split else [*after, *before]
    return next(iter(anchors), None), is_split


# Periods of many plans


class CallTimes(NamedTuple):
    """The seconds, the first rank and the stop rank of every call, each of shape (K, N)."""

    seconds: np.ndarray
    first: np.ndarray
    stop: np.ndarray


def periods(
    needs: Dependencies, seconds: np.ndarray, shares: np.ndarray,
    *, moving: np.ndarray | None = None, busy: np.ndarray | None = None, exact: bool = True,
) -> np.ndarray:
    """Return the periods of K plans, shape (K,).

    `seconds` (K, N) are those of calls, `shares` (K, N, N) tells whether two calls have a device in common,
    and `moving` (K, number of `needs.weights`) are the seconds from the end of training until weights have
    arrived; `busy` is that of `Dependencies.busy`. Without `exact` the result is a lower bound from cycles of
    at most two steps.
    """
    step = _one_step(*_waits(needs, seconds, shares, moving, busy))
    diagonal = np.arange(len(needs.data))
    best = step[diagonal, diagonal].max(axis=0)
    for i in range(1, len(step)):  # There and back again.
        best = np.maximum(best, (step[i, :i] + step[:i, i]).max(axis=0) / 2)
    power = step
    for length in range(2, len(needs.data) + 1 if exact else 0):
        power = _product(power, step)
        best = np.maximum(best, power[diagonal, diagonal].max(axis=0) / length)
    return np.maximum(best, 0.0)


def one_step_periods(needs: Dependencies, seconds: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return lower bounds of the periods, from cycles of one step without reallocations."""
    same, before = _waits(needs, seconds, shares, None, None)
    closure = _closure(same)
    bounds = np.zeros(len(seconds))
    for i in range(len(same)):
        np.maximum(bounds, (closure[i, : i + 1] + before[: i + 1, i]).max(axis=0), out=bounds)
    return bounds


def step_periods(
    cluster: Cluster, needs: Dependencies, seconds: np.ndarray, first: np.ndarray, stop: np.ndarray,
    *, moving: np.ndarray | None = None, exact: bool = True,
) -> np.ndarray:
    """Return the periods of plans whose calls run on ranks from `first` to `stop`, shape (K, N) each.

    Reallocations take time from ranks (`Dependencies.busy`), and devices may share cores.
    """
    busy = None if moving is None else needs.busy(moving, first, stop)
    period = periods(needs, seconds, have_common_ranks(first, stop), moving=moving, busy=busy, exact=exact)
    return np.maximum(period, SharedCores(cluster).busiest_host(seconds, first, stop))


def have_common_ranks(first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return whether two calls have a device in common, for each plan; shape (K, N, N).

    Plans are the last axis in memory, as in `_waits`.
    """
    low = np.ascontiguousarray(first.T)
    high = np.ascontiguousarray(stop.T)
    shares = low[:, None] < high
    shares &= low < high[:, None]
    return shares.transpose(2, 0, 1)


def first_starts(
    needs: Dependencies, seconds: np.ndarray, shares: np.ndarray, moving: np.ndarray, busy: np.ndarray,
    *, num_steps: int,
) -> np.ndarray:
    """Return when each call starts in the first `num_steps` steps of one plan, shape (num_steps, N)."""
    same, before = _waits(needs, seconds[None], shares[None], moving[None], busy[None])
    step = _one_step(same, before)[..., 0]
    closure = _closure(same)[..., 0]
    starts = [np.maximum(closure.max(axis=1), 0.0)]
    for _ in range(num_steps - 1):
        starts.append((step + starts[-1]).max(axis=1))
    return np.array(starts)


def _waits(
    needs: Dependencies, seconds: np.ndarray, shares: np.ndarray, moving: np.ndarray | None,
    busy: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the constraints between calls of one step, and those from the step before, (N, N, K) each."""
    num = len(needs.data)
    call_seconds = np.ascontiguousarray(seconds.T)  # (N, K)
    same, before = (np.full((num, num, len(seconds)), NEVER) for _ in range(2))
    shared = np.ascontiguousarray(shares.transpose(1, 2, 0))
    for i in range(num):
        for j in range(i + 1):
            only_shared = np.where(shared[i, j], 0.0, NEVER)
            for user, maker in {(i, j), (j, i)}:
                matrix = same if maker < user else before
                np.add(only_shared, call_seconds[maker] + needs.receiving[user], out=matrix[user, maker])
                if busy is not None:
                    matrix[user, maker] += busy[:, user, maker]
    for i, j in np.argwhere(np.isfinite(needs.data)).tolist():
        np.maximum(same[i, j], call_seconds[j] + (needs.receiving[i] + needs.data[i, j]), out=same[i, j])
    for i, j in np.argwhere(np.isfinite(needs.late_data)).tolist():
        arrived = call_seconds[j] + (needs.receiving[i] + needs.late_data[i, j])
        np.maximum(before[i, j], arrived, out=before[i, j])
    for number, (i, j, lag, _) in enumerate(needs.weights):
        seconds_moving = 0.0 if moving is None else moving[:, number]
        matrix = before if lag else same
        np.maximum(matrix[i, j], call_seconds[j] + seconds_moving, out=matrix[i, j])
        if lag and needs.in_place:
            np.maximum(before[j, j], call_seconds[j] + seconds_moving, out=before[j, j])
            for other in range(j):
                wait = np.where(shared[i, other], call_seconds[other] + seconds_moving, NEVER)
                np.maximum(before[i, other], wait, out=before[i, other])
                np.maximum(before[j, other], wait, out=before[j, other])
    return same, before


def _closure(same: np.ndarray) -> np.ndarray:
    """Return the longest waits along chains inside a step; calls wait only for earlier ones."""
    closure = np.full_like(same, NEVER)
    for i in range(len(same)):
        closure[i, i] = 0.0
        for j in range(i):
            reached = closure[i, : j + 1]
            np.maximum(reached, same[i, j] + closure[j, : j + 1], out=reached)
    return closure


def _one_step(same: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the longest wait, along all chains, between each call of a step and each of the step before."""
    step = before.copy()
    for i in range(len(step)):
        for j in range(i):
            np.maximum(step[i], same[i, j] + step[j], out=step[i])
    return step


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return max-plus matrix products."""
    out = a[:, 0, None] + b[None, 0]
    for k in range(1, a.shape[1]):
        np.maximum(out, a[:, k, None] + b[None, k], out=out)
    return out


# One given plan


@dataclass(frozen=True)
class Prediction:
    """Seconds of a step in the steady state, and the cost of each call alone."""

    step_seconds: float
    calls: Mapping[str, CallCost]


def predict(problem: Problem, rates: Rates, plan: ExecutionPlan) -> Prediction:
    """Return the prediction for a plan whose layouts are on contiguous ranks.

    If neither it nor the user says how many rows a generation has, they are those that its memory holds.
    """
    plan = with_caches(problem, plan)
    costs = {
        call.name: cost_of(problem, rates, call, plan[call.name], plan[call.name].layout.ranks)
        for call in problem.model_calls}
    alone = {name: cost.seconds for name, cost in costs.items()}
    return Prediction(step_seconds(problem, rates, plan, alone), costs)


def cost_of(
    problem: Problem, rates: Rates, call: FunctionCall, call_plan: CallPlan, ranks: Collection[int]
) -> CallCost:
    """Return the cost of a call alone on some ranks."""
    return call_cost(
        rates.at(ranks), call, problem.model_role(call), problem.workloads[call.name], call_plan,
        per_host=ranks_per_host(problem.cluster, ranks))


def step_seconds(
    problem: Problem, rates: Rates, plan: ExecutionPlan, call_seconds: Mapping[str, float]
) -> float:
    """Return the seconds of a step in the steady state if calls take `call_seconds`."""
    needs = dependencies(problem, rates)
    times = times_of_plan(problem, rates, plan, call_seconds)
    moving = moving_seconds(rates, problem, needs, contiguous_layouts(problem, plan))
    return float(step_periods(problem.cluster, needs, *times, moving=moving)[0])


def contiguous_layouts(problem: Problem, plan: ExecutionPlan) -> dict[int, ContiguousLayout]:
    """Return the layouts of a plan's calls on models by the positions of these calls."""
    layouts = {i: plan[call.name].layout for i, call in enumerate(problem.calls) if call.role is not None}
    return {i: ContiguousLayout(layout.strategy, layout.ranks[0]) for i, layout in layouts.items()}


def times_of_plan(
    problem: Problem, rates: Rates, plan: ExecutionPlan, call_seconds: Mapping[str, float]
) -> CallTimes:
    """Return the times and ranks of every call in one plan.

    Calls in plain Python take what `host_seconds` says, unless they are among `call_seconds`. Those that the
    plan leaves out run on rank 0, as in a run.
    """
    layouts = [plan[call.name].layout if call.name in plan.calls else _RANK_0 for call in problem.calls]
    taken = {c.name: host_seconds(problem, rates, plan, c) for c in problem.calls if c.role is None}
    taken |= call_seconds
    for call in problem.calls:  # Another rank answers as long as the call runs.
        for asked in call.work.asks if isinstance(call.work, HostFunction) else ():
            if {call.name, asked} <= plan.calls.keys() and problem.workloads[call.name].slices is not None:
                is_far = not set(plan[asked].layout.ranks) & set(plan[call.name].layout.ranks)
                taken[asked] = max(taken[asked], taken[call.name] if is_far else 0.0)
    seconds = [taken[call.name] for call in problem.calls]
    first = [min(layout.ranks) for layout in layouts]
    stop = [max(layout.ranks) + 1 for layout in layouts]
    return CallTimes(np.array([seconds]), np.array([first]), np.array([stop]))
