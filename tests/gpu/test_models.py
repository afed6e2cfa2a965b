"""Families against transformers on the same device: logits, gradients and greedy generation."""

import pytest
import torch

from tests.families import MOE_CASES
from tests.gpu.models import (
    FAMILIES,
    LENGTHS,
    engine_of,
    generate,
    gradient_pairs,
    our_pass,
    their_pass,
    theirs,
    tokens,
    write_model,
)
from tests.reallocators import in_int8

pytestmark = pytest.mark.gpu
NUM_PROMPTS, PROMPT_LENGTH, NUM_NEW = 4, 8, 48
WORSE, WORSE_WITH_EXPERTS = 1.5, 3.0
"""Our error in bfloat16 to that of transformers, at most. Routers choose other experts by chance."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    return lambda name: base / name if (base / name).exists() else write_model(base / name, name)


@pytest.mark.parametrize("name", FAMILIES)
def test_float32_is_that_of_transformers(directories, tmp_path, device, real_device, name, record_property):
    directory = directories(name)
    ours = our_pass(directory, device=device, dtype="float32")
    reference = their_pass(directory, tmp_path, device=real_device, dtype="float32")
    largest = float(reference.logits.abs().max())
    record_property("logits apart, relative", float((ours.logits - reference.logits).abs().max()) / largest)
    torch.testing.assert_close(ours.logits, reference.logits, rtol=0, atol=5e-5 * largest)
    for key, (mine, other, largest) in gradient_pairs(directory, ours, reference).items():
        torch.testing.assert_close(mine, other, rtol=0, atol=3e-4 * float(largest), msg=key)


@pytest.mark.parametrize("name", FAMILIES)
def test_bfloat16_is_as_near_to_float32(directories, tmp_path, device, real_device, name, record_property):
    """As near as transformers' own."""
    directory = directories(name)
    ours = our_pass(directory, device=device, dtype="bfloat16")
    reference, other = (
        their_pass(directory, tmp_path / dtype, device=real_device, dtype=dtype)
        for dtype in ("float32", "bfloat16"))
    logits = [_apart(x.logits, reference.logits) for x in (ours, other)]
    exact = gradient_pairs(directory, ours, reference)
    rounded = gradient_pairs(directory, ours, other)
    wanted = torch.cat([part.flatten() for _, part, _ in exact.values()])
    gradients = [
        _apart(torch.cat([x.flatten() for x in found]), wanted)
        for found in ([mine for mine, *_ in exact.values()], [part for _, part, _ in rounded.values()])]
    worse = WORSE_WITH_EXPERTS if name in MOE_CASES else WORSE
    for what, (mine, others) in (("logits", logits), ("gradients", gradients)):
        record_property(f"{what}: our error", mine)
        record_property(f"{what}: theirs", others)
        assert mine <= worse * others + 1e-3, f"{what}: {mine:.4f}, of transformers {others:.4f}"


def _apart(x, wanted):
    return float((x.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_generation_is_that_of_transformers(directories, device, real_device, name):
    directory = directories(name)
    prompts = tokens(NUM_PROMPTS * PROMPT_LENGTH).view(NUM_PROMPTS, PROMPT_LENGTH)
    ids = prompts.to(real_device)
    reference = theirs(directory, device=real_device, dtype="float32").generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW)
    engine = engine_of(directory, device=device, dtype="float32")
    made = generate(engine, list(prompts), temperature=0.0, max_new_tokens=NUM_NEW)
    assert [row.tolist() for row in made["sequence_ids"].split()] == reference.tolist()


def test_head_dims_that_are_no_multiple_of_8(tmp_path, device, real_device):
    """In bfloat16 the kernels of packed sequences take no others."""
    directory = write_model(tmp_path / "model", "llama", head_dim=6)
    ours = our_pass(directory, device=device, dtype="bfloat16")
    reference = their_pass(directory, tmp_path / "gradients", device=real_device, dtype="float32")
    assert _apart(ours.logits, reference.logits) < 0.05


@pytest.mark.parametrize("name", ["qwen2", "gemma-2"])
def test_a_head_in_float32_is_that_of_float32_operands(directories, device, name):
    model = engine_of(directories(name), device=device, dtype="bfloat16", float32_head=True).model
    with torch.no_grad():
        hidden = model(tokens(sum(LENGTHS)).to(device), LENGTHS)
        found = model.logits(hidden)
        product = hidden.float() @ model.head.weight_VH.float().T
        wanted = model.head.to_logits(product, temperature=1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", ["qwen2", "gpt2", "qwen3-moe", "deepseek-v3"])
def test_weights_in_int8(directories, device, name, record_property):
    """In bfloat16, few tokens by the kernel and many with converted weights, against float32."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        engine = in_int8(engine_of(directories(name), device=device, dtype=dtype))
        with torch.no_grad():
            for copies in (1, 3):
                ids = tokens(sum(LENGTHS)).repeat(copies).to(device)
                found[dtype, copies] = engine.model.logits(engine.model(ids, LENGTHS * copies)).cpu()
    for copies in (1, 3):
        apart = _apart(found["bfloat16", copies], found["float32", copies])
        record_property(f"logits of {copies * sum(LENGTHS)} tokens apart", apart)
        assert apart < (0.2 if name in MOE_CASES else 0.05)  # Routers choose other experts by chance.
    made = generate(engine, list(tokens(32).view(4, 8)), max_new_tokens=NUM_NEW)
    assert torch.isfinite(made["gen_logprobs"].values).all()
