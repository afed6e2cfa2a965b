"""The decode steps of the replica that ends last.

A replica has a number of slots, and each slot gets a waiting row as soon as its row has ended. So all slots
are full until no row waits; after that the last rows end one by one. How many rows still run after t more
steps follows from renewal theory: `_starts` has the mean number of rows that a slot starts at each time. The
number of steps until the last row ends varies between replicas, and a call ends with the slowest of them.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from realhf.planner.workload.lengths import Lengths
from realhf.planner.workload.rounds import steady_round

_NUM_BINS = 512  # Times are counted in bins of tokens, this many up to the longest response.
_NEVER = 1e-8  # Lengths that so small a fraction of the rows exceeds are left out.
_NUM_RANGES = 24  # The steps after all slots were full are averaged over this many ranges.
_NUM_ENDS = 24  # The number of values that stand for the step in which the last row ends.
_NUM_PARTS = 6  # Each of them is a mean over so many values.
_DEVIATIONS = np.arange(-3.0, 4.5, 0.5)
_NORMAL = np.exp(-(_DEVIATIONS**2) / 2) / np.exp(-(_DEVIATIONS**2) / 2).sum()


class Rollout(NamedTuple):
    """The rows that a generation decodes.

    Each of the `replicas` has `num_rows`, of which `slots` run at once. With `shared`, replicas that are done
    take waiting prompts, of `group` rows each, from others. In an `alike` share of the groups, all rows have
    one length.
    """

    lengths: Lengths
    rounds: int
    num_rows: float
    slots: float
    replicas: int
    shared: bool
    group: int
    alike: float = 0.0


class DecodeSteps(NamedTuple):
    """The decode steps of a replica.

    They are of several kinds, and decode `rows` with a mean `context` of generated tokens. The first kind has
    all slots full. Then come ranges of later steps: all of them with one row, and again all of them with
    about as many rows as run in them.
    """

    rows: np.ndarray
    context: np.ndarray
    full_steps: float
    full_deviation: float  # Standard deviation of `full_steps` between replicas.
    last_steps: np.ndarray
    """The steps of each range, for each of several values of the time when the last row ends."""
    further_steps: np.ndarray  # The same for the sum over all rows but one.
    further_ends: np.ndarray  # The same for the probability that such a row ends in this range.
    further_rows: float  # The number of these rows.
    chances: np.ndarray  # The probabilities of these values.
    most_full_steps: np.ndarray  # The most that `full_steps` can be, for each of these values.
    replicas: int
    alike_rows: float  # How many rows vary together.

    def of_slowest(self, seconds: np.ndarray) -> tuple[float, np.ndarray]:
        """Return the expected seconds of the slowest replica, and its mean number of steps of each kind.

        `seconds` are those of a step of each kind. Steps between one row and many are interpolated.
        """
        one, per_row = self._one_and_further(seconds)
        ends = self.last_steps @ one
        means = self.full_steps * seconds[0] + ends + self.further_steps @ per_row
        by_range = self.last_steps * per_row
        after = np.cumsum(by_range, axis=1)  # Seconds of a row that ends where a range ends, and starts.
        before = after - by_range
        row_mean = (self.further_ends * (before + after)).sum(axis=1) / 2
        row_squared = (self.further_ends * (before**2 + before * after + after**2)).sum(axis=1) / 3
        variance = self.alike_rows * self.further_rows * np.maximum(0.0, row_squared - row_mean**2)
        deviations = np.sqrt(variance + (self.full_deviation * seconds[0]) ** 2)
        most = self.most_full_steps * seconds[0] + ends + self.further_rows * after[:, -1]
        most = np.maximum(0.0, most - means)[:, None]
        values = means[:, None] + np.clip(deviations[:, None] * _DEVIATIONS, -most, most)
        chances = np.outer(self.chances, _NORMAL).ravel()
        order = np.argsort(values, axis=None)
        is_slowest = np.diff(np.minimum(np.cumsum(chances[order]), 1.0) ** self.replicas, prepend=0.0)
        weights = np.bincount(order // len(_NORMAL), is_slowest, minlength=len(means))
        further = weights @ self.further_steps / self._more_rows
        return float(is_slowest @ values.ravel()[order]), np.concatenate(
            [[self.full_steps], weights @ self.last_steps - further, further])

    def of_mean(self, seconds: np.ndarray) -> float:
        """Return the expected seconds of any replica."""
        one, per_row = self._one_and_further(seconds)
        after = self.last_steps @ one + self.further_steps @ per_row
        return self.full_steps * float(seconds[0]) + float(self.chances @ after)

    @property
    def _more_rows(self) -> np.ndarray:
        """The rows of each kind of step after the first, besides one."""
        return self.rows[1 + self.last_steps.shape[1] :] - 1

    def _one_and_further(self, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of a later step with one row, and what each further row adds."""
        one, many = seconds[1:].reshape(2, -1)
        return one, (many - one) / self._more_rows


@lru_cache(maxsize=4096)
def decode_steps(rollout: Rollout) -> DecodeSteps:
    """Return the steps in which a replica decodes its rows."""
    table = _table(rollout.lengths, rollout.rounds)
    slots = min(rollout.slots, rollout.num_rows)
    last_rows = slots
    if table.deviation == 0.0:  # All rows end together, and others take their places.
        last_rows = max(1.0, rollout.num_rows - slots * (math.ceil(rollout.num_rows / slots - 1e-9) - 1))
    pooled = rollout.replicas if rollout.shared else 1
    ages = _running_since(table, rollout.num_rows * pooled, slots * pooled)
    running = _later(ages, table.alive)  # The fraction of slots whose rows run after so many bins more.
    tokens = np.append(0.0, np.cumsum(running)) * table.bin_tokens
    had = np.append(0.0, np.cumsum(_later(ages, table.alive * table.context))) * table.bin_tokens
    edges = np.unique(np.geomspace(1, len(running) + 1, _NUM_RANGES + 1).astype(int)) - 1
    group = min(float(rollout.group), last_rows)
    siblings = rollout.alike * (group - 1)  # Rows that end together with the last one.
    ends, longer, chances = _last_ends(running, last_rows, rollout.replicas, group, rollout.alike)
    low, high = edges[:-1], np.minimum(edges[1:], ends[:, None])
    last_steps = np.maximum(high - low, 0) * table.bin_tokens
    shorter = 1 - longer[:, None]  # All further rows end before the last one.
    further = np.maximum(0.0, tokens[np.maximum(high, low)] - tokens[low] - last_steps * longer[:, None])
    further = siblings * last_steps + (last_rows - 1 - siblings) * further / shorter
    still = np.maximum(0.0, np.append(running, 0.0)[edges] - longer[:, None]) / shorter
    still = np.hstack([np.ones((len(ends), 1)), still[:, 1:]])
    spread = float(table.deviation > 0)
    range_tokens = np.diff(tokens[edges])
    context = np.diff(had[edges]) / np.maximum(range_tokens, 1e-30)
    rows = np.maximum(last_rows * range_tokens / (np.diff(edges) * table.bin_tokens), 2.0)
    full = max(0.0, rollout.num_rows * table.mean - last_rows * tokens[-1])  # Tokens while slots are full.
    full = full if full > 1e-6 * rollout.num_rows * table.mean else 0.0
    full_context = max(0.0, rollout.num_rows * table.contexts - last_rows * had[-1]) / full if full else 0.0
    full_steps = full / slots
    longest = len(table.alive) * table.bin_tokens
    most_steps = math.ceil(rollout.num_rows / slots - 1e-9) * longest - last_steps.sum(axis=1)
    if rollout.shared:  # A replica may take more than its share.
        most_steps = np.full(len(ends), full_steps + math.ceil(rollout.group / slots) * longest)
    last_steps, further, ended, most_steps = (
        array.reshape(_NUM_ENDS, _NUM_PARTS, -1).mean(axis=1)
        for array in (last_steps, further, -np.diff(still, axis=1) * spread, most_steps)
    )
    return DecodeSteps(
        rows=np.concatenate([[slots], np.ones(len(low)), rows]),
        context=np.concatenate([[full_context], context, context]),
        full_steps=full_steps, full_deviation=_full_deviation(rollout, table, slots),
        last_steps=last_steps, further_steps=further,
        further_ends=ended, further_rows=last_rows - 1, chances=chances,
        most_full_steps=np.maximum(full_steps, most_steps[:, 0]), replicas=rollout.replicas,
        alike_rows=1 + siblings)


class _Table(NamedTuple):
    """A distribution of lengths in bins.

    `alive` is the fraction of rows that get each bin's tokens, `context` the tokens that they then have,
    `starts` the mean number of rows that a slot starts in each bin, if it starts one in the first and another
    whenever one has ended.
    """

    bin_tokens: int
    alive: np.ndarray
    context: np.ndarray
    starts: np.ndarray
    starts_variance: np.ndarray  # The variance of the number of starts up to each bin.
    mean: float  # Tokens of a row.
    deviation: float
    contexts: float  # The sum over a row's tokens of the context with which they are decoded.


@lru_cache(maxsize=64)
def _table(lengths: Lengths, num_rounds: int) -> _Table:
    in_round = steady_round(lengths, num_rounds)
    horizon = max(1, int((in_round.survival > _NEVER).sum()))
    alive = np.append(1.0, in_round.survival[1:horizon])  # Every row gets a token.
    context = in_round.history[:horizon] + np.arange(1, horizon + 1)
    bin_tokens = -(-horizon // _NUM_BINS)
    num_bins = -(-horizon // bin_tokens)
    padding = (0, num_bins * bin_tokens - horizon)
    tokens = np.pad(alive, padding).reshape(num_bins, bin_tokens).sum(axis=1)
    contexts = np.pad(alive * context, padding).reshape(num_bins, bin_tokens).sum(axis=1)
    mean = float(alive.sum())
    squared = float(alive @ (2 * np.arange(horizon) + 1))
    deviation = 0.0 if alive[-1] == 1.0 else math.sqrt(max(0.0, squared - mean**2))
    by_bin = tokens / bin_tokens
    starts = _starts(by_bin)
    return _Table(
        bin_tokens, by_bin, contexts / np.maximum(tokens, 1e-30), starts, _starts_variance(starts), mean,
        deviation, float(contexts.sum()))


def _starts(alive: np.ndarray) -> np.ndarray:
    """Return the mean number of rows that a slot starts in each bin, until this no longer changes."""
    ends = -np.diff(np.append(np.append(1.0, alive), 0.0))  # Chance of a row to have each number of bins.
    backwards = ends[:0:-1]
    horizon = len(alive)
    starts = np.zeros(horizon * 3)
    starts[horizon] = 1 / (1 - ends[0])
    for now in range(horizon + 1, len(starts)):
        starts[now] = backwards @ starts[now - horizon : now] / (1 - ends[0])
    return starts[horizon:]


def _starts_variance(starts: np.ndarray) -> np.ndarray:
    """Return the variance of the number of rows that a slot has started up to each bin."""
    size = 2 * len(starts)
    pairs = np.fft.irfft(np.fft.rfft(starts, size) ** 2, size)[: len(starts)]
    number = np.cumsum(starts)
    return np.maximum(0.0, 2 * np.cumsum(pairs) - number - number**2)


def _running_since(table: _Table, num_rows: float, slots: float) -> np.ndarray:
    """Return, for the moment when the last of some rows starts, how long ago the rows started that run.

    The result has the mean number of starts per slot and bin, backwards in time from the last bin. The last
    row itself starts then, and the other slots started `num_rows - 1` before it, if it has waited for them.
    """
    horizon = len(table.alive)
    first = np.zeros(horizon)
    first[0] = 1.0
    if slots >= num_rows or table.deviation == 0.0:
        return first
    bins = np.arange(len(table.starts))
    num_bins = table.mean / table.bin_tokens
    others = slots - 1
    started = bins / num_bins + others * np.cumsum(table.starts)  # Including what the last row waits for.
    wanted = num_rows - 1
    last = int(np.searchsorted(started, wanted * (1 - 1e-12)))
    if last == len(started):  # By then, rows start at a constant rate.
        recent = np.full(horizon, 1 / num_bins)
    else:
        recent = np.pad(table.starts[: last + 1][::-1], (0, horizon))[:horizon]
        if others > 0:
            before = started[last] - others * table.starts[last]
            recent[0] *= np.clip((wanted - before) / (others * table.starts[last]), 0.0, 1.0)
    return (others * recent + first) / slots


def _later(starts: np.ndarray, alive: np.ndarray) -> np.ndarray:
    """Return the sum over a of starts[a] * alive[a + t], for every t."""
    size = 2 * len(alive)
    spectrum = np.conj(np.fft.rfft(starts, size)) * np.fft.rfft(alive, size)
    return np.maximum(np.fft.irfft(spectrum, size)[: len(alive)], 0.0)


def _last_ends(
    running: np.ndarray, slots: float, replicas: int, group: float, alike: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return numbers of bins until the last row of a replica ends, the fraction of rows that would run
    longer, and how probable these numbers are, for each `_NUM_PARTS` of them together.

    They are the finer, the later they are, as the slowest of the replicas counts. If many rows end in one
    bin, such as at the limit, the last of them is any.
    """
    later = np.append(np.geomspace(1.0, 0.002 / replicas, _NUM_ENDS), 0.0)  # Chances to end later.
    parts = (np.arange(_NUM_PARTS) + 0.5) / _NUM_PARTS
    middle = later[:-1, None] + np.diff(later)[:, None] * parts
    longer = _longer(np.log1p(-middle.ravel()) * group / slots, group, alike)
    ends = np.searchsorted(-np.minimum.accumulate(running), -longer * (1 + 1e-9))
    return ends, longer, -np.diff(later)


def _longer(log_chances: np.ndarray, group: float, alike: float) -> np.ndarray:
    """Return which fraction of rows runs longer than a time by which all rows of a group have ended with
    these chances.

    They have with the chance f if they are alike, and f ** group if not, where a row has with chance f.
    """
    least, most = log_chances / group, log_chances  # The logarithm of f, if none or all groups are alike.
    if 0 < alike < 1:
        low, high = np.minimum(least, most), np.maximum(least, most)
        for _ in range(60):
            middle = (low + high) / 2
            is_low = np.logaddexp(np.log(alike) + middle, np.log1p(-alike) + group * middle) < log_chances
            low, high = np.where(is_low, middle, low), np.where(is_low, high, middle)
        least = low
    return -np.expm1(most if alike == 1 else least)


def _full_deviation(rollout: Rollout, table: _Table, slots: float) -> float:
    """Return the standard deviation between replicas of the steps in which all slots are full."""
    waiting = rollout.num_rows - slots
    if waiting <= 0 or table.deviation == 0.0:
        return 0.0
    if rollout.shared:
        # All find the queue empty at the same time, but each has begun a group, whose last rows wait.
        per_row = (rollout.group + 1) / 12 * table.mean**2 + table.deviation**2 / 2
        return math.sqrt((rollout.group - 1) * per_row) / slots
    bins = waiting / slots * table.mean / table.bin_tokens
    last = len(table.starts) - 1
    variance = np.interp(bins, np.arange(last + 1), table.starts_variance)
    if bins > last:
        variance *= bins / last
    alike_rows = 1 + rollout.alike * (min(float(rollout.group), slots) - 1)
    return math.sqrt(float(variance) * alike_rows / slots) * table.mean
