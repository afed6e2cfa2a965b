"""Loading and saving of Hugging Face model directories and PEFT adapter directories.

Only safetensors and JSON are read.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from realhf.checkpoint.peft import CONFIG_FILE, STEM, adapter_config, open_adapters
from realhf.checkpoint.read import LM_HEAD, box_in_tensor, open_checkpoint
from realhf.checkpoint.tensor_files import STORED_DTYPES, StoredTensor
from realhf.checkpoint.write import MAX_SHARD_BYTES, Beside, CheckpointWriter, in_file_order, memory_of
from realhf.dist.group import World
from realhf.layout import Layout
from realhf.lora import LoraConfig
from realhf.nn.lora import Adapters
from realhf.nn.split_float32 import split_into
from realhf.nn.transformer import Transformer
from realhf.param_spec import ModelSpec
from realhf.region import Region

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
    return read_shards(Path(directory), model.spec, model.shards(), model.regions, announce=is_first)


@torch.no_grad()
def read_shards(
    directory: Path, spec: ModelSpec, shards: Mapping[str, Tensor], regions: Mapping[str, Region],
    *, announce: bool = True,
) -> list[str]:  # fmt: skip
    """Do the work of `load_weights` for any tensors with these regions of the parameters.

    With `announce`, print to standard error which layers in the files are not read.
    """
    checkpoint = open_checkpoint(directory, spec)
    if checkpoint.further_layers and announce:
        layers = ", ".join(map(str, checkpoint.further_layers))
        past = f"layers past num_hidden_layers {spec.config.num_layers} are left out: {layers}"
        print(f"realhf: {directory}: {past}", file=sys.stderr)
    embedding = next(param for param in spec.params if param.part == "embedding.weight").name
    copy = checkpoint.head_copy if embedding in shards else None
    with _Reader() as reader:
        reader.read_all(checkpoint.tensors, spec, shards, regions)
        if copy is not None and not reader.equals(copy, regions[embedding], shards[embedding]):
            raise ValueError(
                f"{copy.path}: {LM_HEAD} differs from the embedding, but config.json has "
                "tie_word_embeddings true; set it to false, or remove the tensor"
            )
    return list(checkpoint.missing)


@torch.no_grad()
def load_adapters(directory: str | Path, adapters: Adapters) -> None:
    """Read this rank's regions of a PEFT directory into the adapters, cast to their dtype.

    If the directory has no score head, that of the adapters does not change. Raises ValueError that names
    the file and the tensor.
    """
    tensors = open_adapters(Path(directory), adapters.spec)
    with _Reader() as reader:
        reader.read_all(tensors, adapters.spec, adapters.shards(), adapters.regions)


def save_weights(
    directory: str | Path, model: Transformer,
    *, beside: Mapping[str, Beside] | None = None, max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:  # fmt: skip
    """Write a directory that transformers can open, in the model's dtype, on the host of the first rank.

    All ranks of the layout must call this; see CheckpointWriter.
    """
    groups = model.groups
    writer = CheckpointWriter(
        model.spec, groups.layout, groups.world, dtype=model.flat.dtype, leader=groups.layout.ranks[0],
        max_shard_bytes=max_shard_bytes,
    )  # fmt: skip
    writer.write(Path(directory), model.shards(), beside=beside or {})


def save_adapters(directory: str | Path, adapters: Adapters, *, base: str) -> None:
    """Write a directory that `peft.PeftModel.from_pretrained` can open, on the host of the first rank.

    All ranks of the layout must call this. `base` names the base model.
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
    """Return a writer of PEFT directories for adapters in this layout; `base` names the base model."""
    return CheckpointWriter(
        spec, layout, world, dtype=dtype, leader=leader, max_shard_bytes=sys.maxsize, stem=STEM,
        config=(CONFIG_FILE, adapter_config(spec.config, lora, base=base)),
    )  # fmt: skip


class _Reader:
    """A reader of boxes of tensors in files, which keeps the last file open."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._path = Path()
        self._file = -1

    def __enter__(self) -> "_Reader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the open file, if there is one."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def read_all(
        self, tensors: Mapping[str, StoredTensor], spec: ModelSpec, shards: Mapping[str, Tensor],
        regions: Mapping[str, Region],
    ) -> None:  # fmt: skip
        """Read those parameters of a rank that `tensors` has, in the order of the files."""
        reads: list[tuple[StoredTensor, Region, Tensor]] = []
        sums: list[tuple[Tensor, Tensor]] = []
        for param in spec.params:
            if param.name in shards and param.in_file.name in tensors:
                box = box_in_tensor(param, regions[param.name])
                target = in_file_order(param, shards[param.name])
                sums += [(shards[param.name], target)] if param.limbs > 1 else []
                reads.append((tensors[param.in_file.name], box, target))
        for tensor, box, shard in sorted(reads, key=lambda read: (read[0].path, read[0].start, read[1])):
            self.read(tensor, box, shard)
        for parts, values in sums:
            split_into(parts, values)

    def read(self, tensor: StoredTensor, box: Region, target: Tensor) -> None:
        """Read a box of a tensor into `target`, cast to its dtype."""
        as_stored = target.dtype == getattr(torch, STORED_DTYPES[tensor.dtype])
        if as_stored and target.device.type == "cpu" and target.is_contiguous():
            memory = memory_of(target)
            row_bytes = tensor.num_bytes // tensor.shape[0]
            start = box[0][0] * row_bytes
            if len(memory) == len(target) * row_bytes:
                self._fill(memory, tensor, start)
                return
            if row_bytes >= _LONG_ROW_BYTES:
                first = start + box[1][0] * target.dtype.itemsize
                length = len(memory) // len(target)
                for i in range(len(target)):
                    self._fill(memory[i * length : (i + 1) * length], tensor, first + i * row_bytes)
                return
        for rows, values in self._blocks(tensor, box):
            target[rows].copy_(values)

    def equals(self, tensor: StoredTensor, box: Region, target: Tensor) -> bool:
        """Return whether `target` has the values that `read` would write."""
        blocks = self._blocks(tensor, box)
        return all(torch.equal(target[rows], values.to(target)) for rows, values in blocks)

    def _blocks(self, tensor: StoredTensor, box: Region) -> Iterator[tuple[slice, Tensor]]:
        """Yield some rows of the box at a time, and their values, which the next ones overwrite."""
        (low, high), *columns = box
        row_bytes = tensor.num_bytes // tensor.shape[0]
        step = max(1, _BLOCK_BYTES // row_bytes)
        if len(self._block) < min(step, high - low) * row_bytes:
            self._block = torch.empty(step * row_bytes, dtype=torch.uint8)
        for first in range(low, high, step):
            last = min(high, first + step)
            block = self._block[: (last - first) * row_bytes]
            self._fill(memory_of(block), tensor, first * row_bytes)
            dtype = getattr(torch, STORED_DTYPES[tensor.dtype])
            values = block.view(dtype).view(last - first, *tensor.shape[1:])
            yield slice(first - low, last - low), values[:, slice(*columns[0])] if columns else values

    def _fill(self, memory: memoryview, tensor: StoredTensor, start: int) -> None:
        """Fill `memory` with the bytes of the tensor from byte `start` on."""
        position = tensor.start + start
        try:
            if self._file < 0 or self._path != tensor.path:
                self.close()
                self._file = os.open(tensor.path, os.O_RDONLY)
                self._path = tensor.path
            while len(memory):
                count = os.preadv(self._file, [memory], position)
                if not count:
                    end = position + len(memory)
                    raise ValueError(f"{tensor.path} is truncated: it ends before byte {end}")
                memory = memory[count:]
                position += count
        except OSError as error:
            raise ValueError(f"{tensor.path} cannot be read: {error.strerror}") from error
