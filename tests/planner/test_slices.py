"""Calls in plain Python whose environments take turns: against formulas, and against what a run records."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from realhf import Cluster, Expected
from realhf.cli.planning_problem import problem_of
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.layout import Layout
from realhf.planner.make import make_plan
from realhf.planner.rates import Rates
from realhf.planner.slices import AnswerPlace, QuestionSeconds, SliceTimes, round_seconds
from realhf.planner.step_time import host_seconds, times_of_plan

CLUSTER = Cluster.load("cpu-laptop")
INLINE = [AnswerPlace(None)]


def times(**fields) -> SliceTimes:
    """16 environments that take 10 ms, in a call whose process takes 1 ms for a question."""
    return SliceTimes(**{
        "num": 16, "num_slices": 1, "rounds": 100.0, "rest_seconds": 0.0, "step_seconds": 10e-3,
        "step_deviation": 0.0, "step_cpu_seconds": 0.0, "question_seconds": 0.6e-3, "handling_seconds": 0.0,
        "answers": ((1, 0.4e-3),), "cores": 64} | fields)


@pytest.mark.parametrize(("num", "asking", "answering", "latency", "stepping"), [
    (1, 1.0, 0.0, 0.0, 5.0), (4, 1.0, 0.0, 0.0, 5.0), (8, 1.0, 0.0, 0.0, 5.0), (3, 1.0, 4.0, 1.0, 2.0),
    (2, 1.0, 4.0, 1.0, 20.0), (1, 1.0, 4.0, 1.0, 2.0)])
def test_a_round_takes_as_long_as_the_busiest_process_or_a_slice_by_itself(
    num, asking, answering, latency, stepping
):
    """With one slice that is the sum of all."""
    taken = round_seconds(
        num, size=1, asking=asking, answering=answering, latency=latency, stepping=stepping)
    alone = asking + answering + latency + stepping
    assert taken == pytest.approx(max(num * asking, num * answering, alone))


@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_slice_waits_for_the_slowest_of_its_environments(size):
    slowest = np.random.default_rng(1).normal(10.0, 1.0, (100_000, size)).max(axis=1).mean()
    taken = round_seconds(1, size=size, asking=1.0, stepping=10.0, deviation=1.0)
    assert taken == pytest.approx(1.0 + slowest, rel=0.05)


def test_slices_are_handled_in_turn_so_that_one_that_is_late_delays_the_next():
    """A plain loop over rounds gives the same mean as the recursion with another stream of numbers."""
    rng = np.random.default_rng(5)
    now, ready = 0.0, [0.0] * 4
    for _, k in product(range(3000), range(4)):
        now = max(now, ready[k]) + 1.0
        ready[k] = now + max(0.0, rng.normal(6.0, 2.0))
    assert round_seconds(4, size=1, asking=1.0, stepping=6.0, deviation=2.0) == pytest.approx(
        now / 3000, rel=0.05)


def test_seconds_follow_the_parts_of_a_round():
    """100 rounds, each of which is the larger of 1 ms for each slice, and 11 ms for one by itself."""
    seconds = {n: times().seconds(n, INLINE) for n in times().ring_sizes()}
    assert seconds == pytest.approx({1: 1.1, 2: 1.1, 4: 1.1, 8: 1.1, 16: 1.6})
    handled = times(handling_seconds=0.5e-3, rest_seconds=0.2)  # Each environment adds 0.5 ms.
    expected = {n: 0.2 + 100 * max(n * 1e-3 + 8e-3, 11e-3 + 8e-3 / n) for n in (1, 2, 4, 8, 16)}
    assert {n: handled.seconds(n, INLINE) for n in (1, 2, 4, 8, 16)} == pytest.approx(expected)
    assert handled.best() == (4, pytest.approx(expected[4]))


def test_answers_take_longer_with_more_rows():
    slower = times(answers=((1, 1e-3), (4, 2e-3), (16, 6e-3)))
    by_rows = {1: 1e-3, 2: 4e-3 / 3, 8: 2e-3 + 4 / 12 * 4e-3, 16: 6e-3, 22: 8e-3}
    assert {n: slower.answer_seconds(n) for n in by_rows} == pytest.approx(by_rows)
    assert slower.seconds(1, INLINE) == pytest.approx(100 * (0.6e-3 + 6e-3 + 10e-3))


def test_another_rank_answers_while_this_one_plays():
    far = [AnswerPlace(QuestionSeconds(0.4e-3, 1.6e-3, 1e-3))]
    alone = 1e-3 + 2e-3 + 1e-3 + 10e-3  # 1 ms here, 2 ms there, and 1 ms on the way.
    assert times().seconds(1, far) == pytest.approx(100 * alone)
    assert times().seconds(16, far) == pytest.approx(100 * 16 * 2e-3)
    shared = 2 * [far[0]._replace(num_sharing=2)]  # Each with half of the environments.
    assert times().seconds(8, shared) == pytest.approx(100 * 8 * 4e-3)


def test_cores_limit_environments_that_compute():
    """16 environments with 10 ms of work take 80 ms on two cores, and the process adds its own work."""
    computing = times(step_cpu_seconds=10e-3)
    assert computing.seconds(16, INLINE, cores=2) == pytest.approx(100 * (16 * 10e-3 + 16 * 1e-3) / 2)
    assert computing.seconds(1, INLINE, cores=2) == pytest.approx(100 * (80e-3 + 1e-3))
    assert computing.seconds(1, INLINE, cores=16) == pytest.approx(100 * 11e-3)
    far = AnswerPlace(QuestionSeconds(0.5e-3, 0.5e-3, 0.0))  # Messages leave a fifth of the cores unused.
    work = 16 * (10e-3 + 2e-3)
    assert computing.seconds(16, [far], cores=2) == pytest.approx(100 * work / 2 / 0.8)


# What a run records


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with four environments in two slices, each in a process of its own."""
    pytest.importorskip("gymnasium")
    from realhf.distributed.world import World
    from tests.control.test_srl_ppo import trained

    out = tmp_path_factory.mktemp("run")
    trained(World(), "benchmarks.compare.control_task:Slow-v0", None, {"processes": True, "steps": 3}, out)
    return out


def problem(run, **expected):
    from tests.control.test_srl_ppo import small

    made = small(
        "benchmarks.compare.control_task:Slow-v0", expected=Expected(seconds_from=str(run), **expected))
    return problem_of(made, CLUSTER)


def test_a_run_records_what_environments_and_answers_take(run):
    """Steps sleep for 5 ms; 17 questions of each slice in a step of the run, and those after truncations."""
    work = problem(run).workloads["play"]
    assert 34 <= work.questions <= 38
    slices = work.slices
    assert (slices.num, slices.num_slices, slices.rounds) == (4, 2, 16)
    assert 0.005 <= slices.step_seconds < 0.05
    assert 0 < slices.step_cpu_seconds < 0.005 and 0 < slices.question_seconds < 0.01
    assert [rows for rows, _ in slices.answers] == [1, 4, 16, 64]
    assert slices.messages is None and slices.cores >= 1
    timeline = [json.loads(line) for line in (run / "timeline.jsonl").read_text().splitlines()]
    steps = [e for e in timeline if e["name"] == "play" and e["step"] > 1]
    mean = sum(e["end"] - e["start"] for e in steps) / 2
    assert 16 * 0.005 <= slices.seconds(2, INLINE) < 1.5 * mean  # On a busy machine, it waits for cores, too.


def test_the_planner_names_the_best_ring(run):
    made = problem(run)
    rates = Rates(CLUSTER)
    planned = make_plan(made, rates, time_limit=10)
    slices = made.workloads["play"].slices
    ring, seconds = slices.best()
    assert planned.plan["play"].ring == ring in (1, 2, 4)
    assert planned.plan["play"].predicted["seconds"] == pytest.approx(seconds, rel=1e-4)
    assert seconds <= 1.01 * min(slices.seconds(n, INLINE) for n in (1, 2, 4))
    times = times_of_plan(made, rates, planned.plan, {name: 0.0 for name in ("act", "agent_train")})
    assert times.seconds[0, [call.name for call in made.calls].index("play")] == pytest.approx(seconds)


def test_a_plan_by_hand_is_priced_with_its_ring_and_its_messages(run):
    made = problem(run)
    rates = Rates(CLUSTER)
    slices = made.workloads["play"].slices

    def plan(ring: int | None, act: str) -> ExecutionPlan:
        calls = {"act": act, "play": "d1@0", "scale": "d1@0", "agent_train": act}
        plans = {name: CallPlan(Layout.parse(layout)) for name, layout in calls.items()}
        return ExecutionPlan({**plans, "play": replace(plans["play"], ring=ring)})

    def seconds(ring: int | None, act: str) -> float:
        return host_seconds(made, rates, plan(ring, act), made.graph["play"])

    assert seconds(1, "d1@0") == slices.seconds(1, INLINE)
    assert seconds(None, "d1@0") == slices.seconds(2, INLINE)
    handled = rates.efficiencies.question_seconds
    latency = 2 * rates.send(2048.0, within_host=True)
    far = AnswerPlace(QuestionSeconds(handled, handled, latency))
    assert seconds(4, "d1@1") == slices.seconds(4, [far]) > slices.seconds(4, INLINE)
    busy = times_of_plan(made, rates, plan(4, "d1@1"), {name: 0.0 for name in ("act", "agent_train")}).seconds
    names = [call.name for call in made.calls]  # The rank that answers does nothing else meanwhile.
    assert busy[0, names.index("act")] == busy[0, names.index("play")]


def test_stated_seconds_replace_what_a_run_records(run):
    work = problem(run, call_seconds={"play": 3.0}).workloads["play"]
    assert work.slices is None and work.seconds == 3.0
