"""ReasoningGym against the library's own scores."""

import pytest

from realhf import ReasoningGym
from realhf.errors import UserError
from realhf.rewards.reward import reward_columns


@pytest.mark.parametrize("name", ["leg_counting", "countdown", "basic_arithmetic"])
def test_scores_are_those_of_the_library(name):
    """`countdown` has many right answers, which only the library's scorer knows."""
    import reasoning_gym  # Here, as it takes a second.

    dataset = reasoning_gym.create_dataset(name, size=4, seed=1)
    entries = list(dataset)
    answers = [entry["answer"] for entry in entries]
    answers[1:3] = ["1", "7 * 7"]
    texts = [f"I think <answer>3</answer>, no, <answer>{answer}</answer>" for answer in answers]
    expected = [dataset.score_answer(answer, entry) for answer, entry in zip(answers, entries, strict=True)]
    reward = ReasoningGym(question_key="question")
    assert reward_columns(reward) == ("answer", "metadata", "question")
    columns = {key: [entry[key] for entry in entries] for key in ("answer", "metadata", "question")}
    assert reward(completions=texts, **columns) == expected and expected[0] == 1.0
    assert ReasoningGym(extract=None).answer_of(" 3 ") == "3" and reward.answer_of("3") is None


@pytest.mark.parametrize(("metadata", "sentence"), [
    ({}, "column 'metadata' has '{}': it must be an object with a source_dataset"),
    ({"source_dataset": "no_such"}, "no_such"),
])
def test_unknown_entries(metadata, sentence):
    with pytest.raises(UserError, match=sentence):
        ReasoningGym()(completions=["<answer>1</answer>"], answer=["1"], metadata=[metadata])


def test_rows_of_another_part_of_a_mixture_have_no_score():
    import reasoning_gym

    entry = reasoning_gym.create_dataset("basic_arithmetic", size=1, seed=1)[0]
    columns = {"answer": [None, entry["answer"]], "metadata": [None, entry["metadata"]]}
    texts = [f"<answer>{entry['answer']}</answer>"] * 2
    assert ReasoningGym()(completions=texts, **columns) == [None, 1.0]
