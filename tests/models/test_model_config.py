"""Model configs: what is read from config.json, which layouts a model can take, and what is refused."""

import json

import pytest

from realhf.layout import Layout
from realhf.models.families import COMMON, FAMILIES, LEGAL
from realhf.models.model_config import ACTIVATION_NAMES, MlaConfig, ModelConfig, MoeConfig
from realhf.nn.mlp import ACTIVATIONS

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
QWEN3_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 8,
    "moe_intermediate_size": 6,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "first_k_dense_replace": 1,
    "kv_lora_rank": 5,
    "moe_intermediate_size": 6,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "q_lora_rank": 7,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "topk_group": 1,
    "v_head_dim": 3,
}
GEMMA3 = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 4,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 4,
}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}


def test_reads_the_fields():
    config = ModelConfig.from_hf(LLAMA)
    assert (config.family, config.head, config.head_dim, config.num_layers) == ("llama", "lm", 4, 3)
    assert (config.qkv_bias, config.tie_word_embeddings, config.norm_eps) == (False, False, 1e-5)
    assert ModelConfig.from_hf({**LLAMA, "head_dim": 8}).head_dim == 8
    assert ModelConfig.from_hf({**LLAMA, "num_key_value_heads": None}).num_kv_heads == 12
    assert ModelConfig.from_hf({**LLAMA, "architectures": ["Qwen2ForCausalLM"]}).qkv_bias
    gemma = ModelConfig.from_hf({**LLAMA, "architectures": ["Gemma2ForCausalLM"], "sliding_window": 5})
    assert gemma.windows == (5, None, 5) and gemma.attention_scale == 1 / 16 and gemma.tied
    assert ModelConfig.from_hf({**LLAMA, "attention_bias": True}).out_bias


def test_reads_qwen3_and_experts():
    dense = ModelConfig.from_hf({**LLAMA, "architectures": ["Qwen3ForCausalLM"]})
    assert (dense.head_dim, dense.qk_norm, dense.qkv_bias, dense.moe) == (128, "head", False, None)
    config = ModelConfig.from_hf(QWEN3_MOE)
    assert (config.family, config.head_dim, config.qk_norm, config.mla) == ("qwen3_moe", 8, "head", None)
    assert config.moe == MoeConfig(5, 2, expert_width=6, normalize=False)
    # transformers 5 writes the number of experts under another name
    renamed = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 5}
    assert ModelConfig.from_hf(renamed) == config


def test_reads_latent_attention_and_shared_experts():
    config = ModelConfig.from_hf(DEEPSEEK)
    assert (config.family, config.head_dim, config.num_kv_heads) == ("deepseek_v3", 6, 12)
    assert config.mla == MlaConfig(
        q_lora_rank=7, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3
    )
    shared = {"shared_width": 12, "num_dense_layers": 1}
    assert config.moe == MoeConfig(8, 2, 6, **shared, router_bias=True, scores="sigmoid", scale=2.5)


@pytest.mark.parametrize(
    ("hf", "sentence"),
    [
        ({**QWEN3_MOE, "mlp_only_layers": [0]}, r"mlp_only_layers is \[0\]; supported is \[\]"),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, "decoder_sparse_step is 2; supported is 1"),
        ({**DEEPSEEK, "attention_bias": True}, "attention_bias is true"),
        ({k: v for k, v in DEEPSEEK.items() if k != "kv_lora_rank"}, "kv_lora_rank is missing"),
        ({k: v for k, v in QWEN3_MOE.items() if k != "num_experts"}, "num_experts is missing"),
    ],
)
def test_refuses_experts_that_it_cannot_list(hf, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModelConfig.from_hf(hf)


@pytest.mark.parametrize(
    ("hf", "changes", "sentence"),
    [
        (LLAMA, {"architectures": 5}, "architectures is 5: it must be a list of names of classes"),
        (LLAMA, {"architectures": "LlamaForCausalLM"}, 'architectures is "LlamaForCausalLM": it must be'),
        (LLAMA, {"num_attention_heads": 0}, "num_attention_heads is 0: it must be a whole number"),
        (LLAMA, {"hidden_size": 8}, "head_dim is 0: it must be a whole number of at least 1"),
        (LLAMA, {"head_dim": 5}, "partial_rotary_factor 1.0 of 5 dims per head: an even number"),
        (LLAMA, {"rms_norm_eps": "x"}, 'rms_norm_eps is "x": it must be a number above 0'),
        (LLAMA, {"tie_word_embeddings": "no"}, 'tie_word_embeddings is "no": it must be true or false'),
        (LLAMA, {"eos_token_id": "x"}, 'eos_token_id is "x": it must be a token id, a list of them, or null'),
        (LLAMA, {"eos_token_id": [1, None]}, "eos_token_id is [1, null]: it must be a token id, a list"),
        (LLAMA, {"layer_types": ["linear_attention"] * 3},
         'layer_types has "linear_attention": legal are full_attention and sliding_attention'),
        (LLAMA, {"layer_types": "full_attention"}, 'layer_types is "full_attention": it must be a list'),
        (QWEN3_MOE, {"num_experts": "4"}, 'num_experts is "4": it must be a whole number of at least 1'),
        (QWEN3_MOE, {"num_experts": None}, "num_experts is null: it must be a whole number"),
        (QWEN3_MOE, {"num_experts": 0}, "num_experts is 0: it must be a whole number of at least 1"),
        (QWEN3_MOE, {"num_local_experts": None}, "num_local_experts is null: it must be a whole number"),
        (QWEN3_MOE, {"num_experts_per_tok": 6},
         "num_experts_per_tok is 6: it must be at most the 5 experts to choose from"),
        (QWEN3_MOE, {"moe_intermediate_size": -4}, "moe_intermediate_size is -4: it must be a whole number"),
        (QWEN3_MOE, {"norm_topk_prob": "x"}, 'norm_topk_prob is "x": it must be true or false'),
        (DEEPSEEK, {"kv_lora_rank": 0}, "kv_lora_rank is 0: it must be a whole number of at least 1"),
        (DEEPSEEK, {"q_lora_rank": 0}, "q_lora_rank is 0: it must be a whole number of at least 1, or null"),
        (DEEPSEEK, {"n_shared_experts": None}, "n_shared_experts is null: it must be a whole number"),
    ],
)
def test_names_fields_with_illegal_values(hf, changes, sentence):
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf({**hf, **changes})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_group": 2, "topk_group": 3}, "topk_group is 3: it must be at most n_group 2"),
        ({"n_group": 3}, "n_group is 3: it must split the 8 experts into equal groups of"),
        ({"n_group": 8}, "n_group is 8: it must split the 8 experts into equal groups of"),
        ({"n_group": 4, "num_experts_per_tok": 3},
         "num_experts_per_tok is 3: it must be at most the 2 experts to choose from"),
    ],
)
def test_groups_that_no_router_can_choose_by(changes, sentence):
    moe = ModelConfig.from_hf({**DEEPSEEK, **changes}).moe
    with pytest.raises(ValueError, match=sentence):
        moe.check_groups()


def test_deepseek_has_the_groups_of_transformers():
    many = {key: value for key, value in DEEPSEEK.items() if key not in ("n_group", "topk_group")}
    moe = ModelConfig.from_hf({**many, "n_routed_experts": 16}).moe
    assert (moe.num_groups, moe.num_groups_per_token) == (8, 4)
    planned = ModelConfig.from_hf(many).moe
    with pytest.raises(ValueError, match="n_group is 8: it must split the 8 experts"):
        planned.check_groups()


def test_every_field_that_is_read_has_legal_values():
    for family in FAMILIES.values():
        reads = {**COMMON, **family.reads, **family.moe}
        keys = {key for name, key in reads.items() if isinstance(key, str) and name != "activation"}
        assert keys <= LEGAL.keys()
    assert set(ACTIVATION_NAMES) == ACTIVATIONS.keys()


def test_end_of_sequence_in_the_generation_config():
    assert ModelConfig.from_hf(LLAMA, generation={"eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id is true: it must be"):
        ModelConfig.from_hf(LLAMA, generation={"eos_token_id": True})


@pytest.mark.parametrize(
    ("hf", "rope", "sentence"),
    [
        (LLAMA, {"rope_type": ["x"]}, "rope type ['x'] is not supported; legal are default"),
        (LLAMA, 3, "rope_scaling is 3: it must be an object, or null"),
        (LLAMA, {"rope_type": "linear", "factor": "2"},
         'rope_parameters: factor is "2": it must be a number above 0'),
        (LLAMA, {**LONGROPE, "short_factor": [1.0]},
         "short_factor must be a list of 2 numbers above 0, one per pair of dims"),
        (LLAMA, {**LONGROPE, "long_factor": 2.0}, "long_factor must be a list of 2 numbers"),
        (LLAMA, {**LONGROPE, "partial_rotary_factor": 0.5}, "short_factor must be a list of 1 numbers"),
        (LLAMA, {"partial_rotary_factor": 1.5}, "partial_rotary_factor 1.5 of 4 dims per head"),
        (GEMMA3, {"full_attention": {}}, "rope_parameters.sliding_attention is not set: it must be"),
        (GEMMA3, {"full_attention": {}, "sliding_attention": None}, "sliding_attention is not set"),
        (GEMMA3, {"full_attention": 1, "sliding_attention": {}}, "full_attention is 1: it must be"),
        (GEMMA3, {"full_attention": {}, "sliding_attention": {"rope_theta": None}},
         "rope_parameters.sliding_attention: rope_theta is not set: it must be a number above 0"),
        (LLAMA, {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "64"},
         'rope_parameters: original_max_position_embeddings is "64": it must be a whole number'),
        (GEMMA3, {"full_attention": {"original_max_position_embeddings": 0}, "sliding_attention": {}},
         "rope_parameters.full_attention: original_max_position_embeddings is 0: it must be"),
    ],
)
def test_refuses_rotary_parameters(hf, rope, sentence):
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf({**hf, "rope_scaling": rope})
    assert sentence in str(caught.value)


def test_rotary_parameters_by_layer_type():
    given = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}
    kinds = ModelConfig.from_hf({**GEMMA3, "rope_parameters": given}).rope_kinds()
    assert kinds["full_attention"]["rope_theta"] == 1e6 and kinds["full_attention"]["factor"] == 8.0
    local = kinds["sliding_attention"]
    assert (local["rope_theta"], local["rope_type"]) == (1e4, "default")
    given["sliding_attention"] = {"rope_theta": 7.0}
    kinds = ModelConfig.from_hf({**GEMMA3, "rope_parameters": given}).rope_kinds()
    assert kinds["sliding_attention"]["rope_theta"] == 7.0
    assert len(ModelConfig.from_hf({**LLAMA, "rope_scaling": LONGROPE}).rope_kinds()[""]["long_factor"]) == 2


def test_heads_and_the_way_back_to_hf():
    tied = {**LLAMA, "model_type": "llama", "tie_word_embeddings": True, "extra": [1]}
    critic = ModelConfig.from_hf(tied, head="score")
    assert ModelConfig.from_hf(tied).tied and not critic.tied
    hf = critic.to_hf()
    assert hf["architectures"] == ["LlamaForSequenceClassification"] and len(hf["id2label"]) == 1
    assert hf["extra"] == [1]
    assert ModelConfig.from_hf(json.loads(json.dumps(hf))) == critic
    assert ModelConfig.from_hf(tied).to_hf() == tied
    assert ModelConfig.from_hf(LLAMA).to_hf() == LLAMA | {"model_type": "llama"}


@pytest.mark.parametrize(
    "hf", [{**LLAMA, "architectures": ["GraniteForCausalLM"], "model_type": "granite"},
           {**QWEN3_MOE, "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}])
def test_scores_of_families_without_a_class_cannot_be_exported(hf):
    assert ModelConfig.from_hf(hf).to_hf() == hf
    with pytest.raises(ValueError, match="no sequence classification model of (Granite|Olmoe), as which"):
        ModelConfig.from_hf(hf, head="score").to_hf()


def test_loads_a_model_directory(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.load(str(tmp_path)) == ModelConfig.from_hf(LLAMA)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="there is no .*config.json"):
        ModelConfig.load(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"nor a shipped name in models \(did you mean gpt2\?\)"):
        ModelConfig.load("gpt-5")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures is 'MambaForCausalLM': supported are"),
        ({"architectures": None}, "architectures is '(none)'"),
        ({"num_key_value_heads": 5}, "num_attention_heads 12 is no multiple of num_key_value_heads 5"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling of type 'linear' lacks factor"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope type 'mrope' is not supported; legal are"),
        ({"hidden_act": "swish2"}, "hidden_act is 'swish2'; supported are silu, gelu"),
        ({"initializer_range": "0.02"}, 'initializer_range is "0.02": it must be a number above 0'),
        ({"original_max_position_embeddings": 8.5}, "original_max_position_embeddings is 8.5: it must be"),
        ({"intermediate_size": "20"}, "intermediate_size is \"20\": it must be a whole number of at least 1"),
        ({"architectures": ["OlmoeForCausalLM"], "clip_qkv": 8}, "clip_qkv is 8; supported is not set"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 4, "layer_types": ["full_attention"]},
         "layer_types has 1 entries; the model has 3 layers"),
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
        ("[]", "is not a JSON object"),
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
        ("c5@0-4", "tp*cp=5 does not divide the model's 12 attention heads"),
        ("t2c8@0-15", "tp*cp=16 does not divide the model's 12 attention heads"),
        ("e2@0-1", "ep=2 is not supported for llama models"),
    ],
)
def test_refused_layouts(layout, sentence):
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_hf(LLAMA).check_layout(Layout.parse(layout))
    assert sentence in str(caught.value) and layout in str(caught.value)


@pytest.mark.parametrize(
    ("hf", "changes", "layout", "sentence"),
    [
        (QWEN3_MOE, {}, "d4e2@0-3", None),
        (QWEN3_MOE, {}, "e5t2@0-9", None),
        (QWEN3_MOE, {}, "e6@0-5", "ep=6 exceeds the model's 5 experts"),
        (QWEN3_MOE, {"moe_intermediate_size": 3}, "t4@0-3", "tp=4 exceeds the MLP width 3"),
        (QWEN3_MOE, {}, "t6@0-5", "neither divides nor is a multiple of the 4 kv heads"),
        (QWEN3_MOE, {"intermediate_size": 1}, "t4@0-3", None),
        (DEEPSEEK, {"intermediate_size": 1}, "t4@0-3", "tp=4 exceeds the MLP width 1"),
        (DEEPSEEK, {}, "t6@0-5", None),
        (QWEN3_MOE, {}, "c3t4@0-11", None),
        (DEEPSEEK, {}, "c6t2@0-11", None),
        (DEEPSEEK, {}, "t8@0-7", "tp=8 does not divide the model's 12 attention heads"),
    ],
)
def test_layouts_of_experts_and_latent_attention(hf, changes, layout, sentence):
    config, layout = ModelConfig.from_hf({**hf, **changes}), Layout.parse(layout)
    if sentence is None:
        config.check_layout(layout)
    else:
        with pytest.raises(ValueError, match=sentence):
            config.check_layout(layout)
