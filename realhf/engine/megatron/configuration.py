"""The TransformerConfig of Megatron-Core for one of our model configs under a layout."""

import torch
import torch.nn.functional as F
from megatron.core.extensions import transformer_engine
from megatron.core.transformer.moe import grouped_gemm_util
from megatron.core.transformer.transformer_config import TransformerConfig

from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.nn.mlp import ACTIVATIONS


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
        masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False, **moe)  # fmt: skip


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
    }  # fmt: skip


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
