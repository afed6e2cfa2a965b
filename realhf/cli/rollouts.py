"""`realhf rollouts`: shows the answers that a run has kept. Free of torch."""

import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from realhf.cli.rollout_rows import (
    Row,
    last_message,
    number_of,
    parse_conditions,
    parse_steps,
    prompt_text,
    read_evaluations,
    read_rollouts,
    require_comparable,
    require_fields,
    sort_rows,
)
from realhf.cli.rollout_view import excerpt, show_in_full, show_rows, show_stories, show_story
from realhf.errors import UserError

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
