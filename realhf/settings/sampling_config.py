"""SamplingConfig: the settings by which the tokens of a response are chosen. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from realhf.user_input.field_types import check_types, require


@dataclass(frozen=True)
class SamplingConfig:
    """Settings of sampling; docs/generation.md says which options of transformers and vLLM they equal.

    `logit_bias`, the penalties, the bad words and `min_new_tokens` change the logits, in this order; then
    temperature, `top_k`, `top_p` and `min_p` apply. `temperature=0` is greedy: the last three have no effect.
    Lists become tuples, a text becomes a tuple of one, and a mapping becomes a tuple of pairs.
    """

    max_new_tokens: int = 256  # Most tokens of a response.
    temperature: float = 1.0  # Logits are divided by it; 0: always take the most probable token.
    top_k: int = 0  # Sample among this many most probable tokens; 0: among all.
    top_p: float = 1.0  # Sample among the most probable tokens that together have this probability.
    min_p: float = 0.0
    """Sample among the tokens with at least this share, from 0 to 1, of the highest probability."""
    stop: tuple[str, ...] = ()
    """Texts that end a response: its last token is the first with which its text contains one of them."""
    stop_token_ids: tuple[int, ...] = ()  # Tokens that end a response, as the model's eos tokens do.
    ignore_eos: bool = False  # Whether responses go on after the model's eos tokens.
    min_new_tokens: int = 0
    """A response has at least this many tokens before the one that ends it; at most `max_new_tokens`."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens that are in the prompt or the response are divided by it, negative ones are
    multiplied by it; above 0, and 1 changes nothing."""
    presence_penalty: float = 0.0  # Subtracted from the logits of the response's tokens; from -2 to 2.
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit each time that the response has the token; from -2 to 2."""
    logit_bias: tuple[tuple[int, float], ...] = ()  # Pairs of a token id and what is added to its logit.
    bad_words: tuple[str, ...] = ()
    """Texts whose tokens, with and without a space before them, may not be sampled in this sequence."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids: the last id of each may not be sampled directly after the others."""

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "logit_bias", "bad_words", "bad_word_ids"):
            object.__setattr__(self, name, _as_tuple(getattr(self, name)))
        check_types(self, "sampling.")
        require(self.max_new_tokens >= 1, "sampling.max_new_tokens", self.max_new_tokens, "be at least 1")
        legal = 0 <= self.temperature < inf
        require(legal, "sampling.temperature", self.temperature, "be a number of at least 0")
        require(self.top_k >= 0, "sampling.top_k", self.top_k, "not be negative")
        require(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "be above 0 and at most 1")
        require(0 <= self.min_p <= 1, "sampling.min_p", self.min_p, "be from 0 to 1")
        rule = f"be from 0 to sampling.max_new_tokens, {self.max_new_tokens}"
        legal = 0 <= self.min_new_tokens <= self.max_new_tokens
        require(legal, "sampling.min_new_tokens", self.min_new_tokens, rule)
        legal = 0 < self.repetition_penalty < inf
        rule = "be a number above 0"
        require(legal, "sampling.repetition_penalty", self.repetition_penalty, rule)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            require(-2 <= value <= 2, f"sampling.{name}", value, "be from -2 to 2")
        self._check_words()

    def _check_words(self) -> None:
        """Raise ValueError unless the texts are not empty and the token ids not negative."""
        for name in ("stop", "bad_words", "bad_word_ids"):
            value = getattr(self, name)
            require(all(map(len, value)), f"sampling.{name}", value, "have no empty part")
        for name, token in self.token_ids:
            require(token >= 0, f"sampling.{name}", getattr(self, name), "have no negative token id")
        tokens = [token for token, _ in self.logit_bias]
        rule = "have each token id once"
        require(len(set(tokens)) == len(tokens), "sampling.logit_bias", self.logit_bias, rule)
        legal = all(-inf < bias < inf for _, bias in self.logit_bias)
        require(legal, "sampling.logit_bias", self.logit_bias, "have finite numbers")

    @property
    def token_ids(self) -> list[tuple[str, int]]:
        """Return all token ids in the settings, each with the name of its field."""
        named_ids = [("stop_token_ids", token) for token in self.stop_token_ids]
        named_ids += [("logit_bias", token) for token, _ in self.logit_bias]
        return named_ids + [("bad_word_ids", token) for tokens in self.bad_word_ids for token in tokens]

    @property
    def reads_text(self) -> bool:
        """Whether the settings have texts, for which a tokenizer is needed."""
        return bool(self.stop or self.bad_words)

    @property
    def penalizes(self) -> bool:
        """Whether there is a penalty."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def greedy(self) -> SamplingConfig:
        """Return these settings, but with the most probable token always taken."""
        return replace(self, temperature=0.0, top_k=0, top_p=1.0, min_p=0.0)


def _as_tuple(value: Any) -> Any:
    """Return a text as a tuple of one, a mapping as a tuple of pairs, and lists as tuples."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(value.items())
    return tuple(map(_as_part, value)) if isinstance(value, list | tuple) else value


def _as_part(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
