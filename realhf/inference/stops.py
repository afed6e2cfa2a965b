"""Stop strings, which end a response while it is drawn, and phrases that are inserted into it.

A stop string ends a response at the token with which its text first contains the string. The text is read
byte by byte, so that a string may begin and end inside tokens, and characters may be split over tokens.
Only tokens on the host are read; all ranks of a replica find the same ends.

A phrase replaces sampled tokens of long responses (see `calls.Interruption`). The decision depends on a
sample's tokens alone, so that it is the same on every layout and however the sample is split into rounds.
Its tensors stay on the device.

Shape suffixes: B samples that get a token, A tokens before the phrase; S states of the automaton, X bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from realhf.calls import InsertedPhrase
from realhf.data.light_tokenizer import token_bytes
from realhf.devices.pinned import upload
from realhf.inference.kv_cache import Flags, Integers

if TYPE_CHECKING:
    from realhf.inference.response_buffer import ResponseBuffer


class StopMatcher:
    """An automaton over bytes that has read all texts at once (Aho & Corasick 1975), one state for each."""

    def __init__(self, stops: Sequence[str], texts: Sequence[bytes]) -> None:
        """`texts` are the bytes of each token; tokens beyond them have none."""
        patterns = [stop.encode() for stop in stops]
        self.longest = max(map(len, patterns))
        self._next_SX, self._is_end_S = _automaton(patterns)
        sizes = [*map(len, texts), 0]
        self._sizes = np.array(sizes, np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self._bytes = np.frombuffer(b"".join(texts) + bytes(1), np.uint8)

    def advance(self, states_B: Integers, tokens_B: Integers) -> tuple[Integers, Flags]:
        """Return the states after a token of each text, and which tokens complete a stop string."""
        at_B = np.minimum(tokens_B, len(self._sizes) - 1)
        sizes_B = self._sizes[at_B]
        starts_B = self._starts[at_B]
        found_B = np.zeros(len(at_B), bool)
        for i in range(int(sizes_B.max(initial=0))):
            is_inside_B = i < sizes_B
            bytes_B = self._bytes[np.where(is_inside_B, starts_B + i, 0)]
            states_B = np.where(is_inside_B, self._next_SX[states_B, bytes_B], states_B)
            found_B |= is_inside_B & self._is_end_S[states_B]
        return states_B, found_B

    def state_after(self, tokens: Sequence[int]) -> int:
        """Return the state after a text; it depends on the last `longest` bytes alone."""
        num_bytes = 0
        start = len(tokens)
        while start > 0 and num_bytes < self.longest:
            start -= 1
            num_bytes += int(self._sizes[min(tokens[start], len(self._sizes) - 1)])
        state_1 = np.zeros(1, np.int64)
        for token in tokens[start:]:
            state_1, _ = self.advance(state_1, np.array([token]))
        return int(state_1[0])


class StopStrings:
    """The states of the samples of a round, whose responses may have begun in earlier rounds."""

    def __init__(self, matcher: StopMatcher) -> None:
        self._matcher = matcher
        self._states = np.zeros(0, np.int64)
        """Each sample's state; -1: none of its tokens of this round has been read."""

    def advance(self, samples: ResponseBuffer, numbers: Integers, tokens_B: Integers) -> Flags:
        """Read the next token of some samples; return which of them complete a stop string."""
        if (lacking := int(numbers.max(initial=-1)) + 1 - len(self._states)) > 0:
            more = max(lacking, len(self._states) // 8)
            self._states = np.pad(self._states, (0, more), constant_values=-1)
        for number in numbers[self._states[numbers] < 0].tolist():
            prompt = samples.prompts[number]
            drawn = prompt[len(prompt) - int(samples.num_drawn[number]) :]
            self._states[number] = self._matcher.state_after(drawn)
        self._states[numbers], found_B = self._matcher.advance(self._states[numbers], tokens_B)
        return found_B


@lru_cache(maxsize=8)
def stop_matcher(tokenizer: str, stops: tuple[str, ...]) -> StopMatcher:
    """Return the matcher of some stop strings for the tokenizer in this directory.

    Raises ValueError if the tokenizer's files cannot be read.
    """
    try:
        return StopMatcher(stops, token_bytes(tokenizer))
    except ValueError as error:
        raise ValueError(f"sampling.stop needs the tokenizer: {error}") from error


def _automaton(patterns: Iterable[bytes]) -> tuple[Integers, Flags]:
    """Return the next state for each state and byte, and the states in which a pattern has been read.

    State 0 is the start; a state stands for the longest end of the text with which a pattern begins.
    """
    children: list[dict[int, int]] = [{}]
    is_end = [False]
    for pattern in patterns:
        state = 0
        for byte in pattern:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                is_end.append(False)
            state = children[state][byte]
        is_end[state] = True
    next_SX = np.zeros((len(children), 256), np.int64)
    queue = [(state, 0) for state in children[0].values()]  # States, shortest first, and their fallbacks.
    next_SX[0, list(children[0])] = list(children[0].values())
    for state, fallback in queue:
        is_end[state] |= is_end[fallback]
        queue += [(child, int(next_SX[fallback, byte])) for byte, child in children[state].items()]
        next_SX[state] = next_SX[fallback]
        next_SX[state, list(children[state])] = list(children[state].values())
    return next_SX, np.array(is_end)


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

    def insertions(self, samples: ResponseBuffer, numbers: Sequence[int]) -> Insertions | None:
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

    def _decide(self, samples: ResponseBuffer, rows: Integers) -> None:
        """Decide about those of these samples for which that has not happened yet."""
        rows = rows[~self._is_decided[rows]]
        if len(rows):
            self._is_decided[rows] = True
            tokens_BA = self._first_tokens(samples, rows)
            has_ended_B = self._contain_end(tokens_BA)
            self._is_interrupted[upload(rows, has_ended_B.device)] = ~has_ended_B

    def _first_tokens(self, samples: ResponseBuffer, rows: Integers) -> Tensor:
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
