"""What is measured of a model: a few of its blocks, for every kind of model."""

import pytest

from realhf.model_config import ModelConfig
from realhf.param_spec import model_spec
from realhf.profiling.models import Model
from tests.test_shipped_models import NUM_PARAMS


@pytest.mark.parametrize("name", NUM_PARAMS)
def test_blocks_to_measure(name):
    config = ModelConfig.load(name)
    few = Model(config, "bfloat16", ()).with_blocks(2, "score")
    params = {p.part for p in model_spec(few).params if p.layer == 1}
    assert params == {p.part for p in model_spec(config).params if p.layer == config.num_layers - 1}
    assert few.num_layers == 2 and few.head == "score" and few.eos_token_ids == ()
    assert few.window(1) == config.window(1)
