"""Compares json_form with encoding to JSON and back."""

import enum
import json
from datetime import datetime

import numpy as np
import pytest
import torch

from realhf.data.rows import json_form


class Level(enum.IntEnum):
    HARD = 2


class Name(enum.StrEnum):
    A = "a"


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, 1.5, "text", [1, [2, (3, "x")]], (1, 2)),
        *({"a": (1, {"b": None})}, Level.HARD, Name.A, [Name.A]),
    ],
)
def test_it_is_what_comes_back_from_json(value):
    form = json_form(value)
    assert form == json.loads(json.dumps(value)) and type(form) is type(json.loads(json.dumps(value)))


@pytest.mark.parametrize(
    "value, form",
    [
        (np.float32(0.5), 0.5), (np.int64(3), 3), (np.bool_(True), True), (np.arange(3), [0, 1, 2]),
        ([torch.tensor(2), torch.tensor([1.5])], [2, [1.5]]), (np.str_("x"), "x"), (np.float64(2.5), 2.5),
    ],
)  # fmt: skip
def test_numbers_of_libraries_become_pythons(value, form):
    made = json_form(value)
    assert made == form and type(made) is type(form)


def test_it_is_a_copy():
    value = {"a": [1]}
    json_form(value)["a"].append(2)
    assert value == {"a": [1]}


@pytest.mark.parametrize(
    "value, what",
    [
        (datetime(2024, 1, 1), "a value of type datetime"),
        ([{"a": b"x"}], "a value of type bytes"),
        ({1: "a"}, "a dict with the key 1: keys must be text"),
        ([{1, 2}], "a value of type set"),
        (np.datetime64("2024-01-01"), "a value of type date"),
    ],
)
def test_what_json_cannot_hold_is_named(value, what):
    with pytest.raises(TypeError, match=what):
        json_form(value)
