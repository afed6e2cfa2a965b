"""The dataflow graph: edges from keys, order, and what is refused."""

import pytest

from realhf.algorithms.ppo import ValueLoss
from realhf.calls import Generate, HostFunction, LogProbs, TrainStep, Values
from realhf.graph import DataflowGraph, FunctionCall


def call(name, inputs, outputs, kind="forward", role="actor"):
    return FunctionCall(name, kind, tuple(inputs), tuple(outputs), role=role)


def ppo():
    return DataflowGraph(
        (
            call("actor_train", ["ids", "score", "ref_logprobs"], [], "train_step"),
            call("ref_forward", ["ids"], ["ref_logprobs"], role="ref"),
            call("reward_forward", ["ids"], ["score"], role="reward"),
            call("actor_generate", ["prompt"], ["ids"], "generate"),
        ),
        ("prompt",),
    )


def test_edges_follow_from_keys():
    edges = {(a, b): data["keys"] for a, b, data in ppo().nx_graph.edges(data=True)}
    assert edges == {
        ("actor_generate", "ref_forward"): ["ids"],
        ("actor_generate", "reward_forward"): ["ids"],
        ("actor_generate", "actor_train"): ["ids"],
        ("reward_forward", "actor_train"): ["score"],
        ("ref_forward", "actor_train"): ["ref_logprobs"],
    }
    graph = DataflowGraph((call("a", [], ["x", "y"]), call("b", ["y", "x"], [])), ())
    assert graph.nx_graph.edges["a", "b"]["keys"] == ["y", "x"]


def test_order_is_topological_then_as_listed():
    graph = ppo()
    names = ["actor_generate", "ref_forward", "reward_forward", "actor_train"]
    assert [c.name for c in graph.order] == names
    assert [c.name for c in graph.of_role("actor")] == ["actor_generate", "actor_train"]
    assert graph.producer("score") is graph["reward_forward"]
    assert graph.producer("prompt") is None
    with pytest.raises(KeyError):
        graph["critic_train"]


def test_replace_and_add():
    graph = ppo().replace(call("reward_forward", ["ids", "prompt"], ["score"], role="reward"))
    assert graph["reward_forward"].inputs == ("ids", "prompt") and graph.calls[2].name == "reward_forward"
    graph = graph.add(call("log", ["score", "answer"], [], "host", None), inputs=("answer",))
    assert graph.order[-1].name in ("log", "actor_train") and graph.inputs == ("prompt", "answer")
    with pytest.raises(ValueError, match="no call is named 'critic': there are actor_train, ref_forward"):
        graph.replace(call("critic", [], []))


def test_refused_calls():
    with pytest.raises(ValueError, match="kind 'infer': legal kinds are generate, forward, train_step, host"):
        call("a", [], [], "infer")
    with pytest.raises(ValueError, match="needs a role"):
        call("a", [], [], "forward", None)
    with pytest.raises(ValueError, match="has no role"):
        call("a", [], [], "host", "actor")
    with pytest.raises(ValueError, match="reads must be a tuple of role names, not a string"):
        FunctionCall("a", "forward", role="actor", reads="critic")
    with pytest.raises(ValueError, match="reads roles, actor, and has none itself"):
        FunctionCall("a", "host", reads=("actor",))
    with pytest.raises(ValueError, match="is of role 'actor': reads must name other roles"):
        FunctionCall("a", "forward", role="actor", reads=("actor",))
    with pytest.raises(ValueError, match="inputs must be a tuple of key names, not a string"):
        FunctionCall("a", "forward", "ids", role="actor")
    with pytest.raises(ValueError, match="both reads and writes the key 'x'"):
        call("a", ["x"], ["x"])


def test_the_kind_of_a_call_follows_from_its_work():
    works = (Generate(), LogProbs(), Values(), TrainStep(ValueLoss()), HostFunction(print))
    calls = [
        FunctionCall(f"call_{i}", inputs=("x",), role=None if i == 4 else "actor", work=work)
        for i, work in enumerate(works)]
    assert [c.kind for c in calls] == ["generate", "forward", "forward", "train_step", "host"]
    assert FunctionCall("call_1", "forward", ("x",), (), role="actor", work=LogProbs()) == calls[1]
    graph = DataflowGraph(tuple(calls), ("x",))
    assert graph.works(LogProbs) == works[1:2] and graph.works(Values, role="critic") == ()
    assert calls[1].with_work(temperature=0.5).work == LogProbs(0.5)
    with pytest.raises(ValueError, match="of kind 'generate' has work LogProbs: it must be Generate"):
        FunctionCall("a", "generate", ("x",), role="actor", work=LogProbs())
    with pytest.raises(ValueError, match="call 'a' has kind '': legal kinds are generate, forward"):
        FunctionCall("a", inputs=("x",), role="actor")


@pytest.mark.parametrize(
    ("calls", "sentence"),
    [
        ([], "the graph has no calls"),
        ([call("a", [], ["x"]), call("a", [], ["y"])], "two calls are named 'a'"),
        ([call("a", ["x"], [])], "call 'a' needs the key 'x', which nobody produces; there are: prompt"),
        ([call("a", [], ["x"]), call("b", [], ["x"])], "'x' is produced twice: by call 'a' and by call 'b'"),
        ([call("a", [], ["prompt"])], "'prompt' is produced twice: by the dataset and by call 'a'"),
        ([call("a", ["y"], ["x"]), call("b", ["x"], ["y"])], "the calls form a cycle: a -> b -> a"),
    ],
)
def test_refused_graphs(calls, sentence):
    with pytest.raises(ValueError) as caught:
        DataflowGraph(tuple(calls), ("prompt",))
    assert sentence in str(caught.value)
