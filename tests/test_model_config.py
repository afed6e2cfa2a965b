"""Model configs: what is read from config.json, which layouts a model can take, and what is refused."""

import json

import pytest

from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.shipped import shipped_dir

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "intermediate_size": 20,
    "num_attention_heads": 12,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "vocab_size": 11,
}


def test_reads_the_fields():
    config = ModelConfig.from_hf(LLAMA)
    assert (config.family, config.head, config.head_dim, config.num_layers) == ("llama", "lm", 4, 3)
    assert (config.qkv_bias, config.tie_word_embeddings, config.rope_theta) == (False, False, 10000.0)
    assert ModelConfig.from_hf({**LLAMA, "head_dim": 8}).head_dim == 8
    assert ModelConfig.from_hf({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 12
    assert ModelConfig.from_hf({**LLAMA, "architectures": ["Qwen2ForCausalLM"]}).qkv_bias
    # transformers 5 writes the rotary parameters into one field
    nested = {**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert ModelConfig.from_hf(nested).rope_theta == 5e5


def test_heads_and_the_way_back_to_hf():
    tied = {**LLAMA, "tie_word_embeddings": True, "extra": [1]}
    critic = ModelConfig.from_hf(tied, head="score")
    assert ModelConfig.from_hf(tied).tied and not critic.tied
    hf = critic.to_hf()
    assert hf["architectures"] == ["LlamaForSequenceClassification"] and len(hf["id2label"]) == 1
    assert hf["extra"] == [1]
    assert ModelConfig.from_hf(json.loads(json.dumps(hf))) == critic
    assert ModelConfig.from_hf(tied).to_hf() == tied


def test_every_shipped_config_loads_by_its_name():
    names = [path.name.removesuffix(".json") for path in shipped_dir("models").glob("*.json")]
    assert {"llama-7b", "llama-70b", "qwen2.5-0.5b", "qwen2.5-7b", "tiny"} <= set(names)
    for name in names:
        config = ModelConfig.load(name)
        config.check_layout(Layout.parse("t2p2@0-3"))
        assert config.head == "lm" and config.num_heads * config.head_dim == config.hidden_size


def test_loads_a_model_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.load(str(tmp_path)) == ModelConfig.from_hf(LLAMA)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there is no .*config.json"):
        ModelConfig.load(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="neither a path nor a shipped name in models; .*qwen2.5-7b"):
        ModelConfig.load("gpt-5")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures is 'MambaForCausalLM': supported are Llama"),
        ({"architectures": None}, "architectures is '(none)'"),
        ({"num_key_value_heads": 5}, "num_attention_heads 12 is no multiple of num_key_value_heads 5"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope type 'linear' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported is 'silu'"),
        ({"attention_bias": True}, "attention_bias is true; supported is false"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
    ],
)
def test_refuses_what_it_cannot_compute(tmp_path, changes, sentence):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    with pytest.raises(ValueError) as caught:
        ModelConfig.load(str(path))
    assert str(path) in str(caught.value) and sentence in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (json.dumps({k: v for k, v in LLAMA.items() if k != "vocab_size"}), "vocab_size is missing"),
        ("{", "line 1"),
        ("[]", "must be a JSON object"),
    ],
)
def test_refuses_what_is_no_config(tmp_path, text, sentence):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError) as caught:
        ModelConfig.load(str(tmp_path))
    assert str(tmp_path) in str(caught.value) and sentence in str(caught.value)


def test_legal_tensor_parallel_sizes_by_brute_force():
    config = ModelConfig.from_hf(LLAMA)
    legal = []
    for tp in range(1, 13):
        try:
            config.check_layout(Layout.parse(f"t{tp}@0-{tp - 1}"))
            legal.append(tp)
        except ValueError:
            pass
    # whole query heads per rank, and ranks that see either whole kv heads or one kv head only
    assert legal == [1, 2, 4]
    # tp = 12 has whole heads, but more ranks than the vocabulary of 11 has rows
    ModelConfig.from_hf({**LLAMA, "vocab_size": 12}).check_layout(Layout.parse("t12@0-11"))


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("t5@0-4", "tp=5 does not divide the model's 12 attention heads"),
        ("t6@0-5", "tp=6 neither divides nor is a multiple of the 4 kv heads"),
        ("t12@0-11", "tp=12 exceeds the vocabulary 11"),
        ("p4@0-3", "pp=4 exceeds the model's 3 layers"),
        ("c2@0-1", "cp=2 is not supported for llama models"),
        ("e2@0-1", "ep=2 is not supported for llama models"),
    ],
)
def test_refused_layouts(layout, sentence):
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(LLAMA).check_layout(Layout.parse(layout))
    assert sentence in str(caught.value) and layout in str(caught.value)
