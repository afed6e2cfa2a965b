"""Fits of scaling laws, to points generated from published parameters and against scipy's curve_fit."""

import numpy as np
import pytest
from scipy.optimize import curve_fit

from realhf.scaling.analysis import Amount, Curve, FitSettings, compare, fit_curve
from realhf.scaling.laws import SigmoidFitter, SigmoidLaw, fit_power_law, rmse

TABLE_1 = {  # "The Art of Scaling Reinforcement Learning Compute for LLMs" (2025): C_mid, B, A.
    "ScaleRL": (2542, 1.92, 0.610), "32k length": (11272, 1.89, 0.645), "batch 512": (2818, 1.77, 0.605),
    "batch 2048": (10909, 1.70, 0.645), "Scout": (4242, 1.65, 0.710),
}
"""The runs have 50k GPU-hours if C_mid is below 5k, and 100k else, and a point every 500 GPU-hours."""
START = 0.35  # The page of facts has no R0.
NOISE = 0.004


def law_of(name: str) -> SigmoidLaw:
    midpoint, exponent, asymptote = TABLE_1[name]
    return SigmoidLaw(START, asymptote, exponent, midpoint)


def generate(law: SigmoidLaw, *, seed: int, step: float = 500.0, noise: float = NOISE) -> Curve:
    """Return a curve whose points and start are those of the law with normal noise."""
    end = 50e3 if law.midpoint < 5e3 else 100e3
    compute = np.arange(step, end + step, step)
    rng = np.random.default_rng(seed)
    start = law.start + rng.normal(0, noise)
    naive = law.start + (law.asymptote - law.start) / (1 + (law.midpoint / compute) ** law.exponent)
    return Curve("made", ("made.csv",), (start,), compute, naive + rng.normal(0, noise, len(compute)))


@pytest.mark.parametrize("name", TABLE_1)
def test_the_first_half_of_a_run_tells_the_rest(name):
    """Fitted from 1.5k GPU-hours to the middle of the run, with a measured and so noisy R0."""
    law = law_of(name)
    settings = FitSettings(skip=Amount(1500), fit_until=Amount(0.5, is_share=True), num_bootstrap=0)
    for seed in range(5):
        curve = generate(law, seed=seed)
        fit = fit_curve(curve, settings)
        end = curve.compute.max()
        assert fit.compute.min() == 2000 and fit.compute.max() == end / 2
        assert fit.sigmoid.asymptote == pytest.approx(law.asymptote, abs=0.02), seed
        assert float(fit.sigmoid(end)) == pytest.approx(float(law(end)), abs=0.01), seed


@pytest.mark.parametrize("name", TABLE_1)
def test_without_noise_the_law_itself_is_found(name):
    law = law_of(name)
    curve = generate(law, seed=0, noise=0.0)
    found = fit_curve(curve, FitSettings(num_bootstrap=0)).sigmoid
    assert found.start == law.start
    assert found.asymptote == pytest.approx(law.asymptote, abs=1e-5)
    assert found.exponent == pytest.approx(law.exponent, rel=1e-3)
    assert found.midpoint == pytest.approx(law.midpoint, rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
def test_the_fit_is_that_of_curve_fit(seed):
    """Scipy begins at the truth, which the grid does not know; in other units the fit is the same."""
    law = law_of("Scout")
    curve = generate(law, seed=seed)

    def naive(c, a, b, middle):
        return START + (a - START) / (1 + (middle / c) ** b)

    truth = (law.asymptote, law.exponent, law.midpoint)
    expected = curve_fit(naive, curve.compute, curve.score, p0=truth)[0]
    for unit in (1.0, 3600.0 * 8):
        fitter = SigmoidFitter(curve.compute * unit, ceiling=1.0)
        found = fitter.fit(curve.score, start=START)
        ours = (found.asymptote, found.exponent, found.midpoint / unit)
        assert ours == pytest.approx(tuple(expected), rel=1e-4)
    fixed = SigmoidFitter(curve.compute, ceiling=1.0).fit(curve.score, start=START, asymptote=0.7)
    expected = curve_fit(lambda c, b, m: naive(c, 0.7, b, m), curve.compute, curve.score, p0=truth[1:])[0]
    assert (fixed.exponent, fixed.midpoint) == pytest.approx(tuple(expected), rel=1e-4)
    assert fixed.asymptote == 0.7


@pytest.mark.parametrize("seed", range(3))
def test_the_power_law_is_that_of_curve_fit(seed):
    rng = np.random.default_rng(seed)
    compute = np.geomspace(100, 1e5, 60)
    score = 0.7 - 4.0 * compute**-0.5 + rng.normal(0, NOISE, 60)
    a, d, b = curve_fit(lambda c, a, d, b: a - d / c**b, compute, score, p0=(0.7, 4.0, 0.5))[0]
    law = fit_power_law(compute, score)
    assert (law.asymptote, law.scale, law.exponent) == pytest.approx((a, d, b), rel=1e-3)
    residuals = 0.7 - 4.0 * compute**-0.5 - score
    assert rmse(law, compute, score) <= np.sqrt((residuals**2).mean())


def test_equal_asymptotes_are_compared_by_efficiency_and_others_by_height():
    """The paper's rule, with a margin of 0.02."""
    settings = FitSettings(num_bootstrap=0)
    names = ("ScaleRL", "batch 512", "Scout")
    fits = [fit_curve(generate(law_of(name), seed=1), settings) for name in names]
    close, far, _ = compare(fits, names, margin=0.02)
    assert (close.by, close.names[close.winner]) == ("B", "ScaleRL")
    assert close.common_asymptote == pytest.approx(np.mean(close.asymptotes))
    for fit, exponent in zip(fits, close.exponents, strict=False):
        with_mean = fit.fitter.fit(fit.score, start=fit.sigmoid.start, asymptote=close.common_asymptote)
        assert exponent == with_mean.exponent != fit.sigmoid.exponent
    assert (far.by, far.names[far.winner], far.common_asymptote) == ("A", "Scout", None)
    (strict,) = compare(fits[:2], names[:2], margin=0.0)
    assert strict.by == "A"


def test_a_run_without_a_plateau_is_not_trusted():
    law = law_of("batch 2048")
    curve = generate(law, seed=0)
    whole = fit_curve(curve, FitSettings(num_bootstrap=50))
    assert whole.warnings(0.02) == []
    early = fit_curve(curve, FitSettings(num_bootstrap=50, fit_until=Amount(8000)))
    assert any("the plateau is not reached" in warning for warning in early.warnings(0.02))
    assert any("the interval of A is wide" in warning for warning in early.warnings(0.02))
    few = fit_curve(curve, FitSettings(num_bootstrap=0, fit_until=Amount(4000)))
    assert any("8 points are few" in warning for warning in few.warnings(0.02))


@pytest.mark.slow
def test_the_bootstrap_repeats_and_widens_with_noise():
    law = law_of("ScaleRL")
    widths = []
    for noise in (0.002, 0.008):
        fit = fit_curve(generate(law, seed=0, step=1000.0, noise=noise), FitSettings(num_bootstrap=60))
        again = fit_curve(generate(law, seed=0, step=1000.0, noise=noise), FitSettings(num_bootstrap=60))
        low, high = fit.interval("asymptote")
        assert (low, high) == again.interval("asymptote")
        assert low < fit.sigmoid.asymptote < high
        widths.append(high - low)
    assert 2 < widths[1] / widths[0] < 8


@pytest.mark.slow
def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """95 % intervals of 100 runs of 50 points; the binomial error of a share of 0.95 is 0.022."""
    law = law_of("ScaleRL")
    truth = {"asymptote": law.asymptote, "exponent": law.exponent, "midpoint": law.midpoint}
    hits = dict.fromkeys([*truth, "at the end"], 0)
    for seed in range(100):
        curve = generate(law, seed=seed, step=1000.0)
        fit = fit_curve(curve, FitSettings(num_bootstrap=100))
        for name, value in truth.items():
            low, high = fit.interval(name)
            hits[name] += low <= value <= high
        low, high = fit.band(np.array([100e3]))
        hits["at the end"] += bool(low[0] <= law(100e3) <= high[0])
    assert all(0.86 <= count / 100 <= 1.0 for count in hits.values()), hits
