"""ModelConfig: the shape of a decoder-only transformer, read from a Hugging Face config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from realhf.layout import Layout
from realhf.shipped import resolve

HEADS = ("lm", "score")  # Logits over the vocabulary; one number per token (critics, reward models).
RUNNABLE = ("llama", "qwen2")  # Families that `nn` computes; plans can be made for all.
_CLASS_PREFIX = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v3": "DeepseekV3",
}
_CLASS_SUFFIX = {"lm": "ForCausalLM", "score": "ForSequenceClassification"}
_ARCHITECTURES = {_CLASS_PREFIX[f] + _CLASS_SUFFIX[h]: (f, h) for f in _CLASS_PREFIX for h in HEADS}


_SIZES = {
    "vocab_size": "vocab_size", "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
}  # fmt: skip
"""Fields that count, and what config.json calls them."""


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts in place of the MLP, in every layer from `num_dense_layers` on."""

    num_experts: int
    num_experts_per_token: int
    expert_width: int
    shared_width: int = 0  # Of the shared experts, which form one MLP.
    num_dense_layers: int = 0
    router_bias: bool = False  # DeepSeek's e_score_correction_bias.

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], family: str) -> "MoeConfig | None":
        if family not in ("qwen3_moe", "deepseek_v3"):
            return None
        for name, legal in (("mlp_only_layers", []), ("decoder_sparse_step", 1), ("moe_layer_freq", 1)):
            if (value := hf.get(name)) not in (None, legal):
                raise ValueError(f"{name} is {value!r}; supported is {legal!r}")
        width, per_token = hf["moe_intermediate_size"], hf["num_experts_per_tok"]
        if family == "deepseek_v3":
            shared_width, dense = hf["n_shared_experts"] * width, hf["first_k_dense_replace"]
            return cls(hf["n_routed_experts"], per_token, width, shared_width, dense, router_bias=True)
        return cls(hf.get("num_local_experts") or hf["num_experts"], per_token, width)


@dataclass(frozen=True)
class MlaConfig:
    """Multi-head latent attention: queries, keys and values are made from latents of these ranks."""

    q_lora_rank: int | None  # None: queries are made from the hidden state.
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """A decoder with RMSNorm, rotary embedding, SwiGLU and grouped-query or latent attention.

    With `mla`, every query head has keys and values of its own and `head_dim` is that of queries and keys.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    qkv_bias: bool
    tie_word_embeddings: bool
    head: str = "lm"
    qk_norm: bool = False
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # config.json as read.

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"head is {self.head!r}: legal are {', '.join(HEADS)}")
        for name in _SIZES:
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ValueError(f"{_SIZES[name]} is {value!r}: it must be a whole number of at least 1")
        if self.num_heads % self.num_kv_heads:
            heads = f"num_attention_heads {self.num_heads}"
            raise ValueError(f"{heads} is no multiple of num_key_value_heads {self.num_kv_heads}")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], *, head: str | None = None) -> "ModelConfig":
        """Reads the fields of a config.json. `head` overrides what its `architectures` says."""
        if not isinstance(hf, Mapping):
            raise ValueError("it must be a JSON object")
        architecture = (hf.get("architectures") or ["(none)"])[0]
        if architecture not in _ARCHITECTURES:
            raise ValueError(f"architectures is {architecture!r}: supported are {', '.join(_ARCHITECTURES)}")
        family, own_head = _ARCHITECTURES[architecture]
        try:
            for name in _SIZES.values():
                if not isinstance(hf.get(name) or 1, int):
                    raise ValueError(f"{name} is {hf[name]!r}: it must be a whole number of at least 1")
            heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
            rope = {"rope_theta": hf.get("rope_theta", 10000.0), **(hf.get("rope_parameters") or {})}
            head_dim = hf.get("head_dim") or (128 if family == "qwen3" else hidden // heads)
            kv_heads, mla = hf.get("num_key_value_heads") or heads, None
            if family == "deepseek_v3":
                mla = MlaConfig(**{part.name: hf[part.name] for part in fields(MlaConfig)})
                kv_heads, head_dim = heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
            config = cls(
                family=family, head=head or own_head, hf=dict(hf), vocab_size=hf["vocab_size"],
                hidden_size=hidden, intermediate_size=hf["intermediate_size"],
                num_layers=hf["num_hidden_layers"], num_heads=heads,
                num_kv_heads=kv_heads, head_dim=head_dim, qk_norm=family in ("qwen3", "qwen3_moe"),
                moe=MoeConfig.from_hf(hf, family), mla=mla,
                rms_norm_eps=hf.get("rms_norm_eps", 1e-6), rope_theta=float(rope["rope_theta"]),
                qkv_bias=family == "qwen2", tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from error
        if on := [name for name in ("mlp_bias", "attention_bias") if hf.get(name)]:
            raise ValueError(f"{on[0]} is true; supported is false")
        if config.runnable:
            _check_computable(hf, rope)
        return config

    @classmethod
    def load(cls, name: str, *, head: str | None = None) -> "ModelConfig":
        """From a model directory, a config.json, or a shipped name. ValueErrors name the file and field."""
        path = resolve(name, kind="models", suffix=".json")
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"model {name}: there is no {path}")
        try:
            return cls.from_hf(json.loads(path.read_text()), head=head)
        except ValueError as error:
            raise ValueError(f"model config {path}: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The config.json of an exported model with this head."""
        hf = dict(self.hf)
        hf["architectures"] = [_CLASS_PREFIX[self.family] + _CLASS_SUFFIX[self.head]]
        if self.head == "score":
            hf["id2label"], hf["label2id"] = {"0": "LABEL_0"}, {"LABEL_0": 0}
        return hf

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        eos = self.hf.get("eos_token_id")
        return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)

    @property
    def runnable(self) -> bool:
        """Whether `nn` computes this family."""
        return self.family in RUNNABLE

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding itself."""
        return self.tie_word_embeddings and self.head == "lm"

    def check_layout(self, layout: Layout) -> None:
        """Raises ValueError when the model cannot be split this way."""
        s, heads, kv_heads = layout.strategy, self.num_heads, self.num_kv_heads
        width, vocabulary, lacks = min(self._mlp_widths()), self.vocab_size, "is not supported for"
        num_experts = self.moe.num_experts if self.moe else 1
        for refused, why in (
            (s.pp > self.num_layers, f"pp={s.pp} exceeds the model's {self.num_layers} layers"),
            (heads % s.tp, f"tp={s.tp} does not divide the model's {heads} attention heads"),
            (kv_heads % s.tp and s.tp % kv_heads,
             f"tp={s.tp} neither divides nor is a multiple of the {kv_heads} kv heads"),
            (s.tp > vocabulary, f"tp={s.tp} exceeds the vocabulary {vocabulary}"),
            (s.tp > width, f"tp={s.tp} exceeds the MLP width {width}"),
            (s.cp > 1, f"cp={s.cp} {lacks} {self.family} models; use cp=1"),
            (s.ep > 1 and not self.moe, f"ep={s.ep} {lacks} {self.family} models; use ep=1"),
            (s.ep > num_experts, f"ep={s.ep} exceeds the model's {num_experts} experts"),
        ):
            if refused:
                raise ValueError(f"layout {layout}: {why}")

    def _mlp_widths(self) -> tuple[int, ...]:
        """Widths of the MLPs that there are: dense, routed, shared."""
        if self.moe is None:
            return (self.intermediate_size,)
        dense = self.intermediate_size if self.moe.num_dense_layers else 0
        return tuple(filter(None, (dense, self.moe.expert_width, self.moe.shared_width)))


def _check_computable(hf: Mapping[str, Any], rope: Mapping[str, Any]) -> None:
    """Raises ValueError about what changes no parameter and `nn` cannot compute."""
    scaling = hf.get("rope_scaling") or rope
    if (rope_type := scaling.get("rope_type", scaling.get("type", "default"))) != "default":
        raise ValueError(f"rope type {rope_type!r} is not supported; legal is 'default'")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {hf['hidden_act']!r}; supported is 'silu'")
    if hf.get("use_sliding_window"):
        raise ValueError("use_sliding_window is true; supported is false")
