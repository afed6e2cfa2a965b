"""The tokens of a pass, in which what several sequences begin with is computed once.

The samples of a prompt begin with the same tokens, and hidden states of these depend on nothing behind them.
So one sequence of each prompt passes whole, and of the others only what follows the prompt, which attends to
the prompt of the first one (Prefix Grouper, arXiv:2506.05433). Prompts often begin alike, too: with a system
message, or with examples. What all prompts of a pass have in common passes with the first of them.

Outputs and gradients are the same but for rounding: a shared hidden state gets the sum of the gradients that
its copies would get. Limits of tokens in a micro-batch count every copy.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from realhf.attention.interface import Prefix, num_common_tokens
from realhf.data.batch import Batch, Packed
from realhf.devices.chunk_sizes import LEAST_PREFIX, LEAST_SHARE
from realhf.nn.transformer import Transformer

Integers = NDArray[np.int64]


class PassTokens(NamedTuple):
    """The tokens of a pass, in pieces: whole sequences, or what follows the prefix of a sequence."""

    ids_T: torch.Tensor
    lens: list[int]
    prefixes: tuple[Prefix, ...] = ()
    row_of_token: Integers | None = None
    """The row of the pass that has each token of the samples; None: there is one row per token, in order."""


def pass_tokens(model: Transformer, samples: Batch, key: str) -> PassTokens:
    """Return the tokens of a column for a pass through the model, shared where it can share them."""
    tokens: Packed = samples[key]
    whole = PassTokens(tokens.values, tokens.lengths)
    prompt_lens = _prompt_lens(samples, key)
    if not prompt_lens or not model.shares_prefixes(max(tokens.lengths, default=0)):
        return whole
    model.check_lengths(tokens.lengths)
    return _shared(tokens, prompt_lens) or whole


def keep_prompts_together(
    samples: Batch, key: str, groups: Sequence[Sequence[int]], *, max_tokens: int
) -> list[list[int]]:
    """Return groups of samples that must be in one micro-batch, joined to those of a prompt if they fit."""
    prompt_lens = _prompt_lens(samples, key)
    if prompt_lens is None:
        return [list(group) for group in groups]
    tokens: Packed = samples[key]
    sequences = tokens.host_values.split(tokens.lengths)
    prompts = [sequences[group[0]][: prompt_lens[group[0]]].numpy() for group in groups]
    joined = []
    for members in _by_prompt(prompts):
        num_tokens: int | None = None
        for group in (groups[member] for member in members):
            size = sum(tokens.lengths[i] for i in group)
            if num_tokens is None or num_tokens + size > max_tokens:
                joined.append(list[int]())
                num_tokens = 0
            joined[-1] += group
            num_tokens += size
    return joined


def _prompt_lens(samples: Batch, key: str) -> list[int] | None:
    """Return how many tokens of each sequence may be shared: those before its response, but not its last one;
    None if the samples have no mask that tells."""
    mask = samples.fields.get("response_mask")
    if mask is None or mask.lengths != samples[key].lengths:
        return None
    lens = []
    for row in (part.numpy() for part in mask.like(mask.host_values).split()):
        begins = np.flatnonzero(row)
        lens.append(max(0, min(int(begins[0]) if len(begins) else len(row), len(row) - 1)))
    return lens


def _shared(tokens: Packed, prompt_lens: Sequence[int]) -> PassTokens | None:
    """Return the tokens of a pass that computes prefixes once; None if that would save too little."""
    pieces = _Pieces(tokens)
    prompts = [ids[:count] for ids, count in zip(pieces.sequences, prompt_lens, strict=True)]
    groups = _by_prompt(prompts)
    leaders = sorted((group[0] for group in groups), key=lambda i: tokens.lengths[i])
    num_common = num_common_tokens([prompts[i] for i in leaders])
    saved = num_common * (len(leaders) - 1)
    saved += sum(len(prompts[group[0]]) * (len(group) - 1) for group in groups)
    if saved < LEAST_SHARE * len(tokens.values):
        return None
    pieces.add(leaders[:1])
    pieces.add(leaders[1:], behind=leaders[0], num_shared=num_common)
    for group in groups:
        # Neighbours of equal length share calls of attention's kernels.
        others = sorted(group[1:], key=lambda i: tokens.lengths[i])
        pieces.add(others, behind=group[0], num_shared=len(prompts[group[0]]))
    kept = torch.from_numpy(np.concatenate(pieces.kept))
    return PassTokens(tokens.values[kept], pieces.lens, tuple(pieces.prefixes), pieces.row_of_token)


class _Pieces:
    """The pieces of sequences that pass, to which sequences are added."""

    def __init__(self, tokens: Packed) -> None:
        ids = tokens.host_values.numpy()
        stops = np.cumsum(tokens.lengths, dtype=np.int64)
        self.sequences = np.split(ids, stops[:-1])
        self._starts = stops - tokens.lengths
        self.row_of_token = np.empty(len(ids), np.int64)
        self.kept: list[Integers] = []
        """The places of the tokens that pass, in order."""
        self.lens: list[int] = []
        self.prefixes: list[Prefix] = []
        self._num_rows = 0

    def add(self, sequences: Sequence[int], *, behind: int = 0, num_shared: int = 0) -> None:
        """Add what sequences have behind their first `num_shared` tokens, which are those of the sequence
        `behind` as well."""
        first_row = self._num_rows
        before = self.row_of_token[self._starts[behind] :][:num_shared].copy()
        for i in sequences:
            start = self._starts[i]
            stop = start + len(self.sequences[i])
            self.row_of_token[start : start + num_shared] = before
            self.kept.append(np.arange(start + num_shared, stop))
            self.lens.append(len(self.kept[-1]))
            self.row_of_token[start + num_shared : stop] = self._num_rows + np.arange(self.lens[-1])
            self._num_rows += self.lens[-1]
        if num_shared and sequences:
            runs = np.split(before, np.flatnonzero(np.diff(before) != 1) + 1)
            keys = tuple(slice(int(run[0]), int(run[-1]) + 1) for run in runs)
            self.prefixes.append(Prefix(slice(first_row, self._num_rows), keys))


def _by_prompt(prompts: Sequence[NDArray[np.integer]]) -> list[list[int]]:
    """Return the sequences of each prompt; one with a short prompt stands alone."""
    groups: dict[bytes | int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        groups.setdefault(prompt.tobytes() if len(prompt) >= LEAST_PREFIX else i, []).append(i)
    return list(groups.values())
