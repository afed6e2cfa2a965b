"""Fixtures for all tests, and the number of threads with which they compute."""

import fcntl
import gc
import os
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.pool import Pool

# Before torch is imported. Tensors of tests are tiny: a second thread costs more than it brings, and on a
# busy machine, where threads wait for each other in a loop, up to twenty times more.
os.environ["OMP_NUM_THREADS"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="I/N", help="run part I (from 0) of N of the tests")
    parser.addoption("--minutes", type=float, help="skip the tests that have not begun by then")


_BEGIN = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    minutes = item.config.getoption("--minutes")
    if minutes is not None and time.monotonic() - _BEGIN > 60 * minutes:
        pytest.skip(f"the {minutes:g} minutes are over")


@pytest.hookimpl(trylast=True)  # After the slow tests have been left out.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep those of --part. Put files with few tests first, which take long: then pytest's own workers, which
    take whole files in this order, end at about the same time."""
    if (part := config.getoption("--part")) is not None:
        index, count = map(int, part.split("/"))
        parts: dict[bool, list[pytest.Item]] = {False: [], True: []}
        for item in items:
            name = item.nodeid.replace(str(config.rootpath), "")  # The same in every clone.
            if name.startswith("tests/test_docs.py::test_commands_work"):  # They build on each other.
                name = name.partition("[")[0]
            parts[zlib.crc32(name.encode()) % count == index].append(item)
        config.hook.pytest_deselected(items=parts[False])
        items[:] = parts[True]
    num_tests = Counter(item.path for item in items)
    items.sort(key=lambda item: num_tests[item.path])


class _Scheduler(LoadFileScheduling):
    """Gives pytest's workers a file each; those of Megatron, which takes long to import, all to one."""

    def _split_scope(self, nodeid: str) -> str:
        return "megatron" if nodeid.startswith("tests/megatron/") else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Scheduler:
    return _Scheduler(config, log)


def pytest_collection_finish() -> None:
    """Keep collections of garbage short: they need not look at what is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four gloo worker processes; `pool.run(fn, *args)` calls the module-level `fn(world, *args)` on each."""
    workers = Pool()
    yield workers
    workers.stop()


@pytest.fixture(scope="session")
def grpo_run(tmp_path_factory) -> tuple[Path, Path, Path]:
    """A finished GRPO run of two processes: experiment file, plan file, run directory. It is made once,
    whatever the number of pytest's own workers is; they have a parent directory in common."""
    from tests.cli_tools import make_grpo_run  # Here, as it imports torch.

    base = tmp_path_factory.getbasetemp()
    directory = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "grpo"
    directory.mkdir(exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "run/summary.json").exists():
            make_grpo_run(directory)
    return directory / "tiny_experiment.py", directory / "plan.yaml", directory / "run"
