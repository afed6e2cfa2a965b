"""Fixtures for all tests, and the number of threads with which they compute."""

import os
from collections.abc import Iterator

import pytest

from tests.pool import Pool

# Before torch is imported. Tensors of tests are tiny: a second thread costs more than it brings, and on a
# busy machine, where threads wait for each other in a loop, up to twenty times more.
os.environ["OMP_NUM_THREADS"] = "1"


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo worker processes; `pool.run(fn, *args)` calls the module-level `fn(world, *args)` on each."""
    workers = Pool()
    yield workers
    workers.stop()
