"""The programs in benchmarks/: each can be imported as its commands and other programs import it."""

import importlib
import os
import subprocess

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


@pytest.mark.parametrize("ends", [True, False])
def test_a_half_converted_model_is_not_kept(tmp_path, ends):
    """`make openvino-bench-setup` that was interrupted converts the model again."""
    environment = tmp_path / ".venv-openvino-bench"
    program = environment / "bin" / "optimum-cli"
    program.parent.mkdir(parents=True)
    result = "true" if ends else "false"
    program.write_text(f"#!/bin/sh\nfor last; do :; done\nmkdir $last && echo half > $last/a && {result}\n")
    program.chmod(0o755)
    requirements = tmp_path / "benchmarks" / "requirements-openvino.txt"
    requirements.parent.mkdir()
    requirements.touch()
    (environment / ".installed").touch()
    make = ["make", "-C", tmp_path, "-f", REPO / "Makefile", "runs/real_model/openvino"]
    lacking = subprocess.run(make, capture_output=True, text=True)
    assert lacking.returncode != 0 and "`python examples/real_model.py` makes it" in lacking.stdout
    (tmp_path / "runs" / "real_model" / "model").mkdir(parents=True)
    codes = [subprocess.run(make, capture_output=True).returncode for _ in range(2)]
    assert codes == ([0, 0] if ends else [2, 2])
    assert (tmp_path / "runs" / "real_model" / "openvino").exists() == ends
