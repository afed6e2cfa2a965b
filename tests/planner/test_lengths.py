"""Lengths of responses: distributions, and prices of the slowest replica against simulations."""

import dataclasses
import heapq
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from realhf import GRPO, Cluster, DatasetConfig, Expected, OptimizerConfig, Reward, Role, SamplingConfig
from realhf.calls import Output, TopLogProbs
from realhf.cli.planning_problem import problem_of
from realhf.data.micro_batch import micro_batches
from realhf.data.order import groups_of
from realhf.execution_plan import CallPlan
from realhf.graph import FunctionCall
from realhf.layout import Layout, ParallelStrategy
from realhf.models.model_config import ModelConfig
from realhf.planner.call_cost import call_cost
from realhf.planner.lengths import USUALLY_ALIKE, alike_share, geometric, long_tail, observed
from realhf.planner.micro_batches import mean_micro_batch
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Rates
from realhf.planner.slowest_replica import Rollout, ScoringTime, decode_steps
from realhf.runtime.samples.exchange import Routing, assign
from tests.planner.problems import quantile
from tests.samples import pairs

PROMPT = 100
LENGTHS = {
    "equal": geometric(64, 64),
    "geometric": geometric(60.0, 512),
    "long tail": long_tail(100.0, 900.0, 2048),
    "many at the limit": geometric(200.0, 256),
    "two lengths": observed([20] * 9 + [300]),
}


def _run(lengths, rng, *, replicas, rows, slots, group, stealing, costs):
    """Return the seconds until the last of some replicas has decoded its rows.

    As in a run, a replica takes a group of rows whenever a slot is free and none of its rows waits: from the
    front of its own line, or else from the back of another.
    """
    step_seconds, row_seconds, token_seconds = costs
    drawn = lengths.draw(rng, (replicas, rows // group, group)).tolist()
    lines = [list(line) for line in drawn]
    running = [[] for _ in range(replicas)]  # Tokens that are left and that it has, for each row.
    waiting = [[] for _ in range(replicas)]
    clocks = [(0.0, r) for r in range(replicas)]
    end = 0.0
    while clocks:
        now, r = heapq.heappop(clocks)
        while waiting[r] and len(running[r]) < slots:
            running[r].append((waiting[r].pop(0), 0))
        others = [(r + k) % replicas for k in range(1, replicas)] if stealing else []
        full = next((line for line in [r, *others] if lines[line]), None)
        if len(running[r]) < slots and full is not None:
            waiting[r] += lines[full].pop(0 if full == r else -1)
            heapq.heappush(clocks, (now + 1e-6, r))
        elif running[r]:
            steps = min(left for left, _ in running[r])
            num = len(running[r])
            tokens = steps * sum(PROMPT + had for _, had in running[r]) + num * steps * (steps + 1) / 2
            seconds = steps * (step_seconds + row_seconds * num) + token_seconds * tokens
            running[r] = [(left - steps, had + steps) for left, had in running[r] if left > steps]
            heapq.heappush(clocks, (now + seconds, r))
        end = max(end, now)
    return end


def _priced(rollout, costs):
    steps = decode_steps(rollout)
    seconds = costs[0] + costs[1] * steps.rows_K + costs[2] * steps.rows_K * (PROMPT + steps.context_K)
    return steps.of_slowest(seconds)[0]


COSTS = {"steps": (1.0, 0.0, 0.0), "rows": (1.0, 0.05, 1e-4), "cache": (1.0, 0.02, 1e-3)}


@pytest.mark.parametrize(("costs", "name"), pairs(COSTS, LENGTHS))
def test_the_slowest_replica_is_that_of_a_simulation(name, costs):
    """Apart from the simulations' noise, half of the estimates are within 2 % and all within 7 %, or 15 % if
    many rows have one length."""
    lengths = LENGTHS[name]
    most = 0.15 if name in ("many at the limit", "two lengths") else 0.07
    errors = []
    for number, (replicas, rows, slots, stealing) in enumerate((
        (1, 64, 64, False), (8, 32, 64, False), (64, 8, 64, False), (1, 128, 32, False), (4, 64, 16, False),
        (4, 64, 16, True), (16, 16, 8, True), (2, 128, 32, True), (8, 32, 8, False),
    )):
        group = 4
        rng = np.random.default_rng(number)
        num_runs = 2 if name == "equal" else 24
        drawn = [
            _run(lengths, rng, replicas=replicas, rows=rows, slots=slots, group=group, stealing=stealing,
                 costs=COSTS[costs]) for _ in range(num_runs)
        ]
        rollout = Rollout(lengths, 1, rows, min(rows, slots), replicas, stealing, group)
        mean, noise = np.mean(drawn), np.std(drawn) / math.sqrt(num_runs)
        found = _priced(rollout, COSTS[costs])
        errors.append(max(0.0, abs(found - mean) - 2.5 * noise) / mean)
        assert errors[-1] < most, (rollout[2:], found, mean, noise)
    assert np.median(errors) < 0.02, errors


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("replicas", "rows"), [(1, 1), (1, 512), (4, 32), (64, 8), (64, 64)])
def test_where_every_row_has_a_slot_steps_are_the_longest_of_all_rows(name, replicas, rows):
    lengths = LENGTHS[name]
    longest = (1 - (1 - lengths.survival) ** (replicas * rows)).sum()
    found = _priced(Rollout(lengths, 1, rows, rows, replicas, False, 1), (1.0, 0.0, 0.0))
    assert found == pytest.approx(longest, rel=0.025)


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize(("rows", "slots"), [(64, 64), (128, 32), (100, 32), (5, 1)])
def test_one_replica_decodes_all_tokens(name, rows, slots):
    """Where only rows cost something, one replica takes as long as all tokens do."""
    lengths = LENGTHS[name]
    found = _priced(Rollout(lengths, 1, rows, slots, 1, False, 1), (0.0, 1.0, 0.0))
    assert found == pytest.approx(rows * lengths.mean, rel=0.01)
    squared = rows * (PROMPT * lengths.mean + (lengths.squared_mean + lengths.mean) / 2)
    assert _priced(Rollout(lengths, 1, rows, slots, 1, False, 1), (0.0, 0.0, 1.0)) == pytest.approx(
        squared, rel=0.02)


def test_the_example_of_two_slots():
    """The numbers are those of the docstring of slowest_replica.py."""
    for rows, full, last, further in ((2, 0.0, 3.5, 2.5), (100, 147.4, 3.2, 2.0)):
        steps = decode_steps(Rollout(observed([2, 4]), 1, rows, 2, 1, False, 1))
        ending = steps.ending
        assert steps.full.steps == pytest.approx(full, abs=0.05)
        assert ending.chances_E @ ending.last_steps_ER.sum(axis=1) == pytest.approx(last, abs=0.05)
        assert ending.chances_E @ ending.further_steps_ER.sum(axis=1) == pytest.approx(further, abs=0.05)
    four = decode_steps(Rollout(observed([2, 4]), 1, 2, 2, 4, False, 1))
    assert four.of_slowest(np.ones(len(four.rows_K)))[0] == pytest.approx(4 - 2 / 256, abs=0.01)


def test_equal_lengths_take_as_many_steps_as_there_are_rounds_of_slots():
    """With 100 rows on 32 slots, three times 32 rows and then 4 decode together."""
    for replicas, stealing in ((1, False), (4, False), (4, True)):
        steps = decode_steps(Rollout(geometric(50, 50), 1, 100, 32, replicas, stealing, 4))
        found, counts = steps.of_slowest(1.0 + 0.1 * steps.rows_K)
        assert found == pytest.approx(3 * 50 * (1 + 3.2) + 50 * (1 + 0.4))
        assert counts.sum() == pytest.approx(200)


def test_the_table_of_the_documentation():
    given = (geometric(500, 500), geometric(500.0, 16384), long_tail(500.0, 6000.0, 16384))
    page = (Path(__file__).parents[2] / "docs/cost-model.md").read_text()
    for words, rows, replicas, stealing in (
        ("64, 64 | 1", 64, 1, False), ("64, 64 | 8", 64, 8, False), ("256, 64 | 8", 256, 8, False),
        ("256, 64, work stealing | 8", 256, 8, True),
    ):
        (line,) = (line for line in page.splitlines() if line.startswith(f"| {words} |"))
        shown = [float(cell.replace(",", "")) for cell in line.split("|")[3:6]]
        found = [_priced(Rollout(one, 1, rows, 64, replicas, stealing, 8), COSTS["steps"]) for one in given]
        assert shown == pytest.approx(found, rel=1e-3)


def test_more_replicas_and_longer_tails_take_longer_and_stealing_less():
    tail = LENGTHS["long tail"]
    mean_only = geometric(tail.mean, tail.limit)
    costs = COSTS["rows"]
    by_replicas = [_priced(Rollout(tail, 1, 32, 32, r, False, 4), costs) for r in (1, 2, 8, 64)]
    assert by_replicas == sorted(by_replicas)
    alone, shared = (_priced(Rollout(tail, 1, 64, 16, 16, stealing, 4), costs) for stealing in (False, True))
    assert shared < alone
    assert _priced(Rollout(mean_only, 1, 8, 8, 8, False, 4), costs) < 0.8 * _priced(
        Rollout(tail, 1, 8, 8, 8, False, 4), costs)


def test_distributions_have_what_they_are_made_of():
    rng = np.random.default_rng(0)
    for mean, p99, limit in ((500, 6000, 16384), (100, 110, 2048), (3000, 20000, 32768), (800, 3000, 4096)):
        lengths = long_tail(mean, p99, limit)
        assert lengths.limit == limit
        assert lengths.mean == pytest.approx(mean, rel=1e-6)
        assert quantile(lengths, 0.99) == pytest.approx(p99, rel=0.01)
        drawn = lengths.draw(rng, 200_000)
        assert drawn.mean() == pytest.approx(mean, rel=0.02)
        assert (drawn**2).mean() == pytest.approx(lengths.squared_mean, rel=0.05)
        assert drawn.min() >= 1 and drawn.max() <= limit
    given = [3, 3, 5, 9, 12]
    for least in (1, 5, 10, 12, 13):
        kept = np.where(np.array(given) >= least, given, 0)
        assert observed(given).sums_from(least) == pytest.approx((kept.mean(), (kept**2).mean()))
    assert observed(given).mean == pytest.approx(np.mean(given)) and observed(given).limit == 12
    assert observed(given).squared_mean == pytest.approx(np.mean(np.square(given)))
    assert observed(given, 6).mean == pytest.approx(np.mean(np.minimum(given, 6)))
    assert [quantile(observed(given), share) for share in (0.1, 0.5, 0.99)] == [3, 5, 12]
    with pytest.raises(ValueError, match=r"no long-tailed distribution has mean 5 and 0\.99 quantile 60000"):
        long_tail(5, 60_000, 65_536)


@pytest.mark.parametrize("name", ["geometric", "long tail", "two lengths"])
def test_the_slowest_rank_is_that_of_drawn_batches(name):
    """The real functions deal out and split other draws than the planner's."""
    lengths = LENGTHS[name]
    rng = np.random.default_rng(7)
    for dp, group_size, minibatches, pp, max_tokens in (
        (1, 1, 1, 1, 2048), (4, 1, 1, 1, 4096), (16, 1, 2, 1, 1024), (8, 4, 1, 1, 4096), (2, 1, 1, 4, 2048),
        (32, 1, 1, 1, 2048), (4, 1, 1, 4, 65536),
    ):
        work = Workload(
            256, PROMPT, lengths.mean, lengths.limit, samples_per_prompt=4, group_size=group_size,
            minibatches=minibatches, response_lengths=lengths)
        routing = Routing(4, minibatches, keep_groups=group_size > 1)
        seen, all_drawn = [], []
        for _ in range(48):
            drawn = (PROMPT + lengths.draw(rng, 256)).tolist()
            all_drawn += drawn
            for shards in assign(dict(enumerate(map(float, drawn))), dp=dp, routing=routing):
                sizes = [[drawn[i] for i in shard] for shard in shards]
                costs = [sum(n + 1e-4 * n**2 for n in some) for some in sizes]
                slowest = int(np.argmax(costs))
                parts = micro_batches(
                    sizes[slowest], max_tokens=max_tokens, groups=groups_of(shards[slowest], group_size),
                    at_least=pp, attention=1e-4)
                by_part = [sum(sizes[slowest][i] + 1e-4 * sizes[slowest][i] ** 2 for i in p) for p in parts]
                squared = sum(n**2 for n in sizes[slowest])
                seen.append((sum(sizes[slowest]), squared, len(parts), max(by_part) / np.mean(by_part)))
        tokens, squared, num_parts, largest = np.mean(seen, axis=0)
        squared *= work.squared_tokens / np.mean(np.square(all_drawn))
        found = mean_micro_batch(work, ParallelStrategy(dp=dp, pp=pp), max_tokens, attention=1e-4)
        assert found.tokens * found.num_micro_batches == pytest.approx(tokens, rel=0.08)
        assert found.squared_tokens * found.num_micro_batches == pytest.approx(squared, rel=0.25)
        assert found.num_micro_batches == pytest.approx(num_parts, abs=1.0, rel=0.1)
        assert found.largest == pytest.approx(largest, rel=0.15)


def test_the_largest_micro_batch_fills_the_pipeline():
    """Micro-batches pass p equal stages in (sum + (p - 1) * largest) of a stage's seconds."""
    rates = Rates(Cluster.load("h100-1x8"))
    role = ModelRole(replace(ModelConfig.load("llama-7b"), head="score"), trainable=True)
    call = FunctionCall("call", "train_step", ("x",), (), role="actor")
    lengths = long_tail(2000.0, 12000.0, 16384)
    work = Workload(16, 100, lengths.mean, lengths.limit, output=Output.VALUES, response_lengths=lengths)
    micro = mean_micro_batch(work, ParallelStrategy(pp=4), 4096, attention=role.attention_share)
    cost = call_cost(rates, call, role, work, CallPlan(Layout.parse("p4@0-3"), 4096), per_host=4)
    assert micro.largest > 1.05
    bubble = cost.seconds_by_cause["pipeline"] / cost.seconds_by_cause["compute"]
    assert bubble == pytest.approx(3 * micro.largest / micro.num_micro_batches, rel=0.05)


def _score(completions, **columns):
    return [float(len(completion)) for completion in completions]


def _experiment(tmp_path, **expected):
    model = {"model": "qwen2.5-0.5b", "random_init": True}
    return GRPO(
        actor=Role(optimizer=OptimizerConfig(), **model), dataset=DatasetConfig(str(tmp_path / "none.jsonl")),
        reward_function=_score, sampling=SamplingConfig(max_new_tokens=4096), batch_size=8, group_size=4,
        expected=Expected(**{"prompt_tokens": 20, **expected}))


def _workload(tmp_path, **expected):
    problem = problem_of(_experiment(tmp_path, **expected), Cluster.load("cpu-laptop"))
    return problem.workloads["actor_generate"]


def test_users_say_how_long_responses_get(tmp_path):
    assert _workload(tmp_path).lengths.all_equal
    assert _workload(tmp_path, response_tokens=300).lengths == geometric(300.0, 4096)
    tail = _workload(tmp_path, response_tokens=300, response_p99=2000, longest_prompt_tokens=90)
    assert tail.lengths == long_tail(300.0, 2000.0, 4096) and tail.longest_prompt_tokens == 90
    (tmp_path / "rollouts.jsonl").write_text("".join(
        json.dumps({"step": 1, "followed": False, "length": n, "finished": n < 4096}) + "\n"
        for n in (10, 20, 4096)) + '{"step": 2, "leng')
    seen = _workload(tmp_path, lengths_from=str(tmp_path))
    assert seen.lengths == observed([10, 20, 4096], 4096) and seen.response_tokens == pytest.approx(4126 / 3)


REFUSED = {
    "response_p99 is 2000: it must be above expected.response_tokens": {"response_p99": 2000},
    "below sampling.max_new_tokens (4096)": {"response_tokens": 300, "response_p99": 5000},
    "no long-tailed distribution": {"response_tokens": 3, "response_p99": 4000},
    "there is no nowhere/rollouts.jsonl": {"lengths_from": "nowhere"},
    "leave out expected.response_tokens": {"lengths_from": "nowhere", "response_tokens": 300},
    "longest_prompt_tokens is 5: it must be at least expected.prompt_tokens": {"longest_prompt_tokens": 5},
}


@pytest.mark.parametrize("words", REFUSED)
def test_impossible_lengths_are_refused(words, tmp_path):
    with pytest.raises(ValueError) as error:
        _workload(tmp_path, **REFUSED[words])
    assert words in str(error.value) and str(error.value).startswith("expected.")


def test_answers_that_were_cut_off_earlier_are_refused(tmp_path):
    line = json.dumps({"step": 1, "followed": False, "length": 64, "finished": False})
    (tmp_path / "rollouts.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match="were cut off at 64 tokens"):
        _workload(tmp_path, lengths_from=str(tmp_path))


@pytest.mark.parametrize(("at_once", "num_ranks"), [(1, 1), (1, 8), (8, 4), (64, 4)])
def test_scoring_takes_as_long_as_on_the_slowest_rank(at_once, num_ranks):
    time = ScoringTime(0.5, 4.0, 10.0, at_once)
    rng = np.random.default_rng(3)
    slowest = []
    for _ in range(800):
        drawn = long_tail(100, 800, 2000).draw(rng, (num_ranks, 32)) * 0.5 / 100
        by_rank = []
        for answers in drawn.tolist():
            free = [0.0] * at_once  # When each of them can begin the next answer.
            for seconds in answers:
                heapq.heapreplace(free, free[0] + seconds)
            by_rank.append(max(free))
        slowest.append(max(by_rank))
    assert time.of_slowest(32 * num_ranks, num_ranks) == pytest.approx(np.mean(slowest), rel=0.06)
    assert ScoringTime(0.5, at_once=at_once).of_slowest(32 * num_ranks, num_ranks) == pytest.approx(
        0.5 * max(1, 32 / at_once))


def test_rewards_are_scored_as_many_at_once_as_their_concurrency_says(tmp_path):
    times = {}
    for concurrency in (None, 8):
        experiment = _experiment(tmp_path, reward_seconds=0.5, reward_p99_seconds=4.0)
        experiment.reward_function = Reward(_score, concurrency=concurrency, timeout_seconds=10.0)
        problem = problem_of(experiment, Cluster.load("cpu-laptop"))
        (times[concurrency],) = filter(None, (work.scoring for work in problem.workloads.values()))
    assert times == {None: ScoringTime(0.5, 4.0), 8: ScoringTime(0.5, 4.0, 10.0, 8)}


def test_answers_of_one_prompt_resemble_each_other_as_much_as_a_run_says(tmp_path):
    """Groups that share a part of the variance of their logarithm have this part as their correlation."""
    rng = np.random.default_rng(5)
    for share in (0.0, 0.3, 0.8, 1.0):
        common, own = rng.normal(size=(4000, 1)), rng.normal(size=(4000, 4))
        groups = np.exp(6 + math.sqrt(share) * common + math.sqrt(1 - share) * own)
        assert alike_share(groups.tolist()) == pytest.approx(share, abs=0.03)
    assert alike_share([[5, 5]]) == alike_share([[5], [7]]) == alike_share([[5, 5], [5, 5]]) == 0.0
    assert alike_share([[5, 5], [7, 7, 7]]) == 1.0
    (tmp_path / "rollouts.jsonl").write_text("".join(
        json.dumps({"step": step, "prompt_number": 0, "length": n, "finished": True}) + "\n"
        for step, n in ((1, 10), (1, 10), (2, 20), (2, 20))))
    assert _workload(tmp_path, lengths_from=str(tmp_path)).alike == 1.0
    assert _workload(tmp_path, lengths_from=str(tmp_path), length_correlation=0.2).alike == 0.2
    assert _workload(tmp_path, response_tokens=300).alike == USUALLY_ALIKE > 0
    assert _workload(tmp_path, response_tokens=300, length_correlation=0.0).alike == 0.0
    answer = {"step": 1, "prompt_number": 0, "length": 9, "finished": True}
    (tmp_path / "rollouts.jsonl").write_text(json.dumps(answer) + "\n")
    assert _workload(tmp_path, lengths_from=str(tmp_path)).alike == USUALLY_ALIKE  # It has not been measured.
    with pytest.raises(ValueError, match="expected.length_correlation is 2: it must be from 0 to 1"):
        _workload(tmp_path, response_tokens=300, length_correlation=2)


@pytest.mark.parametrize("alike", [0.5, 1.0])
@pytest.mark.parametrize("name", ["geometric", "long tail"])
def test_the_slowest_replica_has_prompts_whose_answers_are_alike(name, alike):
    """Without waiting rows, a replica's seconds follow from the lengths that are drawn."""
    lengths = LENGTHS[name]
    rng = np.random.default_rng(11)
    group = 4
    for replicas, rows in ((1, 64), (4, 16), (8, 32), (2, 4)):
        drawn = lengths.draw(rng, (3000, replicas, rows // group, group))
        is_alike = rng.random((3000, replicas, rows // group, 1)) < alike
        drawn = np.where(is_alike, drawn[..., :1], drawn).reshape(3000, replicas, rows)
        rollout = Rollout(lengths, 1, rows, rows, replicas, False, group, alike)
        for step, row in ((1.0, 0.0), (1.0, 0.05)):
            seconds = (step * drawn.max(axis=2) + row * drawn.sum(axis=2)).max(axis=1)
            assert _priced(rollout, (step, row, 0.0)) == pytest.approx(seconds.mean(), rel=0.05)


class _Watched(GRPO):
    """GRPO whose evaluations also find the most probable tokens, and give no prompt to another replica."""

    def eval_graph(self):
        graph = super().eval_graph()
        generate = graph["actor_generate"].with_work(work_stealing=False)
        top = FunctionCall(
            "actor_top", inputs=("sequence_ids", "response_mask"), outputs=("top_ids", "top_logprobs"),
            role="actor", work=TopLogProbs(k=7))
        return graph.replace(generate).add(top)


def test_work_of_evaluations_is_planned_like_that_of_steps(tmp_path):
    plain = _experiment(tmp_path)
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    problem = problem_of(_Watched(**fields | {"eval_dataset": plain.dataset}), Cluster.load("cpu-laptop"))
    generate, top = problem.evaluations
    assert not generate.workload.work_stealing and generate.workload.rounds == 1
    assert (top.workload.output, top.workload.top_k, generate.workload.top_k) == ("logprobs", 7, 0)
