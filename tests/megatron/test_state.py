"""State of the megatron engine by parameter and region, and its way to other layouts and back."""

import pytest
import torch

from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from realhf.region import region_slices
from tests.megatron.test_curves import hf_config

LAYOUTS = [("qwen2", "d2t2@0-3"), ("qwen3-moe", "d2t2e2@0-3"), ("qwen2-moe", "d2p2@0-3")]


def joined(spec, pieces):
    """Return name -> whole parameter, from the pieces of all ranks, which must agree and leave no hole."""
    whole = {param.name: torch.full(param.shape, float("nan")) for param in spec.params}
    for held in pieces:
        for name, boxes in held.items():
            for box, values in boxes:
                known = whole[name][region_slices(box)]
                assert bool((known.isnan() | (known == values)).all()), name
                whole[name][region_slices(box)] = values
    assert not any(values.isnan().any() for values in whole.values())
    return whole


@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_optimizer_owns_every_element_where_it_says(megatron, name, layout):
    """Every element of a float32 model is its own master copy, and one replica owns it."""
    hf = hf_config(name)
    spec = model_spec(ModelConfig.from_hf(hf))
    ranks = megatron("state", hf, layout, num_ranks=4)
    weights = joined(spec, [rank["weights"] for rank in ranks])
    masters = joined(spec, [rank["master"] for rank in ranks])
    assert all(torch.equal(masters[name], values) for name, values in weights.items())
    held, owned = (
        sum(values.numel() for rank in ranks for boxes in rank[kind].values() for _, values in boxes)
        for kind in ("weights", "master")
    )
    assert owned * 2 == held or "e2" in layout  # Two replicas; experts over ep have one.
    (native,) = megatron("native_state", hf, num_ranks=1)
    for kind in ("exp_avg", "exp_avg_sq"):  # (An update by a gradient near 0 may have either sign.)
        ours = joined(spec, [rank[kind] for rank in ranks])
        theirs = joined(spec, [native[kind]])
        for parameter, values in theirs.items():
            error = (ours[parameter] - values).abs().max()
            assert error <= 1e-4 * values.abs().max() + 1e-7, (kind, parameter)


@pytest.mark.parametrize(
    ("name", "layout", "other"),
    [("qwen2", "t2p2@0-3", "d3@0-2"), ("qwen3-moe", "d2t2e2@0-3", "p2@1-2"), ("qwen2", "d2@0-1", "t4@0-3")])
def test_weights_go_to_our_layout_and_back(megatron, name, layout, other):
    for differing in megatron("moved_back", hf_config(name), layout, other, num_ranks=4):
        assert not differing
