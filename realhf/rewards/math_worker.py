"""A process that parses and compares mathematical answers, started by `MathAnswer`."""

import logging
import re
from functools import partial
from typing import Any

from realhf.job_process import serve

_ANCHOR = re.compile(r"\$|\\boxed|\\\(|\\\[")
_WORD = re.compile(r"[A-Za-z]{2,}")
_BOX = "\\boxed{"
_UNUSUAL = (
    (re.compile(r"\\(?:boxed|fbox)\s*\{"), r"\\boxed{"),
    (re.compile(r"</?answer>"), " "),
    (re.compile(r"(?<=\d)(?:\\[,;:! ]|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))"), ""),  # Between thousands.
    (re.compile("~"), " "),
    (re.compile(r"(?<=\d)\.(?=\s*\})"), ""),  # A full stop within the box.
)
"""Ordinary forms of answers that the library does not read, each with a form that it reads."""


def main() -> None:
    """Answer jobs until standard input ends."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    serve(partial(_answer, math_verify))


def _answer(math_verify: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Return the text's answer and, under `right`, whether it is the job's (None: that cannot be parsed)."""
    answers = _parse(math_verify, job["text"], anchored=job["anchored"])
    result: dict[str, Any] = {"answer": _normal_form(answers)}
    if job.get("gold") is not None:
        gold = _parse_gold(math_verify, job["gold"])
        result["right"] = _is_right(math_verify, gold, answers, job) if gold else None
    return result


def _is_right(math_verify: Any, gold: list[Any], answers: list[Any], job: dict[str, Any]) -> bool:
    """Return whether the answers are right: all boxed ones together, or else the last one alone."""
    if answers and math_verify.verify(gold, answers, timeout_seconds=None):
        return True
    boxes = _usual(job["text"]).split(_BOX)
    if len(boxes) < 3:
        return False
    last = _parse(math_verify, _BOX + boxes[-1], anchored=job["anchored"])
    return bool(last) and bool(math_verify.verify(gold, last, timeout_seconds=None))


def _usual(text: str) -> str:
    """Return a text with unusual forms of answers replaced."""
    for pattern, usual in _UNUSUAL:
        text = pattern.sub(usual, text)
    return text


def _parse(math_verify: Any, text: str, *, anchored: bool = False) -> list[Any]:
    """Return the answer at the end of a text, a boxed one first, as the library parses it."""
    text = _usual(text)
    latex = math_verify.LatexExtractionConfig(boxed_match_priority=0, try_extract_without_anchor=not anchored)
    kinds = [latex] if anchored else [latex, math_verify.ExprExtractionConfig()]
    return list(math_verify.parse(text, extraction_config=kinds, parsing_timeout=None))


def _parse_gold(math_verify: Any, text: str) -> list[Any]:
    """Return the right answer: text with LaTeX, a number, or a solution that ends like `#### 72`."""
    text = text.rsplit("####", maxsplit=1)[-1].strip()
    is_formula = not _ANCHOR.search(text) and not _WORD.search(re.sub(r"\\[A-Za-z]+", "", text))
    parsed = _parse(math_verify, f"${text}$") if is_formula else []  # Else (1, 2) would be read as 2.
    return parsed or _parse(math_verify, text)


def _normal_form(answers: list[Any]) -> str | None:
    """Return a text that is the same for equal numbers, such as 0.5 and 1/2; None without an answer."""
    if not answers:
        return None
    import sympy  # type: ignore[import-untyped]

    value = answers[0]
    if isinstance(value, sympy.Basic) and value.is_number:
        value = sympy.nsimplify(value.doit(), rational=True)
    return str(value)
