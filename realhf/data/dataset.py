"""Reads rows of prompts from JSONL or parquet files, and orders them for a run. Imports no torch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realhf.data.json_form import json_form

IS_CHOSEN = "is_chosen"
"""Key of a graph that reads preference pairs: whether a sample is the chosen one of its prompt's two. Samples
2i and 2i + 1 are then the chosen and the rejected completion of prompt i."""
DATASET_ROW = "dataset_row"
"""Key of a graph for the number of a sample's row in the file, counted from 0."""
LOADER_KEYS = ("prompt_ids", "prompt", "sequence_ids", "response_mask", IS_CHOSEN, DATASET_ROW)
"""Keys of a graph that the loader makes; every other key is a column of the file."""
COLUMN = "column/"
"""Prefix of a column's key in a graph that uses the column's name for something else."""
_CHAT = "a list of chat messages such as [{\"role\": \"user\", \"content\": \"...\"}]"


@dataclass(frozen=True)
class DatasetConfig:
    """A file of rows, each with at least a prompt, which is text or a list of chat messages.

    Columns have JSON's types. Parquet's dates, times, decimal numbers and UUIDs become text.
    """

    path: str = ""  # A .jsonl or .parquet file.
    prompt_key: str = "prompt"  # Column of the prompts.
    completion_key: str = "completion"  # Column of the text or messages that supervised fine-tuning learns.
    chosen_key: str = "chosen"  # Column of the better completion of a preference pair.
    rejected_key: str = "rejected"  # Column of the worse completion.
    max_prompt_tokens: int = 4096  # Rows with longer prompts are left out, and their number is logged.
    max_rows: int = 0  # Rows read from the start of the file; 0 reads all.
    shuffle: bool = True  # Draw a new order of rows in every epoch; otherwise keep that of the file.


def load_rows(config: DatasetConfig, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Read the rows for a graph with these input keys.

    Raises ValueError, which names file and line, if a row lacks a column or has an unusable value.
    """
    rows = read_rows(config)
    columns = needed_columns(config, keys)
    require_columns(config, rows, columns)
    if Path(config.path).suffix == ".parquet":
        _to_json_form(config, rows, columns)
    for number, row in enumerate(rows):
        prompt = row[config.prompt_key]
        if fault := _fault(prompt):
            raise ValueError(f"{place(config, number)}: {config.prompt_key} {fault}")
        columns_of_row = completion_columns(config, keys)
        for column in columns_of_row:
            if fault := _fault(row[column], prompt=prompt):
                raise ValueError(f"{place(config, number)}: {column} {fault}")
        if len({isinstance(row[column], str) for column in columns_of_row}) > 1:
            what = " and ".join(columns_of_row)
            raise ValueError(f"{place(config, number)}: of {what}, one is text and one a list of messages")
    return rows


def read_rows(config: DatasetConfig) -> list[dict[str, Any]]:
    """Read all rows. Raises ValueError, which names file and line, if the file is missing or malformed."""
    path = _path(config)
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except (ValueError, OSError) as error:
            raise ValueError(f"dataset {path} cannot be read as parquet: {error}") from error
    else:
        rows = list(_parsed_lines(path))
    if not rows:
        raise ValueError(f"dataset {path} has no rows")
    return rows[: config.max_rows or None]


def _path(config: DatasetConfig) -> Path:
    path = Path(config.path)
    if not path.is_file():
        raise ValueError(f"dataset.path {config.path!r}: there is no such file")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise ValueError(f"dataset.path '{path}' ends in {path.suffix!r}: legal are .jsonl and .parquet")
    return path


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a JSONL file that are not blank, with their numbers from 1."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _parsed_lines(path: Path) -> Iterator[dict[str, Any]]:
    for number, line in _lines(path):
        where = f"dataset {path} line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            what = f"byte {error.start} of the line is {line[error.start]:#04x}"
            raise ValueError(f"{where} is not UTF-8 ({what}): save the file as UTF-8") from error
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is not JSON: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{where} is nested too deeply") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where} is {type(row).__name__}: every line must be an object")
        yield row


def place(config: DatasetConfig, number: int) -> str:
    """Return the file and the line or row of row `number` (from 0), in words."""
    path = Path(config.path)
    if path.suffix == ".parquet":
        return f"dataset {path} row {number}"
    line = next(islice(_lines(path), number, None))[0]
    return f"dataset {path} line {line}"


def needed_columns(config: DatasetConfig, keys: Sequence[str]) -> list[str]:
    """Return the columns of the file that a graph with these input keys reads."""
    made = [config.prompt_key, *completion_columns(config, keys)]
    return [*made, *(column_of(key) for key in keys if key not in LOADER_KEYS)]


def completion_columns(config: DatasetConfig, keys: Sequence[str]) -> list[str]:
    """Return the columns of completions that a graph with these input keys reads: two if it reads pairs."""
    if reads_pairs(keys):
        return [config.chosen_key, config.rejected_key]
    return [config.completion_key] if "sequence_ids" in keys else []


def reads_pairs(keys: Sequence[str]) -> bool:
    """Return whether a graph with these input keys reads preference pairs, two samples for each prompt."""
    return IS_CHOSEN in keys


def column_of(key: str) -> str:
    """Return the column that a key of a graph stands for."""
    return key.removeprefix(COLUMN)


def require_columns(config: DatasetConfig, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Raise ValueError if a row lacks one of the columns."""
    for (number, row), column in product(enumerate(rows), columns):
        if column not in row:
            there = f"its columns are {', '.join(row)}"
            raise ValueError(f"{place(config, number)}: there is no column {column!r}; {there}")


def extra_columns(config: DatasetConfig) -> tuple[str, ...]:
    """Return the columns of the first row other than the prompt; none if the file does not exist."""
    if not Path(config.path).is_file():
        return ()
    if (path := _path(config)).suffix == ".parquet":
        import pyarrow.parquet

        columns: Sequence[str] = pyarrow.parquet.read_schema(path).names
    else:
        columns = list(next(_parsed_lines(path), {}))
    return tuple(key for key in columns if key != config.prompt_key)


def _to_json_form(config: DatasetConfig, rows: list[dict[str, Any]], columns: Sequence[str]) -> None:
    """Convert these columns to JSON's types, in place."""
    for (number, row), column in product(enumerate(rows), columns):
        try:
            row[column] = json_form(row[column], as_text=True)
        except TypeError as error:
            hint = "store it as text or numbers, or leave the column out"
            raise ValueError(f"{place(config, number)}: column {column!r} has {error}; {hint}") from error


def _fault(value: Any, *, prompt: Any = None) -> str | None:
    """Return in words the fault of a prompt, or of a completion of `prompt`; None if there is none."""
    if isinstance(value, str):
        return _text_fault(value)
    if not isinstance(value, list):
        return f"is {_shown(value)}: it must be text, or {_CHAT}"
    if isinstance(prompt, str):
        return "is a list of chat messages, but the prompt is text: both must be messages"
    return _chat_fault(value)


def _text_fault(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"has half of a character at position {error.start}: no text has a lone surrogate"
    return None


def _chat_fault(messages: list[Any]) -> str | None:
    if not messages:
        return f"is an empty list: it must be text, or {_CHAT}"
    for message in messages:
        if not isinstance(message, dict):
            return f"has the message {_shown(message)}: it must be {_CHAT}"
        if not isinstance(message.get("role"), str):
            hint = " (rename `from` to role and `value` to content)" if "from" in message else ""
            found = ", ".join(message) or "nothing"
            return f"has a message with {found}: it must have role and content{hint}"
        content = message.get("content")
        if isinstance(content, str) and (fault := _text_fault(content)):
            return fault
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f"has a message whose content is {_shown(content)}: it must be text"
    return None


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."


def row_order(num_rows: int, *, start: int, count: int, seed: int, shuffle: bool) -> list[int]:
    """Return the row indices from `start` to `start + count` of an endless run, shuffled anew each epoch."""
    if not shuffle:
        return [i % num_rows for i in range(start, start + count)]
    offset = start % num_rows
    epochs = range(start // num_rows, (start + count) // num_rows + 1)
    orders = [_epoch_order(num_rows, seed, epoch) for epoch in epochs]
    return np.concatenate(orders)[offset : offset + count].tolist()


@lru_cache(maxsize=4)
def _epoch_order(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the row indices of an epoch in their random order."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
