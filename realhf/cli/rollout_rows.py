"""Reads the answers that a run has kept, and filters and sorts them. Free of torch."""

import json
import operator
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realhf.errors import UserError
from realhf.runtime.records.rollout_file import ROLLOUTS
from realhf.user_input.files import read_json_lines
from realhf.user_input.suggest import did_you_mean

Row = dict[str, Any]
"""An answer: the fields of a line of rollouts.jsonl, or of a file of evals/."""

_EVAL = "eval.jsonl"
_EVALS = "evals"
_FIELDS = ("step", "sample", "prompt_number", "dataset_row", "score", "length", "advantage", "followed",
           "finished", "set", "completion", "final_answer")
"""Fields whose values are numbers, truth values (1 and 0) or texts."""
_GROUPS = ("rewards", "extra", "columns")
"""Fields whose value is a dict of such values."""
_Value = float | str
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le, ">=": operator.ge, "==": operator.eq, "!=": operator.ne,
    "<": operator.lt, ">": operator.gt, "=": operator.eq}
_EQUALS = ("=", "==", "!=")
"""Comparisons that are legal for texts."""
_CONDITION = re.compile(r"\s*(.+?)\s*(<=|>=|==|!=|<|>|=)\s*(.+?)\s*", re.DOTALL)
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_QUOTED = re.compile(r"""'([^']*)'|"([^"]*)\"""", re.DOTALL)
_PART = re.compile(r"""(?:'[^']*'|"[^"]*"|(?!\s+and\s|,|&&).)+""", re.DOTALL)
_AND = re.compile(r"(?:\s+and\s+|,|&&)")
_STEPS = re.compile(r"(\d*)-(\d*)|(\d+)")


@dataclass(frozen=True)
class Condition:
    """A comparison of a field with a number or a text. Answers without the field do not fulfil it."""

    field: str
    sign: str
    text: str
    number: float | None = None

    def __call__(self, row: Row) -> bool:
        value = value_of(row, self.field)
        if isinstance(value, str):
            return self.sign in _EQUALS and _OPERATORS[self.sign](value, self.text)
        return value is not None and self.number is not None and _OPERATORS[self.sign](value, self.number)


def parse_conditions(text: str) -> list[Condition]:
    """Return the conditions of a text such as `score<0.5 and dataset=easy`. Raises UserError."""
    conditions = []
    for part in _parts(text):
        match = _CONDITION.fullmatch(part)
        quoted = None if match is None else _QUOTED.fullmatch(match[3])
        number = None if match is None or quoted or not _NUMBER.fullmatch(match[3]) else float(match[3])
        if match is None or (number is None and match[2] not in _EQUALS):
            raise UserError(
                f"--where {text!r}: {part.strip()!r} is no condition: legal are a field, "
                "one of < <= > >= = !=, and a number, such as score<0.5; several with commas; "
                "a text with = or !=")
        words = match[3] if quoted is None else quoted[1] or quoted[2] or ""
        conditions.append(Condition(match[1], match[2], words, number))
    return conditions


def _parts(text: str) -> list[str]:
    """Split a text at `and`, commas and `&&`, except inside quotes."""
    parts = []
    start = 0
    while match := _PART.match(text, start):
        parts.append(match[0])
        joint = _AND.match(text, match.end())
        if joint is None:
            return parts
        start = joint.end()
    return [*parts, text[start:]]


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


def value_of(row: Row, field: str) -> _Value | None:
    """Return the number or the text of a field, of a reward, of what a reward has logged, or of a column.

    True is 1 and False is 0. Return None if the answer has no such value.
    """
    value = _raw(row, field)
    return float(value) if isinstance(value, int | float) else value if isinstance(value, str) else None


def _raw(row: Row, field: str) -> Any:
    if field in _FIELDS:
        return row.get(field)
    group, _, name = field.partition(".")
    if group in _GROUPS and name in (row.get(group) or {}):
        return row[group][name]
    return next((row[group][field] for group in _GROUPS if field in (row.get(group) or {})), None)


def number_of(row: Row, field: str) -> float | None:
    """Return the number of a field; None if it has none."""
    value = value_of(row, field)
    return value if isinstance(value, float) else None


def reward_names(rows: Iterable[Row]) -> list[str]:
    """Return the names of all rewards, in the order in which they appear."""
    return _names(rows, "rewards")


def _names(rows: Iterable[Row], group: str) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.get(group) or {}))


def require_fields(rows: Sequence[Row], fields: Collection[str], option: str) -> None:
    """Raise UserError unless each of the fields is one that some answer has."""
    legal = [name for name in _FIELDS if any(value_of(row, name) is not None for row in rows)]
    for group in _GROUPS:
        names = _names(rows, group)
        legal += [f"{group}.{name}" if name in (*_FIELDS, *legal) else name for name in names]
    for field in fields:
        group, _, name = field.partition(".")
        if rows and field not in legal and not (group in _GROUPS and name in _names(rows, group)):
            meant = did_you_mean(field, legal)
            raise UserError(f"{option}: there is no field {field!r}{meant}: legal are {', '.join(legal)}")


def require_comparable(rows: Sequence[Row], conditions: Sequence[Condition], option: str) -> None:
    """Raise UserError for a condition on a field that no answer has, or has as a number and not as a text."""
    require_fields(rows, [condition.field for condition in conditions], option)
    for condition in conditions:
        kinds = {type(value) for row in rows if (value := value_of(row, condition.field)) is not None}
        is_text = condition.number is None
        if is_text and kinds == {float}:
            raise UserError(f"{option}: {condition.field} is a number, and {condition.text!r} is none")
        if kinds == {str} and condition.sign not in _EQUALS:
            raise UserError(f"{option}: {condition.field} is a text, which has only = and !=")


def sort_rows(rows: Sequence[Row], by: str) -> list[Row]:
    """Sort answers by a field, in falling order if it begins with `-`; answers without the field come last.

    Answers with equal values keep their order. Numbers come before texts.
    """
    field = by.removeprefix("-")
    falls = by.startswith("-")
    ordered: list[Row] = []
    for kind in (float, str):
        of_kind = [row for row in rows if isinstance(value_of(row, field), kind)]
        ordered += sorted(of_kind, key=lambda row: value_of(row, field), reverse=falls)  # type: ignore[arg-type,return-value]
    return ordered + [row for row in rows if value_of(row, field) is None]


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
    """Return the set, step and file of each evaluation; without any, eval.jsonl, whose step is unknown."""
    files = []
    for path in (run / _EVALS).rglob("step_*.jsonl"):
        number = path.stem.removeprefix("step_")
        if number.isdecimal():
            name = path.parent.relative_to(run / _EVALS).as_posix()
            files.append(("" if name == "." else name, int(number), path))
    if not files and (run / _EVAL).is_file():
        return [("", None, run / _EVAL)]
    return sorted(files)


def _read(path: Path) -> Iterator[Row]:
    """Yield the answers of a file, without a last line that is incomplete. Raises UserError."""
    for _, row in read_json_lines(path):
        yield _with_columns(row)


def _with_columns(row: Row) -> Row:
    if isinstance(scores := row.pop("scores", None), dict):  # The name of rewards in evaluations.
        row.setdefault("rewards", scores)
    if "columns" not in row:
        row["columns"] = {key: row[key] for key in ("answer", "ground_truth") if key in row}
    return row
