"""Stop strings: finds the token with which the text of a response first contains one of some strings.

The text is read byte by byte, so that a string may begin and end inside tokens, and characters may be split
over tokens. Only tokens on the host are read; all ranks of a replica find the same ends.

Shape suffix B: samples.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from realhf.data.token_texts import token_bytes
from realhf.inference.block_tables import Flags, Integers
from realhf.inference.drawn_samples import DrawnSamples


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

    def advance(self, samples: DrawnSamples, numbers: Integers, tokens_B: Integers) -> Flags:
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
