"""The demo on one device: a tiny model learns from a careless teacher, and by GRPO to carry."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.gpu.models import REPO, process_environment

pytestmark = pytest.mark.gpu


def _run(name, directory, device, **options):
    """Run an example in a directory; return the run's summary."""
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    out = directory / name
    command = (
        sys.executable, "-m", "realhf", "run", REPO / f"examples/{name}.py", "--nproc", "1", "--out", out)
    done = subprocess.run(
        [*command, *words], env=process_environment(device), cwd=directory, capture_output=True, text=True,
        timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((out / "summary.json").read_text())


def test_demo(tmp_path, process_device, record_property):
    """On a CPU the same program takes a few steps."""
    if find_spec("tyro") is None:
        pytest.skip("tyro is not installed, which reads the settings of examples")
    is_whole = process_device.type == "cuda"
    warm = _run("sft", tmp_path, process_device, steps=700 if is_whole else 20)
    settings = {"actor.model": tmp_path / warm["hf_dir"], "steps": 80 if is_whole else 2}
    done = _run("grpo", tmp_path, process_device, **settings)
    for name in ("steps", "seconds", "eval_first", "eval_last"):
        record_property(name, done[name])
    assert done["steps"] == settings["steps"]
    if is_whole:  # From 0.344 to 0.992 on a CPU (docs/algorithms.md).
        assert done["eval_first"] < 0.5 and done["eval_last"] > 0.95
