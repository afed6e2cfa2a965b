"""Doubts about evaluations, and about held-out rows beside those of training."""

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from itertools import islice

from realhf.data.dataset import LOADER_KEYS, column_of
from realhf.data.rows import first_rows
from realhf.data.tokenized import TokenizedDataset
from realhf.experiment import named_sets
from realhf.runtime.compile.program import Program
from realhf.runtime.doubts.data import ANSWERS, NO_CONTENT, TOKENS, contents

_FEW_ROWS = 5
_MANY_ROWS = 20
"""So many rows are tried with the map function of the training rows."""
_OF_EVALUATIONS = {"eval_every": 0, "eval_at_start": True}
"""Settings of evaluations, which do nothing without held-out rows, and their defaults."""


def sorted_file(
    name: str, held_out: TokenizedDataset, rows: TokenizedDataset
) -> Iterator[str]:
    """Yield a warning if the held-out part of a file has one value of a column, and the rest others."""
    for part in held_out.parts:
        rest = [other for other in rows.parts if other.config.path == part.config.path]
        is_sample = any(other.num_tokenized < other.num_in_file for other in rest)
        if not rest or is_sample or len(part.rows) < _FEW_ROWS:
            continue
        trained = [row for other in rest for row in other.rows]
        for key in part.rows[0].keys() - {*LOADER_KEYS, *NO_CONTENT, *ANSWERS}:
            ours = {json.dumps(row[key]) for row in part.rows if isinstance(row[key], str | int)}
            theirs = [json.dumps(row.get(key)) for row in trained]
            if len(ours) == 1 and 1 <= len(set(theirs)) <= _FEW_ROWS and not ours & set(theirs):
                yield (
                    f"{name}: all {len(part.rows)} rows have {column_of(key)} {ours.pop()}, and no training "
                    "row of the same file has it: the file is sorted; shuffle it before it is split")


def unmapped_rows(
    name: str, held_out: TokenizedDataset, rows: TokenizedDataset
) -> Iterator[str]:
    """Yield a warning about held-out rows that the map function of the training rows would change.

    A function that has been applied to rows in a file usually changes nothing if it is applied again.
    """
    change = rows.parts[0].config.map
    if change is None or any(part.config.map is not change for part in rows.parts):
        return
    for part in (part for part in held_out.parts if part.config.map is None):
        read = {part.config.prompt_key, *(column_of(key) for key in part.keys)}
        before = [*islice(first_rows(part.config), _MANY_ROWS)]
        try:
            after = [change(dict(row)) for row in deepcopy(before)]
        except (Exception, SystemExit):  # These rows have another form than the function expects.
            return
        changed = sorted({
            column for row, new in zip(before, after, strict=True) if isinstance(new, Mapping)
            for column in new if column in row and column in read and new[column] != row[column]})
        if changed:
            columns = " and ".join(map(repr, changed))
            yield (
                f"{name}: dataset has a map function, which would also change {columns} of this set's rows, "
                "and this set has none: give it map, too (a function that returns its row changes nothing)")


def other_prompts(
    name: str, held_out: TokenizedDataset, rows: TokenizedDataset
) -> Iterator[str]:
    """Yield warnings about settings of chats that the training data have, and held-out rows lack."""
    for field in ("chat", "system_prompt", "tools", "tools_key", "chat_template_kwargs"):
        lacks = any(not getattr(part.config, field) for part in held_out.parts)
        if field == "chat":  # Rows of messages are chats without it.
            lacks = any(part.counts.chats == 0 for part in held_out.parts)
            has = all(part.counts.chats for part in rows.parts)
        else:
            has = all(getattr(part.config, field) for part in rows.parts)
        if has and lacks:
            what = "prompts of dataset are chats" if field == "chat" else f"{field} is given for dataset"
            but = "those of this set are text" if field == "chat" else "this set lacks it"
            yield f"{name}: {what}, and {but}, so that the model reads other prompts than it trains on"


def shared_rows(
    name: str, held_out: TokenizedDataset, rows: TokenizedDataset
) -> Iterator[str]:
    """Yield a warning about held-out rows that are rows of the training data, too.

    Rows with the same prompt, and completion if they have one, count as the same. Where most rows have the
    same prompt, such as those of games, the columns that a call reads must be equal, too.
    """
    common = set.intersection(*(set(part.rows[0]) for part in (*rows.parts, *held_out.parts)))
    tokens = common.intersection(TOKENS)
    prompts = [content for part in rows.parts for content in contents(part, tokens)]
    keys = common.difference(NO_CONTENT) if 2 * len(set(prompts)) <= len(prompts) else tokens
    trained = {content for part in rows.parts for content in contents(part, keys)}
    for part in held_out.parts:
        shared = [i for i, content in enumerate(contents(part, keys)) if content in trained]
        if shared:
            yield (
                f"{name}: {len(shared)} of {len(part.rows)} rows are rows of dataset, too, "
                f"first {part.file_place_of(shared[0])}: what is learned by heart counts as learned")
        elif "sequence_ids" not in common:
            asked = [row_set.compared(i, "question") for row_set in rows.parts
                     for i in range(len(row_set.rows))]
            is_told = 2 * len(set(asked)) > len(asked)
            again = [i for i in range(len(part.rows)) if part.compared(i, "question") in set(asked)]
            if again and is_told:
                yield (
                    f"{name}: in {len(again)} of {len(part.rows)} rows the user says what one says in "
                    f"dataset, first {part.file_place_of(again[0])}, beside other messages: what is learned "
                    "by heart counts as learned")


def unevaluated(program: Program) -> Iterator[str]:
    """Yield a warning if nothing is computed for some held-out rows, or if there are settings and no rows."""
    experiment = program.experiment
    if experiment.eval_dataset is None and program.parts:
        given = [
            f"{name} is {value}" for name, default in _OF_EVALUATIONS.items()
            if (value := getattr(experiment, name)) != default]
        given += ["eval_function is given"] * (getattr(experiment, "eval_function", None) is not None)
        if given:
            yield f"{' and '.join(given)}, and there is no eval_dataset: nothing is evaluated"
    evaluated = {eval_set.name for eval_set in program.evaluations}
    if unused := [name for name in named_sets(program.experiment.eval_dataset) if name not in evaluated]:
        lacks_function = getattr(program.experiment, "eval_function", program) is None
        mend = "give eval_function, which scores the answers" if lacks_function else "define eval_graph()"
        which = "".join(f".{name}" for name in unused[:1] if name)
        yield f"eval_dataset{which} is given, and nothing evaluates it: {mend}"
