"""The adapter_config.json and the tensors' headers of PEFT directories. Free of torch."""

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

CONFIG_FILE = "adapter_config.json"
STEM = "adapter_model"
_WEIGHTS_FILE = f"{STEM}.safetensors"
_SAVED_MODULES = ["classifier", "score"]
"""Heads that PEFT trains in full along with the adapters; `classifier` is for other model classes."""


class _Written(NamedTuple):
    """The settings from which an adapter_config.json is written."""

    config: ModelConfig
    lora: LoraConfig
    base: str

    @property
    def is_score(self) -> bool:
        return self.config.head == "score"

    @property
    def targets(self) -> list[str]:
        # Not PEFT's "all-linear", which would include the routers of experts.
        return legal_targets(self.config) if self.lora.all_linear else list(self.lora.target_modules)


class _Field(NamedTuple):
    """A field of adapter_config.json: the values that can be read, and the one that is written."""

    is_legal: Callable[[Any], bool] = lambda _: True  # Most fields say nothing about a trained adapter.
    supported: str = ""  # The legal values in words, for error messages.
    write: Callable[[_Written], Any] | None = None  # None: the field is not written.
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
    # Other ways to initialise adapters also change the base weights.
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
"""The known fields. All other fields must have a value that switches their feature off."""


def adapter_config(config: ModelConfig, lora: LoraConfig, *, base: str) -> dict[str, Any]:
    """Return the fields that PEFT writes, without those that say nothing; `base` names the base model."""
    written = _Written(config, lora, base)
    return {key: field.write(written) for key, field in _FIELDS.items() if field.write is not None}


def resolved(lora: LoraConfig) -> LoraConfig:
    """Return `lora` with the settings of the PEFT directory from which the adapters start, if there is one.

    Raises ValueError that names a field of its config that cannot be used, or one of `lora` that contradicts
    it.
    """
    if lora.adapter is None:
        return lora
    path = Path(lora.adapter) / CONFIG_FILE
    found = replace(lora, **_read_settings(path))
    default = LoraConfig()
    for name in ("rank", "alpha", "use_rslora", "target_modules"):
        given = getattr(lora, name)
        there = getattr(found, name)
        same = set(given) == set(there) if name == "target_modules" else given == there
        if given != getattr(default, name) and not same:
            raise ValueError(f"lora.{name} is {given!r}, but {path} says {there!r}: leave it out")
    return found


def _read_settings(path: Path) -> dict[str, Any]:
    """Return the fields of LoraConfig that an adapter_config.json sets."""
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
    """Return the tensors of a PEFT directory, which may have no score head.

    Raises ValueError that names file and tensor if they are not the adapters of this table.
    """
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
