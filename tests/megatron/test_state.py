"""State of the megatron engine by parameter and region, and its way to other layouts, to files and back."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec, region_slices
from tests.engine.reference import ragged_rows
from tests.megatron.test_curves import hf_config
from tests.samples import marked

LAYOUTS = [
    ("qwen2", "d2t2@0-3"), ("qwen3-moe", "d2t2e2@0-3"), ("qwen2-moe", "d2p2@0-3"), ("qwen2", "d2p2v2@0-3"),
]
LIBRARIES = [("transformer_engine", "float32"), ("grouped_gemm", "bfloat16")]


def joined(spec, pieces):
    """Return name -> whole parameter, from the pieces of all ranks, which must agree and leave no hole."""
    whole = {param.name: torch.full(param.shape, float("nan")) for param in spec.params}
    for held in pieces:
        for name, boxes in held.items():
            for box, values in boxes:
                known = whole[name][region_slices(box)]
                assert bool((known.isnan() | (known == values)).all()), name
                whole[name][region_slices(box)] = values.float()
    assert not any(values.isnan().any() for values in whole.values())
    return whole


def assert_state_is_right(ranks, native, spec, *, layout, dtype="float32"):
    """Assert that weights are rounded master copies, and that moments are nearly those of the native
    engine."""
    weights = joined(spec, [rank["weights"] for rank in ranks])
    masters = joined(spec, [rank["master"] for rank in ranks])
    for name, values in weights.items():
        assert torch.equal(masters[name].to(getattr(torch, dtype)).float(), values), name
    held, owned = (
        sum(values.numel() for rank in ranks for boxes in rank[kind].values() for _, values in boxes)
        for kind in ("weights", "master")
    )
    assert owned * 2 == held or "e2" in layout  # Two replicas; experts over ep have one.
    tolerance = 1e-4 if dtype == "float32" else 0.25  # Rounding may send a token to another expert.
    for kind in ("exp_avg", "exp_avg_sq"):  # (An update by a gradient near 0 may have either sign.)
        ours = joined(spec, [rank[kind] for rank in ranks])
        theirs = joined(spec, [native[kind]])
        for parameter, values in theirs.items():
            error = (ours[parameter] - values).abs().max()
            assert error <= tolerance * values.abs().max() + 1e-7, (kind, parameter)


@pytest.mark.parametrize(("name", "layout"), marked(LAYOUTS, quick=[1, 3]))
def test_optimizer_owns_every_element_where_it_says(megatron, name, layout):
    """Every element of a float32 model is its own master copy, and one replica owns it."""
    hf = hf_config(name)
    ranks = megatron("state", hf, layout, num_ranks=4)
    (native,) = megatron("native_state", hf, num_ranks=1)
    assert_state_is_right(ranks, native, model_spec(ModelConfig.from_hf(hf)), layout=layout)


@pytest.mark.parametrize(("library", "dtype"), marked(LIBRARIES, quick=[0]))
def test_optimizer_owns_every_element_of_grouped_experts(megatron, library, dtype):
    hf = hf_config("qwen3-moe")
    ranks = megatron("with_library", library, "state", hf, "d2t2@0-3", dtype, num_ranks=4)
    (native,) = megatron("native_state", hf, dtype, num_ranks=1)
    assert_state_is_right(ranks, native, model_spec(ModelConfig.from_hf(hf)), layout="d2t2", dtype=dtype)


@pytest.mark.parametrize(
    ("name", "layout", "other"), marked([
        ("qwen2", "t2p2@0-3", "d3@0-2"), ("qwen3-moe", "d2t2e2@0-3", "p2@1-2"), ("qwen2", "d2@0-1", "t4@0-3"),
        ("qwen2", "p2v2@0-1", "p2@0-1"), ("qwen3-moe", "t2p2v2@0-3", "d2e2@1-2"),
    ], quick=[0, 4]))
def test_weights_go_to_our_layout_and_back(megatron, name, layout, other):
    for differing in megatron("moved_back", hf_config(name), layout, other, num_ranks=4):
        assert not differing


@pytest.mark.parametrize(("library", "dtype"), marked(LIBRARIES, quick=[0]))
@pytest.mark.slow
def test_grouped_experts_go_to_our_layout_and_back(megatron, library, dtype):
    job = ("moved_back", hf_config("qwen3-moe"), "d2t2e2@0-3", "p2@1-2", dtype)
    for differing in megatron("with_library", library, *job, num_ranks=4):
        assert not differing


@pytest.mark.parametrize(("name", "layout"), marked(
    [("qwen2", "t2p2v2@0-3"), ("qwen3-moe", "d2t2e2@0-3")], quick=[1]))
@pytest.mark.slow
def test_exported_model_gives_transformers_the_same_logits(megatron, tmp_path, name, layout):
    hf = hf_config(name)
    ranks = megatron("exported", hf, layout, tmp_path, num_ranks=4)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32")
    expected = []
    for prompt, completion in ragged_rows(6, seed=0):
        ids = torch.tensor(prompt + completion)
        with torch.inference_mode():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(dim=1)
        expected += [0.0] * len(prompt)  # Only tokens of the response have log-probs.
        expected += logprobs.gather(1, ids[1:, None])[len(prompt) - 1 :, 0].tolist()
    found = [rank for rank in ranks if rank]
    assert found
    for values in found:
        assert values == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("name", "layout"), marked([
    ("qwen2", "t2p2v2@0-3"), ("qwen3-moe", "d2t2e2@0-3"),
], quick=[0]))
def test_loading_reads_into_the_tensors_in_place(megatron, tmp_path, name, layout):
    """No tensor is made that is half as large as the weights of a rank."""
    hf = hf_config(name) | {"vocab_size": 60_000}
    torch.manual_seed(0)
    written = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**hf))
    written.save_pretrained(tmp_path)
    ranks = [rank for rank in megatron("loaded", hf, layout, tmp_path, num_ranks=4) if rank]
    whole = joined(model_spec(ModelConfig.from_hf(hf)), [weights for _, weights in ranks])
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(whole[name], values) for name, values in stored.items())
    for largest, weights in ranks:
        held = sum(values.nbytes for pieces in weights.values() for _, values in pieces)
        assert largest < held / 2
