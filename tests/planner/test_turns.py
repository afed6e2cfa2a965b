"""The price of turns and of waits for environments, against event simulations and sums over all cases."""

import heapq
import io
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from realhf import GRPO, DatasetConfig, Environment, Expected, OptimizerConfig, Role, SamplingConfig
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.planner import report
from realhf.planner.call_cost import call_cost
from realhf.planner.lengths import geometric, long_tail, observed
from realhf.planner.make import price
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Rates
from realhf.planner.rows import RankRows
from realhf.planner.slowest_replica import Rollout
from realhf.planner.turns import Turns, with_waits
from tests.environments.test_generation import steps_of_turns


def simulated(rng, turns, *, rows, slots, step_seconds):
    """Return the seconds of a replica that decodes step by step. Rows that go on come before new ones."""

    def draw(lengths):
        return max(1, int(lengths.draw(rng, 1)[0]))

    turns_left = [draw(turns.counts) for _ in range(rows)]
    tokens_left = [draw(turns.lengths) for _ in range(rows)]
    new, going_on, running, waiting = list(range(rows)), [], [], []
    now = 0.0
    while new or going_on or running or waiting:
        while waiting and waiting[0][0] <= now:
            row = heapq.heappop(waiting)[1]
            if turns_left[row]:
                tokens_left[row] = draw(turns.lengths)
                going_on.append(row)
        while len(running) < slots and (going_on or new):
            running.append((going_on or new).pop(0))
        if not running:
            now = waiting[0][0] if waiting else now
            continue
        now += step_seconds(len(running))
        for row in [*running]:
            tokens_left[row] -= 1
            if tokens_left[row] == 0:
                turns_left[row] -= 1
                running.remove(row)
                heapq.heappush(waiting, (now + turns.seconds, row))
    return now


STEPS = {
    "a GPU": lambda rows: 0.01 + 1e-5 * np.asarray(rows),
    "a CPU": lambda rows: 1e-3 + 6e-5 * np.asarray(rows),
    "products alone": lambda rows: 2e-4 * np.asarray(rows)}
FOUR = geometric(4, 4)
SHORT = geometric(20, 32)
CASES = {  # Turns, their lengths, rows, slots, the largest error.
    "four turns": (FOUR, SHORT, 64, 64, 0.12),
    "any number of turns": (geometric(4, 16), SHORT, 64, 64, 0.12),
    "few slots": (FOUR, SHORT, 64, 16, 0.12),
    "few slots, any number of turns": (geometric(3, 8), SHORT, 96, 40, 0.2),
    "a long tail": (FOUR, long_tail(20, 80, 128), 48, 48, 0.15),
    "equal turns": (FOUR, geometric(32, 32), 64, 64, 0.12),
    "equal turns, few slots": (FOUR, geometric(32, 32), 64, 16, 0.25)}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("case", CASES)
def test_waits_are_those_of_a_simulation(case, steps):
    counts, lengths, rows, slots, most = CASES[case]
    for relative in (0.3, 1.1, 4.0, 20.0):
        seconds = relative * lengths.mean * float(STEPS[steps](slots))
        turns = Turns(counts, lengths, seconds=seconds)
        rng = np.random.default_rng(0)
        given = {"rows": rows, "slots": slots, "step_seconds": STEPS[steps]}
        expected = np.mean([simulated(rng, turns, **given) for _ in range(6)])
        assert _priced(turns, rows, slots, steps) == pytest.approx(expected, rel=most)


def _priced(turns, rows, slots, steps):
    rollout = Rollout(turns.drawn, 1, rows, slots, 1, False, 1)
    return with_waits(turns, rollout, lambda rows, _: STEPS[steps](rows), tokens=turns.drawn.mean).seconds


def test_the_slowest_replica_counts():
    turns = Turns(geometric(4, 16), SHORT, seconds=0.5)
    rng = np.random.default_rng(1)
    each = [simulated(rng, turns, rows=32, slots=32, step_seconds=STEPS["a GPU"]) for _ in range(64)]
    rollout = Rollout(turns.drawn, 1, 32, 32, 8, False, 1)
    found = with_waits(
        turns, rollout, lambda rows, _: STEPS["a GPU"](rows), tokens=turns.drawn.mean).seconds
    assert found == pytest.approx(np.reshape(each, (8, 8)).max(axis=1).mean(), rel=0.08)


@pytest.mark.parametrize("case", ["four turns", "any number of turns", "few slots, any number of turns"])
def test_slower_environments_never_make_a_call_shorter(case):
    counts, lengths, rows, slots, _ = CASES[case]
    seconds = np.geomspace(1e-4, 20, 60)
    found = [_priced(Turns(counts, lengths, seconds=s), rows, slots, "a CPU") for s in seconds]
    assert all(later >= 0.97 * before for before, later in itertools.pairwise(found))
    assert found[-1] == pytest.approx(20 * float(counts.limit), rel=0.1)


def test_lengths_of_rollouts_are_those_of_all_cases():
    counts, lengths = observed([1, 2, 2, 3]), observed([2, 2, 5])
    turns = Turns(counts, lengths, observation_tokens=10)
    drawn, whole = np.zeros(60), np.zeros(60)
    for number, chance in ((1, 1 / 4), (2, 1 / 2), (3, 1 / 4)):
        for case in itertools.product([2, 2, 5], repeat=number):
            drawn[sum(case)] += chance / 3**number
            whole[sum(case) + 10 * (number - 1)] += chance / 3**number
    for found, chances in ((turns.drawn, drawn), (turns.whole(50), whole)):
        survival = chances[::-1].cumsum()[::-1][1:]
        np.testing.assert_allclose(found.survival, survival[: found.limit], atol=1e-12)
        assert survival[found.limit :].sum() == pytest.approx(0, abs=1e-12)
    assert turns.whole(20).limit == 20 and turns.whole(20).survival[-1] == pytest.approx(whole[20:].sum())


class _Talks:
    def step(self, message):
        raise NotImplementedError


def _problem(tmp_path, *, environment=True, cluster="cpu-laptop", max_tokens=2048, **expected):
    setting = Environment(_Talks, max_turns=8, max_tokens=max_tokens) if environment else None
    options = {"environment": setting} if environment else {"reward_function": _score}
    experiment = GRPO(
        actor=Role("qwen2.5-0.5b", random_init=True, optimizer=OptimizerConfig()),
        dataset=DatasetConfig(str(tmp_path / "none.jsonl")), sampling=SamplingConfig(max_new_tokens=256),
        batch_size=8, group_size=4, expected=Expected(**{"prompt_tokens": 20, **expected}), **options)
    return problem_of(experiment, Cluster.load(cluster))


def _score(completions, **columns):
    return [0.0 for _ in completions]


def _cost(problem, work=None, layout="d1@0"):
    call = problem.graph["actor_generate"]
    work = work or problem.workloads[call.name]
    plan = CallPlan(Layout.parse(layout))
    return call_cost(Rates(problem.cluster), call, problem.roles["actor"], work, plan, per_host=1)


def test_users_say_which_turns_they_expect(tmp_path):
    expected = {"turns": 4, "env_seconds": 0.5, "observation_tokens": 30, "response_tokens": 100}
    problem = _problem(tmp_path, **expected)
    work = problem.workloads["actor_generate"]
    assert work.turns == Turns(geometric(4, 8), geometric(100, 256), 30, 0.5)
    assert work.response_tokens == pytest.approx(4 * 100 + 3 * 30, rel=0.01) and work.max_new_tokens == 2048
    assert work.drawn_lengths.mean == pytest.approx(400)
    trained = problem.workloads["actor_train"]
    assert trained.turns is None and trained.response_tokens == work.response_tokens
    limit = _problem(tmp_path, max_tokens=None, **expected).workloads["actor_generate"].max_new_tokens
    assert limit == 8 * (256 + 30)


def test_a_run_says_which_turns_to_expect(tmp_path):
    spans = [[(10, 30, 0.5), (40, 50, 0.1)], [(10, 20, 0.3)]]
    lines = [
        {"length": 1, "finished": True, "turns": [dict(zip(("start", "stop", "seconds"), span, strict=True))
                                                  for span in row]} for row in spans]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = _problem(tmp_path, lengths_from=str(tmp_path)).workloads["actor_generate"].turns
    assert found == Turns(observed([2, 1], 8), observed([20, 10, 10], 256), 10.0, pytest.approx(0.3))
    slower = _problem(tmp_path, lengths_from=str(tmp_path), env_seconds=2.0, turns=3)
    assert slower.workloads["actor_generate"].turns == Turns(
        geometric(3, 8), found.lengths, 10.0, 2.0)


REFUSED = {
    "expected.turns is 4: nothing is generated with an environment": {"environment": False, "turns": 4},
    "expected.turns is 9: environment.max_turns allows 8": {"turns": 9},
    "expected.turns is 0.5: it must be at least 1": {"turns": 0.5},
    "expected.env_seconds is -1: it must be at least 0": {"turns": 2, "env_seconds": -1},
    "expected.env_seconds is 1: set expected.turns, too": {"env_seconds": 1},
    "expected.response_tokens is 300: sampling.max_new_tokens allows 256": {
        "turns": 2, "response_tokens": 300}}


@pytest.mark.parametrize("words", REFUSED)
def test_impossible_turns_are_refused(words, tmp_path):
    with pytest.raises(ValueError) as error:
        _problem(tmp_path, **REFUSED[words])
    assert words in str(error.value)


def test_a_single_turn_without_a_wait_costs_what_a_response_costs(tmp_path):
    single = _problem(tmp_path, turns=1, response_tokens=100)
    plain = _problem(tmp_path, environment=False, response_tokens=100)
    work = single.workloads["actor_generate"]
    np.testing.assert_allclose(
        work.drawn_lengths.survival, plain.workloads["actor_generate"].lengths.survival, atol=1e-9)
    assert _cost(single).seconds == pytest.approx(_cost(plain).seconds, rel=1e-3)
    assert work.turns is not None and plain.workloads["actor_generate"].turns is None


def test_waits_and_observations_are_parts_of_the_price(tmp_path):
    given = {"turns": 4, "response_tokens": 100}
    costs = [
        _cost(_problem(tmp_path, cluster="h100-2x8", **given, **more))
        for more in ({}, {"env_seconds": 30}, {"env_seconds": 60})]
    none, some, twice = [cost.seconds_by_cause for cost in costs]
    assert "environments" not in none and some["environments"] > 25 * 4
    assert twice["environments"] == pytest.approx(2 * some["environments"], rel=0.15)
    assert some["decode"] == pytest.approx(none["decode"])
    assert costs[1].seconds == pytest.approx(sum(some.values()))
    assert costs[1].limit == "environments"
    short, long = [
        _cost(_problem(tmp_path, **given, observation_tokens=tokens)).seconds_by_cause["prefill"]
        for tokens in (99, 199)]
    prompts = _cost(_problem(tmp_path, turns=1, response_tokens=100)).seconds_by_cause["prefill"]
    assert long - prompts == pytest.approx(2 * (short - prompts), rel=0.1)  # One more token is drawn.


def test_rows_that_find_no_room_while_they_wait_are_computed_again(tmp_path):
    """With few slots and long waits, all 32 rows are under way; the cache is as large as the slots need."""
    problem = _problem(tmp_path, turns=4, response_tokens=100, env_seconds=1000)
    few = replace(problem.workloads["actor_generate"], max_rows=4)
    (of_few, of_all) = (_cost(problem, replace(few, max_rows=rows)).seconds_by_cause for rows in (4, 32))
    assert "restarts" not in of_all
    rank_rows = RankRows(problem.roles["actor"], few, Layout.parse("d1@0").strategy, False)
    per_token = of_few["prefill"] / (8 * 20)  # Without observations, prompts alone are prefilled.
    again = (1 - rank_rows.most_cached / 32) * 32 * 3 * (20 + few.lengths.mean / 2)
    assert of_few["restarts"] == pytest.approx(per_token * again, rel=0.5)


@pytest.mark.parametrize("room", [16, 24])
def test_what_is_computed_again_is_as_in_the_scheduler(room):
    """64 rows of four turns, each of 96 tokens, share 16 slots and a cache of `room` whole rows."""
    sizes = {"start": 80, "turn": 96, "observed": 32, "block": 64}
    many = {"group": 4, "num_rows": 64, "num_slots": 16, "delay": 240}
    computed, once = (steps_of_turns(room=rows, **many, **sizes)[1] for rows in (room, 64))
    turns = Turns(observed([4]), observed([96]), 32.0)
    work = Workload(64, 80, 480, 512, 4, max_rows=room, turns=turns, response_lengths=turns.whole(512))
    role = ModelRole(ModelConfig.load("qwen2.5-0.5b"))
    cached = RankRows(role, work, Layout.parse("d1@0").strategy, False).most_cached
    under_way = 16 * (1 + 240 / 96)
    expected = (1 - cached / under_way) * 64 * 3 * (80 + work.lengths.mean / 2)
    assert computed - once == pytest.approx(expected, rel=0.25)


def test_plans_show_turns_and_waits(tmp_path):
    problem = _problem(tmp_path, cluster="h100-2x8", turns=4, response_tokens=100, env_seconds=30)
    layout = Layout.parse("d8@0-7")
    plan = ExecutionPlan({call.name: CallPlan(layout) for call in problem.graph.calls})
    priced = price(problem, Rates(problem.cluster), plan)
    call = report.priced_document(priced)["calls"]["actor_generate"]
    assert call["turns"] == {
        "mean": pytest.approx(4), "drawn_tokens": pytest.approx(100), "observation_tokens": 0,
        "env_seconds": 30}
    assert call["parts"]["environments"] > 100 and call["limit"] == "environments"
    console = Console(file=io.StringIO(), width=200)
    console.print(report.render_priced(priced, columns=200))
    assert "512 rows at once, 4 turns" in console.file.getvalue()
