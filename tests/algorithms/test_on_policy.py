"""The settings of generation that an experiment passes on to its calls."""

from dataclasses import fields

import pytest

from realhf.algorithms.on_policy import OnPolicy
from realhf.calls import Generate, SamplingConfig

CHANGED = {
    "sampling": SamplingConfig(max_new_tokens=7), "seed": 3, "max_rows": 5, "kv_cache_gib": 0.25,
    "prefill_tokens": 9, "work_stealing": False, "cuda_graphs": False, "cache_on_update": "keep",
}  # fmt: skip


OPTIONS = ("max_rows", "kv_cache_gib", "prefill_tokens", "work_stealing", "cuda_graphs", "cache_on_update")


@pytest.mark.parametrize("name", OPTIONS)
def test_a_generation_option_has_the_same_default_in_experiments_and_calls(name):
    assert getattr(OnPolicy, name) == getattr(Generate, name)


def test_every_generation_option_of_an_experiment_reaches_the_call():
    assert {field.name for field in fields(Generate)} == set(CHANGED)
    assert OnPolicy(**CHANGED).actor_generate().work == Generate(**CHANGED)
