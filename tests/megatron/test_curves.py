"""Losses and gradient norms of the megatron engine, beside those of our own engine."""

import pytest

from tests.nn.tiny import hf_config


def dense(**changes):
    return hf_config("Qwen2ForCausalLM") | {"intermediate_size": 48, "vocab_size": 67} | changes


@pytest.fixture(scope="module")
def reference(megatron):
    """Return a function that gives the curve of the native engine on one rank."""
    found = {}

    def curve(name, hf):
        if name not in found:
            (found[name],) = megatron("curve", "native", hf, "d1@0", {}, num_ranks=1)
        return found[name]

    return curve


def assert_equal(curves, expected):
    curves = [curve for curve in curves if curve and "loss" in curve[0]]
    assert curves
    for curve in curves:
        for ours, theirs in zip(expected, curve, strict=True):
            for name in ("loss", "grad_norm"):
                assert theirs[name] == pytest.approx(ours[name], rel=1e-5), (name, theirs, ours)


@pytest.mark.parametrize("layout", ["d1@0", "d2@0-1", "t2@0-1", "p2@0-1", "t2p2@0-3"])
def test_curve_is_that_of_the_native_engine(megatron, reference, layout):
    curves = megatron("curve", "megatron", dense(), layout, {}, num_ranks=4)
    assert_equal(curves, reference("dense", dense()))
