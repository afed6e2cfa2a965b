"""Tiny models for the tests of realhf.nn: grouped-query attention and sizes that nothing divides evenly."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from realhf.distributed.world import ParallelGroups, World
from realhf.engine.pipeline import forward_passes
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import Region, model_spec, region_slices
from realhf.nn.attention import token_range
from realhf.nn.transformer import Transformer

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
    """Return this rank's shard of a model, randomly initialised."""
    world = world or World()
    spec = model_spec(ModelConfig.from_hf(hf, head=head))
    options = {"dtype": torch.float64, **options}
    model = Transformer(spec, ParallelGroups.create(world, Layout.parse(layout)), **options)
    model.init_random(seed=3)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(67, (sum(SEQ_LENS),), generator=torch.Generator().manual_seed(1))


Logits = tuple[tuple[int, int], tuple[int, int], torch.Tensor]
"""Token range [first, stop), vocabulary range [first, stop), values."""
Step = tuple[Logits | None, list[tuple[str, Region, torch.Tensor]]]
"""The result of a rank: logits, on the last stage, and (name, region, gradient) of every parameter."""


def step(model: Transformer, *, recompute: bool = False) -> Step:
    """Run all tokens forward and backward through the stages, with a random weighting of logits as loss.

    The gradients are those of the adapters, if there are any, else of the model. They are summed over cp, as
    the optimizer does it.
    """
    trained = model if model.adapters is None else model.adapters
    trained.enable_grad()
    groups, ids, found = model.groups, tokens(), list[Logits]()
    rows, columns = token_range(len(ids), groups.cp), model.vocab_range
    shape = (rows[1] - rows[0], model.config.hidden_size)
    outputs: dict[int, torch.Tensor] = {}
    for i, hidden in forward_passes(groups, outputs, hidden_shapes=[shape], dtype=model.flat.dtype):
        outputs[i] = model(ids if hidden is None else hidden, SEQ_LENS, recompute=recompute)
        if groups.is_last_stage:
            logits = model.logits(outputs[i])
            found.append((rows, columns, logits.detach()))
            weights = torch.randn(
                len(ids), 67, dtype=logits.dtype, generator=torch.Generator().manual_seed(2))
            outputs[i] = (logits * weights[slice(*rows), slice(*columns)]).sum()
    trained.finish_grads()
    assert trained.grad_buffer is not None
    groups.cp.all_reduce(trained.grad_buffer)
    grads = trained.grad_shards()
    return (found or [None])[0], [(name, region, grads[name]) for name, region in trained.regions.items()]


def compare(results: Sequence[Step], alone: Step) -> tuple[list[str], set[int]]:
    """Return what differs from one process ("logits" or parameters), and which tokens have logits."""
    assert alone[0] is not None
    expected, whole = alone[0][2], {name: grad for name, _, grad in alone[1]}
    others, seen = [], set[int]()
    for logits, pieces in results:
        if logits is not None:
            rows, columns, values = logits
            theirs = expected[slice(*rows), slice(*columns)]
            others += [] if torch.allclose(values, theirs, rtol=1e-10, atol=1e-10) else ["logits"]
            seen |= set(range(*rows))
        for name, region, grad in pieces:
            theirs = whole[name][region_slices(region)]
            others += [] if torch.allclose(grad, theirs, rtol=1e-9, atol=1e-9) else [name]
    return others, seen


def backward_of_both(
    model: Transformer, reference: Callable[..., Any], ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of our and of transformers' model, after a backward pass through both."""
    logits = model.logits(model(ids, SEQ_LENS))
    expected = torch.cat([reference(part[None]).logits[0] for part in ids.split(SEQ_LENS)])
    weights = torch.randn(logits.shape, dtype=logits.dtype)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    return logits.detach(), expected.detach()
