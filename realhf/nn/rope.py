"""Rotary position embeddings of all kinds that config.json can name, for packed sequences.

Scaled frequencies come from transformers' own functions. With `dynamic` and `longrope` they depend on the
length of the sequence; each packed sequence uses its own length, as if it were alone in its batch.

Shape suffixes: T tokens, N heads, D head dim, R rotated dims (the first of each head).
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from realhf.models.model_config import ModelConfig
from realhf.nn.fused import chains_of

Angles = tuple[Tensor, Tensor]
"""The cosines and sines of every token's angles, each of shape (T, 1, R / 2)."""
_BY_LENGTH = ("dynamic", "longrope")


class Rotary:
    """The rotation angles of a model's tokens. Types of layers may have different frequencies (Gemma 3)."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._wide = torch.promote_types(dtype, torch.float32)
        self._kinds = config.rope_kinds()
        self._frequencies = lru_cache(maxsize=64)(self._compute_frequencies)

    def __call__(self, position_T: Tensor, length_T: Tensor) -> Callable[[int], Angles | None]:
        """Return layer -> angles at these positions of sequences of these lengths; None without rotation."""
        angles = {kind: self._angles(kind, position_T, length_T) for kind in self._kinds}

        def of_layer(layer: int) -> Angles | None:
            if self._config.rope_layers and not self._config.rope_layers[layer]:
                return None
            if "" in angles:
                return angles[""]
            return angles["full_attention" if self._config.window(layer) is None else "sliding_attention"]

        return of_layer

    def _angles(self, kind: str, position_T: Tensor, length_T: Tensor) -> Angles:
        if self._kinds[kind]["rope_type"] in _BY_LENGTH:
            if (limit := self.boundary) is not None:  # Lengths on the same side of it have equal frequencies.
                index_T = (length_T > limit).long()
                by_length = [self._frequencies(kind, length) for length in (limit, limit + 1)]
            else:
                length_T = length_T.clamp(min=self._scaled_config.max_position_embeddings)
                lengths, index_T = length_T.unique(return_inverse=True)
                # Even without tokens, the frequencies must have their shape.
                by_length = [self._frequencies(kind, length) for length in lengths.tolist() or [None]]
            frequencies = torch.stack([f for f, _ in by_length])[index_T][:, None]
            factor = by_length[0][1]
        else:
            frequencies, factor = self._frequencies(kind, None)
            if (chains := chains_of(position_T, self._dtype)) is not None:
                return chains.angles(position_T, frequencies, factor, self._dtype)
        angles = position_T[:, None, None].to(self._wide) * frequencies
        cos, sin = angles.cos(), angles.sin()
        if factor != 1:
            cos, sin = cos * factor, sin * factor
        return cos.to(self._dtype), sin.to(self._dtype)

    @torch.inference_mode(False)  # Training uses the cached result, too.
    def _compute_frequencies(self, kind: str, length: int | None) -> tuple[Tensor, float]:
        """Return radians per position, of shape (R / 2,), and the factor of cos and sin."""
        rope = self._kinds[kind]
        if rope["rope_type"] == "default":
            mla = self._config.mla
            head_dim = mla.qk_rope_head_dim if mla else self._config.head_dim
            dim = int(head_dim * rope["partial_rotary_factor"])
            exponent = torch.arange(0, dim, 2, dtype=self._wide, device=self._device) / dim
            return 1.0 / rope["rope_theta"] ** exponent, 1.0
        functions = import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
        compute = functions[rope["rope_type"]]
        frequencies, factor = compute(self._scaled_config, self._device, length, layer_type=kind or None)
        return frequencies.to(self._wide), factor

    @property
    def by_length(self) -> bool:
        """Whether angles depend on the lengths of the sequences."""
        return any(rope["rope_type"] in _BY_LENGTH for rope in self._kinds.values())

    @cached_property
    def boundary(self) -> int | None:
        """Length beyond which longrope uses other frequencies for all positions of a sequence."""
        if all(rope["rope_type"] != "longrope" for rope in self._kinds.values()):
            return None
        return self._scaled_config.rope_parameters["original_max_position_embeddings"]

    @cached_property
    def _scaled_config(self) -> Any:
        """Return transformers' config object for its own functions; importing it takes seconds."""
        fields = {name: value for name, value in self._config.hf.items() if name != "model_type"}
        return import_module("transformers").AutoConfig.for_model(self._config.family, **fields)


def rotate(x_TND: Tensor, angles: Angles, *, interleaved: bool, num_heads: int | None = None) -> Tensor:
    """Rotate the first R dims of the first `num_heads` heads (default: all), in place if gradients are off.

    Dim i is rotated together with dim i + R / 2, or, with `interleaved`, with its neighbour.
    """
    num_heads = x_TND.shape[1] if num_heads is None else num_heads
    if torch.is_grad_enabled():
        return _Rotate.apply(x_TND, *angles, interleaved, num_heads)
    a, b = _halves(x_TND[:, :num_heads], angles[0], interleaved)
    cos, sin = angles
    before = a.clone()
    a.mul_(cos).addcmul_(b, sin, value=-1)
    b.mul_(cos).addcmul_(before, sin)
    return x_TND


def _halves(x_TND: Tensor, cos: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views (a, b) of the rotated dims, in which a[i] is rotated together with b[i]."""
    x_TNR = x_TND[..., : 2 * cos.shape[-1]]
    a, b = (x_TNR[..., ::2], x_TNR[..., 1::2]) if interleaved else x_TNR.chunk(2, dim=-1)
    return a, b


class _Rotate(torch.autograd.Function):
    """A rotation that rotates its gradient backward and therefore keeps only the angles."""

    @staticmethod
    def forward(
        ctx: Any, x_TND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, num_heads: int
    ) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.settings = interleaved, num_heads
        return _rotated(x_TND, cos, sin, interleaved, num_heads, sign=1)

    @staticmethod
    def backward(ctx: Any, grad_TND: Tensor) -> tuple[Tensor | None, ...]:
        return _rotated(grad_TND, *ctx.saved_tensors, *ctx.settings, sign=-1), None, None, None, None


def _rotated(
    x_TND: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, num_heads: int, *, sign: int
) -> Tensor:
    y_TND = x_TND.new_empty(x_TND.shape)
    y_TND[:, num_heads:] = x_TND[:, num_heads:]
    num_turned = 2 * cos.shape[-1]
    y_TND[:, :num_heads, num_turned:] = x_TND[:, :num_heads, num_turned:]
    (a, b), (c, d) = (_halves(x[:, :num_heads], cos, interleaved) for x in (x_TND, y_TND))
    torch.mul(a, cos, out=c).addcmul_(b, sin, value=-sign)
    torch.mul(b, cos, out=d).addcmul_(a, sin, value=sign)
    return y_TND
