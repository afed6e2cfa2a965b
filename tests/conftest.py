"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo worker processes; `pool.run(fn, *args)` calls the module-level `fn(world, *args)` on each."""
    workers = Pool()
    yield workers
    workers.stop()
