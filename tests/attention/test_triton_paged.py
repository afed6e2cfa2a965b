"""The Triton kernel by its interpreter against the reference. No GPU has compiled it here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
CASES = [("float32", 24, 1e-5, 2e-5), ("float16", 6, 4e-3, 1e-4)]
"""Dtype, number of cases, and the largest differences of outputs and of log-sum-exps.

The interpreter of Triton 3.9 takes bfloat16 numbers for integers in products.
"""


@pytest.mark.parametrize("name, num_cases, of_output, of_lse", CASES)
def test_the_interpreted_kernel_is_the_reference(name, num_cases, of_output, of_lse):
    command = [sys.executable, "-m", "tests.attention.interpreted", name, str(num_cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == num_cases
    assert {i: pair for i, pair in enumerate(found) if not (pair[0] <= of_output and pair[1] <= of_lse)} == {}
