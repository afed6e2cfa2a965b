"""Generation: one result whatever the slots, the memory and the chunks; log-probs as of a forward pass."""

import pytest
import torch

from realhf.calls import LogProbs
from realhf.graph import FunctionCall
from tests.gpu.models import OUTPUTS, engine_of, generate, tokens, write_model

pytestmark = pytest.mark.gpu
NAMES = ("qwen2", "gemma-2", "qwen3-moe", "deepseek-v3")
LENGTHS, GROUP, NUM_NEW = (3, 70, 1, 130, 17), 3, 40
FEW_TOKENS = 600
"""In the cache, where memory is tight."""


def _tight(engine):
    """Settings with fewer slots than samples, memory for few rows, and prompts in chunks."""
    memory = {"kv_cache_gib": FEW_TOKENS * engine.model.cache_token_bytes / 2**30}
    return [{"max_rows": 3}, memory, {"prefill_tokens": 50}, memory | {"max_rows": 5, "prefill_tokens": 33}]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    base = tmp_path_factory.mktemp("models")
    more = {"eos_token_id": 5, "max_position_embeddings": 256}
    return lambda name: base / name if (base / name).exists() else write_model(base / name, name, **more)


def _prompts():
    """Each GROUP times: their samples share blocks."""
    return [prompt for prompt in tokens(sum(LENGTHS)).split(LENGTHS) for _ in range(GROUP)]


def _sequences(made):
    return [row.tolist() for row in made["sequence_ids"].split()]


def _same_share(made, others):
    """Of the sequences."""
    pairs = list(zip(_sequences(made), _sequences(others), strict=True))
    return sum(a == b for a, b in pairs) / len(pairs)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_the_cpu(directories, device, name):
    """However few slots there are, and however little memory."""
    on_cpu = engine_of(directories(name), device=torch.device("cpu"), dtype="float32")
    engine = engine_of(directories(name), device=device, dtype="float32")
    sampling = {"temperature": 0.0, "max_new_tokens": NUM_NEW}
    wanted = _sequences(generate(on_cpu, _prompts(), **sampling))
    assert _sequences(generate(engine, _prompts(), **sampling)) == wanted
    for settings in _tight(engine):
        assert _sequences(generate(engine, _prompts(), settings=settings, **sampling)) == wanted, settings


@pytest.mark.parametrize("name", NAMES)
def test_sampled_tokens_are_those_of_the_cpu(directories, device, name, record_property):
    """Log-probs, too; and those of a forward pass. (Where two tokens are next to each other in the CDF, the
    last bit decides: it may happen once in a thousand samples.)"""
    on_cpu = engine_of(directories(name), device=torch.device("cpu"), dtype="float32")
    engine = engine_of(directories(name), device=device, dtype="float32")
    for sampling in ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}):
        made, wanted = (
            generate(x, _prompts(), max_new_tokens=NUM_NEW, **sampling) for x in (engine, on_cpu))
        assert _same_share(made, wanted) >= 0.9
        again = _forward(engine, made, temperature=sampling["temperature"])
        record_property("log-probs apart", float((again - made["gen_logprobs"].values).abs().max()))
        torch.testing.assert_close(again, made["gen_logprobs"].values.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_log_probs_are_those_of_a_forward_pass(directories, device, name, record_property):
    engine = engine_of(directories(name), device=device, dtype="bfloat16")
    for settings in ({}, _tight(engine)[-1]):
        made = generate(engine, _prompts(), settings=settings, max_new_tokens=NUM_NEW)
        mask = made["response_mask"].values != 0
        apart = (_forward(engine, made) - made["gen_logprobs"].values).abs()[mask]
        record_property("log-probs apart, mean", float(apart.mean()))
        record_property("log-probs apart, at most", float(apart.max()))
        assert apart.mean() < 0.05


def _forward(engine, made, *, temperature=1.0):
    work = LogProbs(temperature=temperature)
    call = FunctionCall("ref_forward", "forward", OUTPUTS[:2], ("logprobs",), role="ref", work=work)
    return engine.forward(call, made, micro_batch_tokens=600)["logprobs"].values
