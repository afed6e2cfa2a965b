"""Hugging Face model directories in and out, by the parameter table. Only safetensors and JSON are read."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from realhf.layout import Layout
from realhf.nn.transformer import Transformer
from realhf.param_spec import ParamSpec, region_slices
from realhf.realloc.execute import Reallocator

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEADS = ("lm_head.weight", "score.weight")


def _boxes(params: Iterable[ParamSpec]) -> dict[str, list[ParamSpec]]:
    """Tensor of a checkpoint -> the parameters in it."""
    found: dict[str, list[ParamSpec]] = {}
    for param in params:
        found.setdefault(param.in_file.name, []).append(param)
    return found


def _file_shape(params: list[ParamSpec]) -> tuple[int, ...]:
    rows, *rest = params[0].shape
    shape = (sum(param.shape[0] for param in params), *rest)
    return shape[::-1] if params[0].in_file.transposed else shape


def load_weights(directory: str | Path, model: Transformer) -> list[str]:
    """Reads this rank's regions of a model directory into the model, cast to its dtype.

    Gives the names that the files lack: score.weight at most, when a critic or reward model starts from a
    language model; its values stay as they were. Raises ValueError that names the file and the parameter.
    """
    directory, shards = Path(directory), model.shards()
    boxes = _boxes(model.spec.params)
    shapes = {name: _file_shape(params) for name, params in boxes.items()}
    missing = set(shapes)
    for path, listed in _weight_files(directory).items():
        try:
            with safe_open(path, framework="pt") as reader:
                for name in sorted({*reader.keys(), *listed}):
                    if name in shapes:
                        missing.discard(name)
                        part = reader.get_slice(name)
                        found = tuple(part.get_shape())
                        if found != shapes[name]:
                            raise ValueError(
                                f"{path}: parameter {name} has shape {found}; the config says {shapes[name]}"
                            )
                        for param in boxes[name]:
                            if param.name in shards:
                                (low, high), *rest = model.regions[param.name]
                                low, high = low + param.in_file.start, high + param.in_file.start
                                at = region_slices(((low, high), *rest))
                                transposed = param.in_file.transposed
                                value = part[at[::-1]].T if transposed else part[at]
                                shards[param.name].copy_(value)
                    elif name not in _HEADS and not name.endswith("rotary_emb.inv_freq"):
                        raise ValueError(f"{path}: a {model.config.family} model has no parameter {name}")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    refused = sorted(missing - {"score.weight"})
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise ValueError(f"{directory}: parameter {refused[0]}{more} is in none of the safetensors files")
    return sorted(missing)


def _weight_files(directory: Path) -> dict[Path, list[str]]:
    """The safetensors files of a model directory, each with the names that the index promises in it."""
    index = directory / _INDEX
    if (directory / _SINGLE).is_file():
        return {directory / _SINGLE: []}
    if index.is_file():
        files: dict[Path, list[str]] = {}
        try:
            for name, file in json.loads(index.read_text())["weight_map"].items():
                files.setdefault(directory / file, []).append(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
        return files
    if any(directory.glob("*.bin")):
        raise ValueError(
            f"{directory} has pickled weights (*.bin) only; they are not loaded, as reading them runs code: "
            "open it once with transformers and call save_pretrained(directory, safe_serialization=True)"
        )
    raise ValueError(f"{directory} has no {_SINGLE} and no {_INDEX}")


def save_weights(directory: str | Path, model: Transformer) -> None:
    """Writes a directory that transformers opens: config.json, and the weights in the model's dtype.

    Collective over the ranks of the layout, of which the first gathers the model in host memory and writes.
    """
    groups, directory, dtype = model.groups, Path(directory), model.flat.dtype
    writer, whole = groups.layout.ranks[0], None
    if groups.rank == writer:
        whole = {param.name: torch.empty(param.shape, dtype=dtype) for param in model.spec.params}
    target = Layout.parse(f"d1@{writer}")
    gather = Reallocator(model.spec, source=groups.layout, target=target, world=groups.world, dtype=dtype)
    gather.run(model.shards(), whole)
    if whole is not None:
        directory.mkdir(parents=True, exist_ok=True)
        part = directory / f"{_SINGLE}.part"
        tensors = {}
        for name, params in _boxes(model.spec.params).items():
            tensor = torch.cat([whole[param.name] for param in params])
            tensors[name] = tensor.T.contiguous() if params[0].in_file.transposed else tensor
        save_file(tensors, part, metadata={"format": "pt"})
        os.replace(part, directory / _SINGLE)
        config = model.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}
        config.pop("torch_dtype", None)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
