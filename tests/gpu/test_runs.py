"""Whole runs of one process: GRPO with a reference, an evaluation and an export, twice the same."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import transformers

from tests.cli_tools import read_jsonl, untimed, write_experiment
from tests.gpu.models import REPO, process_environment, tokens

pytestmark = pytest.mark.gpu
_WITHOUT_TYRO = """
import sys
from unittest.mock import MagicMock
sys.modules["tyro"] = MagicMock()  # Without overrides nobody uses it.
from realhf.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
DTYPE = """
roles = {name: replace(role, dtype="DTYPE") for name, role in experiment.roles().items()}
experiment = replace(experiment, **roles)
"""


def _run(experiment, out, device, *, launcher=()):
    """A run on the device."""
    start = ["-m", "realhf"] if find_spec("tyro") else ["-c", _WITHOUT_TYRO]
    command = [sys.executable, *launcher, *start, "run", str(experiment), "--out", str(out)]
    done = subprocess.run(
        command, env=process_environment(device), cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return untimed(out / "metrics.jsonl")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_grpo_twice_with_one_seed(tmp_path, process_device, dtype, record_property):
    """The option `deterministic` makes all bits the same."""
    experiment = write_experiment(
        tmp_path, steps=3, body=DTYPE.replace("DTYPE", dtype), deterministic=True, work_stealing=False,
        kv_cache_gib=0.1)
    first, again = (_run(experiment, tmp_path / name, process_device) for name in ("first", "again"))
    evals = [read_jsonl(tmp_path / name / "eval.jsonl") for name in ("first", "again")]
    assert len(first) >= 3 and first == again and evals[0] == evals[1]
    record_property("largest difference of log-probs", max(step.get("mismatch/max", 0.0) for step in first))


def test_the_exported_model_is_one_of_transformers(tmp_path, process_device):
    experiment = write_experiment(tmp_path, steps=1, body=DTYPE.replace("DTYPE", "float32"))
    _run(experiment, tmp_path / "run", process_device)
    (directory,) = (tmp_path / "run" / "hf").iterdir()
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert model(tokens(5)[None] % model.config.vocab_size).logits.isfinite().all()
