"""Loading and writing of Hugging Face model directories and PEFT adapter directories.

CheckpointWriter writes with the ranks of a layout in parallel. Only safetensors and JSON are read.
"""

import ctypes
import json
import math
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from realhf.checkpoint.peft import CONFIG_FILE, STEM, adapter_config, open_adapters
from realhf.checkpoint.tensor_files import (
    INDEX,
    LM_HEAD,
    STORED_DTYPES,
    StoredTensor,
    box_in_tensor,
    box_start,
    open_checkpoint,
    pack_header,
    pack_index,
    params_by_tensor,
    tensor_shape,
)
from realhf.devices.half_precision import joined, split_into, sum_dtype
from realhf.distributed.pieces import Shards, assembled
from realhf.distributed.world import World
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.param_spec import ModelSpec, ParamSpec, Region, region_size, row_blocks
from realhf.nn.lora import Adapters
from realhf.nn.transformer import Transformer
from realhf.user_input.files import open_regular

MAX_SHARD_BYTES = 5 * 10**9
Beside = Path | str
"""A further file of an export: a path to copy, or the text of the file."""
_EXPORTED = ("config.json", "adapter_config.json", "model*.safetensors", INDEX, "adapter_model*.safetensors")
"""Patterns of the files of an export, without the further files."""
_WRITTEN_BYTES = 16 << 20
"""Bytes of a tensor to make contiguous, or to send to a writer, at a time."""
_READ_BYTES = 1 << 20
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
    for rows in row_blocks(high - low, tensor.row_bytes, _READ_BYTES):
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


class ShardFile(NamedTuple):
    """A file to write: its first bytes, its length in bytes, and its tensors by name."""

    name: str
    header: bytes
    num_bytes: int
    tensors: Mapping[str, StoredTensor]


def plan_files(
    spec: ModelSpec, *, dtype: torch.dtype, max_shard_bytes: int, stem: str = "model"
) -> list[ShardFile]:
    """Split the model's tensors, in table order, into files of at most `max_shard_bytes`.

    A tensor that is larger has a file of its own.
    """
    dtype_names = {getattr(torch, torch_name): name for name, torch_name in STORED_DTYPES.items()}
    contents: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    filled = 0  # Bytes in the last file.
    for name, params in params_by_tensor(spec.params).items():
        file_dtype = _dtype_in_file(params[0], dtype)
        shape = tensor_shape(params)
        num_bytes = math.prod(shape) * file_dtype.itemsize
        if contents[-1] and filled + num_bytes > max_shard_bytes:
            contents.append([])
            filled = 0
        contents[-1].append((name, dtype_names[file_dtype], shape))
        filled += num_bytes
    files: list[ShardFile] = []
    for i, content in enumerate(contents, start=1):
        suffix = f"-{i:05d}-of-{len(contents):05d}" if len(contents) > 1 else ""
        path = Path(f"{stem}{suffix}.safetensors")
        header, starts = pack_header(content)
        tensors = {name: StoredTensor(path, kind, shape, starts[name]) for name, kind, shape in content}
        files.append(ShardFile(path.name, header, starts[""], tensors))
    return files


@dataclass(frozen=True)
class WriteJob:
    """A region of a parameter, which `sender` holds and `writer` writes to a file."""

    param: ParamSpec
    region: Region
    sender: int
    writer: int


def assign_writes(spec: ModelSpec, layout: Layout, writers: Sequence[int]) -> list[WriteJob]:
    """Assign a sender and a writer to every region, in table order.

    If some of `writers` hold a region, one of these writes it, so that it need not be sent. Of several
    candidates, the one with the least work so far is chosen.
    """
    written = Counter[int]()
    sent = Counter[int]()
    jobs = []
    for param, placement in zip(spec.params, spec.placements(layout), strict=True):
        for region, holders in placement:
            holding_writers = [rank for rank in holders if rank in writers]
            writer = min(holding_writers or writers, key=lambda rank: (written[rank], rank))
            sender = writer if holding_writers else min(holders, key=lambda rank: (sent[rank], rank))
            written[writer] += region_size(region)
            sent[sender] += 0 if holding_writers else region_size(region)
            jobs.append(WriteJob(param, region, sender, writer))
    return jobs


class CheckpointWriter:
    """A writer of model or PEFT directories for one layout, which can be used many times.

    The directory needs to be on the disk of one host only, the host of rank `leader`, which need not be in
    the layout. The layout's ranks on that host write the regions that they hold, in parallel, into the same
    files. Ranks of other hosts send them, block by block, the regions that none of them holds.

    It writes the model's config.json, with `fields` added. With `lora`, the parameters are adapters, and it
    writes a PEFT directory instead; `base` then names the base model. `complete` is called with the path of
    each file of weights before that gets its name.
    """

    def __init__(
        self, spec: ModelSpec, layout: Layout, world: World,
        *, dtype: torch.dtype, leader: int, max_shard_bytes: int = MAX_SHARD_BYTES,
        fields: Mapping[str, object] = MappingProxyType({}), lora: LoraConfig | None = None, base: str = "",
        complete: Callable[[Path], None] | None = None,
    ) -> None:
        self._rank = world.rank
        self._complete = complete
        self._leader = leader
        self._dtype = dtype
        if lora is None:
            self._files = plan_files(spec, dtype=dtype, max_shard_bytes=max_shard_bytes)
            self._config_file = "config.json"
            self._config = {**_model_config(spec, dtype), **fields}
        else:  # PEFT reads a single file.
            self._files = plan_files(spec, dtype=dtype, max_shard_bytes=sys.maxsize, stem=STEM)
            self._config_file = CONFIG_FILE
            self._config = adapter_config(spec.config, lora, base=base)
        host = world.ranks_on_host(leader)
        self._writers = sorted(rank for rank in layout.ranks if rank in host) or [leader]
        self._jobs = assign_writes(spec, layout, self._writers)
        self._tensors = {name: tensor for file in self._files for name, tensor in file.tensors.items()}
        self._group = world.group(tuple(sorted({*layout.ranks, leader})), purpose="export")

    @torch.no_grad()
    def write(self, directory: Path, shards: Shards, *, beside: Mapping[str, Beside]) -> None:
        """Write the directory; all ranks of the layout and the leader must call this.

        Returns when the directory is complete. `beside` maps names to further files. The config is written
        last, so a directory with a config is complete. Raises OSError if a file cannot be written.
        """
        if self._rank == self._leader:
            directory.mkdir(parents=True, exist_ok=True)
            for file in self._files:
                with open(directory / _unfinished(file.name), "wb") as out:
                    out.write(file.header)
                    out.truncate(file.num_bytes)
        self._group.barrier()
        for job in (*self._local_jobs(), *(job for job in self._jobs if job.sender != job.writer)):
            for row, block in self._blocks(job, shards):
                self._write(directory, job, row, block)
        self._group.barrier()
        if self._rank == self._leader:
            self._finish(directory, beside)
        self._group.barrier()

    def _local_jobs(self) -> list[WriteJob]:
        """Return the jobs whose region this rank both holds and writes.

        Each writer begins with a different file, because a file takes one write at a time.
        """
        jobs = [job for job in self._jobs if job.sender == job.writer == self._rank]
        if not jobs:
            return []
        num_files = len(self._files)
        file_index = {name: i for i, file in enumerate(self._files) for name in file.tensors}
        first = self._writers.index(self._rank) * num_files // len(self._writers)
        return sorted(jobs, key=lambda job: (file_index[job.param.in_file.name] - first) % num_files)

    def _blocks(self, job: WriteJob, shards: Shards) -> Iterator[tuple[int, Tensor]]:
        """Yield a region in blocks of rows, with the index of each first row, on the rank that writes it.

        On the rank that holds the region, if that is another one, send the blocks instead.
        """
        peers = self._group.ranks
        if self._rank == job.sender:
            values = in_file_order(job.param, assembled(shards[job.param.name], job.region))
        elif self._rank == job.writer:
            shape = [stop - start for start, stop in box_in_tensor(job.param, job.region)]
            values = torch.empty(shape, dtype=_dtype_in_file(job.param, self._dtype), device="meta")
        else:
            return
        for rows in row_blocks(len(values), values[:1].nbytes, _WRITTEN_BYTES):
            if values.is_meta:
                block = torch.empty_like(values[rows], device="cpu")
                self._group.exchange([], [(peers.index(job.sender), block)])
                yield rows.start, block
                continue
            block = values[rows].cpu().contiguous()
            if self._rank == job.writer:
                yield rows.start, block
            else:
                self._group.exchange([(peers.index(job.writer), block)], [])

    def _write(self, directory: Path, job: WriteJob, row: int, block: Tensor) -> None:
        """Write rows of a region into its file; `row` is the index of the first one in the region."""
        tensor = self._tensors[job.param.in_file.name]
        start, has_whole_rows = box_start(tensor, box_in_tensor(job.param, job.region))
        with open(directory / _unfinished(tensor.path.name), "r+b") as out:
            for i, piece in enumerate([block] if has_whole_rows else block):
                out.seek(start + (row + i) * tensor.row_bytes)
                out.write(memory_of(piece))

    def _finish(self, directory: Path, beside: Mapping[str, Beside]) -> None:
        """Give the files their final names, after removing an earlier export of a model or adapters."""
        names = [file.name for file in self._files]
        written = {_unfinished(name) for name in names}
        for pattern in (*_EXPORTED, *map(_unfinished, _EXPORTED)):
            for path in directory.glob(pattern):
                if path.name not in written:
                    path.unlink()
        for name in names:
            if self._complete is not None:
                self._complete(directory / _unfinished(name))
            os.replace(directory / _unfinished(name), directory / name)
        if len(names) > 1:
            files = {name: tensor.path.name for name, tensor in self._tensors.items()}
            num_bytes = sum(file.num_bytes - len(file.header) for file in self._files)
            _put(directory / INDEX, pack_index(files, num_bytes))
        for name, content in beside.items():
            _put(directory / name, content)
        _put(directory / self._config_file, json.dumps(self._config, indent=2) + "\n")


def _model_config(spec: ModelSpec, dtype: torch.dtype) -> dict[str, object]:
    config = spec.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}
    config.pop("torch_dtype", None)
    return config


def memory_of(tensor: Tensor) -> memoryview:
    """Return a view of the bytes of a contiguous tensor on the host, which must outlive this view.

    After `Tensor.numpy` torch would never again free or resize the tensor's storage.
    """
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def in_file_order(param: ParamSpec, shard: Tensor) -> Tensor:
    """Return a region with its dims in the order of checkpoints: a view, unless its terms are added up."""
    if param.num_terms > 1:
        return joined(shard)
    return shard.T if param.in_file.transposed else shard


def _dtype_in_file(param: ParamSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that a parameter has in a checkpoint of a model of this dtype."""
    return sum_dtype(dtype) if param.num_terms > 1 else dtype


def _put(path: Path, content: Beside) -> None:
    """Write a file so that it is either complete or absent."""
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(_unfinished(path.name))
    if isinstance(content, Path):
        shutil.copyfile(content, unfinished)
    else:
        unfinished.write_text(content)
    os.replace(unfinished, path)


def _unfinished(name: str) -> str:
    return f"{name}.part"
