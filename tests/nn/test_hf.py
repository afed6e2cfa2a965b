"""Hugging Face directories in and out, and what a user reads when one is broken."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from realhf.nn.hf import load_weights, save_weights
from tests.nn.tiny import SEQ_LENS, build, hf_config, tokens


@pytest.fixture
def directory(tmp_path):
    """A model directory of one file."""
    save_weights(tmp_path, build(hf_config(), dtype=torch.float32))
    return tmp_path


def _rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_opens_what_is_saved(tmp_path, tied):
    model = build(hf_config(tied=tied), dtype=torch.float32)
    save_weights(tmp_path, model)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert reference.dtype == torch.float32
    expected = torch.cat([reference(part[None]).logits[0] for part in tokens().split(SEQ_LENS)])
    torch.testing.assert_close(model.logits(model(tokens(), SEQ_LENS)), expected, rtol=1e-4, atol=1e-4)


def test_round_trip_is_byte_identical(tmp_path):
    torch.manual_seed(0)
    reference = transformers.Qwen2ForCausalLM(transformers.AutoConfig.for_model(**hf_config())).bfloat16()
    reference.save_pretrained(tmp_path / "hf")
    reference.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    model, again = (build(hf_config(), dtype=torch.bfloat16) for _ in range(2))
    load_weights(tmp_path / "hf", model)
    load_weights(tmp_path / "sharded", again)
    assert torch.equal(model.flat, again.flat)
    save_weights(tmp_path / "one", model)
    theirs, ours = (load_file(tmp_path / d / "model.safetensors") for d in ("hf", "one"))
    assert theirs.keys() == ours.keys() and all(torch.equal(theirs[k], ours[k]) for k in ours)
    load_weights(tmp_path / "one", model)
    save_weights(tmp_path / "two", model)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_score_head_from_a_language_model_and_back(directory):
    model = build(hf_config(), head="score", dtype=torch.float32)
    before = model.shards()["score.weight"].clone()
    assert load_weights(directory, model) == ["score.weight"]
    assert torch.equal(model.shards()["score.weight"], before) and before.any()
    save_weights(directory / "critic", model)
    critic = transformers.AutoModelForSequenceClassification.from_pretrained(directory / "critic")
    assert torch.equal(critic.score.weight, before)
    assert load_weights(directory / "critic", model) == []


def _drop_norm(tensors):
    del tensors["model.norm.weight"]


def _widen_norm(tensors):
    tensors["model.norm.weight"] = torch.ones(33)


def _add_norm(tensors):
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)


@pytest.mark.parametrize(
    "change, message",
    [
        (_drop_norm, "parameter model.norm.weight is in none of the safetensors files"),
        (_widen_norm, r"tensor model.norm.weight has shape \(33,\); the config says \(32,\)"),
        (_add_norm, "a qwen2 model has no parameter model.layers.0.self_attn.q_norm.weight"),
    ],
)
def test_wrong_tensors_are_named(directory, change, message):
    _rewrite(directory, change)
    with pytest.raises(ValueError, match=message):
        load_weights(directory, build(hf_config()))


def test_an_untied_model_needs_its_head(directory):
    _rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match="parameter lm_head.weight is in none"):
        load_weights(directory, build(hf_config()))
    assert load_weights(directory, build(hf_config(tied=True))) == []


def test_broken_directories_are_named(directory):
    model, file = build(hf_config()), directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="model.safetensors is truncated: "):
        load_weights(directory, model)
    file.unlink()
    with pytest.raises(ValueError, match="has no model.safetensors and no model.safetensors.index.json"):
        load_weights(directory, model)
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"pickled .*save_pretrained\(directory, safe_serialization=True\)"):
        load_weights(directory, model)


def test_broken_shards_are_named(directory):
    model, index = build(hf_config()), directory / "model.safetensors.index.json"
    (directory / "model.safetensors").rename(directory / "all.safetensors")
    names = dict.fromkeys(model.shards(), "all.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    assert load_weights(directory, model) == []
    save_file({"model.norm.weight": torch.ones(32)}, directory / "norm.safetensors")
    index.write_text(json.dumps({"weight_map": {**names, "lm_head.weight": "norm.safetensors"}}))
    with pytest.raises(ValueError, match="promises tensor lm_head.weight in norm.safetensors"):
        load_weights(directory, model)
    index.write_text(json.dumps({"weight_map": {**names, "lm_head.weight": "gone.safetensors"}}))
    with pytest.raises(ValueError, match="names the file gone.safetensors, which is missing"):
        load_weights(directory, model)
    index.write_text("[]")
    with pytest.raises(ValueError, match="index.json is not an index of safetensors files"):
        load_weights(directory, model)
