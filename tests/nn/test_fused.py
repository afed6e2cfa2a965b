"""The kernels of element-wise chains and of sampling: by Triton's interpreter against torch's operations,
compiled for a GPU that is not here; and how many kernels a decoding step launches."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from realhf.attention.choose import refuses_chains
from realhf.attention.triton_paged import TritonAttention
from realhf.calls import SamplingConfig
from realhf.distributed.group import Group
from realhf.distributed.world import World
from realhf.inference.forward_batch import PagedBackends
from realhf.inference.kv_cache import RowPages
from realhf.inference.page_pool import PagePool
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.planner.efficiencies import OUR_CUDA
from tests.families import CASES, MOE_CASES
from tests.gpu.host_traffic import RECORDER, host_traffic
from tests.gpu.models import engine_of, generate, our_pass, tokens, write_model
from tests.gpu.pretended import COLLECTIVES, DeviceWorld, pretended_device
from tests.nn import chains
from tests.samples import marked

ROOT = Path(__file__).parents[2]
PAGE = 64


def _run(module, *arguments, **environment):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("dtype, most", marked([("float32", 1e-6), ("float16", 2e-3)], quick=[0]))
def test_interpreted_kernels_compute_the_chains(dtype, most):
    found = _run("tests.nn.interpreted_chains", dtype, TRITON_INTERPRET="1")
    assert set(found) == set(chains.BY_TORCH)
    assert {name: error for name, error in found.items() if error > most} == {}


@pytest.mark.parametrize("dtype, size, rows", marked(
    [("float32", 1100, 7), ("bfloat16", 4097, 16), ("float32", 67, 12)], quick=[2]))
def test_interpreted_kernels_draw_the_same_tokens(dtype, size, rows):
    found = _run("tests.inference.interpreted_sampling", dtype, size, rows, TRITON_INTERPRET="1")
    assert len(found) == 12
    for settings, softcap, other_tokens, apart in found:
        assert other_tokens == [] and apart < 2e-6, (settings, softcap)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", marked(sorted({**CASES, **MOE_CASES}), quick=[4, 10]))
def test_fused_layers_of_all_families_compute_the_same(tmp_path, name, dtype):
    """Logits, gradients and tokens on the pretended device are those of the CPU, which test_families.py
    compares with transformers."""
    directory = write_model(tmp_path / "model", name)
    passes = []
    rows = []
    with pretended_device() as device:
        for where in (device, torch.device("cpu")):
            passes.append(our_pass(directory, device=where, dtype=dtype))
            prompts = list(tokens(4 * 8).split(8))
            made = generate(engine_of(directory, device=where, dtype=dtype), prompts, max_new_tokens=16)
            rows.append([row.tolist() for row in made["sequence_ids"].to(torch.device("cpu")).split()])
    ours, wanted = passes
    assert rows[0] == rows[1]
    most = 5e-5 if dtype == "float32" else 1e-12
    assert (ours.logits - wanted.logits).abs().max() <= most * wanted.logits.abs().max()
    assert ours.gradients.keys() == wanted.gradients.keys()
    for key, gradient in ours.gradients.items():
        largest = wanted.gradients[key].abs().max()
        assert (gradient - wanted.gradients[key]).abs().max() <= most * largest + 1e-12, key


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_all_kernels_compile_for_an_h100(dtype, tmp_path):
    found = _run("tests.nn.compiled_kernels", dtype, TRITON_CACHE_DIR=str(tmp_path))
    assert {"add_norm", "rotate_and_store", "gated", "part_sums", "draw", "thresholds"} <= set(found)
    for kernel in found.values():
        assert kernel["shared"] <= 227 << 10


def test_where_no_kernel_computes_chains():
    assert "CPU" in refuses_chains(torch.device("cpu"), torch.float32)
    assert "float32" in refuses_chains(torch.device("cuda", 0), torch.float64)


def _launches(directory, *, world=None, layout="d1@0", lora=None, **sampling):
    """Return the launches of a decoding pass that samples."""
    with pretended_device() as device, torch.inference_mode():
        world = World(device=device) if world is None else DeviceWorld(world)
        model = engine_of(
            directory, device=device, dtype="bfloat16", lora=lora, world=world, layout=layout).model
        backends = PagedBackends(model, TritonAttention())
        pool = PagePool(model, backends=backends, record=lambda compute: compute)
        pool.lease(4, page_size=PAGE)
        row = torch.arange(3)
        pages = RowPages(row + 70, row * PAGE + PAGE, torch.full((3,), 71).int(), torch.zeros(3, 8).int())
        pages = RowPages(*(x.to(device) for x in pages))
        row = row.to(device)
        uniform = torch.full((3,), 0.5, dtype=torch.float64).to(device)
        for _ in range(2):  # Some constants are made in the first pass.
            with host_traffic() as traffic:
                pool.graphs(row, pages, uniform_B=uniform, sampling=SamplingConfig(**sampling))
        assert not traffic.waits and not traffic.transfers
    return traffic.launches


def _per_layer(tmp_path, name, **settings):
    """Return the launches of a layer, and those of the rest of the pass."""
    few, many = (
        _launches(
            write_model(tmp_path / str(n), name, num_hidden_layers=n, **CHANGES.get(name, {})), **settings)
        for n in (3, 5))
    per_layer = (many - few) // 2
    return per_layer, few - 3 * per_layer


CHANGES = {
    "deepseek-v3": {"n_routed_experts": 8, "first_k_dense_replace": 0},
    "qwen2-moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}}
"""Groups of experts have a power of two in real models, too, grouped products take rows of 16 bytes, and all
layers are alike here."""


# Embedding, positions, lengths, angles, the last sum with its norm; the copies of the inputs.
AROUND = 5 + 6
LAUNCHES = [
    # Family, settings: launches of head and sampling.
    ("llama", {}, 3), ("qwen2", {}, 3), ("qwen3", {}, 3), ("gemma-2", {}, 3), ("gpt2", {}, 3),
    ("qwen2", {"top_p": 0.9, "top_k": 20}, 4), ("qwen2", {"temperature": 0.0}, 3),
    ("qwen2", {"lora": LoraConfig(rank=2, target_modules=("o_proj",))}, 3),
    ("olmo-2", {}, 3), ("mixtral", {}, 3), ("qwen3-moe", {}, 3), ("qwen2-moe", {}, 3), ("deepseek-v3", {}, 3),
]


def _planned(directory, **ranks):
    """Return the launches of a layer that the planner prices."""
    config = ModelConfig.load(str(directory))
    return OUR_CUDA.of_decode_block(config, has_experts=config.moe is not None, **ranks)


@pytest.mark.parametrize("name, settings, sampling", marked(LAUNCHES, quick=[1, 5, 8, 9, 12]))
def test_launches_of_a_decoding_step(tmp_path, name, settings, sampling):
    """Those of a layer are the planner's, and one more for each product of an adapter."""
    found = _per_layer(tmp_path, name, **settings)
    per_layer = _planned(tmp_path / "3") + 2 * ("lora" in settings)
    # Gemma scales its embedding; GPT-2 adds one of positions, and computes no angles.
    assert found == (per_layer, AROUND + sampling + (name in ("gemma-2", "gpt2")))


def test_the_page_has_the_launches():
    page = (ROOT / "docs" / "gpu.md").read_text()
    path = OUR_CUDA
    experts = path.decode_kernels + path.decode_expert_kernels
    latent = experts + path.shared_kernels + path.latent_kernels
    for sentence in (
        f"layer launches {path.decode_kernels} kernels:", f"each with a copy: {path.decode_kernels + 4}.",
        f"A layer of experts launches {experts} kernels", f"DeepSeek-V3 launches {latent}:",
    ):
        assert sentence in page


def _of_rank(world, directories, layout):
    """Count a collective as one launch, as it is over NCCL."""
    collectives = {name: RECORDER.kernel(getattr(Group, name)) for name in COLLECTIVES}
    with patch.multiple(Group, **collectives):
        few, many = (_launches(directory, world=world, layout=layout) for directory in directories)
    return (many - few) // 2


@pytest.mark.slow
@pytest.mark.parametrize("name, layout, ranks", [
    ("qwen2", "t2@0-1", {"tp": 2}), ("mixtral", "t2@0-1", {"tp": 2}), ("mixtral", "e2@0-1", {"ep": 2})])
def test_launches_on_two_ranks(pool, tmp_path, name, layout, ranks):
    """Each layer adds its outputs up over tp ranks twice; over ep ranks it gathers its rows and scatters the
    sums. The planner prices these collectives by themselves."""
    directories = [write_model(tmp_path / str(n), name, num_hidden_layers=n) for n in (3, 5)]
    most = _planned(directories[0], **ranks) + 2
    assert pool.run(_of_rank, directories, layout, num_ranks=2)[:2] == [most, most]
