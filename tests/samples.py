"""Parts of large tables: `make test` runs the cases that are drawn here, `make test-all` every case,
`make test-tenth` a tenth of the others."""

import random
from collections.abc import Collection, Iterable, Sequence
from itertools import product
from typing import Any

import pytest


def marked(cases: Iterable[Any], *, quick: Collection[int]) -> list[Any]:
    """Return the cases as parameters. Those whose indices are not in `quick` are slow."""
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=() if i in quick else pytest.mark.slow) for i, row in enumerate(rows)]


def drawn(cases: Iterable[Any], count: int, *, seed: int = 0) -> list[Any]:
    """Return the cases as parameters. All but `count` of them, drawn with the seed, are slow."""
    cases = list(cases)
    return marked(cases, quick=random.Random(seed).sample(range(len(cases)), count))


def pairs(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """Return all pairs as parameters. Few of them are not slow, in which every value of both occurs."""
    rows: Sequence[Any] = list(first)
    columns: Sequence[Any] = list(second)
    quick = {i % len(rows) * len(columns) + i % len(columns) for i in range(max(len(rows), len(columns)))}
    return marked(product(rows, columns), quick=quick)
