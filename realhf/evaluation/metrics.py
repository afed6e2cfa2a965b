"""Metrics of scored answers, several to each prompt. Plain Python.

A score is NaN if its reward has failed. Such samples do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import comb, fsum, isnan
from typing import Any


@dataclass(frozen=True)
class ScoredAnswer:
    """An answer as the metrics see it; `vote` is its text in a majority vote, None if there is no answer."""

    score: float
    vote: str | None = None


def pass_at(k: int, *, num_samples: int, num_correct: int) -> float:
    """Return the unbiased estimate of the probability that one of k samples is correct.

    It is 1 - C(n - c, k) / C(n, k) for n samples of which c are correct, the share of the subsets of size k
    that have a correct one (Chen et al. 2021, arXiv:2107.03374).
    """
    assert 1 <= k <= num_samples, "k samples are drawn without replacement"
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_score(answers: Sequence[ScoredAnswer]) -> float:
    """Return the score of the most frequent answer of one prompt.

    Samples without an answer do not vote, unless none has one. The score of an answer is the mean over the
    samples that give it. If several answers are equally frequent, return the mean of their scores, so that
    the order of the samples does not matter.
    """
    votes: dict[str | None, list[float]] = {}
    for answer in answers:
        votes.setdefault(answer.vote, []).append(answer.score)
    if len(votes) > 1:
        votes.pop(None, None)
    most = max(len(scores) for scores in votes.values())
    return mean(mean(scores) for scores in votes.values() if len(scores) == most)


def pass_sizes(samples: int) -> list[int]:
    """Return the values of k for which pass@k is logged: powers of two, and the number of samples."""
    powers = [1 << i for i in range(samples.bit_length()) if 1 << i <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def sample_metrics(
    prompts: Sequence[Sequence[ScoredAnswer]], *, samples: int, correct_above: float
) -> dict[str, float]:
    """Return the metrics of scored answers, given as the answers to each prompt.

    `score` is the mean over all answers. With several samples per prompt there are also `mean@k` (the same),
    and the means over prompts of `pass@1`, `pass@2` and so on, `majority@k` and `best@k`, where k is the
    number of samples. A prompt with fewer than k samples does not count in pass@k. A metric for which no
    answer or prompt counts is left out.
    """
    scored = [[answer for answer in answers if not isnan(answer.score)] for answers in prompts]
    scored = [answers for answers in scored if answers]
    scores = [answer.score for answers in scored for answer in answers]
    values = {"score": scores}
    if samples > 1:
        values[f"mean@{samples}"] = scores
        counts = [(len(answers), sum(a.score > correct_above for a in answers)) for answers in scored]
        for k in pass_sizes(samples):
            values[f"pass@{k}"] = [pass_at(k, num_samples=n, num_correct=c) for n, c in counts if n >= k]
        values[f"majority@{samples}"] = [majority_score(answers) for answers in scored]
        values[f"best@{samples}"] = [max(answer.score for answer in answers) for answers in scored]
    return means(values)


def doubt_of_limit(
    values: Iterable[float | None], correct_above: float, *, is_chosen: bool
) -> str | None:
    """Return in words why `correct_above` seems not to tell right answers, judged by values of a reward.

    Return None if nothing is wrong with it. If the user has chosen it, it may be far below the highest value.
    """
    known = sorted(set(known_values(values)))
    right = [value for value in known if value > correct_above]
    if known and not right and (len(known) > 1 or known[0] > 0):
        return f"the highest value is {known[-1]:g}, so that no answer counts as right"
    if len(right) > 1 and not is_chosen and (right[-1] > 1 or len(right) == len(known)):
        return f"answers with values from {right[0]:g} to {right[-1]:g} all count as right"
    return None


def named_scores(scores: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return name -> mean of each reward, if there are several. `scores` has name -> value for each sample.

    None and NaN do not count, and a reward without any other value is left out.
    """
    names = dict.fromkeys(name for by_name in scores for name in by_name)
    if len(names) < 2:
        return {}
    return means({name: known_values(by_name.get(name) for by_name in scores) for name in names})


def known_values(values: Iterable[float | None]) -> list[float]:
    """Return the values that are neither None nor NaN."""
    return [value for value in values if value is not None and not isnan(value)]


def length_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean length in tokens of answers, and the share of those that were cut off."""
    if not rows or "length" not in rows[0]:
        return {}
    return {
        "response_length/mean": mean(float(row["length"]) for row in rows),
        "response_length/clip_ratio": mean(float(not row["finished"]) for row in rows),
    }


def means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the mean of the values of each name, without the names that have no values."""
    return {name: mean(numbers) for name, numbers in values.items() if numbers}


def mean(values: Iterable[float]) -> float:
    """Return the mean of the values, of which there must be at least one."""
    numbers = list(values)
    return fsum(numbers) / len(numbers)
