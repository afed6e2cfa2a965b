"""Model FLOPs: the floating-point operations of a model's passes over tokens, from the shape of the model.

A matrix product takes 2 FLOPs for every token and parameter. The backward pass takes twice that, as it
computes the gradients of inputs and of weights (Kaplan et al. 2020, arXiv:2001.08361, section 2.1); frozen
weights have no gradient, so theirs takes as much as the forward pass. Attention is causal: each pair of a
token and one that it sees counts, and no other. Norms, activations and everything that is computed twice do
not count, as in model FLOPs utilisation (Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from realhf.models.lora import LoraConfig, adapter_spec
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import ModelSpec

TokenSpan = tuple[int, int]
"""The positions [start, stop) of a sequence whose tokens a pass computes."""


def dense_params(spec: ModelSpec) -> int:
    """Return the number of block parameters that are multiplied with every token: all but routed experts."""
    blocks = (p for p in spec.params if p.layer not in (None, -1) and p.short_name.endswith(".weight"))
    return sum(p.numel for p in blocks if len(p.shape) == 2 and p.expert is None)


def attention_flops(config: ModelConfig) -> int:
    """Return the FLOPs of one layer for a token and one that it sees: their score, and the value's share."""
    value_dim = config.head_dim if config.mla is None else config.mla.v_head_dim
    return 2 * config.num_heads * (config.head_dim + value_dim)


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of passes of one model. An output is a row of logits, a value or a score."""

    matrices: int  # Block parameters that a token is multiplied with, only those of the experts it chooses.
    head: int
    attention: int  # See `attention_flops`.
    num_layers_by_window: tuple[tuple[int | None, int], ...]
    adapters: int = 0  # Parameters of LoRA adapters. If there are any, the matrices are frozen.
    trains_head: bool = True
    generates_merged: bool = False  # Adapters are merged into the matrices while the model generates.

    @classmethod
    def of(cls, spec: ModelSpec, lora: LoraConfig | None = None) -> "ModelFlops":
        config = spec.config
        matrices = dense_params(spec)
        if config.moe is not None:
            experts = sum(p.numel for p in spec.params if p.expert is not None)
            matrices += experts * config.moe.num_experts_per_token // config.moe.num_experts
        adapters = 0
        if lora is not None:
            table = adapter_spec(config, lora)
            adapters = sum(p.numel for p in table.params if p.layer is not None)
        windows = Counter(config.window(layer) for layer in range(config.num_layers))
        return cls(
            matrices, (1 if config.head == "score" else config.vocab_size) * config.hidden_size,
            attention_flops(config), tuple(windows.items()), adapters,
            trains_head=lora is None or config.head == "score",
            generates_merged=lora is not None and lora.merge)

    def forward(self, spans: Iterable[TokenSpan], num_outputs: int) -> int:
        """Return the FLOPs of a forward pass over some sequences; tokens before a span are not computed."""
        spans = list(spans)
        params = (self.matrices + self.adapters) * _num_tokens(spans) + self.head * num_outputs
        return 2 * params + self._attention(spans)

    def train(self, spans: Iterable[TokenSpan], num_outputs: int) -> int:
        """Return the FLOPs of a forward and a backward pass over some sequences."""
        spans = list(spans)
        frozen = self.matrices * _num_tokens(spans) if self.adapters else 0
        frozen += 0 if self.trains_head else self.head * num_outputs
        return 3 * self.forward(spans, num_outputs) - 2 * frozen

    def _attention(self, spans: list[TokenSpan]) -> int:
        pairs = (
            count * (_num_pairs(stop, window) - _num_pairs(start, window))
            for start, stop in spans for window, count in self.num_layers_by_window)
        return self.attention * sum(pairs)


def _num_tokens(spans: list[TokenSpan]) -> int:
    return sum(stop - start for start, stop in spans)


def _num_pairs(length: int, window: int | None) -> int:
    """Return how many pairs of a token and one that it sees a sequence has; a token also sees itself."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * (window or 0)
