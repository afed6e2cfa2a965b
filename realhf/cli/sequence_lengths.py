"""The lengths of prompts and responses with which an experiment is planned. Free of torch."""

from collections import deque
from pathlib import Path
from typing import Any

from realhf.data.dataset import IS_CHOSEN, completion_columns, load_rows
from realhf.data.light_tokenizer import LightTokenizer
from realhf.experiment import Expected, Experiment
from realhf.planner.lengths import Lengths, alike_share, long_tail, observed
from realhf.runtime.records.rollout_file import ROLLOUTS
from realhf.user_input.field_types import require
from realhf.user_input.files import read_json_lines

_ROWS = 1000  # Rows of the dataset whose lengths are measured.
_ANSWERS = 5000  # The newest answers of a run whose lengths are read.


def sequence_lengths(experiment: Experiment, limit: int) -> dict[str, Any]:
    """Return the lengths as fields of a Workload: as expected, else measured or at the limit.

    `limit` is the most tokens of a response; 0 if none is generated. Raises ValueErrors that name the field.
    """
    expected = experiment.expected
    _check(expected, limit)
    responses = None
    alike = 0.0
    if expected.lengths_from is not None:
        responses, alike = _lengths_of_run(expected.lengths_from, limit)
    response = expected.response_tokens or (responses.mean if responses is not None else limit or None)
    prompts = None
    if expected.prompt_tokens is None or response is None:
        prompts, completions, completions_alike = _measured(experiment, limit)
        if expected.prompt_tokens is not None:
            prompts = None
        if response is None:
            responses = completions
            alike = completions_alike
            response = completions.mean
    if expected.response_p99 is not None:
        try:
            responses = long_tail(response, expected.response_p99, limit)
        except ValueError as error:
            raise ValueError(f"expected.response_tokens and expected.response_p99: {error}") from error
        response = responses.mean
    prompt = float(expected.prompt_tokens or (prompts.mean if prompts is not None else 0))
    longest_prompt = expected.longest_prompt_tokens or (0 if prompts is None else prompts.limit)
    return {
        "prompt_tokens": prompt, "response_tokens": float(response),
        "max_new_tokens": limit or (round(response) if responses is None else responses.limit),
        "prompt_lengths": prompts, "response_lengths": responses, "alike": alike,
        "longest_prompt_tokens": float(longest_prompt)}


def _check(expected: Expected, limit: int) -> None:
    """Raise a ValueError that names the field if an expected length is impossible."""
    for name in ("prompt_tokens", "longest_prompt_tokens", "response_tokens", "response_p99"):
        value = getattr(expected, name)
        require(value is None or value >= 1, f"expected.{name}", value, "be at least 1")
    mean, longest = expected.prompt_tokens, expected.longest_prompt_tokens
    if longest is not None:
        legal = mean is not None and longest >= mean
        require(legal, "expected.longest_prompt_tokens", longest, "be at least expected.prompt_tokens")
    response, p99 = expected.response_tokens, expected.response_p99
    if response is not None and limit and response > limit:
        raise ValueError(f"expected.response_tokens is {response}: sampling.max_new_tokens allows {limit}")
    if expected.lengths_from is not None:
        require(bool(limit), "expected.lengths_from", expected.lengths_from, "be None: nothing is generated")
        if given := [f"expected.{n}" for n in ("response_tokens", "response_p99") if getattr(expected, n)]:
            raise ValueError(f"expected.lengths_from has the lengths of a run: leave out {given[0]}")
    if p99 is not None:
        legal = response is not None and response < p99 < limit
        rule = f"be above expected.response_tokens and below sampling.max_new_tokens ({limit})"
        require(legal, "expected.response_p99", p99, rule)


def _lengths_of_run(run: str, limit: int) -> tuple[Lengths, float]:
    """Return the lengths of the newest answers that a run has kept, cut off at the limit, and how much those
    of one prompt resemble each other.

    Raises ValueError if there are none, or if answers were cut off before the limit.
    """
    path = Path(run) / ROLLOUTS
    if not path.is_file():
        raise ValueError(f"expected.lengths_from is {run!r}: there is no {path}")
    answers = list(deque((row for _, row in read_json_lines(path)), _ANSWERS))
    lengths = [answer["length"] for answer in answers if "length" in answer]
    if not lengths:
        raise ValueError(f"expected.lengths_from is {run!r}: {path} has no answers")
    cut = max((a["length"] for a in answers if "length" in a and not a.get("finished", True)), default=limit)
    if cut < limit:
        raise ValueError(
            f"expected.lengths_from is {run!r}: its answers were cut off at {cut} tokens, so it does not say "
            f"how long they get with sampling.max_new_tokens {limit}")
    prompts: dict[Any, list[int]] = {}
    for answer in answers:
        if "length" in answer and "prompt_number" in answer:
            prompts.setdefault((answer.get("step"), answer["prompt_number"]), []).append(answer["length"])
    return observed(lengths, limit), alike_share(list(prompts.values()))


def _measured(experiment: Experiment, limit: int) -> tuple[Lengths, Lengths, float]:
    """Return the lengths of the dataset's prompts and completions, without chat templates, and how much the
    completions of a row resemble each other in length."""
    unknown = [f"expected.{name}" for name in ("prompt_tokens", "response_tokens")
               if getattr(experiment.expected, name) is None and (name == "prompt_tokens" or not limit)]
    options = " ".join(f"--{name.replace('_', '-')} N" for name in unknown)
    hint = f"set {' and '.join(unknown)} ({options}) to plan without data and tokenizer"
    dataset = experiment.dataset
    inputs = experiment.graph().inputs
    keys = [key for key in ("prompt_ids", "sequence_ids", IS_CHOSEN) if key == "prompt_ids" or key in inputs]
    try:
        rows = [load_rows(part, keys)[:_ROWS] for part in dataset.parts]
    except ValueError as error:
        raise ValueError(f"{error}; {hint}") from error
    directory = experiment.tokenizer_dir()
    if not (Path(directory) / "tokenizer.json").exists():
        raise ValueError(f"tokenizer {directory!r} has no tokenizer.json; {hint}")
    tokenizer = LightTokenizer(directory)
    texts: tuple[list[str], list[str]] = ([], [])
    for part, part_rows in zip(dataset.parts, rows, strict=True):
        completions = completion_columns(part, inputs) or [part.completion_key]
        for column_texts, keys in zip(texts, ([part.prompt_key], completions), strict=True):
            column_texts += [_text(row[key]) for row in part_rows for key in keys if key in row]
    prompts, responses = ([len(tokenizer.encode(text)) for text in column or [""]] for column in texts)
    longest = min(max(prompts), dataset.max_prompt_tokens)
    per_row = len(completion_columns(dataset.parts[0], inputs)) or 1
    by_row = [responses[i : i + per_row] for i in range(0, len(responses), per_row)]
    # A completion has one more token for the end of the sequence.
    whole = observed([length + 1 for length in responses])
    return observed(prompts, max(1, longest)), whole, alike_share(by_row)


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(str(message.get("content")) for message in prompt)
