"""Fits of curves with their intervals, extrapolations, errors on later points, and comparisons."""

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import TextIOWrapper
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from realhf.errors import UserError, shown, warn
from realhf.scaling.laws import NUM_PARAMS, PowerLaw, SigmoidFitter, SigmoidLaw, fit_power_law, rmse
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
    of_files = [_read_file(file, x=x, y=y) for file in files]
    scores = [np.array([score for _, score in file_points]) for file_points in of_files]
    if (sentence := other_scales(list(map(str, files)), scores)) is not None:
        warn(sentence)
    for file_points in of_files:
        starts.append(file_points[0][1])
        points += file_points[1:]
    points.sort()
    compute, score = np.array(points).reshape(-1, 2).T
    return Curve(name or _short_name(files[0]), tuple(map(str, files)), tuple(starts), compute, score)


def is_percent(scores: np.ndarray) -> bool:
    """Return whether scores are surely counted in percent."""
    return bool(len(scores) and scores.min() >= 0 and _PERCENT < scores.max() <= 100)


def other_scales(names: Sequence[str], scores: Sequence[np.ndarray]) -> str | None:
    """Return a sentence if some of these scores are percent and others are shares."""
    percent = [name for name, values in zip(names, scores, strict=True) if is_percent(values)]
    shares = [name for name, values in zip(names, scores, strict=True)
              if len(values) and values.min() >= 0 and 0 < values.max() <= 1]
    if not percent or not shares:
        return None
    return (
        f"the scores of {percent[0]} go up to more than {_PERCENT:g} and those of {shares[0]} at most to 1, "
        "as percent and shares do: divide the first by 100 before they are compared or pooled")


_PERCENT = 10.0
"""Scores from 0 to 100 that go above this are percent."""


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


MIN_POINTS = 6
_FEW_POINTS = 15
_PLATEAU = 0.8
"""The asymptote is measured, and not guessed, if the last point reaches at least this share of the gain."""


@dataclass(frozen=True)
class Amount:
    """A compute, or a share of the largest compute of a curve."""

    value: float
    is_share: bool = False

    @classmethod
    def parse(cls, text: str) -> "Amount":
        """Parse `1500` or `2%`. Raises ValueError with the legal values."""
        is_share = text.endswith("%")
        try:
            value = float(text.removesuffix("%")) / (100 if is_share else 1)
        except ValueError:
            value = -1.0
        if not 0 <= value < float("inf") or (is_share and value > 1):
            raise ValueError(f"{text!r} must be a compute of at least 0, or a share from 0% to 100%")
        return cls(value, is_share)

    def of(self, curve: Curve) -> float:
        return self.value * float(curve.compute.max()) if self.is_share else self.value


@dataclass(frozen=True)
class FitSettings:
    """Settings of the fit of each curve."""

    skip: Amount = Amount(0.0)  # The points up to here are left out.
    fit_until: Amount | None = None  # Later points are predicted instead of fitted.
    start: float | None = None  # R0; None: the mean of the curve's starts.
    ceiling: float | None = None  # Highest asymptote; None: 1, or for scores outside 0 to 1 far above them.
    num_bootstrap: int = 400
    seed: int = 0
    margin: float = 0.02  # Asymptotes this near count as equal: the paper's error between repeated runs.


@dataclass(frozen=True)
class Fit:
    """The laws of one curve; `samples` are those of the bootstrap."""

    curve: Curve
    sigmoid: SigmoidLaw
    power: PowerLaw
    compute: np.ndarray  # Compute of the fitted points.
    score: np.ndarray
    later: tuple[np.ndarray, np.ndarray]  # Compute and score of the points after the fitted ones.
    samples: tuple[SigmoidLaw, ...]
    at_limit: list[str]
    fitter: SigmoidFitter = field(repr=False)

    def interval(self, name: str) -> tuple[float, float] | None:
        """Return the 95 % interval of a parameter; None without bootstrap."""
        return _percentiles([getattr(law, name) for law in self.samples])

    def band(self, compute: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the 95 % interval of the law at each compute: of the curve, not of single scores."""
        if not self.samples:
            return None
        low, high = np.percentile([law(compute) for law in self.samples], (2.5, 97.5), axis=0)
        return low, high

    def warnings(self, margin: float) -> list[str]:
        """Return why the fit may not deserve trust."""
        reasons = []
        reached = float(self.sigmoid.share(self.compute.max()))
        if reached < _PLATEAU:
            reasons.append(
                f"the plateau is not reached: the last point has {reached:.0%} of the gain, and A is a guess")
        if len(self.compute) < _FEW_POINTS:
            reasons.append(f"{len(self.compute)} points are few for {NUM_PARAMS} parameters")
        width = self.interval("asymptote")
        if width is not None and width[1] - width[0] > 4 * margin:
            reasons.append(f"the interval of A is wide ({width[0]:.3g} to {width[1]:.3g})")
        if self.at_limit:
            reasons.append(f"{' and '.join(self.at_limit)} ended at a limit of the search")
        return reasons


def fit_curve(curve: Curve, settings: FitSettings) -> Fit:
    """Fit both laws. Raises UserError if there are too few points, or if the score does not rise."""
    _require_points(curve, len(curve.compute))
    after = settings.skip.of(curve)
    until = float("inf") if settings.fit_until is None else settings.fit_until.of(curve)
    compute, score = part_of(curve, after=after, until=until)
    _require_points(curve, len(compute))
    start = curve.start if settings.start is None else settings.start
    if score.max() <= start:
        raise UserError(
            f"{curve.name}: no score is above that of the start, {start:g}: there is no rise to fit")
    ceiling = settings.ceiling
    if ceiling is None:
        is_share = min(score.min(), start) >= 0 and score.max() <= 1
        ceiling = 1.0 if is_share else start + 4 * (float(score.max()) - start)
    if ceiling <= start:
        raise UserError(f"{curve.name}: --ceiling is {ceiling:g}: it must be above R0, {start:g}")
    fitter = SigmoidFitter(compute, ceiling=ceiling)
    sigmoid = fitter.fit(score, start=start)
    num_starts = len(curve.starts) if settings.start is None else 0
    samples = _bootstrap(fitter, sigmoid, compute, score, num_starts=num_starts, settings=settings)
    return Fit(
        curve, sigmoid, fit_power_law(compute, score), compute, score, part_of(curve, after=until), samples,
        fitter.is_at_limit(sigmoid), fitter)


def _require_points(curve: Curve, count: int) -> None:
    """Raise UserError if these are too few points to fit."""
    if count < MIN_POINTS:
        raise UserError(
            f"{curve.name}: {count} points besides the start are left to fit: "
            f"there must be at least {MIN_POINTS} (`eval_every` says how often a run is evaluated)")


def _bootstrap(
    fitter: SigmoidFitter, law: SigmoidLaw, compute: np.ndarray, score: np.ndarray,
    *, num_starts: int, settings: FitSettings,
) -> tuple[SigmoidLaw, ...]:
    """Return laws fitted to resampled scores (residual bootstrap, Efron & Tibshirani 1993, section 9.5).

    Residuals are drawn, not points, because the compute of the evaluations is chosen and not random: each
    sample has points along the whole curve. The measured start has an error of the same kind.
    """
    residuals = score - law(compute)
    residuals = (residuals - residuals.mean()) * np.sqrt(len(score) / (len(score) - NUM_PARAMS))
    rng = np.random.default_rng(settings.seed)
    samples = []
    for _ in range(settings.num_bootstrap):
        start = law.start + (float(rng.choice(residuals, num_starts).mean()) if num_starts else 0.0)
        drawn = law(compute) + rng.choice(residuals, len(score))
        samples.append(fitter.fit(drawn, start=start))
    return tuple(samples)


def _percentiles(values: Sequence[float]) -> tuple[float, float] | None:
    if not values:
        return None
    low, high = np.percentile(values, (2.5, 97.5))
    return float(low), float(high)


@dataclass(frozen=True)
class Comparison:
    """Two curves: which is better, and why.

    If their asymptotes are within the margin, both are refitted with the mean and compared by B; otherwise
    the higher asymptote wins.
    """

    names: tuple[str, str]
    asymptotes: tuple[float, float]
    common_asymptote: float | None
    exponents: tuple[float, float]
    winner: int

    @property
    def by(self) -> str:
        return "A" if self.common_asymptote is None else "B"

    @property
    def verdict(self) -> str:
        name = self.names[self.winner]
        values = self.asymptotes if self.by == "A" else self.exponents
        against = f"{max(values):.3f} against {min(values):.3f}"
        if self.by == "A":
            return f"{name} has the higher asymptote ({against})"
        return f"with the same asymptote, {name} is more efficient (B {against})"


def compare(fits: Sequence[Fit], names: Sequence[str], *, margin: float) -> list[Comparison]:
    """Compare every two curves."""
    return [
        _compare(a, b, (names[i], names[j]), margin)
        for (i, a), (j, b) in combinations(enumerate(fits), 2)]


def _compare(a: Fit, b: Fit, names: tuple[str, str], margin: float) -> Comparison:
    asymptotes = (a.sigmoid.asymptote, b.sigmoid.asymptote)
    if abs(asymptotes[0] - asymptotes[1]) > margin:
        exponents = (a.sigmoid.exponent, b.sigmoid.exponent)
        return Comparison(names, asymptotes, None, exponents, int(asymptotes[1] > asymptotes[0]))
    mean = float(np.mean(asymptotes))
    refits = [f.fitter.fit(f.score, start=f.sigmoid.start, asymptote=mean) for f in (a, b)]
    exponents = (refits[0].exponent, refits[1].exponent)
    return Comparison(names, asymptotes, mean, exponents, int(exponents[1] > exponents[0]))


def document(fit: Fit, name: str, at: Sequence[float], settings: FitSettings) -> dict[str, Any]:
    """Return a fit as JSON values."""
    sigmoid = fit.sigmoid
    power = fit.power
    names = {"A": "asymptote", "B": "exponent", "C_mid": "midpoint"}
    intervals = {key: fit.interval(field) for key, field in names.items()} if fit.samples else None
    values: dict[str, Any] = {
        "name": name, "files": list(fit.curve.files), "points": len(fit.compute),
        "largest_compute": float(fit.compute.max()),
        "sigmoid": {
            "R0": sigmoid.start, **{key: getattr(sigmoid, field) for key, field in names.items()},
            "intervals_95": intervals, "rmse": rmse(sigmoid, fit.compute, fit.score)},
        "power_law": {
            "A": power.asymptote, "B": power.exponent, "D": power.scale,
            "rmse": rmse(power, fit.compute, fit.score)},
        "at": [], "later_points": None, "warnings": fit.warnings(settings.margin),
    }
    for compute in at:
        band = fit.band(np.array([compute]))
        interval = None if band is None else [float(edge[0]) for edge in band]
        values["at"].append({
            "compute": compute, "sigmoid": float(sigmoid(compute)), "interval_95": interval,
            "power_law": float(power(compute))})
    if len(fit.later[0]):
        values["later_points"] = {"points": len(fit.later[0]), **{
            key: _errors(law, *fit.later) for key, law in (("sigmoid", sigmoid), ("power_law", power))}}
    return values


def _errors(law: SigmoidLaw | PowerLaw, compute: np.ndarray, score: np.ndarray) -> dict[str, float]:
    """Return the errors of a law on points that it was not fitted to; above 0: the law is too high."""
    errors = law(compute) - score
    return {
        "mean": float(errors.mean()), "mean_absolute": float(np.abs(errors).mean()),
        "largest_absolute": float(np.abs(errors).max())}
