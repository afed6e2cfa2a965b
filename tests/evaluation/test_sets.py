"""Sets of held-out rows: legal names and fields, chosen rows, sampling."""

from dataclasses import replace

import pytest

from realhf import DatasetConfig, Evaluation, SamplingConfig
from realhf.experiment import named_sets, sampling_seed

DATA = DatasetConfig("data.jsonl")


def test_a_single_dataset_stays_as_it_is():
    assert named_sets(DATA) == {"": Evaluation(DATA)} and named_sets(None) == {}


def test_sets_are_read_in_the_order_of_the_file():
    given = Evaluation(DATA, samples=2)
    in_order = replace(DATA, shuffle=False)
    assert named_sets(given) == {"": Evaluation(in_order, samples=2)}
    found = named_sets({"one": DATA, "two": given})
    assert found == {"one": Evaluation(in_order), "two": Evaluation(in_order, samples=2)}


@pytest.mark.parametrize(
    ("most", "num_rows", "rows"), [(0, 3, [0, 1, 2]), (3, 3, [0, 1, 2]), (3, 9, [0, 3, 6]), (2, 5, [0, 2])])
def test_a_cap_spreads_rows_evenly(most, num_rows, rows):
    assert Evaluation(DATA, max_rows=most).chosen_rows(num_rows) == rows


@pytest.mark.parametrize("most", [0, 1, 7, 20, 40])
def test_rows_that_are_left_out_do_not_repeat_others(most):
    kept = {3, *range(40, 60), 71, 72, 90}
    asked: list[int] = []
    rows = Evaluation(DATA, max_rows=most).chosen_rows(100, lambda row: asked.append(row) or row in kept)
    assert len(set(rows)) == len(rows) == min(most or 100, len(kept)) and set(rows) <= kept
    assert rows == sorted(rows) and len(set(asked)) == len(asked)
    assert len(asked) == 100 or 0 < most <= 20


def test_how_answers_are_drawn():
    training = SamplingConfig(max_new_tokens=5, temperature=0.7, top_p=0.9, top_k=3)
    greedy = SamplingConfig(max_new_tokens=5, temperature=0.0)
    own = SamplingConfig(max_new_tokens=3, temperature=0.5)
    assert Evaluation(DATA).sampling_for(training) == greedy
    assert Evaluation(DATA, samples=2).sampling_for(training) == training
    assert Evaluation(DATA, sampling=own).sampling_for(training) == own
    with pytest.raises(ValueError, match=r"^sampling.temperature is 0.0: it must be above 0, as Eval.*is 2"):
        Evaluation(DATA, samples=2).sampling_for(greedy)


def test_each_set_has_random_numbers_of_its_own():
    assert len({7, sampling_seed(7, ""), sampling_seed(7, "a"), sampling_seed(7, "b")}) == 4


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Evaluation(DATA, samples=0), "Evaluation.samples is 0: it must be at least 1"),
        (lambda: Evaluation(DATA, max_rows=-1), "Evaluation.max_rows is -1: it must not be negative"),
        (lambda: Evaluation(DATA, correct_above=float("nan")), "correct_above is nan: it must be finite"),
        (lambda: Evaluation(3), "dataset is of type int: it must be a file, a pattern, a hub name"),
        (lambda: Evaluation(DATA, samples=2, sampling=SamplingConfig(temperature=0.0)),
         "Evaluation.sampling.temperature is 0.0: it must be above 0, as Evaluation.samples is 2"),
        (lambda: named_sets({"a b": DATA}), "eval_dataset has a set named 'a b': a name must have letters"),
        (lambda: named_sets({"../a": DATA}), "eval_dataset has a set named '../a'"),
    ],
)
def test_what_is_refused(make, sentence):
    with pytest.raises(ValueError) as error:
        make()
    assert sentence in str(error.value)
