"""Rows of a generation: those that a cache holds, their times, and plans that choose their number."""

import random
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.planner import best_edit
from realhf.calls import Generate
from realhf.cluster import Cluster
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.inference.kv_cache import BlockTables
from realhf.inference.scheduler import Prompt, Scheduler
from realhf.layout import Layout, ParallelStrategy
from realhf.models.kv_blocks import num_blocks
from realhf.models.model_config import ModelConfig
from realhf.planner.call_cost import call_cost
from realhf.planner.lengths import Lengths, geometric, long_tail
from realhf.planner.make import make_plan
from realhf.planner.memory_account import check_memory
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.rates import Rates
from realhf.planner.rows import GIB, RankRows
from realhf.planner.slowest_replica import Rollout, decode_steps, peak_context
from realhf.planner.step_time import predict

ROLE = ModelRole(ModelConfig.load("qwen2.5-0.5b"))
LIMIT, MEAN, PROMPT = 800, 150, 40
GEOMETRIC = geometric(MEAN, LIMIT)
TAIL = long_tail(MEAN, 600, LIMIT)


def scheduled(lengths, *, slots, blocks, size):
    """Run the scheduler on rows of these lengths; return its steps, and the tokens computed again per row."""
    prompts = [Prompt([0] * PROMPT, [sample]) for sample in range(len(lengths))]
    made = np.zeros(len(lengths), int)
    tables = BlockTables(
        num_slots=slots, num_blocks=blocks, block_size=size, blocks_per_row=num_blocks(PROMPT + LIMIT, size))
    scheduler = Scheduler(
        prompts, tables=tables, prefill_tokens=1 << 20,
        history=lambda sample: [0] * (PROMPT + int(made[sample])))
    num_steps = prefilled = 0
    while (step := scheduler.plan()) is not None:
        tables.advance()
        prefilled += sum(chunk.stop - chunk.start for chunk in step.chunks)
        made[step.rows] += 1
        scheduler.count(made[step.rows] >= lengths[step.rows])
        num_steps += 1
    assert (made == lengths).all()
    return num_steps, prefilled / len(lengths) - PROMPT


def rank_rows(lengths, *, samples, slots, blocks=None):
    work = Workload(
        samples, PROMPT, lengths.mean, LIMIT, response_lengths=lengths, max_rows=slots)
    whole = RankRows(ROLE, work, ParallelStrategy(), is_cuda=False)
    if blocks is None:
        return whole
    gib = (blocks + 0.01) * whole._block_size * whole.token_bytes / GIB
    return replace(whole, work=replace(work, kv_cache_gib=gib))


@pytest.mark.parametrize("lengths", [GEOMETRIC, TAIL], ids=["geometric", "long tail"])
@pytest.mark.parametrize("samples, slots", [(192, 16), (192, 48), (48, 48)])
def test_rows_and_restarts_are_those_of_the_scheduler(lengths, samples, slots):
    """The steps within 15 %, relative to those in a cache of full lengths, in caches from those in which no
    row restarts to half of what is needed on average; the tokens computed again within a half of a row's
    mean."""
    whole = rank_rows(lengths, samples=samples, slots=slots)
    size = whole._block_size
    mean = whole._peak.of(slots, deviations=0.0)
    drawn = np.maximum(1, lengths.draw(np.random.default_rng(0), (4, samples)))

    def measured(blocks):
        found = [scheduled(some, slots=slots, blocks=blocks, size=size) for some in drawn]
        return np.mean(found, axis=0)

    def predicted(held):
        steps = decode_steps(Rollout(lengths, 1, samples, held, 1, False, 1))
        return steps.of_mean(np.ones(len(steps.rows_K)))

    fewest, _ = measured(int(whole.whole_tokens // size))
    assert predicted(slots) == pytest.approx(fewest, rel=0.2)  # Draws differ by their longest row.
    for tokens in (whole.safe_tokens, mean, 0.8 * mean, 0.5 * mean):
        assert tokens < whole.whole_tokens
        blocks = max(int(tokens // size), num_blocks(PROMPT + LIMIT, size) + 1)
        rows = rank_rows(lengths, samples=samples, slots=slots, blocks=blocks)
        num_steps, computed_again = measured(blocks)
        longer = predicted(rows.held) / predicted(slots)
        assert longer == pytest.approx(num_steps / fewest, rel=0.15), (tokens, rows.held)
        assert abs(rows.restarted_tokens - computed_again) < (PROMPT + MEAN) / 2


def test_the_fullest_moment_is_that_of_rows_that_replace_each_other():
    """Against the mean of simulated slots, in which a row follows another until none waits."""
    runs = np.arange(500)
    for num_rows, slots in ((40, 40), (90, 30), (400, 20)):
        lengths = np.maximum(1, TAIL.draw(np.random.default_rng(0), (len(runs), num_rows)))
        free = np.zeros((len(runs), slots), int)
        changes, starts = np.zeros((2, len(runs), int(1.1 * lengths.sum(axis=1).max() / slots) + 2 * LIMIT))
        for row in lengths.T:
            slot = free.argmin(axis=1)
            first = free[runs, slot]
            free[runs, slot] += row
            for array, value in ((changes, 1), (starts, first)):
                np.add.at(array, (runs, first), value)
                np.add.at(array, (runs, first + row), -value)
        times = np.arange(changes.shape[1])
        usage = (PROMPT + 1 + times) * changes.cumsum(axis=1) - starts.cumsum(axis=1)
        peak = peak_context(Rollout(TAIL, 1, num_rows, slots, 1, False, 1), PROMPT)
        mean = usage.mean(axis=0)
        assert peak.mean * slots == pytest.approx(mean.max(), rel=0.08)
        near = usage[:, mean > 0.97 * mean.max()].std(axis=0)  # It differs much where the mean does not.
        assert 0.9 * near.min() < peak.deviation_per_row * np.sqrt(slots) < 1.1 * near.max()


def test_equal_lengths_reserve_all():
    """Rows that begin together and are equally long all reach the end."""
    rows = rank_rows(Lengths(np.ones(LIMIT)), samples=16, slots=16)
    assert rows.safe_tokens == rows.least_tokens == rows.whole_tokens
    blocks = rows.whole_tokens // rows._block_size // 2
    half = rank_rows(Lengths(np.ones(LIMIT)), samples=16, slots=16, blocks=blocks)
    assert half.held == 8 and half.restarted_tokens == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_tighter_limit_makes_no_generation_faster(seed):
    """Fewer rows, a smaller cache or both; only at the sizes to which recorded steps round up, and with rows
    that restart, may one row less be faster by a hundredth."""
    rng = random.Random(seed)
    cluster = Cluster.load("h100-1x8")
    rates = Rates(cluster)
    role = ModelRole(ModelConfig.load(rng.choice(["qwen2.5-0.5b", "llama-7b", "qwen3-30b-a3b"])))
    call = FunctionCall("generate", "generate", ("prompts",), ("tokens",), role="actor")
    limit = rng.choice([512, 4096, 16384])
    lengths = rng.choice([geometric(limit / 4, limit), long_tail(limit / 5, limit * 0.8, limit)])
    work = Workload(
        rng.choice([64, 512]), 200, lengths.mean, limit, response_lengths=lengths,
        samples_per_prompt=rng.choice([1, 8]), rounds=rng.choice([1, 1, 2]))
    for text in ("d8@0-7", "d2t4@0-7", "d2t2p2@0-7"):
        layout = Layout.parse(text)
        least = RankRows(role, replace(work, max_rows=1), layout.strategy, is_cuda=True)
        gib = least.gib_of(least.whole_tokens) + 2 * least.gib_of(least._block_size)

        def seconds(rows, cache, layout=layout):
            plan = CallPlan(layout, max_rows=rows, kv_cache_gib=cache)
            return call_cost(rates, call, role, work, plan, per_host=8).seconds

        by_rows = [seconds(rows, None) for rows in (1, 2, 5, 16, 40, 64, 100, 200)]
        by_cache = [seconds(64, gib * 2**i) for i in range(8)]
        by_both = [seconds(rows, 8 * gib) for rows in (1, 2, 5, 16, 40, 64, 100, 200)]
        for tight_to_loose in (by_rows, by_cache, by_both):
            best = np.minimum.accumulate(tight_to_loose)
            assert (np.array(tight_to_loose) <= best * 1.01).all(), (text, tight_to_loose)
        assert by_cache[-1] <= by_cache[0]


def rl_problem(lengths, *, cache=None, rows=512, samples=256, cluster="h100-1x8"):
    """Return the problem of generation, a reference and training of a 7B model."""
    graph = DataflowGraph((
        FunctionCall("actor_generate", "generate", ("prompts",), ("tokens",), role="actor"),
        FunctionCall("ref_forward", "forward", ("tokens",), ("logprobs",), role="ref"),
        FunctionCall("actor_train", "train_step", ("tokens", "logprobs"), (), role="actor")), ("prompts",))
    config = ModelConfig.load("llama-7b")
    roles = {"actor": ModelRole(config, trainable=True), "ref": ModelRole(config)}
    work = Workload(
        samples, 256, lengths.mean, lengths.limit, response_lengths=lengths, samples_per_prompt=8,
        max_rows=rows, kv_cache_gib=cache)
    return Problem(graph, roles, dict.fromkeys(("actor_generate", "ref_forward", "actor_train"), work),
                   Cluster.load(cluster))


def planned(problem):
    rates = Rates(problem.cluster)
    return make_plan(problem, rates, time_limit=60, max_iterations=30, gap=1e-3, explain=False)


LONG = long_tail(1500, 6000, 8192)


def test_a_smaller_cache_or_fewer_rows_make_no_plan_faster():
    """A cache of 2 GiB holds a few rows, so the step takes longer by half than without a limit at least."""
    results = [planned(rl_problem(LONG, cache=cache)).result for cache in (2, 10, 20, None)]
    results += [planned(rl_problem(LONG, rows=rows)).result for rows in (8, 40, 512)]
    for some in (results[:4], results[4:]):
        for tight, loose in zip(some, some[1:], strict=False):
            assert tight.step_seconds >= loose.lower_bound_seconds * (1 - 1e-6)
            assert tight.lower_bound_seconds >= loose.lower_bound_seconds * (1 - 1e-3)
    assert results[0].step_seconds > 1.5 * results[3].step_seconds


def test_a_plan_oversubscribes_its_cache_and_is_faster_than_with_full_lengths():
    """The cache that the plan gives generation is what it is priced with; full lengths would need more than
    a device. Rows at full length are as many as fit, and not a power of two."""
    found = planned(rl_problem(LONG))
    plan = found.plan["actor_generate"]
    assert plan.kv_cache_gib is not None
    problem = found.problem
    priced = predict(problem, found.space.rates, found.plan)
    assert priced.step_seconds == pytest.approx(found.result.step_seconds)
    assert priced.calls["actor_generate"].seconds_by_cause.get("restarts", 0.0) >= 0
    by_use = found.memory.by_call["actor_generate"].bytes_by_use
    assert by_use["kv_cache"] == plan.kv_cache_gib * GIB

    def at_full_length(rows):
        changed = replace(plan, max_rows=rows, kv_cache_gib=None)
        return ExecutionPlan({**found.plan.calls, "actor_generate": changed})

    assert not check_memory(problem, at_full_length(plan.max_rows)).fits
    most = max(n for n in range(1, plan.max_rows) if check_memory(problem, at_full_length(n)).fits)
    reserving = predict(problem, found.space.rates, at_full_length(most)).step_seconds
    assert reserving > 1.02 * found.result.step_seconds


def test_the_rows_of_equal_lengths_are_the_most_that_fit():
    """Without a limit of rows, one more row would not fit, or is of no use. The search knows that fewer rows
    than those of equal waves take one wave more, so it soon comes to its end."""
    found = planned(rl_problem(Lengths(np.ones(6000)), samples=512))
    assert found.result.gap < 0.01
    plan = found.plan["actor_generate"]
    assert plan.kv_cache_gib is None
    for rows in range(1, 65):
        edit = ExecutionPlan({**found.plan.calls, "actor_generate": replace(plan, max_rows=rows)})
        if check_memory(found.problem, edit).fits:
            seconds = predict(found.problem, found.space.rates, edit).step_seconds
            assert seconds >= found.result.step_seconds * (1 - 1e-3), rows


@pytest.mark.parametrize("lengths, number", [
    (LONG, 30), (Lengths(np.ones(4096)), 30),
    pytest.param(LONG, 200, marks=pytest.mark.slow), pytest.param(GEOMETRIC, 200, marks=pytest.mark.slow)])
def test_no_edit_beats_the_bound(lengths, number):
    """Random rows and caches of a plan, then micro-batches, too. Where sequences differ in length, these are
    those of drawn batches, so that times jump by little."""
    found = planned(rl_problem(lengths))
    bound = found.result.lower_bound_seconds
    for micro_batches, close in ((False, 1e-6), (True, 1e-6 if lengths.all_equal else 3e-3)):
        best = best_edit(found, number=number, seed=1, micro_batches=micro_batches)
        assert best is not None and best[0] >= bound * (1 - close)


def test_rows_of_a_plan_without_any_follow_from_its_memory():
    """A hand-written plan runs as many rows as its cache holds, not the experiment's 512."""
    problem = rl_problem(LONG)
    layout = Layout.parse("d8@0-7")
    others = {name: CallPlan(layout, recompute=name == "actor_train", micro_batch_tokens=16384)
              for name in ("ref_forward", "actor_train")}
    small = replace(problem, cluster=replace(problem.cluster, device_memory_bytes=60e9))
    seconds = [
        predict(p, Rates(p.cluster), ExecutionPlan({"actor_generate": CallPlan(layout), **others})).calls[
            "actor_generate"].seconds for p in (problem, small)]
    whole = ExecutionPlan({"actor_generate": CallPlan(layout, max_rows=512), **others})
    assert seconds[1] > seconds[0] >= predict(problem, Rates(problem.cluster), whole).calls[
        "actor_generate"].seconds


def test_a_plan_gives_its_cache_to_the_run_but_no_more_than_the_user():
    work = Generate(kv_cache_gib=3.0)
    call = FunctionCall("actor_generate", "generate", ("prompts",), ("tokens",), role="actor", work=work)
    graph = DataflowGraph((call,), ("prompts",))
    for planned_gib, taken in ((2.0, 2.0), (4.0, 3.0), (None, 3.0)):
        plan = ExecutionPlan(
            {"actor_generate": CallPlan(Layout.parse("d1@0"), max_rows=7, kv_cache_gib=planned_gib)})
        work = plan.with_rows_and_caches(graph)["actor_generate"].work
        assert (work.max_rows, work.kv_cache_gib) == (7, taken)
    for wrong in (0, -1, True, float("inf"), "8"):
        with pytest.raises(ValueError, match="kv_cache_gib is .*: it must be a number of GiB above 0"):
            CallPlan(Layout.parse("d1@0"), kv_cache_gib=wrong)
