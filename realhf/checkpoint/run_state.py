"""Checkpoints of runs: files of tensors, each a box of a parameter, and a manifest with checksums.

A checkpoint is a directory. Each rank writes the tensors that it owns to a safetensors file of its own, and
the manifest says which region of which parameter lies in which file, so any layout can read it.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realhf.checkpoint.names import CHECKSUM, MANIFEST
from realhf.checkpoint.tensor_files import STORED_DTYPES, StoredTensor, pack_header, read_header
from realhf.checkpoint.write import memory_of
from realhf.models.region import Region, overlap, region_size, region_slices
from realhf.realloc.pieces import Piece, cut
from realhf.user_input.field_types import check_types

FORMAT = 3
"""Version of the format; a checkpoint of another version is refused."""
_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class FileEntry:
    """Size and SHA-256 checksum of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Saved:
    """The tensors of one parameter set (see `actions.parameter_sets`); all kinds have the same regions."""

    kinds: tuple[str, ...]
    """Names of the tensors that every parameter has, such as "master" or "exp_avg"."""
    pieces: Mapping[str, list[tuple[str, Region]]]
    """Parameter -> the files that hold regions of it, each with its region."""
    num_steps: int
    """Optimizer steps so far; 0 for a moving average."""
    num_skipped: int
    """Updates in a row that were skipped just before the checkpoint."""
    model: Mapping[str, Any]
    """The model's config, from which messages say how another model differs."""


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint besides tensors."""

    step: int
    num_ranks: int
    experiment: Mapping[str, Any]
    plan: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    sets: Mapping[str, Saved]
    versions: Mapping[str, Any]
    """See ModelStore.versions."""
    run: Mapping[str, Any]
    """See StepRunner.to_json."""
    ranks: tuple[Mapping[str, Any], ...]
    """For each rank, JSON values that it alone knows."""
    format: int = FORMAT

    def save(self, directory: Path) -> None:
        """Write the manifest and its checksum, and wait until both are on the disk."""
        text = (json.dumps(asdict(self)) + "\n").encode()
        write_file(directory / MANIFEST, [text])
        write_file(directory / CHECKSUM, [_checksum_line(text)])

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Read and check the manifest. Raises ValueError that names the file."""
        path = directory / MANIFEST
        text = _read(path)
        if _read(directory / CHECKSUM) != _checksum_line(text):
            raise ValueError(f"{path} does not have the checksum in {CHECKSUM}: one of the two is damaged")
        try:
            fields = json.loads(text)
            if (file_format := fields["format"]) == FORMAT:
                files = {name: _file_entry(name, entry) for name, entry in fields["files"].items()}
                sets = {name: _saved(entry) for name, entry in fields["sets"].items()}
                manifest = cls(**{**fields, "files": files, "sets": sets, "ranks": tuple(fields["ranks"])})
                check_types(manifest)
                return manifest
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"{path} is no manifest of a checkpoint ({type(error).__name__}: {error})") from error
        raise ValueError(f"{path} has format {file_format!r}; this version of realhf reads {FORMAT}")


def _file_entry(name: str, fields: Mapping[str, Any]) -> FileEntry:
    """Return the entry of a file, which lies beside the manifest."""
    if Path(name).name != name:
        raise ValueError(f"it names the file {name}")
    entry = FileEntry(**fields)
    check_types(entry, f"files.{name}.")
    return entry


def _saved(entry: Mapping[str, Any]) -> Saved:
    pieces = {
        name: [(file, tuple((start, stop) for start, stop in region)) for file, region in parts]
        for name, parts in entry["pieces"].items()}
    return Saved(**{**entry, "kinds": tuple(entry["kinds"]), "pieces": pieces})


def _checksum_line(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def tensor_name(set_name: str, kind: str, parameter: str, box: Region) -> str:
    """Return the name, in a file of a checkpoint, of a box of a parameter."""
    spans = ",".join(f"{start}:{stop}" for start, stop in box)
    return f"{set_name}/{kind}/{parameter}[{spans}]"


def check_file(directory: Path, name: str, entry: FileEntry) -> str:
    """Return what is wrong with a file of a checkpoint, or an empty string."""
    path = directory / name
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.num_bytes:
                return f"{path} has {size} bytes instead of {entry.num_bytes}"
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                return f"{path} does not have the checksum in {MANIFEST}: it is damaged"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return ""


def write_file(path: Path, blocks: Iterable[bytes | memoryview]) -> FileEntry:
    """Write a file and wait until it is on the disk. Raises OSError."""
    digest = hashlib.sha256()
    size = 0
    with path.open("wb", buffering=0) as file:
        for block in blocks:
            view = memoryview(block)
            for start in range(0, len(view), _BLOCK_BYTES):
                part = view[start : start + _BLOCK_BYTES]
                digest.update(part)
                size += len(part)
                while len(part):
                    part = part[file.write(part) :]
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def sync_directory(path: Path) -> None:
    """Wait until the names of a directory's files are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Snapshot:
    """A copy of tensors in host memory, in the form of a safetensors file. The memory is allocated once."""

    def __init__(self, boxes: Mapping[str, tuple[Region, Sequence[Piece]]]) -> None:
        """`boxes` maps the name of each tensor in the file to its box and to the pieces of memory that hold
        the box. `take` copies from these pieces, which must therefore stay where they are."""
        # Wide types come first, so that each tensor is aligned.
        ordered = dict(sorted(boxes.items(), key=lambda item: -item[1][1][0][1].element_size()))
        stored = {getattr(torch, torch_name): name for name, torch_name in STORED_DTYPES.items()}
        shapes = {name: tuple(stop - start for start, stop in box) for name, (box, _) in ordered.items()}
        self._header, starts = pack_header(
            (name, stored[pieces[0][1].dtype], shapes[name]) for name, (_, pieces) in ordered.items())
        self._data = torch.empty(starts[""] - len(self._header), dtype=torch.uint8)
        self._copies: list[tuple[Tensor, Tensor]] = []
        """Parts of `_data`, each with the tensor to copy to it."""
        for name, (box, pieces) in ordered.items():
            dtype = pieces[0][1].dtype
            num_bytes = region_size(box) * dtype.itemsize
            copy = self._data[starts[name] - len(self._header) :][:num_bytes].view(dtype).view(shapes[name])
            for region, tensor in cut(pieces, box):
                self._copies.append((copy[region_slices(region, within=box)], tensor))

    def take(self) -> None:
        """Copy the tensors as they are now."""
        for copy, tensor in self._copies:
            copy.copy_(tensor)

    def write(self, path: Path) -> FileEntry:
        """Write what `take` has copied. Raises OSError."""
        return write_file(path, [self._header, memory_of(self._data)])


class SavedTensors:
    """The tensors of one parameter set in a checkpoint, for reading any regions."""

    def __init__(self, directory: Path, name: str, saved: Saved) -> None:
        self._directory = directory
        self._name = name
        self._saved = saved
        self._files: dict[str, tuple[dict[str, StoredTensor], mmap]] = {}

    def read(self, kind: str, parameter: str, region: Region, target: Tensor) -> None:
        """Fill `target` with a region of a parameter. Raises ValueError if the files lack some of it."""
        missing = target.numel()
        for file, box in self._saved.pieces[parameter]:
            if (shared := overlap(region, box)) is not None:
                values = self._open(file, tensor_name(self._name, kind, parameter, box))
                target[region_slices(shared, within=region)] = values[region_slices(shared, within=box)]
                missing -= region_size(shared)
        if missing:
            raise ValueError(f"{self._directory} lacks {missing} values of {self._name}'s {parameter}")

    def _open(self, file: str, tensor: str) -> Tensor:
        """Return a tensor of a file, mapped into memory: its pages are read when they are used."""
        if file not in self._files:
            path = self._directory / file
            with path.open("rb") as opened:
                self._files[file] = read_header(path), mmap(opened.fileno(), 0, access=ACCESS_COPY)
        headers, memory = self._files[file]
        stored = headers[tensor]
        dtype = getattr(torch, STORED_DTYPES[stored.dtype])
        count = math.prod(stored.shape)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=stored.start).view(stored.shape)
