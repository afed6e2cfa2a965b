"""Adapters as PEFT directories, in and out."""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from realhf.layout import Layout
from realhf.lora import CONFIG_FILE, SAVED_MODULES, WEIGHTS_FILE, legal_targets
from realhf.nn.lora import Adapters
from realhf.param_spec import ModelSpec, ParamSpec, region_slices
from realhf.realloc.execute import Reallocator


def load_adapters(directory: str | Path, adapters: Adapters) -> None:
    """Reads this rank's regions of a PEFT directory, cast to the dtype of the adapters.

    A directory may lack the score head, which then stays as it was. Raises ValueError that names the file
    and the parameter.
    """
    path, files, shards = Path(directory) / WEIGHTS_FILE, _files(adapters.spec), adapters.shards()
    optional = {p.name for p in adapters.spec.params if p.part == "score.weight"}
    if not path.is_file():
        raise ValueError(f"{directory} has no {WEIGHTS_FILE}; adapters are read from safetensors only")
    try:
        with safe_open(path, framework="pt") as reader:
            there = set(reader.keys())
            if unknown := sorted(there - files.keys()):
                raise ValueError(f"{path}: {unknown[0]} is no adapter of this {adapters.config.family} model")
            if missing := sorted(files.keys() - there - optional):
                raise ValueError(f"{path}: {missing[0]} is missing")
            for name in sorted(there):
                part, expected = reader.get_slice(name), _shape(files[name])
                if (found := tuple(part.get_shape())) != expected:
                    raise ValueError(f"{path}: {name} has shape {found}; this model wants {expected}")
                for param in files[name]:
                    if param.name in shards:
                        (low, high), *rest = adapters.regions[param.name]
                        rows = (low + param.in_file.start, high + param.in_file.start)
                        shards[param.name].copy_(part[region_slices((rows, *rest))])
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def save_adapters(directory: str | Path, adapters: Adapters, *, base: str) -> None:
    """Writes a directory that `peft.PeftModel.from_pretrained` opens; `base` names the model beneath.

    Collective over the ranks of the layout, of which the first gathers the adapters and writes.
    """
    groups, directory, dtype, spec = adapters.groups, Path(directory), adapters.flat.dtype, adapters.spec
    writer, whole = groups.layout.ranks[0], None
    if groups.rank == writer:
        whole = {param.name: torch.empty(param.shape, dtype=dtype) for param in spec.params}
    target = Layout.parse(f"d1@{writer}")
    gather = Reallocator(spec, source=groups.layout, target=target, world=groups.world, dtype=dtype)
    gather.run(adapters.shards(), whole)
    if whole is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: torch.cat([whole[param.name] for param in params]) for name, params in _files(spec).items()
    }
    part = directory / f"{WEIGHTS_FILE}.part"
    save_file(tensors, part, metadata={"format": "pt"})
    os.replace(part, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps(_config(adapters, base), indent=2) + "\n")


def _files(spec: ModelSpec) -> dict[str, list[ParamSpec]]:
    """Tensor of the file -> the parameters in it, in order."""
    found: dict[str, list[ParamSpec]] = {}
    for param in spec.params:
        found.setdefault(param.in_file.name, []).append(param)
    return found


def _shape(params: list[ParamSpec]) -> tuple[int, ...]:
    return (sum(param.shape[0] for param in params), *params[0].shape[1:])


def _config(adapters: Adapters, base: str) -> dict[str, object]:
    """What PEFT itself writes, as far as it says anything."""
    config, lora = adapters.config, adapters.lora
    is_score = config.head == "score"
    # (PEFT's own "all-linear" would also mean the routers of experts.)
    targets = legal_targets(config) if lora.all_linear else list(lora.target_modules)
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": config.describes.transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "modules_to_save": list(reversed(SAVED_MODULES)) if is_score else None,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": targets,
        "task_type": "SEQ_CLS" if is_score else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": lora.use_rslora,
    }
