"""The planner's view of modules: their bytes, stated seconds, and products at the device's peak."""

from dataclasses import replace

import pytest

from realhf import Cluster, Expected
from realhf.cli.main import main
from realhf.cli.planning_problem import problem_of
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.layout import Layout
from realhf.planner.call_cost import call_cost
from realhf.planner.rates import Rates
from realhf.planner.shard import weights_bytes
from realhf.planner.step_time import host_anchor, times_of_plan
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

    there_and_back = 2 * (rates.send(1000.0, within_host=True) + rates.efficiencies.message_seconds)
    assert seconds(None, play="d1@0", act="d2@0-1", actor_train="d1@0") == 7
    remote = {"play": "d1@0", "act": "d1@1", "actor_train": "d1@1"}
    assert seconds(None, **remote) == pytest.approx(7 + 1000 * there_and_back)
    assert seconds(4, **remote) == pytest.approx(7 + 250 * there_and_back)
    assert seconds(None, play="d2@0,2", act="d1@1", actor_train="d1@1") == pytest.approx(
        3.5 + 500 * there_and_back)
    assert host_anchor(problem, problem.graph["play"]) == ("act", False)


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
