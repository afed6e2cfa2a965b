"""Worker processes in which Megatron-Core runs: a pool of their own, because the shim patches torch."""

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest

from tests.pool import PRELOAD, ForkServer, Pool


def _call(world: Any, name: str, args: tuple[Any, ...]) -> Any:
    """Call a function of runs.py in a worker; that module imports the shim."""
    return getattr(import_module("tests.megatron.runs"), name)(world, *args)


@pytest.fixture(scope="session")
def megatron() -> Iterator[Callable[..., list[Any]]]:
    """Run `name(world, *args)` of runs.py on `num_ranks` ranks, and return the results by rank."""
    workers = Pool(ForkServer([*PRELOAD, "tests.megatron.runs"]))

    def run(name: str, *args: Any, num_ranks: int, timeout: float = 300) -> list[Any]:
        return workers.run(_call, name, args, num_ranks=num_ranks, timeout=timeout)

    yield run
    workers.stop()
