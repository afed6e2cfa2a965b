"""Block: one decoder layer of any model family, split over tensor-parallel ranks.

Shape suffixes: T tokens of all sequences end to end, H hidden, D head dim; on this rank: F MLP width, N query
heads, K key-value heads.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from realhf.attention.choose import packed_backend
from realhf.attention.interface import AttentionKind, AttentionShape
from realhf.distributed.autograd import copy_to_group, sum_over_group
from realhf.distributed.group import Group
from realhf.distributed.parallel import ParallelGroups
from realhf.models.model_config import ModelConfig
from realhf.nn.activation import activated_linear, activation
from realhf.nn.attention import Attend, attend_each
from realhf.nn.grad_accumulation import add_bias, wide
from realhf.nn.latent_attention import LatentAttention
from realhf.nn.lora import Adapted, adapted_linear
from realhf.nn.moe import Moe, RouterLosses
from realhf.nn.norm import layer_norm, rms_norm
from realhf.nn.parameters import Weights
from realhf.nn.rope import Angles, rotate


class Norm:
    """RMSNorm or LayerNorm over the last dim, or the identity where the family has no such norm."""

    def __init__(self, config: ModelConfig, weights: Weights, module: str) -> None:
        self.eps = config.norm_eps
        self.offset = config.norm_offset
        self.weight = weights.get(f"{module}.weight")
        self.bias = weights.get(f"{module}.bias")

    def __call__(self, x: Tensor) -> Tensor:
        if self.weight is None:
            return x
        if self.bias is not None:
            return layer_norm(x, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, offset=self.offset)


class Block:
    """A decoder layer: attention and an MLP or experts, each between the norms that the family has."""

    def __init__(
        self, config: ModelConfig, weights: Weights, layer: int, groups: ParallelGroups, adapters: Adapted
    ) -> None:
        self.config = config
        self.attn_norm = Norm(config, weights, "attn_norm")
        self.attn_out_norm = Norm(config, weights, "attn_out_norm")
        attention = Attention if config.mla is None else LatentAttention
        self.attention = attention(config, weights, layer, groups.tp, adapters)
        self.mlp_norm = Norm(config, weights, "mlp_norm")
        self.mlp_out_norm = Norm(config, weights, "mlp_out_norm")
        self.mlp: Moe | Mlp
        if config.has_experts(layer):
            has_shared = "shared_down.weight" in weights
            shared = Mlp(config, weights, groups.tp, adapters, prefix="shared_") if has_shared else None
            self.mlp = Moe(config, weights, layer, groups, activation=activation(config), shared=shared)
        else:
            self.mlp = Mlp(config, weights, groups.tp, adapters)

    def __call__(
        self, x_TH: Tensor, angles: Angles | None, attends: Sequence[Attend],
        losses: RouterLosses | None = None,
    ) -> Tensor:
        # Intermediate results have no names, so that they are freed at once: memory peaks here.
        x_TH = self._add(x_TH, self.attn_out_norm(self.attention(self.attn_norm(x_TH), angles, attends)))
        return self._add(x_TH, self.mlp_out_norm(self.mlp(self.mlp_norm(x_TH), losses)))

    def _add(self, x_TH: Tensor, y_TH: Tensor) -> Tensor:
        scale = self.config.residual_scale
        return x_TH + (y_TH if scale == 1 else y_TH * scale)


class Attention:
    """Grouped-query attention over this rank's heads."""

    def __init__(
        self, config: ModelConfig, weights: Weights, layer: int, tp: Group, adapters: Adapted
    ) -> None:
        self.config = config
        self.tp = tp
        self.adapters = adapters
        self.qkv = weights["qkv.weight"]
        self.qkv_bias = weights.get("qkv.bias")
        self.out = weights["o.weight"]
        self.out_bias = weights.get("o.bias")
        self.q_norm = Norm(config, weights, "q_norm")
        self.k_norm = Norm(config, weights, "k_norm")
        self.num_heads = self.out.shape[1] // config.head_dim
        self.num_kv_heads = (self.qkv.shape[0] // config.head_dim - self.num_heads) // 2
        self.kind = AttentionKind.of(config, layer)
        # If no kernel computes this kind, this raises now, and not in the middle of a run.
        dim = config.head_dim
        packed_backend(self.qkv.device, AttentionShape(self.kind, dim, dim, self.qkv.dtype))

    def __call__(self, x_TH: Tensor, angles: Angles | None, attends: Sequence[Attend]) -> Tensor:
        N, K = self.num_heads, self.num_kv_heads
        x_TH = copy_to_group(x_TH, self.tp)
        qkv = adapted_linear(x_TH, self.qkv, self.qkv_bias, self.adapters.get("qkv.weight"))
        qkv = qkv.view(len(qkv), N + 2 * K, self.config.head_dim)
        if self.config.qk_norm is not None:
            q_TND, k_TKD, v_TKD = qkv.split((N, K, K), dim=1)
            q_TND = self._normed(q_TND, self.q_norm)
            k_TKD = self._normed(k_TKD, self.k_norm)
            qkv = torch.cat((q_TND, k_TKD, v_TKD), dim=1)
        if angles is not None:
            qkv = rotate(qkv, angles, interleaved=self.config.rope_interleaved, num_heads=N + K)
        q_TND, k_TKD, v_TKD = qkv.split((N, K, K), dim=1)
        out_TND = attend_each(attends, lambda attend, *qkv: attend(self.kind, *qkv), q_TND, k_TKD, v_TKD)
        y_TH = adapted_linear(out_TND.flatten(1), self.out, adapter=self.adapters.get("o.weight"))
        return add_bias(sum_over_group(y_TH, self.tp), self.out_bias)

    def _normed(self, x_TND: Tensor, norm: Norm) -> Tensor:
        """Return queries or keys normalised per head, or over all heads, those of other ranks included."""
        if self.config.qk_norm == "head":
            return norm(x_TND)
        if self.tp.size == 1:
            return norm(x_TND.flatten(1)).view_as(x_TND)
        assert norm.weight is not None
        whole = (self.config.num_heads if norm is self.q_norm else self.config.num_kv_heads) * x_TND.shape[2]
        copies = self.tp.size * x_TND.shape[1] * x_TND.shape[2] // whole  # Number of ranks that hold a head.
        x = x_TND.to(torch.promote_types(x_TND.dtype, torch.float32))
        squares_T = sum_over_group(x.square().sum((1, 2)) / (copies * whole), self.tp)
        squares_T = copy_to_group(squares_T, self.tp)  # The outputs of every rank depend on it.
        x = x * (squares_T + norm.eps).rsqrt()[:, None, None]
        weight_ND = wide(norm.weight).view(x_TND.shape[1:])
        return (x.to(x_TND.dtype) * weight_ND).to(x_TND.dtype)


class Mlp:
    """A gated or plain MLP, split by width. Its weights' names begin with `prefix`."""

    def __init__(
        self, config: ModelConfig, weights: Weights, tp: Group, adapters: Adapted, *, prefix: str = ""
    ) -> None:
        self.tp = tp
        self.config = config
        up = f"{prefix}{'gate_up' if config.gated else 'up'}"
        self.up = weights[f"{up}.weight"]
        self.up_bias = weights.get(f"{up}.bias")
        self.down = weights[f"{prefix}down.weight"]
        self.down_bias = weights.get(f"{prefix}down.bias")
        self.up_adapter = adapters.get(f"{up}.weight")
        self.down_adapter = adapters.get(f"{prefix}down.weight")

    def __call__(self, x_TH: Tensor, _: RouterLosses | None = None) -> Tensor:
        up_TF = adapted_linear(copy_to_group(x_TH, self.tp), self.up, self.up_bias, self.up_adapter)
        y_TH = activated_linear(self.config, up_TF, self.down, self.down_adapter)
        return add_bias(sum_over_group(y_TH, self.tp), self.down_bias)
