"""Hops: the steps from rank to rank by which elements reach their receivers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ONE = 1 << 22
"""Length of a whole bundle, or of a whole slice, in the units in which hops start and stop."""


class Hop(NamedTuple):
    """Part [start, stop) of a bundle, in units of 1 / ONE, that rank `source` sends to rank `target`.

    `depth` is the number of hops that must come first: 0 if a holder sends. The source has the part once all
    hops of lesser depth have arrived.
    """

    bundle: int  # Its index in the schedule.
    source: int
    target: int
    start: int
    stop: int
    depth: int


@dataclass(frozen=True, eq=False)
class Hops:
    """A table of hops: one array for each field of Hop, with one entry per hop."""

    bundle: np.ndarray
    source: np.ndarray
    target: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    depth: np.ndarray

    @classmethod
    def of(cls, hops: Sequence[Hop] = ()) -> "Hops":
        """Return these hops as a table."""
        return cls(*np.array(hops, dtype=np.int64).reshape(-1, len(Hop._fields)).T.copy())

    @classmethod
    def concat(cls, tables: "Sequence[Hops]") -> "Hops":
        """Return one table of the hops of all tables, in order."""
        if not tables:
            return cls.of()
        return cls(*map(np.concatenate, zip(*(table._columns for table in tables), strict=True)))

    @property
    def _columns(self) -> list[np.ndarray]:
        return [getattr(self, name) for name in Hop._fields]

    def __len__(self) -> int:
        return len(self.bundle)

    def __iter__(self) -> Iterator[Hop]:
        return map(Hop._make, zip(*(column.tolist() for column in self._columns), strict=True))

    def select(self, chosen: np.ndarray) -> "Hops":
        """Return the hops with these indices, or those where a mask is True."""
        return Hops(*(column[chosen] for column in self._columns))

    @property
    def fraction(self) -> np.ndarray:
        """Part of its bundle that each hop carries, from 0 to 1."""
        return (self.stop - self.start) / ONE
