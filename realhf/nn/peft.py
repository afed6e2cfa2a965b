"""Adapters as PEFT directories, in and out."""

import sys
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from realhf.dist.group import World
from realhf.layout import Layout
from realhf.lora import CONFIG_FILE, SAVED_MODULES, WEIGHTS_FILE, LoraConfig, legal_targets
from realhf.model_config import ModelConfig
from realhf.nn.checkpoint import box_in_tensor, params_by_tensor, tensor_shape
from realhf.nn.checkpoint_write import CheckpointWriter
from realhf.nn.lora import Adapters
from realhf.param_spec import ModelSpec, region_slices


def load_adapters(directory: str | Path, adapters: Adapters) -> None:
    """Reads this rank's regions of a PEFT directory, cast to the dtype of the adapters.

    A directory may lack the score head, which then stays as it was. Raises ValueError that names the file
    and the parameter.
    """
    path, files = Path(directory) / WEIGHTS_FILE, params_by_tensor(adapters.spec.params)
    shards = adapters.shards()
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
                part, expected = reader.get_slice(name), tensor_shape(files[name])
                if (found := tuple(part.get_shape())) != expected:
                    raise ValueError(f"{path}: {name} has shape {found}; this model wants {expected}")
                for param in files[name]:
                    if param.name in shards:
                        box = box_in_tensor(param, adapters.regions[param.name])
                        shards[param.name].copy_(part[region_slices(box)])
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def save_adapters(directory: str | Path, adapters: Adapters, *, base: str) -> None:
    """Writes a directory that `peft.PeftModel.from_pretrained` opens, at the layout's first rank.

    Collective over the ranks of the layout; `base` names the model beneath.
    """
    groups = adapters.groups
    writer = adapter_writer(
        adapters.spec, adapters.lora, groups.layout, groups.world, dtype=adapters.flat.dtype,
        leader=groups.layout.ranks[0], base=base,
    )  # fmt: skip
    writer.write(Path(directory), adapters.shards(), beside={})


def adapter_writer(
    spec: ModelSpec, lora: LoraConfig, layout: Layout, world: World,
    *, dtype: torch.dtype, leader: int, base: str,
) -> CheckpointWriter:  # fmt: skip
    """What writes PEFT directories of adapters that are in this layout."""
    return CheckpointWriter(
        spec, layout, world, dtype=dtype, leader=leader, max_shard_bytes=sys.maxsize, stem="adapter_model",
        config=(CONFIG_FILE, _config(spec.config, lora, base)),
    )  # fmt: skip


def _config(config: ModelConfig, lora: LoraConfig, base: str) -> dict[str, object]:
    """What PEFT itself writes, as far as it says anything."""
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
