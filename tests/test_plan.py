"""Execution plans: YAML in and out, and what is refused."""

from pathlib import Path

import pytest
import yaml

from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout

SHIPPED = sorted((Path(__file__).parent.parent / "plans").glob("*.yaml"))

GRAPH = DataflowGraph(
    (
        FunctionCall("generate", "generate", ("prompt",), ("ids",), role="actor"),
        FunctionCall("reward", "host", ("ids",), ("score",)),
        FunctionCall("train", "train_step", ("ids", "score"), role="actor"),
    ),
    ("prompt",),
)
TEXT = """
calls:
  generate: {layout: d4@0-3}
  reward: {layout: d2@2-3}
  train: {layout: d2t2@4-7, micro_batch_tokens: 4096, predicted: {seconds: 0.5}}
predicted: {step_seconds: 1.5}
"""


def plan(**changes):
    layouts = {"generate": "d4@0-3", "reward": "@0", "train": "t4@0-3", **changes}
    return ExecutionPlan({name: CallPlan(Layout.parse(text)) for name, text in layouts.items() if text})


def test_reads_a_hand_written_file_and_writes_it_back(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(TEXT)
    read = ExecutionPlan.load(str(path))
    assert read["train"].layout == Layout.parse("d2t2@4-7")
    assert read["train"].micro_batch_tokens == 4096 and read["train"].predicted == {"seconds": 0.5}
    assert read["generate"].micro_batch_tokens > 0 and read.predicted == {"step_seconds": 1.5}
    assert read.num_ranks == 8
    read.check(GRAPH, world_size=8)
    read.save(tmp_path / "again.yaml")
    assert ExecutionPlan.load(str(tmp_path / "again.yaml")) == read


def test_single_puts_host_calls_on_the_first_rank():
    single = ExecutionPlan.single(GRAPH, Layout.parse("t2@2-3"), micro_batch_tokens=8)
    assert {name: str(c.layout) for name, c in single.calls.items()} == {
        "generate": "t2@2-3",
        "reward": "d1@2",
        "train": "t2@2-3",
    }
    assert {c.micro_batch_tokens for c in single.calls.values()} == {8}
    single.check(GRAPH, world_size=4)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": None}, "calls.train is missing"),
        ({"trian": "@0"}, "calls.trian: the experiment has no such call (did you mean train?); its calls"),
        ({"generate": "d2@3-4"}, "calls.generate.layout d2@3-4 uses rank 4, but there are 4 ranks (0 to 3)"),
        ({"reward": "t2@0-1"}, "calls.reward.layout t2: a host call can be split over dp only"),
    ],
)
def test_check_names_what_does_not_fit_the_experiment(changes, sentence):
    with pytest.raises(ValueError) as caught:
        plan(**changes).check(GRAPH, world_size=4)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "calls is missing"),
        ("[1, 2]", "calls is missing"),
        ("calls: {}", "calls is missing"),
        ("calls: {a: d2@0-1}", "calls.a.layout is missing"),
        ("calls: {a: {layout: 4}}", "calls.a: 4 is not a layout"),
        ("calls: {a: {layout: d2@0-3}}", "calls.a: layout d2@0-3 is not legal"),
        ("calls: {a: {layout: '@0', micro_batch_tokens: 0}}", "calls.a: micro_batch_tokens is 0"),
        ("calls: {a: {layout: '@0', recompute: 1}}", "calls.a: recompute is 1: it must be true or false"),
        ("calls: {a: {layout: '@0', offload: 'no'}}", "calls.a: offload is 'no': it must be true or false"),
        ("calls: {a: {layout: '@0', micro_batches: 2}}", "calls.a has an unknown field 'micro_batches'"),
        ("calls: {a: {layout: '@0', 1: 2, b: 3}}", "calls.a has an unknown field '1'"),
        ("{calls: {a: {layout: '@0'}}, notes: x}", "unknown field 'notes': legal are calls, predicted"),
        ("calls: {a: [", "while parsing"),
    ],
)
def test_load_names_file_and_field(tmp_path, text, sentence):
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        ExecutionPlan.load(str(path))
    assert str(path) in str(caught.value) and sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_load_of_what_is_no_file(tmp_path):
    with pytest.raises(ValueError, match="'no-such-plan' is neither a path nor a shipped name in plans"):
        ExecutionPlan.load("no-such-plan")
    with pytest.raises(ValueError, match="directory"):
        ExecutionPlan.load(str(tmp_path))


def test_options_are_written_only_when_they_are_on():
    text = "calls: {generate: {layout: '@0', offload: true}, train: {layout: '@0', recompute: true}}"
    read = ExecutionPlan.from_dict(yaml.safe_load(text))
    assert read["generate"].offload and read["train"].recompute
    assert (read["generate"].options, read["train"].options) == (("offload",), ("recompute",))
    document = read.to_dict()
    assert document["calls"]["generate"].keys() == {"layout", "micro_batch_tokens", "offload"}
    assert document["calls"]["train"].keys() == {"layout", "micro_batch_tokens", "recompute"}
    assert ExecutionPlan.from_dict(document) == read


@pytest.mark.parametrize(("call", "kind"), [("generate", "generate"), ("reward", "host")])
def test_check_lets_only_train_steps_recompute(call, kind):
    refused = plan()
    refused = ExecutionPlan({**refused.calls, call: CallPlan(refused[call].layout, recompute=True)})
    with pytest.raises(ValueError, match=rf"^calls\.{call}\.recompute: the call's kind is {kind}; only "):
        refused.check(GRAPH, world_size=4)
    train = CallPlan(refused["train"].layout, recompute=True)
    ExecutionPlan({**plan().calls, "train": train}).check(GRAPH, world_size=4)


def test_predictions_stay_out_of_minimal_files():
    document = plan().to_dict()
    assert "predicted" not in document and set(document["calls"]["train"]) == {"layout", "micro_batch_tokens"}
    assert ExecutionPlan.from_dict(yaml.safe_load(yaml.safe_dump(document))) == plan()


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_plans_load_by_their_short_names(path):
    plan = ExecutionPlan.load(path.stem)
    assert plan == ExecutionPlan.load(str(path))
    assert plan.num_ranks == int(path.stem.split("-")[1])
