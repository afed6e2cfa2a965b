"""The megatron engine on one device beside our own: losses and gradient norms of some optimizer steps.

    python -m tests.gpu.test_megatron DEVICE    # prints the steps of both engines as JSON
"""

import json
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.gpu.models import REPO, process_environment, write_model
from tests.gpu.test_training import OPTIMIZER, train

pytestmark = pytest.mark.gpu
NAMES = ("qwen2", "qwen3-moe")
DTYPES = ("float32", "bfloat16")
KEYS = ("loss", "grad_norm")


def test_steps_are_those_of_our_engine(process_device, record_property):
    """In a process of its own, as Megatron-Core needs replacements of CUDA functions on a CPU."""
    if find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu.test_megatron", str(process_device)], cwd=REPO,
        env=process_environment(process_device) | {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, capture_output=True,
        text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {f"{name} {dtype}" for name in NAMES for dtype in DTYPES}
    for what, (ours, theirs) in found.items():
        for key in KEYS:
            apart = max(abs(b / a - 1) for a, b in zip(ours[key], theirs[key], strict=True))
            record_property(f"{what}: {key} apart, relative", apart)
            rounds = 0.0 if what.endswith("float32") else 0.02 if key == "loss" else 0.2
            assert apart < 1e-3 + rounds, (what, key, ours[key], theirs[key])


def _steps(kind, directory, device, dtype):
    engine = kind(
        model_spec(ModelConfig.load(str(directory))), Layout.parse("d1@0"), World(device=device), dtype=dtype,
        optimizer=OPTIMIZER)
    engine.load(directory, seed=0)
    metrics = train(engine, router_losses=False)  # Those of Megatron-Core are not ours.
    return {key: values.tolist() for key, values in metrics.items() if key in KEYS}


def main(device: torch.device) -> None:
    if device.type == "cpu":
        import_module("tests.megatron.shim")
    engines = NativeEngine, import_module("realhf.engine.megatron.engine").MegatronEngine
    found = {}
    with TemporaryDirectory() as base:
        for name in NAMES:
            directory = write_model(Path(base) / name, name)
            for dtype in DTYPES:
                found[f"{name} {dtype}"] = [_steps(kind, directory, device, dtype) for kind in engines]
    print(json.dumps(found))


if __name__ == "__main__":
    main(torch.device(sys.argv[1]))
