"""A model whose attention no kernel of the device computes is refused when it is built."""

import pytest

from realhf.errors import UserError
from tests.gpu.models import engine_of, write_model
from tests.gpu.pretended import pretended_device


def test_a_model_that_no_kernel_can_compute_is_refused_when_it_is_built(tmp_path):
    directory = write_model(tmp_path / "model", "qwen3", head_dim=264)
    with pretended_device() as device:
        engine_of(directory, device=device, dtype="float32")
        with pytest.raises(UserError, match="^cuda:0: attention in bfloat16 with heads of 264 dims: no inst"):
            engine_of(directory, device=device, dtype="bfloat16")
