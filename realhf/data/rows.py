"""DatasetRows: reads, maps and checks the rows of one data set, one at a time. Imports no torch."""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from realhf.data.conversations import IS_WHOLE, conversation_fault, find_conversation, pair_fault
from realhf.data.hub_dataset import datasets_cache, open_split, split_ranges
from realhf.data.json_form import json_form
from realhf.data.row_faults import fault_of, tools_fault
from realhf.data.row_files import LARGE_BYTES, Fingerprint, RowFile, RowSlice, open_file
from realhf.errors import UserError, described
from realhf.user_input.hub import parse_hub_name
from realhf.user_input.suggest import did_you_mean, near_path_words

if TYPE_CHECKING:
    from realhf.data.dataset import DatasetConfig

SOURCE = "dataset"
"""Column of a mixture's rows: the name of the part that they are from."""
RowFault = Callable[[Mapping[str, Any]], "str | None"]
"""Returns a sentence if a row cannot be used, else None."""
_NUM_TRIED = 1000
"""Number of rows of a large data set that are read at the start of a run."""
_NUM_FIRST = 100
"""How many of these are the first rows of the data set; the others are spread over it."""
_WILDCARDS = "*?["
_ONLY_SPLIT = "train"
"""The split that files which are not on the hub belong to, as in the library `datasets`."""
_SUFFIXES = (".jsonl", ".json", ".parquet")
_WITHOUT_PROMPT = {
    ("instruction", "output"): "for SFT: give prompt_key='instruction' and completion_key='output'",
    ("messages",): "whole conversations: the prompt is what they have up to the user's last message",
    ("text",): "plain text, which SFT learns"}
_LEARNED = {
    ("chosen", "rejected"): "preference pairs: DPO and PairwiseRewardModel learn from them",
    ("completion", "label"): "labelled answers: RewardModel learns from them",
    ("completion",): "for SFT"}
_SCORED = {
    (name,): "for reinforcement learning, such as GRPO, whose reward function reads it"
    for name in ("answer", "ground_truth", "solution")}
"""Columns that tell of rows of what kind they are -> what these rows are for."""
_CONVERTED = {".csv": "csv", ".tsv": "csv", ".txt": "text"}
"""Ending of a file -> the method of `datasets` that reads it."""
_COLUMN_FIELDS = ("prompt_key", "completion_key", "chosen_key", "rejected_key", "messages_key", "tools_key")
"""Fields of a DatasetConfig that name columns."""


class MissingColumnError(UserError):
    """A row lacks a column."""

    def __init__(self, sentence: str, column: str) -> None:
        super().__init__(sentence)
        self.column = column


class DatasetRows:
    """The rows of a data set, by number from 0 over all of its files. They have JSON's types."""

    def __init__(
        self, config: DatasetConfig, *, columns: Sequence[str] = (), completions: Sequence[str] = (),
        blank: Collection[str] = (), source: str | None = None, row_faults: Sequence[RowFault] = (),
    ) -> None:
        """Rows must have the `columns`; `completions` are the columns among these that have completions.

        Columns in `blank` are None where they are missing. `source` is the value of the column SOURCE.
        """
        self.config = config
        self._columns = list(dict.fromkeys(columns))
        self._completions = completions
        self.blank = blank
        self._source = source
        self._row_faults = row_faults
        self._files = _open_files(config)
        self._ends = np.cumsum([len(file) for file in self._files])
        if not self._ends[-1]:
            raise UserError(f"dataset {self.name} has no rows")

    def __len__(self) -> int:
        total = int(self._ends[-1])
        return min(self.config.max_rows or total, total)

    @property
    def name(self) -> str:
        """The files of the data set, in words."""
        shown = ", ".join(file.name for file in self._files[:3])
        return f"{shown}, ..." if len(self._files) > 3 else shown

    @property
    def is_large(self) -> bool:
        """Whether rows are read only when they are needed."""
        if self.config.preload is not None:
            return not self.config.preload
        num_bytes = sum(file.num_bytes for file in self._files)
        return num_bytes * len(self) > LARGE_BYTES * int(self._ends[-1])

    def tried(self, limit: int = _NUM_TRIED) -> Sequence[int]:
        """Return the rows to read at the start: all, or in a large data set the first ones and a sample."""
        return spread(len(self), limit) if self.is_large else range(len(self))

    def __getitem__(self, number: int) -> dict[str, Any] | None:
        """Return a row; None if the map function leaves it out.

        Raises ValueError, which names file and line, if it lacks a column or has an unusable value.
        """
        which, local = self._locate(number)
        row = mapped(self.config, self._files[which][local], lambda: self.place(number))
        if row is None:
            return None
        if self._source is not None:
            row.setdefault(SOURCE, self._source)
        has_other_types = self._files[which].has_other_types
        converts = self.config.map is not None or has_other_types
        if converts and (fault := self._to_json_form(row)):
            raise UserError(f"{self.place(number)}: {fault}")
        if self._columns:
            find_conversation(row, self.config, completions=self._completions, fills_nulls=has_other_types)
        for column in self._columns:
            if column not in row and column in self.blank:
                row[column] = None
        if len(self._completions) > 1 and (
            fault := pair_fault(row, self.config.prompt_key, *self._completions)
        ):
            raise UserError(f"{self.place(number)}: {fault}")
        for column in self._columns:
            if column not in row:
                raise MissingColumnError(f"{self.place(number)}: {self._lacks(column, row)}", column)
        if fault := self._fault(row):
            raise UserError(f"{self.place(number)}: {fault}")
        return row

    def place(self, number: int) -> str:
        """Return the file and the line or row of a row, in words."""
        which, local = self._locate(number)
        return _place_in(self._files[which], local)()

    def short_place(self, number: int) -> str:
        """Return the place of a row in its file for messages, with the file if there are several."""
        which, local = self._locate(number)
        line = self._files[which].place(local)
        return line if len(self._files) == 1 else f"{line} of {self._files[which].name}"

    @property
    def fingerprints(self) -> list[Fingerprint]:
        """Return size, number of rows and checksum of each file that is not on the hub."""
        return [known for file in self._files if (known := file.fingerprint) is not None]

    def _locate(self, number: int) -> tuple[int, int]:
        """Return the file of a row, and its number in it."""
        which = int(np.searchsorted(self._ends, number, side="right"))
        return which, number - int(self._ends[which]) + len(self._files[which])

    @property
    def _wholes(self) -> tuple[str, ...]:
        """Columns from which prompts and completions may be taken."""
        return (self.config.messages_key, "conversations", self.config.text_key)

    def _to_json_form(self, row: dict[str, Any]) -> str | None:
        """Convert the columns of a row to JSON's types; return a sentence if one has no such form."""
        read = [*self._columns, *(self._wholes if self._columns else [])]
        for column in (column for column in dict.fromkeys(read) if column in row):
            try:
                row[column] = json_form(row[column], as_text=True)
            except TypeError as error:
                hint = "store it as text or numbers, or leave the column out"
                return f"column {column!r} has {error}; {hint}"
        return None

    def _lacks(self, column: str, row: dict[str, Any]) -> str:
        """Return in words that a row lacks a column, and the field that names the column."""
        config = self.config
        read = (config.prompt_key, config.tools_key, *self._completions)
        fields = [name for name in _COLUMN_FIELDS if column in read and getattr(config, name) == column]
        if len(self._completions) == 1 and column in (config.prompt_key, config.completion_key):
            fields = [*fields, "messages_key", "text_key"]  # A whole conversation or text would do, too.
        says = "say" if len(fields) > 1 else "says"
        named = f"; {' and '.join(fields)} {says} which to take" if fields else ""
        near = did_you_mean(column, list(row))
        learned = column in self._completions
        other = "" if near else _other_kind(row, of_prompt=column == config.prompt_key, learned=learned)
        return f"there is no column {column!r}; its columns are {', '.join(row)}{near}{named}{other}"

    def _fault(self, row: dict[str, Any]) -> str | None:
        """Return in words what is wrong with the values of a row, or None."""
        config = self.config
        if not self._columns:
            return None
        prompt = row[config.prompt_key]
        if (whole := row.get(IS_WHOLE)) and len(self._completions) == 1:
            if fault := fault_of(whole, row[whole]):
                return fault
        elif fault := fault_of(config.prompt_key, prompt):
            return fault
        for column in self._completions:
            beside = None if config.makes_chats else prompt
            if fault := fault_of(column, row[column], prompt=beside):
                return fault
        if len({isinstance(row[column], str) for column in self._completions}) > 1:
            return f"of {' and '.join(self._completions)}, one is text and one a list of messages"
        if fault := conversation_fault(row, config, completions=self._completions):
            return fault
        if (key := config.tools_key) is not None and (fault := tools_fault(key, row[key])):
            return fault
        return next(filter(None, (find(row) for find in self._row_faults)), None)


def _other_kind(row: Mapping[str, Any], *, of_prompt: bool, learned: bool) -> str:
    """Return in words for what training a row seems to be, by its columns; an empty string if unknown.

    The column that it lacks is that `of_prompt`, or one that is `learned`, or one that a reward reads.
    """
    kinds = _WITHOUT_PROMPT if of_prompt else _LEARNED | (_SCORED if learned else {})
    found = (f"; rows with {' and '.join(names)} are {what}"
             for names, what in kinds.items() if row.keys() >= set(names))
    return next(found, "")


def spread(total: int, limit: int) -> Sequence[int]:
    """Return at most about `limit` of `total` row numbers: the first ones, and others spread evenly."""
    if total <= limit:
        return range(total)
    first = min(_NUM_FIRST, limit // 2)
    stride = -(-total // (limit - first))
    return sorted({*range(first), *range(0, total, stride)})


def first_row(config: DatasetConfig) -> dict[str, Any] | None:
    """Return the first row that the map function keeps, without reading others; None if there is no file."""
    try:
        files = _open_files(config)
    except ValueError:
        if any(map(is_of_hub, (config.path,) if isinstance(config.path, str) else config.path)):
            raise
        return None
    rows = ((file, i, row) for file in files for i, row in enumerate(file.first(_NUM_TRIED)))
    for file, i, row in islice(rows, config.max_rows or None):
        mapped_row = mapped(config, row, _place_in(file, i))
        if mapped_row is not None:
            return mapped_row
    return None


def _place_in(file: RowFile, number: int) -> Callable[[], str]:
    return lambda: f"dataset {file.name} {file.place(number)}"


def mapped(config: DatasetConfig, row: dict[str, Any], place: Callable[[], str]) -> dict[str, Any] | None:
    """Return a row with the columns that the map function makes, or None if that leaves the row out.

    Raises UserError, which names the function and the row.
    """
    if config.map is None:
        return row
    name = f"map function {getattr(config.map, '__qualname__', type(config.map).__name__)}"
    try:
        columns = config.map(row)
    except (Exception, SystemExit) as error:
        raise UserError(f"{place()}: {name} failed with {described(error)}") from error
    is_dict = isinstance(columns, Mapping) and all(isinstance(name, str) for name in columns)
    if columns is not None and not is_dict:
        raise UserError(
            f"{place()}: {name} returned {type(columns).__name__}: "
            "it must return a dict of columns, or None to leave the row out")
    return None if columns is None else {**row, **columns}


def _open_files(config: DatasetConfig) -> list[RowFile]:
    """Return the files of a data set, those of the hub included.

    Raises ValueError if there is none, or if one is of another kind.
    """
    paths = (config.path,) if isinstance(config.path, str) else config.path
    files: list[RowFile] = []
    for on_hub, group in groupby(paths, is_of_hub):
        names = list(group)
        opened = [file for path in names for file in _open_path(config, path)]
        if not on_hub and config.split != _ONLY_SPLIT:
            opened = _part_of(opened, ", ".join(names), config.split)
        files += opened
    for field, value in (("name", config.name), ("revision", config.revision)):
        if value is not None and not any(map(is_of_hub, paths)):
            raise UserError(
                f"dataset.{field} is {value!r}: it must be left out, as {paths[0]!r} is not on the hub")
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
            wrong = f"dataset.path {name!r} ends in {suffix!r}: legal are .jsonl and .parquet"
            if (kind := _CONVERTED.get(suffix)) is not None:
                wrong += f" (datasets.Dataset.from_{kind}({name!r}).to_json('rows.jsonl') converts it)"
            raise UserError(wrong)
    return [open_file(Path(name), cache=datasets_cache) for name in names]


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


def is_of_hub(path: str) -> bool:
    """Return whether a path names a data set of the hub, and no local file."""
    return not set(path) & set(_WILDCARDS) and not Path(path).exists() and parse_hub_name(path) is not None
