"""Tokenises the rows of a dataset. Imports no torch, as checks use it too, with a LightTokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, NamedTuple

from realhf.data.conversations import IS_QUESTION, IS_WHOLE, as_messages, is_continued, weight_of
from realhf.data.dataset import (
    DATASET_ROW,
    IS_CHOSEN,
    LOADER_KEYS,
    START_IDS,
    DatasetConfig,
    column_of,
    completion_columns,
    shown_name,
)
from realhf.data.doubtful_rows import DoubtfulRows, compared_text
from realhf.data.light_tokenizer import TokenizerPanicError, panics_as_errors
from realhf.data.rows import RowFault, open_rows, require_pure, spread
from realhf.data.sequence_tokens import ChatTokens, Oddities, TextTokens, TokenizedSequence, Tools
from realhf.errors import UserError

TokenizedSamples = tuple[dict[str, Any], ...]
"""The samples of a row, each as key of the graph -> value: one, or the chosen and the rejected of a pair."""


Compared = Literal["prompt", "question", "row"]
"""What is compared of rows: the prompt with its tools, what the user says in it, or the whole row."""


class RowTexts(NamedTuple):
    """The prompt and the completions of a row, each a text or the messages of a chat."""

    own_prompt: Any
    """The prompt as it is in the row."""
    prompt: Any
    """The prompt that is tokenised: a chat if the config makes chats, with its system prompt."""
    tools: Tools
    completions: Mapping[str, Any]
    """Completions by column, those that the graph reads."""
    is_text: bool
    """Whether prompt and completion are the beginning and the rest of a text that is learned as a whole."""
    is_whole: bool
    """Whether they are parts of a whole text or conversation."""
    is_question: bool
    """Whether the prompt is what a conversation has up to the user's last message."""

    @property
    def is_chat(self) -> bool:
        return not isinstance(self.prompt, str)

    @property
    def has_own_system(self) -> bool:
        """Whether the row's own messages begin with one of the system."""
        own = self.own_prompt
        return not isinstance(own, str) and bool(own) and own[0]["role"] == "system"


def texts_of(row: Mapping[str, Any], config: DatasetConfig, keys: Sequence[str]) -> RowTexts:
    """Return what is tokenised of a row for a graph with these input keys."""
    own_prompt = row[config.prompt_key]
    is_text = row.get(IS_WHOLE) == config.text_key
    tools = row[config.tools_key] if config.tools_key is not None else list(config.tools)
    return RowTexts(
        own_prompt, own_prompt if is_text else _chat_of(own_prompt, config), tools or None,
        {column: row[column] for column in completion_columns(config, keys)},
        is_text=is_text, is_whole=bool(row.get(IS_WHOLE)), is_question=bool(row.get(IS_QUESTION)))


def _chat_of(prompt: Any, config: DatasetConfig) -> Any:
    """Return a prompt: as chat messages, with the system prompt, if the config makes chats."""
    system = config.system_prompt
    if isinstance(prompt, str) and config.makes_chats:
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str) or system is None or prompt[0]["role"] == "system":
        return prompt
    return [{"role": "system", "content": system}, *prompt]


@dataclass
class RowCounts:
    """Counts of the rows that have been read: chats among them, and what is left out or cut."""

    chats: int = 0
    own_systems: int = 0
    """Chats whose first message is a system message of the row."""
    with_tools: int = 0
    unmapped: int = 0
    """Rows that the map function leaves out."""
    long_prompts: int = 0
    """Rows that are left out because of their prompts."""
    long_completions: int = 0
    """Rows that are left out because of their completions."""
    cut: int = 0
    """Prompts and completions that are cut."""
    torn_chats: int = 0
    """Prompts that are cut and that a chat template has written."""
    shortest_prompt: int | None = None

    @property
    def left_out(self) -> int:
        return self.unmapped + self.long_prompts + self.long_completions

    def add_texts(self, texts: RowTexts) -> None:
        if texts.is_chat:
            self.chats += 1
            self.own_systems += texts.has_own_system
            self.with_tools += bool(texts.tools)


class LengthLimits:
    """The limits of a config, by which long prompts and completions are cut or their rows left out."""

    def __init__(self, config: DatasetConfig, counts: RowCounts) -> None:
        self._config = config
        self._counts = counts

    def part_of_prompt(self, ids: Sequence[int], *, is_chat: bool) -> slice | None:
        """Return which tokens of a prompt are read; None if its row is left out. Raises UserError."""
        counts = self._counts
        limit = self._config.max_prompt_tokens
        how = self._config.too_long
        counts.shortest_prompt = min(len(ids), counts.shortest_prompt or len(ids))
        if len(ids) <= limit:
            return slice(None)
        if how == "error":
            raise UserError(
                f"the prompt has {len(ids)} tokens, and max_prompt_tokens is {limit} (too_long is error)")
        if how == "drop":
            counts.long_prompts += 1
            return None
        counts.cut += 1
        counts.torn_chats += is_chat
        return slice(limit) if how == "keep_start" else slice(-limit, None)

    def part_of_completion(self, ids: Sequence[int], column: str) -> slice | None:
        """Return which tokens of a completion are learned; None if its row is left out. Raises UserError."""
        limit = self._config.max_completion_tokens
        how = self._config.completion_too_long
        if limit is None or len(ids) <= limit:
            return slice(None)
        if how == "error":
            raise UserError(
                f"the {column} has {len(ids)} tokens, and max_completion_tokens is {limit} "
                "(completion_too_long is error)")
        if how == "drop":
            self._counts.long_completions += 1
            return None
        self._counts.cut += 1
        return slice(limit)


class RowTokenizer:
    """Tokenises one row after the other, within the limits of the config."""

    def __init__(
        self, config: DatasetConfig, tokenizer: Any,
        *, keys: Sequence[str], counts: RowCounts, oddities: Oddities,
    ) -> None:
        self._needs_prompt = "prompt_ids" in keys
        self._counts = counts
        self._oddities = oddities
        self._limits = LengthLimits(config, counts)
        self._texts = TextTokens(tokenizer, oddities)
        self._chats = ChatTokens(tokenizer, config.chat_template_kwargs, config.assistant_only, oddities)

    def samples(self, texts: RowTexts) -> list[dict[str, Any]] | None:
        """Return the values of the loader's own keys, once for each completion that the graph reads.

        Return None if the prompt or a completion is too long, so that the row is left out. Raises UserError.
        """
        completions = list(texts.completions.values())
        if texts.is_chat:
            completions = [as_messages(completion) for completion in completions]
            first = completions[0] if completions else None
            ids = self._chats.prompt(texts.prompt, texts.tools, completion=first)
        else:
            ids = self._texts.prompt(texts.prompt)
        if not ids and self._needs_prompt:
            raise UserError("the prompt has no tokens")
        of_prompt = self._limits.part_of_prompt(ids, is_chat=texts.is_chat)
        if of_prompt is None:
            return None
        if not completions:
            self._oddities.num_continued += texts.is_chat and is_continued(texts.prompt, None)
            self._oddities.num_questions += texts.is_question
            return [dict.fromkeys(("prompt_ids", START_IDS), ids[of_prompt])]
        samples: list[dict[str, Any]] = []
        sequences = self._sequences(texts, completions)
        for column, sequence in zip(texts.completions, sequences, strict=True):
            completion = texts.completions[column]
            if not any(sequence.mask[sequence.prompt_length :]) and (
                isinstance(completion, str) or any(map(weight_of, completion))):
                raise UserError(f"the chat template writes nothing for the {column}")
            sample = self._sample(sequence, of_prompt, column)
            if sample is None:
                return None
            samples.append({"prompt_ids": ids[of_prompt], **sample, IS_CHOSEN: not samples})
        return samples

    def _sequences(self, texts: RowTexts, completions: list[Any]) -> list[TokenizedSequence]:
        if texts.is_chat:
            return self._chats.sequences(texts.prompt, completions, texts.tools, is_whole=texts.is_whole)
        return self._texts.sequences(texts.prompt, completions, is_whole=texts.is_whole)

    def _sample(self, whole: TokenizedSequence, of_prompt: slice, column: str) -> dict[str, Any] | None:
        """Return the sequence and its mask within the limits; None if its row is left out."""
        ids = whole.ids[whole.prompt_length :]
        mask = whole.mask[whole.prompt_length :]
        of_completion = self._limits.part_of_completion(ids, column)
        if of_completion is None:
            return None
        mask = [*whole.mask[: whole.prompt_length][of_prompt], *mask[of_completion]]
        if not any(mask):  # The limit leaves nothing that is learned.
            self._counts.long_completions += 1
            return None
        sequence = [*whole.ids[: whole.prompt_length][of_prompt], *ids[of_completion]]
        return {"sequence_ids": sequence, "response_mask": mask}


def compared_with(texts: RowTexts) -> dict[Compared, int]:
    """Return hashes by which a row is compared with others, without regard to white space."""
    prompt = texts.own_prompt
    asked = (compared_text(prompt), json.dumps(texts.tools, default=str))
    messages = prompt if isinstance(prompt, list) else []
    said = [message for message in messages if message["role"] == "user"]
    return {
        "prompt": hash(asked), "row": hash((asked, *map(compared_text, texts.completions.values()))),
        "question": hash(compared_text(said or prompt))}


class TokenizedRows:
    """The rows that a graph with these input keys reads, with prompts and completions as token ids.

    Rows with too long prompts or completions are left out, if the config says so. With `sample`, about that
    many rows are tokenised: the first ones, and others spread over the file. For a large data set the same
    happens without `sample`, and `row` tokenises further rows when they come up.

    `samples` has the samples of each row, and `rows` only the first sample of each.
    """

    def __init__(
        self, config: DatasetConfig,
        *, keys: Sequence[str], tokenizer: Any, sample: int | None = None,
        row_faults: Sequence[RowFault] = (), mixture: DatasetConfig | None = None, first_row: int = 0,
    ) -> None:
        """If the config is a part of a mixture, `first_row` is the number of its first row in the mixture."""
        self.config = config
        self.keys = tuple(keys)
        self.tokenizer = tokenizer
        self.counts = RowCounts()
        self.oddities = Oddities()
        read = [column_of(key) for key in keys if key not in LOADER_KEYS]
        self.doubtful = DoubtfulRows(tokenizer, config, read=read)
        """What is doubtful about the rows that are read at the start."""
        self._compared: dict[int, dict[Compared, int]] = {}
        """By what these rows are compared, by number."""
        self._file = open_rows(config, keys, mixture=mixture, row_faults=row_faults)
        self._first_row = first_row
        self.num_in_file = len(self._file)
        self._row_tokenizer = RowTokenizer(
            config, tokenizer, keys=keys, counts=self.counts, oddities=self.oddities)
        self._limit: tuple[int, str] | None = None
        self._last_chat: int | None = None
        """The number of the last row that is a chat and has been tokenised."""
        self._last_read: tuple[int, TokenizedSamples | None] = (-1, None)
        numbers = self._file.tried() if sample is None else spread(self.num_in_file, sample)
        tokenized = self._read_start(numbers, is_sample=sample is not None)
        self.num_tokenized = len(numbers) - self.counts.unmapped
        if not tokenized:
            raise UserError(self._why_none())
        self._numbers = list(tokenized)
        self.samples = list(tokenized.values())
        self.rows = [samples[0] for samples in self.samples]

    def __len__(self) -> int:
        """Return the number of rows; for a large data set, rows that will be left out count, too."""
        return self.num_in_file if self.is_lazy else len(self.rows)

    @property
    def absent(self) -> Collection[str]:
        """Columns that only other parts of the mixture have, and that are None here."""
        return self._file.blank

    @property
    def fingerprints(self) -> list[dict[str, Any]]:
        return self._file.fingerprints

    @property
    def is_lazy(self) -> bool:
        """Whether rows are tokenised when they come up."""
        return self._file.is_large

    @property
    def parts(self) -> tuple[TokenizedRows, ...]:
        """These rows alone, as the single part of a mixture (see MixedRows)."""
        return (self,)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt, or of the longest sequence if rows have completions."""
        key = "sequence_ids" if "sequence_ids" in self.keys else "prompt_ids"
        return max(len(sample[key]) for samples in self.samples for sample in samples)

    @property
    def may_leave_out(self) -> bool:
        """Whether a row that comes up later may turn out to be left out."""
        drops = self.config.too_long == "drop" or (
            self.config.completion_too_long == "drop" and self.config.max_completion_tokens is not None)
        return self.is_lazy and (drops or self.config.map is not None)

    @property
    def files(self) -> list[str]:
        """The names of the files, or those that the hub's have in its cache."""
        return self._file.files

    def row(self, index: int) -> TokenizedSamples | None:
        """Return the samples of a row, by its index below `len`; None if a large file's row is left out."""
        if not self.is_lazy:
            return self.samples[index]
        if self._last_read[0] != index:
            samples = self._tokenize(index)
            if samples is not None:
                self._check_limit(index, samples)
            self._last_read = index, samples
        return self._last_read[1]

    def has(self, index: int) -> bool:
        """Return whether a row is not left out, by its index below `len`."""
        return not self.may_leave_out or self.row(index) is not None

    def require_at_most(self, limit: int, reason: str) -> None:
        """Raise UserError if a prompt with its completion has more than `limit` tokens, because of `reason`.

        Rows that are tokenised later are checked then.
        """
        self._limit = (limit, reason)
        for number, samples in zip(self._numbers, self.samples, strict=True):
            self._check_limit(number, samples)

    def _check_limit(self, number: int, samples: TokenizedSamples) -> None:
        if self._limit is None or "sequence_ids" not in self.keys:
            return
        limit, reason = self._limit
        longest = max(len(sample["sequence_ids"]) for sample in samples)
        if longest > limit:
            raise UserError(
                f"{self._file.place(number)}: prompt and completion have {longest} tokens, and {reason}")

    def file_place_of(self, index: int) -> str:
        return self._file.place(self._numbers[index]).removeprefix("dataset ")

    def place_of_number(self, number: int) -> str:
        """Return the place of the row with this number in the file, which may be left out."""
        return self._file.short_place(number)

    def place_of(self, index: int) -> str:
        return self.place_of_number(self._numbers[index])

    def compared(self, index: int, what: Compared) -> int:
        """Return a hash of what a row says, without regard to white space."""
        return self._compared[self._numbers[index]][what]

    def _read_start(self, numbers: Sequence[int], *, is_sample: bool) -> dict[int, TokenizedSamples]:
        """Return the samples of the rows with these numbers that are not left out.

        If all of them are, and a large data set has others, the first of those that is not left out.
        """
        if self.config.map is not None:
            require_pure(self._file, numbers)
        tokenized = {
            number: samples for number in numbers if (samples := self._tokenize(number, looks=True))}
        if tokenized or is_sample:
            return tokenized
        tried = set(numbers)
        others = (number for number in range(self.num_in_file) if number not in tried)
        remaining = (
            (number, samples) for number in others if (samples := self._tokenize(number, looks=True)))
        return dict(islice(remaining, 1))

    def _tokenize(self, number: int, *, looks: bool = False) -> TokenizedSamples | None:
        """Return the samples of a row, with all keys of the graph; None if the row is left out.

        With `looks`, note what is doubtful about the row and by what it is compared with others.
        """
        row = self._file[number]
        if row is None:
            self.counts.unmapped += 1
            return None
        texts = texts_of(row, self.config, self.keys)
        if looks:
            self._look_at(number, row, texts)
        if texts.is_chat and self.tokenizer.chat_template is None:
            raise UserError(self._lacks_template(texts))
        self.counts.add_texts(texts)
        try:
            with panics_as_errors():
                samples = self._row_tokenizer.samples(texts)
        except Exception as error:  # A tokenizer may raise any exception.
            fault = self._fault(error, is_chat=texts.is_chat)
            raise UserError(f"{self._file.place(number)}: {fault}") from error
        if texts.is_chat:
            self._last_chat = number
        columns = {key: row[column_of(key)] for key in self.keys if key not in LOADER_KEYS}
        columns |= {"prompt": texts.own_prompt, DATASET_ROW: self._first_row + number}
        return tuple(columns | sample for sample in samples) if samples is not None else None

    def _look_at(self, number: int, row: Mapping[str, Any], texts: RowTexts) -> None:
        self.doubtful.look_at(
            number, row, prompt=None if texts.is_text or not texts.own_prompt else texts.own_prompt,
            completions=texts.completions, is_chat=texts.is_chat)
        self._compared[number] = compared_with(texts)

    def _fault(self, error: Exception, *, is_chat: bool) -> str:
        """Return in words why a row is not tokenised."""
        if isinstance(error, UserError) and not isinstance(error, TokenizerPanicError):
            return str(error)
        says_all = type(error) in (ValueError, TokenizerPanicError)
        fault = str(error) if says_all else f"{type(error).__name__}: {error}"
        if is_chat and self._last_chat is not None:
            fault += f"; the last good one is that of {self._file.short_place(self._last_chat)}"
        return f"the tokenizer refuses the {'chat' if is_chat else 'text'}: {fault}"

    def _why_none(self) -> str:
        """Return in words why no row is left."""
        where = f"dataset {shown_name(self.config)}"
        if self.counts.unmapped and not self.num_tokenized:
            return f"{where}: the map function leaves out every row"
        if self.counts.long_completions:
            limit = f"max_completion_tokens {self.config.max_completion_tokens}"
            return f"{where}: every completion is longer than {limit}"
        limit = f"max_prompt_tokens {self.config.max_prompt_tokens}"
        shortest = self.counts.shortest_prompt
        return f"{where}: every prompt is longer than {limit} (the shortest has {shortest} tokens)"

    def _lacks_template(self, texts: RowTexts) -> str:
        """Return the message that a row's prompt becomes a chat, but the tokenizer has no chat template."""
        where = f"dataset {shown_name(self.config)}"
        lacks = "and the tokenizer has no chat template"
        if not isinstance(texts.own_prompt, str):
            return f"{where} has chat prompts, {lacks}: give prompts as text, or add one to it"
        settings = " and ".join(self.config.chat_settings)
        makes = f"sets {settings}, which makes chats of its prompts"
        return f"{where} {makes}, {lacks}: leave {settings} out, or add a template to it"


class MixedRows:
    """The rows of the parts of a mixture."""

    def __init__(self, parts: Sequence[TokenizedRows]) -> None:
        self.parts = tuple(parts)

    def __len__(self) -> int:
        return sum(map(len, self.parts))


TokenizedDataset = TokenizedRows | MixedRows
"""The rows of a data set: of a single one, which is its own only part, or of a mixture."""


def tokenize_parts(config: DatasetConfig, **settings: Any) -> MixedRows:
    """Return the rows of each part of a data set; `settings` are those of TokenizedRows."""
    return MixedRows([TokenizedRows(part, mixture=config, **settings) for part in config.parts])
