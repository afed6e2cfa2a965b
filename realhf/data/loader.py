"""Loader: makes the Batch that a step starts with from rows of a dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from realhf.data.batch import Batch, Packed
from realhf.data.dataset import DatasetConfig, reads_pairs, row_order
from realhf.data.tokenized import TokenizedRows
from realhf.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DTYPES = {"prompt_ids": torch.long, "sequence_ids": torch.long, "response_mask": torch.float32}
"""Types of the token-level columns."""


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # Imported here, as it is slow and few ranks need it.

    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(f"tokenizer {directory}: {str(error).splitlines()[0]}") from error


class Loader(TokenizedRows):
    """The tokenised rows of a run, as batches. The `group_size` samples of a prompt have consecutive ids.

    They are copies; of a pair, they are the chosen and the rejected completion.
    """

    def __init__(
        self, config: DatasetConfig,
        *, keys: Sequence[str], tokenizer: PreTrainedTokenizerBase, group_size: int, seed: int,
    ) -> None:
        super().__init__(config, keys=keys, tokenizer=tokenizer)
        assert group_size == 2 or not reads_pairs(keys), "a pair has two samples"
        self._group_size = group_size
        self._seed = seed

    def batch(self, prompts: Sequence[int]) -> Batch:
        """Return these prompts of the run, by number, each `group_size` times."""
        order = [row for start, count in _ranges(prompts) for row in row_order(
            len(self.rows), start=start, count=count, seed=self._seed, shuffle=self.config.shuffle)]
        rows = [self.samples[i][k % len(self.samples[i])] for i in order for k in range(self._group_size)]
        ids = [prompt * self._group_size + i for prompt in prompts for i in range(self._group_size)]
        fields: dict[str, Any] = {key: [row[key] for row in rows] for key in self.keys}
        for key in fields.keys() & _DTYPES.keys():
            dtype = _DTYPES[key]
            sequences = [torch.tensor(value, dtype=dtype) for value in fields[key]]
            fields[key] = Packed.of(sequences, empty=torch.zeros(0, dtype=dtype))
        return Batch(ids, fields)


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and the length of each run of consecutive numbers."""
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        members = [number for _, number in run]
        yield members[0], len(members)
