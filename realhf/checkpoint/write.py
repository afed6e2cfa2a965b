"""CheckpointWriter: writes Hugging Face model directories, with the ranks of a layout in parallel."""

import ctypes
import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from realhf.checkpoint.read import box_in_tensor, params_by_tensor, tensor_shape
from realhf.checkpoint.tensor_files import INDEX, STORED_DTYPES, pack_header, pack_index
from realhf.dist.group import World
from realhf.layout import Layout
from realhf.nn.split_float32 import joined, sum_dtype
from realhf.param_spec import ModelSpec, ParamSpec
from realhf.region import Region, region_size

MAX_SHARD_BYTES = 5 * 10**9
Beside = Path | str
"""A further file of an export: a path to copy, or the text of the file."""
_EXPORTED = (
    "config.json", "adapter_config.json", "model*.safetensors", INDEX, "adapter_model*.safetensors",
)  # fmt: skip
"""Patterns of the files of an export, without the further files."""
_BLOCK_BYTES = 16 << 20
"""Bytes of a tensor to make contiguous, or to send to a writer, at a time."""


class ShardFile(NamedTuple):
    """A file to write: its first bytes, and tensor -> byte at which it begins ("": the end of the file)."""

    name: str
    header: bytes
    starts: Mapping[str, int]


def plan_files(
    spec: ModelSpec, *, dtype: torch.dtype, max_shard_bytes: int, stem: str = "model"
) -> list[ShardFile]:
    """Split the model's tensors, in table order, into files of at most `max_shard_bytes`.

    A tensor that is larger has a file of its own.
    """
    stored = {getattr(torch, known): name for name, known in STORED_DTYPES.items()}
    tensors = {
        name: (_dtype_in_file(params[0], dtype), tensor_shape(params))
        for name, params in params_by_tensor(spec.params).items()
    }
    files: list[list[str]] = [[]]
    filled = 0  # Bytes in the last file.
    for name, (own, shape) in tensors.items():
        num_bytes = torch.Size(shape).numel() * own.itemsize
        if files[-1] and filled + num_bytes > max_shard_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += num_bytes
    count = len(files)
    names = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = names if count > 1 else [f"{stem}.safetensors"]
    headers = [
        pack_header((name, stored[own], shape) for name in file for own, shape in [tensors[name]])
        for file in files
    ]
    return [ShardFile(name, *header) for name, header in zip(names, headers, strict=True)]


@dataclass(frozen=True)
class Part:
    """A region of a parameter, which `sender` holds and `writer` writes to a file."""

    param: ParamSpec
    region: Region
    sender: int
    writer: int


def assign_parts(spec: ModelSpec, layout: Layout, writers: Sequence[int]) -> list[Part]:
    """Assign a sender and a writer to every region, in table order.

    A region is written by one of its holders if some are among `writers`, so that it need not be sent. Among
    several candidates, the one with the least work so far is chosen.
    """
    written = Counter[int]()
    sent = Counter[int]()
    parts = []
    for param, placement in zip(spec.params, spec.placements(layout), strict=True):
        for region, holders in placement:
            own = [rank for rank in holders if rank in writers]
            writer = min(own or writers, key=lambda rank: (written[rank], rank))
            sender = writer if own else min(holders, key=lambda rank: (sent[rank], rank))
            written[writer] += region_size(region)
            sent[sender] += 0 if own else region_size(region)
            parts.append(Part(param, region, sender, writer))
    return parts


class CheckpointWriter:
    """A writer of model directories for one layout, which can be used many times.

    The directory needs to be on the disk of one host only, that of the rank `leader`, which need not be in
    the layout. The layout's ranks on that host write their own regions in parallel into the same files; other
    ranks send them the regions that none of them holds, block by block.

    `stem` begins the names of the files. `config` is the name and the content of the config file; by default
    it is the model's config.json with `fields` added.
    """

    def __init__(
        self, spec: ModelSpec, layout: Layout, world: World,
        *, dtype: torch.dtype, leader: int, max_shard_bytes: int = MAX_SHARD_BYTES, stem: str = "model",
        config: tuple[str, Mapping[str, object]] | None = None,
        fields: Mapping[str, object] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self._rank = world.rank
        self._leader = leader
        self._dtype = dtype
        self._files = plan_files(spec, dtype=dtype, max_shard_bytes=max_shard_bytes, stem=stem)
        self._config = config or ("config.json", {**_model_config(spec, dtype), **fields})
        host = world.ranks_on_host(leader)
        self._writers = sorted(rank for rank in layout.ranks if rank in host) or [leader]
        self._parts = assign_parts(spec, layout, self._writers)
        self._shapes = {name: tensor_shape(p) for name, p in params_by_tensor(spec.params).items()}
        self._file_of = {name: file for file in self._files for name in file.starts}
        self._group = world.group(tuple(sorted({*layout.ranks, leader})), purpose="export")

    @torch.no_grad()
    def write(self, directory: Path, shards: Mapping[str, Tensor], *, beside: Mapping[str, Beside]) -> None:
        """Write the directory; all ranks of the layout and the leader must call this.

        Returns when the directory is complete. `beside` maps names to further files. The config is written
        last, so a directory with a config is complete. Raises OSError if a file cannot be written.
        """
        if self._rank == self._leader:
            directory.mkdir(parents=True, exist_ok=True)
            for file in self._files:
                with open(directory / _unfinished(file.name), "wb") as out:
                    out.write(file.header)
                    out.truncate(file.starts[""])
        self._group.barrier()
        for part in self._local_parts():
            for row, block in _blocks(in_file_order(part.param, shards[part.param.name])):
                self._write(directory, part, row, block.cpu().contiguous())
        for part in self._parts:
            if part.sender != part.writer and self._rank in (part.sender, part.writer):
                self._send_or_write(directory, part, shards)
        self._group.barrier()
        if self._rank == self._leader:
            self._finish(directory, beside)
        self._group.barrier()

    def _local_parts(self) -> list[Part]:
        """Return the parts that this rank both holds and writes.

        Each writer begins with a different file, because a file takes one write at a time.
        """
        mine = [part for part in self._parts if part.sender == part.writer == self._rank]
        if not mine:
            return []
        count = len(self._files)
        number = {name: i for i, file in enumerate(self._files) for name in file.starts}
        first = self._writers.index(self._rank) * count // len(self._writers)
        return sorted(mine, key=lambda part: (number[part.param.in_file.name] - first) % count)

    def _send_or_write(self, directory: Path, part: Part, shards: Mapping[str, Tensor]) -> None:
        """Send a part to its writer, or receive and write it."""
        peers = self._group.ranks
        if self._rank == part.sender:
            for _, block in _blocks(in_file_order(part.param, shards[part.param.name])):
                self._group.exchange([(peers.index(part.writer), block.cpu().contiguous())], [])
            return
        box = box_in_tensor(part.param, part.region)
        shape = [stop - start for start, stop in box]
        dtype = _dtype_in_file(part.param, self._dtype)
        for row, like in _blocks(torch.empty(shape, dtype=dtype, device="meta")):
            block = torch.empty(like.shape, dtype=dtype)
            self._group.exchange([], [(peers.index(part.sender), block)])
            self._write(directory, part, row, block)

    def _write(self, directory: Path, part: Part, row: int, block: Tensor) -> None:
        """Write rows of a part into its file; `row` is the index of the first one in the part."""
        name = part.param.in_file.name
        box = box_in_tensor(part.param, part.region)
        file = self._file_of[name]
        shape = self._shapes[name]
        stride = block.itemsize * math.prod(shape[1:])
        start = file.starts[name] + (box[0][0] + row) * stride
        data = memory_of(block)
        with open(directory / _unfinished(file.name), "r+b", buffering=0) as out:
            if box[1:] == tuple((0, size) for size in shape[1:]):
                _write_all(out.fileno(), data, start)
                return
            length = len(data) // len(block)
            start += box[1][0] * block.itemsize
            for i in range(len(block)):
                _write_all(out.fileno(), data[i * length : (i + 1) * length], start + i * stride)

    def _finish(self, directory: Path, beside: Mapping[str, Beside]) -> None:
        """Give the files their final names, after removing an earlier export of a model or adapters."""
        names = [file.name for file in self._files]
        mine = {_unfinished(name) for name in names}
        for pattern in (*_EXPORTED, *map(_unfinished, _EXPORTED)):
            for path in directory.glob(pattern):
                if path.name not in mine:
                    path.unlink()
        for name in names:
            os.replace(directory / _unfinished(name), directory / name)
        if len(names) > 1:
            files = {name: file.name for name, file in self._file_of.items() if name}
            num_bytes = sum(file.starts[""] - len(file.header) for file in self._files)
            _put(directory / INDEX, pack_index(files, num_bytes))
        for name, content in beside.items():
            _put(directory / name, content)
        config_file, config = self._config
        _put(directory / config_file, json.dumps(config, indent=2) + "\n")


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
    """Return a region with its dims in the order of checkpoints: a view, unless it is a sum of parts."""
    if param.limbs > 1:
        return joined(shard)
    return shard.T if param.in_file.transposed else shard


def _dtype_in_file(param: ParamSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in files of a parameter of a model of this dtype."""
    return sum_dtype(dtype) if param.limbs > 1 else dtype


def _blocks(values: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield the index of a first row, and the rows from there on that fit a block."""
    step = max(1, _BLOCK_BYTES // max(1, values[:1].numel() * values.element_size()))
    for row in range(0, len(values), step):
        yield row, values[row : row + step]


def _write_all(file: int, data: memoryview, position: int) -> None:
    while len(data):
        count = os.pwrite(file, data, position)
        data = data[count:]
        position += count


def _put(path: Path, content: Beside) -> None:
    """Write a file so that it is either complete or absent."""
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(_unfinished(path.name))
    if isinstance(content, Path):
        shutil.copyfile(content, part)
    else:
        part.write_text(content)
    os.replace(part, path)


def _unfinished(name: str) -> str:
    return f"{name}.part"
