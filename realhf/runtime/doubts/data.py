"""Doubts about the rows of one data set: its files, columns, prompts and completions."""

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any

from realhf.data.dataset import DATASET_ROW, LOADER_KEYS, START_IDS, ArrayDataset, column_of, reads_pairs
from realhf.data.light_tokenizer import normalized, unknown_token_id
from realhf.data.tokenized import Compared, TokenizedDataset, TokenizedRows
from realhf.graph import DataflowGraph
from realhf.runtime.compile.program import Program

ANSWERS = ("answer", "answers", "ground_truth", "solution", "target", "label", "reference")
"""Usual names of columns with right answers."""
_PART_OF = re.compile(r"(?P<head>.*)-(?P<number>\d{5})-of-(?P<total>\d{5})\.\w+")
"""The name of one of several files, as the library `datasets` gives it."""
_SPLITS = {
    "training": {"train", "training"},
    "held-out": {"test", "testing", "validation", "valid", "val", "dev", "eval", "heldout"}}
TOKENS = ("prompt_ids", START_IDS, "sequence_ids")
_WHOLE_FLOAT = re.compile(r"-?\d+\.0")
NO_CONTENT = ("prompt", "response_mask", DATASET_ROW)
"""Columns by which rows are not compared: they follow from the tokens, or every row has its own number."""
_MANY_ROWS = 20
"""Fewer rows are a trial, and may be the same."""


def named_parts(name: str, rows: TokenizedDataset | None) -> list[tuple[str, TokenizedRows]]:
    """Return the rows of each part of a data set, with its name for messages."""
    parts = () if rows is None else rows.parts
    return [(name if len(parts) == 1 else f"{name}.parts[{i}]", part) for i, part in enumerate(parts)]


def odd_arrays(program: Program) -> Iterator[str]:
    """Yield warnings about rows of numbers: values that are no numbers, and batches larger than the rows."""
    experiment = program.experiment
    sets = [("dataset", experiment.dataset)]
    sets += [(eval_set.field, eval_set.evaluation.dataset) for eval_set in program.evaluations]
    for name, config in sets:
        if isinstance(config, ArrayDataset) and config.path:
            for key, (count, first) in config.not_finite().items():
                yield (
                    f"{name}: column {key!r} has NaN or infinite values in {count} of {config.count()} rows, "
                    f"first in row {first}")
    config = experiment.dataset
    if isinstance(config, ArrayDataset) and config.path and experiment.batch_size > config.count():
        yield (
            f"batch_size is {experiment.batch_size}, and the dataset has {config.count()} rows: each row is "
            f"about {experiment.batch_size / config.count():.3g} times in a batch")


def _read_columns(rows: TokenizedRows) -> list[str]:
    """Return the keys of columns that a call reads, without those that only other parts of a mixture have."""
    return [key for key in rows.keys if key not in LOADER_KEYS and column_of(key) not in rows.absent]


def _share_of(indices: Sequence[int], rows: TokenizedRows) -> str:
    """Return for example "3 of 100 rows, first in data.jsonl:7"."""
    return f"{len(indices)} of {len(rows.rows)} rows, first in {rows.place_of(indices[0])}"


def left_out(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about rows that are left out, and prompts and completions that are cut."""
    if count := rows.counts.long_prompts:
        limit = f"max_prompt_tokens {rows.config.max_prompt_tokens}"
        yield f"{name}: {_share(count, rows)} are left out, as their prompts are longer than {limit}"
    if count := rows.counts.long_completions:
        limit = f"max_completion_tokens {rows.config.max_completion_tokens}"
        yield f"{name}: {_share(count, rows)} are left out, as their completions are longer than {limit}"
    if count := rows.counts.cut:
        yield f"{name}: {count} prompts or completions are cut, as they are longer than their limit"
    if count := rows.counts.torn_chats:
        lost = "end, with which answers begin" if rows.config.too_long == "keep_start" else "beginning"
        yield (
            f"{name}: too_long {rows.config.too_long!r} also cuts what the template writes at the {lost}, "
            f"in {count} prompts: 'drop' leaves their rows out")


def _share(count: int, rows: TokenizedRows) -> str:
    """Return for example "3 of 100 rows"."""
    tried = "rows" if rows.num_tokenized == rows.num_in_file else "rows that were tried"
    return f"{count} of {rows.num_tokenized} {tried}"


def null_columns(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about columns that a call reads and that are null in some rows."""
    for key in _read_columns(rows):
        if null := [i for i, row in enumerate(rows.rows) if row[key] is None]:
            yield f"{name}: column {column_of(key)!r} is null in {_share_of(null, rows)}"


def mixed_types(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about columns that a call reads, with numbers in some rows and text in others."""
    kinds = {bool: "true or false", int: "numbers", float: "numbers", str: "text"}
    for key in _read_columns(rows):
        of_rows = [kinds.get(type(row[key])) for row in rows.rows]
        counts = Counter(kind for kind in of_rows if kind is not None)
        if len(counts) > 1:
            (most, _), *_, (least, count) = counts.most_common()
            first = rows.place_of(of_rows.index(least))
            yield (
                f"{name}: column {column_of(key)!r} has {least} in {count} rows, first in {first}, and "
                f"{most} in others: functions get 3 and '3' as they are, which differ; write all in one way")


def blank_answers(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about columns of right answers that are read and have empty text in some rows."""
    for column in ANSWERS:
        values = [row.get(column) for row in rows.rows]
        if blank := [i for i, value in enumerate(values) if isinstance(value, str) and not value.strip()]:
            yield f"{name}: column {column!r} is empty in {_share_of(blank, rows)}"


def equal_rows(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield a warning if most rows repeat others."""
    repeated = len(rows.rows) - len(set(contents(rows, rows.rows[0].keys() - set(NO_CONTENT))))
    if len(rows.rows) >= _MANY_ROWS and 2 * repeated > len(rows.rows):
        yield f"{name}: {repeated} of {len(rows.rows)} rows are the same as an earlier one"


def missing_parts(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about files that are some of several, by their names, such as train-00000-of-00002."""
    found: dict[tuple[str, str], set[int]] = {}
    for file in _files_of_patterns(rows):
        if (match := _PART_OF.fullmatch(file)) is not None:
            found.setdefault((match["head"], match["total"]), set()).add(int(match["number"]))
    for (head, total), numbers in found.items():
        if missing := sorted(set(range(int(total))) - numbers):
            yield (
                f"{name}: {len(missing)} of the {int(total)} files {head}-*-of-{total} are not there, the "
                f"first {head}-{missing[0]:05}-of-{total}: a download seems to have stopped (or name those "
                "that are meant)")


def mixed_splits(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield a warning if a pattern takes files of training and of held-out rows, by their names."""
    firsts: dict[str, str] = {}
    constant = _words_of(" ".join(_paths(rows)))
    for file in _files_of_patterns(rows):
        kinds = [kind for kind, names in _SPLITS.items() if names & (_words_of(file) - constant)]
        if len(kinds) == 1:
            firsts.setdefault(kinds[0], file)
    if len(firsts) == len(_SPLITS):
        training, held_out = map(firsts.__getitem__, _SPLITS)
        yield (
            f"{name}: the pattern takes files of training rows ({training}) and of held-out ones "
            f"({held_out}): narrow it, such as train-*, or list the files if all are meant")


def _files_of_patterns(rows: TokenizedRows) -> list[str]:
    """Return the files that patterns of the path match which do not say which of several files to take."""
    patterns = [path for path in _paths(rows) if "*" in path and not re.search(r"[^*]-of-", path)]
    return [file for file in rows.files if any(fnmatch(file, pattern) for pattern in patterns)]


def _paths(rows: TokenizedRows) -> Sequence[str]:
    return (rows.config.path,) if isinstance(rows.config.path, str) else rows.config.path


def _words_of(path: str) -> set[str]:
    return set(re.split(r"[\W_\d]+", path.lower()))


def contrary_answers(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about prompts that have different right answers in different rows.

    Many rows of a game or an environment have the same prompt, and answers of their own.
    """
    if "sequence_ids" in rows.keys:
        return
    prompts = [rows.compared(i, "prompt") for i in range(len(rows.rows))]
    others = [key for key in _read_columns(rows) if column_of(key) not in ANSWERS]
    for key in (key for key in rows.keys if column_of(key) in ANSWERS):
        first: dict[tuple[int, str], str] = {}
        contrary = []
        for i, row in enumerate(rows.rows):
            asked = prompts[i], json.dumps([row[other] for other in others], default=str)
            answer = " ".join(str(row[key]).split()).casefold()
            if first.setdefault(asked, answer) != answer:
                contrary.append(i)
        if contrary and 4 * len(set(prompts)) >= len(prompts):
            yield (
                f"{name}: {len(contrary)} rows have another {column_of(key)} than an earlier row with the "
                f"same prompt, first in {rows.place_of(contrary[0])}: the same completion seems right in one "
                "and wrong in the other")


def whole_floats(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about whole numbers that have become floats, because of gaps in a table's column."""
    for key in _read_columns(rows):
        values = [row[key] for row in rows.rows if row[key] is not None]
        number = next((value for value in values if value), None)
        is_whole = all(isinstance(value, float) and value.is_integer() for value in values)
        is_text = all(isinstance(value, str) and _WHOLE_FLOAT.fullmatch(value.strip()) for value in values)
        is_gappy = is_whole and len(values) < len(rows.rows)
        is_written = is_text and len(values) >= _MANY_ROWS
        if len(set(map(str, values))) > 2 and (is_gappy or is_written):
            kind = "whole numbers as floats beside nulls" if is_whole else "whole numbers as floats in text"
            yield (
                f"{name}: column {column_of(key)!r} has {kind}, such as {number}, as tables write them if "
                f"some are missing: if completions are compared with its text, {float(number or 0):.0f} is "
                "wrong; a map function can make them whole")


def lost_characters(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about what the tokenizer changes in texts before it splits them."""
    texts = "".join(str(row["prompt"]) for row in rows.rows[:_MANY_ROWS])
    lost = {
        "capital letters": any(map(str.isupper, texts)) and normalized(rows.tokenizer, "A") == "a",
        "accents": not texts.isascii() and normalized(rows.tokenizer, "\u00e9") == "e",
        "line breaks": "\n" in texts.replace("\\n", "\n") and "\n" not in normalized(rows.tokenizer, "a\nb")}
    if words := [what for what, is_lost in lost.items() if is_lost]:
        yield (
            f"{name}: the tokenizer's normalizer (in tokenizer.json) removes {' and '.join(words)}: the "
            "model neither reads nor writes them, and rewards compare completions without them")


def contents(rows: TokenizedRows, keys: Collection[str]) -> list[tuple[int, str]]:
    """Return for each row by what it is compared with others: its texts, white space aside, and the values
    under these keys that are no tokens."""
    others = sorted(set(keys).difference(TOKENS))
    what: Compared = "row" if "sequence_ids" in keys else "prompt"
    return [
        (rows.compared(i, what), json.dumps([[sample[key] for key in others] for sample in samples]))
        for i, samples in enumerate(rows.samples)]


def contradictions(
    program: Program, graph: DataflowGraph, name: str, rows: TokenizedRows
) -> Iterator[str]:
    """Yield warnings about answers that are both good and bad: pairs in both orders, or two labels of one."""
    if "sequence_ids" not in rows.keys or not graph.of_kind("train_step"):
        return
    contrary: list[int] = []
    judged: dict[Any, set[Any]] = {}
    for i, samples in enumerate(rows.samples):
        texts = [tuple(sample["sequence_ids"]) for sample in samples]
        verdict = json.dumps(samples[0].get("label")) if len(texts) == 1 else texts[0] < texts[1]
        verdicts = judged.setdefault(tuple(sorted(texts)), set())
        verdicts.add(verdict)
        if len(verdicts) > 1 and len(set(texts)) == len(texts):
            contrary.append(i)
    if contrary:
        what = "pairs have the same two completions as an earlier one, in the other order"
        if not reads_pairs(rows.keys):
            what = "answers have another label than the same answer to the same prompt earlier"
        yield f"{name}: {len(contrary)} {what}, first in {rows.place_of(contrary[0])}"


def doubtful_rows(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield warnings about rows that are seldom meant."""
    for doubt, numbers in rows.doubtful.rows.items():
        yield f"{name}: in {len(numbers)} rows, first in {rows.place_of_number(numbers[0])}, {doubt}"


def equal_pairs(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield a warning about pairs of the same completion twice."""
    if not reads_pairs(rows.keys):
        return
    equal = [i for i, (a, b) in enumerate(rows.samples) if a["sequence_ids"] == b["sequence_ids"]]
    if equal:
        config = rows.config
        where = _share_of(equal, rows)
        yield f"{name}: {config.rejected_key} is the same as {config.chosen_key} in {where}"


def unknown_text(name: str, rows: TokenizedRows) -> Iterator[str]:
    """Yield a warning about text that the tokenizer does not know."""
    unknown_id = unknown_token_id(rows.tokenizer)
    key = "sequence_ids" if "sequence_ids" in rows.keys else "prompt_ids"
    unknown = [
        i for i, samples in enumerate(rows.samples)
        if unknown_id is not None and any(unknown_id in sample[key] for sample in samples)]
    if unknown:
        yield (
            f"{name}: {len(unknown)} of {len(rows.rows)} rows have text that the tokenizer does not know, "
            f"first {rows.file_place_of(unknown[0])}: the model reads an unknown token")
