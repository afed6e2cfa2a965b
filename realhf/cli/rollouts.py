"""`realhf rollouts`: shows the answers that a run has kept. Free of torch."""

import json
import operator
import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

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


_BARS = "▁▂▃▄▅▆▇█"
_BAR_WIDTH = 10
_ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_SPARE = 12
"""Least width of a column of texts, in cells."""
_TEXTS = 60
"""Least width of prompt and completion together in a table of answers, unless they are shorter."""
_WIDEST = 10_000
_NARROW = 72
"""Width below which the table of a story has fewer columns."""
_TREND = 60
"""Most steps in the line of a trend."""


def printable(text: str, *, one_line: bool = False) -> str:
    """Return a text whose control characters are escaped, as they must not reach a terminal.

    Line breaks and tabs stay, or with `one_line` become a mark and a space.
    """
    if one_line:
        text = text.replace("\n", "⏎").replace("\t", " ")
    return "".join(
        c if c.isprintable() or c == "\n" else "    " if c == "\t" else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def excerpt(text: str, width: int) -> str:
    """Return the beginning and the end of a text on one line that is at most `width` cells wide."""
    line = printable(text.strip(), one_line=True)
    if cell_len(line) <= width:
        return line
    tail = (width - 1) * 2 // 5
    end = _beginning(line[::-1], tail)[::-1]
    return f"{_beginning(line, width - 1 - tail)}…{end}"


def _beginning(line: str, width: int) -> str:
    """Return as many characters as fit into a number of cells."""
    for i, total in enumerate(accumulate(map(cell_len, line))):
        if total > width:
            return line[:i]
    return line


@dataclass(frozen=True)
class _Excerpt:
    """A text that a cell of a table shortens to one line."""

    text: str
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(excerpt(self.text, options.max_width), style=self.style, no_wrap=True)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(_SPARE, max(_SPARE, cell_len(self.text)))


def show_rows(console: Console, rows: Sequence[Row], *, note: str) -> None:
    """Print the answers, and a last line that says how many there are.

    They are a table with a line for each, or where that would leave too little room for the texts, the
    prompts with the answers below them.
    """
    table = _table(rows)
    longest = [max((cell_len(excerpt(text, _TEXTS)) for text in texts), default=0) for texts in (
        map(last_message, rows), (str(row.get("completion", "")) for row in rows))]
    needed = min(_TEXTS, sum(longest))
    unlimited = console.options.update(max_width=_WIDEST)
    if Measurement.get(console, unlimited, table).minimum - 2 * _SPARE + needed <= console.width:
        console.print(table)
    else:
        _print_below_prompts(console, rows)
    console.print(Text(note, style="dim"), soft_wrap=True)


def _table(rows: Sequence[Row]) -> Table:
    """Return a table with one line per answer."""
    rewards = reward_names(rows)
    low, high = _score_range(rows)
    numbers = [*(["set"] if any(row.get("set") for row in rows) else []), "step", "row"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1), expand=True)
    for name in numbers:
        table.add_column(name, justify="left" if name == "set" else "right", no_wrap=True)
    table.add_column("prompt", ratio=2)
    table.add_column("completion", ratio=3)
    table.add_column("score", justify="right", no_wrap=True)
    for name in rewards:
        table.add_column(Text(printable(name, one_line=True)), justify="right", no_wrap=True)
    table.add_column("length", justify="right", no_wrap=True)
    previous: Any = None
    for row in rows:
        place = _prompt_of(row)
        repeated = "dim" if place == previous else ""
        previous = place
        cells: list[RenderableType] = [
            *([Text(printable(str(row.get("set", "")), one_line=True))] if "set" in numbers else []),
            _shown(row.get("step"), repeated), _shown(row.get("dataset_row"), repeated),
            _Excerpt(last_message(row), repeated or "cyan"), _Excerpt(str(row.get("completion", ""))),
            _score(row, low, high), *(_shown(number_of(row, f"rewards.{name}")) for name in rewards),
            _length(row)]
        table.add_row(*cells)
    return table


def _print_below_prompts(console: Console, rows: Sequence[Row]) -> None:
    """Print each prompt once, and below it the answers and the facts about them."""
    low, high = _score_range(rows)
    previous: Any = None
    for row in rows:
        if (place := _prompt_of(row)) != previous:
            previous = place
            console.print(Text(f"{_place(row, with_sample=False)}", style="bold"))
            console.print(_indented(_Excerpt(last_message(row), "cyan"), 2))
        console.print(_indented(_Excerpt(str(row.get("completion", ""))), 4))
        console.print(_indented(Text(" · ", style="dim").join(_facts(row, low, high)), 6))


def _indented(text: RenderableType, width: int) -> Padding:
    return Padding(text, (0, 0, 0, width))


def _prompt_of(row: Row) -> list[Any]:
    """Return what the answers to one prompt in one step have in common."""
    return [row.get(name) for name in ("set", "step", "dataset_row", "prompt")]


def show_in_full(console: Console, rows: Sequence[Row], *, note: str, tokens: bool = False) -> None:
    """Print each answer in a panel: prompt, completion, what the reward has read, and perhaps `tokens`."""
    low, high = _score_range(rows)
    for row in rows:
        body = Group(Text(" · ", style="dim").join(_facts(row, low, high)), Rule(style="dim"), _body(row),
                     *(_tokens(row) if tokens else []))
        title = Text(_place(row), style="not dim")
        console.print(Panel(body, title=title, title_align="left", border_style="dim", padding=(0, 1)))
    console.print(Text(note, style="dim"), soft_wrap=True)


def show_story(console: Console, story: Sequence[tuple[Any, Sequence[Row]]]) -> None:
    """Print the answers to one prompt over the steps: `story` has each step with its answers."""
    rows = [row for _, answers in story for row in answers]
    low, high = _score_range(rows)
    first = rows[0]
    place = f"row {first['dataset_row']}" if first.get("dataset_row") is not None else "prompt"
    body = Group(*_prompt(first), *_columns(first))
    title = Text(place, style="not dim")
    console.print(Panel(body, title=title, title_align="left", border_style="dim", padding=(0, 1)))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1), expand=True)
    is_narrow = console.width < _NARROW
    names = ["step", "answers", "mean score", "", "worst", "best", "length", "cut"]
    for name in ["step", "mean score"] if is_narrow else names:
        justify: Any = "right" if name else "left"
        table.add_column(name, justify=justify, no_wrap=True, width=None if name else _BAR_WIDTH)
    table.add_column("best answer", ratio=1)
    means: list[float] = []
    for step, answers in story:
        scores = [score for row in answers if (score := number_of(row, "score")) is not None]
        lengths = [length for row in answers if (length := number_of(row, "length")) is not None]
        best = max(answers, key=lambda row: _score_or(row, float("-inf")))
        mean = sum(scores) / len(scores) if scores else None
        means += [] if mean is None else [mean]
        num_cut = sum(row.get("finished") is False for row in answers)
        cells: list[RenderableType] = [
            _shown(step), str(len(answers)), _shown(mean), _bar(mean, low, high),
            _shown(min(scores, default=None)), _shown(max(scores, default=None)),
            _shown(sum(lengths) / len(lengths) if lengths else None), str(num_cut) if num_cut else ""]
        cells = [cells[0], cells[2]] if is_narrow else cells
        table.add_row(*cells, _Excerpt(str(best.get("completion", ""))))
    console.print(table)
    if means:
        shown = means[:: -(-len(means) // _TREND)]
        trend = "".join(_BARS[round(_share(mean, min(means), max(means)) * 7)] for mean in shown)
        ends = f"mean score {means[0]:z.4g} at first, {means[-1]:z.4g} at last"
        console.print(Text.assemble((trend, "green"), "  ", (ends, "bold")))


def show_stories(console: Console, stories: Sequence[Row], *, note: str) -> None:
    """Print a line for each prompt: its row, in how many steps it came up, and its first and last score."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1), expand=True)
    names = ["set"] if any(story["set"] for story in stories) else []
    for name in names:
        table.add_column(name, no_wrap=True)
    for name in ("row", "steps", "first", "last"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("prompt", ratio=1)
    for story in stories:
        cells = [_shown(story["set"])] if names else []
        shown = (story[key] for key in ("dataset_row", "num_steps", "first_score", "last_score"))
        table.add_row(*cells, *map(_shown, shown), _Excerpt(last_message(story), "cyan"))
    console.print(table)
    console.print(Text(note, style="dim"), soft_wrap=True)


def _place(row: Row, *, with_sample: bool = True) -> str:
    """Return where an answer comes from, or with others of its prompt without its sample."""
    names = [("set", "set"), ("step", "step"), ("row", "dataset_row")]
    names += [("sample", "sample")] if with_sample else []
    fields = [(name, row[key]) for name, key in names if row.get(key) not in (None, "")]
    return " · ".join(f"{name} {printable(str(value), one_line=True)}" for name, value in fields)


def _facts(row: Row, low: float, high: float) -> list[Text]:
    """Return the facts about an answer that are shown beside its texts, such as its score."""
    facts = [Text("score ").append_text(_score(row, low, high))]
    for name in row.get("rewards") or {}:
        facts.append(Text(f"{printable(name, one_line=True)} ").append_text(
            _shown(number_of(row, f"rewards.{name}"))))
    if number_of(row, "advantage") is not None:
        facts.append(Text("advantage ").append_text(_shown(number_of(row, "advantage"))))
    if row.get("length") is not None:
        facts.append(_shown(row["length"]).append(" tokens"))
    if row.get("finished") is False:
        facts.append(Text("cut", style="yellow"))
    if versions := row.get("versions"):
        facts.append(Text(f"weights {versions[0]} to {versions[-1]}"))
    return facts


def _body(row: Row) -> Group:
    completion = Text(printable(str(row.get("completion", ""))), style="green")
    return Group(*_prompt(row), Rule(style="dim"), completion, *_columns(row))


def _tokens(row: Row) -> list[RenderableType]:
    """Return the token ids of an answer; those that were sampled have their log-probs behind them."""
    ids = row.get("token_ids") or []
    mask = row.get("response_mask") or [0] * len(ids)
    logprobs = row.get("logprobs") or [None] * len(ids)
    if not ids:
        return []
    words = [
        f"{token}:{logprob:z.4g}" if is_sampled and logprob is not None else str(token)
        for token, is_sampled, logprob in zip(ids, mask, logprobs, strict=False)]
    return [Rule(style="dim"), Text(f"token ids: {' '.join(words)}", style="blue")]


def _prompt(row: Row) -> list[Text]:
    """Return the prompt, or the messages of a chat, in colours."""
    prompt = row.get("prompt", "")
    if not isinstance(prompt, list):
        return [Text(printable(str(prompt)), style="cyan")]
    texts = []
    for message in prompt:
        role = str(message.get("role", "")) if isinstance(message, dict) else ""
        style = _ROLE_STYLES.get(role, "cyan")
        text = last_message({"prompt": [message]})
        name = f"{printable(role, one_line=True)}: "
        texts.append(Text.assemble((name, f"bold {style}"), (printable(text), style)))
    return texts


def _columns(row: Row) -> list[RenderableType]:
    """Return the columns of the dataset that the reward has read, and what it has logged."""
    shown = [
        Text(f"{printable(str(name), one_line=True)}: {excerpt(_plain(value), 400)}", style=style)
        for group, style in (("columns", "magenta"), ("extra", "yellow"))
        for name, value in (row.get(group) or {}).items()]
    return [Rule(style="dim"), *shown] if shown else []


def _plain(value: Any) -> str:
    return f"{value:z.6g}" if isinstance(value, float) else str(value)


def _score_range(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the lowest and the highest score."""
    scores = [score for row in rows if (score := number_of(row, "score")) is not None]
    return min(scores, default=0.0), max(scores, default=0.0)


def _share(value: float, low: float, high: float) -> float:
    """Return how far a value lies between two others, from 0 to 1; 1 if these are equal."""
    return (value - low) / (high - low) if high > low else 1.0


def _score_or(row: Row, default: float) -> float:
    score = number_of(row, "score")
    return default if score is None else score


def _score(row: Row, low: float, high: float) -> Text:
    """Return the score, red in the lowest third of those that are shown and green in the highest."""
    score = number_of(row, "score")
    if score is None or low == high:
        return _shown(score)
    share = _share(score, low, high)
    style = "red" if share < 1 / 3 else "green" if share > 2 / 3 else "yellow"
    return Text(f"{score:z.4g}", style=style)


def _bar(value: float | None, low: float, high: float) -> Text:
    """Return a bar as long as the value is high between the lowest and the highest score."""
    if value is None:
        return Text("")
    return Text("█" * round(_share(value, low, high) * _BAR_WIDTH), style="green")


def _length(row: Row) -> Text:
    """Return the length, marked if the answer was cut off."""
    text = _shown(row.get("length"))
    return text.append(" cut", style="yellow") if row.get("finished") is False else text


def _shown(value: Any, style: str = "") -> Text:
    """Return a value in few characters; a dash if it is not known."""
    if value is None:
        return Text("-", style="dim")
    text = f"{value:z.4g}" if isinstance(value, float) else printable(str(value), one_line=True)
    return Text(text, style=style)


HELP = "read the answers of a run: filter, sort, show in full, follow one prompt over the steps"
EXAMPLES = (
    "realhf rollouts runs/grpo --steps 5-20 --where 'score<0.5' --sort score",
    "realhf rollouts runs/grpo --step 40 --full --limit 3",
    "realhf rollouts runs/grpo --story 17",
)
_LIMIT = 20
_SORT = "-step"
_PIPE_WIDTH = 160
"""Columns of tables where no terminal says how many it has."""
_MAX_NAMED = 5
"""Most prompts that a message about an ambiguous story names."""


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of `realhf rollouts`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory, or a rollouts.jsonl")
    add("--step", type=int, metavar="N", help="answers of this step")
    add("--steps", metavar="A-B", help="answers of these steps; 5- and -20 are legal, too")
    text = "answers with values like these, such as score<0.5,exact=0 or dataset=easy; repeatable"
    add("--where", action="append", default=[], metavar="CONDITION", help=text)
    add("--contains", metavar="TEXT", help="answers with this text in prompt or completion")
    add("--cut", action="store_true", help="answers that were cut off at the limit of tokens")
    text = "order by this field, such as score, length or a reward; -score: the highest first; default: -step"
    add("--sort", nargs="?", metavar="FIELD", default=_SORT, const="", help=text)
    text = f"most answers to show, 0 for all; default: {_LIMIT}, with --json all"
    add("--limit", type=int, metavar="N", help=text)
    add("--full", action="store_true", help="show whole prompts and completions")
    text = "show token ids and log-probs, too (of runs with rollouts.tokens)"
    add("--tokens", action="store_true", help=text)
    text = "answers to one prompt over the steps, by its row in the dataset or a text in it; no ROW: a list"
    add("--story", nargs="?", const="", metavar="ROW", help=text)
    text = "answers of evaluations instead of training, of one set or of all"
    add("--eval", nargs="?", const="", metavar="SET", help=text)
    add("--json", action="store_true", help="print one JSON document")


def run(options: Namespace, unknown: Sequence[str]) -> int:
    """Print the answers and return the exit code."""
    if options.sort == "":  # The parser takes `-score` for an unknown option.
        options.sort = unknown[0] if unknown else _SORT
        unknown = unknown[1:]
    _check_options(options, unknown)
    path = Path(options.run)
    source, rows = read_rollouts(path) if options.eval is None else read_evaluations(path, options.eval)
    matching = _filtered(rows, options)
    if options.tokens and matching and not any("token_ids" in row for row in matching):
        raise UserError(f"--tokens: no such answer in {source} has token ids: set rollouts.tokens in the run")
    if options.story == "":
        return _print_stories(matching, options, source)
    if options.story is not None:
        return _print_story(_one_prompt(matching, options.story), options)
    if options.sort != _SORT:  # The last evaluation's answers have no step.
        require_fields(rows, [options.sort.removeprefix("-")], f"--sort {options.sort}")
    ordered = sort_rows(matching, options.sort)
    limit = (0 if options.json else _LIMIT) if options.limit is None else options.limit
    shown = ordered[: limit or None]
    if options.json:
        document = {"file": str(source), "answers": len(rows), "matching": len(matching), "rollouts": shown}
        print(json.dumps(document))
        return 0
    note = f"{len(shown)} of {len(matching)} matching answers; {source} has {len(rows)}"
    if len(shown) < len(matching):
        note += " (--limit 0 shows all)"
    if options.full or options.tokens:
        show_in_full(_console(), shown, note=note, tokens=options.tokens)
    else:
        show_rows(_console(), shown, note=note)
    return 0


def _check_options(options: Namespace, unknown: Sequence[str]) -> None:
    if unknown:
        legal = ", ".join(f"--{name}" for name in vars(options) if name not in ("command", "run"))
        raise UserError(f"realhf rollouts has no option {unknown[0]}: legal are {legal}")
    if options.limit is not None and options.limit < 0:
        raise UserError(f"--limit {options.limit}: it must not be negative")
    if options.step is not None and options.steps is not None:
        raise UserError("--step and --steps: give one of them")


def _console() -> Console:
    is_pipe = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(file=sys.stdout, highlight=False, markup=False, width=_PIPE_WIDTH if is_pipe else None)


def _filtered(rows: Sequence[Row], options: Namespace) -> list[Row]:
    """Return the answers that the options choose."""
    conditions = [(text, parse_conditions(text)) for text in options.where]
    for text, parsed in conditions:
        require_comparable(rows, parsed, f"--where {text!r}")
    steps = None
    if options.step is not None:
        steps = (options.step, options.step)
    elif options.steps is not None:
        steps = parse_steps(options.steps)

    def is_chosen(row: Row) -> bool:
        step = number_of(row, "step")
        if steps is not None and (step is None or not steps[0] <= step <= steps[1]):
            return False
        if options.cut and row.get("finished") is not False:
            return False
        text = options.contains
        if text is not None and text not in f"{prompt_text(row)}\n{row.get('completion', '')}":
            return False
        return all(condition(row) for _, parsed in conditions for condition in parsed)

    return [row for row in rows if is_chosen(row)]


def _one_prompt(rows: Sequence[Row], wanted: str) -> list[Row]:
    """Return the answers to one prompt, given its row or a text that it contains. Raises UserError."""
    matching = [row for row in rows if str(row.get("dataset_row")) == wanted]
    matching = matching or [row for row in rows if wanted in prompt_text(row)]
    if not matching:
        numbers = sorted({row["dataset_row"] for row in rows if isinstance(row.get("dataset_row"), int)})
        hint = f": rows with answers are {_named(numbers)}" if numbers else ""
        raise UserError(f"--story {wanted}: no answer is to a prompt of this row, or with this text{hint}")
    prompts = {(row.get("set"), row.get("dataset_row"), prompt_text(row)): row for row in matching}
    if len(prompts) > 1:
        named = [f"{row.get('dataset_row')} ({excerpt(last_message(row), 40)})" for row in prompts.values()]
        raise UserError(
            f"--story {wanted}: {len(prompts)} prompts have it: name one by its row: {_named(named)}")
    return matching


def _named(values: Sequence[Any]) -> str:
    more = ", ..." if len(values) > _MAX_NAMED else ""
    return ", ".join(str(value) for value in values[:_MAX_NAMED]) + more


def _print_stories(rows: Sequence[Row], options: Namespace, source: Path) -> int:
    """Print the prompts that are followed, or in evaluations all. Raises UserError if there is none."""
    by_prompt: dict[tuple[Any, ...], dict[Any, list[Row]]] = {}
    for row in sorted(rows, key=lambda row: number_of(row, "step") or 0.0):
        if row.get("followed", True):
            prompt = (row.get("set") or "", row.get("dataset_row"), prompt_text(row))
            by_prompt.setdefault(prompt, {}).setdefault(row.get("step"), []).append(row)
    if not by_prompt:
        raise UserError(f"--story: {source} has no such answers to rows that are followed (follow_rows)")
    stories: list[Row] = []
    for prompt, steps in by_prompt.items():
        scores = [mean for answers in steps.values() if (mean := _mean(answers)) is not None]
        first, last = (scores[0], scores[-1]) if scores else (None, None)
        stories.append({
            "set": prompt[0], "dataset_row": prompt[1], "num_steps": len(steps), "first_score": first,
            "last_score": last, "prompt": next(iter(steps.values()))[0].get("prompt")})
    stories.sort(key=lambda story: (story["set"], number_of(story, "dataset_row") or 0.0))
    if options.json:
        print(json.dumps({"file": str(source), "stories": stories}))
        return 0
    shown = stories[: (_LIMIT if options.limit is None else options.limit) or None]
    note = f"{len(shown)} of {len(stories)} prompts; --story ROW shows the answers to one"
    show_stories(_console(), shown, note=note)
    return 0


def _print_story(rows: Sequence[Row], options: Namespace) -> int:
    steps: dict[Any, list[Row]] = {}
    for row in sorted(rows, key=lambda row: number_of(row, "step") or 0.0):
        steps.setdefault(row.get("step"), []).append(row)
    if options.json:
        first = rows[0]
        story = [{"step": step, "mean_score": _mean(answers), "rollouts": answers}
                 for step, answers in steps.items()]
        about = {"dataset_row": first.get("dataset_row"), "prompt": first.get("prompt")}
        print(json.dumps({**about, "steps": story}))
        return 0
    console = _console()
    if options.full or options.tokens:
        ordered = [row for answers in steps.values() for row in answers]
        show_in_full(console, ordered[: options.limit or None], note=f"{len(ordered)} answers",
                     tokens=options.tokens)
    show_story(console, list(steps.items()))
    return 0


def _mean(rows: Sequence[Row]) -> float | None:
    scores = [score for row in rows if (score := number_of(row, "score")) is not None]
    return sum(scores) / len(scores) if scores else None
