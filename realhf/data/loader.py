"""From dataset rows to the Batch that a step starts with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from realhf.data.batch import Batch, Packed
from realhf.data.dataset import DatasetConfig, needed_columns, read_rows, require_columns, row_order
from realhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DTYPES = {"prompt_ids": torch.long, "sequence_ids": torch.long, "response_mask": torch.float32}  # by token


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # here, as it takes a second and few ranks need it

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"tokenizer {directory}: {str(error).splitlines()[0]}") from error


class Loader:
    """Tokenises rows and deals them out. The `group_size` samples of a prompt have consecutive ids."""

    def __init__(
        self, config: DatasetConfig,
        *, keys: Sequence[str], tokenizer: PreTrainedTokenizerBase, group_size: int, seed: int,
    ) -> None:
        self._keys, self._config, self._tokenizer = keys, config, tokenizer
        self._group_size, self._seed = group_size, seed
        rows = read_rows(config)
        require_columns(config, rows, needed_columns(config, keys))
        made = [self._prepare(row) for row in rows]
        lengths = [len(row["prompt_ids"]) for row in made]
        if 0 in lengths and "prompt_ids" in keys:
            raise UserError(f"dataset {config.path}: the prompt in row {lengths.index(0)} has no tokens")
        self._rows = [row for row in made if len(row["prompt_ids"]) <= config.max_prompt_tokens]
        self.num_too_long, self.max_prompt_tokens = len(made) - len(self._rows), config.max_prompt_tokens
        if not self._rows:
            limit = config.max_prompt_tokens
            raise UserError(f"dataset {config.path}: every prompt is longer than max_prompt_tokens {limit}")

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt, or of the longest whole sequence where rows are such."""
        key = "sequence_ids" if "sequence_ids" in self._keys else "prompt_ids"
        return max(len(row[key]) for row in self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, *, first_prompt: int, num_prompts: int) -> Batch:
        """Prompts number `first_prompt` onwards of the run, each `group_size` times."""
        seed, shuffle = self._seed, self._config.shuffle
        order = row_order(len(self._rows), start=first_prompt, count=num_prompts, seed=seed, shuffle=shuffle)
        rows = [self._rows[i] for i in order for _ in range(self._group_size)]
        first_id = first_prompt * self._group_size
        fields: dict[str, Any] = {key: [row[key] for row in rows] for key in self._keys}
        for key in fields.keys() & _DTYPES.keys():
            fields[key] = Packed.of([torch.tensor(value, dtype=_DTYPES[key]) for value in fields[key]])
        return Batch([first_id + i for i in range(len(rows))], fields)

    def _prepare(self, row: dict[str, Any]) -> dict[str, Any]:
        prompt, tokenizer = row[self._config.prompt_key], self._tokenizer
        if isinstance(prompt, str):
            ids = tokenizer.encode(prompt)
        elif tokenizer.chat_template is None:
            raise UserError(f"dataset {self._config.path} has chat prompts, the tokenizer has no template")
        else:
            ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
        made = {**row, "prompt": prompt, "prompt_ids": ids}
        if "sequence_ids" in self._keys:
            completion = tokenizer.encode(row[self._config.completion_key], add_special_tokens=False)
            made["sequence_ids"] = [*ids, *completion, tokenizer.eos_token_id]
            made["response_mask"] = [0] * len(ids) + [1] * (len(completion) + 1)
        return made
