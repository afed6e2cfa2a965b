"""FLOPs of a model's passes, against torch's counter on transformers' own models, and against counting."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from realhf.models.lora import LoraConfig, adapter_spec
from realhf.models.model_config import ModelConfig
from realhf.models.model_flops import ModelFlops
from realhf.models.param_spec import model_spec
from tests.families import CASES, MOE_CASES

LENGTHS = (5, 9, 16)
SPANS = [(0, n) for n in LENGTHS]
NAMES = ("llama-3.1", "qwen2", "gpt2", "gemma-3", "mixtral", "qwen2-moe", "deepseek-v3")


def theirs(
    name: str, *, head: str = "lm", lora: dict[str, Any] | None = None
) -> tuple[ModelConfig, int, int]:
    """Return a model's config, and what torch counts in the forward and backward passes of all sequences."""
    hf = AutoConfig.for_model(**{**CASES, **MOE_CASES}[name].hf(num_labels=1))
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    model: Any = auto.from_config(hf, attn_implementation="eager", experts_implementation="eager")
    config = ModelConfig.from_hf({**hf.to_dict(), "architectures": [type(model).__name__]})
    if lora is not None:
        import peft  # Here, as it takes seconds.

        model = peft.get_peft_model(model, peft.LoraConfig(**lora))
    totals = [0, 0]
    for n in LENGTHS:
        with FlopCounterMode(display=False) as forward:
            out = model(torch.arange(n)[None]).logits
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        totals = [totals[0] + _total(forward), totals[1] + _total(backward)]
    return config, totals[0], totals[1]


def _total(counter: FlopCounterMode) -> int:
    """Return the FLOPs that were counted, without the product of positions and frequencies."""
    counts = counter.get_flop_counts()
    rotary = [sum(ops.values()) for module, ops in counts.items() if module.endswith("rotary_emb")]
    return counter.get_total_flops() - sum(rotary)


def hidden_pairs(config: ModelConfig, flops: ModelFlops) -> int:
    """Return the FLOPs of one forward pass for pairs of tokens that do not see each other."""
    whole = sum(n * n for n in LENGTHS) * config.num_layers
    seen = flops.forward(SPANS, 0) - flops.forward([(0, 1)] * sum(LENGTHS), 0)  # Without the diagonals.
    seen += flops.attention * config.num_layers * sum(LENGTHS)
    return flops.attention * whole - seen


@pytest.mark.parametrize("name", NAMES)
def test_flops_are_those_that_torch_counts(name):
    """Torch also counts the scores of pairs that the mask hides, which is all that may differ."""
    config, forward, backward = theirs(name)
    flops = ModelFlops.of(model_spec(config))
    hidden = hidden_pairs(config, flops)
    ours = flops.forward(SPANS, sum(LENGTHS))
    assert ours + hidden == forward
    assert flops.train(SPANS, sum(LENGTHS)) - ours + 2 * hidden == backward
    assert 0 < hidden < 0.3 * forward


def test_flops_of_a_score_head():
    config, forward, _ = theirs("llama-3.1", head="score")
    flops = ModelFlops.of(model_spec(config))
    # (Transformers applies the head to every token.)
    assert flops.forward(SPANS, sum(LENGTHS)) + hidden_pairs(config, flops) == forward


def test_flops_of_adapters_are_those_that_torch_counts_with_peft():
    """In the backward pass frozen weights have no gradient, and the first layer's inputs need none."""
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    peft = {"r": 3, "target_modules": targets, "task_type": "CAUSAL_LM"}
    config, forward, backward = theirs("llama-3.1", lora=peft)
    lora = LoraConfig(rank=3)
    flops = ModelFlops.of(model_spec(config), lora)
    hidden = hidden_pairs(config, flops)
    ours = flops.forward(SPANS, sum(LENGTHS))
    assert ours + hidden == forward
    table = [*model_spec(config).params, *adapter_spec(config, lora).params]
    first = ("q.weight", "k.weight", "v.weight", "q.lora_A", "k.lora_A", "v.lora_A")
    spared = sum(p.numel for p in table if p.layer == 0 and p.short_name.startswith(first))
    assert spared > 0
    assert flops.train(SPANS, sum(LENGTHS)) - ours + 2 * hidden == backward + 2 * sum(LENGTHS) * spared


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_attention_counts_the_tokens_that_each_token_sees(window):
    config = ModelConfig.load("qwen2.5-0.5b")
    flops = ModelFlops.of(model_spec(replace(config, windows=(window,) * config.num_layers)))
    only_attention = replace(flops, matrices=0)
    for start, stop in ((0, 1), (0, 9), (3, 9), (6, 6)):
        pairs = sum(min(position + 1, window or 1000) for position in range(start, stop))
        # Scores and values: a product and a sum for each dim of each of the heads.
        expected = config.num_layers * pairs * config.num_heads * config.head_dim * 2 * 2
        assert only_attention.forward([(start, stop)], 0) == expected


@pytest.mark.parametrize(("name", "billions"), [
    ("llama-7b", 6.607), ("qwen2.5-0.5b", 0.494), ("qwen3-30b-a3b", 3.04)])
def test_a_token_takes_two_flops_for_each_active_parameter(name, billions):
    """The published numbers of active parameters, without the embedding that is looked up."""
    flops = ModelFlops.of(model_spec(ModelConfig.load(name)))
    assert replace(flops, attention=0).forward([(0, 10)], 10) == pytest.approx(20e9 * billions, rel=0.03)
