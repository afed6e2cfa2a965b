"""Loading and saving of Hugging Face model directories and PEFT adapter directories.

Only safetensors and JSON are read.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from realhf.checkpoint.peft import open_adapters
from realhf.checkpoint.read import LM_HEAD, box_in_tensor, box_start, open_checkpoint
from realhf.checkpoint.tensor_files import STORED_DTYPES, StoredTensor
from realhf.checkpoint.write import MAX_SHARD_BYTES, Beside, CheckpointWriter, in_file_order, memory_of
from realhf.devices.half_precision import split_into
from realhf.distributed.pieces import Shards
from realhf.models.param_spec import ModelSpec
from realhf.models.region import Region, row_blocks
from realhf.nn.lora import Adapters
from realhf.nn.transformer import Transformer
from realhf.user_input.files import open_regular

_BLOCK_BYTES = 1 << 20
"""Size of the buffer for values that cannot be read directly into a parameter; it fits a core's cache."""
_LONG_ROW_BYTES = 1 << 13
"""Length of a row from which reading some of its columns is faster than reading the whole row."""


def load_weights(directory: str | Path, model: Transformer) -> list[str]:
    """Read this rank's regions of a model directory into the model, cast to its dtype.

    Return the names of parameters that the files lack, whose values do not change: at most score.weight, when
    a critic or reward model starts from a language model. Raises ValueError that names file and tensor.
    """
    groups = model.groups
    is_first = groups.rank == groups.layout.ranks[0]
    return read_shards(Path(directory), model.spec, model.pieces(), announce=is_first)


@torch.no_grad()
def read_shards(directory: Path, spec: ModelSpec, shards: Shards, *, announce: bool = True) -> list[str]:
    """Do the work of `load_weights` for any shards, directly into their memory.

    With `announce`, print to standard error which layers of the files are left out.
    """
    checkpoint = open_checkpoint(directory, spec)
    if checkpoint.further_layers and announce:
        layers = ", ".join(map(str, checkpoint.further_layers))
        print(
            f"realhf: {directory}: layers past num_hidden_layers {spec.config.num_layers} are left out: "
            f"{layers}", file=sys.stderr)
    embedding = next(param for param in spec.params if param.short_name == "embedding.weight").name
    copy = checkpoint.head_copy if embedding in shards else None
    _read_all(checkpoint.tensors, spec, shards)
    if copy is not None and not all(_equals(copy, *piece) for piece in shards[embedding]):
        raise ValueError(
            f"{copy.path}: {LM_HEAD} differs from the embedding, but config.json has "
            "tie_word_embeddings true; set it to false, or remove the tensor")
    return list(checkpoint.missing)


@torch.no_grad()
def load_adapters(directory: str | Path, adapters: Adapters) -> None:
    """Read this rank's regions of a PEFT directory into the adapters, cast to their dtype.

    If the directory has no score head, that of the adapters does not change. Raises ValueError that names
    the file and the tensor.
    """
    tensors = open_adapters(Path(directory), adapters.spec)
    _read_all(tensors, adapters.spec, adapters.pieces())


def save_weights(
    directory: str | Path, model: Transformer | Adapters,
    *, base: str = "", beside: Mapping[str, Beside] | None = None, max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a directory that transformers or PEFT can open, in the model's dtype, on the first rank's host.

    All ranks of the layout must call this; see CheckpointWriter. `base` names the base model of adapters.
    """
    groups = model.groups
    writer = CheckpointWriter(
        model.spec, groups.layout, groups.world, dtype=model.flat.dtype, leader=groups.layout.ranks[0],
        max_shard_bytes=max_shard_bytes, lora=model.lora if isinstance(model, Adapters) else None, base=base,
    )
    writer.write(Path(directory), model.pieces(), beside=beside or {})


def _read_all(tensors: Mapping[str, StoredTensor], spec: ModelSpec, shards: Shards) -> None:
    """Read the parameters that both `shards` and `tensors` have, file by file and from front to back."""
    params = (p for p in spec.params if p.name in shards and p.in_file.name in tensors)
    reads = [(tensors[p.in_file.name], p) for p in params]
    reads.sort(key=lambda read: (read[0].path, read[0].start))
    for path, file_reads in groupby(reads, key=lambda read: read[0].path):
        with _opened(path) as file:
            for tensor, param in file_reads:
                for box, shard in shards[param.name]:
                    target = in_file_order(param, shard)
                    _read(file, tensor, box_in_tensor(param, box), target)
                    if param.num_terms > 1:
                        split_into(shard, target)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file for reading, as a file descriptor; raise ValueError if it cannot be read."""
    try:
        with open_regular(path) as file:
            yield file.fileno()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def _read(file: int, tensor: StoredTensor, box: Region, target: Tensor) -> None:
    """Read a box of a tensor into `target`, cast to its dtype."""
    start, has_whole_rows = box_start(tensor, box)
    is_direct = has_whole_rows or tensor.row_bytes >= _LONG_ROW_BYTES
    as_stored = target.dtype == _dtype(tensor) and target.device.type == "cpu" and target.is_contiguous()
    if not (is_direct and as_stored):
        for rows, values in _blocks(file, tensor, box):
            target[rows].copy_(values)
        return
    for row, piece in enumerate([target] if has_whole_rows else target):
        _fill(file, piece, tensor.path, start + row * tensor.row_bytes)


def _equals(tensor: StoredTensor, box: Region, target: Tensor) -> bool:
    """Return whether `target` has the values that `_read` would write."""
    with _opened(tensor.path) as file:
        blocks = _blocks(file, tensor, box)
        return all(torch.equal(target[rows], values.to(target)) for rows, values in blocks)


def _blocks(file: int, tensor: StoredTensor, box: Region) -> Iterator[tuple[slice, Tensor]]:
    """Yield the box in blocks of rows: the indices of the rows in the box, and their values."""
    (low, high), *columns = box
    for rows in row_blocks(high - low, tensor.row_bytes, _BLOCK_BYTES):
        count = min(rows.stop, high - low) - rows.start
        values = torch.empty(count, *tensor.shape[1:], dtype=_dtype(tensor))
        _fill(file, values, tensor.path, tensor.start + (low + rows.start) * tensor.row_bytes)
        yield rows, values[:, slice(*columns[0])] if columns else values


def _dtype(tensor: StoredTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, STORED_DTYPES[tensor.dtype])
    return dtype


def _fill(file: int, target: Tensor, path: Path, start: int) -> None:
    """Fill `target` with the bytes of the file from byte `start` on; `path` is the file's."""
    memory = memory_of(target)
    end = start + len(memory)
    while len(memory):
        count = os.preadv(file, [memory], end - len(memory))
        if not count:
            raise ValueError(f"{path} is truncated: it ends before byte {end}")
        memory = memory[count:]
