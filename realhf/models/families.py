"""The table of model families: how each config.json is read, what is legal in it, how parameters are named.

To add a decoder whose modules exist already, add one entry here and one line to the tests' table; see
docs/models.md.
"""

import difflib
import json
import math
from collections import UserDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from realhf.errors import cut
from realhf.user_input.field_types import is_positive, is_whole

Hf = Mapping[str, Any]
Reader = str | Callable[[Hf], Any]
"""A key of config.json, or a function that computes the value from several keys."""

LLAMA = {
    "embedding": "model.embed_tokens",
    "attn_norm": "model.layers.{layer}.input_layernorm",
    "q": "model.layers.{layer}.self_attn.q_proj",
    "k": "model.layers.{layer}.self_attn.k_proj",
    "v": "model.layers.{layer}.self_attn.v_proj",
    "o": "model.layers.{layer}.self_attn.o_proj",
    "mlp_norm": "model.layers.{layer}.post_attention_layernorm",
    "gate": "model.layers.{layer}.mlp.gate_proj",
    "up": "model.layers.{layer}.mlp.up_proj",
    "down": "model.layers.{layer}.mlp.down_proj",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "score": "score",
}
"""Our name of a module -> its name in a checkpoint. A norm that is not named does not exist. Modules that
have the same name there are stored in one tensor, in this order."""
QK_NORM = {
    "q_norm": "model.layers.{layer}.self_attn.q_norm",
    "k_norm": "model.layers.{layer}.self_attn.k_norm",
}
SANDWICH = {
    "attn_out_norm": "model.layers.{layer}.post_attention_layernorm",
    "mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm",
    "mlp_out_norm": "model.layers.{layer}.post_feedforward_layernorm",
}
POST_NORM = {
    **{module: name for module, name in LLAMA.items() if module not in ("attn_norm", "mlp_norm")},
    **{module: name for module, name in SANDWICH.items() if module != "mlp_norm"},
}
ONE_GATE_UP = dict.fromkeys(("gate", "up"), "model.layers.{layer}.mlp.gate_up_proj")
EXPERTS = {
    "router": "model.layers.{layer}.mlp.gate",
    "expert_gate": "model.layers.{layer}.mlp.experts.{expert}.gate_proj",
    "expert_up": "model.layers.{layer}.mlp.experts.{expert}.up_proj",
    "expert_down": "model.layers.{layer}.mlp.experts.{expert}.down_proj",
}


def _shared_experts(name: str) -> dict[str, str]:
    prefix = f"model.layers.{{layer}}.mlp.{name}"
    return {f"shared_{module}": f"{prefix}.{module}_proj" for module in ("gate", "up", "down")}


MIXTRAL_EXPERTS = {
    "router": "model.layers.{layer}.block_sparse_moe.gate",
    "expert_gate": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1",
    "expert_up": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3",
    "expert_down": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2",
}
LATENT_ATTENTION = {
    "q_a": "model.layers.{layer}.self_attn.q_a_proj",
    "q_a_norm": "model.layers.{layer}.self_attn.q_a_layernorm",
    "q_b": "model.layers.{layer}.self_attn.q_b_proj",
    "kv_a": "model.layers.{layer}.self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "model.layers.{layer}.self_attn.kv_a_layernorm",
    "kv_b": "model.layers.{layer}.self_attn.kv_b_proj",
}
GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "attn_norm": "transformer.h.{layer}.ln_1",
    **dict.fromkeys("qkv", "transformer.h.{layer}.attn.c_attn"),
    "o": "transformer.h.{layer}.attn.c_proj",
    "mlp_norm": "transformer.h.{layer}.ln_2",
    "up": "transformer.h.{layer}.mlp.c_fc",
    "down": "transformer.h.{layer}.mlp.c_proj",
    "final_norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "score": "score",
}


@dataclass(frozen=True)
class Family:
    """A kind of decoder, identified by the `model_type` of its config.json.

    `reads` (added to COMMON) and `sets` fill fields of ModelConfig, and `moe` fills those of MoeConfig.
    `defaults` holds transformers' values of keys that config.json may leave out. `only` holds keys for which
    a single value is supported.
    """

    prefix: str  # The first part of the names of its classes in transformers.
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA)
    reads: Mapping[str, Reader] = field(default_factory=dict)
    sets: Mapping[str, Any] = field(default_factory=dict)
    moe: Mapping[str, Reader] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, Any] = field(default_factory=dict)
    lm_class: str = "ForCausalLM"  # Follows the prefix in the class name of a language model.
    score_class: str | None = "ForSequenceClassification"  # None: transformers has no such class.
    more_layers: bool = False  # Checkpoints have layers past num_hidden_layers, for multi-token prediction.
    transposed: bool = False  # Checkpoints store the weights of linear layers as (in, out).

    def architecture(self, head: str) -> str | None:
        """Return the transformers class for the head ("lm" or "score"); None if there is none."""
        suffix = {"lm": self.lm_class, "score": self.score_class}[head]
        return None if suffix is None else self.prefix + suffix


def _windows(hf: Hf, default: Callable[[int], bool] = lambda _: True) -> tuple[int | None, ...]:
    """Return the window of every layer; an empty tuple if no layer has one.

    Without the key `layer_types`, `default(layer)` says whether a layer has a window.
    """
    window = hf.get("sliding_window")
    if not window:
        return ()
    if types := hf.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    return tuple(window if default(layer) else None for layer in range(hf["num_hidden_layers"]))


def _qwen_windows(hf: Hf) -> tuple[int | None, ...]:
    if not hf.get("use_sliding_window"):
        return ()
    return _windows(hf, lambda i: i >= hf.get("max_window_layers", 28))


def _gemma3_windows(hf: Hf) -> tuple[int | None, ...]:
    return _windows(hf, lambda i: (i + 1) % (hf.get("sliding_window_pattern") or 6) != 0)


def _no_rope_layers(hf: Hf) -> tuple[bool, ...]:
    interval = hf["no_rope_layer_interval"]
    rotates = hf.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(hf["num_hidden_layers"])]
    return () if all(rotates) else tuple(map(bool, rotates))


def _smollm3_windows(hf: Hf) -> tuple[int | None, ...]:
    """Return the windows, which only the layers without rotary positions have."""
    rope = _no_rope_layers(hf)
    return _windows(hf, lambda i: bool(rope) and not rope[i]) if hf.get("use_sliding_window") else ()


def _heads(hf: Hf) -> int:
    return hf.get("num_key_value_heads") or hf["num_attention_heads"]


def _latent_scale(hf: Hf) -> float:
    """Return the scale of latent attention, times yarn's squared magnitude if mscale_all_dim is set."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    magnitude = 1.0
    if rope.get("rope_type", rope.get("type", "default")) != "default" and rope.get("mscale_all_dim"):
        magnitude += 0.1 * rope["mscale_all_dim"] * math.log(max(1.0, rope["factor"]))
    return (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]) ** -0.5 * magnitude**2


COMMON: Mapping[str, Reader] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": _heads,
    "head_dim": lambda hf: hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
    "norm_eps": "rms_norm_eps",
    "activation": "hidden_act",
    "tie_word_embeddings": "tie_word_embeddings",
}
COMMON_DEFAULTS = {
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "rope_theta": 10000.0, "partial_rotary_factor": 1.0,
}
_ATTENTION_BIAS: Mapping[str, Reader] = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
_GEMMA: dict[str, Any] = {
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "head_dim": 256,
    "query_pre_attn_scalar": 256, "sliding_window": 4096,
}
_GEMMA_READS: Mapping[str, Reader] = {
    **_ATTENTION_BIAS,
    "activation": "hidden_activation",
    "attention_scale": lambda hf: hf["query_pre_attn_scalar"] ** -0.5,
    "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
    "embedding_scale": lambda hf: hf["hidden_size"] ** 0.5,
}
_QWEN_MOE: Mapping[str, Reader] = {
    "num_experts": lambda hf: hf["num_local_experts" if "num_local_experts" in hf else "num_experts"],
    "num_experts_per_token": "num_experts_per_tok",
    "expert_width": "moe_intermediate_size",
    "normalize": "norm_topk_prob",
}
_EVERY_LAYER = {"mlp_only_layers": [], "decoder_sparse_step": 1, "moe_layer_freq": 1}

FAMILIES: Mapping[str, Family] = {
    "llama": Family("Llama", reads={**_ATTENTION_BIAS, "mlp_bias": "mlp_bias"}),
    "mistral": Family("Mistral", reads={"windows": _windows}, defaults={"sliding_window": 4096}),
    "qwen2": Family("Qwen2", sets={"qkv_bias": True}, reads={"windows": _qwen_windows},
                    defaults={"sliding_window": 4096}),
    "qwen3": Family(
        "Qwen3", LLAMA | QK_NORM, sets={"qk_norm": "head"},
        reads={**_ATTENTION_BIAS, "windows": _qwen_windows},
        defaults={"head_dim": 128, "sliding_window": 4096},
    ),
    "gemma2": Family(
        "Gemma2", LLAMA | SANDWICH, sets={"norm_offset": 1.0},
        reads={**_GEMMA_READS, "windows": lambda hf: _windows(hf, lambda i: i % 2 == 0)},
        defaults={**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        "Gemma3", LLAMA | SANDWICH | QK_NORM, score_class="TextForSequenceClassification",
        sets={"norm_offset": 1.0, "qk_norm": "head"},
        reads={**_GEMMA_READS, "windows": _gemma3_windows},
        defaults={
            **_GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None,
            "rope_theta": 1e6, "rope_local_base_freq": 10000.0,
        },
        only={"use_bidirectional_attention": False},
    ),
    "phi3": Family(
        "Phi3", LLAMA | dict.fromkeys("qkv", "model.layers.{layer}.self_attn.qkv_proj") | ONE_GATE_UP,
        reads={"windows": _windows}, defaults={"rms_norm_eps": 1e-5},
    ),
    "olmo2": Family(
        "Olmo2", POST_NORM | QK_NORM, sets={"qk_norm": "all"}, reads=_ATTENTION_BIAS,
        defaults={"rms_norm_eps": 1e-5},
    ),
    "gpt2": Family(
        "GPT2", GPT2, lm_class="LMHeadModel", transposed=True,
        sets={
            "norm": "layer", "gated": False, "positions": "learned", "qkv_bias": True, "out_bias": True,
            "mlp_bias": True,
        },
        reads={
            "hidden_size": "n_embd", "num_layers": "n_layer", "num_heads": "n_head", "num_kv_heads": "n_head",
            "head_dim": lambda hf: hf["n_embd"] // hf["n_head"], "num_positions": "n_positions",
            "intermediate_size": lambda hf: hf.get("n_inner") or 4 * hf["n_embd"],
            "norm_eps": "layer_norm_epsilon", "activation": "activation_function",
        },
        defaults={
            "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
            "n_positions": 1024,
        },
        only={
            "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    ),
    "smollm3": Family(
        "SmolLM3",
        reads={
            **_ATTENTION_BIAS, "mlp_bias": "mlp_bias", "rope_layers": _no_rope_layers,
            "windows": _smollm3_windows,
        },
        defaults={"tie_word_embeddings": True, "no_rope_layer_interval": 4, "rope_theta": 2e6},
    ),
    "glm4": Family(
        "Glm4",
        LLAMA | ONE_GATE_UP | {
            "attn_out_norm": "model.layers.{layer}.post_self_attn_layernorm",
            "mlp_out_norm": "model.layers.{layer}.post_mlp_layernorm",
        },
        sets={"rope_interleaved": True}, reads={"qkv_bias": "attention_bias"},
        defaults={
            "attention_bias": True, "rms_norm_eps": 1.5625e-7, "head_dim": 128, "partial_rotary_factor": 0.5,
        },
    ),
    "granite": Family(
        "Granite", score_class=None,
        reads={
            **_ATTENTION_BIAS, "mlp_bias": "mlp_bias", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "attention_scale": "attention_multiplier",
            "logit_scale": lambda hf: 1 / hf["logits_scaling"],
        },
        defaults=dict.fromkeys(
            ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), 1.0),
    ),
    "mixtral": Family(
        "Mixtral", LLAMA | MIXTRAL_EXPERTS, reads={"windows": _windows},
        defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        moe={
            "num_experts": "num_local_experts", "num_experts_per_token": "num_experts_per_tok",
            "expert_width": "intermediate_size", "normalize": lambda _: True,
        },
    ),
    "qwen2_moe": Family(
        "Qwen2Moe", LLAMA | EXPERTS | _shared_experts("shared_expert")
        | {"shared_router": "model.layers.{layer}.mlp.shared_expert_gate"},
        sets={"qkv_bias": True}, only=_EVERY_LAYER | {"use_sliding_window": False},
        moe={**_QWEN_MOE, "shared_width": "shared_expert_intermediate_size", "shared_gate": lambda _: True},
        defaults={"norm_topk_prob": False},
    ),
    "qwen3_moe": Family(
        "Qwen3Moe", LLAMA | EXPERTS | QK_NORM, sets={"qk_norm": "head"}, reads=_ATTENTION_BIAS,
        only=_EVERY_LAYER | {"use_sliding_window": False}, moe=_QWEN_MOE, defaults={"norm_topk_prob": False},
    ),
    "olmoe": Family(
        "Olmoe", LLAMA | EXPERTS | QK_NORM, score_class=None, sets={"qk_norm": "all"}, reads=_ATTENTION_BIAS,
        only={"clip_qkv": None}, moe={**_QWEN_MOE, "expert_width": "intermediate_size"},
        defaults={"norm_topk_prob": False, "rms_norm_eps": 1e-5},
    ),
    "deepseek_v3": Family(
        "DeepseekV3", LLAMA | EXPERTS | _shared_experts("shared_experts") | LATENT_ATTENTION,
        reads={
            "num_kv_heads": "num_attention_heads", "rope_interleaved": "rope_interleave",
            "head_dim": lambda hf: hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"],
            "attention_scale": _latent_scale,
        },
        only=_EVERY_LAYER | {"attention_bias": False}, more_layers=True,
        moe={
            "num_experts": "n_routed_experts", "num_experts_per_token": "num_experts_per_tok",
            "expert_width": "moe_intermediate_size", "num_dense_layers": "first_k_dense_replace",
            "shared_width": lambda hf: hf["n_shared_experts"] * hf["moe_intermediate_size"],
            "router_bias": lambda _: True, "scores": lambda _: "sigmoid", "normalize": "norm_topk_prob",
            "scale": "routed_scaling_factor", "num_groups": "n_group", "num_groups_per_token": "topk_group",
        },
        defaults={
            "rope_interleave": True, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 8,
            "topk_group": 4,
        },
    ),
}


def _or_none(is_legal: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or is_legal(value)


def _is_list(is_legal: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_legal, value))


def _is_count(value: Any) -> bool:
    return is_whole(value, least=0)


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_eos(value: Any) -> bool:
    return _is_count(value) or _is_list(_is_count)(value)


_SIZE = "a whole number of at least 1"
_COUNT = "a whole number of at least 0"
_LEGAL_OF_KEYS: list[tuple[str, Callable[[Any], bool], str]] = [
    ("vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads n_embd n_layer n_head "
     "n_positions num_experts num_local_experts n_routed_experts num_experts_per_tok moe_intermediate_size "
     "shared_expert_intermediate_size n_group topk_group kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
     "v_head_dim no_rope_layer_interval original_max_position_embeddings", is_whole, _SIZE),
    ("num_key_value_heads head_dim n_inner q_lora_rank sliding_window_pattern max_position_embeddings",
     _or_none(is_whole), f"{_SIZE}, or null"),
    ("n_shared_experts first_k_dense_replace max_window_layers", _is_count, _COUNT),
    ("sliding_window", _or_none(_is_count), f"{_COUNT}, or null"),
    ("rms_norm_eps layer_norm_epsilon query_pre_attn_scalar routed_scaling_factor embedding_multiplier "
     "residual_multiplier attention_multiplier logits_scaling rope_theta rope_local_base_freq "
     "partial_rotary_factor initializer_range", is_positive, "a number above 0"),
    ("attn_logit_softcapping final_logit_softcapping", _or_none(is_positive), "a number above 0, or null"),
    ("tie_word_embeddings attention_bias mlp_bias norm_topk_prob rope_interleave", _is_bool, "true or false"),
    ("use_sliding_window", _or_none(_is_bool), "true, false or null"),
    ("architectures", _or_none(_is_list(lambda name: isinstance(name, str))), "a list of names of classes"),
    ("eos_token_id", _or_none(_is_eos), "a token id, a list of them, or null"),
    ("layer_types", _or_none(lambda kinds: isinstance(kinds, list)), "a list, or null"),
    ("no_rope_layers", _or_none(_is_list(lambda rotates: rotates in (0, 1))), "a list of 0 and 1, or null"),
    ("rope_scaling rope_parameters", _or_none(lambda rope: isinstance(rope, dict)), "an object, or null"),
]
LEGAL = {key: (is_legal, legal) for keys, is_legal, legal in _LEGAL_OF_KEYS for key in keys.split()}
"""Field -> the check of its value, and the words that describe the legal values."""
_TOKENS = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
KNOWN_FIELDS = {
    "config.json": frozenset((
        *LEGAL, "model_type", "dtype", "torch_dtype", "hidden_act", "activation_function", "num_labels",
        "id2label", "text_config", "attention_dropout", *(f"{token}_token_id" for token in _TOKENS))),
    "generation_config.json": frozenset(f"{token}_token_id" for token in _TOKENS),
    "tokenizer_config.json": frozenset((
        "chat_template", "added_tokens_decoder", "tokenizer_class", "add_bos_token", "add_eos_token",
        "additional_special_tokens", *(f"{token}_token" for token in _TOKENS))),
    "adapter_config.json": frozenset((
        "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save",
        "use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern", "alpha_pattern", "layers_to_transform")),
}
"""File of a model -> keys that matter in it, or that are like those."""


def misspelt(fields: Mapping[str, Any], *, known: Collection[str], meant: Collection[str]) -> dict[str, str]:
    """Return keys that are no known ones, and for each the missing one of `meant` that it nearly is."""
    found = {}
    for key in sorted(fields.keys() - set(known)):
        missing = [name for name in meant if name not in fields and name.count("_") == key.count("_")]
        for name in difflib.get_close_matches(key, missing, n=1, cutoff=0.87):
            found[key] = name
    return found


MAX_SIZE = 1 << 24
MAX_LAYERS = 1 << 10
MAX_EXPERTS = 1 << 18
"""Largest size, number of layers, and number of experts in all layers.

Tables have an entry for each module of a model, and sizes are multiplied as 64-bit integers.
"""
_WORDS_OF_SIZES = ("num_", "n_", "_size", "layer", "_dim", "_heads", "depth")
_LARGEST = {
    **{key: MAX_SIZE for key, (_, legal) in LEGAL.items() if legal.startswith("a whole number")},
    **dict.fromkeys(("num_hidden_layers", "n_layer"), MAX_LAYERS),
}


def check_sizes(hf: Mapping[str, Any]) -> None:
    """Raise ValueError if a number of layers, or another size, is larger than any model has.

    Classes of transformers make lists of such lengths before anything else. Numbers of classes that are not
    in our table count by the words in their names.
    """
    for key, value in hf.items():
        if isinstance(value, Mapping):
            check_sizes(value)
        elif isinstance(value, int) and any(word in key for word in _WORDS_OF_SIZES):
            most = _LARGEST.get(key, MAX_LAYERS if "layer" in key else MAX_SIZE)
            if value > most:
                raise ValueError(f"{key} is {cut(str(value))}: it must be at most {most}")


class CheckedFields(UserDict[str, Any]):
    """The fields of a config.json. Reading a field raises ValueError if its value is not legal."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        is_legal, legal = LEGAL.get(key, (None, ""))
        if is_legal is not None and not is_legal(value):
            raise ValueError(f"{key} is {cut(json.dumps(value))}: it must be {legal}")
        if isinstance(value, int) and value > (most := _LARGEST.get(key, value)):
            raise ValueError(f"{key} is {value}: it must be at most {most}")
        return value
