"""The planner's view of modules: their bytes, stated seconds, and products at the device's peak."""

from dataclasses import replace

import pytest

from realhf import Cluster, Expected
from realhf.cli.main import main
from realhf.cli.planning_problem import problem_of
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.layout import Layout
from realhf.planner.call_cost import call_cost
from realhf.planner.links import ContiguousLayout
from realhf.planner.memory_account import MemoryAccount
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates
from realhf.planner.reallocation import reallocation_seconds
from realhf.planner.shard import weights_bytes
from realhf.planner.step_time import (
    contiguous_layouts,
    dependencies,
    host_anchor,
    moving_seconds,
    step_seconds,
    times_of_plan,
)
from realhf.runtime.compile.actions import Reallocate
from realhf.runtime.compile.checks import check_graph
from realhf.runtime.compile.program import compile_program
from tests.control.modules import Net, experiment

CLUSTER = Cluster.load("cpu-laptop")


def cost(made, call: str, layout: str, **options) -> float:
    problem = problem_of(made, CLUSTER)
    role = problem.roles[problem.graph[call].role]
    plan = CallPlan(Layout.parse(layout), **options)
    return call_cost(
        Rates(CLUSTER), problem.graph[call], role, problem.workloads[call], plan, per_host=4).seconds


def test_bytes_are_those_of_the_module():
    problem = problem_of(experiment("regression"), CLUSTER)
    numel = sum(tensor.numel() for tensor in Net().state_dict().values())
    assert weights_bytes(problem.roles["net"], Layout.parse("d2@0-1").strategy, 0) == 8 * numel


def test_stated_seconds_are_shared_by_replicas():
    made = experiment("regression", expected=Expected(call_seconds={"net_train": 3.0}))
    calls = 2 * 2 * 1e-3  # Two mini-batches in two epochs, each a call of the function.
    assert cost(made, "net_train", "d1@0") == pytest.approx(3 + calls)
    assert cost(made, "net_train", "d3@0-2") == pytest.approx(1 + calls)
    assert cost(made, "net_train", "d1@0", micro_batch_tokens=2) == pytest.approx(3 + 3 * calls)


def test_other_functions_cost_their_products():
    """A train step has three products with each parameter and row, of two operations, in each epoch."""
    numel = sum(tensor.numel() for tensor in Net().state_dict().values())
    peak = CLUSTER.peak_flops.get("float64") or min(CLUSTER.peak_flops.values())
    expected = 6 * numel * 12 * 2 / peak + 4e-3
    assert cost(experiment("regression"), "net_train", "d1@0") == pytest.approx(expected)


def test_host_calls_take_their_stated_seconds():
    made = experiment("player", expected=Expected(call_seconds={"play": 7.0}, host_seconds=2.0))
    assert problem_of(made, CLUSTER).workloads["play"].seconds_on(1) == 7
    assert problem_of(experiment("player"), CLUSTER).workloads["play"].seconds_on(1) == 0


def test_questions_cost_messages_where_another_rank_answers():
    """Two messages for each question, of half the bytes each; a ring has as many under way at a time."""
    made = experiment("player", expected=Expected(
        call_seconds={"play": 7.0}, questions={"play": 1000.0}, question_bytes=2000.0))
    problem = problem_of(made, CLUSTER)
    rates = Rates(CLUSTER)

    def seconds(ring: int | None, **layouts: str) -> float:
        calls = {name: CallPlan(Layout.parse(layout)) for name, layout in layouts.items()}
        calls["play"] = replace(calls["play"], ring=ring)
        times = times_of_plan(problem, rates, ExecutionPlan(calls), {"act": 0.0, "actor_train": 0.0})
        return float(times.seconds[0, [call.name for call in problem.calls].index("play")])

    there_and_back = 2 * (rates.send(1000.0, within_host=True) + rates.efficiencies.question_seconds)
    assert seconds(None, play="d1@0", act="d2@0-1", actor_train="d1@0") == 7
    remote = {"play": "d1@0", "act": "d1@1", "actor_train": "d1@1"}
    assert seconds(None, **remote) == pytest.approx(7 + 1000 * there_and_back)
    assert seconds(4, **remote) == pytest.approx(7 + 250 * there_and_back)
    assert seconds(None, play="d2@0,2", act="d1@1", actor_train="d1@1") == pytest.approx(
        3.5 + 500 * there_and_back)
    assert host_anchor(problem, problem.graph["play"]) == ("act", False)


READING = {
    "value": "d1@0", "show": "d1@0", "critic_train": "d2@0-1", "actor_train": "d1@2",
    "temperature_train": "d1@3"}


def reading(layouts: dict[str, str], **settings) -> tuple[Problem, ExecutionPlan]:
    """Return the problem of four roles whose calls read each other, and a plan."""
    calls = {name: CallPlan(Layout.parse(layout)) for name, layout in layouts.items()}
    return problem_of(experiment("actor_critic", **settings), CLUSTER), ExecutionPlan(calls)


def test_copies_that_calls_read_take_memory():
    """Each rank holds the modules of the calls that it runs and of those that they read, once."""
    problem, plan = reading(READING)
    resting = MemoryAccount(problem).of_plan(plan).resting
    numel = {name: role.spec.numel for name, role in problem.roles.items()}
    critics = {"critic", "actor", "target"}
    held = [critics, critics, {"actor", "critic", "temperature"}, {"temperature", "actor"}]
    for rank, roles in enumerate(held):
        weights = sum(float(size[rank]) for use, size in resting.items() if not use.endswith("optimizer"))
        assert weights == 8 * sum(numel[role] for role in roles)


@pytest.mark.parametrize("layouts", [
    READING, dict.fromkeys(READING, "d1@0"), READING | {"temperature_train": "d1@2"},
    READING | {"value": "d1@3", "critic_train": "d1@2", "actor_train": "d1@1"}])
def test_copies_that_calls_read_are_priced_where_the_runtime_makes_them(layouts):
    """In a step, the same roles move to the same ranks; `target` follows where the critic trains."""
    problem, plan = reading(layouts)
    rates = Rates(CLUSTER)
    needs = dependencies(problem, rates)
    moving = moving_seconds(rates, problem, needs, contiguous_layouts(problem, plan))
    costly = {
        (copy.role, str(plan[problem.calls[copy.user].name].layout))
        for copy, seconds in zip(needs.weights, needs.durations(moving)[0], strict=True) if seconds > 0}
    program = compile_program(experiment("actor_critic"), plan, world_size=4)
    made = {
        (action.target_set, str(action.target)) for action in program.actions
        if isinstance(action, Reallocate)
        and (action.sharded or not set(action.target.ranks) <= set(action.source.ranks))}
    assert costly == made
    assert bool(costly) == (layouts["critic_train"] != "d1@0")


def test_reading_on_other_ranks_makes_the_step_longer():
    """The seconds are those of the reallocation, as for calls of the role itself."""
    seconds = {"value": 0.1, "critic_train": 1.0, "actor_train": 1.0, "temperature_train": 0.1}
    apart = {**dict.fromkeys(READING, "d1@0"), "actor_train": "d1@1"}
    problem, plan = reading(apart)
    rates = Rates(CLUSTER)
    needs = dependencies(problem, rates)
    moving = moving_seconds(rates, problem, needs, contiguous_layouts(problem, plan))[0]
    by_copy = {
        (copy.role, problem.calls[copy.user].name): value
        for copy, value in zip(needs.weights, moving, strict=True)}
    home, there = (ContiguousLayout(Layout.parse("d1@0").strategy, rank) for rank in (0, 1))
    assert by_copy["critic", "actor_train"] == pytest.approx(
        reallocation_seconds(rates, problem.roles["critic"], home, there))
    assert by_copy["critic", "value"] == by_copy["target", "critic_train"] == 0
    # The actor trains after the critic on another rank, and its weights come back for the next step.
    there_and_back = by_copy["critic", "actor_train"] + by_copy["actor", "critic_train"]
    assert step_seconds(problem, rates, plan, seconds) >= 2.0 + there_and_back


def test_questions_of_unknown_calls_are_refused():
    made = experiment("player", expected=Expected(questions={"act": 1.0}))
    with pytest.raises(ValueError, match="expected.questions has 'act': the host calls that ask are play"):
        problem_of(made, CLUSTER)


def test_only_calls_that_ask_have_a_ring():
    calls = {"net_train": CallPlan(Layout.parse("d1@0"), ring=2)}
    with pytest.raises(ValueError, match="calls.net_train.ring: only a host call that asks others"):
        ExecutionPlan(calls).check(experiment("regression").graph(), world_size=1)
    with pytest.raises(ValueError, match="ring is 0: it must be a whole number of at least 1"):
        CallPlan(Layout.parse("d1@0"), ring=0)


def test_seconds_of_unknown_calls_are_refused():
    made = experiment("regression", expected=Expected(call_seconds={"train": 1.0}))
    with pytest.raises(ValueError, match="expected.call_seconds has 'train': the calls are net_train"):
        problem_of(made, CLUSTER)


FILE = """
from tests.control.modules import experiment as make
experiment = make("actor_critic", steps=2)
"""


def test_commands_take_modules(tmp_path, monkeypatch, capsys):
    """check counts the parameters, plan writes a plan, run follows it, and report makes a page of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.py").write_text(FILE)
    assert main(["check", "exp.py"]) == 0
    assert "float64, 147 parameters, 1.18 kB of weights on a rank" in capsys.readouterr().out
    assert main(["plan", "exp.py", "--cluster", "cpu-laptop", "--devices", "1", "-o", "plan.yaml"]) == 0
    assert "micro_batch_tokens: 1\n" not in (tmp_path / "plan.yaml").read_text()
    assert main(["run", "exp.py", "--plan", "plan.yaml", "--out", "run"]) == 0
    assert main(["report", "run", "-o", "page.html"]) == 0
    assert "critic_train" in (tmp_path / "page.html").read_text()


def test_a_lag_above_1_is_refused_where_answers_would_only_be_older():
    made = experiment("player", max_lag=2)
    with pytest.raises(ValueError, match="max_lag is 2 and rounds 2: .* samples would wait and grow older"):
        check_graph(made, made.graph(), made.roles())
    made = experiment("player", max_lag=1)
    check_graph(made, made.graph(), made.roles())
