"""Reward shaping: changes scores by the length of responses, and gives rewards to single tokens.

The suffix S of a tensor means one entry per sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from realhf.errors import UserError
from realhf.user_input.field_types import check_types, require

if TYPE_CHECKING:
    from torch import Tensor


class ScoreShaping(Protocol):
    """A function of scores, lengths in tokens, and whether responses ended with eos (1.0) or were cut (0.0).

    It returns the new scores, or NaN for samples to leave out. All are float tensors over samples. The scores
    of failed rewards are NaN, and they stay NaN.
    """

    def __call__(self, score: Tensor, lengths: Tensor, finished: Tensor) -> Tensor: ...


class TokenReward(Protocol):
    """A function of the token ids of each response that returns a reward for every token.

    A token's return is the sum of its reward and of all later ones, times discount^l if l tokens later.
    """

    @property
    def discount(self) -> float: ...

    def __call__(self, responses: Sequence[list[int]]) -> list[list[float]]: ...


@dataclass(frozen=True)
class CosineReward:
    """The cosine reward of Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs"
    (arXiv:2502.03373): a score shaping in which a right answer should be short, and a wrong one long.

    The reward falls, or rises, along half a wave from its value r_0 at length 0 to r_L at `max_length`:
    CosFn(t, T, r_L, r_0) = r_L + (r_0 - r_L) (1 + cos(pi t / T)) / 2, with t the length and T `max_length`.
    Responses without an end or longer than `max_length` get `over_length`, whatever their score is.
    """

    max_length: int  # Tokens of the longest response, its eos included: `max_new_tokens` of the sampling.
    correct: tuple[float, float] = (2.0, 1.0)  # Rewards of right answers of length 0 and of `max_length`.
    wrong: tuple[float, float] = (-10.0, 0.0)  # Rewards of wrong answers of length 0 and of `max_length`.
    over_length: float = -10.0  # Reward of responses that were cut.
    correct_above: float = 0.5  # A response is right if its score is above this.

    def __post_init__(self) -> None:
        _check_fields(self)
        require(self.max_length >= 1, "CosineReward.max_length", self.max_length, "be at least 1")

    def doubt(self, longest: int) -> str | None:
        """Return why answers of at most `longest` tokens are too short for this, or None."""
        return None if self.max_length <= longest else f"score_shaping.max_length is {self.max_length}"

    def __call__(self, score: Tensor, lengths: Tensor, finished: Tensor) -> Tensor:
        """Return the cosine rewards; see ScoreShaping."""
        is_correct_S = score > self.correct_above
        start_S, end_S = (
            score.new_full(score.shape, of_correct).where(is_correct_S, of_wrong)
            for of_correct, of_wrong in zip(self.correct, self.wrong, strict=True))
        wave_S = (1 + (math.pi * lengths / self.max_length).cos()) / 2
        reward_S = end_S + (start_S - end_S) * wave_S
        is_over_S = (finished == 0) | (lengths > self.max_length)
        return reward_S.masked_fill(is_over_S, self.over_length).masked_fill(score.isnan(), math.nan)


@dataclass(frozen=True)
class SoftOverlongPenalty:
    """The soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13): a score shaping
    that adds a penalty to the score of long responses.

    The penalty is 0 up to `max_length - buffer` tokens; from there it falls linearly to -1 at `max_length`
    tokens, and it is -1 above.
    """

    max_length: int  # Length in tokens from which the penalty is -1.
    buffer: int  # Tokens below `max_length` over which the penalty falls.

    def __post_init__(self) -> None:
        _check_fields(self)
        require(self.max_length >= 1, "SoftOverlongPenalty.max_length", self.max_length, "be at least 1")
        require(
            1 <= self.buffer <= self.max_length, "SoftOverlongPenalty.buffer", self.buffer,
            f"be at least 1 and at most max_length, {self.max_length}")

    def doubt(self, longest: int) -> str | None:
        """Return why answers of at most `longest` tokens are too short for this, or None."""
        start = self.max_length - self.buffer
        idle = f"score_shaping begins after {start} tokens (max_length - buffer)"
        return None if start < longest else idle

    def __call__(self, score: Tensor, lengths: Tensor, finished: Tensor) -> Tensor:
        """Return the scores with their penalties; see ScoreShaping."""
        return score + ((self.max_length - self.buffer - lengths) / self.buffer).clamp(-1.0, 0.0)


@dataclass(frozen=True)
class RepetitionPenalty:
    """The repetition penalty of Yeo et al. 2025 (arXiv:2502.03373): a token reward.

    An N-gram slides over the response. Where it has occurred before, all of its tokens get `penalty`, each of
    them once; the other tokens get 0. With a `discount` below 1, as in the paper, a repetition counts little
    in the returns of tokens far before it.
    """

    ngram: int = 40  # Tokens of the N-gram.
    penalty: float = -0.05  # Reward of a repeated token.
    discount: float = 0.99  # Weight of a reward one token later; the paper also tries 0.999.

    def __post_init__(self) -> None:
        _check_fields(self)
        require(self.ngram >= 1, "RepetitionPenalty.ngram", self.ngram, "be at least 1")
        require(self.penalty < 0, "RepetitionPenalty.penalty", self.penalty, "be below 0")
        require(
            0 <= self.discount <= 1, "RepetitionPenalty.discount", self.discount,
            "be at least 0 and at most 1")

    def doubt(self, longest: int) -> str | None:
        """Return why answers of at most `longest` tokens are too short for this, or None."""
        return None if self.ngram < longest else f"token_rewards: RepetitionPenalty.ngram is {self.ngram}"

    def __call__(self, responses: Sequence[list[int]]) -> list[list[float]]:
        """Return the rewards of all tokens; see TokenReward."""
        return [self._of_response(tokens) for tokens in responses]

    def _of_response(self, tokens: list[int]) -> list[float]:
        rewards = [0.0] * len(tokens)
        seen: set[tuple[int, ...]] = set()
        for start in range(len(tokens) - self.ngram + 1):
            ngram = tuple(tokens[start : start + self.ngram])
            if ngram in seen:
                rewards[start : start + self.ngram] = [self.penalty] * self.ngram
            seen.add(ngram)
        return rewards


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """Return R_t = sum over l >= 0 of discount^l r_(t+l) for each token t of a response."""
    returns = []
    total = 0.0
    for reward in reversed(rewards):
        total = reward + discount * total
        returns.append(total)
    return returns[::-1]


def token_returns(token_rewards: Sequence[TokenReward], responses: Sequence[list[int]]) -> list[list[float]]:
    """Return the returns of each response's tokens, summed over the token rewards, each with its discount.

    These are the returns R_t = sum_m sum_l gamma_m^l r_(m, t+l) of Yeo et al. 2025 (arXiv:2502.03373).
    """
    totals = [[0.0] * len(tokens) for tokens in responses]
    for token_reward in token_rewards:
        by_response = token_reward(responses)
        _check_token_rewards(token_reward, by_response, responses)
        for i, rewards in enumerate(by_response):
            returns = discounted_returns(rewards, token_reward.discount)
            totals[i] = [total + more for total, more in zip(totals[i], returns, strict=True)]
    return totals


def _check_token_rewards(token_reward: TokenReward, by_response: Any, responses: Sequence[list[int]]) -> None:
    """Raise UserError unless there is a finite number for each token."""
    rule = "it must return a list of numbers per response, one for each token"
    try:
        sizes = [len(rewards) for rewards in by_response]
        is_finite = all(math.isfinite(reward) for rewards in by_response for reward in rewards)
    except TypeError as error:
        raise UserError(f"token reward {name_of(token_reward)}: {error}; {rule}") from error
    if sizes != [len(tokens) for tokens in responses] or not is_finite:
        raise UserError(f"token reward {name_of(token_reward)} returned other or infinite numbers: {rule}")


def name_of(shaping: Any) -> str:
    return getattr(shaping, "__qualname__", type(shaping).__name__)


def check_shaping(field: str, shaping: Any, *, needs: str = "") -> None:
    """Raise ValueError unless the value of a field is an object that can be called, with this attribute."""
    if isinstance(shaping, type):
        raise ValueError(f"{field} is the class {shaping.__name__}: give an object, {shaping.__name__}(...)")
    if not callable(shaping) or (needs and not hasattr(shaping, needs)):
        rule = f"a function with the attribute {needs!r}" if needs else "a function"
        raise ValueError(f"{field} is {shaping!r}: it must be {rule}")


def _check_fields(config: Any) -> None:
    """Raise ValueError unless each field has its declared type and is finite."""
    prefix = f"{type(config).__name__}."
    check_types(config, prefix)
    for name, value in vars(config).items():
        numbers = value if isinstance(value, Sequence) else (value,)
        require(all(math.isfinite(number) for number in numbers), prefix + name, value, "be finite")
