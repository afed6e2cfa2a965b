"""Whole runs of one process: GRPO with a reference, an evaluation and an export, twice the same."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import transformers

from tests.cli_tools import read_jsonl, untimed, write_experiment
from tests.gpu.models import tokens

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
_WITHOUT_TYRO = """
import sys
from unittest.mock import MagicMock
sys.modules["tyro"] = MagicMock()  # Without overrides nobody uses it.
from realhf.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
SAMPLED = ("reward/", "response_length/")
DTYPE = """
roles = {name: replace(role, dtype="DTYPE") for name, role in experiment.roles().items()}
experiment = replace(experiment, **roles)
"""


def _run(experiment, out, device, *, launcher=()):
    """A run on the device."""
    start = ["-m", "realhf"] if find_spec("tyro") else ["-c", _WITHOUT_TYRO]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if device.type == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, *launcher, *start, "run", str(experiment), "--out", str(out)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return untimed(out / "metrics.jsonl")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grpo_twice_with_one_seed(tmp_path, process_device, dtype, record_property):
    """All is the same in float32. In bfloat16 the attention kernels' backward pass on CUDA adds in any order:
    there the samples of the first step are."""
    experiment = write_experiment(tmp_path, steps=3, body=DTYPE.replace("DTYPE", dtype))
    first, again = (_run(experiment, tmp_path / name, process_device) for name in ("first", "again"))
    evals = [read_jsonl(tmp_path / name / "eval.jsonl") for name in ("first", "again")]
    same = first == again and evals[0] == evals[1]
    record_property("the same to the last bit", same)
    assert len(first) >= 3
    assert same or (dtype, process_device.type) == ("bfloat16", "cuda")
    steps = [next(step for step in run if "reward/mean" in step) for run in (first, again)]
    sampled = [{k: v for k, v in step.items() if k.startswith(SAMPLED)} for step in steps]
    assert sampled[0] == sampled[1]


def test_the_exported_model_is_one_of_transformers(tmp_path, process_device):
    experiment = write_experiment(tmp_path, steps=1, body=DTYPE.replace("DTYPE", "float32"))
    _run(experiment, tmp_path / "run", process_device)
    (directory,) = (tmp_path / "run" / "hf").iterdir()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert model(tokens(5)[None] % model.config.vocab_size).logits.isfinite().all()
