"""Generation by the paged path, one step ahead, against the path of a CPU: the same tokens."""

import pytest
import torch

from tests.inference.paged import PagedReference, engine_of, write_family
from tests.inference.test_generate import _generate, long_prompts

FAMILIES = [
    "llama-3.1", "qwen2-window", "mistral", "gemma-2", "gpt2", "phi-3", "llama-dynamic", "mixtral",
    "qwen3-moe", "deepseek-v3",
]  # fmt: skip
NEW = 40


def _tight(engine):
    """Return settings with few slots, memory for few rows, and prompts in chunks."""
    gib = 7 * 64 * engine.model.cache_token_bytes / 2**30
    return [{"max_rows": 5, "prefill_tokens": 30}, {"kv_cache_gib": gib}]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_those_of_the_cpu(name, tmp_path):
    write_family(name, tmp_path)
    on_cpu = engine_of(tmp_path)
    engine = engine_of(tmp_path, paged=PagedReference())
    for options in ({}, *_tight(engine)):
        options = {"seed": 3, "max_new_tokens": NEW, **options}
        expected, whole = _generate(on_cpu, long_prompts(), **options)
        assert len({len(response) for response in expected}) > 1
        made, again = _generate(engine, long_prompts(), **options)
        assert made == expected, options
        logprobs = again["gen_logprobs"].values, whole["gen_logprobs"].values
        torch.testing.assert_close(*logprobs, rtol=1e-9, atol=1e-9)
        assert torch.equal(again["finished"], whole["finished"])
