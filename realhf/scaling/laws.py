"""The laws by which scores grow with compute, and their least-squares fits.

The sigmoid law and the procedure are those of "The Art of Scaling Reinforcement Learning Compute for LLMs"
(2025): R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B), fitted on a grid over A and C_mid. The power law
A - D / C^B stands beside it for comparison.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.optimize import least_squares, minimize_scalar
from scipy.special import expit

NUM_PARAMS = 3
_NUM_ASYMPTOTES = 71
_NUM_MIDPOINTS = 100
_MIDPOINTS = (1e-3, 2.0)  # Shares of the largest compute; the paper's grid is from 1e-3 to 0.4.
_EXPONENTS = np.geomspace(0.1, 12.0, 72)
_POWERS = np.geomspace(0.01, 6.0, 200)


@dataclass(frozen=True)
class SigmoidLaw:
    """R(C) = start + (asymptote - start) / (1 + (midpoint / C)^exponent)."""

    start: float  # R0, the score without training.
    asymptote: float  # A, which the score approaches.
    exponent: float  # B, the efficiency: how steeply the score rises.
    midpoint: float  # C_mid, the compute at which half of the gain is reached.

    def share(self, compute: np.ndarray | float) -> np.ndarray:
        """Return the share of the whole gain that is reached with this compute."""
        return expit(self.exponent * np.log(np.asarray(compute) / self.midpoint))

    def __call__(self, compute: np.ndarray | float) -> np.ndarray:
        return self.start + (self.asymptote - self.start) * self.share(compute)


@dataclass(frozen=True)
class PowerLaw:
    """R(C) = asymptote - scale / C^exponent."""

    asymptote: float
    exponent: float
    scale: float

    def __call__(self, compute: np.ndarray | float) -> np.ndarray:
        return self.asymptote - self.scale * np.asarray(compute) ** -self.exponent


class SigmoidFitter:
    """Fits sigmoid laws to scores at given points of compute, as often as needed."""

    def __init__(self, compute: np.ndarray, *, ceiling: float) -> None:
        """No law may have an asymptote above the `ceiling`."""
        self._compute = compute
        self._ceiling = ceiling
        most = float(compute.max())
        self._midpoints = np.geomspace(_MIDPOINTS[0] * most, _MIDPOINTS[1] * most, _NUM_MIDPOINTS)

    @cached_property
    def _shares(self) -> np.ndarray:
        """Return the share of the gain for every midpoint, exponent and point."""
        logs = np.log(self._compute / self._midpoints[:, None])
        return expit(_EXPONENTS[:, None] * logs[:, None])

    @cached_property
    def _squares(self) -> np.ndarray:
        return (self._shares**2).sum(-1)

    def fit(self, score: np.ndarray, *, start: float, asymptote: float | None = None) -> SigmoidLaw:
        """Return the law with the smallest sum of squared residuals.

        Each cell of a grid over A and C_mid takes its best B; scipy then improves all three from the best
        cell, so that the result is not rounded to the grid. A given `asymptote` stays fixed.
        """
        gain = score - start
        least = start + max(0.25 * float(gain.max()), 1e-6 * (self._ceiling - start))
        asymptotes = np.linspace(min(least, self._ceiling), self._ceiling, _NUM_ASYMPTOTES)
        if asymptote is not None:
            asymptotes = np.array([asymptote])
        # The sum over points of (gain - a * share)^2, less that of gain^2, for all cells and exponents.
        heights = (asymptotes - start)[:, None, None]
        losses = heights**2 * self._squares - 2 * heights * (self._shares @ gain)
        a, m, b = np.unravel_index(np.argmin(losses), losses.shape)
        cell = SigmoidLaw(start, float(asymptotes[a]), float(_EXPONENTS[b]), float(self._midpoints[m]))
        return self._improve(cell, score, bounds=None if asymptote is not None else asymptotes[[0, -1]])

    def _improve(self, law: SigmoidLaw, score: np.ndarray, *, bounds: np.ndarray | None) -> SigmoidLaw:
        """Return the nearest least-squares solution within the grid; without `bounds`, A is fixed."""
        logs = np.log(self._compute)
        fixed = law.asymptote - law.start

        def split(x: np.ndarray) -> tuple[float, float, float]:
            return (fixed if bounds is None else x[2] - law.start), float(np.exp(x[0])), x[1]

        def residuals(x: np.ndarray) -> np.ndarray:
            height, exponent, middle = split(x)
            return law.start + height * expit(exponent * (logs - middle)) - score

        def jacobian(x: np.ndarray) -> np.ndarray:
            height, exponent, middle = split(x)
            share = expit(exponent * (logs - middle))
            slope = height * share * (1 - share) * exponent
            columns = [slope * (logs - middle), -slope, share]
            return np.stack(columns[: len(x)], axis=1)

        first = [np.log(law.exponent), np.log(law.midpoint)]
        low = [np.log(_EXPONENTS[0]), np.log(self._midpoints[0])]
        high = [np.log(_EXPONENTS[-1]), np.log(self._midpoints[-1])]
        if bounds is not None:
            first.append(law.asymptote)
            low.append(bounds[0] - 1e-12)
            high.append(bounds[1] + 1e-12)
        x = least_squares(residuals, np.clip(first, low, high), jacobian, (low, high)).x
        asymptote = law.asymptote if bounds is None else float(x[2])
        return SigmoidLaw(law.start, asymptote, float(np.exp(x[0])), float(np.exp(x[1])))

    def is_at_limit(self, law: SigmoidLaw) -> list[str]:
        """Return the names of parameters that the limits of the grid hold back."""
        near = 1 + 1e-3
        near_limit = {
            "A": law.asymptote > self._ceiling - 1e-3 * (self._ceiling - law.start),
            "B": not _EXPONENTS[0] * near < law.exponent < _EXPONENTS[-1] / near,
            "C_mid": not self._midpoints[0] * near < law.midpoint < self._midpoints[-1] / near,
        }
        return [name for name, is_near in near_limit.items() if is_near]


def fit_power_law(compute: np.ndarray, score: np.ndarray) -> PowerLaw:
    """Return the least-squares power law: for each B, A and D are linear; B is searched."""
    unit = float(compute.max())
    logs = np.log(compute / unit)

    def solve(power: float) -> tuple[float, float, float]:
        """Return the sum of squared residuals, A, and D for compute in units of its largest value."""
        terms = np.stack([np.ones_like(logs), -np.exp(-power * logs)], axis=1)
        (asymptote, scale), *_ = np.linalg.lstsq(terms, score, rcond=None)
        return float(((terms @ (asymptote, scale) - score) ** 2).sum()), float(asymptote), float(scale)

    best = int(np.argmin([solve(power)[0] for power in _POWERS]))
    low, high = _POWERS[max(0, best - 1)], _POWERS[min(len(_POWERS) - 1, best + 1)]
    power = float(minimize_scalar(lambda x: solve(x)[0], bounds=(low, high), method="bounded").x)
    _, asymptote, scale = solve(power)
    return PowerLaw(asymptote, power, scale * unit**power)


def rmse(law: SigmoidLaw | PowerLaw, compute: np.ndarray, score: np.ndarray) -> float:
    return float(np.sqrt(np.mean((law(compute) - score) ** 2)))
