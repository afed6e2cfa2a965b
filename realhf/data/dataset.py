"""The settings of data sets, and the columns of their rows that a graph reads. Imports no torch."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from realhf.data.memory_rows import names_files, shown_path, write_arrays, write_rows
from realhf.data.order import block_counts
from realhf.user_input.field_types import check_types, require
from realhf.user_input.files import open_regular

IS_CHOSEN = "is_chosen"
"""Key of a graph that reads preference pairs: whether a sample is the chosen one of its prompt's two. Samples
2i and 2i + 1 are then the chosen and the rejected completion of prompt i."""
DATASET_ROW = "dataset_row"
"""Key of a graph for the number of a sample's row in the data set, counted from 0."""
START_IDS = "start_ids"
"""Key of a graph that plays its rows in environments: the tokens of the prompt, in whose place comes what an
environment's start says. So rows need no prompt; that of a row without one is empty."""
LOADER_KEYS = (
    "prompt_ids", START_IDS, "prompt", "sequence_ids", "response_mask", IS_CHOSEN, DATASET_ROW)
"""Keys of a graph that the loader makes; every other key is a column of the file."""
COLUMN = "column/"
"""Prefix of a column's key in a graph, if the graph uses the column's name for something else."""
_CHUNK = 1 << 24
"""Numbers of a column that are looked at at once."""
SOURCE = "dataset"
"""Column of a mixture's rows: the name of the part that they are from."""
_TEMPLATE_ARGUMENTS = (
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask",
)
"""Arguments of a chat template that `chat_template_kwargs` may not set."""


@dataclass(frozen=True)
class DatasetConfig:
    """Rows, each with at least a prompt, which is text or a list of chat messages.

    Columns have JSON's types. Parquet's dates, times, decimal numbers and UUIDs become text.
    """

    path: str | tuple[str, ...] = ""
    """A .jsonl, .parquet, .csv or .json file, a pattern such as `data/*.jsonl`, or the hub's `org/name`; or
    several. In Python also the rows themselves: dicts in a list or generator, a frame, a datasets.Dataset."""
    prompt_key: str = "prompt"  # Column of the prompts.
    completion_key: str = "completion"  # Column of the text or messages that supervised fine-tuning learns.
    chosen_key: str = "chosen"  # Column of the better completion of a preference pair.
    rejected_key: str = "rejected"  # Column of the worse completion.
    messages_key: str = "messages"
    """Column of whole conversations, which supervised fine-tuning reads where there is no completion.
    Elsewhere, rows without a prompt have the messages up to the user's last one as the prompt. A column
    `conversations` serves, too."""
    text_key: str = "text"
    """Column of whole texts, which supervised fine-tuning reads and learns where there is nothing else."""
    assistant_only: bool = True
    """Learn only what the assistant says of messages; otherwise whole completions and whole conversations."""
    max_prompt_tokens: int = 4096  # Limit of the prompts; `too_long` says what happens to longer ones.
    max_rows: int = 0  # Rows read from the start of the split; 0 reads all.
    shuffle: bool = True  # Draw a new order of rows in every epoch; otherwise keep that of the file.
    replacement: bool = False
    """Draw each row from all rows, so that it may come up again before others have; needs `shuffle`."""
    name: str | None = None  # Configuration of a data set of the hub, such as `main`; None: its only one.
    split: str = "train"  # Split, or a part of it such as `train[:1000]`. Files are one split, `train`.
    revision: str | None = None  # Branch, tag or commit of a data set of the hub; None: its main branch.
    map: Callable[[dict[str, Any]], dict[str, Any] | None] | None = None
    """Returns columns to add to a row, or to replace in it, or None to leave the row out. It must be a pure
    function of the row."""
    chat: bool | None = None
    """Make a user's message of each prompt that is text, for the chat template. None: do not, and warn if the
    tokenizer has a template."""
    system_prompt: str | None = None
    """First message of every chat that does not begin with one of its own; implies `chat`."""
    tools: tuple[dict[str, Any], ...] = ()  # JSON schemas for the chat template; implies `chat`.
    tools_key: str | None = None  # Column of such a list, or null, instead; implies `chat`.
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as {"enable_thinking": False}; implies `chat`."""
    too_long: Literal["drop", "keep_end", "keep_start", "error"] = "drop"
    """What happens to prompts of more than `max_prompt_tokens`: the row is left out, the prompt keeps its
    last or its first tokens, or the run ends."""
    max_completion_tokens: int | None = None  # Limit of the completions that are learned; None: no limit.
    completion_too_long: Literal["drop", "keep_start", "error"] = "drop"
    """What happens to longer completions: the row is left out, the completion keeps its first tokens and
    loses its eos token, or the run ends."""
    preload: bool | None = None
    """Read, check and tokenise all rows at the start, or each row when it comes up. None: all rows if the
    files have at most 64 MiB."""

    def __post_init__(self) -> None:
        if not names_files(self.path):
            object.__setattr__(self, "path", write_rows(self.path, most=self.max_rows))
        check_types(self)
        several = isinstance(self.path, Sequence) and not isinstance(self.path, str)
        path = tuple(map(str, self.path)) if several else str(self.path)
        object.__setattr__(self, "path", path)
        object.__setattr__(self, "tools", tuple(self.tools))
        least = 0 if self.too_long == "drop" else 1
        require(
            self.max_prompt_tokens >= least, "max_prompt_tokens", self.max_prompt_tokens,
            f"be at least {least}")
        limit = self.max_completion_tokens
        require(limit is None or limit >= 1, "max_completion_tokens", limit, "be at least 1")
        rule = "be false if shuffle is, as rows then keep the order of the file"
        require(self.shuffle or not self.replacement, "replacement", self.replacement, rule)
        if self.tools and self.tools_key is not None:
            raise ValueError(f"tools_key is {self.tools_key!r}: it must be left out if tools are given")
        if taken := [name for name in self.chat_template_kwargs if name in _TEMPLATE_ARGUMENTS]:
            raise ValueError(f"chat_template_kwargs has {taken[0]!r}, which it cannot set")

    @property
    def makes_chats(self) -> bool:
        """Whether prompts that are text become chats of one message."""
        return bool(self.chat_settings)

    @property
    def chat_settings(self) -> list[str]:
        """Names of the fields by which prompts that are text become chats."""
        is_set = {
            "chat": bool(self.chat), "system_prompt": self.system_prompt is not None,
            "tools": bool(self.tools),
            "tools_key": self.tools_key is not None, "chat_template_kwargs": bool(self.chat_template_kwargs),
        }
        return [name for name, is_given in is_set.items() if is_given]

    @property
    def parts(self) -> "tuple[DatasetConfig, ...]":
        """The data sets that this consists of: itself, or those of a mixture."""
        return (self,)


@dataclass(frozen=True)
class ArrayDataset(DatasetConfig):
    """Rows of numbers: a safetensors file with a tensor for each column, whose first dim counts rows.

    The key of a column in a graph is its name; a batch has a tensor of some of its rows. In Python, `path`
    may also be a dict of arrays. Without a path there are `num_rows` rows with their numbers alone, the key
    `dataset_row`: enough for calls that make all they need, such as environments.
    """

    num_rows: int = 0  # Number of the rows without columns; 0: there is a path.

    def __post_init__(self) -> None:
        if isinstance(self.path, Mapping):
            object.__setattr__(self, "path", write_arrays(self.path))
        super().__post_init__()
        require(isinstance(self.path, str), "path", self.path, "be one file")
        names = {each.name for each in dataclasses.fields(DatasetConfig)}
        for name in sorted(names - {"path", "shuffle", "replacement"}):
            if (value := getattr(self, name)) != getattr(DatasetConfig(), name):
                raise ValueError(f"{name} is {value!r}: an ArrayDataset has no such setting")
        require(
            (self.num_rows > 0) == (not self.path), "num_rows", self.num_rows,
            "be above 0 without a path, and be left out with one")

    def columns(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the columns. Raises ValueError if the file cannot be read as such a file."""
        if not self.path:
            return {}
        path = Path(str(self.path))
        try:
            with open_regular(path), safe_open(path, framework="numpy") as file:
                shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except OSError as error:
            raise ValueError(f"dataset {path} cannot be read: {error.strerror}") from error
        except SafetensorError as error:
            raise ValueError(f"dataset {path} is no safetensors file: {error}") from error
        sizes = {shape[:1] for shape in shapes.values()}
        if len(sizes) != 1 or () in sizes or (0,) in sizes:
            raise ValueError(f"dataset {self.path}: all tensors must have as many rows, at least 1")
        return shapes

    def count(self) -> int:
        """Return the number of rows."""
        return self.num_rows or next(iter(self.columns().values()))[0]

    def not_finite(self) -> dict[str, tuple[int, int]]:
        """Return, for each column with NaN or infinite values, the number of such rows and the first one."""
        found = {}
        for key, shape in self.columns().items():
            with safe_open(str(self.path), framework="numpy") as file:
                column = file.get_slice(key)
                if column.get_dtype() not in ("F16", "F32", "F64"):
                    continue
                step = max(1, _CHUNK // max(1, math.prod(shape[1:])))
                wrong: list[int] = []
                for start in range(0, shape[0], step):
                    stop = min(start + step, shape[0])
                    is_number = np.isfinite(column[start:stop]).reshape(stop - start, -1).all(1)
                    wrong += (start + np.flatnonzero(~is_number)).tolist()
            if wrong:
                found[key] = (len(wrong), wrong[0])
        return found

    def check_keys(self, keys: Sequence[str]) -> None:
        """Raise ValueError unless there is a column for each key of a graph."""
        legal = (*self.columns(), DATASET_ROW)
        if missing := [key for key in keys if key not in legal]:
            raise ValueError(
                f"dataset {shown_path(str(self.path)) or 'of numbered rows'} has no column {missing[0]!r}, "
                f"which the graph reads: its columns are {', '.join(legal)}")


@dataclass(frozen=True)
class DatasetMixture(DatasetConfig):
    """Several data sets that prompts are drawn from: `DatasetMixture(parts=..., weights=...)`.

    Every part has its own settings, order and epochs: set `shuffle` and the other fields there. Of every
    thousand prompts, each part has the share that `weights` gives it, in an order that the seed decides. The
    column `dataset` of a row is the path of its part. Columns that only other parts have are None.
    """

    parts: tuple[DatasetConfig, ...] = ()
    weights: tuple[float, ...] = ()  # Shares of the prompts, of any sum; none: equal shares.

    def __post_init__(self) -> None:
        if isinstance(self.parts, list | tuple):
            parts = tuple(as_dataset(part, f"parts[{i}]") for i, part in enumerate(self.parts))
            object.__setattr__(self, "parts", parts)
        check_types(self)
        object.__setattr__(self, "parts", tuple(self.parts))
        object.__setattr__(self, "weights", tuple(self.weights) or (1.0,) * len(self.parts))
        require(len(self.parts) > 0, "parts", "empty", "have at least one DatasetConfig")
        if other := [part for part in self.parts if type(part) is not DatasetConfig]:
            raise ValueError(f"parts has a {type(other[0]).__name__}: each part must be a DatasetConfig")
        if len(self.weights) != len(self.parts):
            raise ValueError(f"there are {len(self.weights)} weights for {len(self.parts)} parts")
        if self.path:
            raise ValueError(f"path is {self.path!r}: a mixture has parts with paths, and none of its own")
        block_counts(self.weights)
        # For checks of what a model's positions allow.
        object.__setattr__(self, "max_prompt_tokens", max(part.max_prompt_tokens for part in self.parts))


def as_dataset(rows: Any, field: str) -> Any:
    """Return the config of rows in memory, or of a path; other values as they are.

    Raises ValueError, which names the field that has them, if they are no rows.
    """
    if dataclasses.is_dataclass(rows) or isinstance(rows, Mapping) or rows is None:
        return rows
    try:
        return DatasetConfig(rows)
    except ValueError as error:
        raise ValueError(f"{field}{str(error).removeprefix('path')}") from error


def dataset_name(config: DatasetConfig) -> str:
    """Return the path of a data set, with its configuration if it is on the hub; the paths of a mixture."""
    if len(config.parts) > 1 or not config.path:
        return " + ".join(dataset_name(part) for part in config.parts) if config.parts != (config,) else ""
    path = config.path if isinstance(config.path, str) else ", ".join(config.path)
    return path if config.name is None else f"{path}/{config.name}"


def shown_name(config: DatasetConfig) -> str:
    """Return the path of a data set for messages, or what its rows in memory were."""
    if len(config.parts) > 1:
        return " + ".join(map(shown_name, config.parts))
    return shown_path(config.path) if isinstance(config.path, str) else dataset_name(config)


def needed_columns(config: DatasetConfig, keys: Sequence[str]) -> list[str]:
    """Return the columns of the file that a graph with these input keys reads."""
    texts = [config.prompt_key, *completion_columns(config, keys)]
    tools = [] if config.tools_key is None else [config.tools_key]
    return [*texts, *tools, *(column_of(key) for key in keys if key not in LOADER_KEYS)]


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
