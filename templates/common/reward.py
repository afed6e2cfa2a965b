"""The reward function of experiment.py."""


def right_answer(prompts: list, completions: list, answer: list, **columns: object) -> list[float]:
    """Return a reward for each completion: 1 for the right answer, 0.5 if more follows it, else 0.

    `answer` is a column of the dataset; all other columns are in `columns`. The completion of a chat is a
    list of messages, that of a text is text.
    """
    return [_score(_text(text), str(right)) for text, right in zip(completions, answer, strict=True)]


def _score(text: str, right: str) -> float:
    text = text.strip()
    if text == right:
        return 1.0
    return 0.5 if text.startswith(right) else 0.0


def _text(completion: str | list[dict[str, str]]) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]
