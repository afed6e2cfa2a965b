"""Checkpoints of runs: files of tensors, each a box of a parameter, and a manifest with checksums.

A checkpoint is a directory. Each rank writes the tensors that it owns to a safetensors file of its own, and
the manifest says which region of which parameter lies in which file, so any layout can read it.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from mmap import ACCESS_COPY, mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realhf.checkpoint.hf import memory_of
from realhf.checkpoint.names import CHECKSUM, MANIFEST, METRICS, rank_name, samples_name
from realhf.checkpoint.tensor_files import STORED_DTYPES, StoredTensor, pack_header, read_header
from realhf.distributed.pieces import Piece, cut
from realhf.errors import shown
from realhf.layout import MAX_RANKS
from realhf.models.param_spec import Region, overlap, region_size, region_slices
from realhf.user_input.field_types import check_types
from realhf.user_input.files import MAX_TABLE_BYTES, open_regular, parse_json, read_bytes, read_json_lines

FORMAT = 4
"""Version of the format; a checkpoint of another version is refused."""
_BLOCK_BYTES = 4 << 20
_MAX_COUNT = 2**53
"""Largest count in a manifest."""


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
    data: Mapping[str, Any] = field(default_factory=dict)
    """Field of the experiment -> the fingerprints of the files of its rows."""
    sources: Mapping[str, Any] = field(default_factory=dict)
    """The fingerprints of the user's Python files (`code`) and of the models' files (`models`)."""
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
        fields = parse_json(text, str(path))
        try:
            if (file_format := fields["format"]) == FORMAT:
                files = {name: FileEntry(**entry) for name, entry in fields["files"].items()}
                sets = {name: _saved(entry) for name, entry in fields["sets"].items()}
                manifest = cls(**{**fields, "files": files, "sets": sets, "ranks": tuple(fields["ranks"])})
                manifest._check()
                return manifest
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{path} is no manifest of a checkpoint ({type(error).__name__}: {error})") from error
        raise ValueError(f"{path} has format {shown(file_format)}; this version of realhf reads {FORMAT}")

    def _check(self) -> None:
        """Raise ValueError unless the values are such as `save` writes, with no more ranks than there are."""
        check_types(self)
        state = {name: value for name, value in self.run.items() if name != "state"}
        for name, value in {"step": self.step, "versions": self.versions, "run": state}.items():
            _check_counts(value, name)
        if not 1 <= self.num_ranks <= MAX_RANKS or len(self.ranks) != self.num_ranks:
            raise ValueError(f"num_ranks is {self.num_ranks}, and ranks has {len(self.ranks)} entries")
        for rank in self.ranks:
            if not isinstance(rank, dict):
                raise ValueError(f"ranks has {shown(rank)}: it must be an object")
        names = {METRICS, *map(rank_name, range(self.num_ranks)), *map(samples_name, range(self.num_ranks))}
        for name, entry in self.files.items():
            if name not in names:
                raise ValueError(f"files has {shown(name)}, which is no file of a checkpoint")
            check_types(entry, f"files.{name}.")
            _check_counts(entry.num_bytes, f"files.{name}.num_bytes")
        if METRICS not in self.files:
            raise ValueError(f"files lacks {METRICS}")
        for name, saved in self.sets.items():
            check_types(saved, f"sets.{name}.")
            _check_counts([saved.num_steps, saved.num_skipped], f"sets.{name}.num_steps")
            for parameter, parts in saved.pieces.items():
                where = f"sets.{name}.pieces.{parameter}"
                if not parts or len({len(region) for _, region in parts}) != 1:
                    raise ValueError(f"{where} must have at least one region, and all of the same dims")
                for file, region in parts:
                    _check_piece(file, region, self.files, where)

    def tensors_in(self, file: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the name and the shape of each tensor that a file must have."""
        for name, saved in self.sets.items():
            for parameter, parts in saved.pieces.items():
                for holder, region in parts:
                    if holder == file:
                        shape = tuple(stop - start for start, stop in region)
                        for kind in saved.kinds:
                            yield tensor_name(name, kind, parameter, region), shape


def _saved(entry: Mapping[str, Any]) -> Saved:
    pieces = {
        name: [(file, tuple((start, stop) for start, stop in region)) for file, region in parts]
        for name, parts in entry["pieces"].items()}
    return Saved(**{**entry, "kinds": tuple(entry["kinds"]), "pieces": pieces})


def _check_piece(file: Any, region: Region, files: Mapping[str, FileEntry], where: str) -> None:
    if not isinstance(file, str) or file not in files or not file.startswith("rank_"):
        raise ValueError(f"{where} is in {shown(file)}, which is no file of tensors among files")
    for start, stop in region:
        is_whole = all(isinstance(end, int) and not isinstance(end, bool) for end in (start, stop))
        if not is_whole or not 0 <= start < stop <= _MAX_COUNT:
            raise ValueError(f"{where} has the range {shown(start)} to {shown(stop)}")


def _check_counts(value: Any, where: str) -> None:
    """Raise ValueError unless all numbers in a value of JSON are possible counts, or -1 for none."""
    if isinstance(value, dict):
        for name, part in value.items():
            _check_counts(part, f"{where}.{name}")
    elif isinstance(value, list):
        for part in value:
            _check_counts(part, where)
    elif isinstance(value, int | float) and not -1 <= value <= _MAX_COUNT:
        raise ValueError(f"{where} is {shown(value)}: it must be at least 0 and at most {_MAX_COUNT}")


def _checksum_line(text: bytes) -> bytes:
    return f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()


def _read(path: Path) -> bytes:
    try:
        return read_bytes(path, most=MAX_TABLE_BYTES, follow=False)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error


def tensor_name(set_name: str, kind: str, parameter: str, box: Region) -> str:
    spans = ",".join(f"{start}:{stop}" for start, stop in box)
    return f"{set_name}/{kind}/{parameter}[{spans}]"


def check_file(directory: Path, name: str, manifest: Manifest) -> None:
    """Raise ValueError unless a file of a checkpoint is the one that was saved, with what it must hold."""
    path = directory / name
    entry = manifest.files[name]
    try:
        with open_regular(path, follow=False) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.num_bytes:
                raise ValueError(f"{path} has {size} bytes instead of {entry.num_bytes}")
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                raise ValueError(f"{path} does not have the checksum in {MANIFEST}: it is damaged")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if name == METRICS:
        for number, record in read_json_lines(path, follow=False):
            if not isinstance(record.get("step"), int):
                raise ValueError(f"{path} line {number} has no step")
        return
    stored = read_header(path, follow=False)
    for tensor, shape in manifest.tensors_in(name):
        if tensor not in stored:
            raise ValueError(f"{path} lacks the tensor {tensor}")
        if stored[tensor].shape != shape or stored[tensor].dtype not in STORED_DTYPES:
            raise ValueError(
                f"{path}: tensor {tensor} is {stored[tensor].dtype} of shape {stored[tensor].shape}: "
                f"it must have the shape {shape} and one of {', '.join(STORED_DTYPES)}")


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
            with open_regular(path, follow=False) as opened:
                memory = mmap(opened.fileno(), 0, access=ACCESS_COPY)
            self._files[file] = read_header(path, follow=False), memory
        headers, memory = self._files[file]
        stored = headers[tensor]
        dtype = getattr(torch, STORED_DTYPES[stored.dtype])
        count = math.prod(stored.shape)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=stored.start).view(stored.shape)
