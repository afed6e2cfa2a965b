"""Fits of curves with their intervals, extrapolations, errors on later points, and comparisons."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from realhf.errors import UserError
from realhf.scaling.laws import NUM_PARAMS, PowerLaw, SigmoidFitter, SigmoidLaw, fit_power_law, rmse
from realhf.scaling.points import Curve, part_of

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
        """Return the parameter that decides."""
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
