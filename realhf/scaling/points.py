"""Curves of scores by compute, read from the metrics of runs and from CSV files."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np

from realhf.errors import UserError, shown
from realhf.user_input.files import open_regular, read_json_lines

DEFAULT_COLUMNS = {".jsonl": ("compute/device_seconds", "eval/score"), ".csv": ("compute", "score")}
"""Kind of file -> the names of compute and score in it."""


@dataclass(frozen=True)
class Curve:
    """The scores of one setting by compute, from one run or from several that are pooled.

    `starts` are the scores of the untrained model, one from each file: that at compute 0, else the first.
    `compute` rises, is above 0 and does not include the starts.
    """

    name: str
    files: tuple[str, ...]
    starts: tuple[float, ...]
    compute: np.ndarray
    score: np.ndarray

    @property
    def start(self) -> float:
        return float(np.mean(self.starts))


def read_curve(text: str, *, x: str | None = None, y: str | None = None) -> Curve:
    """Read a curve that is given as FILE[,FILE...] or NAME=FILE[,FILE...].

    Each file is a metrics.jsonl, a run directory or a CSV file; `x` and `y` name compute and score in them.
    Raises UserError if a file is missing or has a line that cannot be used.
    """
    name, separator, names = text.partition("=")
    if not separator or Path(text.split(",")[0]).exists():
        name, names = "", text
    files = [_find(part) for part in names.split(",")]
    starts = []
    points: list[tuple[float, float]] = []
    for file in files:
        file_points = _read_file(file, x=x, y=y)
        starts.append(file_points[0][1])
        points += file_points[1:]
    points.sort()
    compute, score = np.array(points).reshape(-1, 2).T
    return Curve(name or _short_name(files[0]), tuple(map(str, files)), tuple(starts), compute, score)


def _find(name: str) -> Path:
    """Return the file with the points; for a run directory, that is its metrics.jsonl."""
    path = Path(name)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise UserError(f"{name or path}: there is no file {path}")
    if path.suffix not in DEFAULT_COLUMNS:
        raise UserError(f"{name}: it must be a run directory, or a file that ends in .jsonl or .csv")
    return path


def _short_name(path: Path) -> str:
    return path.absolute().parent.name if path.name == "metrics.jsonl" else path.stem


def _read_file(path: Path, *, x: str | None, y: str | None) -> list[tuple[float, float]]:
    """Return the (compute, score) of all lines that have a score, the start first."""
    default_x, default_y = DEFAULT_COLUMNS[path.suffix]
    x = x or default_x
    y = y or default_y
    points: list[tuple[float, float]] = []
    try:
        for number, row in _read_rows(path, x, y):
            where = f"{path} line {number}"
            if row.get(y) in (None, ""):  # Not every step is evaluated.
                continue
            compute = _number(row.get(x), f"{where}: {x}")
            if compute < 0 or (compute == 0 and any(point[0] == 0 for point in points)):
                raise UserError(f"{where}: {x} is {compute:g}: it must be above 0, except at the start")
            points.append((compute, _number(row[y], f"{where}: {y}")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not points:
        raise UserError(f"{path} has no line with {y}: name the score with --y")
    return sorted(points, key=lambda point: point[0])


def _read_rows(path: Path, x: str, y: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of a file, with their numbers, as dicts."""
    if path.suffix == ".csv":
        with TextIOWrapper(open_regular(path), newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            for column, option in ((x, "--x"), (y, "--y")):
                if column not in (has := reader.fieldnames or []):
                    columns = ", ".join(has) or "none"
                    raise UserError(f"{path} has no column {column}: name one of {columns} with {option}")
            for row in reader:
                yield reader.line_num, row
        return
    for number, row in read_json_lines(path):
        if y in row and x not in row:
            raise UserError(f"{path} line {number} has no {x}: name the compute with --x")
        yield number, row


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise UserError(f"{what} is {shown(value)}: it must be a finite number")
    return number


def part_of(curve: Curve, *, after: float = 0.0, until: float = math.inf) -> tuple[np.ndarray, np.ndarray]:
    """Return compute and score of the points whose compute is above `after` and at most `until`."""
    chosen = (curve.compute > after) & (curve.compute <= until)
    return curve.compute[chosen], curve.score[chosen]


def common_names(curves: Sequence[Curve]) -> list[str]:
    """Return the names of curves; equal ones are told apart by the first file."""
    names = [curve.name for curve in curves]
    return [c.name if names.count(c.name) == 1 else f"{c.name} ({c.files[0]})" for c in curves]
