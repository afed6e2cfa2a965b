"""Tokenises the rows of a dataset. Imports no torch, as checks use it too, with a LightTokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Any, Literal

from realhf.data.conversations import IS_QUESTION, IS_WHOLE, as_messages, is_continued
from realhf.data.dataset import (
    DATASET_ROW,
    IS_CHOSEN,
    LOADER_KEYS,
    DatasetConfig,
    column_of,
    completion_columns,
    dataset_name,
    reads_pairs,
)
from realhf.data.doubtful_rows import DoubtfulRows, compared_text
from realhf.data.light_tokenizer import TokenizerPanicError, panics_as_errors, unknown_token_id
from realhf.data.rows import RowFault, open_rows, require_pure, spread
from realhf.data.sequence_tokens import ChatTokens, Oddities, TextTokens
from realhf.errors import UserError

TokenizedSamples = tuple[dict[str, Any], ...]
"""The samples of a row, each as key of the graph -> value: one, or the chosen and the rejected of a pair."""


Compared = Literal["prompt", "question", "row"]
"""What is compared of rows: the prompt with its tools, what the user says in it, or the whole row."""


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
        self._file = open_rows(config, keys, mixture=mixture, row_faults=row_faults)
        self._first_row = first_row
        self.num_in_file = len(self._file)
        self.oddities = Oddities()
        read = [column_of(key) for key in keys if key not in LOADER_KEYS]
        self.doubtful = DoubtfulRows(tokenizer, config, read=read)
        self._compared: dict[int, dict[Compared, int]] = {}
        """Hashes of the prompt of a row, of what the user says in it, and of the whole row, by its number."""
        self._looks = True
        """Whether rows are looked at: those that are read at the start."""
        self._texts = TextTokens(tokenizer, self.oddities)
        self._chats = ChatTokens(
            tokenizer, config.chat_template_kwargs, config.assistant_only, self.oddities)
        self.num_chats = 0
        self.num_own_systems = 0
        """Number of chats whose first message is a system message of the row."""
        self.has_tools = False
        self.num_unmapped = 0
        self.num_too_long = 0
        self.num_long_completions = 0
        self.num_cut = 0
        self.num_torn_chats = 0
        """Number of prompts that are cut and that a chat template has written."""
        self._shortest: int | None = None
        self._limit: tuple[int, str] | None = None
        self._last_chat: str | None = None
        """The place of the last chat that the chat template has rendered."""
        numbers = self._file.tried() if sample is None else spread(self.num_in_file, sample)
        if config.map is not None:
            require_pure(self._file, numbers)
        tokenized = [(number, samples) for number in numbers if (samples := self._tokenize(number))]
        if not tokenized and sample is None and len(numbers) < self.num_in_file:
            tokenized = self._first_kept(exclude=numbers)
        self.samples = [samples for _, samples in tokenized]
        self.rows = [samples[0] for samples in self.samples]
        self._numbers = [number for number, _ in tokenized]
        self.num_tokenized = len(numbers) - self.num_unmapped
        self._last_read: tuple[int, TokenizedSamples | None] = (-1, None)
        self._looks = False
        if not tokenized:
            raise UserError(self._why_none())

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
    def num_left_out(self) -> int:
        return self.num_unmapped + self.num_too_long + self.num_long_completions

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
        return max(self._lengths())

    @property
    def may_leave_out(self) -> bool:
        """Whether a row that comes up later may turn out to be left out."""
        drops = self.config.too_long == "drop" or (
            self.config.completion_too_long == "drop" and self.config.max_completion_tokens is not None)
        return self.is_lazy and (drops or self.config.map is not None)

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

    def keeps(self, index: int) -> bool:
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

    def unknown(self) -> list[int]:
        """Return the indices of the rows with text that the tokenizer does not know."""
        unknown_id = unknown_token_id(self.tokenizer)
        if unknown_id is None:
            return []
        key = "sequence_ids" if "sequence_ids" in self.keys else "prompt_ids"
        return [i for i, row in enumerate(self.samples) if any(unknown_id in sample[key] for sample in row)]

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

    @property
    def files(self) -> list[str]:
        """The names of the files, or those that the hub's have in its cache."""
        return self._file.files

    def equal_pairs(self) -> list[int]:
        """Return the indices of the pairs whose rejected completion is the chosen one."""
        if not reads_pairs(self.keys):
            return []
        return [i for i, (a, b) in enumerate(self.samples) if a["sequence_ids"] == b["sequence_ids"]]

    def _lengths(self) -> list[int]:
        key = "sequence_ids" if "sequence_ids" in self.keys else "prompt_ids"
        return [max(len(sample[key]) for sample in samples) for samples in self.samples]

    def _first_kept(self, *, exclude: Sequence[int]) -> list[tuple[int, TokenizedSamples]]:
        """Return the first row that is not left out, beside those that have been tried; none if all are."""
        tried = set(exclude)
        others = (number for number in range(self.num_in_file) if number not in tried)
        remaining = ((number, samples) for number in others if (samples := self._tokenize(number)))
        return [*islice(remaining, 1)]

    def _why_none(self) -> str:
        """Return in words why no row is left."""
        where = f"dataset {dataset_name(self.config)}"
        if self.num_unmapped and not self.num_tokenized:
            return f"{where}: the map function leaves out every row"
        if self.num_long_completions:
            limit = f"max_completion_tokens {self.config.max_completion_tokens}"
            return f"{where}: every completion is longer than {limit}"
        limit = f"max_prompt_tokens {self.config.max_prompt_tokens}"
        return f"{where}: every prompt is longer than {limit} (the shortest has {self._shortest} tokens)"

    def _tokenize(self, number: int) -> TokenizedSamples | None:
        """Return the samples of a row, with all keys of the graph; None if the row is left out."""
        row = self._file[number]
        if row is None:
            self.num_unmapped += 1
            return None
        prompt = row[self.config.prompt_key]
        is_chat = not isinstance(prompt, str) or self.config.makes_chats
        try:
            with panics_as_errors():
                samples = self._samples(row, number)
        except Exception as error:  # A tokenizer may raise any exception.
            if isinstance(error, UserError) and not isinstance(error, TokenizerPanicError):
                raise
            says_all = type(error) in (ValueError, TokenizerPanicError)
            what = str(error) if says_all else f"{type(error).__name__}: {error}"
            if is_chat and self._last_chat is not None:
                what += f"; the last good one is that of {self._last_chat}"
            how = "chat" if is_chat else "text"
            raise UserError(f"{self._file.place(number)}: the tokenizer refuses the {how}: {what}") from error
        if is_chat:
            self._last_chat = self._file.short_place(number)
        columns = {key: row[column_of(key)] for key in self.keys if key not in LOADER_KEYS}
        columns |= {"prompt": prompt, DATASET_ROW: self._first_row + number}
        return tuple(columns | sample for sample in samples) if samples is not None else None

    def _samples(self, row: dict[str, Any], number: int) -> list[dict[str, Any]] | None:
        """Return the values of the loader's own keys, once for each completion that the graph reads.

        Return None if the prompt or a completion is too long, so that the row is left out.
        """
        prompt = row[self.config.prompt_key]
        is_text = row.get(IS_WHOLE) == self.config.text_key
        prompt = prompt if is_text else self._chat_of(prompt)
        if not isinstance(prompt, str) and self.tokenizer.chat_template is None:
            raise UserError(self._lacks_template(row[self.config.prompt_key]))
        tools = self._tools(row)
        if not isinstance(prompt, str):
            own = row[self.config.prompt_key]
            self.num_chats += 1
            self.num_own_systems += not isinstance(own, str) and bool(own) and own[0]["role"] == "system"
            self.has_tools |= bool(tools)
        columns = completion_columns(self.config, self.keys)
        completions = [row[column] for column in columns]
        if isinstance(prompt, str):
            ids = self._texts.prompt(prompt)
        else:
            completions = [as_messages(completion) for completion in completions]
            ids = self._chats.prompt(prompt, tools, completion=completions[0] if completions else None)
        self._look_at(
            row, number, tools, {column: row[column] for column in columns}, is_text=is_text,
            is_chat=not isinstance(prompt, str))
        if not ids and "prompt_ids" in self.keys:
            raise UserError(f"{self._file.place(number)}: the prompt has no tokens")
        within_limit = self._kept_of_prompt(ids, number, is_chat=not isinstance(prompt, str))
        if within_limit is None:
            return None
        if not completions:
            self.oddities.num_continued += not isinstance(prompt, str) and is_continued(prompt, None)
            self.oddities.num_questions += bool(row.get(IS_QUESTION))
            return [{"prompt_ids": ids[within_limit]}]
        samples: list[dict[str, Any]] = []
        is_whole = bool(row.get(IS_WHOLE))
        try:
            if isinstance(prompt, str):
                sequences = self._texts.sequences(prompt, completions, is_whole=is_whole)
            else:
                sequences = self._chats.sequences(prompt, completions, tools, is_whole=is_whole)
        except UserError as error:
            raise UserError(f"{self._file.place(number)}: {error}") from error
        for i, (column, whole) in enumerate(zip(columns, sequences, strict=True)):
            prompt_length = whole.prompt_length
            if not any(whole.mask[prompt_length:]):
                raise UserError(
                    f"{self._file.place(number)}: the chat template writes nothing for the {column}")
            learned = self._cut_completion(whole.ids[prompt_length:], column, number)
            if learned is None:
                return None
            stop = prompt_length + len(learned)
            mask = [*whole.mask[:prompt_length][within_limit], *whole.mask[prompt_length:stop]]
            if not any(mask):  # The limit leaves nothing that is learned.
                self.num_long_completions += 1
                return None
            before = whole.ids[:prompt_length][within_limit]
            samples.append({
                "prompt_ids": ids[within_limit], "sequence_ids": [*before, *learned], "response_mask": mask,
                IS_CHOSEN: i == 0})
        return samples

    def _look_at(
        self, row: dict[str, Any], number: int, tools: Any, completions: dict[str, Any],
        *, is_text: bool, is_chat: bool,
    ) -> None:
        """Keep what is doubtful about a row, and by what it is compared with others."""
        if not self._looks:
            return
        prompt = row[self.config.prompt_key]
        self.doubtful.look_at(
            number, row, prompt=None if is_text else prompt, completions=completions, is_chat=is_chat)
        asked = (compared_text(prompt), json.dumps(tools, default=str))
        messages = prompt if isinstance(prompt, list) else []
        said = [message for message in messages if message["role"] == "user"]
        self._compared[number] = {
            "prompt": hash(asked), "row": hash((asked, *map(compared_text, completions.values()))),
            "question": hash(compared_text(said or prompt))}

    def _kept_of_prompt(self, ids: list[int], number: int, *, is_chat: bool) -> slice | None:
        """Return which tokens of a prompt are kept; None if its row is left out."""
        limit = self.config.max_prompt_tokens
        how = self.config.too_long
        self._shortest = min(len(ids), self._shortest or len(ids))
        if len(ids) <= limit:
            return slice(None)
        if how == "error":
            raise UserError(
                f"{self._file.place(number)}: the prompt has {len(ids)} tokens, "
                f"and max_prompt_tokens is {limit} (too_long is error)")
        if how == "drop":
            self.num_too_long += 1
            return None
        self.num_cut += 1
        self.num_torn_chats += is_chat
        return slice(limit) if how == "keep_start" else slice(-limit, None)

    def _cut_completion(self, ids: list[int], column: str, number: int) -> list[int] | None:
        """Return the tokens of a completion that are kept; None if its row is left out."""
        limit = self.config.max_completion_tokens
        how = self.config.completion_too_long
        if limit is None or len(ids) <= limit:
            return ids
        if how == "error":
            raise UserError(
                f"{self._file.place(number)}: the {column} has {len(ids)} tokens, "
                f"and max_completion_tokens is {limit} (completion_too_long is error)")
        if how == "drop":
            self.num_long_completions += 1
            return None
        self.num_cut += 1
        return ids[:limit]

    def _chat_of(self, prompt: Any) -> Any:
        """Return a prompt: as chat messages, with the system prompt, if the config makes chats."""
        system = self.config.system_prompt
        if isinstance(prompt, str) and self.config.makes_chats:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str) or system is None or prompt[0]["role"] == "system":
            return prompt
        return [{"role": "system", "content": system}, *prompt]

    def _tools(self, row: dict[str, Any]) -> list[dict[str, Any]] | None:
        if self.config.tools_key is not None:
            return row[self.config.tools_key] or None
        return list(self.config.tools) or None

    def _lacks_template(self, prompt: Any) -> str:
        """Return the message that a row's prompt becomes a chat, but the tokenizer has no chat template."""
        where = f"dataset {dataset_name(self.config)}"
        lacks = "and the tokenizer has no chat template"
        if not isinstance(prompt, str):
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
