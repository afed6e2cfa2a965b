"""Tokenises the rows of a dataset. Imports no torch, as checks use it too, with a LightTokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from realhf.data.dataset import (
    DATASET_ROW,
    IS_CHOSEN,
    LOADER_KEYS,
    DatasetConfig,
    column_of,
    completion_columns,
    load_rows,
    place,
    reads_pairs,
)
from realhf.errors import UserError


class TokenizedRows:
    """The rows that a graph with these input keys reads, with prompts and completions as token ids.

    Rows with a prompt longer than `max_prompt_tokens` are left out. With `sample`, at most that many rows,
    spread evenly over the file, are tokenised.

    `samples` has the different samples of each row, by graph key: one, or chosen and rejected of a pair.
    `rows` has the first of each.
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
        lengths = [len(samples[0]["prompt_ids"]) for samples in tokenized]
        if 0 in lengths and "prompt_ids" in keys:
            raise UserError(f"{place(config, numbers[lengths.index(0)])}: the prompt has no tokens")
        kept = [i for i, length in enumerate(lengths) if length <= config.max_prompt_tokens]
        self.samples = [tokenized[i] for i in kept]
        self.rows = [samples[0] for samples in self.samples]
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

    def equal_pairs(self) -> list[int]:
        """Return the indices of the pairs whose rejected completion is the chosen one."""
        if not reads_pairs(self.keys):
            return []
        return [i for i, (a, b) in enumerate(self.samples) if a["sequence_ids"] == b["sequence_ids"]]

    def _lengths(self) -> list[int]:
        key = "sequence_ids" if "sequence_ids" in self.keys else "prompt_ids"
        return [max(len(sample[key]) for sample in samples) for samples in self.samples]

    def _tokenize(self, row: dict[str, Any], number: int) -> tuple[dict[str, Any], ...]:
        """Return the samples of a row: columns by graph key, and `prompt_ids`."""
        prompt = row[self.config.prompt_key]
        try:
            made = self._samples(row, number)
        except UserError:
            raise
        except Exception as error:  # A chat template may raise any exception.
            how = "text" if isinstance(prompt, str) else "chat"
            what = f"the tokenizer refuses the {how}: {type(error).__name__}: {error}"
            raise UserError(f"{place(self.config, number)}: {what}") from error
        columns = {key: row[column_of(key)] for key in self.keys if key not in LOADER_KEYS}
        columns |= {"prompt": prompt, DATASET_ROW: number}
        return tuple(columns | sample for sample in made)

    def _samples(self, row: dict[str, Any], number: int) -> list[dict[str, Any]]:
        """Return the keys that the loader makes, once for each completion that the graph reads."""
        prompt = row[self.config.prompt_key]
        ids = self._prompt_ids(prompt)
        columns = completion_columns(self.config, self.keys)
        if not columns:
            return [{"prompt_ids": ids}]
        samples = []
        is_unlike = False
        for i, column in enumerate(columns):
            whole, given = self._with_completion(prompt, ids, row[column])
            if given == len(whole):
                what = f"the chat template writes nothing for the {column}"
                raise UserError(f"{place(self.config, number)}: {what}")
            is_unlike |= given < len(ids)
            mask = [0] * given + [1] * (len(whole) - given)
            samples.append(
                {"prompt_ids": ids, "sequence_ids": whole, "response_mask": mask, IS_CHOSEN: i == 0})
        self.num_unlike_prompt += is_unlike
        return samples

    def _prompt_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if self.tokenizer.chat_template is None:
            why = "has chat prompts, and the tokenizer has no chat template"
            raise UserError(f"dataset {self.config.path} {why}: give prompts as text, or add one to it")
        return self._chat(prompt, add_generation_prompt=True)

    def _with_completion(self, prompt: Any, prompt_ids: list[int], completion: Any) -> tuple[list[int], int]:
        """Return the tokens of prompt and completion, and how many of the first ones are the prompt's."""
        if isinstance(completion, str):
            eos = self.tokenizer.eos_token_id
            if eos is None:
                raise UserError("the tokenizer has no eos token, in which completions end: set its eos_token")
            learned = [*self.tokenizer.encode(completion, add_special_tokens=False), eos]
            return [*prompt_ids, *learned], len(prompt_ids)
        whole = self._chat([*prompt, *completion])
        pairs = enumerate(zip(prompt_ids, whole, strict=False))
        shorter = min(len(prompt_ids), len(whole))
        return whole, next((i for i, (ours, theirs) in pairs if ours != theirs), shorter)

    def _chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> list[int]:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, return_dict=False)
