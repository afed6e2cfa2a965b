"""RolloutLog: which prompts and rows are kept."""

import random
from collections import Counter

import pytest

from realhf import RolloutLog


def test_the_choice_depends_on_seed_and_numbers_only():
    log = RolloutLog(prompts_per_step=3, every=5)
    prompts = list(range(700, 760))
    mixed = random.Random(1).sample(prompts, len(prompts))
    chosen = log.sampled(prompts, step=5, seed=4)
    assert len(chosen) == 3 and chosen <= set(prompts)
    assert chosen == log.sampled(mixed, step=10, seed=4) != log.sampled(prompts, step=5, seed=5)
    assert log.sampled(prompts, step=1, seed=4) == chosen and log.sampled(prompts, step=6, seed=4) == set()
    assert log.sampled([5, 6], step=5, seed=4) == {5, 6}


def test_all_rows_are_chosen_alike():
    counts = Counter(row for seed in range(2000) for row in RolloutLog().followed(20, seed=seed))
    assert set(counts) == set(range(20)) and sum(counts.values()) == 8000
    assert max(abs(count - 400) for count in counts.values()) < 5 * (400 * 0.8) ** 0.5


def test_long_texts_lose_their_middle():
    log = RolloutLog(max_characters=100)
    assert log.shortened("x" * 100) == "x" * 100
    short = log.shortened("a" * 500 + "b" * 500)
    assert short == f"{'a' * 50} [... 900 characters left out ...] {'b' * 50}"


@pytest.mark.parametrize(("field", "value", "rule"), [
    ("prompts_per_step", -1, "not be negative"), ("follow_rows", -2, "not be negative"),
    ("every", 0, "be at least 1"), ("max_megabytes", 0, "be at least 1"),
    ("max_characters", 5, "be at least 100"), ("every", "2", "be a whole number"),
])
def test_illegal_settings(field, value, rule):
    with pytest.raises(ValueError, match=f"rollouts.{field} is .*{value}.*: it must {rule}"):
        RolloutLog(**{field: value})


def test_followed_rows_of_many_are_those_of_the_lowest_hashes(monkeypatch):
    log = RolloutLog(follow_rows=7)
    whole = log.followed(5000, seed=3)
    monkeypatch.setattr("realhf.steps.rollout_log._COMPARED_ROWS", 64)
    assert log.followed(5000, seed=3) == whole and len(whole) == 7
    assert log.followed(5, seed=3) == {0, 1, 2, 3, 4}
