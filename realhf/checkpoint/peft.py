"""The adapter_config.json and the tensors' headers of PEFT directories. Free of torch."""

import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from realhf.checkpoint.tensor_files import SCORE, StoredTensor, check_tensor, read_header, tensor_shapes
from realhf.errors import cut, shown
from realhf.models.lora import LoraConfig, legal_targets
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import ModelSpec
from realhf.user_input.field_types import is_positive, is_whole
from realhf.user_input.files import read_object

CONFIG_FILE = "adapter_config.json"
STEM = "adapter_model"
_WEIGHTS_FILE = f"{STEM}.safetensors"
_SAVED_MODULES = ["classifier", "score"]
"""Heads that PEFT trains in full along with the adapters; `classifier` is for other model classes."""


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _are_heads(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(name in _SAVED_MODULES for name in value))


def _are_targets(value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return is_list or value == "all-linear"


_LEGAL: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "bias": (_one_of("none"), '"none"'),
    # Other ways to initialise adapters also change the base weights.
    "init_lora_weights": (
        _one_of(True, False, "gaussian", "eva", "orthogonal"),
        'true, false, "gaussian", "eva" and "orthogonal"'),
    "lora_alpha": (is_positive, "a number above 0"),
    "modules_to_save": (_are_heads, 'null and ["score"]'),
    "peft_type": (_one_of("LORA"), '"LORA"'),
    "r": (is_whole, "a whole number of at least 1"),
    "target_modules": (_are_targets, 'a list of names, or "all-linear"'),
    "task_type": (_one_of(None, "CAUSAL_LM", "SEQ_CLS"), '"CAUSAL_LM" and "SEQ_CLS"'),
    "use_dora": (operator.not_, "false"),
    "use_rslora": (lambda value: isinstance(value, bool), "true and false")}
"""Field of adapter_config.json -> the check of its value, and the legal values in words."""
_IGNORED = (
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "lora_dropout", "megatron_core", "peft_version", "qalora_group_size", "revision")
"""Fields that have no effect on a trained adapter. All fields in neither table must be false or null."""


def adapter_config(config: ModelConfig, lora: LoraConfig, *, base: str) -> dict[str, Any]:
    """Return the fields that PEFT writes, without those that have no effect; `base` names the base model."""
    is_score = config.head == "score"
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": config.describes.transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": _SAVED_MODULES if is_score else None,
        "peft_type": "LORA",
        "r": lora.rank,
        # Not PEFT's "all-linear", which would include the routers of experts.
        "target_modules": legal_targets(config) if lora.all_linear else list(lora.target_modules),
        "task_type": "SEQ_CLS" if is_score else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.use_rslora,
    }


def resolved(lora: LoraConfig) -> LoraConfig:
    """Return `lora` with the settings of the PEFT directory from which the adapters start, if there is one.

    Raises ValueError if a field of the directory's config is not supported, or if a field of `lora` is set to
    another value than there.
    """
    if lora.adapter is None:
        return lora
    path = Path(lora.adapter) / CONFIG_FILE
    from_directory = replace(lora, **_read_settings(path))
    default = LoraConfig()
    for name in ("rank", "alpha", "use_rslora", "target_modules"):
        value = getattr(lora, name)
        in_file = getattr(from_directory, name)
        same = set(value) == set(in_file) if name == "target_modules" else value == in_file
        if value != getattr(default, name) and not same:
            raise ValueError(f"lora.{name} is {shown(value)}, but {path} says {shown(in_file)}: leave it out")
    return from_directory


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the fields of LoraConfig that an adapter_config.json sets."""
    hf = read_object(path, what="lora.adapter:")
    defaults = {"bias": "none", "init_lora_weights": True, "use_rslora": False}
    values = {**dict.fromkeys(_LEGAL), **defaults, **hf}
    for key, value in values.items():
        off = "false" if isinstance(value, bool) else "null"
        is_legal, supported = _LEGAL.get(key, (operator.not_, off))
        if key not in _IGNORED and not is_legal(value):
            what = f"{key} is {cut(json.dumps(value))}; supported is {supported}"
            raise ValueError(f"lora.adapter: {path}: {what}")
    targets = values["target_modules"]
    return {
        "rank": values["r"], "alpha": float(values["lora_alpha"]), "use_rslora": values["use_rslora"],
        "target_modules": targets if isinstance(targets, str) else tuple(sorted(targets)),
    }


def open_adapters(directory: Path, spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return the tensors of a PEFT directory, which may have no score head.

    Raises ValueError that names file and tensor if they are not the adapters of this table.
    """
    path = directory / _WEIGHTS_FILE
    shapes = tensor_shapes(spec)
    if not path.exists():
        raise ValueError(f"{directory} has no {_WEIGHTS_FILE}; adapters are read from safetensors only")
    tensors = read_header(path)
    optional = {param.in_file.name for param in spec.params if param.short_name == SCORE}
    if unknown := sorted(tensors.keys() - shapes):
        raise ValueError(f"{path}: {unknown[0]} is no adapter of this {spec.config.family} model")
    if missing := sorted(shapes.keys() - tensors - optional):
        raise ValueError(f"{path}: {missing[0]} is missing")
    for name, tensor in tensors.items():
        check_tensor(tensor, name, shapes[name])
    return tensors
