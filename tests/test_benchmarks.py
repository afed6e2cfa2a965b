"""The programs in benchmarks/: each can be imported as its commands and other programs import it."""

import importlib
import os

import pytest

from tests.cli_tools import REPO

MODULES = sorted(
    ".".join(path.relative_to(REPO).with_suffix("").parts) for path in (REPO / "benchmarks").rglob("*.py"))


def test_there_is_a_module_for_each_of_the_named_programs():
    assert {f"benchmarks.{name}" for name in ("gpu_check", "planner", "real_model")} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_every_benchmark_can_be_imported(module, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # Some set the number of threads.
    says = importlib.import_module(module).__doc__
    assert says and says.strip(), "a program says what it measures"
