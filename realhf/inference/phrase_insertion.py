"""PhraseInserter: decides which sampled tokens a phrase replaces (see `realhf.calls`).

The decision depends on a sample's tokens alone, so that it is the same on every layout and however the sample
is split into rounds. All tensors stay on the device.

Shape suffixes: B samples that get a token, A tokens before the phrase.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from realhf.calls import InsertedPhrase
from realhf.devices.pinned import upload
from realhf.inference.block_tables import Integers
from realhf.inference.drawn_samples import DrawnSamples


@dataclass(frozen=True)
class Insertions:
    """Which of the samples that get a token get one of the phrase."""

    is_inserted_B: Tensor
    phrase_B: Tensor

    def apply(self, tokens_B: Tensor, logprobs_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and log-probs, with tokens of the phrase in their places, whose log-probs are
        0."""
        tokens_B = torch.where(self.is_inserted_B, self.phrase_B, tokens_B)
        return tokens_B, logprobs_B.masked_fill(self.is_inserted_B, 0.0)


class PhraseInserter:
    """Decides once for each sample, when it has as many tokens as precede the phrase."""

    def __init__(self, inserted: InsertedPhrase, device: torch.device) -> None:
        self._num_before = inserted.after_tokens
        self._phrase = upload(np.array(inserted.phrase, np.int64), device)
        self._end = upload(np.array(inserted.end, np.int64), device)
        self._is_decided = np.zeros(0, bool)
        self._is_interrupted = torch.zeros(0, dtype=torch.bool, device=device)

    def insertions(self, samples: DrawnSamples, numbers: Sequence[int]) -> Insertions | None:
        """Return what replaces the next tokens of these samples; None if none of them is replaced."""
        rows = np.array(numbers, np.int64)
        at = samples.num_drawn[rows] + samples.lengths[rows] - self._num_before
        is_place = (at >= 0) & (at < len(self._phrase))
        if not is_place.any():
            return None
        self._grow(int(rows.max()) + 1)
        self._decide(samples, rows[is_place])
        device = self._phrase.device
        numbers_3B = upload(np.stack((rows, is_place, at.clip(0, len(self._phrase) - 1))), device)
        is_inserted_B = self._is_interrupted[numbers_3B[0]] & numbers_3B[1].bool()
        return Insertions(is_inserted_B, self._phrase[numbers_3B[2]])

    def _grow(self, size: int) -> None:
        if (lacking := size - len(self._is_decided)) > 0:
            self._is_decided = np.pad(self._is_decided, (0, lacking))
            self._is_interrupted = torch.nn.functional.pad(self._is_interrupted, (0, lacking))

    def _decide(self, samples: DrawnSamples, rows: Integers) -> None:
        """Decide about those of these samples for which that has not happened yet."""
        rows = rows[~self._is_decided[rows]]
        if len(rows):
            self._is_decided[rows] = True
            tokens_BA = self._first_tokens(samples, rows)
            has_ended_B = self._contain_end(tokens_BA)
            self._is_interrupted[upload(rows, has_ended_B.device)] = ~has_ended_B

    def _first_tokens(self, samples: DrawnSamples, rows: Integers) -> Tensor:
        """Return the first tokens of responses; those of earlier rounds are at the ends of their prompts."""
        count = self._num_before
        earlier_BA = np.zeros((len(rows), count), np.int64)
        for i, row in enumerate(rows.tolist()):
            prompt = samples.prompts[row]
            start = len(prompt) - int(samples.num_drawn[row])
            earlier = prompt[start : start + count]
            earlier_BA[i, : len(earlier)] = earlier
        device = samples.tokens.device
        num_earlier_B1 = upload(samples.num_drawn[rows][:, None], device)
        position_A = torch.arange(count, device=device)
        column_BA = (position_A - num_earlier_B1 + 1).clamp(min=0)  # Column 0 is the last one before a round.
        tokens_BA = samples.tokens[upload(rows, device)[:, None], column_BA]
        return torch.where(position_A < num_earlier_B1, upload(earlier_BA, device), tokens_BA)

    def _contain_end(self, tokens_BA: Tensor) -> Tensor:
        """Return which rows contain the tokens that end thinking, one after the other."""
        size = len(self._end)
        if size > tokens_BA.shape[1]:
            return torch.zeros(len(tokens_BA), dtype=torch.bool, device=tokens_BA.device)
        return (tokens_BA.unfold(1, size, 1) == self._end).all(-1).any(-1)
