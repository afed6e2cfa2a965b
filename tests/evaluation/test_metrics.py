"""Metrics of several samples per prompt, beside naive computations."""

from itertools import combinations, permutations
from math import nan

import pytest

from realhf.runtime.evaluations import (
    ScoredSample,
    majority_score,
    named_scores,
    pass_at,
    pass_sizes,
    sample_metrics,
)


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(num_samples):
    for num_correct in range(num_samples + 1):
        is_correct = [i < num_correct for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = [any(chosen) for chosen in combinations(is_correct, k)]
            expected = sum(subsets) / len(subsets)
            found = pass_at(k, num_samples=num_samples, num_correct=num_correct)
            assert found == pytest.approx(expected, abs=1e-15)


def _naive_majority(votes, scores):
    """Return the mean over all ways to break a tie, and over the samples that give the chosen answer."""
    known = [vote for vote in votes if vote is not None] or [None]
    best = max(known.count(vote) for vote in known) if known != [None] else len(votes)
    winners = [v for v in sorted(set(known), key=str) if votes.count(v) == best]
    means = [[score for vote, score in zip(votes, scores, strict=True) if vote == w] for w in winners]
    return sum(sum(mean) / len(mean) for mean in means) / len(means)


@pytest.mark.parametrize(
    ("votes", "scores", "expected"),
    [
        (["7", "7", "3"], [1, 1, 0], 1.0),
        (["7", "3", "3"], [1, 0, 0], 0.0),
        (["7", "3"], [1, 0], 0.5),  # A tie: either with probability 1/2.
        (["7", "7", "3", "3", "1"], [1, 1, 0, 0, 1], 0.5),
        ([None, None, "7"], [0, 0, 1], 1.0),  # A sample without an answer does not vote.
        ([None, None], [0.25, 0.75], 0.5),
        (["7", "7", "3"], [1, 0.5, 0], 0.75),  # Equal answers may have different scores.
    ],
)
def test_the_majority_is_that_of_a_count(votes, scores, expected):
    assert _naive_majority(votes, scores) == expected
    for order in permutations(range(len(votes))):
        answers = [ScoredSample(scores[i], votes[i]) for i in order]
        assert majority_score(answers) == pytest.approx(expected)


def test_powers_of_two_and_the_number_of_samples_have_a_pass_rate():
    assert [pass_sizes(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_all_metrics_of_two_prompts():
    prompts = [
        [ScoredSample(1, "a"), ScoredSample(0, "b"), ScoredSample(0, "b")],
        [ScoredSample(1, "a"), ScoredSample(1, "a"), ScoredSample(0.5, "b")],
    ]
    found = sample_metrics(prompts, samples=3, correct_above=0.5)
    assert found == pytest.approx({
        "score": 3.5 / 6, "mean@3": 3.5 / 6, "pass@1": (1 / 3 + 2 / 3) / 2, "pass@2": (2 / 3 + 1) / 2,
        "pass@3": 1.0, "majority@3": 0.5, "best@3": 1.0,
    })
    assert sample_metrics(prompts, samples=3, correct_above=0.25)["pass@1"] == pytest.approx(2 / 3)
    single = [[ScoredSample(1)], [ScoredSample(0)]]
    assert sample_metrics(single, samples=1, correct_above=0) == {"score": 0.5}


def test_failed_rewards_do_not_count():
    prompts = [[ScoredSample(1, "a"), ScoredSample(nan, "b")], [ScoredSample(nan, "a")] * 2]
    found = sample_metrics(prompts, samples=2, correct_above=0.5)
    assert found == {  # No prompt has two samples, so that there is no pass@2.
        "score": 1.0, "mean@2": 1.0, "pass@1": 1.0, "majority@2": 1.0, "best@2": 1.0}
    assert sample_metrics(prompts[1:], samples=1, correct_above=0.5) == {}
    assert sample_metrics(prompts[1:], samples=2, correct_above=0.5) == {}


def test_several_rewards_are_means_by_name():
    scores = [{"right": 1.0, "short": None}, {"right": 0.0, "short": 0.5}, {"right": nan, "short": 0.0}]
    assert named_scores(scores) == {"right": 0.5, "short": 0.25}
    assert named_scores([{"right": 1.0}]) == {}
    assert named_scores([{"won": 1.0, "near": 0.5}, {"near": 0.5}, {}]) == {"won": 1 / 3, "near": 1 / 3}
    assert named_scores([{"right": 1.0, "short": None}, {"right": 0.0, "short": nan}]) == {"right": 0.5}
