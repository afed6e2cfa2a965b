"""The demo with a megatron actor and our generator."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def warm_model(directory: Path, *, steps: int) -> Path:
    """Train the demo's model on the careless teacher's answers; return its directory."""
    command = (sys.executable, "-m", "realhf", "run", EXAMPLES / "sft.py", "--out", "sft", "--nproc", "1")
    subprocess.run([*command, "--steps", str(steps)], cwd=directory, check=True)
    return directory / json.loads((directory / "sft/summary.json").read_text())["hf_dir"]


@pytest.mark.slow
def test_demo_reaches_its_score(megatron, tmp_path):
    """The native actor reaches 0.992 in the table of docs/algorithms.md, from 0.344."""
    model = warm_model(tmp_path, steps=700)
    job = (EXAMPLES / "grpo.py", tmp_path, str(model), "megatron", 80)
    summary = megatron("demo", *job, num_ranks=4, timeout=1800)[0]
    assert summary["eval_first"] < 0.5
    assert summary["eval_last"] > 0.95
