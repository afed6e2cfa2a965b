"""Lower bounds of a step from calls that must run between two others.

If some calls read what call a makes, and call b reads what they make, they all run between the end of a and
the start of b. All devices together need their device seconds for that, so b starts at least these over the
number of devices after a has ended. If the next a waits for b, as generation waits for new weights, then the
step takes at least as long as a, these calls and b.
"""

from collections.abc import Iterator
from typing import NamedTuple

import networkx as nx
import numpy as np

from realhf.planner.cost.throughput import Dependencies
from realhf.planner.search.call_group import CallGroup


class CallsBetween(NamedTuple):
    """The positions of the call before, of the calls inside, and of the call after."""

    before: int
    inside: tuple[int, ...]
    after: int


def find_calls_between(needs: Dependencies) -> list[CallsBetween]:
    """Return all pairs of calls of a step that have two calls or more between them."""
    num_calls = len(needs.data)
    same_step = nx.DiGraph()
    same_step.add_nodes_from(range(num_calls))
    same_step.add_edges_from((j, i) for i, j in np.argwhere(np.isfinite(needs.data)).tolist())
    same_step.add_edges_from((j, i) for i, j, lag in needs.weights if lag == 0)
    return [between for between in _all_calls_between(needs, same_step) if len(between.inside) > 1]


def _all_calls_between(needs: Dependencies, same_step: nx.DiGraph) -> Iterator[CallsBetween]:
    next_step = {(i, j) for i, j, lag in needs.weights if lag == 1}
    next_step |= {(i, j) for i, j in np.argwhere(np.isfinite(needs.late_data)).tolist()}
    for before, after in sorted(next_step):
        inside = nx.descendants(same_step, before) & nx.ancestors(same_step, after)
        yield CallsBetween(before, tuple(sorted(inside)), after)


def tables_between(
    all_between: list[CallsBetween], groups: list[CallGroup], num_devices: int
) -> list[np.ndarray]:
    """Return for each group the seconds that each choice adds to each CallsBetween, (choices, rows)."""
    tables = []
    for group in groups:
        width = (group.stop - group.first) / num_devices
        values = np.zeros((len(group.candidates), len(all_between)))
        for column, between in zip(values.T, all_between, strict=True):
            for seconds, call in zip(group.seconds.T, group.calls, strict=True):
                at_ends = call in (between.before, between.after)
                column += seconds * (width * (call in between.inside) + at_ends)
        by_mesh = [values[on_mesh].min(axis=0) for on_mesh in group.by_mesh]
        tables.append(np.concatenate([values, by_mesh, values.min(axis=0, keepdims=True)]))
    return tables


def seconds_between(
    all_between: list[CallsBetween], seconds: np.ndarray, first: np.ndarray, stop: np.ndarray,
    num_devices: int,
) -> np.ndarray:  # fmt: skip
    """Return a lower bound of the step of each plan, (K,), from the seconds and ranks of calls, (K, N)."""
    work = seconds * (stop - first) / num_devices
    ends = [seconds[:, [between.before, between.after]].sum(axis=1) for between in all_between]
    inside = [work[:, between.inside].sum(axis=1) for between in all_between]
    return np.max([a + b for a, b in zip(ends, inside, strict=True)], axis=0, initial=0.0)
