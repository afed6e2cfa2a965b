"""Interruption: ends over-long thinking by a phrase that is inserted into a response (ScaleRL,
arXiv:2510.13786). Free of torch."""

from dataclasses import dataclass
from functools import lru_cache

from realhf.data.light_tokenizer import LightTokenizer, continuation
from realhf.user_input.field_types import check_types, require


@dataclass(frozen=True)
class InsertedPhrase:
    """An Interruption in token ids: a generating call inserts `phrase` unless `end` has come before."""

    after_tokens: int
    phrase: tuple[int, ...]
    end: tuple[int, ...]


@dataclass(frozen=True)
class Interruption:
    """When thinking is interrupted, and by which text.

    If the first `after_tokens` tokens of a response do not contain the tokens of `end`, the tokens of
    `phrase` follow them instead of sampled ones, and then sampling goes on. Inserted tokens are part of the
    response that rewards see, and of its length. They are not trained on: their response mask and log-probs
    are 0.
    """

    after_tokens: int  # Tokens of a response before the phrase.
    phrase: str = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    end: str = "</think>"
    """The text that ends thinking. The tokenizer should always split it alike, as it does a special token."""

    def __post_init__(self) -> None:
        check_types(self, "interruption.")
        require(self.after_tokens >= 1, "interruption.after_tokens", self.after_tokens, "be at least 1")

    def tokenized(self, tokenizer: str) -> InsertedPhrase:
        """Return the interruption in token ids of the tokenizer in this directory.

        Raises ValueError if its files cannot be read, or if it makes no tokens of a text.
        """
        ids = {name: _token_ids(tokenizer, getattr(self, name)) for name in ("phrase", "end")}
        for name, tokens in ids.items():
            require(bool(tokens), f"interruption.{name}", repr(getattr(self, name)), "have tokens")
        return InsertedPhrase(self.after_tokens, **ids)


@lru_cache(maxsize=16)
def _token_ids(tokenizer: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(continuation(LightTokenizer(tokenizer), text))
    except ValueError as error:
        raise ValueError(f"interruption needs the tokenizer: {error}") from error
