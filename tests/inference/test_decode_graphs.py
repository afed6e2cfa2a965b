"""Recorded decoding, replayed on a CPU as CUDA graphs are: the same kernels on the same memory, no others."""

import pytest
import torch

from realhf.kv_blocks import padded_size
from tests.inference.paged import PagedReference, engine_of, recorded, write_family
from tests.inference.test_generate import _generate, long_prompts


@pytest.mark.parametrize("name", ["llama-3.1", "qwen2-window", "gemma-2", "gpt2"])
def test_replayed_steps_give_the_same_tokens_and_logprobs(name, tmp_path):
    """Passes that one call has recorded are replayed in the next."""
    write_family(name, tmp_path)
    engine = engine_of(tmp_path, paged=PagedReference())
    tapes = recorded(engine, PagedReference())
    for options in ({}, {"max_rows": 5, "prefill_tokens": 30}, {}):
        options = {"seed": 3, "max_new_tokens": 40, **options}
        num_replays = sum(tape.num_replays for tape in tapes)
        expected, whole = _generate(engine_of(tmp_path), long_prompts(), **options)
        made, again = _generate(engine, long_prompts(), **options)
        assert made == expected and {len(response) for response in expected} > {40}
        logprobs = again["gen_logprobs"].values, whole["gen_logprobs"].values
        torch.testing.assert_close(*logprobs, rtol=1e-9, atol=1e-9)
        assert sum(tape.num_replays for tape in tapes) > num_replays + 30
        unrecorded = _generate(engine, long_prompts(), cuda_graphs=False, **options)
        assert unrecorded[0] == expected
    assert len(tapes) <= 5  # Of 16, 8, 4, 2 and 1 rows, however many calls there are.


def test_lengths_that_decide_on_angles_are_not_recorded(tmp_path):
    for name in ("phi-3", "llama-dynamic"):
        write_family(name, tmp_path / name)
        engine = engine_of(tmp_path / name, paged=PagedReference())
        tapes = recorded(engine, PagedReference())
        _generate(engine, long_prompts()[-1:], seed=3)
        assert not tapes and not engine.model.recordable


def test_sizes_recur():
    sizes = [padded_size(count) for count in range(1, 1025)]
    assert all(count <= size for count, size in enumerate(sizes, start=1))
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, *range(32, 257, 32), *range(320, 1025, 64)]
