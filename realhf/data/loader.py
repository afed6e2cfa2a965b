"""From dataset rows to the Batch that a step starts with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from realhf.data.batch import Batch, Packed
from realhf.data.dataset import DatasetConfig, row_order
from realhf.data.tokenized import TokenizedRows
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


class Loader(TokenizedRows):
    """Deals tokenised rows out. The `group_size` samples of a prompt have consecutive ids."""

    def __init__(
        self, config: DatasetConfig,
        *, keys: Sequence[str], tokenizer: PreTrainedTokenizerBase, group_size: int, seed: int,
    ) -> None:
        super().__init__(config, keys=keys, tokenizer=tokenizer)
        self._group_size, self._seed = group_size, seed

    def batch(self, *, first_prompt: int, num_prompts: int) -> Batch:
        """Prompts number `first_prompt` onwards of the run, each `group_size` times."""
        seed, shuffle = self._seed, self.config.shuffle
        order = row_order(len(self.rows), start=first_prompt, count=num_prompts, seed=seed, shuffle=shuffle)
        rows = [self.rows[i] for i in order for _ in range(self._group_size)]
        first_id = first_prompt * self._group_size
        fields: dict[str, Any] = {key: [row[key] for row in rows] for key in self.keys}
        for key in fields.keys() & _DTYPES.keys():
            fields[key] = Packed.of([torch.tensor(value, dtype=_DTYPES[key]) for value in fields[key]])
        return Batch([first_id + i for i in range(len(rows))], fields)
