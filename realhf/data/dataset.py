"""Rows of prompts from JSONL or parquet files, and the order in which a run sees them. Free of torch."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

LOADER_KEYS = ("prompt_ids", "prompt", "sequence_ids", "response_mask")  # Any other key is a column.


@dataclass(frozen=True)
class DatasetConfig:
    """A file of rows with at least a prompt: text, or a list of chat messages."""

    path: str = ""  # A .jsonl or .parquet file.
    prompt_key: str = "prompt"
    completion_key: str = "completion"  # The column that supervised fine-tuning learns to write.
    max_prompt_tokens: int = 4096  # Rows with longer prompts are left out (their number is logged).
    max_rows: int = 0  # Only the first so many rows; 0: all.
    shuffle: bool = True


def read_rows(config: DatasetConfig) -> list[dict[str, Any]]:
    """All rows of the file. Raises ValueError that names the file and line if one is missing or malformed."""
    path = Path(config.path)
    if not path.is_file():
        raise ValueError(f"dataset.path {config.path!r}: there is no such file")
    if path.suffix == ".parquet":
        import pyarrow.parquet

        rows = pyarrow.parquet.read_table(path).to_pylist()
    elif path.suffix in (".jsonl", ".json"):
        with path.open() as lines:
            numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
        rows = [_parse(line, where=f"dataset {path} line {number}") for number, line in numbered]
    else:
        raise ValueError(f"dataset.path '{path}' ends in {path.suffix!r}: legal are .jsonl and .parquet")
    if not rows:
        raise ValueError(f"dataset {path} has no rows")
    return rows[: config.max_rows or None]


def _parse(line: str, *, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is {type(row).__name__}: every line must be an object")
    return row


def needed_columns(config: DatasetConfig, keys: Sequence[str]) -> list[str]:
    """The columns of the file that a graph with these input keys reads."""
    made = [config.prompt_key, config.completion_key] if "sequence_ids" in keys else [config.prompt_key]
    return [*made, *(key for key in keys if key not in LOADER_KEYS)]


def require_columns(config: DatasetConfig, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Raises ValueError when some row lacks one of the columns."""
    for (number, row), column in product(enumerate(rows), columns):
        if column not in row:
            where = f"dataset {config.path} has no column {column!r} in row {number}"
            raise ValueError(f"{where}; its columns are {', '.join(row)}")


def extra_columns(config: DatasetConfig) -> tuple[str, ...]:
    """The columns of the first row besides the prompt; none where there is no such file."""
    if not Path(config.path).is_file():
        return ()
    return tuple(key for key in read_rows(config)[0] if key != config.prompt_key)


def row_order(num_rows: int, *, start: int, count: int, seed: int, shuffle: bool) -> list[int]:
    """Row indices number `start` to `start + count` of an endless run, shuffled anew each epoch."""
    if not shuffle:
        return [i % num_rows for i in range(start, start + count)]
    epochs, offset = range(start // num_rows, (start + count) // num_rows + 1), start % num_rows
    orders = [np.random.default_rng([seed, epoch]).permutation(num_rows) for epoch in epochs]
    return np.concatenate(orders)[offset : offset + count].tolist()
