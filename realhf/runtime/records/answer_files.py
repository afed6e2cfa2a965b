"""AnswerFiles: the files of a run directory that hold the answers of evaluations, on rank 0."""

import json
import shutil
from collections.abc import Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import Any

from realhf.runtime.compile.kept_answers import SHOWN

_LAST = "eval.jsonl"
_ALL = "evals"
"""The folder with a file for each evaluation: evals/step_N.jsonl, or evals/SET/step_N.jsonl."""


class AnswerFiles:
    """The writer of eval.jsonl and of evals/.

    A run that continues after the step `last` keeps the files up to it, also those of its earlier directory,
    and drops later ones, which it will write again.
    """

    def __init__(self, directory: Path, *, last: int = -1, earlier: Path | None = None) -> None:
        self._directory = directory
        if earlier is not None and earlier.resolve() != directory.resolve():
            self._copy(earlier)
        for path in self._files(directory):
            if _step(path) > last:
                path.unlink()

    def _copy(self, earlier: Path) -> None:
        """Copy the answers of the run that this one continues in another directory."""
        for path in filter(Path.is_file, [*self._files(earlier), *earlier.glob(_LAST)]):
            target = self._directory / path.relative_to(earlier)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)

    def _files(self, directory: Path) -> list[Path]:
        paths = sorted((directory / _ALL).rglob("step_*.jsonl"))
        return [path for path in paths if _step(path) >= 0 and path.is_file()]

    def write(self, step: int, answers: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Write the answers of the evaluation after a step, by set, each file at once or not at all.

        Scores of failed rewards are null. eval.jsonl gets the first answer to each prompt.
        """
        last = []
        for name, of_set in answers.items():
            documents = [{"set": name} | _without_nan(answer) for answer in of_set]
            _write(self._directory / _ALL / name / f"step_{step}.jsonl", documents)
            firsts = [answer for answer in documents if answer["sample"] == 0]
            last += [_shown(answer) | ({"set": name} if name else {}) for answer in firsts]
        if last:
            _write(self._directory / _LAST, last)


def _shown(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for eval.jsonl: if no column has the usual name of an answer, all columns."""
    has_answer = "answer" in answer or "ground_truth" in answer
    names = SHOWN if has_answer else (*SHOWN, "columns")
    return {name: answer[name] for name in names if name in answer}


def _write(path: Path, answers: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    part.replace(path)


def _step(path: Path) -> int:
    """Return the step of a file; -1 if its name has none."""
    number = path.stem.removeprefix("step_")
    return int(number) if number.isdecimal() else -1


def _without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the answer with None in place of NaN, which JSON does not have."""
    parts = {key: {name: _known(value) for name, value in row[key].items()} for key in ("scores", "extra")
             if row.get(key) is not None}
    return {**row, "score": _known(row["score"]), **parts}


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and isnan(value) else value
