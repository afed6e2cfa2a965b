"""ModelConfig: the shape of a decoder-only transformer, read from a Hugging Face config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realhf.layout import Layout
from realhf.shipped import resolve

HEADS = ("lm", "score")  # Logits over the vocabulary; one number per token (critics, reward models).
_CLASS_PREFIX = {"llama": "Llama", "qwen2": "Qwen2"}
_CLASS_SUFFIX = {"lm": "ForCausalLM", "score": "ForSequenceClassification"}
_ARCHITECTURES = {_CLASS_PREFIX[f] + _CLASS_SUFFIX[h]: (f, h) for f in _CLASS_PREFIX for h in HEADS}


@dataclass(frozen=True)
class ModelConfig:
    """Llama and Qwen2 families: RMSNorm, rotary embedding, grouped-query attention, SwiGLU."""

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
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # config.json as read.

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"head is {self.head!r}: legal are {', '.join(HEADS)}")
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
            heads, hidden = hf["num_attention_heads"], hf["hidden_size"]
            rope = {"rope_theta": hf.get("rope_theta", 10000.0), **(hf.get("rope_parameters") or {})}
            config = cls(
                family=family, head=head or own_head, hf=dict(hf), vocab_size=hf["vocab_size"],
                hidden_size=hidden, intermediate_size=hf["intermediate_size"],
                num_layers=hf["num_hidden_layers"], num_heads=heads,
                num_kv_heads=hf.get("num_key_value_heads") or heads,
                head_dim=hf.get("head_dim") or hidden // heads,
                rms_norm_eps=hf.get("rms_norm_eps", 1e-6), rope_theta=float(rope["rope_theta"]),
                qkv_bias=family == "qwen2", tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from error
        scaling = hf.get("rope_scaling") or rope
        if (rope_type := scaling.get("rope_type", scaling.get("type", "default"))) != "default":
            raise ValueError(f"rope type {rope_type!r} is not supported; legal is 'default'")
        if hf.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act is {hf['hidden_act']!r}; supported is 'silu'")
        if on := [name for name in ("mlp_bias", "attention_bias", "use_sliding_window") if hf.get(name)]:
            raise ValueError(f"{on[0]} is true; supported is false")
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
    def tied(self) -> bool:
        """Whether the output head is the embedding itself."""
        return self.tie_word_embeddings and self.head == "lm"

    def check_layout(self, layout: Layout) -> None:
        """Raises ValueError when the model cannot be split this way."""
        s, heads, kv_heads = layout.strategy, self.num_heads, self.num_kv_heads
        width, vocabulary, lacks = self.intermediate_size, self.vocab_size, "is not supported for"
        for refused, why in (
            (s.pp > self.num_layers, f"pp={s.pp} exceeds the model's {self.num_layers} layers"),
            (heads % s.tp, f"tp={s.tp} does not divide the model's {heads} attention heads"),
            (kv_heads % s.tp and s.tp % kv_heads,
             f"tp={s.tp} neither divides nor is a multiple of the {kv_heads} kv heads"),
            (s.tp > vocabulary, f"tp={s.tp} exceeds the vocabulary {vocabulary}"),
            (s.tp > width, f"tp={s.tp} exceeds the MLP width {width}"),
            (s.cp > 1, f"cp={s.cp} {lacks} {self.family} models; use cp=1"),
            (s.ep > 1, f"ep={s.ep} {lacks} {self.family} models; use ep=1"),
        ):
            if refused:
                raise ValueError(f"layout {layout}: {why}")
