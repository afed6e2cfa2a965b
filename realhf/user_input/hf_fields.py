"""Checks of the values in a config.json."""

import json
import sys
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

from realhf.errors import cut


def is_whole(value: Any, *, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


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
_KINDS: list[tuple[str, Callable[[Any], bool], str]] = [
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
LEGAL = {key: (is_legal, legal) for keys, is_legal, legal in _KINDS for key in keys.split()}
"""Field -> the check of its value, and the words that describe the legal values."""


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
