"""Hugging Face model directories in and out, by the parameter table. Only safetensors and JSON are read."""

import json
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from realhf.layout import Layout
from realhf.nn.transformer import Transformer
from realhf.param_spec import region_slices
from realhf.realloc.execute import Reallocator

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEADS = ("lm_head.weight", "score.weight")


def load_weights(directory: str | Path, model: Transformer) -> list[str]:
    """Reads this rank's regions of a model directory into the model, cast to its dtype.

    Gives the names that the files lack: score.weight at most, when a critic or reward model starts from a
    language model; its values stay as they were. Raises ValueError that names the file and the parameter.
    """
    directory, shards = Path(directory), model.shards()
    shapes = {param.name: param.shape for param in model.spec.params}
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
                        if name in shards:
                            shards[name].copy_(part[region_slices(model.regions[name])])
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
        save_file(whole, part, metadata={"format": "pt"})
        os.replace(part, directory / _SINGLE)
        config = model.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}
        config.pop("torch_dtype", None)
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
