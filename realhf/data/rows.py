"""DatasetRows: reads, maps and checks the rows of one data set, one at a time. Imports no torch.

A fault is a sentence about a value that cannot be used.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from realhf.data.conversations import IS_WHOLE, conversation_fault, find_conversation, pair_fault
from realhf.data.dataset import (
    SOURCE,
    START_IDS,
    ArrayDataset,
    DatasetConfig,
    completion_columns,
    dataset_name,
    needed_columns,
    shown_name,
)
from realhf.data.memory_rows import json_form
from realhf.data.row_files import LARGE_BYTES, Fingerprint, RowFile, is_of_hub, open_files
from realhf.errors import UserError, described
from realhf.user_input.suggest import did_you_mean

RowFault = Callable[[Mapping[str, Any]], "str | None"]
"""Returns a sentence if a row cannot be used, else None."""
_NUM_TRIED = 1000
"""Number of rows of a large data set that are read at the start of a run."""
_NUM_FIRST = 100
"""How many of these are the first rows of the data set; the others are spread over it."""
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
_CHAT = "a list of chat messages such as [{\"role\": \"user\", \"content\": \"...\"}]"
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
        needs_prompt: bool = True,
    ) -> None:
        """Rows must have the `columns`; `completions` are the columns among these that have completions.

        Columns in `blank` are None where they are missing. Unless a row `needs_prompt`, its prompt is then
        empty. `source` is the value of the column SOURCE.
        """
        self.config = config
        self._columns = list(dict.fromkeys(columns))
        self._completions = completions
        self.blank = blank
        self._source = source
        self._row_faults = row_faults
        self._needs_prompt = needs_prompt
        self._files = open_files(config)
        self._ends = np.cumsum([len(file) for file in self._files])
        if not self._ends[-1]:
            raise UserError(f"dataset {self.name} has no rows")

    def __len__(self) -> int:
        total = int(self._ends[-1])
        return min(self.config.max_rows or total, total)

    @property
    def name(self) -> str:
        """The files of the data set, in words."""
        shown = ", ".join(file.title for file in self._files[:3])
        return f"{shown}, ..." if len(self._files) > 3 else shown

    @property
    def files(self) -> list[str]:
        """The names of all files."""
        return [file.name for file in self._files]

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
            try:
                find_conversation(
                    row, self.config, completions=self._completions, fills_nulls=has_other_types)
            except UserError as error:
                raise UserError(f"{self.place(number)}: {error}") from error
        if not self._needs_prompt and row.get(self.config.prompt_key) is None:
            row[self.config.prompt_key] = ""
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
        return line if len(self._files) == 1 else f"{line} of {self._files[which].title}"

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


def _place_in(file: RowFile, number: int) -> Callable[[], str]:
    return lambda: f"dataset {file.title} {file.place(number)}"


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


def _other_kind(row: Mapping[str, Any], *, of_prompt: bool, learned: bool) -> str:
    """Return in words for what training a row seems to be, by its columns; an empty string if unknown.

    The column that it lacks is that `of_prompt`, or one that is `learned`, or one that a reward reads.
    """
    kinds = _WITHOUT_PROMPT if of_prompt else _LEARNED | (_SCORED if learned else {})
    guesses = (f"; rows with {' and '.join(names)} are {what}"
               for names, what in kinds.items() if row.keys() >= set(names))
    return next(guesses, "")


def open_rows(
    config: DatasetConfig, keys: Sequence[str], *, mixture: DatasetConfig | None = None,
    row_faults: Sequence[RowFault] = (),
) -> DatasetRows:
    """Return the rows of a data set, alone or in a mixture, for a graph with these input keys.

    Raises ValueError if there are no such files.
    """
    blank: set[str] = set()
    source = None
    if mixture is not None and len(mixture.parts) > 1:
        source = dataset_name(config)
        blank = {*extra_columns(mixture)} - {*extra_columns(config)}
    return DatasetRows(
        config, columns=needed_columns(config, keys), completions=completion_columns(config, keys),
        blank=blank, source=source, row_faults=row_faults, needs_prompt=START_IDS not in keys)


_NUM_REPEATED = 8
"""Rows that a map function gets twice."""


def load_rows(
    config: DatasetConfig, keys: Sequence[str], *, row_faults: Sequence[RowFault] = ()
) -> list[dict[str, Any]]:
    """Read the rows for a graph with these input keys, or a sample of the rows if the data set is large.

    Raises ValueError, which names file and line, if a row lacks a column or has an unusable value.
    """
    loaded: list[dict[str, Any]] = []
    for part in config.parts:
        rows = open_rows(part, keys, mixture=config, row_faults=row_faults)
        tried = rows.tried()
        mapped_rows = [(number, row) for number in tried if (row := rows[number]) is not None]
        if not mapped_rows and len(tried) < len(rows):
            others = ((number, row) for number in range(len(rows)) if (row := rows[number]) is not None)
            mapped_rows = [*islice(others, 1)]
        if part.map is not None and mapped_rows:
            require_pure(rows, [number for number, _ in mapped_rows])
        loaded += [row for _, row in mapped_rows]
    if not loaded:
        raise ValueError(f"dataset {shown_name(config)}: the map function leaves out every row")
    return loaded


def require_pure(rows: DatasetRows, numbers: Sequence[int]) -> None:
    """Raise UserError if the map function makes different rows of the first of these when called twice."""
    for number in numbers[:_NUM_REPEATED]:
        once = json.dumps(rows[number], default=str)
        again = json.dumps(rows[number], default=str)
        if once == again:
            continue
        raise UserError(
            f"{rows.place(number)}: the map function, called twice, made different rows of it: it must be a "
            "pure function of the row, as other ranks and resumed runs call it again")


def count_rows(config: DatasetConfig) -> int:
    """Return the number of rows of a data set, or of all parts of a mixture.

    Those that a map function leaves out do not count, unless the files are so large that they are not read.
    """
    if isinstance(config, ArrayDataset):
        return config.count()
    total = 0
    for part in config.parts:
        rows = DatasetRows(part)
        reads = part.map is not None and not rows.is_large
        total += sum(rows[number] is not None for number in range(len(rows))) if reads else len(rows)
    return total


def spread(total: int, limit: int) -> Sequence[int]:
    """Return at most about `limit` of `total` row numbers: the first ones, and others spread evenly."""
    if total <= limit:
        return range(total)
    first = min(_NUM_FIRST, limit // 2)
    stride = -(-total // (limit - first))
    return sorted({*range(first), *range(0, total, stride)})


def read_rows(config: DatasetConfig) -> list[dict[str, Any]]:
    """Read all rows as they are. Raises ValueError, which names file and line, if one is malformed."""
    rows = DatasetRows(config)
    return [row for number in range(len(rows)) if (row := rows[number]) is not None]


def first_row(config: DatasetConfig) -> dict[str, Any] | None:
    """Return the first row that the map function does not leave out, without reading others.

    Return None if there is no file.
    """
    return next(first_rows(config), None)


def first_rows(config: DatasetConfig) -> Iterator[dict[str, Any]]:
    """Yield the rows that the map function does not leave out, from the first; none if there is no file."""
    try:
        files = open_files(config)
    except ValueError:
        if any(map(is_of_hub, (config.path,) if isinstance(config.path, str) else config.path)):
            raise
        return
    rows = ((file, i, row) for file in files for i, row in enumerate(file.first(_NUM_TRIED)))
    for file, i, row in islice(rows, config.max_rows or None):
        mapped_row = mapped(config, row, _place_in(file, i))
        if mapped_row is not None:
            yield mapped_row


def extra_columns(config: DatasetConfig) -> tuple[str, ...]:
    """Return the columns of the first row other than the prompt; none if the file does not exist.

    A mixture has the columns of all its parts.
    """
    columns: dict[str, None] = {}
    for part in config.parts:
        row = first_row(part) or {}
        columns |= dict.fromkeys(key for key in row if key != part.prompt_key)
    if columns and len(config.parts) > 1:
        columns[SOURCE] = None
    return tuple(columns)


def may_have_completions(config: DatasetConfig) -> bool:
    """Return whether the first row has a completion or a whole conversation, or is not known."""
    columns = extra_columns(config)
    return not columns or any(
        {part.completion_key, part.messages_key, part.text_key, "conversations"} & set(columns)
        for part in config.parts)


def fault_of(column: str, value: Any, *, prompt: Any = None) -> str | None:
    """Return a sentence if a prompt, or a completion of `prompt`, cannot be used, else None."""
    if isinstance(value, str):
        return _text_fault(column, value)
    if not isinstance(value, list):
        return f"{column} is {_shown(value)}: it must be text, or {_CHAT}"
    if isinstance(prompt, str):
        return f"{column} is a list of chat messages, but the prompt is text: both must be messages"
    return _chat_fault(column, value)


def tools_fault(column: str, value: Any) -> str | None:
    """Return a sentence if a row's tools are no JSON schemas, else None."""
    if value is None or (isinstance(value, list) and all(isinstance(tool, dict) for tool in value)):
        return None
    return f"{column} is {_shown(value)}: it must be null, or a list of JSON schemas"


def _text_fault(column: str, text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"{column} has half of a character at position {error.start}: no text has a lone surrogate"
    return None


def _chat_fault(column: str, messages: list[Any]) -> str | None:
    if not messages:
        return f"{column} is an empty list: it must be text, or {_CHAT}"
    for message in messages:
        if not isinstance(message, dict):
            return f"{column} has the message {_shown(message)}: it must be {_CHAT}"
        if not isinstance(message.get("role"), str):
            hint = " (rename `from` to role and `value` to content)" if "from" in message else ""
            fields = ", ".join(message) or "nothing"
            return f"{column} has a message with {fields}: it must have role and content{hint}"
        content = message.get("content")
        if isinstance(content, str) and (fault := _text_fault(column, content)):
            return fault
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            return f"{column} has a message whose content is {_shown(content)}: it must be text"
    return None


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."
