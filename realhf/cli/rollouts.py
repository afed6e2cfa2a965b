"""`realhf rollouts`: shows the samples that a run has kept. Free of torch."""

import ast
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from realhf.cli.overrides import refuse_words
from realhf.errors import UserError, warn
from realhf.runtime.records.rollout_file import ROLLOUTS
from realhf.user_input.files import read_json_lines
from realhf.user_input.suggest import did_you_mean

Row = dict[str, Any]
"""A sample: the fields of a line of rollouts.jsonl, or of a file of evals/."""

HELP = "read the samples of a run: filter, sort, group, show in full"
EXAMPLES = (
    "realhf rollouts runs/grpo --where 'score < 0.5 and 5 <= step <= 20' --sort score",
    "realhf rollouts runs/grpo --where 'step == 40' --full --limit 3",
    "realhf rollouts runs/grpo --where 'dataset_row == 17' --by step",
)
_EVAL = "eval.jsonl"
_EVALS = "evals"
_GROUPS = ("columns", "extra", "rewards")
"""Fields whose value is a dict. What is in it has a name in expressions, too; later ones count."""
_NUMBERS = ("score", "advantage", "length")
_FUNCTIONS = {f.__name__: f for f in (abs, all, any, bool, float, int, len, max, min, round, str, sum)}
_LIMIT = 20
_PIPE_WIDTH = 160
"""Columns of the output where no terminal says how many it has."""
_ROLE_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_SHORT = 40
"""Most cells of a value by which samples are grouped."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf rollouts`."""
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory, or a rollouts.jsonl")
    text = "samples for which this Python expression is true, such as \"'boxed' in completion\"; repeatable"
    add("--where", action="append", default=[], metavar="EXPRESSION", help=text)
    text = "order by an expression, such as score; -score: the highest first; default: -step"
    add("--sort", nargs="?", metavar="EXPRESSION", default="-step", const="", help=text)
    text = "one line for all samples with the same value of an expression, such as step or dataset_row"
    add("--by", metavar="EXPRESSION", help=text)
    text = f"most samples or lines to show, 0 for all; default: {_LIMIT}, with --json all"
    add("--limit", type=int, metavar="N", help=text)
    add("--full", action="store_true", help="show whole prompts and completions")
    text = "show token ids and log-probs, too (of runs with rollouts.tokens)"
    add("--tokens", action="store_true", help=text)
    text = "samples of evaluations instead of training, of one set or of all"
    add("--eval", nargs="?", const="", metavar="SET", help=text)
    add("--json", action="store_true", help="print one JSON document")


def main(options: Namespace, words: list[str]) -> int:
    """Print the samples and return the exit code."""
    if options.sort == "":  # The parser takes `-score` for an unknown option.
        options.sort = words.pop(0) if words else "-step"
    refuse_words(options.parser, words)
    if options.limit is not None and options.limit < 0:
        raise UserError(f"--limit {options.limit}: it must not be negative")
    path = Path(options.run)
    source, rows = read_rollouts(path) if options.eval is None else read_evaluations(path, options.eval)
    matching = rows
    for text in options.where:
        values = evaluate(text, rows, option="--where")
        chosen = {id(row) for row, value in zip(rows, values, strict=True) if value}
        matching = [row for row in matching if id(row) in chosen]
    if options.tokens and matching and not any("token_ids" in row for row in matching):
        raise UserError(f"--tokens: no such sample in {source} has token ids: set rollouts.tokens in the run")
    ordered = sort_rows(matching, options.sort)
    about = {"file": str(source), "answers": len(rows), "matching": len(matching)}
    if rows and not matching:
        known = sorted({row["step"] for row in rows if isinstance(row.get("step"), int)})
        steps = f": it has those of steps {known[0]} to {known[-1]}" if known else ""
        warn(f"no sample in {source} matches{steps}")
    limit = ((0 if options.json else _LIMIT) if options.limit is None else options.limit) or None
    console = _console()
    if options.by is not None:
        groups = group_rows(ordered, options.by)
        if options.json:
            print(json.dumps(about | {"groups": groups[:limit]}))
        else:
            _print_groups(console, groups[:limit], options.by)
            _print_note(console, min(limit or len(groups), len(groups)), len(groups), "groups", about)
        return 0
    shown = ordered[:limit]
    if options.json:
        print(json.dumps(about | {"rollouts": shown}))
        return 0
    if options.full or options.tokens:
        _print_in_full(console, shown, tokens=options.tokens)
    else:
        _print_excerpts(console, shown)
    _print_note(console, len(shown), len(matching), "matching samples", about)
    return 0


def read_rollouts(run: Path) -> tuple[Path, list[Row]]:
    """Return the file of the samples of training, and these. Raises UserError if there is none."""
    if run.is_file():
        return run, list(_read(run))
    if not run.is_dir():
        raise UserError(f"{run}: there is no such run directory")
    path = run / ROLLOUTS
    if not path.is_file():
        why = "its experiment switches rollouts off, generates nothing, or has not begun its first step"
        hint = "; --eval shows the samples of evaluations" if _eval_files(run) else ""
        raise UserError(f"{run} has no {ROLLOUTS}: {why}{hint}")
    return path, list(_read(path))


def read_evaluations(run: Path, wanted: str) -> tuple[Path, list[Row]]:
    """Return the path of the samples of evaluations, and these; `wanted` is a set, or empty for all.

    Raises UserError if there are none.
    """
    if not run.is_dir():
        raise UserError(f"{run}: there is no such run directory")
    files = _eval_files(run)
    if not files:
        raise UserError(f"{run} has neither {_EVALS}/ nor {_EVAL}: no evaluation has scored samples in it")
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
    """Yield the samples of a file, without a last line that is incomplete. Raises UserError.

    Values of other types than a run writes are left out.
    """
    for _, row in read_json_lines(path):
        if "scores" in row:  # The name of rewards in evaluations.
            row.setdefault("rewards", row.pop("scores"))
        if "columns" not in row:
            row["columns"] = {key: row[key] for key in ("answer", "ground_truth") if key in row}
        kinds = {**dict.fromkeys(_GROUPS, dict), **dict.fromkeys(_NUMBERS, int | float), "versions": list}
        yield {key: value for key, value in row.items()
               if value is None or isinstance(value, kinds.get(key, object))}


def evaluate(text: str, rows: Sequence[Row], *, option: str) -> list[Any]:
    """Return the value of a Python expression for each sample; None if a sample lacks what it reads.

    It cannot do anything but compute (simpleeval). Raises UserError if it is no expression, if it has a name
    that no sample has, or if it fails for every sample.
    """
    # Only expressions need it: other commands work without.
    from simpleeval import EvalWithCompoundTypes, FeatureNotAvailable, FunctionNotDefined, NameNotDefined

    try:
        expression = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        reason = getattr(error, "msg", error)
        raise UserError(
            f"{option} {text!r} is no Python expression ({reason}): write for example "
            "'score < 0.5 and step == 10'") from error
    if isinstance(expression, ast.Tuple):
        raise UserError(f"{option} {text!r} is a tuple: join conditions by `and` or `or`")
    names_of = [_names(row) for row in rows]
    absent = dict.fromkeys(name for names in names_of for name in names)
    evaluator = EvalWithCompoundTypes(functions=dict(_FUNCTIONS))
    values = []
    failure: Exception | None = None
    for names in names_of:
        evaluator.names = absent | names
        try:
            values.append(evaluator.eval(text, expression))
        except NameNotDefined as error:
            meant = did_you_mean(error.name, list(absent))
            legal = ", ".join(sorted(absent))
            what = f"there is no field {error.name!r}{meant}"
            raise UserError(f"{option}: {what}: legal are {legal}") from error
        except (FeatureNotAvailable, FunctionNotDefined) as error:
            raise UserError(f"{option} {text!r}: {error}") from error
        except Exception as error:  # The sample lacks a value, such as that of a reward that returned None.
            failure = error
            values.append(None)
    if failure is not None and all(value is None for value in values):
        raise UserError(f"{option} {text!r} fails for every sample: {failure}") from failure
    return values


def _names(row: Row) -> Row:
    """Return the names of a sample in expressions: its fields, rewards, columns and what rewards log."""
    inner = {name: value for group in _GROUPS for name, value in (row.get(group) or {}).items()}
    return inner | row


def sort_rows(rows: Sequence[Row], by: str) -> list[Row]:
    """Sort samples by an expression. Those without its value come last; equal ones keep their order."""
    if by == "-step" and not any("step" in row for row in rows):  # The last evaluation's samples have none.
        return list(rows)
    pairs = list(zip(evaluate(by, rows, option=f"--sort {by}"), rows, strict=True))
    try:
        known = sorted((pair for pair in pairs if pair[0] is not None), key=lambda pair: pair[0])
    except TypeError as error:
        raise UserError(f"--sort {by}: its values have no order ({error})") from error
    return [row for _, row in known] + [row for value, row in pairs if value is None]


def group_rows(rows: Sequence[Row], by: str) -> list[dict[str, Any]]:
    """Return the samples by the value of an expression, in rising order, with the facts about each group."""
    groups: dict[Any, list[Row]] = {}
    for value, row in zip(evaluate(by, rows, option=f"--by {by}"), rows, strict=True):
        key = json.dumps(value) if isinstance(value, dict | list) else value
        groups.setdefault(key, []).append(row)
    found = []
    for key, samples in groups.items():
        scores = [row["score"] for row in samples if row.get("score") is not None]
        lengths = [row["length"] for row in samples if row.get("length") is not None]
        found.append({
            "by": key, "samples": len(samples), "mean_score": _mean(scores),
            "worst": min(scores, default=None), "best": max(scores, default=None),
            "mean_length": _mean(lengths), "cut": sum(row.get("finished") is False for row in samples),
            "rollouts": samples})
    return sorted(found, key=lambda group: _rank(group["by"]))


def _rank(value: Any) -> tuple[bool, bool, Any]:
    """Return by what groups are sorted: numbers, then texts, then the samples without the value."""
    return value is None, isinstance(value, str), 0 if value is None else value


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _console() -> Console:
    is_pipe = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(file=sys.stdout, highlight=False, markup=False, width=_PIPE_WIDTH if is_pipe else None)


def _print_note(console: Console, shown: int, of: int, what: str, about: dict[str, Any]) -> None:
    more = " (--limit 0 shows all)" if shown < of else ""
    text = f"{shown} of {of} {what}; {about['file']} has {about['answers']} samples{more}"
    console.print(Text(text, style="dim"), soft_wrap=True)


def _print_excerpts(console: Console, rows: Sequence[Row]) -> None:
    """Print each prompt once, and below it the samples and the facts about them."""
    previous: Any = None
    scores = _scores(rows)
    for row in rows:
        prompt = [row.get(name) for name in ("set", "step", "dataset_row", "prompt")]
        if prompt != previous:
            previous = prompt
            console.print(Text(_place(row, with_sample=False), style="bold"))
            _print_excerpt(console, _last_message(row), "cyan", 2)
        _print_excerpt(console, str(row.get("completion", "")), "", 4)
        console.print(Padding(_facts(row, scores), (0, 0, 0, 6)))


def _print_excerpt(console: Console, text: str, style: str, indent: int) -> None:
    console.print(Text(" " * indent + excerpt(text, console.width - indent), style=style, no_wrap=True))


def _print_in_full(console: Console, rows: Sequence[Row], *, tokens: bool) -> None:
    """Print each sample: prompt, completion, the columns that the reward has read, and perhaps `tokens`."""
    scores = _scores(rows)
    for row in rows:
        console.print(Rule(Text(_place(row), style="bold"), align="left", style="dim"))
        console.print(_facts(row, scores))
        prompt = row.get("prompt", "")
        for message in prompt if isinstance(prompt, list) else [{"content": prompt}]:
            role = str(message.get("role", "")) if isinstance(message, dict) else ""
            style = _ROLE_STYLES.get(role, "cyan")
            name = f"{printable(role, one_line=True)}: " if role else ""
            console.print(Text.assemble((name, f"bold {style}"), (printable(_content(message)), style)))
        console.print(Rule(style="dim"))
        for said in _said(row):
            console.print(said)
        for group in ("columns", "extra"):
            for name, value in (row.get(group) or {}).items():
                shown = f"{value:z.6g}" if isinstance(value, float) else str(value)
                text = f"{printable(str(name), one_line=True)}: {excerpt(shown, 400)}"
                console.print(Text(text, style="magenta" if group == "columns" else "yellow"))
        if tokens and (ids := row.get("token_ids")):
            mask = row.get("response_mask") or [0] * len(ids)
            logprobs = row.get("logprobs") or [None] * len(ids)
            words = [
                f"{token}:{logprob:z.4g}" if is_sampled and logprob is not None else str(token)
                for token, is_sampled, logprob in zip(ids, mask, logprobs, strict=False)]
            console.print(Text(f"token ids: {' '.join(words)}", style="blue"))


def _said(row: Row) -> Iterator[Text]:
    """Yield what the model has said, and in several turns also what its environment has answered."""
    messages, turns = row.get("messages"), row.get("turns")
    if not isinstance(messages, list) or not turns:
        yield Text(printable(str(row.get("completion", ""))), style="green")
        return
    number = 0
    for message in messages:
        role = str(message.get("role", ""))
        is_own = role == "assistant" and number < len(turns)
        name = printable(role, one_line=True)
        if is_own:
            turn = turns[number]
            rewards = (f"{printable(k, one_line=True)} {_shown(v)}" for k, v in turn["rewards"].items())
            facts = [f"turn {number + 1}", f"{turn['stop'] - turn['start']} tokens", *rewards]
            facts.append(f"environment {turn['seconds']:.3g} s")
            name = f"{name} ({', '.join(facts)})"
            number += 1
        text = _content(message)
        for call in message.get("tool_calls") or []:
            text += f" {json.dumps(call.get('function', call), ensure_ascii=False)}"
        style = "green" if is_own else "cyan"
        yield Text.assemble((f"{name}: ", f"bold {style}"), (printable(text.strip()), style))


def _print_groups(console: Console, groups: Sequence[dict[str, Any]], by: str) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True, expand=True)
    table.add_column(excerpt(by, _SHORT), no_wrap=True, overflow="ellipsis")
    for name in ("samples", "score", "worst", "best", "length", "cut"):
        table.add_column(name, justify="right")
    table.add_column("best sample", ratio=1, no_wrap=True, overflow="ellipsis")
    for group in groups:
        numbers = (group[name] for name in ("samples", "mean_score", "worst", "best", "mean_length", "cut"))
        best = next(row for row in group["rollouts"] if row.get("score") == group["best"])
        table.add_row(
            Text(excerpt(_shown(group["by"]), _SHORT)), *(Text(_shown(number)) for number in numbers),
            Text(printable(str(best.get("completion", "")).strip(), one_line=True)))
    console.print(table)


def _place(row: Row, *, with_sample: bool = True) -> str:
    """Return where a sample comes from, or what it has in common with others of its prompt."""
    names = [("set", "set"), ("step", "step"), ("row", "dataset_row")]
    names += [("sample", "sample")] if with_sample else []
    fields = [(name, row[key]) for name, key in names if row.get(key) not in (None, "")]
    return " · ".join(f"{name} {_shown(value)}" for name, value in fields)


def _scores(rows: Sequence[Row]) -> list[float]:
    return [row["score"] for row in rows if row.get("score") is not None]


def _facts(row: Row, scores: Sequence[float]) -> Text:
    """Return the facts about a sample that are shown beside its texts.

    The score is red in the lowest third of `scores`, those that are shown, and green in the highest.
    """
    score = row.get("score")
    style = ""
    if score is not None and min(scores) < max(scores):
        share = (score - min(scores)) / (max(scores) - min(scores))
        style = "red" if share < 1 / 3 else "green" if share > 2 / 3 else "yellow"
    facts = [Text.assemble("score ", (_shown(score), style))]
    for name, value in (row.get("rewards") or {}).items():
        facts.append(Text(f"{printable(name, one_line=True)} {_shown(value)}"))
    if row.get("advantage") is not None:
        facts.append(Text(f"advantage {_shown(row['advantage'])}"))
    if row.get("length") is not None:
        facts.append(Text(f"{_shown(row['length'])} tokens"))
    if row.get("stop") is not None:
        facts.append(Text(f"{len(row.get('turns', ()))} turns, stopped by {printable(str(row['stop']))}"))
    if row.get("environment_seconds") is not None:
        facts.append(Text(f"environment {row['environment_seconds']:.3g} s"))
    if row.get("failure"):
        facts.append(Text(printable(row["failure"], one_line=True), style="red"))
    if row.get("finished") is False:
        facts.append(Text("cut", style="yellow"))
    if versions := row.get("versions"):
        facts.append(Text(f"weights {versions[0]} to {versions[-1]}"))
    return Text(" · ").join(facts)


def _last_message(row: Row) -> str:
    """Return the prompt, or the last message of a chat."""
    prompt = row.get("prompt", "")
    return _content(prompt[-1]) if isinstance(prompt, list) and prompt else str(prompt)


def _content(message: Any) -> str:
    content = message.get("content", "") if isinstance(message, dict) else message
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def _shown(value: Any) -> str:
    """Return a value in few characters; a dash if it is not known."""
    if value is None:
        return "-"
    return f"{value:z.4g}" if isinstance(value, float) else printable(str(value), one_line=True)


def printable(text: str, *, one_line: bool = False) -> str:
    """Return a text whose control characters are escaped, as they must not reach a terminal.

    Line breaks and tabs stay, or with `one_line` become a mark and a space.
    """
    if one_line:
        text = text.replace("\n", "⏎").replace("\t", " ")
    return "".join(
        c if c.isprintable() or c == "\n" else "    " if c == "\t" else
        c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)


def excerpt(text: str, width: int) -> str:
    """Return the beginning and the end of a text on one line that is at most `width` cells wide."""
    line = printable(text.strip(), one_line=True)
    if cell_len(line) <= width:
        return line
    tail = (width - 1) * 2 // 5
    return f"{set_cell_size(line, width - 1 - tail)}…{set_cell_size(line[::-1], tail)[::-1]}"
