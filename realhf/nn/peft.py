"""Adapters as PEFT directories: writing them."""

import sys
from pathlib import Path

import torch

from realhf.dist.group import World
from realhf.layout import Layout
from realhf.lora import CONFIG_FILE, SAVED_MODULES, LoraConfig, legal_targets
from realhf.model_config import ModelConfig
from realhf.nn.checkpoint_write import CheckpointWriter
from realhf.nn.lora import Adapters
from realhf.param_spec import ModelSpec


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
