"""Calls in plain Python: copies go in, JSON's form comes out, and what goes wrong is a sentence."""

import sys
from datetime import datetime

import numpy as np
import pytest
import torch

from realhf.calls import HostFunction
from realhf.data.batch import Batch, Packed
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.runtime.execute.host_call import call_host_function


def _run(function, *, outputs=("made",), **columns):
    columns = columns or {"prompt": ["a", "b"]}
    call = FunctionCall("mine", "host", tuple(columns), outputs, work=HostFunction(function))
    return call_host_function(call, Batch([4, 5], columns), None)


def test_columns_are_the_same_whether_they_travel_or_not():
    column = [(1, {"a": (2.5,)}), np.float32(0.5)]
    batch = _run(lambda batch, context: {"made": column}).batch
    assert batch["made"] == [[1, {"a": [2.5]}], 0.5] == Batch.unpack(batch.pack())["made"]
    assert type(batch["made"][1]) is float


def test_tensors_and_arrays_stay_tensors():
    packed = Packed(torch.arange(3), [1, 2])
    assert _run(lambda batch, context: {"made": packed}).batch["made"] is packed
    made = _run(lambda batch, context: {"made": np.array([1.5, 2.5])}).batch["made"]
    assert torch.equal(made, torch.tensor([1.5, 2.5], dtype=torch.float64))


def test_a_function_changes_only_its_own_copy():
    prompts = [[{"role": "user", "content": "x"}], [{"role": "user", "content": "y"}]]

    def function(batch, context):
        for prompt in batch["prompt"]:
            prompt.pop()
        return {}

    _run(function, outputs=(), prompt=prompts)
    assert [len(prompt) for prompt in prompts] == [1, 1]


def _filter(answer, **options):
    call = FunctionCall("mine", "host", ("x",), ("y",), work=HostFunction(lambda b, c: answer, **options))
    return call_host_function(call, Batch([4, 5, 6], {"x": [1, 2, 3]}), None)


def test_a_filter_keeps_some_samples_and_a_decision_is_json():
    kept = _filter({"y": [7, 8, 9], "keep": torch.tensor([True, False, True])}, filters=True)
    assert kept.batch.ids == [4, 6] and kept.batch["y"] == [7, 9]
    assert _filter({"y": [7, 8, 9], "decision": (1, "a")}, decides=True).decision == [1, "a"]
    with pytest.raises(UserError, match="returned no column 'keep', which it declares"):
        _filter({"y": [7, 8, 9]}, filters=True)
    for wrong in ([True], [0.5, 1, 0], "abc"):
        with pytest.raises(UserError, match="'keep' must have a boolean for each of the 3 samples"):
            _filter({"y": [7, 8, 9], "keep": wrong}, filters=True)
    with pytest.raises(UserError, match="'mine': 'decision' must be a JSON value: a value of type set"):
        _filter({"y": [7, 8, 9], "decision": {1, 2}}, decides=True)


def test_metrics_are_numbers():
    given = {"mine/x": np.float32(0.5), "mine/y": torch.tensor(2)}
    metrics = _run(lambda batch, context: ({}, given), outputs=()).metrics
    assert metrics == {"mine/x": 0.5, "mine/y": 2.0} and {type(x) for x in metrics.values()} == {float}


@pytest.mark.parametrize(
    "answer, sentence",
    [
        ({"made": [datetime(2024, 1, 1), 2]}, "column 'made' has a value of type datetime; legal are text"),
        ({"made": [{1: "a"}, {}]}, "column 'made' has a dict with the key 1: keys must be text"),
        ({"made": "ab"}, "column 'made' is str: it must be a list, a tensor or Packed"),
        ({"made": [1]}, "column 'made' has 1 entries for 2 samples"),
        ({}, "returned no column 'made'"),
        (None, "returned no column 'made'"),
        ([1, 2], "returned list: it must return a dict of columns"),
        (({"made": [1, 2]}, {"x": "much"}), "metric 'x' is 'much': it must be a number"),
    ],
)
def test_answers_that_are_none_name_the_call(answer, sentence):
    with pytest.raises(UserError, match=f"host call 'mine'.*{sentence}"):
        _run(lambda batch, context: answer)


def test_errors_are_located_at_the_users_line():
    def function(batch, context):
        return torch.cat([])

    with pytest.raises(UserError, match=f"host call 'mine' raised .*Error.*{__file__}:") as error:
        _run(function)
    assert f":{function.__code__.co_firstlineno + 1})" in str(error.value)
    assert error.value.__cause__ is not None


def test_leaving_is_an_error():
    with pytest.raises(UserError, match="host call 'mine' raised SystemExit: 0"):
        _run(lambda batch, context: sys.exit(0))


def test_names_of_the_runs_own_metrics_are_refused():
    """A row of metrics.jsonl has `step`, by which a run is continued, and times of its own."""
    for name in ("step", "timing_s/step", "perf/mfu", "eval/score"):
        with pytest.raises(UserError, match=rf"^host call 'mine' logs the metric '{name}', a name of"):
            _run(lambda batch, context, name=name: ({}, {name: 1.0}), outputs=())
