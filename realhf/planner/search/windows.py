"""Lower bounds of a step from calls that must run between two others.

If some calls read what call a makes, and call b reads what they make, they all run between the end of a and
the start of b. All devices together need their device seconds for that, so b starts at least these over the
number of devices after a has ended. If the next a waits for b, as generation waits for new weights, then the
step takes at least as long as a, this window and b.
"""

from collections.abc import Iterator
from typing import NamedTuple

import networkx as nx
import numpy as np

from realhf.planner.cost.throughput import Dependencies
from realhf.planner.search.call_group import CallGroup


class Window(NamedTuple):
    """The positions of the call before, of the calls inside, and of the call after."""

    before: int
    inside: tuple[int, ...]
    after: int


def find_windows(needs: Dependencies) -> list[Window]:
    """Return the windows of a step with two calls or more inside."""
    num_calls = len(needs.data)
    same_step = nx.DiGraph()
    same_step.add_nodes_from(range(num_calls))
    same_step.add_edges_from((j, i) for i, j in np.argwhere(np.isfinite(needs.data)).tolist())
    same_step.add_edges_from((j, i) for i, j, lag in needs.weights if lag == 0)
    return [window for window in _windows(needs, same_step) if len(window.inside) > 1]


def _windows(needs: Dependencies, same_step: nx.DiGraph) -> Iterator[Window]:
    next_step = {(i, j) for i, j, lag in needs.weights if lag == 1}
    next_step |= {(i, j) for i, j in np.argwhere(np.isfinite(needs.late_data)).tolist()}
    for before, after in sorted(next_step):
        inside = nx.descendants(same_step, before) & nx.ancestors(same_step, after)
        yield Window(before, tuple(sorted(inside)), after)


def window_tables(windows: list[Window], groups: list[CallGroup], num_devices: int) -> list[np.ndarray]:
    """Return for each group the seconds that each of its choices adds to each window, (choices, windows)."""
    tables = []
    for group in groups:
        width = (group.stop - group.first) / num_devices
        values = np.zeros((len(group.candidates), len(windows)))
        for column, window in zip(values.T, windows, strict=True):
            for seconds, call in zip(group.seconds.T, group.calls, strict=True):
                at_ends = call in (window.before, window.after)
                column += seconds * (width * (call in window.inside) + at_ends)
        by_mesh = [values[on_mesh].min(axis=0) for on_mesh in group.by_mesh]
        tables.append(np.concatenate([values, by_mesh, values.min(axis=0, keepdims=True)]))
    return tables


def window_seconds(
    windows: list[Window], seconds: np.ndarray, first: np.ndarray, stop: np.ndarray, num_devices: int
) -> np.ndarray:
    """Return a lower bound of the step of each plan, (K,), from the seconds and ranks of calls, (K, N)."""
    work = seconds * (stop - first) / num_devices
    ends = [seconds[:, [window.before, window.after]].sum(axis=1) for window in windows]
    inside = [work[:, window.inside].sum(axis=1) for window in windows]
    return np.max([a + b for a, b in zip(ends, inside, strict=True)], axis=0, initial=0.0)
