"""Weights in int8: logits and log-probs against transformers with the formula's weights, and the products."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from realhf.nn.linear import Int8Weight
from tests.families import CASES, MOE_CASES
from tests.gpu.models import LENGTHS, engine_of, generate, tokens, write_model
from tests.reallocators import in_int8

CPU = torch.device("cpu")
QUICK = ("qwen2", "gpt2", "phi-4", "mixtral", "deepseek-v3")
ROOT = Path(__file__).parents[2]
_FULL = re.compile(r"norm|kv_b_proj|mlp\.gate\.|gate\.weight$|shared_expert_gate|router")


def by_formula(directory: Path, target: Path, *, transposed: bool) -> Path:
    """Write a checkpoint whose linear layers of blocks have the values of int8."""
    weights = load_file(directory / "model.safetensors")
    for name, value in weights.items():
        in_block = re.search(r"(layers|\.h)\.\d+\.", name)
        if in_block and value.dim() == 2 and not _FULL.search(name):
            rows = (value.T if transposed else value).double()
            scale = rows.abs().amax(1, keepdim=True) / 127
            rows = (rows / scale).round() * scale
            weights[name] = (rows.T if transposed else rows).contiguous()
    target.mkdir()
    config = json.loads((directory / "config.json").read_text()) | {"dtype": "float64"}
    (target / "config.json").write_text(json.dumps(config))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in {**CASES, **MOE_CASES}
    if name not in ("llama-dynamic", "phi-3")])  # Their rotations depend on what has passed before.
def test_logits_are_those_of_transformers_with_the_formulas_weights(tmp_path, name):
    directory = write_model(tmp_path / "model", name)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        by_formula(directory, tmp_path / "int8", transposed=name.startswith("gpt2")), dtype=torch.float64,
        attn_implementation="eager", experts_implementation="eager").eval()
    engine = in_int8(engine_of(directory, device=CPU, dtype="float64"))
    ids = tokens(sum(LENGTHS))
    with torch.no_grad():
        expected = torch.cat([reference(part[None]).logits[0] for part in ids.split(LENGTHS)])
        logits = engine.model.logits(engine.model(ids, list(LENGTHS)))
        full = engine_of(directory, device=CPU, dtype="float64").model
        apart = (full.logits(full(ids, list(LENGTHS))) - expected).abs().max()
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=2e-5)
    assert apart > 1e-3


def test_generation_logs_the_log_probs_of_the_weights_with_which_it_samples(tmp_path):
    directory = write_model(tmp_path / "model", "qwen2")
    engine = in_int8(engine_of(directory, device=CPU, dtype="float32"))
    prompts = list(tokens(24).split(8))
    drawn = generate(engine, prompts, max_new_tokens=12, temperature=1.0)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        by_formula(directory, tmp_path / "int8", transposed=False), dtype=torch.float64).eval()
    columns = (drawn[key].split() for key in ("sequence_ids", "response_mask", "gen_logprobs"))
    for ids, mask, logprobs in zip(*columns, strict=True):
        with torch.no_grad():
            expected = reference(ids[None]).logits[0, :-1].log_softmax(-1)
        drawn_T = mask[1:].bool()
        expected = expected.gather(1, ids[1:, None])[:, 0][drawn_T]
        torch.testing.assert_close(logprobs[1:][drawn_T].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 16, 17, 70])
@pytest.mark.parametrize("num_inputs", [48, 50])
def test_products_are_those_of_the_dequantised_weight(dtype, num_rows, num_inputs):
    generator = torch.Generator().manual_seed(num_rows)
    values = torch.randint(-127, 128, (37, num_inputs), generator=generator, dtype=torch.int8)
    weight = Int8Weight(values, requires_grad=False)
    weight.scale_O = torch.rand(37, generator=generator).to(dtype) / 100
    x = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    expected = x.double() @ weight.data.double().T * weight.scale_O.double()
    bound = {torch.bfloat16: 1e-2, torch.float16: 5e-3}.get(dtype, 1e-5)
    for outputs in (slice(None), slice(5, 21)):
        found = weight.product(x, outputs).double()
        torch.testing.assert_close(found, expected[:, outputs], rtol=bound, atol=bound)


def test_large_inputs_stay_in_the_range_of_float16():
    weight = Int8Weight(torch.full((16, 64), 127, dtype=torch.int8), requires_grad=False)
    weight.scale_O = torch.full((16,), 1e-3, dtype=torch.float16)
    found = weight.product(torch.full((2, 64), 100.0, dtype=torch.float16)).float()
    torch.testing.assert_close(found, torch.full((2, 16), 64 * 100 * 0.127), rtol=2e-3, atol=0)


@pytest.mark.parametrize("how", ["interpreted", "compiled"])
def test_the_kernel_of_a_gpu(how):
    """By Triton's interpreter against the formula, and compiled for a GPU that is not here."""
    pytest.importorskip("triton")
    environment = {"TRITON_INTERPRET": "1"} if how == "interpreted" else {}
    done = subprocess.run(
        [sys.executable, "-m", "tests.nn.int8_kernels", how], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    if how == "interpreted":
        assert len(found) == 5 and max(found.values()) < 1e-6
    else:
        assert found["shared"] < 227 << 10
