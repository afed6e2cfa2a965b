"""Whole runs with a megatron actor, beside runs with a native one."""

import pytest

from tests.runtime.tiny import write_task
from tests.samples import marked

LAYOUTS = ("d2@0-1", "t2@2-3", "t2p2@0-3")
"""The layouts of actor_generate, ref_forward and actor_train."""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def reference(megatron, task):
    return megatron("grpo", "native", ("d1@0",) * 3, task, None, None, num_ranks=4)[0]


def assert_equal(metrics, expected):
    for ours, theirs in zip(metrics, expected, strict=True):
        for name in ("reward/mean", "actor/loss", "actor/grad_norm", "actor/approx_kl"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), (name, ours, theirs)


@pytest.mark.parametrize("layouts", marked([(LAYOUTS,), (("d2@0-1", "d1@0", "d2@0-1"),)], quick=[0]))
@pytest.mark.slow
def test_grpo_follows_the_curve_of_a_native_actor(megatron, task, reference, layouts):
    """The second plan generates in the layout of training, where both engines have a copy."""
    tokens, metrics = megatron("grpo", "megatron", layouts, task, None, None, num_ranks=4)[0]
    assert tokens == reference[0]
    assert_equal(metrics, reference[1])


@pytest.mark.parametrize("layouts", marked([
    (LAYOUTS,), (("d2@0-1", "t2@2-3", "d2t2@0-3"),), (("d2@0-1", "p2v2@2-3", "t2p2v2@0-3"),),
], quick=[]))
def test_checkpoint_goes_on_under_this_and_another_plan(megatron, task, tmp_path, layouts):
    whole = tmp_path / "whole"
    expected = megatron("grpo", "megatron", LAYOUTS, task, whole, None, num_ranks=4)[0]
    start = whole / "checkpoints" / "step_1"
    found = megatron("grpo", "megatron", layouts, task, tmp_path / "out", start, num_ranks=4)[0]
    assert found[0] == expected[0][1:]
    assert_equal(found[1][-2:], expected[1][1:])
