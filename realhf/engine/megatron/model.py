"""MegatronModel: a chunk of one rank's stage of a model, whose layers are Megatron-Core's.

The embedding and the head are our own: they split the vocabulary as our parameter table does, so that it
needs no padding, and the head never holds the logits of all tokens (nn/vocab_parallel.py). Our norm takes
part in sequence parallelism, which Megatron-Core's own torch norm does not. Our attention works on packed
sequences and rotates queries and keys itself, so that all kinds of rotary embeddings, windows and packings
give what the native engine gives.

Shape suffixes: T tokens of all sequences and of the padding, B batch (always 1), N query heads, K key-value
heads, D head dim, H hidden; with tensor parallelism, hidden states inside the model have only this rank's
share of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core.extensions import transformer_engine
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from realhf.attention.interface import AttentionKind, Sequences, token_positions
from realhf.distributed.world import ParallelGroups
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import ModelSpec
from realhf.nn.attention import packed_attention
from realhf.nn.mlp import ACTIVATIONS
from realhf.nn.norm import rms_norm
from realhf.nn.rope import Angles, Rotary, rotate
from realhf.nn.vocab_parallel import Head, head_logprobs, head_top_logprobs


class MegatronModel(MegatronModule):
    """A chunk of a pipeline stage: the embedding (first chunk of the first stage), Megatron-Core's layers,
    and the head (last chunk of the last stage). Stages have one chunk, unless chunks are interleaved.

    Calling it runs a micro-batch through the chunk. On the last one, `rows` turns the result into hidden
    states, and `logprobs`, `scores` and `top_logprobs` turn these into outputs.
    """

    share_embeddings_and_output_weights = False  # The engine sums the gradients of tied weights itself.
    def __init__(
        self, spec: ModelSpec, groups: ParallelGroups, collection: ProcessGroupCollection,
        config: TransformerConfig, *, chunk: int = 0,
    ) -> None:
        super().__init__(config=config)
        layout = groups.layout
        self.spec = spec
        self.groups = groups
        self.shape = spec.config
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = chunk if layout.vp > 1 else None
        self.pre_process = groups.is_first_stage and chunk == 0
        self.post_process = groups.is_last_stage and chunk == layout.vp - 1
        self.wide = torch.promote_types(config.params_dtype, torch.float32)
        """Dtype of values that need precision."""
        self._tp = collection.tp
        param = next(p for p in spec.params if p.short_name == "embedding.weight")
        self.vocab_range = param.region(layout.tp, groups.at.tp)[0]
        """Global token ids of this rank's rows of the embedding: [start, stop)."""
        num_rows = self.vocab_range[1] - self.vocab_range[0]
        self.embedding = self._matrix(num_rows) if self.pre_process else None
        self.layers = spec.chunk_layers(layout.strategy, groups.at.pp)[chunk]
        self.decoder = TransformerBlock(
            config=config, spec=block_spec(spec.config, self.layers, config), pre_process=self.pre_process,
            post_process=self.post_process, pg_collection=collection, vp_stage=self.vp_stage)
        self.output = None
        """Weight of the head, unless it is the embedding of this chunk."""
        if self.post_process and not (spec.config.tied and self.pre_process):
            self.output = self._matrix(1 if spec.config.head == "score" else num_rows)
        dtype = config.params_dtype
        self._embedding_scale = float(torch.tensor(spec.config.embedding_scale, dtype=dtype))
        self._rotary = None
        if spec.config.positions == "rope":
            self._rotary = Rotary(spec.config, dtype=dtype, device=groups.world.device)

    @property
    def matrices(self) -> list[torch.nn.Parameter]:
        """The embedding and the weight of the head that this chunk holds."""
        return [matrix for matrix in (self.embedding, self.output) if matrix is not None]

    def _matrix(self, num_rows: int) -> torch.nn.Parameter:
        shape = (num_rows, self.shape.hidden_size)
        empty = torch.empty(shape, dtype=self.config.params_dtype, device=self.groups.world.device)
        return torch.nn.Parameter(empty)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Take the hidden states of the stage before; Megatron-Core's schedule calls this."""
        self.decoder.set_input_tensor(input_tensor[0])

    def forward(self, ids_T: Tensor, seq_lens: Sequence[int]) -> Tensor:
        """Run packed sequences through the chunk; return hidden_TBH of this rank's share of the tokens."""
        packing = self._packing(seq_lens)
        hidden_TBH = self._embed(ids_T) if self.embedding is not None else None
        result = self.decoder(hidden_states=hidden_TBH, attention_mask=None, packed_seq_params=packing)
        assert isinstance(result, Tensor)
        return result

    def _packing(self, seq_lens: Sequence[int]) -> Packing:
        angles = None
        if self._rotary is not None:
            _, position_T, length_T = token_positions(seq_lens, self.groups.world.device)
            angles = self._rotary(position_T, length_T)
        sequences = Sequences.of(seq_lens, self.groups.world.device)
        return Packing(qkv_format="sbhd", sequences=sequences, angles=angles)

    def _embed(self, ids_T: Tensor) -> Tensor:
        assert self.embedding is not None
        if self.groups.tp.size == 1:
            x_TBH = F.embedding(ids_T, self.embedding)[:, None]
        else:
            start, stop = self.vocab_range
            here_T = (ids_T >= start) & (ids_T < stop)
            x_TH = F.embedding(torch.where(here_T, ids_T - start, 0), self.embedding) * here_T[:, None]
            x_TBH = reduce_scatter_to_sequence_parallel_region(x_TH[:, None], group=self._tp)
        return x_TBH if self._embedding_scale == 1 else x_TBH * self._embedding_scale

    def rows(self, hidden_TBH: Tensor) -> Tensor:
        """Return hidden_TH of all tokens, on the last stage."""
        if self.groups.tp.size > 1:  # The gradient is whole on every rank (see `Head`), so each takes a part.
            hidden_TBH = gather_from_sequence_parallel_region(
                hidden_TBH, tensor_parallel_output_grad=False, group=self._tp)
        return hidden_TBH[:, 0]

    @cached_property
    def head(self) -> Head:
        """The output head over `vocab_range`, on the last stage."""
        weight = self.embedding if self.output is None else self.output
        assert weight is not None
        return Head(
            weight, self.vocab_range[0], self.groups.tp, scale=self.shape.logit_scale,
            softcap=self.shape.logit_softcap)

    def logprobs(
        self, hidden_TH: Tensor, labels: Tensor, *, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the labels' log-probs, and the entropies if `entropy`; see `head_logprobs`."""
        return head_logprobs(hidden_TH, labels, self.head, temperature=temperature, entropy=entropy)

    def top_logprobs(self, hidden_TH: Tensor, k: int, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the ids and the log-probs of the `k` most probable tokens; see `head_top_logprobs`."""
        return head_top_logprobs(hidden_TH, self.head, k, temperature=temperature)

    def scores(self, hidden_TH: Tensor) -> Tensor:
        """Return scores_T, in dtype `wide`, on the last stage of a model with a score head."""
        assert self.output is not None
        return F.linear(hidden_TH, self.output)[:, 0].to(self.wide)


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
    ) -> Tensor:
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
            self_attn_bda=get_bias_dropout_add, mlp_bda=get_bias_dropout_add))


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


def make_config(
    config: ModelConfig, layout: Layout, *, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """Return the config. With tensor parallelism, norms and residuals are split by sequence position.

    Losses are sums that add up over micro-batches and replicas, so Megatron-Core averages nothing.
    """
    moe = {} if config.moe is None else _experts(config, layout) | _grouped_products(config, dtype)
    return TransformerConfig(
        num_layers=config.num_layers, hidden_size=config.hidden_size, num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads, kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size, gated_linear_unit=config.gated,
        activation_func=ACTIVATIONS[config.activation].compute,
        add_bias_linear=config.out_bias, add_qkv_bias=config.qkv_bias,
        normalization="RMSNorm" if config.norm == "rms" else "LayerNorm",
        layernorm_epsilon=config.norm_eps, layernorm_zero_centered_gamma=config.norm_offset == 1,
        qk_layernorm=config.qk_norm is not None, hidden_dropout=0.0, attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vp if layout.vp > 1 else None,
        sequence_parallel=layout.tp > 1, params_dtype=dtype, pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16, calculate_per_token_loss=True, deallocate_pipeline_outputs=True,
        perform_initialization=False, use_cpu_initialization=device.type == "cpu",
        gradient_accumulation_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False, **moe)


def _experts(config: ModelConfig, layout: Layout) -> dict[str, object]:
    moe = config.moe
    assert moe is not None
    return {
        "num_moe_experts": moe.num_experts, "moe_router_topk": moe.num_experts_per_token,
        "moe_ffn_hidden_size": moe.expert_width, "moe_router_pre_softmax": not moe.normalize,
        "moe_layer_freq": [int(config.has_experts(layer)) for layer in range(config.num_layers)],
        "moe_shared_expert_intermediate_size": moe.shared_width or None,
        "moe_shared_expert_gate": moe.shared_gate, "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0, "moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32",
        "expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": layout.tp,
    }


def _grouped_products(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """Return how all experts of a rank run at once, which needs a library, or one after the other.

    The library is Transformer Engine, or else grouped_gemm, which computes in bfloat16 only.
    """
    has_engine = transformer_engine.TEColumnParallelGroupedLinear is not None
    has_gemm = grouped_gemm_util.grouped_gemm_is_available() and dtype == torch.bfloat16
    has_gemm = has_gemm and ACTIVATIONS[config.activation].compute in (F.silu, F.gelu)
    return {
        "moe_grouped_gemm": has_engine or has_gemm,
        "moe_use_legacy_grouped_gemm": has_gemm and not has_engine,
    }
