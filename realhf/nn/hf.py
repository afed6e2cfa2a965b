"""Hugging Face model directories in and out, by the parameter table. Only safetensors and JSON are read."""

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from realhf.nn.transformer import Transformer
from realhf.param_spec import ModelSpec, ParamSpec, Region, region_slices

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_HEADS = ("lm_head.weight", "score.weight")


def load_weights(directory: str | Path, model: Transformer) -> list[str]:
    """Reads this rank's regions of a model directory into the model, cast to its dtype.

    Gives the names that the files lack: score.weight at most, when a critic or reward model starts from a
    language model; its values stay as they were. Raises ValueError that names the file and the parameter.
    """
    directory = Path(directory)
    files = _weight_files(directory)
    shapes = {param.name: param.shape for param in model.spec.params}
    missing = set(shapes)
    shards = model.shards()
    for path, listed in files.items():
        with _open(path) as reader:
            for name in sorted(set(reader.keys()) | listed):
                if name not in shapes:
                    if name not in _HEADS and not name.endswith("rotary_emb.inv_freq"):
                        raise ValueError(f"{path}: a {model.config.family} model has no parameter {name}")
                    continue
                missing.discard(name)
                _read(reader, path, name, shapes[name], region=model.regions.get(name), into=shards.get(name))
    refused = sorted(missing - {"score.weight"})
    if refused:
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        raise ValueError(f"{directory}: parameter {refused[0]}{more} is in none of the safetensors files")
    return sorted(missing)


def _weight_files(directory: Path) -> dict[Path, set[str]]:
    """The safetensors files of a model directory, each with the names that the index promises in it."""
    if (directory / _SINGLE).is_file():
        return {directory / _SINGLE: set()}
    index = directory / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
            files: dict[Path, set[str]] = {}
            for name, file in weight_map.items():
                files.setdefault(directory / file, set()).add(name)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files: {error!r}") from error
        return files
    if any(directory.glob("*.bin")):
        raise ValueError(
            f"{directory} has pickled weights (*.bin) only; they are not loaded, as reading them runs code: "
            "open it once with transformers and call save_pretrained(directory, safe_serialization=True)"
        )
    raise ValueError(f"{directory} has no {_SINGLE} and no {_INDEX}")


def _open(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} is missing, though {_INDEX} names it")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def _read(
    reader: Any, path: Path, name: str, shape: tuple[int, ...],
    *, region: Region | None, into: torch.Tensor | None,
) -> None:  # fmt: skip
    """Checks one tensor of a file and reads the region, if this rank holds one."""
    try:
        part = reader.get_slice(name)
        found = tuple(part.get_shape())
        if found != shape:
            raise ValueError(f"{path}: parameter {name} has shape {found}; the config says {shape}")
        if region is not None and into is not None:
            into.copy_(part[region_slices(region)])
    except SafetensorError as error:
        raise ValueError(f"{path}: parameter {name} cannot be read: {error}") from error


def save_weights(
    directory: str | Path, model: Transformer,
    *, dtype: torch.dtype | None = None, max_shard_bytes: int = 4 << 30,
) -> None:  # fmt: skip
    """Writes a directory that transformers opens: config.json, and safetensors in `dtype` or the model's own.

    Collective over the ranks of dp replica 0; others return at once. The layout's first rank writes, with one
    file's tensors in memory at a time.
    """
    groups, directory = model.groups, Path(directory)
    if groups.at.dp != 0:
        return
    dtype = dtype or model.flat.dtype
    writes = groups.rank == groups.layout.ranks[0]
    files = _plan_files(model.spec, dtype=dtype, max_shard_bytes=max_shard_bytes)
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
    for file, params in files.items():
        tensors = {}
        for param in params:
            whole = _gather(model, param)
            if whole is not None:
                tensors[param.name] = whole.to("cpu", dtype)
        if writes:
            part = directory / f"{file}.part"
            save_file(tensors, part, metadata={"format": "pt"})
            os.replace(part, directory / file)
    if writes:
        _write_json_files(directory, model.spec, files, dtype=dtype)


def _plan_files(spec: ModelSpec, *, dtype: torch.dtype, max_shard_bytes: int) -> dict[str, list[ParamSpec]]:
    """File name -> its parameters, in table order, as many as fit."""
    chunks: list[list[ParamSpec]] = [[]]
    room_bytes = max_shard_bytes
    for param in spec.params:
        num_bytes = param.numel * dtype.itemsize
        if num_bytes > room_bytes and chunks[-1]:
            chunks.append([])
            room_bytes = max_shard_bytes
        chunks[-1].append(param)
        room_bytes -= num_bytes
    if len(chunks) == 1:
        return {_SINGLE: chunks[0]}
    return {f"model-{i:05d}-of-{len(chunks):05d}.safetensors": chunk for i, chunk in enumerate(chunks, 1)}


def _gather(model: Transformer, param: ParamSpec) -> torch.Tensor | None:
    """The whole parameter on the layout's first rank, from primary holders of dp replica 0; else None."""
    groups, layout = model.groups, model.groups.layout
    writer, own = layout.ranks[0], model.shards().get(param.name)
    at = {rank: layout.coordinate(rank) for rank in layout.shard_ranks(0)}
    senders = [rank for rank in at if model.spec.is_primary(param, layout, at[rank])]
    if groups.rank != writer:
        groups.all.exchange([(0, own)] if groups.rank in senders and own is not None else [], [])
        return None
    whole = model.flat.new_empty(param.shape)
    views = {r: whole[region_slices(param.region(layout.tp, at[r].tp))] for r in senders}
    parts = {r: torch.empty_like(view, memory_format=torch.contiguous_format) for r, view in views.items()}
    if writer in parts and own is not None:
        parts[writer] = own
    groups.all.exchange([], [(groups.all.ranks.index(r), part) for r, part in parts.items() if r != writer])
    for r, part in parts.items():
        views[r].copy_(part)
    return whole


def _write_json_files(
    directory: Path, spec: ModelSpec, files: dict[str, list[ParamSpec]], *, dtype: torch.dtype
) -> None:
    """config.json and, for several files, their index; removes the weight files of an earlier save."""
    config = {key: value for key, value in spec.config.to_hf().items() if key != "torch_dtype"}
    documents = {"config.json": {**config, "dtype": str(dtype).removeprefix("torch.")}}
    if len(files) > 1:
        total_bytes = spec.numel * dtype.itemsize
        weight_map = {param.name: file for file, params in files.items() for param in params}
        documents[_INDEX] = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    for file, document in documents.items():
        part = directory / f"{file}.part"
        part.write_text(json.dumps(document, indent=2) + "\n")
        os.replace(part, directory / file)
    stale = {directory / _SINGLE, directory / _INDEX, *directory.glob("model-*-of-*.safetensors")}
    for path in stale - {directory / file for file in (*files, *documents)}:
        path.unlink(missing_ok=True)
