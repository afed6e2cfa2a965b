"""Writes rows that are in memory to a file, which a run then reads as it reads other files. Imports no torch.

The file's name is a digest of its content. So every process that executes an experiment finds the file that
the first one has written, and a run that is resumed notices other rows by their name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from realhf.errors import UserError
from realhf.user_input.files import open_regular

_NAME = "rows-"
_FILE = re.compile(rf"{_NAME}[0-9a-f]{{20}}(?:-(\w+))?\.(?:jsonl|parquet|safetensors)")
_LEGAL = (
    "a file, a pattern, a hub name, several of these, or rows: dicts in a list or a generator, a function "
    "that returns them, a frame of pandas or polars, a table of pyarrow or a datasets.Dataset")


def datasets_cache() -> Path:
    """Return the directory in which `datasets` keeps its files, with a folder of our own."""
    constants = import_module("huggingface_hub.constants")
    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")


def names_files(path: Any) -> bool:
    """Return whether the `path` of a data set names files, and has no rows itself."""
    several = path if isinstance(path, list | tuple) else [path]
    return len(several) > 0 and all(isinstance(entry, str | os.PathLike) for entry in several)


def is_of_memory(path: str) -> bool:
    """Return whether a file has rows that were given in memory."""
    return Path(path).name.startswith(_NAME) and Path(path).parent == datasets_cache() / "realhf"


def shown_path(path: str) -> str:
    """Return a path for messages. For rows that were given in memory, say what they were instead."""
    if (of_memory := _FILE.fullmatch(Path(path).name)) is None:
        return path
    if of_memory[1] == "arrays":
        return "ArrayDataset({...})"
    return f"(a {of_memory[1]})" if of_memory[1] else "(rows in memory)"


def write_arrays(arrays: Mapping[str, Any]) -> str:
    """Write arrays or tensors by column to a safetensors file, and return its path. Raises ValueError if they
    are no numbers, or have different numbers of rows."""
    columns = {}
    for key, values in arrays.items():
        array = np.ascontiguousarray(getattr(values, "numpy", lambda given=values: given)())
        if array.dtype.kind not in "biuf" or not array.ndim:
            raise ValueError(
                f"ArrayDataset({{...}}) has the column {key!r} of {array.dtype}: it must be an array of "
                "numbers")
        columns[key] = array
    sizes = {key: len(array) for key, array in columns.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"ArrayDataset({{...}}) has columns of different lengths, {sizes}: each has one entry for each "
            "row")
    data = import_module("safetensors.numpy").save(columns)
    directory = datasets_cache() / "realhf"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{_NAME}{hashlib.sha256(data).hexdigest()[:20]}-arrays.safetensors"
    if not path.exists():
        handle, name = tempfile.mkstemp(prefix=f".{_NAME}", dir=directory)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    return str(path)


def write_rows(rows: Any, *, most: int) -> str:
    """Write rows to a file, and return its path; `most` rows if that is above 0.

    Tables of Arrow become parquet, which has their types, and all others JSONL. The name of the file has the
    class of a frame or table. Raises ValueError if they are no rows, or have values that JSON lacks.
    """
    directory = datasets_cache() / "realhf"
    directory.mkdir(parents=True, exist_ok=True)
    table = _arrow_table(rows)
    handle, name = tempfile.mkstemp(prefix=f".{_NAME}", dir=directory)
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            if table is not None:
                import_module("pyarrow.parquet").write_table(table.slice(0, most or None), file)
                count = table.num_rows
            else:
                count = 0
                for row in islice(_json_rows(rows), most or None):
                    file.write(json.dumps(row).encode() + b"\n")
                    count += 1
            if not count:
                raise ValueError(f"path is an empty {type(rows).__name__}: it must have at least one row")
        with open_regular(part) as written:
            digest = hashlib.file_digest(written, "sha256").hexdigest()[:20]
        is_frame = table is not None or hasattr(rows, "columns")
        kind = f"-{type(rows).__name__}" if is_frame else ""
        target = directory / f"{_NAME}{digest}{kind}{'.jsonl' if table is None else '.parquet'}"
        if target.exists():
            part.unlink()
        else:
            part.rename(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return str(target)


def _arrow_table(rows: Any) -> Any:
    """Return the table of a datasets.Dataset or of pyarrow; None for other rows."""
    library = type(rows).__module__.partition(".")[0]
    if library == "datasets" and hasattr(rows, "with_format") and hasattr(rows, "num_rows"):
        if isinstance(rows, Mapping):
            raise ValueError(f"path is a DatasetDict: take one of its splits, {' or '.join(rows)}")
        return rows.with_format("arrow")[:]
    return rows if library == "pyarrow" and hasattr(rows, "to_batches") else None


def _json_rows(rows: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a frame, of a function or of an iterable, in JSON's types."""
    library = type(rows).__module__.partition(".")[0]
    if library == "pandas" and hasattr(rows, "to_dict"):
        rows = rows.to_dict("records")
        is_missing: Callable[[Any], bool] = import_module("pandas").isna
        rows = [{key: None if is_scalar(value) and is_missing(value) else value for key, value in row.items()}
                for row in rows]
    elif hasattr(rows, "to_dicts"):  # Of polars.
        rows = rows.to_dicts()
    elif callable(rows):
        rows = rows()
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping | str | bytes):
        raise ValueError(f"path is of type {type(rows).__name__}: it must be {_LEGAL}")
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"path: row {number} is of type {type(row).__name__}: it must be a dict")
        try:
            yield json_form(row, as_text=True)
        except TypeError as error:
            hint = "store it as text or numbers, or leave the column out"
            raise ValueError(f"path: row {number} has {error}; {hint}") from error


def is_scalar(value: Any) -> bool:
    """Return whether a value is single, and no list or dict."""
    return not isinstance(value, Iterable) or isinstance(value, str)


def json_form(value: Any, *, as_text: bool = False) -> Any:
    """Return a copy in JSON's types: tuples become lists, and numpy's and torch's numbers become Python's.

    With `as_text`, dates, times, decimal numbers and UUIDs become text. Raises TypeError, which names the
    type, for a value that JSON cannot hold.
    """
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, Mapping):
        if other := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a dict with the key {other[0]!r}: keys must be text")
        return {str(key): json_form(entry, as_text=as_text) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [json_form(entry, as_text=as_text) for entry in value]
    if isinstance(value, str | int | float):  # This is a subclass, such as an enumeration's.
        return json.loads(json.dumps(value))
    if hasattr(value, "tolist"):
        return json_form(value.tolist(), as_text=as_text)
    if as_text and isinstance(value, date | time):
        return value.isoformat()
    if as_text and isinstance(value, Decimal | UUID):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__}")


def json_state(state: Any, name: str) -> dict[str, Any]:
    """Return a user's state as a checkpoint gives it back: a copy in JSON's types.

    Raises UserError, with the state's name, if JSON cannot hold it.
    """
    if not isinstance(state, dict):
        raise UserError(f"{name} must be a dict: it is {type(state).__name__}")
    copy = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise UserError(f"{name} must hold JSON values only: it has the key {key!r}; keys must be text")
        try:
            copy[key] = json_form(value)
        except (TypeError, RecursionError) as error:
            fault = "a value that holds itself" if isinstance(error, RecursionError) else error
            raise UserError(f"{name} must hold JSON values only: {key!r} has {fault}") from error
    return copy
