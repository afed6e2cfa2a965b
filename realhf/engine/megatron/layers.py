"""The layers of a model in Megatron-Core, some of whose parts are our own.

Our norm takes part in sequence parallelism, which Megatron-Core's own torch norm does not. Our attention
works on packed sequences and rotates queries and keys itself, so that all kinds of rotary embeddings, windows
and packings give what the native engine gives.

Shape suffixes: T tokens of all sequences end to end, B batch (always 1), N query heads, K key-value heads,
D head dim, H hidden.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from realhf.attention.interface import AttentionKind, Sequences
from realhf.models.model_config import ModelConfig
from realhf.nn.attention import packed_attention
from realhf.nn.norm import rms_norm
from realhf.nn.rope import Angles, rotate


@dataclass
class Packing(PackedSeqParams):
    """The sequences of a micro-batch, and the rotation of their tokens.

    It travels to the layers as an argument, so that a recomputed layer gets that of its own micro-batch.
    """

    sequences: Sequences | None = None
    angles: Callable[[int], Angles | None] | None = None  # Layer -> angles of all tokens.


class MegatronNorm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dim."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.offset = float(config.layernorm_zero_centered_gamma)
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        params = [torch.nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))]
        if config.normalization == "LayerNorm":
            params.append(torch.nn.Parameter(torch.empty_like(params[0])))
        for param in params:
            # Each rank has a part of the sequence: finalize_model_grads sums these gradients over tp.
            param.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.weight = params[0]
        self.bias = params[1] if len(params) > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        return rms_norm(x, self.weight, self.eps, offset=self.offset)


class MegatronAttention(torch.nn.Module):
    """Causal attention within each of the packed sequences, over this rank's heads."""

    def __init__(self, model: ModelConfig, *, layer_number: int, **_: Any) -> None:
        super().__init__()
        self.layer = layer_number - 1  # Megatron-Core counts layers from 1.
        self.kind = AttentionKind.of(model, self.layer)
        self.interleaved = model.rope_interleaved

    def forward(
        self, q_TBND: Tensor, k_TBKD: Tensor, v_TBKD: Tensor, attention_mask: None, *,
        packed_seq_params: Packing, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Return the attention's output, heads side by side: out_TBX."""
        assert packed_seq_params.sequences is not None
        q_TND, k_TKD, v_TKD = q_TBND[:, 0], k_TBKD[:, 0], v_TBKD[:, 0]
        angles = packed_seq_params.angles and packed_seq_params.angles(self.layer)
        if angles:
            q_TND, k_TKD = (rotate(x, angles, interleaved=self.interleaved) for x in (q_TND, k_TKD))
        out_TND = packed_attention(q_TND, k_TKD, v_TKD, packed_seq_params.sequences, self.kind)
        return out_TND.flatten(1)[:, None]


def block_spec(model: ModelConfig, layers: range, config: TransformerConfig) -> TransformerBlockSubmodules:
    """Return the specification of these layers of a model, and of the final norm."""
    specs = [_layer_spec(model, config, model.has_experts(layer)) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=MegatronNorm)


def _layer_spec(model: ModelConfig, config: TransformerConfig, has_experts: bool) -> ModuleSpec:
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    head_norm = MegatronNorm if model.qk_norm == "head" else None
    attention = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=partial(MegatronAttention, model),
        linear_proj=RowParallelLinear, q_layernorm=head_norm, k_layernorm=head_norm)
    mlp = ModuleSpec(module=MLP, submodules=linears)
    if has_experts:
        experts = MoESubmodules(
            router=TopKRouter,
            experts=_expert_spec(config, linears),
            shared_experts=ModuleSpec(module=SharedExpertMLP, submodules=linears))
        mlp = ModuleSpec(module=MoELayer, submodules=experts)
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=MegatronNorm, pre_mlp_layernorm=MegatronNorm, mlp=mlp,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention),
            self_attn_bda=get_bias_dropout_add, mlp_bda=get_bias_dropout_add))  # fmt: skip


def _expert_spec(config: TransformerConfig, linears: MLPSubmodules) -> ModuleSpec:
    """Return the specification of a rank's experts, which run in grouped products if `config` says so."""
    if not config.moe_grouped_gemm:
        return ModuleSpec(module=SequentialMLP, submodules=linears)
    if config.moe_use_legacy_grouped_gemm:
        return ModuleSpec(module=GroupedMLP)
    grouped = MLPSubmodules(
        linear_fc1=transformer_engine.TEColumnParallelGroupedLinear,
        linear_fc2=transformer_engine.TERowParallelGroupedLinear)
    return ModuleSpec(module=TEGroupedMLP, submodules=grouped)
