"""The picture of fitted curves: points, the law, its extrapolation and its band."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from realhf.errors import UserError
from realhf.scaling.analysis import Fit


def draw_fits(fits: Sequence[Fit], names: Sequence[str], path: Path, *, until: float, x: str, y: str) -> None:
    """Write a picture of all curves, extrapolated to a compute; `x` and `y` label the axes.

    Raises UserError if the file cannot be written.
    """
    figure = Figure(figsize=(8, 5), dpi=120)
    axes = figure.subplots()
    colors = matplotlib.color_sequences["tab10"]
    for i, (fit, name) in enumerate(zip(fits, names, strict=True)):
        _draw_fit(axes, fit, name, colors[i % len(colors)], until)
    if len(fits) == 1:  # With several curves it would only be clutter.
        _draw_power_law(axes, fits[0], until)
    _explain(axes, fits, until)
    axes.set(xscale="log", xlabel=x, ylabel=y)
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"--picture {path} cannot be written: {error.strerror}") from error


def _draw_fit(axes: Axes, fit: Fit, name: str, color: Any, until: float) -> None:
    """Draw one curve: fitted points are filled, others hollow."""
    first = min(fit.curve.compute.min(), fit.compute.min())
    last = float(fit.compute.max())
    is_fitted = np.isin(fit.curve.compute, fit.compute)
    for chosen, face in ((is_fitted, color), (~is_fitted, "none")):
        axes.plot(
            fit.curve.compute[chosen], fit.curve.score[chosen], "o", markersize=3.5, color=color,
            markerfacecolor=face, alpha=0.6)
    law = fit.sigmoid
    label = f"{name}: A {law.asymptote:.3f}, B {law.exponent:.2f}, C_mid {law.midpoint:.4g}"
    inside = np.geomspace(first, last, 200)
    beyond = np.geomspace(last, max(until, last), 100)
    axes.plot(inside, law(inside), "-", color=color, label=label)
    if until > last:
        axes.plot(beyond, law(beyond), "--", color=color)
        axes.axvline(last, color=color, linewidth=0.8, alpha=0.4)
    grid = np.concatenate([inside, beyond])
    if (band := fit.band(grid)) is not None:
        axes.fill_between(grid, *band, color=color, alpha=0.2, linewidth=0)


def _draw_power_law(axes: Axes, fit: Fit, until: float) -> None:
    """Draw the power law where it is above the start; below that, it falls without limit."""
    grid = np.geomspace(fit.curve.compute.min(), max(until, fit.compute.max()), 300)
    score = fit.power(grid)
    above = score > fit.sigmoid.start
    axes.plot(grid[above], score[above], ":", color="0.4", linewidth=1.2, label="power law")


def _explain(axes: Axes, fits: Sequence[Fit], until: float) -> None:
    """Add grey entries to the legend for the styles that occur."""
    axes.plot([], [], "o", markersize=3.5, label="point that was fitted", color="0.4")
    if any(len(fit.curve.compute) > len(fit.compute) for fit in fits):
        axes.plot([], [], "o", markersize=3.5, markerfacecolor="none", label="other point", color="0.4")
    if any(until > fit.compute.max() for fit in fits):
        axes.plot([], [], "--", label="extrapolation", color="0.4")
    if any(fit.samples for fit in fits):
        axes.fill_between([], [], [], alpha=0.3, linewidth=0, label="95 % band of the law", color="0.4")
