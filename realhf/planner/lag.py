"""Lagged steps beside synchronous ones: which are faster on a cluster."""

from typing import Any, NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from realhf.planner.search.tree_search import SearchResult
from realhf.user_input.units import format_seconds

_SAME = 1e-3  # Relative difference below which two steps count as equally fast.


class LagComparison(NamedTuple):
    """The best plans that were found for one experiment with its lag and without any."""

    max_lag: int
    num_rounds: int
    lagged: SearchResult
    synchronous: SearchResult

    @property
    def faster(self) -> str:
        """Which step is shorter: `lagged`, `synchronous` or `neither`."""
        lagged = self.lagged.step_seconds
        synchronous = self.synchronous.step_seconds
        if abs(lagged - synchronous) <= _SAME * max(lagged, synchronous):
            return "neither"
        return "lagged" if lagged < synchronous else "synchronous"

    @property
    def sentence(self) -> str:
        """Return which step is faster on this cluster, and by how much."""
        with_lag = f"{format_seconds(self.lagged.step_seconds)} per step with max_lag {self.max_lag}"
        without = f"{format_seconds(self.synchronous.step_seconds)} without"
        if self.faster == "neither":
            return f"the lag makes steps neither faster nor slower on this cluster: {with_lag}, {without}"
        times = self.synchronous.step_seconds / self.lagged.step_seconds
        times = max(times, 1 / times)
        return f"{self.faster} steps are {times:.2f} x as fast on this cluster: {with_lag}, {without}"

    def document(self) -> dict[str, Any]:
        """Return what `realhf plan --json` adds for an experiment with lag."""
        return {
            "lag": self.max_lag,
            "rounds": self.num_rounds,
            "lagged_seconds": self.lagged.step_seconds,
            "synchronous_seconds": self.synchronous.step_seconds,
            "synchronous_lower_bound_seconds": self.synchronous.lower_bound_seconds,
            "faster": self.faster}

    def render(self) -> Group:
        """Return a table of both and the sentence, for people."""
        table = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("steps", "lag", "rounds", "seconds", "lower bound"):
            table.add_column(title, justify="left" if title == "steps" else "right")
        rows = (
            ("synchronous", 0, 1, self.synchronous), ("lagged", self.max_lag, self.num_rounds, self.lagged))
        for name, lag, rounds, result in rows:
            seconds = (result.step_seconds, result.lower_bound_seconds)
            table.add_row(name, str(lag), str(rounds), *(f"{value:.3g}" for value in seconds))
        return Group(table, Text(self.sentence))
