"""PEFT's directories of adapters: what their files say, read and written. Free of torch."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from realhf.checkpoint.read import SCORE, check_tensor, params_by_tensor, tensor_shape
from realhf.checkpoint.tensor_files import StoredTensor, read_header
from realhf.hf_fields import is_positive, is_whole
from realhf.lora import LoraConfig, legal_targets
from realhf.model_config import ModelConfig
from realhf.param_spec import ModelSpec

CONFIG_FILE, STEM = "adapter_config.json", "adapter_model"
_WEIGHTS_FILE = f"{STEM}.safetensors"
_SAVED_MODULES = ["classifier", "score"]
"""Heads that PEFT trains as a whole beside the adapters; `classifier` stands for other models' heads."""


class _Written(NamedTuple):
    """What an adapter_config.json is written of."""

    config: ModelConfig
    lora: LoraConfig
    base: str

    @property
    def is_score(self) -> bool:
        return self.config.head == "score"

    @property
    def targets(self) -> list[str]:
        # (PEFT's own "all-linear" would also mean the routers of experts.)
        return legal_targets(self.config) if self.lora.all_linear else list(self.lora.target_modules)


class _Field(NamedTuple):
    """A field of adapter_config.json: which values are read, in words, too, and what is written."""

    is_legal: Callable[[Any], bool] = lambda _: True  # Of most, as they say nothing of a trained adapter.
    supported: str = ""
    write: Callable[[_Written], Any] | None = None  # None: it is left out.
    default: Any = None


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _are_heads(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(name in _SAVED_MODULES for name in value))


def _are_targets(value: Any) -> bool:
    is_list = isinstance(value, list) and all(isinstance(name, str) for name in value)
    return is_list or value == "all-linear"


_FIELDS = {
    "base_model_name_or_path": _Field(write=lambda w: w.base),
    "bias": _Field(_one_of("none"), '"none"', lambda _: "none", "none"),
    "fan_in_fan_out": _Field(write=lambda w: w.config.describes.transposed),
    "inference_mode": _Field(write=lambda _: True),
    # (Other ways to initialise adapters change the base weights, too.)
    "init_lora_weights": _Field(
        _one_of(True, False, "gaussian", "eva", "orthogonal"),
        'true, false, "gaussian", "eva" and "orthogonal"', lambda _: True, True),
    "lora_alpha": _Field(is_positive, "a number above 0", lambda w: w.lora.alpha),
    "lora_dropout": _Field(write=lambda _: 0.0),
    "modules_to_save": _Field(
        _are_heads, 'null and ["score"]', lambda w: _SAVED_MODULES if w.is_score else None),
    "peft_type": _Field(_one_of("LORA"), '"LORA"', lambda _: "LORA"),
    "r": _Field(is_whole, "a whole number of at least 1", lambda w: w.lora.rank),
    "target_modules": _Field(_are_targets, 'a list of names, or "all-linear"', lambda w: w.targets),
    "task_type": _Field(
        _one_of(None, "CAUSAL_LM", "SEQ_CLS"), '"CAUSAL_LM" and "SEQ_CLS"',
        lambda w: "SEQ_CLS" if w.is_score else "CAUSAL_LM"),
    "use_dora": _Field(lambda value: not value, "false", lambda _: False),
    "use_rslora": _Field(
        lambda value: isinstance(value, bool), "true and false", lambda w: w.lora.use_rslora, False),
    **dict.fromkeys(
        ("auto_mapping", "ensure_weight_tying", "eva_config", "megatron_core", "peft_version",
         "qalora_group_size", "revision"), _Field()),
}  # fmt: skip
"""Of others, only values are read that switch off what they are for."""


def adapter_config(config: ModelConfig, lora: LoraConfig, *, base: str) -> dict[str, Any]:
    """What PEFT itself writes, as far as it says anything; `base` names the model beneath."""
    written = _Written(config, lora, base)
    return {key: field.write(written) for key, field in _FIELDS.items() if field.write is not None}


def resolved(lora: LoraConfig) -> LoraConfig:
    """With what the directory says from which the adapters start.

    Raises ValueError naming its field, or one of `lora` that contradicts it.
    """
    if lora.adapter is None:
        return lora
    path = Path(lora.adapter) / CONFIG_FILE
    found, default = replace(lora, **_read_settings(path)), LoraConfig()
    for name in ("rank", "alpha", "use_rslora", "target_modules"):
        given, there = getattr(lora, name), getattr(found, name)
        same = set(given) == set(there) if name == "target_modules" else given == there
        if given != getattr(default, name) and not same:
            raise ValueError(f"lora.{name} is {given!r}, but {path} says {there!r}: leave it out")
    return found


def _read_settings(path: Path) -> dict[str, Any]:
    """The fields of LoraConfig that an adapter_config.json has."""
    try:
        hf = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"lora.adapter: {path} cannot be read: {error}") from error
    if not isinstance(hf, Mapping):
        raise ValueError(f"lora.adapter: {path} is not a JSON object")
    values = {**{key: field.default for key, field in _FIELDS.items()}, **hf}
    for key, value in values.items():
        off = "false" if isinstance(value, bool) else "null"
        field = _FIELDS.get(key, _Field(lambda value: not value, off))
        if not field.is_legal(value):
            what = f"{key} is {json.dumps(value)}; supported is {field.supported}"
            raise ValueError(f"lora.adapter: {path}: {what}")
    targets = values["target_modules"]
    return {
        "rank": values["r"], "alpha": float(values["lora_alpha"]), "use_rslora": values["use_rslora"],
        "target_modules": targets if isinstance(targets, str) else tuple(sorted(targets)),
    }  # fmt: skip


def open_adapters(directory: Path, spec: ModelSpec) -> dict[str, StoredTensor]:
    """The tensors of a PEFT directory, which may lack the score head. Raises ValueError that names file and
    tensor where they are not those of this table of adapters."""
    path = directory / _WEIGHTS_FILE
    shapes = {name: tensor_shape(params) for name, params in params_by_tensor(spec.params).items()}
    if not path.is_file():
        raise ValueError(f"{directory} has no {_WEIGHTS_FILE}; adapters are read from safetensors only")
    tensors = read_header(path)
    optional = {param.in_file.name for param in spec.params if param.part == SCORE}
    if unknown := sorted(tensors.keys() - shapes):
        raise ValueError(f"{path}: {unknown[0]} is no adapter of this {spec.config.family} model")
    if missing := sorted(shapes.keys() - tensors - optional):
        raise ValueError(f"{path}: {missing[0]} is missing")
    for name, tensor in tensors.items():
        check_tensor(tensor, name, shapes[name])
    return tensors
