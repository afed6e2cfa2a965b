"""Recorded decoding, replayed on a CPU as CUDA graphs are: the same kernels on the same memory, no others."""

import pytest
import torch
import transformers

from realhf.dist.world import World
from realhf.engine.native import NativeEngine
from realhf.inference import cohort
from realhf.kv_blocks import padded_size
from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from tests.families import CASES, MOE_CASES
from tests.gpu.pretended import Tape
from tests.inference.test_generate import _generate, long_prompts


@pytest.fixture
def tapes(monkeypatch):
    """The tapes that have been recorded."""
    found = []

    def record(compute):
        found.append(Tape(compute))
        return found[-1]

    monkeypatch.setattr(cohort, "recorder", lambda device: record)
    return found


def _engine(name, directory):
    """Build an engine with a random model of this family, in float64."""
    hf = {**CASES, **MOE_CASES}[name].hf(eos_token_id=11, initializer_range=0.4)
    config = transformers.AutoConfig.for_model(**hf)
    config.architectures = [transformers.AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(directory)
    spec = model_spec(ModelConfig.load(str(directory)))
    engine = NativeEngine(spec, Layout.parse("d1@0"), World(), dtype="float64")
    engine.load(None, seed=0)
    return engine


@pytest.mark.parametrize("name", ["llama-3.1", "qwen2-window", "gemma-2", "gpt2"])
def test_replayed_steps_give_the_same_tokens_and_logprobs(name, tmp_path, tapes):
    engine = _engine(name, tmp_path)
    for options in ({}, {"max_rows": 5, "prefill_tokens": 30}):
        options = {"seed": 3, "max_new_tokens": 40, **options}
        expected, whole = _generate(engine, long_prompts(), cuda_graphs=False, **options)
        assert not tapes and {len(response) for response in expected} > {40}
        made, again = _generate(engine, long_prompts(), **options)
        assert made == expected
        logprobs = again["gen_logprobs"].values, whole["gen_logprobs"].values
        torch.testing.assert_close(*logprobs, rtol=1e-9, atol=1e-9)
        assert sum(tape.num_replays for tape in tapes) > 2 * len(tapes) > 0
        tapes.clear()


@pytest.mark.parametrize("name", ["phi-3", "llama-dynamic", "mixtral"])
def test_what_waits_for_the_host_is_not_recorded(name, tmp_path, tapes):
    engine = _engine(name, tmp_path)
    _generate(engine, long_prompts()[-1:], seed=3)
    assert not tapes and not engine.model.recordable


def test_sizes_recur():
    sizes = [padded_size(count) for count in range(1, 513)]
    assert all(count <= size <= max(count, 1.25 * count) for count, size in enumerate(sizes, start=1))
    assert sizes[:8] == list(range(1, 9)) and len(set(sizes)) <= 8 + 4 * 6
