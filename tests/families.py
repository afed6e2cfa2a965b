"""The table of model families and layouts that are tested; docs/models.md is made from it."""

from typing import Any, NamedTuple

SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256,
    "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


class Case(NamedTuple):
    """One kind of model: a family with the settings that set it apart."""

    family: str
    about: str
    changes: dict[str, Any]

    def hf(self, **more: Any) -> dict[str, Any]:
        """Arguments for transformers' config class."""
        return {"model_type": self.family, **SIZES, **self.changes, **more}


LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0],
}

CASES = {
    "llama": Case("llama", "Llama 2, CodeLlama", {}),
    "llama-3.1": Case("llama", "Llama 3.x: llama3 rope", {"rope_parameters": LLAMA3_ROPE, "head_dim": 6}),
    "llama-bias": Case("llama", "Llama with biases on every linear layer", {
        "attention_bias": True, "mlp_bias": True}),
    "llama-linear": Case("llama", "Llama with linear rope", {
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-dynamic": Case("llama", "Llama with dynamic rope", {
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        "max_position_embeddings": 6}),
    "mistral": Case("mistral", "Mistral: sliding window", {"sliding_window": 4}),
    "qwen2": Case("qwen2", "Qwen 2 and 2.5", {"tie_word_embeddings": True}),
    "qwen2-window": Case("qwen2", "Qwen 2 with yarn and sliding windows in its upper layers", {
        "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2, "rope_parameters": YARN}),
    "qwen3": Case("qwen3", "Qwen 3", {"head_dim": 6}),
    "gemma-2": Case("gemma2", "Gemma 2", {
        "head_dim": 6, "query_pre_attn_scalar": 9, "sliding_window": 4, "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0}),
    "gemma-3": Case("gemma3_text", "Gemma 3 (text)", {
        "head_dim": 6, "query_pre_attn_scalar": 9, "sliding_window": 4, "sliding_window_pattern": 3}),
    "phi-3": Case("phi3", "Phi-3: longrope", {
        "rope_parameters": LONGROPE, "sliding_window": 8, "original_max_position_embeddings": 8}),
    "phi-4": Case("phi3", "Phi-4 mini: partial rotary", {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "tie_word_embeddings": True}),
    "olmo-2": Case("olmo2", "OLMo 2", {}),
    "gpt2": Case("gpt2", "GPT-2", {
        "n_embd": 32, "n_layer": 4, "n_head": 8, "n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "attn_pdrop": 0.0}),
    "smollm3": Case("smollm3", "SmolLM3: layers without positions", {"no_rope_layer_interval": 2}),
    "glm-4": Case("glm4", "GLM-4: interleaved partial rotary", {"head_dim": 8}),
    "granite": Case("granite", "Granite", {
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5,
        "attention_multiplier": 0.3}),
}
MOE_CASES = {
    "mixtral": Case("mixtral", "Mixtral", {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2-moe": Case("qwen2_moe", "Qwen 1.5 and 2 MoE", {**_MOE, "shared_expert_intermediate_size": 20}),
    "qwen3-moe": Case("qwen3_moe", "Qwen 3 MoE", {**_MOE, "head_dim": 6, "norm_topk_prob": True}),
    "olmoe": Case("olmoe", "OLMoE", {"num_experts": 6, "num_experts_per_tok": 2}),
    "deepseek-v3": Case("deepseek_v3", "DeepSeek V3 and R1", {
        "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5,
        "num_key_value_heads": 8, "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2,
        "moe_intermediate_size": 12, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}),
}

LAYOUTS = ("d1", "t2", "p2", "d2", "t2p2", "c2")
MOE_LAYOUTS = ("e2", "e2t2")
QUICK = {
    **dict.fromkeys((*CASES, *MOE_CASES), ("d1",)),
    **dict.fromkeys(("llama-bias", "llama-linear", "llama-dynamic"), ()),
    **dict.fromkeys(("olmo-2", "phi-3"), ("t2",)),
    "gemma-3": ("p2",),
    "gpt2": ("p2",),
    "qwen2-moe": ("e2",),
}
"""The part of the table that is tested every time; the whole takes minutes, and is marked slow."""
