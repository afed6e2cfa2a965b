"""Tokenises the rows of a dataset. Imports no torch, as checks use it too, with a LightTokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realhf.data.dataset import LOADER_KEYS, DatasetConfig, column_of, load_rows, place
from realhf.errors import UserError


class TokenizedRows:
    """The rows that a graph with these input keys reads, with prompts and completions as token ids.

    Rows with a prompt longer than `max_prompt_tokens` are left out. With `sample`, at most that many rows,
    spread evenly over the file, are tokenised.
    """

    def __init__(
        self, config: DatasetConfig, *, keys: Sequence[str], tokenizer: Any, sample: int | None = None
    ) -> None:
        self.config = config
        self.keys = tuple(keys)
        self.tokenizer = tokenizer
        rows = load_rows(config, keys)
        self.num_in_file = len(rows)
        self.num_unlike_prompt = 0
        stride = 1 if sample is None else -(-len(rows) // sample)
        numbers = range(0, len(rows), stride)
        tokenized = [self._tokenize(rows[number], number) for number in numbers]
        lengths = [len(row["prompt_ids"]) for row in tokenized]
        if 0 in lengths and "prompt_ids" in keys:
            raise UserError(f"{place(config, numbers[lengths.index(0)])}: the prompt has no tokens")
        kept = [i for i, length in enumerate(lengths) if length <= config.max_prompt_tokens]
        self.rows = [tokenized[i] for i in kept]
        self._numbers = [numbers[i] for i in kept]
        self.num_tokenized = len(tokenized)
        self.num_too_long = len(tokenized) - len(kept)
        if not kept:
            limit = f"max_prompt_tokens {config.max_prompt_tokens} (the shortest has {min(lengths)} tokens)"
            raise UserError(f"dataset {config.path}: every prompt is longer than {limit}")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt, or of the longest sequence if rows have completions."""
        return max(self._lengths())

    def place_of_longest(self) -> str:
        """Return the file and line of the longest row, in words."""
        lengths = self._lengths()
        return place(self.config, self._numbers[lengths.index(max(lengths))])

    def place_of(self, index: int) -> str:
        """Return the line or row of the file at which a row is, in words."""
        return place(self.config, self._numbers[index]).rpartition(f"{Path(self.config.path)} ")[2]

    def _lengths(self) -> list[int]:
        key = "sequence_ids" if "sequence_ids" in self.keys else "prompt_ids"
        return [len(row[key]) for row in self.rows]

    def _tokenize(self, row: dict[str, Any], number: int) -> dict[str, Any]:
        """Return the columns of a row by graph key, and `prompt_ids`."""
        prompt = row[self.config.prompt_key]
        try:
            made = {"prompt": prompt, **self._prompt_and_completion(row, number)}
        except UserError:
            raise
        except Exception as error:  # A chat template may raise any exception.
            how = "text" if isinstance(prompt, str) else "chat"
            what = f"the tokenizer refuses the {how}: {type(error).__name__}: {error}"
            raise UserError(f"{place(self.config, number)}: {what}") from error
        columns = {key: row[column_of(key)] for key in self.keys if key not in LOADER_KEYS}
        return columns | made

    def _prompt_and_completion(self, row: dict[str, Any], number: int) -> dict[str, Any]:
        prompt = row[self.config.prompt_key]
        tokenizer = self.tokenizer
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
        elif tokenizer.chat_template is None:
            why = "has chat prompts, and the tokenizer has no chat template"
            raise UserError(f"dataset {self.config.path} {why}: give prompts as text, or add one to it")
        else:
            ids = self._chat(prompt, add_generation_prompt=True)
        if "sequence_ids" not in self.keys:
            return {"prompt_ids": ids}
        completion = row[self.config.completion_key]
        if isinstance(completion, str):
            if tokenizer.eos_token_id is None:
                raise UserError("the tokenizer has no eos token, in which completions end: set its eos_token")
            learned = [*tokenizer.encode(completion, add_special_tokens=False), tokenizer.eos_token_id]
            whole = [*ids, *learned]
            given = len(ids)
        else:
            whole = self._chat([*prompt, *completion])
            given = next((i for i, pair in enumerate(zip(ids, whole, strict=False)) if pair[0] != pair[1]),
                         min(len(ids), len(whole)))
            self.num_unlike_prompt += given < len(ids)
            if given == len(whole):
                what = "the chat template writes nothing for the completion"
                raise UserError(f"{place(self.config, number)}: {what}")
        mask = [0] * given + [1] * (len(whole) - given)
        return {"prompt_ids": ids, "sequence_ids": whole, "response_mask": mask}

    def _chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=False)
