"""Throughput of many plans at once: seconds per step in the steady state, which are called the period.

Ranks run their calls in one order, step after step without a barrier. A call starts when its ranks are free
and its inputs and weights have arrived. Such a system is linear in the max-plus algebra: its period is the
largest mean weight of a cycle of constraints, that is weight over the number of steps that the cycle spans
(Baccelli et al. 1992).

Shapes: K plans, N calls in the order in which ranks run them. A constraint `wait[i, j, k]` says that in plan
k call i starts at least that many seconds after call j starts; -inf means no constraint. Plans are the last
axis, so that operations on all of them read contiguous memory.
"""

from dataclasses import dataclass

import numpy as np

from realhf.cluster import Cluster

NEVER = -np.inf


@dataclass(frozen=True)
class Dependencies:
    """The outputs and weights that calls wait for.

    `data[i, j]` are the seconds from the end of call j until its outputs reach call i of the same step, -inf
    where i reads nothing of j; `late_data` is the same for outputs that call i reads in the next step.
    `weights` lists (i, j, lag): call i uses the weights that call j trains, in the same step (lag 0) or in
    the one before (lag 1). Copies of one trainer are next to each other, in the order in which they are made.
    `receiving[i]` are the seconds in which the ranks of call i exchange its inputs before it starts.

    With `in_place`, the weights of the step before replace those with which other calls may still run. So
    they move only when the calls before call j that share ranks with call i have ended, and call j waits
    until they have moved. Without it, calls wait for each other's outputs anyway.
    """

    data: np.ndarray
    late_data: np.ndarray
    weights: tuple[tuple[int, int, int], ...]
    receiving: np.ndarray
    busy_shares: tuple[float, float] = (0.0, 0.0)
    """The shares of a reallocation's seconds in which a rank that only sends, or one that receives, computes
    nothing."""
    in_place: bool = False

    @property
    def copies(self) -> dict[int, list[int]]:
        """Return trainer -> the numbers of the `weights` that it trains, in the order of their copies."""
        copies: dict[int, list[int]] = {}
        for number, (_, trainer, _) in enumerate(self.weights):
            copies.setdefault(trainer, []).append(number)
        return copies

    def durations(self, moving: np.ndarray) -> np.ndarray:
        """Return how long each reallocation takes by itself, as copies of one trainer are made in turn."""
        durations = np.zeros_like(moving)
        for numbers in self.copies.values():
            arrived = np.maximum.accumulate(moving[:, numbers], axis=1)
            durations[:, numbers] = np.diff(arrived, axis=1, prepend=0.0)
        return durations

    def busy(self, moving: np.ndarray, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the seconds that reallocations take from ranks between two calls that share them.

        Calls run on ranks from `first` to `stop` (K, N). In the result (K, N, N), call i comes after call j.
        A rank that only sends does so directly after the trainer; one that receives does so before the user.
        """
        sending, receiving = (share * self.durations(moving) for share in self.busy_shares)
        busy = np.zeros((*first.shape, first.shape[1]))
        for number, (user, _, _) in enumerate(self.weights):
            busy[:, user] += receiving[:, number, None]
        for j, numbers in self.copies.items():
            users = [self.weights[number][0] for number in numbers]
            low = np.maximum(first, first[:, j, None])
            high = np.minimum(stop, stop[:, j, None])
            most = np.zeros(low.shape)
            # A rank that sends most is the first shared one, or the one where some target stops.
            for rank in (low, *(np.broadcast_to(stop[:, user, None], low.shape) for user in users)):
                sent = np.zeros(low.shape)
                for number, user in zip(numbers, users, strict=True):
                    outside = (rank < first[:, user, None]) | (rank >= stop[:, user, None])
                    sent += np.where(outside, sending[:, number, None], 0.0)
                most = np.maximum(most, np.where((low <= rank) & (rank < high), sent, 0.0))
            busy[:, :, j] += most
        return busy


def periods(
    needs: Dependencies, seconds: np.ndarray, shares: np.ndarray,
    *, moving: np.ndarray | None = None, busy: np.ndarray | None = None, exact: bool = True,
) -> np.ndarray:
    """Return the periods of K plans, shape (K,).

    `seconds` (K, N) are those of calls, `shares` (K, N, N) tells whether two calls have a device in common,
    and `moving` (K, number of `needs.weights`) are the seconds from the end of training until weights have
    arrived; `busy` is that of `Dependencies.busy`. Without `exact` the result is a lower bound from cycles of
    at most two steps.
    """
    step = _one_step(*_waits(needs, seconds, shares, moving, busy))
    diagonal = np.arange(len(needs.data))
    there_and_back = (step + step.transpose(1, 0, 2)).max(axis=(0, 1)) / 2
    best = np.maximum(step[diagonal, diagonal].max(axis=0), there_and_back)
    power = step
    for length in range(2, len(needs.data) + 1 if exact else 0):
        power = _product(power, step)
        best = np.maximum(best, power[diagonal, diagonal].max(axis=0) / length)
    return np.maximum(best, 0.0)


def one_step_periods(needs: Dependencies, seconds: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Return lower bounds of the periods, from cycles of one step without reallocations."""
    same, before = _waits(needs, seconds, shares, None, None)
    bounds: np.ndarray = (_closure(same) + before.transpose(1, 0, 2)).max(axis=(0, 1), initial=0.0)
    return bounds


def step_periods(
    cluster: Cluster, needs: Dependencies, seconds: np.ndarray, first: np.ndarray, stop: np.ndarray,
    *, moving: np.ndarray | None = None, exact: bool = True,
) -> np.ndarray:
    """Return the periods of plans whose calls run on ranks from `first` to `stop`, shape (K, N) each.

    Reallocations take time from ranks (`Dependencies.busy`), and devices may share cores.
    """
    busy = None if moving is None else needs.busy(moving, first, stop)
    period = periods(needs, seconds, have_common_ranks(first, stop), moving=moving, busy=busy, exact=exact)
    return np.maximum(period, shared_core_seconds(cluster, seconds, first, stop))


def have_common_ranks(first: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Return whether two calls have a device in common, for each plan; shape (K, N, N)."""
    return (first[:, :, None] < stop[:, None, :]) & (first[:, None, :] < stop[:, :, None])


def shared_core_seconds(
    cluster: Cluster, seconds: np.ndarray, first: np.ndarray, stop: np.ndarray
) -> np.ndarray:
    """Return the seconds for which the cores of the busiest host work in each plan, shape (K,).

    They are 0 unless devices share cores. `seconds`, `first` and `stop` (K, N) are those of calls, and of the
    ranks on which they run. A call on fewer ranks than cores leaves the others to calls on other ranks. Ranks
    below 0, which are not decided, count on a lone host.
    """
    busiest = np.zeros(len(seconds))
    for ranks, kind in cluster.ranks_by_kind:
        for begin in ranks[:: cluster.devices_per_host] if kind.cores_per_host is not None else ():
            on_host = stop - first
            if cluster.num_hosts > 1:
                end = begin + cluster.devices_per_host
                on_host = np.clip(np.minimum(stop, end) - np.maximum(first, begin), 0, None)
            shares = np.minimum(1.0, on_host / kind.cores_per_host)
            busiest = np.maximum(busiest, (seconds * shares).sum(axis=1))
    return busiest


def first_starts(
    needs: Dependencies, seconds: np.ndarray, shares: np.ndarray, moving: np.ndarray, busy: np.ndarray,
    *, num_steps: int,
) -> np.ndarray:
    """Return when each call starts in the first `num_steps` steps of one plan, shape (num_steps, N)."""
    same, before = _waits(needs, seconds[None], shares[None], moving[None], busy[None])
    step = _one_step(same, before)[..., 0]
    closure = _closure(same)[..., 0]
    starts = [np.maximum(closure.max(axis=1), 0.0)]
    for _ in range(num_steps - 1):
        starts.append((step + starts[-1]).max(axis=1))
    return np.array(starts)


def delays(
    needs: Dependencies, shares: np.ndarray, moving: np.ndarray, busy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds from the end of call j until call i of the same step can start, and until call i of
    the next step can, in one plan; shape (N, N) each."""
    same, before = _waits(needs, np.zeros((1, len(shares))), shares[None], moving[None], busy[None])
    return same[..., 0], before[..., 0]


def _waits(
    needs: Dependencies, seconds: np.ndarray, shares: np.ndarray, moving: np.ndarray | None,
    busy: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the constraints between calls of one step, and those from the step before, (N, N, K) each."""
    num = len(needs.data)
    call_seconds = np.ascontiguousarray(seconds.T)  # (N, K)
    same, before = (np.full((num, num, len(seconds)), NEVER) for _ in range(2))
    shared = np.ascontiguousarray(shares.transpose(1, 2, 0))
    for i in range(num):
        for j in range(num):
            matrix = same if j < i else before
            released = call_seconds[j] + needs.receiving[i]
            occupied = released if busy is None else released + busy[:, i, j]
            matrix[i, j] = np.where(shared[i, j], occupied, NEVER)
            if np.isfinite(needs.data[i, j]):
                np.maximum(same[i, j], released + needs.data[i, j], out=same[i, j])
            if np.isfinite(needs.late_data[i, j]):
                np.maximum(before[i, j], released + needs.late_data[i, j], out=before[i, j])
    for number, (i, j, lag) in enumerate(needs.weights):
        seconds_moving = 0.0 if moving is None else moving[:, number]
        matrix = before if lag else same
        np.maximum(matrix[i, j], call_seconds[j] + seconds_moving, out=matrix[i, j])
        if lag and needs.in_place:
            np.maximum(before[j, j], call_seconds[j] + seconds_moving, out=before[j, j])
            for other in range(j):
                wait = np.where(shared[i, other], call_seconds[other] + seconds_moving, NEVER)
                np.maximum(before[i, other], wait, out=before[i, other])
                np.maximum(before[j, other], wait, out=before[j, other])
    return same, before


def _closure(same: np.ndarray) -> np.ndarray:
    """Return the longest waits along chains inside a step; calls wait only for earlier ones."""
    closure = np.full_like(same, NEVER)
    for i in range(len(same)):
        closure[i, i] = 0.0
        for j in range(i):
            np.maximum(closure[i], same[i, j] + closure[j], out=closure[i])
    return closure


def _one_step(same: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the longest wait, along all chains, between each call of a step and each of the step before."""
    return _product(_closure(same), before)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return max-plus matrix products."""
    out = a[:, 0, None] + b[None, 0]
    for k in range(1, a.shape[1]):
        np.maximum(out, a[:, k, None] + b[None, k], out=out)
    return out
