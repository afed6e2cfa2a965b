"""Opens the files of a data set, on this host or on the hub, and reads single rows of them. Imports no torch.

Files are JSONL, parquet or Arrow, of any size; CSV and lists of JSON are read as a whole. The library
`datasets` downloads data sets of the hub once per host and keeps them as Arrow files. We record the paths of
these files in its cache, so that later processes map the files and ask neither the hub nor the library.
"""

from __future__ import annotations

import copy
import csv
import glob
import hashlib
import json
import os
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from io import BufferedReader
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realhf.data.dataset import DatasetConfig
from realhf.data.memory_rows import datasets_cache, shown_path
from realhf.errors import UserError
from realhf.user_input.files import (
    MAX_ROW_BYTES,
    MAX_TABLE_BYTES,
    RepeatedKeyError,
    open_regular,
    prepare_once,
    read_json,
    read_object,
    refuse_lfs_pointer,
    unique_keys,
)
from realhf.user_input.hub import HubName, asking_hub, host_lock, parse_hub_name
from realhf.user_input.suggest import near_path_words
from realhf.user_input.units import format_bytes

Fingerprint = dict[str, Any]
"""Name of a file, number of its rows and bytes, and a checksum."""
_WILDCARDS = "*?["
_ONLY_SPLIT = "train"
"""The split that files which are not on the hub belong to, as in the library `datasets`."""
_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
_SEPARATORS = {".csv": ",", ".tsv": "\t"}
_WHOLE_NUMBER = r"^(-?(0|[1-9][0-9]{0,17}))?$"
_NUMBER = r"^(-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?)?$"
"""Forms in which a column of CSV has numbers: those with leading zeros, such as 007, are text."""
LARGE_BYTES = 64 << 20
"""Files of more bytes are not read as a whole: rows are read, checked and tokenised when they come up."""
_CHUNK_BYTES = 8 << 20
_NEWLINE = 10
_LINES = "every line must be an object of its own, {...} (jq -c '.[]' FILE writes an array so)"
_BLANK = np.frombuffer(b" \t\r\n\x0b\x0c", np.uint8)
_ROWS_OF_BATCH = 128
"""Rows of a record batch of a parquet file, from which single rows are read."""
_FACTOR_OF_SMALL = 4
"""How much larger the rows of a parquet file may be in memory than its data without compression."""
_MAX_EXPANSION = 1000
"""How much larger its rows may be than the file itself."""


def open_files(config: DatasetConfig) -> list[RowFile]:
    """Return the files of a data set, those of the hub included.

    Raises ValueError if there is none, or if one is of another kind.
    """
    paths = (config.path,) if isinstance(config.path, str) else config.path
    files: list[RowFile] = []
    for on_hub, group in groupby(paths, is_of_hub):
        names = list(group)
        opened = [file for path in names for file in _open_path(config, path)]
        if not on_hub and config.split != _ONLY_SPLIT:
            opened = _part_of(opened, ", ".join(map(shown_path, names)), config.split)
        files += opened
    for field, value in (("name", config.name), ("revision", config.revision)):
        if value is not None and not any(map(is_of_hub, paths)):
            first = shown_path(paths[0])
            raise UserError(
                f"dataset.{field} is {value!r}: it must be left out, as {first!r} is not on the hub")
    return files


def _open_path(config: DatasetConfig, path: str) -> list[RowFile]:
    if Path(path).is_file():
        names = [path]
    elif set(path) & set(_WILDCARDS):
        names = [name for name in sorted(glob.glob(path, recursive=True)) if Path(name).is_file()]
        if not names:
            raise UserError(f"dataset.path {path!r}: no file matches")
    elif is_of_hub(path):
        try:
            return [*open_split(path, name=config.name, split=config.split, revision=config.revision)]
        except ValueError as error:
            raise UserError(f"dataset.path {error}") from error
    else:
        if path and Path(path).is_dir():
            raise UserError(f"dataset.path {path!r} is a directory: name its files, such as *.jsonl")
        if path and Path(path).exists():
            raise UserError(f"dataset.path {path!r} is no regular file")
        near = near_path_words(Path(path), suffixes=_SUFFIXES) if path else ""
        raise UserError(f"dataset.path {path!r}: there is no such file{near}")
    for name in names:
        if (suffix := Path(name).suffix) not in _SUFFIXES:
            legal = f"{', '.join(_SUFFIXES[:-1])} and {_SUFFIXES[-1]}"
            wrong = f"dataset.path {name!r} ends in {suffix!r}: legal are {legal}"
            if suffix == ".txt":
                wrong += f" (datasets.Dataset.from_text({name!r}).to_json('rows.jsonl') converts it)"
            raise UserError(wrong)
    files = []
    for name in names:
        status = Path(name).stat()
        files.append(_opened(Path(name), status.st_size, status.st_mtime_ns))
    return files


def _part_of(files: list[RowFile], path: str, split: str) -> list[RowFile]:
    """Return a part of files, such as `train[:100]`, which are read one after the other as one split."""
    ends = np.cumsum([len(file) for file in files])
    chosen: list[RowFile] = []
    try:
        ranges = split_ranges(path, split, {_ONLY_SPLIT: int(ends[-1])})
    except ValueError as error:
        raise UserError(f"dataset.path {error}") from error
    for _, start, stop in ranges:
        for file, end in zip(files, ends.tolist(), strict=True):
            begin = end - len(file)
            first, last = max(start, begin), min(stop, end)
            if first < last:
                chosen.append(RowSlice(file, first - begin, last - begin))
    if not chosen:
        raise UserError(f"dataset.path {path!r}: split {split!r} has no rows, as there are {ends[-1]}")
    return chosen


@lru_cache(maxsize=64)
def _opened(path: Path, size: int, modified: int) -> RowFile:
    """Return the rows of a file, which is opened anew when its size or its time in nanoseconds changes."""
    if path.suffix == ".json" and _begins_list(path):
        return JsonListFile(path)
    if path.suffix in _SEPARATORS:
        return ArrowFile(str(path), csv_table(path).to_batches(), num_bytes=size)
    if path.suffix != ".parquet":
        return JsonlFile(path)
    import pyarrow.parquet

    try:
        open_regular(path).close()
        groups = pyarrow.parquet.read_metadata(path)
        num_bytes = 0
        for group in map(groups.row_group, range(groups.num_row_groups)):
            num_bytes += group.total_byte_size  # Without compression.
            _require_short(group.total_byte_size // max(1, group.num_rows), f"dataset {path}: the mean row")
        if num_bytes <= LARGE_BYTES and (batches := _small_batches(path)) is not None:
            return ArrowFile(str(path), batches, num_bytes=num_bytes)
        # Reading rows in random order from the file itself would decode a whole row group for each row.
        key = hashlib.sha256(f"{path.resolve()} {size} {modified}".encode()).hexdigest()[:20]
        target = datasets_cache() / "realhf" / f"{path.stem}-{key}.arrow"
        copy = prepare_once(target, lambda temporary: _copy(path, temporary))
        return ArrowFile(str(path), mapped_batches(copy), num_bytes=copy.stat().st_size)
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(f"dataset {path} cannot be read as parquet: {error}") from error


def is_of_hub(path: str) -> bool:
    """Return whether a path names a data set of the hub, and no local file."""
    return not set(path) & set(_WILDCARDS) and not Path(path).exists() and parse_hub_name(path) is not None


def commits_of_data(config: DatasetConfig) -> dict[str, str]:
    """Return the commits of the data sets of the hub, by path, configuration and revision."""
    commits: dict[str, str] = {}
    for part in config.parts:
        paths = (part.path,) if isinstance(part.path, str) else part.path
        for path in (path for path in paths if is_of_hub(path)):
            name = " ".join(filter(None, (path, part.name, part.revision)))
            commits[name] = find_dataset(path, name=part.name, revision=part.revision).commit
    return commits


class RowFile(ABC):
    """Rows in a file, by number from 0. A row is a new dict, column -> value, which the caller may change."""

    name: str
    num_bytes: int
    has_other_types = False
    """Whether values may have types that JSON does not have."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row. Raises ValueError, which names file and line, if it is malformed."""

    @property
    def title(self) -> str:
        """The file for messages; for rows that were given in memory, what they were."""
        return shown_path(self.name)

    def place(self, number: int) -> str:
        """Return the line or row of the file, in words."""
        return f"row {number}"

    @property
    def fingerprint(self) -> Fingerprint | None:
        """Return size, rows and checksum of the file; None for rows of the hub, which have a commit."""
        path = Path(self.name)
        if not path.is_file():
            return None
        size = path.stat().st_size
        with open_regular(path) as file:
            checksum = zlib.crc32(file.read(LARGE_BYTES))
            if size > LARGE_BYTES:  # Parquet has the statistics of its columns at the end.
                file.seek(-_CHUNK_BYTES, os.SEEK_END)
                checksum = zlib.crc32(file.read(), checksum)
        return {"file": self.name, "rows": len(self), "bytes": size, "crc32": checksum}

    def first(self, count: int) -> Iterator[dict[str, Any]]:
        for number in range(min(count, len(self))):
            yield self[number]


class JsonlFile(RowFile):
    """A file with a JSON object on each line. It keeps eight bytes per row, and reads single rows on demand.

    It does not map the file, because mapped pages would count as memory of the process.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.num_bytes = path.stat().st_size
        self._file = open_regular(path)
        self._checksum = 0

    def __len__(self) -> int:
        return len(self._index[0])

    def __getitem__(self, number: int) -> dict[str, Any]:
        starts = self._index[0]
        start = int(starts[number])
        stop = int(starts[number + 1]) if number + 1 < len(starts) else self.num_bytes
        data = os.pread(self._file.fileno(), min(stop - start, MAX_ROW_BYTES + 1), start)
        line = data[: data.find(b"\n") + 1 or None]  # Blank lines may follow.
        return self._parsed(line, self._line_number(number))

    def place(self, number: int) -> str:
        if self.title != self.name:  # The user knows rows, and no file.
            return f"row {number}"
        return f"line {self._line_number(number)}"

    def first(self, count: int) -> Iterator[dict[str, Any]]:
        with open_regular(self.name) as file:
            lines = iter(partial(file.readline, MAX_ROW_BYTES + 1), b"")
            not_blank = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
            for number, line in islice(not_blank, count):
                yield self._parsed(line, number)

    def _parsed(self, line: bytes, number: int) -> dict[str, Any]:
        where = f"dataset {self.name} line {number}"
        _require_short(len(line), where)
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            row = json.loads(text, object_pairs_hook=unique_keys)
        except UnicodeDecodeError as error:
            what = f"byte {error.start} of the line is {line[error.start]:#04x}"
            raise UserError(f"{where} is not UTF-8 ({what}): save the file as UTF-8") from error
        except RepeatedKeyError as error:
            raise UserError(f"{where} has an object that has {error}") from error
        except ValueError as error:  # It is malformed, or has a number of thousands of digits.
            refuse_lfs_pointer(line, where)
            if number == 1 and line.strip() in (b"[", b"{"):
                raise UserError(f"{where} begins a document over several lines: {_LINES}") from error
            raise UserError(f"{where} is not JSON: {error}") from error
        except RecursionError as error:
            raise UserError(f"{where} is nested too deeply") from error
        if not isinstance(row, dict):
            is_array = isinstance(row, list) and all(isinstance(entry, dict) for entry in row)
            mend = _LINES if is_array else "every line must be an object"
            raise UserError(f"{where} is {type(row).__name__}: {mend}")
        return row

    def _line_number(self, number: int) -> int:
        starts, blank = self._index
        return number + 1 + int(np.searchsorted(blank, starts[number]))

    @cached_property
    def _index(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the bytes at which lines with rows start, and those at which blank lines do."""
        buffer = np.empty(_CHUNK_BYTES, np.uint8)
        line_starts: list[NDArray[np.int64]] = []
        blank: list[NDArray[np.int64]] = []
        suspects: list[NDArray[np.int64]] = []
        position = 0
        starts_line = True
        with open_regular(self.name) as file:
            while count := file.readinto(buffer.data):
                chunk = buffer[:count]
                self._checksum = zlib.crc32(chunk.data, self._checksum)
                after = np.flatnonzero(chunk == _NEWLINE) + 1
                starts = after[after < count]
                if starts_line:
                    starts = np.concatenate([np.zeros(1, starts.dtype), starts])
                line_starts.append(starts + position)
                empty = chunk[starts] == _NEWLINE
                blank.append(starts[empty] + position)
                suspects.append(starts[np.isin(chunk[starts], _BLANK) & ~empty] + position)
                starts_line = bool(chunk[-1] == _NEWLINE)
                position += count
            blank_after_spaces = [s for chunk in suspects for s in chunk.tolist() if _is_blank(file, s)]
        starts = np.concatenate(line_starts) if line_starts else np.zeros(0, np.int64)
        all_blank = np.sort(np.concatenate([*blank, np.array(blank_after_spaces, np.int64)]))
        return (np.setdiff1d(starts, all_blank, assume_unique=True) if len(all_blank) else starts), all_blank

    @property
    def fingerprint(self) -> Fingerprint:
        return {"file": self.name, "rows": len(self), "bytes": self.num_bytes, "crc32": self._checksum}


def _begins_list(path: Path) -> bool:
    with open_regular(path) as file:
        return file.read(_CHUNK_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


class JsonListFile(RowFile):
    """A JSON document that is a list of objects, which is read as a whole."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.num_bytes = path.stat().st_size
        self._rows = read_json(path, most=MAX_TABLE_BYTES, what="dataset")
        if other := next((i for i, row in enumerate(self._rows) if not isinstance(row, dict)), None):
            kind = type(self._rows[other]).__name__
            raise UserError(f"dataset {path} row {other} is {kind}: the document must be a list of objects")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return copy.deepcopy(self._rows[number])


def csv_table(path: Path) -> Any:
    """Return the rows of a CSV file as a table of Arrow, after a first line with the names of columns.

    A column has numbers if all its values are numbers or empty, which is null then, and text otherwise.
    """
    import pyarrow
    import pyarrow.compute
    import pyarrow.csv

    separator = _SEPARATORS[path.suffix]
    with open_regular(path) as file:
        header = file.readline(MAX_ROW_BYTES).decode("utf-8-sig", errors="replace")
    names = next(csv.reader([header], delimiter=separator), [])
    if repeated := [name for name in names if names.count(name) > 1]:
        raise UserError(f"dataset {path}: its first line has the column {repeated[0]!r} twice")
    try:
        table = pyarrow.csv.read_csv(
            str(path),
            parse_options=pyarrow.csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False))
    except (ValueError, OSError) as error:
        raise UserError(f"dataset {path} cannot be read as CSV: {' '.join(str(error).split())}") from error
    columns = []
    for column in table.columns:
        for form, kind in ((_WHOLE_NUMBER, pyarrow.int64()), (_NUMBER, pyarrow.float64())):
            is_number = pyarrow.compute.match_substring_regex(column, form)
            is_empty = pyarrow.compute.equal(column, "")
            if pyarrow.compute.all(is_number).as_py() and not pyarrow.compute.all(is_empty).as_py():
                column = pyarrow.compute.if_else(is_empty, None, column).cast(kind)
                break
        columns.append(column)
    return pyarrow.table(dict(zip(table.column_names, columns, strict=True)))


def _is_blank(file: BufferedReader, start: int) -> bool:
    """Return whether the line from byte `start` on is blank; one of more than the legal length is not."""
    file.seek(start)
    return not file.readline(MAX_ROW_BYTES + 1).strip()


def _require_short(num_bytes: int, where: str) -> None:
    if num_bytes > MAX_ROW_BYTES:
        raise UserError(f"{where} has more than {format_bytes(MAX_ROW_BYTES)}: a row may have at most that")


class ArrowFile(RowFile):
    """Rows of Arrow record batches, which are mapped into memory from files or small."""

    has_other_types = True

    def __init__(self, name: str, batches: Sequence[Any], *, num_bytes: int, start: int = 0) -> None:
        """`start` is the number of the first row in the file of this name."""
        self.name = name
        self.num_bytes = num_bytes
        self._batches = [batch for batch in batches if batch.num_rows]
        self._ends = np.cumsum([batch.num_rows for batch in self._batches])
        self._start = start

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        which = int(np.searchsorted(self._ends, number, side="right"))
        batch = self._batches[which]
        row = batch.slice(number - int(self._ends[which]) + batch.num_rows, 1)
        if batch.nbytes > MAX_ROW_BYTES:
            _require_short(row.nbytes, f"dataset {self.title} {self.place(number)}")
        try:
            return row.to_pylist()[0]
        except (ValueError, OSError, OverflowError) as error:  # The bytes of a value are not of its type.
            raise UserError(f"dataset {self.title} {self.place(number)} cannot be read: {error}") from error

    def place(self, number: int) -> str:
        return f"row {self._start + number}"


class RowSlice(RowFile):
    """The rows [start, stop) of a file."""

    def __init__(self, file: RowFile, start: int, stop: int) -> None:
        self.name = file.name
        self.num_bytes = file.num_bytes * (stop - start) // max(1, len(file))
        self.has_other_types = file.has_other_types
        self._file = file
        self._start = start
        self._stop = stop

    def __len__(self) -> int:
        return self._stop - self._start

    def __getitem__(self, number: int) -> dict[str, Any]:
        return self._file[self._start + number]

    def place(self, number: int) -> str:
        return self._file.place(self._start + number)

    @property
    def fingerprint(self) -> Fingerprint | None:
        whole = self._file.fingerprint
        return None if whole is None else whole | {"rows": len(self)}


def mapped_batches(path: Path) -> list[Any]:
    """Return the record batches of an Arrow stream, mapped into memory."""
    import pyarrow

    return pyarrow.ipc.open_stream(pyarrow.memory_map(str(path))).read_all().to_batches()


def _copy(path: Path, target: Path) -> None:
    """Write a parquet file as an Arrow stream, row group by row group."""
    import pyarrow
    import pyarrow.parquet

    written = 0
    most = _MAX_EXPANSION * (path.stat().st_size + _CHUNK_BYTES)
    source = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
    with pyarrow.ipc.new_stream(str(target), source.schema_arrow) as writer:
        for batch in source.iter_batches(batch_size=_ROWS_OF_BATCH):
            writer.write_batch(batch)
            written += batch.nbytes
            if written > most:
                times = f"{_MAX_EXPANSION} times the size of the file"
                raise ValueError(f"its rows have more than {format_bytes(most)}, {times}")


def _small_batches(path: Path) -> list[Any] | None:
    """Return all rows of a parquet file; None if they are larger than they seemed.

    A small file may have one long value in every row.
    """
    import pyarrow.parquet

    batches = []
    num_bytes = 0
    for batch in pyarrow.parquet.ParquetFile(path, pre_buffer=False).iter_batches(batch_size=_ROWS_OF_BATCH):
        batches.append(batch)
        num_bytes += batch.nbytes
        if num_bytes > _FACTOR_OF_SMALL * LARGE_BYTES:
            return None
    return batches


@dataclass(frozen=True)
class HubDataset:
    """The prepared files of a configuration of a data set."""

    commit: str
    splits: dict[str, tuple[tuple[str, ...], int]]
    """Name of a split -> its Arrow files and the number of its rows."""


def open_split(path: str, *, name: str | None, split: str, revision: str | None) -> list[ArrowFile]:
    """Return the rows of a split, such as `train`, `train[:1000]` or `train+test`.

    Raises UserError if the hub has no such data set, configuration or split.
    """
    prepared = find_dataset(path, name=name, revision=revision)
    parts = split_ranges(path, split, {name: rows for name, (_, rows) in prepared.splits.items()})
    return [_rows(path, part, *prepared.splits[part], start, stop) for part, start, stop in parts]


@lru_cache(maxsize=64)
def find_dataset(path: str, *, name: str | None, revision: str | None) -> HubDataset:
    """Return the files of a configuration; they are downloaded if they are not in the cache."""
    key = hashlib.sha256(json.dumps([path, name, revision]).encode()).hexdigest()[:20]
    record = datasets_cache() / "realhf" / f"{path.replace('/', '--')}-{key}.json"
    if (recorded := _read(record)) is not None:
        return recorded
    with host_lock(f"datasets--{path.replace('/', '--')}"):
        if (recorded := _read(record)) is not None:  # Another process has prepared it.
            return recorded
        prepared = _prepare(path, name, revision)
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary = record.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"commit": prepared.commit, "splits": prepared.splits}))
        temporary.rename(record)
        return prepared


def _read(record: Path) -> HubDataset | None:
    """Return the files that an earlier process has recorded, if all of them still exist."""
    try:
        content = read_object(record)
    except ValueError:
        return None
    splits = {split: (tuple(files), rows) for split, (files, rows) in content["splits"].items()}
    is_there = all(Path(file).is_file() for files, _ in splits.values() for file in files)
    return HubDataset(content["commit"], splits) if is_there else None


def _prepare(path: str, name: str | None, revision: str | None) -> HubDataset:
    import datasets
    from huggingface_hub import HfApi, constants

    with asking_hub(HubName(path, revision), kind="data set"):
        # With a commit, `datasets` asks no other server than the hub.
        commit = None if constants.HF_HUB_OFFLINE else HfApi().dataset_info(path, revision=revision).sha
        try:
            loaded = datasets.load_dataset(path, name, revision=commit)
        except ValueError as error:
            raise _refusal(path, name, commit, error) from error
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            raise UserError(
                f"{path!r} is made by a script, and no code of the hub is run: take a revision with data "
                "files, such as refs/convert/parquet") from error
    splits = {
        str(split): (tuple(file["filename"] for file in rows.cache_files), rows.num_rows)
        for split, rows in loaded.items()}
    first = next(files[0] for files, _ in splits.values())
    return HubDataset(commit or Path(first).parent.name, splits)


def _refusal(path: str, name: str | None, commit: str | None, error: ValueError) -> UserError:
    """Return the error about a configuration that the data set does not have, or about its files."""
    import datasets

    try:
        names = datasets.get_dataset_config_names(path, revision=commit)
    except Exception:
        names = []
    if names and name not in names:
        return UserError(f"{path!r}: name is {name!r}: it must be one of {', '.join(names)}")
    return UserError(f"{path!r} cannot be read: {' '.join(str(error).split())}")


def split_ranges(path: str, split: str, sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    """Return the splits that a text names, each with the range [first, stop) of its rows.

    `sizes` has the number of rows of each split. Raises UserError if the text names another split.
    """
    if split in sizes:
        return [(split, 0, sizes[split])]
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
        return [(part.splitname, part.from_, part.to) for part in parts]
    except (ValueError, AssertionError, KeyError) as error:
        names = list(sizes)
        raise UserError(
            f"{path!r}: split is {split!r}: it must be {' or '.join(names)}, "
            f"or a part such as {names[0]}[:100]") from error


def _rows(path: str, split: str, files: tuple[str, ...], num_rows: int, start: int, stop: int) -> ArrowFile:
    import pyarrow

    batches: list[Any] = [batch for file in files for batch in mapped_batches(Path(file))]
    if (start, stop) != (0, num_rows):
        table = pyarrow.Table.from_batches(batches)
        batches = table.slice(start, stop - start).to_batches()
    num_bytes = sum(Path(file).stat().st_size for file in files)
    share = (stop - start) / max(1, num_rows)
    return ArrowFile(f"{path} {split}", batches, num_bytes=int(num_bytes * share), start=start)
