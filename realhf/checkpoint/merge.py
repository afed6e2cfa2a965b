"""Reads models as objects of transformers, adds adapters to their weights, and averages models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from realhf.checkpoint.peft import CONFIG_FILE, STEM
from realhf.checkpoint.tensor_files import read_header
from realhf.errors import UserError
from realhf.user_input.files import read_object, require_regular_files
from realhf.user_input.hub import find_model

_OF_PEFT = "base_model.model."
"""Beginning of the names of tensors in PEFT's files."""


def load_model(directory: str | Path) -> Any:
    """Return the model of a directory, or of a name of the hub, as an object of transformers.

    The adapters of a PEFT directory are added to the weights of their model. Raises UserError that names the
    directory.
    """
    path = find_model(str(directory), weights=True)
    adapters = read_object(path / CONFIG_FILE) if (path / CONFIG_FILE).is_file() else None
    base = path
    if adapters is not None:
        name = adapters.get("base_model_name_or_path")
        if not name:
            raise UserError(f"{path / CONFIG_FILE} names no base_model_name_or_path")
        base = find_model(str(name), weights=True)
    require_regular_files(base)
    transformers = import_module("transformers")
    kinds = read_object(base / "config.json").get("architectures") or [""]
    is_score = str(kinds[0]).endswith("ForSequenceClassification") or (
        adapters is not None and adapters.get("task_type") == "SEQ_CLS")
    kind = transformers.AutoModelForSequenceClassification if is_score else transformers.AutoModelForCausalLM
    more: dict[str, Any] = {"num_labels": 1} if is_score else {}
    try:
        model = kind.from_pretrained(
            str(base), dtype="auto", local_files_only=True, use_safetensors=True, trust_remote_code=False,
            **more)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"{base}: transformers cannot read it: {' '.join(str(error).split())}") from error
    if adapters is not None:
        _add(model, adapters, path)
    return model


def _add(model: Any, adapters: dict[str, Any], directory: Path) -> None:
    """Add the product of each pair of adapters to the weight of its module: W + s B A (Hu et al. 2021)."""
    torch = import_module("torch")
    path = directory / f"{STEM}.safetensors"
    if not path.is_file():
        raise UserError(f"{directory} has no {path.name}; adapters are read from safetensors only")
    read_header(path)  # It checks the file.
    tensors = import_module("safetensors.torch").load_file(str(path))
    rank = adapters["r"]
    scale = adapters["lora_alpha"] / (math.sqrt(rank) if adapters.get("use_rslora") else rank)
    with torch.no_grad():
        for name, tensor in tensors.items():
            module, _, kind = name.removeprefix(_OF_PEFT).rpartition(".lora_")
            try:
                if not module:  # A head that was trained as a whole.
                    model.get_parameter(name.removeprefix(_OF_PEFT)).copy_(tensor)
                elif kind == "A.weight":
                    weight = model.get_submodule(module).weight
                    product = tensors[name.replace(".lora_A.", ".lora_B.")].float() @ tensor.float()
                    change = product.T if adapters.get("fan_in_fan_out") else product
                    weight.copy_(weight.float() + scale * change)
            except (AttributeError, KeyError, RuntimeError) as error:
                raise UserError(f"{path}: {name} does not fit the model: {error}") from error


def average(directories: Sequence[str | Path], weights: Sequence[float]) -> Any:
    """Return the weighted mean of models of one shape (a "soup", Wortsman et al. 2022, arXiv:2203.05482).

    Sums are made in float32. Raises UserError if the models differ in their parameters.
    """
    torch = import_module("torch")
    model = load_model(directories[0])
    own = model.state_dict()
    sums = {name: weights[0] * tensor.float() for name, tensor in own.items() if tensor.is_floating_point()}
    for directory, weight in zip(directories[1:], weights[1:], strict=True):
        other = load_model(directory).state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in other.items() if tensor.is_floating_point()}
        for name in sorted(sums.keys() ^ shapes.keys() | {n for n in sums if sums[n].shape != shapes.get(n)}):
            raise UserError(f"{directory}: its tensor {name} is not as in {directories[0]}")
        for name in sums:
            sums[name] += weight * other[name].float()
    with torch.no_grad():
        for name, total in sums.items():
            own[name].copy_(total)
    return model
