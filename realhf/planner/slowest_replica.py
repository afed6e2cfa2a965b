"""The decode steps of the replica that ends last, and the seconds of the rank whose rewards end last.

A replica has a number of slots, and each slot gets a waiting row as soon as its row has ended. So the steps
of a replica have two phases, and a third question is how they vary between replicas:

1. Full slots. All slots have rows until no row waits. Renewal theory gives the ages of the rows that run
   then: `_starts` has the mean number of rows that a slot starts at each time.
2. Ending rows. The rows that still run end one after the other. One of them is the last row, which runs in
   all of these steps; the others are called further rows.
3. Spread between replicas. Each of them takes another number of steps, and a call ends with the slowest.

Example: rows have 2 or 4 tokens, each with a chance of 1/2, and a replica has two slots. With two rows, none
waits, so phase 1 has no steps. The last row ends after 2 steps if both rows are short, with a chance of 1/4,
otherwise after 4: after 3.5 steps on average. The further row takes the other 2.5 of the 6 tokens. Among four
such replicas, the slowest takes 2 steps with a chance of 1/256, otherwise 4. With 100 rows, both slots are
full for 147.4 steps. Then the last row takes 3.2 more steps and the further row 2.0, for 300 tokens in all.

Shapes: T bins of tokens, U = 2 T bins, R ranges of the steps of phase 2, E values of the step in which the
last row ends, F finer ones of which each E is a mean, K = 1 + 2 R kinds of steps, D deviations. An array
whose name ends in _T1 has T + 1 elements, and in _R1 R + 1.

Rewards that score samples are the same problem: a rank scores some at once, and begins the next when one
ends.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from realhf.planner.lengths import Lengths, geometric, long_tail, steady_round

_NUM_BINS = 512  # Times are counted in bins of tokens, this many up to the longest response.
_NEVER = 1e-8  # Lengths that so small a fraction of the rows exceeds are left out.
_NUM_RANGES = 24  # The largest R.
_NUM_ENDS = 24  # E.
_FINER = 6  # The F that belong to each E.
_DEVIATIONS_D = np.arange(-3.0, 4.5, 0.5)
_NORMAL_D = np.exp(-(_DEVIATIONS_D**2) / 2) / np.exp(-(_DEVIATIONS_D**2) / 2).sum()


class Rollout(NamedTuple):
    """The rows that a generation decodes.

    Each of the `replicas` has `num_rows`, of which `slots` run at once. With `work_stealing`, replicas that
    are done take waiting prompts, of `group_size` rows each, from others. In a fraction `alike_share` of the
    groups, all rows have one length.
    """

    lengths: Lengths
    rounds: int
    num_rows: float
    slots: float
    replicas: int
    work_stealing: bool
    group_size: int
    alike_share: float = 0.0


class FullPhase(NamedTuple):
    """The steps of a replica in which all slots have rows."""

    steps: float
    deviation: float  # Standard deviation of `steps` between replicas.
    context: float  # Mean number of generated tokens of the rows that are decoded.


class EndingPhase(NamedTuple):
    """The steps of a replica in which its rows end, if the last row ends at each of E steps."""

    chances_E: np.ndarray  # How probable each end of the last row is.
    last_steps_ER: np.ndarray  # Steps of the last row.
    further_steps_ER: np.ndarray  # Steps of the further rows, added up.
    further_ends_ER: np.ndarray  # The probability that a further row ends in a range.
    further_rows: float  # How many further rows there are.
    alike_rows: float  # How many rows end together, as they answer one prompt.
    rows_R: np.ndarray  # Mean number of rows that run, at least 2.
    context_R: np.ndarray  # Mean number of their generated tokens.


class DecodeSteps(NamedTuple):
    """The decode steps of a replica, by kind of step.

    The first kind has all slots full. The next R kinds are the steps of each range with the last row alone,
    and the R kinds after them the steps of each range with `EndingPhase.rows_R`.
    """

    rows_K: np.ndarray
    context_K: np.ndarray  # Mean number of generated tokens of the rows.
    full: FullPhase
    ending: EndingPhase
    most_full_steps_E: np.ndarray  # The most steps of the first phase of any replica.
    replicas: int

    def of_slowest(self, seconds_K: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the expected seconds of the slowest replica, and its mean number of steps of each kind.

        `seconds_K` are those of a step of each kind. With n rows in a range, a step takes the seconds with
        one row and n - 1 times those of a further row.
        """
        ending = self.ending
        seconds_ED = self._spread_between_replicas(seconds_K)
        chances_ED = np.outer(ending.chances_E, _NORMAL_D)
        order = np.argsort(seconds_ED, axis=None)
        chances_to_end = np.minimum(np.cumsum(chances_ED.ravel()[order]), 1.0)  # By then, of one replica.
        chances_of_slowest = np.diff(chances_to_end**self.replicas, prepend=0.0)
        weights_E = np.bincount(order // len(_NORMAL_D), chances_of_slowest, minlength=len(seconds_ED))
        # A range's steps count as some with one row and some with `rows_R`, as many rows as run in all.
        many_R = weights_E @ ending.further_steps_ER / (ending.rows_R - 1)
        alone_R = weights_E @ ending.last_steps_ER - many_R
        steps_K = np.concatenate([[self.full.steps], alone_R, many_R])
        return float(chances_of_slowest @ seconds_ED.ravel()[order]), steps_K

    def of_mean(self, seconds_K: np.ndarray) -> float:
        """Return the expected seconds of any replica."""
        alone_R, further_R = self._seconds_in_ranges(seconds_K)
        ending_E = self.ending.last_steps_ER @ alone_R + self.ending.further_steps_ER @ further_R
        return self.full.steps * float(seconds_K[0]) + float(self.ending.chances_E @ ending_E)

    def _spread_between_replicas(self, seconds_K: np.ndarray) -> np.ndarray:
        """Return the seconds of replicas, shape (E, D): D deviations from the mean for each of E last ends.

        Replicas deviate since further rows end at random times of phase 2, and since phase 1 takes different
        numbers of steps. No replica takes longer than if all rows ran to the end.
        """
        ending = self.ending
        alone_R, further_R = self._seconds_in_ranges(seconds_K)
        full_seconds = self.full.steps * seconds_K[0]
        last_E = ending.last_steps_ER @ alone_R
        mean_E = full_seconds + last_E + ending.further_steps_ER @ further_R
        # A further row that ends in a range takes between `before` and `after` seconds, all equally probable.
        in_range_ER = ending.last_steps_ER * further_R
        after_ER = np.cumsum(in_range_ER, axis=1)
        before_ER = after_ER - in_range_ER
        squares_ER = before_ER**2 + before_ER * after_ER + after_ER**2
        row_mean_E = (ending.further_ends_ER * (before_ER + after_ER)).sum(axis=1) / 2
        row_squared_E = (ending.further_ends_ER * squares_ER).sum(axis=1) / 3
        row_variance_E = np.maximum(0.0, row_squared_E - row_mean_E**2)
        variance_E = ending.alike_rows * ending.further_rows * row_variance_E
        deviation_E = np.sqrt(variance_E + (self.full.deviation * seconds_K[0]) ** 2)
        most_E = self.most_full_steps_E * seconds_K[0] + last_E + ending.further_rows * after_ER[:, -1]
        room_E = np.maximum(0.0, most_E - mean_E)[:, None]
        return mean_E[:, None] + np.clip(deviation_E[:, None] * _DEVIATIONS_D, -room_E, room_E)

    def _seconds_in_ranges(self, seconds_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a step of each range with the last row alone, and of each further row."""
        alone_R, many_R = seconds_K[1:].reshape(2, -1)
        return alone_R, (many_R - alone_R) / (self.ending.rows_R - 1)


class PeakContext(NamedTuple):
    """The cached tokens of a slot at the time when all slots have most, on average and their deviation.

    Rows that end together count as one in `deviation_per_row`, which so is that of a row on its own.
    """

    mean: float
    deviation_per_row: float

    def of(self, slots: float, *, deviations: float) -> float:
        """Return the tokens of so many slots, with room for some standard deviations more."""
        return slots * self.mean + deviations * self.deviation_per_row * math.sqrt(slots)


@lru_cache(maxsize=1 << 14)
def peak_context(rollout: Rollout, tokens_per_row: float) -> PeakContext:
    """Return the cached tokens of a slot, if each running row has `tokens_per_row` besides what it has drawn.

    Rows begin with no tokens and end at different times, so that at no time all of them are long.
    """
    table = _table(rollout.lengths, rollout.rounds)
    slots = min(rollout.slots, rollout.num_rows)
    tokens_T = tokens_per_row + table.context_T + table.bin_tokens / 2
    ages_T = _running_since(table, rollout.num_rows, slots)
    moments = [table.alive_T, table.alive_T * tokens_T, table.alive_T * tokens_T**2]
    _, mean_T, squared_T = (_later(ages_T, moment_T) for moment_T in moments)
    if slots < rollout.num_rows:  # Before that, ended rows are replaced.
        num_bins = len(table.starts_U)
        full = np.fft.rfft(table.starts_U, 2 * num_bins)
        mean_U, squared_U = (
            np.fft.irfft(full * np.fft.rfft(moment_T, 2 * num_bins), 2 * num_bins)[:num_bins]
            for moment_T in moments[1:])
        bins = rollout.num_rows / slots * table.mean / table.bin_tokens
        until = max(1, min(num_bins, math.ceil(bins)))
        mean_T = np.append(mean_T, mean_U[:until])
        squared_T = np.append(squared_T, squared_U[:until])
    peak = int(np.argmax(mean_T))
    variance = max(0.0, float(squared_T[peak] - mean_T[peak] ** 2))
    alike_rows = 1 + rollout.alike_share * (min(float(rollout.group_size), slots) - 1)
    return PeakContext(float(mean_T[peak]), math.sqrt(variance * alike_rows))


class _Table(NamedTuple):
    """A distribution of lengths in bins.

    `starts_U` is for a slot that starts a row in the first bin and another whenever one has ended.
    """

    bin_tokens: int
    alive_T: np.ndarray  # The fraction of rows that get each bin's tokens.
    context_T: np.ndarray  # The tokens that these rows then have.
    starts_U: np.ndarray  # The mean number of rows that a slot starts in each bin.
    starts_variance_U: np.ndarray  # The variance of the number of starts up to each bin.
    mean: float  # Tokens of a row.
    deviation: float
    contexts: float  # The sum over a row's tokens of the context with which they are decoded.


class _Decline(NamedTuple):
    """The mean row of a slot from the moment when no row waits any more."""

    running_T: np.ndarray  # The fraction of rows that run in each later bin.
    tokens_T1: np.ndarray  # Tokens that a row gets before each bin, and in all.
    contexts_T1: np.ndarray  # The sum of the contexts with which these tokens are decoded.


@lru_cache(maxsize=4096)
def decode_steps(rollout: Rollout) -> DecodeSteps:
    table = _table(rollout.lengths, rollout.rounds)
    slots = min(rollout.slots, rollout.num_rows)
    waves = math.ceil(rollout.num_rows / slots - 1e-9)  # How often a slot starts a row if all are equal.
    last_rows = slots  # Rows that run when no row waits any more.
    if table.deviation == 0.0:  # All rows end together, and others take their places.
        last_rows = max(1.0, rollout.num_rows - slots * (waves - 1))
    decline = _decline(rollout, table, slots)
    full = _full_phase(rollout, table, slots, last_rows, decline)
    ending = _ending_phase(rollout, table, last_rows, decline)
    longest = len(table.alive_T) * table.bin_tokens
    if rollout.work_stealing:  # A replica may take more than its share.
        group_steps = math.ceil(rollout.group_size / slots) * longest
        most_full_steps_E = np.full(_NUM_ENDS, full.steps + group_steps)
    else:
        most_full_steps_E = np.maximum(full.steps, waves * longest - ending.last_steps_ER.sum(axis=1))
    return DecodeSteps(
        rows_K=np.concatenate([[slots], np.ones(len(ending.rows_R)), ending.rows_R]),
        context_K=np.concatenate([[full.context], ending.context_R, ending.context_R]),
        full=full, ending=ending, most_full_steps_E=most_full_steps_E, replicas=rollout.replicas)


def _decline(rollout: Rollout, table: _Table, slots: float) -> _Decline:
    """Return how rows run on when no row waits; replicas that share waiting rows count as one."""
    pooled = rollout.replicas if rollout.work_stealing else 1
    ages_T = _running_since(table, rollout.num_rows * pooled, slots * pooled)
    running_T = _later(ages_T, table.alive_T)
    contexts_T = _later(ages_T, table.alive_T * table.context_T)
    return _Decline(
        running_T, np.append(0.0, np.cumsum(running_T)) * table.bin_tokens,
        np.append(0.0, np.cumsum(contexts_T)) * table.bin_tokens)


def _full_phase(
    rollout: Rollout, table: _Table, slots: float, last_rows: float, decline: _Decline
) -> FullPhase:
    """Return the phase that decodes all tokens except those of the declining rows."""
    all_tokens = rollout.num_rows * table.mean
    tokens = max(0.0, all_tokens - last_rows * decline.tokens_T1[-1])
    if tokens <= 1e-6 * all_tokens:  # It is due to rounding.
        tokens = 0.0
    contexts = max(0.0, rollout.num_rows * table.contexts - last_rows * decline.contexts_T1[-1])
    context = contexts / tokens if tokens else 0.0
    return FullPhase(tokens / slots, _full_deviation(rollout, table, slots), context)


def _ending_phase(rollout: Rollout, table: _Table, last_rows: float, decline: _Decline) -> EndingPhase:
    """Return the phase in which `last_rows` end, one after the other."""
    running_T, tokens_T1, contexts_T1 = decline
    group_size = min(float(rollout.group_size), last_rows)
    siblings = rollout.alike_share * (group_size - 1)  # Further rows that end together with the last one.
    chances_E, ends_F, longer_F = _last_ends(
        running_T, last_rows, rollout.replicas, group_size, rollout.alike_share)
    edges_R1 = np.unique(np.geomspace(1, len(running_T) + 1, _NUM_RANGES + 1).astype(int)) - 1
    first_R = edges_R1[:-1]
    stop_FR = np.maximum(first_R, np.minimum(edges_R1[1:], ends_F[:, None]))
    last_steps_FR = (stop_FR - first_R) * table.bin_tokens
    # All further rows end before the last row: of the rows in `decline`, those that would not run longer.
    last_longer_FR = last_steps_FR * longer_F[:, None]
    shorter_F = (1 - longer_F)[:, None]
    steps_FR = np.maximum(0.0, tokens_T1[stop_FR] - tokens_T1[first_R] - last_longer_FR)
    further_steps_FR = siblings * last_steps_FR + (last_rows - 1 - siblings) * steps_FR / shorter_F
    still_FR1 = np.maximum(0.0, np.append(running_T, 0.0)[edges_R1] - longer_F[:, None]) / shorter_F
    still_FR1[:, 0] = 1.0
    tokens_R = np.diff(tokens_T1[edges_R1])
    return EndingPhase(
        chances_E=chances_E,
        last_steps_ER=_mean_of_finer(last_steps_FR),
        further_steps_ER=_mean_of_finer(further_steps_FR),
        further_ends_ER=_mean_of_finer(-np.diff(still_FR1, axis=1) * float(table.deviation > 0)),
        further_rows=last_rows - 1,
        alike_rows=1 + siblings,
        rows_R=np.maximum(last_rows * tokens_R / (np.diff(edges_R1) * table.bin_tokens), 2.0),
        context_R=np.diff(contexts_T1[edges_R1]) / np.maximum(tokens_R, 1e-30))


def _mean_of_finer(values_FR: np.ndarray) -> np.ndarray:
    """Return the means over the finer ends of each end, shape (E, R)."""
    mean_ER: np.ndarray = values_FR.reshape(_NUM_ENDS, _FINER, -1).mean(axis=1)
    return mean_ER


@lru_cache(maxsize=64)
def _table(lengths: Lengths, num_rounds: int) -> _Table:
    in_round = steady_round(lengths, num_rounds)
    horizon = max(1, int((in_round.survival > _NEVER).sum()))
    alive = np.append(1.0, in_round.survival[1:horizon])  # By token; every row gets one.
    context = in_round.history[:horizon] + np.arange(1, horizon + 1)
    bin_tokens = -(-horizon // _NUM_BINS)
    num_bins = -(-horizon // bin_tokens)
    padding = (0, num_bins * bin_tokens - horizon)
    tokens_T = np.pad(alive, padding).reshape(num_bins, bin_tokens).sum(axis=1)
    contexts_T = np.pad(alive * context, padding).reshape(num_bins, bin_tokens).sum(axis=1)
    mean = float(alive.sum())
    squared = float(alive @ (2 * np.arange(horizon) + 1))
    deviation = 0.0 if alive[-1] == 1.0 else math.sqrt(max(0.0, squared - mean**2))
    alive_T = tokens_T / bin_tokens
    starts_U = _starts(alive_T)
    return _Table(
        bin_tokens, alive_T, contexts_T / np.maximum(tokens_T, 1e-30), starts_U, _starts_variance(starts_U),
        mean, deviation, float(contexts_T.sum()))


def _starts(alive_T: np.ndarray) -> np.ndarray:
    """Return the mean number of rows that a slot starts in each of U bins, until this no longer changes."""
    ends = -np.diff(np.append(np.append(1.0, alive_T), 0.0))  # Chance of a row to have each number of bins.
    backwards = ends[:0:-1]
    horizon = len(alive_T)
    starts = np.zeros(horizon * 3)
    starts[horizon] = 1 / (1 - ends[0])
    for now in range(horizon + 1, len(starts)):
        starts[now] = backwards @ starts[now - horizon : now] / (1 - ends[0])
    return starts[horizon:]


def _starts_variance(starts_U: np.ndarray) -> np.ndarray:
    """Return the variance of the number of rows that a slot has started up to each bin."""
    size = 2 * len(starts_U)
    pairs_U = np.fft.irfft(np.fft.rfft(starts_U, size) ** 2, size)[: len(starts_U)]
    number_U = np.cumsum(starts_U)
    return np.maximum(0.0, 2 * np.cumsum(pairs_U) - number_U - number_U**2)


def _running_since(table: _Table, num_rows: float, slots: float) -> np.ndarray:
    """Return, for the moment when the last of some rows starts, how long ago the rows started that run.

    The result has the mean number of starts per slot and bin, backwards in time from the last bin. The last
    row itself starts then, and the other slots started `num_rows - 1` before it, if it has waited for them.
    """
    horizon = len(table.alive_T)
    first_T = np.zeros(horizon)
    first_T[0] = 1.0
    if slots >= num_rows or table.deviation == 0.0:
        return first_T
    num_bins = table.mean / table.bin_tokens
    others = slots - 1
    # Rows that all slots have started by each bin; the one that the last row waits for starts evenly.
    started_U = np.arange(len(table.starts_U)) / num_bins + others * np.cumsum(table.starts_U)
    wanted = num_rows - 1
    last_bin = int(np.searchsorted(started_U, wanted * (1 - 1e-12)))
    if last_bin == len(started_U):  # By then, rows start at a constant rate.
        recent_T = np.full(horizon, 1 / num_bins)
    else:
        recent_T = np.pad(table.starts_U[: last_bin + 1][::-1], (0, horizon))[:horizon]
        if others > 0:
            in_bin = others * table.starts_U[last_bin]
            recent_T[0] *= np.clip((wanted - (started_U[last_bin] - in_bin)) / in_bin, 0.0, 1.0)
    return (others * recent_T + first_T) / slots


def _later(starts_T: np.ndarray, alive_T: np.ndarray) -> np.ndarray:
    """Return the sum over a of starts[a] * alive[a + t], for every bin t."""
    size = 2 * len(alive_T)
    spectrum = np.conj(np.fft.rfft(starts_T, size)) * np.fft.rfft(alive_T, size)
    return np.maximum(np.fft.irfft(spectrum, size)[: len(alive_T)], 0.0)


def _last_ends(
    running_T: np.ndarray, last_rows: float, replicas: int, group_size: float, alike_share: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return how probable E ends of the last row are, the F numbers of bins until it ends, and the fraction
    of rows that would run longer than each of these.

    Later ends are closer to each other, as the slowest of the replicas counts. If many rows end in one bin,
    such as at the limit of tokens, the last row is any of them.
    """
    later_E1 = np.append(np.geomspace(1.0, 0.002 / replicas, _NUM_ENDS), 0.0)  # Chances to end later.
    steps_E = np.diff(later_E1)
    later_F = (later_E1[:-1, None] + steps_E[:, None] * ((np.arange(_FINER) + 0.5) / _FINER)).ravel()
    longer_F = _longer(np.log1p(-later_F) * group_size / last_rows, group_size, alike_share)
    ends_F = np.searchsorted(-np.minimum.accumulate(running_T), -longer_F * (1 + 1e-9))
    return -steps_E, ends_F, longer_F


def _longer(log_chances_F: np.ndarray, group_size: float, alike_share: float) -> np.ndarray:
    """Return the fraction of rows that run longer than times by which a group has ended with some chances.

    If a row has ended with the chance f, a group of alike rows has too, and any other with f ** group_size.
    """
    if alike_share == 1:
        return -np.expm1(log_chances_F)
    log_f_F = log_chances_F / group_size
    if alike_share > 0:  # Bisection between the values for groups that are all alike, or not at all.
        low_F = np.minimum(log_f_F, log_chances_F)
        high_F = np.maximum(log_f_F, log_chances_F)
        for _ in range(60):
            log_f_F = (low_F + high_F) / 2
            log_alike_F = np.log(alike_share) + log_f_F
            log_others_F = np.log1p(-alike_share) + group_size * log_f_F
            is_low = np.logaddexp(log_alike_F, log_others_F) < log_chances_F
            low_F = np.where(is_low, log_f_F, low_F)
            high_F = np.where(is_low, high_F, log_f_F)
        log_f_F = low_F
    return -np.expm1(log_f_F)


def _full_deviation(rollout: Rollout, table: _Table, slots: float) -> float:
    """Return the standard deviation between replicas of the steps in which all slots are full."""
    waiting = rollout.num_rows - slots
    if waiting <= 0 or table.deviation == 0.0:
        return 0.0
    if rollout.work_stealing:
        # All find the queue empty at the same time, but each has begun a group, whose last rows wait.
        per_row = (rollout.group_size + 1) / 12 * table.mean**2 + table.deviation**2 / 2
        return math.sqrt((rollout.group_size - 1) * per_row) / slots
    bins = waiting / slots * table.mean / table.bin_tokens
    last_bin = len(table.starts_U) - 1
    variance = np.interp(bins, np.arange(last_bin + 1), table.starts_variance_U)
    if bins > last_bin:
        variance *= bins / last_bin
    alike_rows = 1 + rollout.alike_share * (min(float(rollout.group_size), slots) - 1)
    return math.sqrt(float(variance) * alike_rows / slots) * table.mean


_UNITS = 100  # The mean time of an answer is counted in so many units.
_LONGEST = 50  # Without a time limit, no answer takes longer than so many times the 0.99 quantile.


@dataclass(frozen=True)
class ScoringTime:
    """The seconds in which an answer is scored, and how many are scored at once on a rank.

    Without `p99_seconds`, all answers take equally long. No answer takes longer than `limit_seconds`.
    """

    mean_seconds: float
    p99_seconds: float | None = None
    limit_seconds: float | None = None
    at_once: int = 1

    def of_slowest(self, num_samples: float, num_ranks: int) -> float:
        """Return the expected seconds of the slowest of some ranks, which share the samples."""
        return _of_slowest(self, max(1.0, num_samples / num_ranks), num_ranks)

    @property
    def _lengths(self) -> Lengths:
        if self.p99_seconds is None:
            return geometric(_UNITS, _UNITS)
        p99 = self.p99_seconds / self.mean_seconds * _UNITS
        limit = _LONGEST * p99 if self.limit_seconds is None else (
            self.limit_seconds / self.mean_seconds * _UNITS)
        return long_tail(_UNITS, p99, max(1, round(limit)))


@lru_cache(maxsize=1024)
def _of_slowest(time: ScoringTime, num_samples: float, num_ranks: int) -> float:
    slots = min(float(time.at_once), num_samples)
    steps = decode_steps(Rollout(time._lengths, 1, num_samples, slots, num_ranks, False, 1))
    return steps.of_slowest(np.ones(len(steps.rows_K)))[0] * time.mean_seconds / _UNITS


@lru_cache(maxsize=1024)
def normal_maximum(number: int) -> float:
    """Return the mean of the largest of some independent standard normal variables."""
    x = np.linspace(0.0, 9.0, 1801)
    above = np.array([math.erfc(z / math.sqrt(2)) / 2 for z in x.tolist()])
    return float(np.trapezoid(1 - (1 - above) ** number - above**number, x))
