"""RolloutBuffer: the samples of a generation, and the tokens that have been drawn for them so far."""

from collections.abc import Sequence
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
import torch

from realhf.data.batch import Batch, Packed
from realhf.inference.block_tables import Integers
from realhf.inference.scheduler import Prompt
from realhf.nn.packed import token_positions

Size = tuple[int, int]
"""Tokens of a prompt, and number of samples that continue it."""


class PromptGroup(NamedTuple):
    """A prompt, and the ids of the samples that continue it."""

    tokens: list[int]
    ids: list[int]

    @property
    def size(self) -> Size:
        return len(self.tokens), len(self.ids)


def by_prompt(prompts: Sequence[list[int]], ids: Sequence[int]) -> list[PromptGroup]:
    """Group adjacent samples that have equal prompts."""
    runs = [list(run) for _, run in groupby(range(len(prompts)), key=prompts.__getitem__)]
    return [PromptGroup(prompts[run[0]], [ids[i] for i in run]) for run in runs]


def pack_groups(groups: Sequence[PromptGroup]) -> torch.Tensor:
    """Return the groups as bytes, to be sent to other ranks."""
    tokens = [torch.tensor(group.tokens, dtype=torch.long) for group in groups]
    packed = Packed.of(tokens, empty=torch.zeros(0, dtype=torch.long))
    return Batch(list(range(len(groups))), {"tokens": packed, "ids": [group.ids for group in groups]}).pack()


def unpack_groups(data: torch.Tensor) -> list[PromptGroup]:
    batch = Batch.unpack(data)
    tokens = batch["tokens"].split()
    return [PromptGroup(prompt.tolist(), ids) for prompt, ids in zip(tokens, batch["ids"], strict=True)]


class RolloutBuffer:
    """Samples, numbered in the order of their arrival; it grows when more than `capacity` arrive."""

    def __init__(self, capacity: int, *, max_new_tokens: int, ends: torch.Tensor) -> None:
        """`ends` says for every token of the vocabulary whether it ends a sample."""
        self.prompts: list[list[int]] = []
        self.ids = np.zeros(capacity, np.int64)
        self.lengths = np.zeros(capacity, np.int64)
        """Drawn tokens of each sample."""
        self.finished = np.zeros(capacity, bool)
        self.num_ended = 0
        self.num_tokens = 0
        """Tokens drawn so far, of all samples."""
        self.tokens = torch.zeros(capacity, max_new_tokens, dtype=torch.long, device=ends.device)
        self.logprobs = torch.zeros(capacity, max_new_tokens, dtype=torch.float64, device=ends.device)
        self._max_new_tokens = max_new_tokens
        self._ends = ends

    def add(self, group: PromptGroup) -> Prompt:
        """Add the samples of a group and return it in the scheduler's form."""
        first = len(self.prompts)
        self.prompts += [group.tokens] * len(group.ids)
        if (lacking := len(self.prompts) - len(self.ids)) > 0:
            self._grow(max(lacking, len(self.ids) // 8))
        self.ids[first : len(self.prompts)] = group.ids
        return Prompt(group.tokens, list(range(first, len(self.prompts))))

    def _grow(self, count: int) -> None:
        self.ids, self.lengths = (np.pad(numbers, (0, count)) for numbers in (self.ids, self.lengths))
        self.finished = np.pad(self.finished, (0, count))
        self.tokens, self.logprobs = (
            torch.cat([x, x.new_zeros(count, x.shape[1])]) for x in (self.tokens, self.logprobs))

    def history(self, number: int) -> list[int]:
        """Return the prompt of a sample and all of its drawn tokens."""
        return self.prompts[number] + self.tokens[number, : self.lengths[number]].tolist()

    def append(self, numbers: Integers, tokens_B: torch.Tensor) -> list[bool]:
        """Append one token to each of these samples; return for each whether that was its last."""
        self.tokens[self.at(numbers)] = tokens_B
        finished = self._ends[tokens_B].cpu().numpy()
        self.lengths[numbers] += 1
        self.finished[numbers] = finished
        ended = finished | (self.lengths[numbers] == self._max_new_tokens)
        self.num_ended += int(ended.sum())
        self.num_tokens += len(ended)
        return ended.tolist()

    def at(self, numbers: Integers, *, back: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index in `tokens` of each sample's next token, or of the one `back` positions before."""
        device = self.tokens.device
        lengths = self.lengths[numbers] - back
        return torch.from_numpy(numbers).to(device), torch.from_numpy(lengths).to(device)


def columns(parts: Sequence[RolloutBuffer], *, wide: torch.dtype) -> list:
    """Return the columns of `Generate`: sequences, response mask, log-probs and finished flags."""
    device = parts[0].tokens.device
    floats = torch.zeros(0, dtype=wide, device=device)
    sequences, masks, logprobs, finished = [floats.long()], [floats], [floats], [floats]
    lengths: list[int] = []
    for part in parts:
        count = len(part.prompts)
        prompt_lens = np.array([len(prompt) for prompt in part.prompts], np.int64)
        whole = (prompt_lens + part.lengths[:count]).tolist()
        row_T, position_T, _ = token_positions(whole, torch.device("cpu"))
        at_T = position_T - torch.from_numpy(prompt_lens)[row_T]
        drawn_T = at_T >= 0
        tokens_T = torch.empty(len(row_T), dtype=torch.long)
        tokens_T[~drawn_T] = torch.from_numpy(np.fromiter(chain.from_iterable(part.prompts), np.int64))
        at = row_T[drawn_T].to(device), at_T[drawn_T].to(device)
        drawn_T = drawn_T.to(device)
        tokens_T = tokens_T.to(device).masked_scatter_(drawn_T, part.tokens[at])
        sequences.append(tokens_T)
        masks.append(drawn_T.to(wide))
        logprobs.append(masks[-1].masked_scatter(drawn_T, part.logprobs[at].to(wide)))
        lengths += whole
        finished.append(torch.from_numpy(part.finished[:count]).to(floats))
    packed = [Packed(torch.cat(column), lengths) for column in (sequences, masks, logprobs)]
    return [*packed, torch.cat(finished)]
