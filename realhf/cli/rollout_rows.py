"""Reads the answers that a run has kept, and filters and sorts them. Free of torch."""

import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realhf.errors import UserError
from realhf.runtime.rollout_file import ROLLOUTS
from realhf.suggest import did_you_mean

Row = dict[str, Any]
"""An answer: the fields of a line of rollouts.jsonl, or of a file of evals/."""

_EVAL = "eval.jsonl"
_EVALS = "evals"
_NUMBERS = ("step", "sample", "prompt_number", "dataset_row", "score", "length", "advantage")
"""Fields whose values are numbers."""
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, ">": operator.gt, "=": operator.eq,
}  # fmt: skip
_CONDITION = re.compile(r"\s*(.+?)\s*(<=|>=|==|!=|<|>|=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
_AND = re.compile(r"\s+and\s+|,|&&")
_STEPS = re.compile(r"(\d*)-(\d*)|(\d+)")


@dataclass(frozen=True)
class Condition:
    """A comparison of a field with a number. Answers without the field do not fulfil it."""

    field: str
    sign: str
    number: float

    def __call__(self, row: Row) -> bool:
        value = number_of(row, self.field)
        return value is not None and _OPERATORS[self.sign](value, self.number)


def parse_conditions(text: str) -> list[Condition]:
    """Return the conditions of a text such as `score<0.5 and length>=100`. Raises UserError if it is none."""
    conditions = []
    for part in _AND.split(text):
        match = _CONDITION.fullmatch(part)
        if match is None:
            legal = "a field, one of < <= > >= = !=, and a number, such as score<0.5; several with commas"
            raise UserError(f"--where {text!r}: {part.strip()!r} is no condition: legal are {legal}")
        conditions.append(Condition(match[1], match[2], float(match[3])))
    return conditions


def parse_steps(text: str) -> tuple[float, float]:
    """Return the first and the last step of a text such as `5-20`, `5-`, `-20` or `5`. Raises UserError."""
    match = _STEPS.fullmatch(text.strip())
    if match is None or text.strip() == "-":
        raise UserError(f"--steps {text}: it must be a range such as 5-20, 5- or -20")
    if match[3]:
        return float(match[3]), float(match[3])
    first = float(match[1] or 0)
    last = float(match[2] or "inf")
    if first > last:
        raise UserError(f"--steps {text}: its first step must not be above its last one")
    return first, last


def number_of(row: Row, field: str) -> float | None:
    """Return the number of a field of an answer, or its score by a reward; None if it has none."""
    if field in _NUMBERS:
        value = row.get(field)
    else:
        value = (row.get("rewards") or {}).get(field.removeprefix("rewards."))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and value is not None else None


def reward_names(rows: Iterable[Row]) -> list[str]:
    """Return the names of all rewards, in the order in which they appear."""
    return list(dict.fromkeys(name for row in rows for name in row.get("rewards") or {}))


def require_fields(rows: Sequence[Row], fields: Collection[str], option: str) -> None:
    """Raise UserError unless each of the fields is one that some answer has as a number."""
    rewards = reward_names(rows)
    numbers = [name for name in _NUMBERS if any(number_of(row, name) is not None for row in rows)]
    taken = [f"rewards.{name}" if name in _NUMBERS else name for name in rewards]
    for field in fields:
        if rows and field not in numbers and field.removeprefix("rewards.") not in rewards:
            legal = [*numbers, *taken]
            meant = did_you_mean(field, legal)
            raise UserError(f"{option}: there is no field {field!r}{meant}: legal are {', '.join(legal)}")


def sort_rows(rows: Sequence[Row], by: str) -> list[Row]:
    """Return the answers in the order of a field, falling if it begins with `-`; those without it last.

    Answers with equal values keep their order.
    """
    field = by.removeprefix("-")
    with_field = [row for row in rows if number_of(row, field) is not None]
    without = [row for row in rows if number_of(row, field) is None]
    falls = by.startswith("-")
    return sorted(with_field, key=lambda row: number_of(row, field) or 0.0, reverse=falls) + without


def prompt_text(row: Row) -> str:
    """Return the prompt as text: that of chat messages with their roles."""
    prompt = row.get("prompt", "")
    if isinstance(prompt, list):
        return "\n".join(f"{message.get('role', '')}: {_content(message)}" for message in prompt)
    return str(prompt)


def last_message(row: Row) -> str:
    """Return the prompt, or the last message of a chat."""
    prompt = row.get("prompt", "")
    return _content(prompt[-1]) if isinstance(prompt, list) and prompt else prompt_text(row)


def _content(message: Any) -> str:
    content = message.get("content", "") if isinstance(message, dict) else message
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def read_rollouts(run: Path) -> tuple[Path, list[Row]]:
    """Return the file of the answers of training, and the answers. Raises UserError if there is none."""
    if run.is_file():
        return run, list(_read(run))
    if not run.is_dir():
        raise UserError(f"{run}: there is no such run directory")
    path = run / ROLLOUTS
    if not path.is_file():
        why = "its experiment switches rollouts off, samples no answers, or has not begun its first step"
        hint = "; --eval shows the answers of evaluations" if _eval_files(run) else ""
        raise UserError(f"{run} has no {ROLLOUTS}: {why}{hint}")
    return path, list(_read(path))


def read_evaluations(run: Path, wanted: str) -> tuple[Path, list[Row]]:
    """Return the path of the answers of evaluations, and the answers; `wanted` is a set, or empty for all.

    Raises UserError if there are none.
    """
    if not run.is_dir():
        raise UserError(f"{run}: there is no such run directory")
    files = _eval_files(run)
    if not files:
        raise UserError(f"{run} has neither {_EVALS}/ nor {_EVAL}: no evaluation has scored answers in it")
    names = sorted({name for name, _, _ in files})
    if wanted and wanted not in names:
        meant = did_you_mean(wanted, names)
        legal = ", ".join(name for name in names if name) or "none, as the run has one set without a name"
        raise UserError(f"--eval {wanted}: there is no such set{meant}: legal are {legal}")
    rows = []
    for name, step, path in files:
        if wanted in ("", name):
            about = {} if step is None else {"step": step}
            rows += [{**about, **row, "set": name or row.get("set") or ""} for row in _read(path)]
    return run / (_EVAL if files[0][1] is None else _EVALS), rows


def _eval_files(run: Path) -> list[tuple[str, int | None, Path]]:
    """Return sets, steps and files of evaluations, or if there are none eval.jsonl, which tells no step."""
    found = []
    for path in (run / _EVALS).rglob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdecimal():
            name = path.parent.relative_to(run / _EVALS).as_posix()
            found.append(("" if name == "." else name, int(number), path))
    if not found and (run / _EVAL).is_file():
        return [("", None, run / _EVAL)]
    return sorted(found)


def _read(path: Path) -> Iterator[Row]:
    """Yield the answers of a file, without a last line that is incomplete. Raises UserError."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith("\n") and line.strip():
                    yield _parsed(line, f"{path} line {number}")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _parsed(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is {type(row).__name__}: every line must be an object")
    if isinstance(scores := row.pop("scores", None), dict):  # As evaluations call them.
        row.setdefault("rewards", scores)
    if "columns" not in row:
        row["columns"] = {key: row[key] for key in ("answer", "ground_truth") if key in row}
    return row
