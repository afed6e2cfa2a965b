"""Tiny models for the tests of realhf.nn: grouped-query attention and sizes that nothing divides evenly."""

from typing import Any

import torch

from realhf.dist.group import World
from realhf.dist.parallel import ParallelGroups
from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.nn.transformer import Transformer
from realhf.param_spec import model_spec

SEQ_LENS = [5, 1, 9, 9, 3]


def hf_config(architecture: str = "Qwen2ForCausalLM", *, tied: bool = False) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": architecture.split("For")[0].lower(),
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 45,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
        "use_sliding_window": False,
        "num_labels": 1,
        "pad_token_id": 0,
    }


def build(
    hf: dict[str, Any],
    *,
    world: World | None = None,
    layout: str = "d1@0",
    head: str | None = None,
    **options: Any,
) -> Transformer:
    """This rank's shard, randomly initialised."""
    world = world or World()
    spec = model_spec(ModelConfig.from_hf(hf, head=head))
    options = {"dtype": torch.float64, **options}
    model = Transformer(spec, ParallelGroups.create(world, Layout.parse(layout)), **options)
    model.init_random(seed=3)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(67, (sum(SEQ_LENS),), generator=torch.Generator().manual_seed(1))
