"""Turns: rollouts that alternate between decoding and waiting for their environments.

In each turn the model draws tokens, and then the environment works. Meanwhile the row leaves its slot, so
more rows can be under way than there are slots. This is a closed queueing network (machine repair, Gross and
Harris, Fundamentals of Queueing Theory, 2.7), solved for its means: of n rows under way

    n d / (d + w)

run, at most as many as there are slots, if a turn takes d seconds of decoding and w of waiting. A decode step
takes the seconds of so many rows.

The seconds of a call then follow from `slowest_replica.py` for longer rows: each turn has some tokens more,
in whose time its environment works, and the slots are the rows under way. So a rollout waits longer if it has
more turns, but not if its turns are longer. tests/planner/test_turns.py compares this with a simulation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from realhf.planner.lengths import Lengths
from realhf.planner.slowest_replica import DecodeSteps, Rollout, decode_steps

StepSeconds = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""Returns the seconds of decode steps with some rows, given the tokens that they have after their prompts."""

_GRID = 1.1
"""The tokens in whose time an environment works are rounded to powers of this, so that few distributions are
computed. The seconds are not rounded."""
_MOST_PARTS = 1 << 16
"""Longer rollouts are counted in parts of several tokens."""
_JITTER = 0.05
"""Rollouts that would all take equally long differ by up to this share, as environments' steps do."""
_FEW_LEFT = 0.15
"""Rows that are left over after whole waves of those under way are few below this share of them."""
_KEPT = 1e-12
"""Longer rollouts than all but so few are left out."""


@dataclass(frozen=True)
class Turns:
    """The turns of rollouts: how many there are, the tokens that the model draws in each, those that the
    environment adds between two, and the mean seconds that it takes after each."""

    counts: Lengths
    lengths: Lengths
    observation_tokens: float = 0.0
    seconds: float = 0.0

    @cached_property
    def drawn(self) -> Lengths:
        """The distribution of the tokens that the model draws in a rollout."""
        return _sum_of_turns(self.counts, self.lengths)

    def whole(self, limit: int) -> Lengths:
        """Return the distribution of the tokens of a rollout after its start, cut off at the limit."""
        extra = round(self.observation_tokens)
        survival = _sum_of_turns(self.counts, self.lengths, extra).survival[extra:][:limit]
        return Lengths(np.pad(survival, (0, limit - len(survival))))

    @property
    def num_returns(self) -> float:
        """Return how often a rollout goes on after its environment has answered, on average."""
        return max(0.0, self.counts.mean - 1.0)

    @cached_property
    def in_step(self) -> float:
        """Return how much rows that have begun together stay together.

        It is 1 if all turns are equally long, and nearly 0 if rows soon end them at different times.
        """
        mean = self.lengths.mean
        variance = max(0.0, _squared(self.lengths) / mean**2 - 1)
        return 1 / (1 + 2 * self.counts.mean * variance)

    def scaled(self, factor: float) -> "Turns":
        """Return turns whose tokens are multiplied by this factor."""
        return replace(
            self, lengths=self.lengths.scaled(factor), observation_tokens=self.observation_tokens * factor)


class Waits(NamedTuple):
    """The expected seconds of decoding and waiting, and the rows that run or wait at once."""

    seconds: float
    under_way: float


def with_waits(turns: Turns, rollout: Rollout, step_seconds: StepSeconds, *, tokens: float) -> Waits:
    """Return what waits make of a generation, of the slowest replica; 0 seconds if nothing waits.

    The `rollout` is what would be without waits. A whole one has so many `tokens` after its prompt, those of
    its environment included.
    """
    slots = min(rollout.slots, rollout.num_rows)
    if turns.seconds == 0:
        return Waits(0.0, slots)
    one, full = step_seconds(np.array([1.0, slots]), np.full(2, tokens / 2))
    turn_seconds = turns.lengths.mean * full
    # Rows begin until each slot has one that runs. The next ones get their first slots one after the other,
    # each after a turn of another row.
    under_way = max(slots, min(rollout.num_rows, slots * (1 + turns.seconds / turn_seconds)))
    # A few that are left over find slots in between, and so make no wave of their own.
    waves = rollout.num_rows / under_way
    if waves % 1 < _FEW_LEFT:
        under_way = max(slots, rollout.num_rows / max(1, math.floor(waves)))
    delay = (under_way / slots - 1) * turn_seconds
    slope = max(0.0, (full - one) / max(1.0, slots - 1))
    running = _running(turns, np.array([under_way]), np.array([one]), np.array([slope]), slots)
    step = one + slope * (max(1.0, running[0]) - 1)
    power = round(math.log(max(1.0, turns.seconds / step)) / math.log(_GRID))
    longer = _with_wait(turns.counts, turns.lengths, round(_GRID**power))
    steps = decode_steps(rollout._replace(lengths=longer.lengths, slots=under_way))
    seconds_K = _seconds(turns, steps, longer, step_seconds, slots=slots, tokens=tokens)
    return Waits(steps.of_slowest(seconds_K)[0] + delay, under_way)


class _LongerRows(NamedTuple):
    """The distribution of rows whose turns have `wait` tokens more, in parts of `unit` tokens."""

    lengths: Lengths
    unit: int
    wait: int


def _seconds(
    turns: Turns, steps: DecodeSteps, longer: _LongerRows, step_seconds: StepSeconds,
    *, slots: float, tokens: float,
) -> np.ndarray:
    """Return the seconds in which the rows under way get on by one part, for each kind of step."""
    mean = longer.lengths.mean * longer.unit
    drawn_share = turns.counts.mean * turns.lengths.mean / mean
    rows_K = steps.rows_K
    most_K = np.minimum(rows_K, slots)
    context_K = steps.context_K * tokens / longer.lengths.mean
    one_K = step_seconds(np.ones_like(rows_K), context_K)
    full_K = step_seconds(most_K, context_K)
    slope_K = np.maximum(0.0, (full_K - one_K) / np.maximum(1.0, most_K - 1))
    running_K = _running(turns, rows_K, one_K, slope_K, slots)
    running_K += (most_K - running_K) * turns.in_step
    step_K = one_K + slope_K * (np.maximum(1.0, running_K) - 1)
    each_K = drawn_share * step_K + (1 - drawn_share) * turns.seconds / longer.wait
    return longer.unit * np.maximum(each_K, drawn_share * step_K * rows_K / slots)


def _running(
    turns: Turns, rows: np.ndarray, one: np.ndarray, slope: np.ndarray, slots: float
) -> np.ndarray:
    """Return how many of the rows under way run, if a decode step of n rows takes `one` + `slope` x (n - 1).

    This solves n (d + w) = rows d, where d is the turn's length times the seconds of a step.
    """
    wait = turns.seconds / turns.lengths.mean
    base = np.maximum(one - slope, 1e-3 * one)
    half = (base + wait - rows * slope) / 2
    root = np.sqrt(half**2 + slope * rows * base)
    few = rows * base / np.maximum(half + root, 1e-30)
    many = (root - half) / np.maximum(slope, 1e-30)
    return np.minimum(slots, np.where(half > 0, few, many))


@lru_cache(maxsize=512)
def _with_wait(counts: Lengths, lengths: Lengths, wait: int) -> _LongerRows:
    unit = max(1, -(-counts.limit * (lengths.limit + wait) // _MOST_PARTS))
    parts = lengths if unit == 1 else lengths.scaled(1 / unit)
    extra = max(1, round(wait / unit))
    longer = _sum_of_turns(counts, parts, extra)
    if len(np.unique(longer.survival)) == 1:
        longer = longer.scaled(1 + _JITTER)
        falling = np.linspace(1.0, 0.0, max(2, round(2 * _JITTER * longer.limit)) + 1)[1:]
        survival = longer.survival.copy()
        survival[-len(falling):] = falling
        longer = Lengths(survival)
    return _LongerRows(longer, unit, extra * unit)


def _squared(lengths: Lengths) -> float:
    """Return the mean of the squared length."""
    return float(lengths.survival @ (2 * np.arange(lengths.limit) + 1))


@lru_cache(maxsize=512)
def _sum_of_turns(counts: Lengths, lengths: Lengths, extra: int = 0) -> Lengths:
    """Return the distribution of the sum over a rollout's turns of their lengths and `extra` for each.

    Turns are independent, so their sums have powers of one spectrum.
    """
    longest = counts.limit * (lengths.limit + extra)
    size = 1 << longest.bit_length()
    of_turn = np.zeros(size)
    of_turn[1 + extra : 1 + extra + lengths.limit] = _chances(lengths)
    spectrum = np.fft.rfft(of_turn)
    total = np.zeros_like(spectrum)
    for chance in _chances(counts)[::-1]:  # Horner's scheme.
        total = (total + chance) * spectrum
    ends = np.maximum(0.0, np.fft.irfft(total, size)[: longest + 1])
    survival = np.cumsum(ends[::-1])[::-1][1:] / ends.sum()
    last = max(1, int((survival > _KEPT).sum()))
    return Lengths(np.where(survival[:last] > 1 - _KEPT, 1.0, survival[:last]))


def _chances(lengths: Lengths) -> np.ndarray:
    """Return how probable each length is, from 1 to the limit; there is none below."""
    survival = np.append(np.append(1.0, lengths.survival[1:]), 0.0)
    return survival[:-1] - survival[1:]
