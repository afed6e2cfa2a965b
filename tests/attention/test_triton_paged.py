"""The Triton kernel: by its interpreter against the reference, and compiled for GPUs that are not here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.samples import marked

pytest.importorskip("triton")
ROOT = Path(__file__).parents[2]
CASES = [("float32", 4, 1e-5, 2e-5), ("float32", 24, 1e-5, 2e-5), ("float16", 6, 4e-3, 1e-4)]
"""Dtype, number of cases, and the largest differences of outputs and of log-sum-exps.

The interpreter of Triton 3.9 takes bfloat16 numbers for integers in products.
"""


@pytest.mark.parametrize("name, num_cases, of_output, of_lse", marked(CASES, quick=[0]))
def test_the_interpreted_kernel_is_the_reference(name, num_cases, of_output, of_lse):
    command = [sys.executable, "-m", "tests.attention.interpreted", name, str(num_cases)]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == num_cases
    assert {i: pair for i, pair in enumerate(found) if not (pair[0] <= of_output and pair[1] <= of_lse)} == {}


SHAPES = [
    # Dtype, compute capability, bytes of shared memory; dims of keys and values, heads of a group, queries,
    # softcap.
    ("bfloat16", 80, 163 << 10, 576, 512, 16, 1, False),  # Latent attention: values in keys.
    ("bfloat16", 90, 227 << 10, 128, 128, 4, 512, False),
    ("bfloat16", 89, 99 << 10, 256, 256, 2, 512, True),
    ("float32", 90, 227 << 10, 576, 512, 16, 1, False),
    ("float32", 90, 227 << 10, 128, 128, 4, 512, False),
]
MOST_SECONDS = 8.0  # CPU seconds; at most 3.4 here. With twice as many keys in a tile it is far more.


@pytest.mark.slow
@pytest.mark.parametrize("dtype, capability, shared, dim, value_dim, group, max_q, softcap", SHAPES)
def test_the_kernel_compiles_for_gpus(
    dtype, capability, shared, dim, value_dim, group, max_q, softcap, tmp_path, monkeypatch
):
    """Triton's own ptxas needs no GPU. The kernel's tiles must fit into the shared memory, and it must be
    compiled soon, as each of its variants is at the start of a run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-m", "tests.attention.compiled", dtype]
    command += [str(x) for x in (capability, dim, value_dim, group, max_q, int(softcap))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0 < found["shared"] <= shared
    assert found["seconds"] < MOST_SECONDS
