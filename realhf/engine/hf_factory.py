"""Models of transformers' own classes: construction, parameter tables, and conversion to files.

torch and transformers are imported on use, because checks of other models need neither.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from realhf.models.model_config import TransformersConfig
from realhf.models.param_spec import InFile, ModelSpec, ParamSpec
from realhf.user_input.files import require_regular_files

_AUTO = {"lm": "AutoModelForCausalLM", "score": "AutoModelForSequenceClassification"}

_POSITION_TABLES = {
    "codegen": "n_positions", "ctrl": "n_positions", "gptj": "n_positions", "mpt": "max_seq_len",
}
"""Families whose limit on positions is not the shape of a parameter -> the config field of the limit."""

_REFUSED = {"rwkv": "its class in transformers mixes up the rows of a batch when it generates"}


def class_spec(config: TransformersConfig) -> ModelSpec:
    """Return the parameter table: the tensors of the model's state dict, in its order, tied ones once.

    Raises ValueError if transformers has no class, or one that cannot be used.
    """
    model = _model_without_memory(config)
    limit = getattr(model.config, "max_position_embeddings", None)
    others = [m for m in model.modules() if m is not model.get_input_embeddings()]
    learned = any(getattr(module, "num_embeddings", 0) >= (limit or 1) for module in others)
    num_positions = limit if learned else config.num_positions
    if (field := _POSITION_TABLES.get(config.family)) is not None:
        num_positions = getattr(model.config, field)
    config = replace(config, architecture=type(model).__name__, num_positions=num_positions)
    params = [
        ParamSpec(names[0], tuple(tensor.shape), 0, short_name=names[0], in_file=InFile(names[0]),
                  trainable=isinstance(tensor, import_module("torch").nn.Parameter))
        for names, tensor in named_tensors(model)
    ]
    if odd := [param.name for param in params if not param.shape]:
        raise ValueError(f"{config.architecture} is not supported: its parameter {odd[0]} is a single number")
    return ModelSpec(config, tuple(params))


def file_spec(spec: ModelSpec) -> ModelSpec:
    """Return the table of tensors in the model's files; some classes fuse several of them into one."""
    model = _model_without_memory(config_of(spec))
    tensors = in_files(model, {names[0]: tensor for names, tensor in named_tensors(model)})
    params = (ParamSpec(n, tuple(t.shape), 0, short_name=n, in_file=InFile(n)) for n, t in tensors.items())
    return ModelSpec(spec.config, tuple(params))


def _model_without_memory(config: TransformersConfig) -> Any:
    """Return a model on torch's meta device, which is built once: that can take seconds."""
    return _cached_model(json.dumps(dict(config.hf)), config)


@lru_cache(maxsize=16)
def _cached_model(_: str, config: TransformersConfig) -> Any:
    """Build the model; the first argument distinguishes configs that differ in `hf` alone."""
    return make_model(config, device="meta")


def in_files(model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a state dict to the tensors that are written to files."""
    return import_module("transformers.core_model_loading").revert_weight_conversion(model, dict(tensors))


def make_model(config: TransformersConfig, *, device: Any, dtype: Any = None) -> Any:
    """Build a model with uninitialised weights and without dropout. Raises ValueError if that fails."""
    torch = import_module("torch")
    initialization = import_module("transformers.initialization")
    with torch.device(device), initialization.no_init_weights():
        model = _build(config, dtype=dtype)
    model.tie_weights()
    if config.head == "score" and not isinstance(getattr(model, "score", None), torch.nn.Linear):
        raise ValueError(f"transformers' {type(model).__name__} has no score per token: use another family")
    return model.eval()


def random_model(config: TransformersConfig, *, seed: int) -> Any:
    """Build a model in float32 on the CPU with the initial values of its class."""
    torch = import_module("torch")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _build(config, dtype=torch.float32)


def read_model(directory: str, config: TransformersConfig, *, dtype: Any, seed: int) -> tuple[Any, list[str]]:
    """Read a model from a directory to the CPU; return it and the names of tensors that it does not use.

    A missing score head is drawn from `seed`. Raises ValueError that names the directory.
    """
    require_regular_files(Path(directory))
    torch = import_module("torch")
    logging = import_module("transformers").logging
    auto = _auto_class(config)
    how = {"local_files_only": True, "use_safetensors": True, "trust_remote_code": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        verbosity = logging.get_verbosity()
        logging.disable_progress_bar()  # Problems with the files are reported below.
        logging.set_verbosity_error()
        try:
            model, info = auto.from_pretrained(
                directory, config=_hf_config(config), dtype=dtype, output_loading_info=True,
                ignore_mismatched_sizes=True, **how)
        except (OSError, RuntimeError, ValueError) as error:
            raise ValueError(f"{directory}: transformers cannot read it: {_line(error)}") from error
        finally:
            logging.set_verbosity(verbosity)
    if wrong := sorted(info["mismatched_keys"]):
        name, there, here = wrong[0]
        raise ValueError(
            f"{directory}: tensor {name} has shape {tuple(there)}; the config says {tuple(here)}")
    missing = sorted(n for n in info["missing_keys"] if config.head == "lm" or not n.startswith("score."))
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ValueError(f"{directory}: parameter {missing[0]}{more} is in none of the safetensors files")
    return model, sorted(info["unexpected_keys"])


def named_tensors(model: Any) -> list[tuple[list[str], Any]]:
    """Return the state dict's floating-point tensors with all of their names, first the name in the files."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    tensors: dict[int, tuple[list[str], Any]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if tensor.is_floating_point():
            names, _ = tensors.setdefault(id(tensor), ([], tensor))
            names.append(name)
    return [(sorted(names, key=lambda name: name in tied), tensor) for names, tensor in tensors.values()]


def _build(config: TransformersConfig, *, dtype: Any) -> Any:
    auto = _auto_class(config)
    hf_config = _hf_config(config)
    try:
        dtype = dtype or import_module("torch").float32
        return auto.from_config(hf_config, dtype=dtype, trust_remote_code=False)
    except (ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
        raise ValueError(
            f"transformers makes no {config.head} model of a {config.family} config: "
            f"{_line(error)}") from error


def _hf_config(config: TransformersConfig) -> Any:
    """Return transformers' own config, without dropout: training must see the probabilities of sampling."""
    mapping = import_module("transformers").CONFIG_MAPPING
    if config.family not in mapping:
        raise ValueError(f"model_type is {config.family!r}, which this version of transformers does not know")
    if config.family in _REFUSED:
        raise ValueError(f"model_type is {config.family!r}: {_REFUSED[config.family]}")
    fields = {key: value for key, value in config.hf.items() if key not in ("dtype", "torch_dtype")}
    if config.head == "score":
        fields = {k: v for k, v in fields.items() if k not in ("id2label", "label2id")} | {"num_labels": 1}
    try:
        hf_config = mapping[config.family].from_dict(fields)
    except Exception as error:  # transformers validates with exceptions of several libraries.
        raise ValueError(f"transformers refuses the config: {_line(error)}") from error
    for key, value in hf_config.to_dict().items():
        if isinstance(value, float) and "drop" in key:
            setattr(hf_config, key, 0.0)
    return hf_config


def _auto_class(config: TransformersConfig) -> Any:
    return getattr(import_module("transformers"), _AUTO[config.head])


def config_of(spec: ModelSpec) -> TransformersConfig:
    assert isinstance(spec.config, TransformersConfig)
    return spec.config


def _line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
