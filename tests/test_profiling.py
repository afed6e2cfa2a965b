"""What is measured of a model: a few of its blocks, for every kind of model, and rows that decode."""

import pytest

from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from realhf.profiling.decoding import Rows, prompts
from realhf.profiling.models import Model
from tests.nn.tiny import build, hf_config
from tests.test_shipped_models import NUM_PARAMS


@pytest.mark.parametrize("name", NUM_PARAMS)
def test_blocks_to_measure(name):
    config = ModelConfig.load(name)
    few = Model(config, "bfloat16", ()).with_blocks(2, "score")
    params = {p.part for p in model_spec(few).params if p.layer == 1}
    assert params == {p.part for p in model_spec(config).params if p.layer == config.num_layers - 1}
    assert few.num_layers == 2 and few.head == "score" and few.eos_token_ids == ()
    assert few.window(1) == config.window(1)


def test_rows_have_prompts_of_their_own():
    for rows, length, vocab_size in ((512, 5, 16), (3, 64, 64), (9, 16, 7)):
        batch = prompts(rows, length, vocab_size=vocab_size)
        ids = [prompt.tolist() for prompt in batch["prompt_ids"].split()]
        assert len(ids) == rows and {len(prompt) for prompt in ids} == {length}
        assert all(one != other for one, other in zip(ids, ids[1:], strict=False))


@pytest.mark.parametrize(("num_prompts", "own_blocks", "shared_blocks"), [(6, 12, 0), (2, 6, 2), (1, 6, 1)])
def test_rows_attend_to_blocks_of_their_own_but_where_they_share_a_prompt(
    num_prompts, own_blocks, shared_blocks
):
    """The prompt is of 130 tokens: 128 and 16 in two blocks of 128; or 64 and 64, which count as one, and
    what is not shared."""
    model = build(hf_config() | {"max_position_embeddings": 256})
    rows = Rows(model, 6, prompt_tokens=130, num_prompts=num_prompts)
    own, *shared = rows.segment.decoding.sets
    assert rows.segment.decoding.positions_B.tolist() == [130] * 6
    assert own.rows_PS.shape == (own_blocks, 1) and sorted(own.rows_PS.unique().tolist()) == list(range(6))
    assert [s.rows_PS.shape for s in shared] == [(shared_blocks, 6 // num_prompts)] * (shared_blocks > 0)
    before = [layer.clone() for layer in rows._cache.layers]
    rows.decode(steps=1)
    changed = (rows._cache.layers[0] != before[0]).any(-1).any(-1).any(0)
    assert changed.sum() == 6, "every row writes one token, to a block of its own"
    rows.reading()()
    assert (rows._cache.layers[0] != before[0]).any(-1).any(-1).any(0).sum() == 6 + num_prompts * 130
