"""Lagged steps: the period against ranks that execute their traces, the search against all plans, and the
rows of a round against drawn lengths."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from realhf.cluster import Cluster, Link
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.experiment import lagged_parts
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.kv_blocks import block_size, blocks_for
from realhf.models.model_config import ModelConfig
from realhf.planner.call_cost import call_cost
from realhf.planner.efficiencies import Efficiencies
from realhf.planner.lengths import geometric
from realhf.planner.make import simulate
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Rates
from realhf.planner.search import search
from realhf.planner.search_space import SearchSpace
from realhf.planner.step_time import predict
from tests.planner.problems import peak_memory, random_lagged_problem, ranks_and_seconds
from tests.planner.test_search import agrees
from tests.samples import drawn

NUM_STEPS = 150
ALL_CYCLES = 60  # A multiple of the length of any pattern of up to six steps.


class Trace:
    """Ranks that execute a plan's actions one after the other, each in the order of the step.

    Batch b begins in step b, goes through `rounds` rounds and is trained on in step b + lag. Weights move
    from a trainer to a user in the background once all ranks of both have come to this action.
    """

    def __init__(self, space, chosen, *, lag, rounds):
        self.space, self.lag, self.rounds = space, lag, rounds
        self.calls = {call.name: i for i, call in enumerate(space.calls)}
        self.placed = ranks_and_seconds(space, chosen)
        self.moves = {}  # trainer -> {user: seconds}
        self.sends, self.receives = {}, {}  # (trainer, rank) and user -> seconds without computing
        sending, receiving = space.needs.busy_shares
        for (user, trainer, *_), seconds in zip(
            space.needs.weights, space.moving(np.array([chosen]))[0], strict=True
        ):
            alone = max(0.0, seconds - max(self.moves.get(trainer, {}).values(), default=0.0))
            self.receives[user] = self.receives.get(user, 0.0) + receiving * alone
            for rank in {*self.placed[trainer][0]} - {*self.placed[user][0]}:
                self.sends[trainer, rank] = self.sends.get((trainer, rank), 0.0) + sending * alone
            if seconds > 0:
                self.moves.setdefault(trainer, {})[user] = seconds
        self.rollout = {self.calls[name] for name in lagged_parts(space.problem.graph)["rollout"]}
        self.clock = dict.fromkeys(range(space.problem.cluster.num_devices), 0.0)
        self.ended = self.clock.copy()  # When the last call of a rank ended.
        self.ends = {}  # (call, step) -> seconds
        self.arrived = {}  # call -> when its weights, as far as they move, are those of the last update
        self.left = {}  # trainer -> when its weights have been sent

    def run(self):
        """Return when each step ends."""
        finished = []
        for step in range(NUM_STEPS):
            for i in range(len(self.calls)):
                self._call(i, step)
            finished.append(max(self.clock.values()))
        return finished

    def _call(self, i, step):
        ranks, seconds = self.placed[i]
        start = max([self.clock[rank] for rank in ranks]) + self.receives.get(i, 0.0)
        for j, made_in, delay in self._inputs(i, step):
            start = max(start, self.ends.get((j, made_in), 0.0) + delay)
        start += self._receiving(i)
        start = max(start, self.arrived.get(i, 0.0), self.left.get(i, 0.0))
        self.ends[i, step] = start + seconds
        self.ended |= dict.fromkeys(ranks, start + seconds)
        self.clock |= {rank: start + seconds + self.sends.get((i, rank), 0.0) for rank in ranks}
        for user, amount in self.moves.get(i, {}).items():
            there = start + seconds
            if self.rounds == self.lag:  # The user's ranks come here after their earlier calls of this step.
                there = max(there, *(self.ended[rank] for rank in self.placed[user][0]))
                self.left[i] = max(self.left.get(i, 0.0), there + amount)
            self.arrived[user] = max(self.arrived.get(user, 0.0), there + amount)

    def _inputs(self, i, step):
        """Yield (producer, step in which it made what call i reads in this step, seconds on the way)."""
        call = self.space.calls[i]
        works_on = step if i in self.rollout else step - self.lag
        for key in call.inputs:
            if (producer := self.space.problem.graph.producer(key)) is None:
                continue
            j = self.calls[producer.name]
            made_in = step
            if j in self.rollout and i not in self.rollout:  # In the last round of this batch.
                made_in = works_on + self.rounds - 1
            work = self.space.problem.workloads[call.name]
            yield j, made_in, self._sending(work.num_samples * work.tokens)
        if call.kind == "generate" and self.rounds > 1:
            work = self.space.problem.workloads[call.name]
            alive = work.survival
            budget = math.ceil(work.max_new_tokens / self.rounds)
            unfinished = work.num_samples * alive[budget::budget].sum()
            yield i, step - 1, self._sending(unfinished * work.tokens)

    def _receiving(self, i):
        call = self.space.calls[i]
        work = self.space.problem.workloads[call.name]
        made = [key for key in call.inputs if self.space.problem.graph.producer(key) is not None]
        return self._sending(work.num_samples * work.tokens) if made else 0.0

    def _sending(self, num_tokens):
        return self.space.rates.samples(num_tokens * 40)


def lags(rng):
    """Return a lag and a legal number of rounds."""
    lag = rng.randint(1, 3)
    return lag, rng.choice([lag, lag + 1])


@pytest.mark.parametrize("seed", drawn(range(60), 6))
def test_period_is_what_ranks_need_that_execute_their_traces(seed):
    rng = random.Random(seed)
    lag, rounds = lags(rng)
    problem = random_lagged_problem(rng, num_calls=rng.randint(2, 6), lag=lag, rounds=rounds)
    space = SearchSpace(problem, Rates(problem.cluster))
    for _ in range(5):
        chosen = [rng.randrange(len(group.candidates)) for group in space.groups]
        finished = Trace(space, chosen, lag=lag, rounds=rounds).run()
        walked = (finished[-1] - finished[-1 - ALL_CYCLES]) / ALL_CYCLES
        period = space.exact_periods(np.array([chosen]))[0]
        assert walked == pytest.approx(period, rel=1e-9)
        assert space.periods(np.array([chosen]), exact=False)[0] <= period * (1 + 1e-12)


@pytest.mark.parametrize(
    ("num_seeds", "least"), [(12, 1), pytest.param(300, 30, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_lagged_search_finds_the_best_of_all_plans(num_seeds, least):
    solved = []
    for seed in range(num_seeds):
        rng = random.Random(seed)
        lag, rounds = lags(rng)
        memory = 1.56e9 + 10 ** rng.uniform(6.5, 8.3)  # 1.56e9 bytes are set aside.
        problem = random_lagged_problem(
            rng, num_calls=rng.randint(2, 4), lag=lag, rounds=rounds, memory=memory)
        space = SearchSpace(problem, Rates(problem.cluster))
        if 0 < math.prod(len(group.candidates) for group in space.groups) <= 20_000:
            solved.append(agrees(seed, space))
    assert sum(solved) >= least and not all(solved)


@pytest.mark.parametrize("seed", drawn(range(6), 1))
@pytest.mark.slow
def test_lagged_bounds_hold_however_early_the_search_stops(seed):
    rng = random.Random(seed)
    problem = random_lagged_problem(rng, num_calls=5, lag=1, rounds=1)
    space = SearchSpace(problem, Rates(problem.cluster))
    whole = search(space, time_limit=30.0)
    for max_iterations in (0, 1, 3):
        early = search(space, time_limit=30.0, max_iterations=max_iterations)
        assert early.lower_bound_seconds <= whole.step_seconds * (1 + 1e-9) <= early.step_seconds * (1 + 2e-9)


@pytest.mark.parametrize("seed", range(10))
def test_simulated_devices_do_one_thing_at_a_time(seed):
    """Also, weights move to a mesh when no earlier call runs there."""
    rng = random.Random(seed)
    problem = random_lagged_problem(rng, num_calls=rng.randint(3, 6), lag=1, rounds=1)
    rates = Rates(problem.cluster)
    space = SearchSpace(problem, rates)
    plan = ExecutionPlan(space.call_plans([rng.randrange(len(group.candidates)) for group in space.groups]))
    simulation = simulate(problem, rates, plan, predict(problem, rates, plan).calls)
    period = simulation.step_seconds
    for rank in range(problem.cluster.num_devices):
        here = [a for a in simulation.timeline
                if a.kind != "realloc" and a.first_rank <= rank < a.first_rank + a.num_ranks]
        busy = sorted((a.start, a.end) for a in here)
        for (_, end), (start, _) in zip(busy, busy[1:], strict=False):
            assert start >= end - 1e-9 * period
        if busy:
            assert busy[-1][1] <= busy[0][0] + period * (1 + 1e-9)
    calls = {a.name: a for a in simulation.timeline if a.kind != "realloc"}
    for move in (a for a in simulation.timeline if a.kind == "realloc"):
        user = calls[move.name.split(" for ")[1]]
        during = [user.start + n * period < move.end * (1 - 1e-9) and user.end + n * period > move.start * (
            1 + 1e-9) for n in (-2, -1, 0, 1, 2)]
        in_step = problem.run_order.index(user.name) < min(
            problem.run_order.index(c.name) for c in problem.graph.of_kind("train_step"))
        assert not in_step or not any(during), (move, user, period)


@pytest.mark.parametrize(
    ("mean", "limit", "rounds"), [(30.0, 100, 2), (50.0, 60, 3), (64.0, 64, 4), (5.0, 7, 3)]
)
def test_rows_of_a_round_are_those_of_drawn_lengths(mean, limit, rounds):
    rng = np.random.default_rng(0)
    work = Workload(prompt_tokens=10, response_tokens=mean, max_new_tokens=limit, rounds=rounds)
    num, budget = 200_000, math.ceil(limit / rounds)
    lengths = (rng.random((num, 1)) < geometric(mean, limit).survival[None]).sum(axis=1)
    had = np.concatenate([np.full((lengths > age * budget).sum(), age * budget) for age in range(rounds)])
    gets = np.concatenate(
        [np.minimum(lengths[lengths > age * budget] - age * budget, budget) for age in range(rounds)])
    assert work.round_tokens == budget and work.num_ages == math.ceil(limit / budget)
    assert work.round.num_rows == pytest.approx(len(had) / num, rel=1e-2)
    for tick in range(1, budget + 1):
        running = gets >= tick
        assert work.round.survival[tick - 1] == pytest.approx(running.mean(), rel=5e-2)
        assert work.round.history[tick - 1] == pytest.approx(had[running].mean(), rel=5e-2)
    tokens = work.round.survival.sum() * work.round.num_rows
    assert tokens == pytest.approx(mean)  # As many tokens per step as without rounds.


def test_a_cache_holds_the_rows_of_all_ages():
    """The rows with the longest histories fill the slots, as the engine's own count of blocks says."""
    config = ModelConfig("llama", 1000, 256, 768, 2, 4, 2, 64)
    role = ModelRole(config, "float32")
    token_bytes = 2 * 2 * 64 * 4 * 2  # Keys and values, heads, head dim, bytes, layers.
    for rows in (4, 8, 20, 24, 500):
        work = Workload(8, 200, 400, 600, max_rows=rows, rounds=3)
        sizes = [(200 + age * 200, 1) for age in range(3) for _ in range(8)]
        size = block_size(sizes, max_new_tokens=200)
        blocks = blocks_for(sizes, size=size, num_slots=min(rows, 24), max_new_tokens=200)
        memory = peak_memory(
            role, "generate", work, Layout.parse("d1@0").strategy, 0, micro_batch_tokens=1)
        assert memory.kv_cache == blocks * size * token_bytes, rows


def test_one_round_is_no_round():
    for work in (Workload(8, 100, 30, 90), Workload(8, 100, 90, 90), Workload(8, 100, 0, 0)):
        assert (work.round.survival == work.survival).all() and not work.round.history.any()
        assert work.round.num_rows == 1 and work.num_ages == 1
        assert work.round == replace(work, rounds=1).round


def test_a_round_prefills_new_prompts_and_the_histories_of_old_rows():
    """On a device with nothing but FLOPs, where all responses reach the limit."""
    cluster = Cluster(1, 1, 80e9, 1e12, 1e30, {"bfloat16": 1e15}, Link(1e-30, 1e30), Link(1e-30, 1e30))
    perfect = Efficiencies()
    config = ModelConfig.load("llama-7b")
    role = ModelRole(config)
    call = FunctionCall("call", "generate", ("x",), ("y",), role="actor")
    layers = config.num_layers * (4 * 4096**2 + 3 * 4096 * config.intermediate_size)
    costs = {}
    for rounds in (1, 2, 4):
        work = Workload(64, 100, 800, 800, rounds=rounds, max_rows=16)
        plan = CallPlan(Layout.parse("d1@0"))
        cost = call_cost(Rates(cluster, perfect), call, role, work, plan, per_host=1)
        costs[rounds] = cost.seconds_by_cause
        lengths = [100 + age * 800 // rounds for age in range(rounds)]
        flops = 64 * sum(2 * length * layers + 2 * length**2 * 4096 * config.num_layers for length in lengths)
        assert costs[rounds]["prefill"] == pytest.approx(flops / 1e15, rel=1e-6)
        # Every sample gets its tokens once in its life, whatever the rounds.
        assert costs[rounds]["decode"] == pytest.approx(costs[1]["decode"], rel=1e-6)


def test_rounds_leave_out_the_long_tail_of_a_batch():
    """Few rows decode slowly; with rounds, rows of other batches run beside the longest ones."""
    rates, role = Rates(Cluster.load("h100-1x8")), ModelRole(ModelConfig.load("llama-7b"))
    call = FunctionCall("call", "generate", ("x",), ("y",), role="actor")
    seconds = [
        call_cost(rates, call, role, Workload(64, 100, 500, 8000, rounds=rounds),
                  CallPlan(Layout.parse("d1@0")), per_host=8).seconds
        for rounds in (1, 16)
    ]
    assert seconds[1] < 0.6 * seconds[0]
