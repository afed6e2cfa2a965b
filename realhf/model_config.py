"""ModelConfig: the shape of a decoder-only transformer, read from a Hugging Face config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from realhf.families import COMMON, COMMON_DEFAULTS, FAMILIES, Family, Hf, Reader
from realhf.hf_fields import CheckedFields, is_positive, is_whole
from realhf.layout import Layout
from realhf.shipped import resolve

HEADS = ("lm", "score")  # Logits over the vocabulary; one number per token (critics, reward models).
ACTIVATION_NAMES = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
LAYER_TYPES = ("full_attention", "sliding_attention")
_ORIGINAL_LENGTH = "original_max_position_embeddings"
ROPE_KEYS = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL_LENGTH),
    "longrope": ("short_factor", "long_factor"),
}  # fmt: skip
"""Rotary embeddings that `nn` computes, and what config.json must say of them."""
_ARCHITECTURES = {
    architecture: (name, head)
    for name, family in FAMILIES.items() for head in HEADS
    if (architecture := family.architecture(head)) is not None
}
_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
)  # fmt: skip


@dataclass(frozen=True)
class MoeConfig:
    """Routed experts in place of the MLP, in every layer from `num_dense_layers` on."""

    num_experts: int
    num_experts_per_token: int
    expert_width: int
    shared_width: int = 0  # Of the shared experts, which form one MLP.
    num_dense_layers: int = 0
    router_bias: bool = False  # DeepSeek's e_score_correction_bias: it takes part in the choice only.
    scores: Literal["softmax", "sigmoid"] = "softmax"  # Of the router's logits over all experts.
    normalize: bool = True  # The chosen experts' scores are divided by their sum.
    scale: float = 1.0  # Multiplies them.
    num_groups: int = 1  # Experts are chosen out of the best `num_groups_per_token` of these groups.
    num_groups_per_token: int = 1
    shared_gate: bool = False  # The shared experts' output is multiplied by a sigmoid of its own.

    def __post_init__(self) -> None:
        if self.num_experts_per_token > self.num_experts:
            legal = f"it must be at most the {self.num_experts} experts to choose from"
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_token}: {legal}")

    def check_groups(self) -> None:
        """Raises ValueError where no router can choose by these groups: such a model can only be planned."""
        experts, groups, chosen = self.num_experts, self.num_groups, self.num_groups_per_token
        if experts % groups or (groups > 1 and experts < 2 * groups):  # A group's score is its two best's.
            legal = f"it must split the {experts} experts into equal groups of at least 2"
            raise ValueError(f"n_group is {groups}: {legal}")
        if chosen > groups:
            raise ValueError(f"topk_group is {chosen}: it must be at most n_group {groups}")
        if self.num_experts_per_token > (choice := experts // groups * chosen):
            legal = f"it must be at most the {choice} experts to choose from"
            raise ValueError(f"num_experts_per_tok is {self.num_experts_per_token}: {legal}")


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
    """A decoder of attention and MLP blocks; the defaults are Llama's.

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
    tie_word_embeddings: bool = False
    head: str = "lm"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-6
    norm_offset: float = 0.0  # Added to the norms' weights (Gemma stores them less one).
    qk_norm: Literal["head", "all"] | None = None  # Queries and keys are normalised, by head or altogether.
    qkv_bias: bool = False
    out_bias: bool = False  # Of the attention's output.
    mlp_bias: bool = False
    activation: str = "silu"
    gated: bool = True  # The MLP has a gate beside its up-projection.
    positions: Literal["rope", "learned"] = "rope"
    num_positions: int | None = None  # Rows of a table of them; None: no limit.
    rope_layers: tuple[bool, ...] = ()  # Which layers rotate queries and keys; empty: all.
    rope_interleaved: bool = False  # Neighbouring dims turn together; else dim i and i + half.
    windows: tuple[int | None, ...] = ()  # By layer: tokens that one sees, itself included.
    attention_scale: float | None = None  # Of query times key; None: head_dim ** -0.5.
    attention_softcap: float | None = None  # c * tanh(x / c) of the attention scores.
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # Of what attention and MLP add.
    logit_scale: float = 1.0
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # config.json as read.
    generation: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """generation_config.json as read."""

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"head is {self.head!r}: legal are {', '.join(HEADS)}")
        for name in _SIZES:
            value = getattr(self, name)
            if not is_whole(value):
                key, legal = _key(self.family, name), "it must be a whole number of at least 1"
                raise ValueError(f"{key} is {value!r}: {legal}")
        if self.num_heads % self.num_kv_heads:
            heads = f"num_attention_heads {self.num_heads}"
            raise ValueError(f"{heads} is no multiple of num_key_value_heads {self.num_kv_heads}")
        if self.activation not in ACTIVATION_NAMES:
            key = _key(self.family, "activation")
            raise ValueError(f"{key} is {self.activation!r}; supported are {', '.join(ACTIVATION_NAMES)}")
        for name in ("windows", "rope_layers"):
            if (by_layer := getattr(self, name)) and len(by_layer) != self.num_layers:
                what = "layer_types" if name == "windows" else "no_rope_layers"
                layers = f"the model has {self.num_layers} layers"
                raise ValueError(f"{what} has {len(by_layer)} entries; {layers}")

    @classmethod
    def from_hf(cls, hf: Hf, *, head: str | None = None, generation: Hf | None = None) -> "ModelConfig":
        """Reads the fields of a config.json. `head` overrides what its `architectures` says."""
        if not isinstance(hf, Mapping):
            raise ValueError("it must be a JSON object")
        architecture = (CheckedFields(hf).get("architectures") or ["(none)"])[0]
        if architecture not in _ARCHITECTURES:
            known = ", ".join(family.prefix for family in FAMILIES.values())
            raise ValueError(
                f"architectures is {architecture!r}: supported are the causal and sequence classification "
                f"models of {known}; docs/adding-a-model.md shows how to add one, and engine transformers "
                "(--actor.engine transformers) takes those of other families as they are"
            )
        name, own_head = _ARCHITECTURES[architecture]
        family = FAMILIES[name]
        full = CheckedFields({**COMMON_DEFAULTS, **family.defaults, **hf})
        for key, legal in family.only.items():
            if (value := hf.get(key)) not in (None, legal):
                raise ValueError(f"{key} is {_json(value)}; supported is {_json(legal)}")
        mla = None
        try:
            CheckedFields(generation or {}).get("eos_token_id")
        except ValueError as error:
            raise ValueError(f"generation_config.json: {error}") from error
        for key in ("eos_token_id", "initializer_range", "max_position_embeddings", _ORIGINAL_LENGTH):
            full.get(key)
        if other := [kind for kind in full.get("layer_types") or () if kind not in LAYER_TYPES]:
            raise ValueError(f"layer_types has {_json(other[0])}: legal are {' and '.join(LAYER_TYPES)}")
        try:
            if "kv_a" in family.names:
                mla = MlaConfig(**{part.name: full[part.name] for part in fields(MlaConfig)})
            config = cls(
                family=name, head=head or own_head, hf=dict(hf), generation=dict(generation or {}), mla=mla,
                moe=MoeConfig(**_read(family.moe, full)) if family.moe else None,
                **{**_read({**COMMON, **family.reads}, full), **family.sets},
            )
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from error
        except (TypeError, ZeroDivisionError) as error:  # Arithmetic on what is no number, or by 0.
            raise ValueError(f"a field has the wrong type: {error}") from error
        if config.positions == "rope":
            for kind, rope in config.rope_kinds().items():
                _check_rope(config, rope, f"rope_parameters.{kind}" if kind else "rope_parameters")
        return config

    @classmethod
    def load(cls, name: str, *, head: str | None = None) -> "ModelConfig":
        """From a model directory, a config.json, or a shipped name. ValueErrors name the file and field."""
        path = resolve(name, kind="models", suffix=".json")
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            refuse_adapters(path.parent)
            raise ValueError(f"model {name}: there is no {path}")
        beside, generation = path.parent / "generation_config.json", None
        try:
            hf = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"model config {path}: {error}") from error
        if path.name == "config.json" and beside.is_file():
            try:
                generation = json.loads(beside.read_text())
                assert isinstance(generation, dict)
            except (ValueError, AssertionError) as error:
                raise ValueError(f"{beside} is not a JSON object: {error}") from error
        try:
            return cls.from_hf(hf, head=head, generation=generation)
        except ValueError as error:
            raise ValueError(f"model config {path}: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """The config.json of an exported model with this head. Raises ValueError where there is no class."""
        hf, architecture = dict(self.hf), self.describes.architecture(self.head)
        if architecture is None:
            raise ValueError(
                f"transformers has no sequence classification model of {self.describes.prefix}, as which a "
                "model with a score head is exported: take one of another family"
            )
        hf["architectures"], hf["model_type"] = [architecture], self.family
        return labelled(hf, self.head)

    @property
    def describes(self) -> Family:
        """The family's entry in the table."""
        return FAMILIES[self.family]

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response: those of generation_config.json where it names any."""
        eos = self.generation.get("eos_token_id")
        eos = self.hf.get("eos_token_id") if eos is None else eos
        return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has routed experts in place of an MLP."""
        return self.moe is not None and layer >= self.moe.num_dense_layers

    @property
    def tied(self) -> bool:
        """Whether the output head is the embedding itself."""
        return self.tie_word_embeddings and self.head == "lm"

    def window(self, layer: int) -> int | None:
        """How many tokens one sees in this layer, itself included; None: all before it."""
        return self.windows[layer] if self.windows else None

    def rope_kinds(self) -> dict[str, dict[str, Any]]:
        """Rotary parameters by layer type ("full_attention"), under "" where all layers have the same."""
        hf = CheckedFields({**COMMON_DEFAULTS, **self.describes.defaults, **self.hf})
        given = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        common = {"partial_rotary_factor": hf["partial_rotary_factor"]}
        thetas = {"sliding_attention": hf.get("rope_local_base_freq", hf["rope_theta"])}
        if not any(key in LAYER_TYPES or isinstance(rope, Mapping) for key, rope in given.items()):
            rope = {**common, "rope_theta": hf["rope_theta"], **given, "rope_type": self._rope_type(given)}
            if "rope_local_base_freq" not in hf:
                return {"": rope}
            local = {**common, "rope_type": "default", "rope_theta": thetas["sliding_attention"]}
            return {"full_attention": rope, "sliding_attention": local}
        kinds: dict[str, dict[str, Any]] = {}
        for kind in sorted({LAYER_TYPES[self.window(layer) is not None] for layer in range(self.num_layers)}):
            own = given.get(kind)
            if not isinstance(own, Mapping):
                raise ValueError(f"rope_parameters.{kind} is {_json(own)}: it must be an object")
            theta = thetas.get(kind, hf["rope_theta"])
            kinds[kind] = {**common, "rope_theta": theta, **own, "rope_type": self._rope_type(own)}
        return kinds

    def _rope_type(self, rope: Mapping[str, Any]) -> Any:
        kind = rope.get("rope_type", rope.get("type", "default"))
        return "longrope" if kind == "su" or (kind == "yarn" and self.family == "phi3") else kind

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
            (heads % (s.tp * s.cp),
             f"tp*cp={s.tp * s.cp} does not divide the model's {heads} attention heads"),
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


def refuse_adapters(directory: Path) -> None:
    """Raises ValueError where a directory holds LoRA adapters, as PEFT saves them, in place of a model."""
    if (file := directory / "adapter_config.json").is_file():
        try:
            base = json.loads(file.read_text()).get("base_model_name_or_path")
        except (ValueError, AttributeError):
            base = None
        raise ValueError(
            f"{directory} holds LoRA adapters of {base or 'another model'}, and no model: give that as the "
            f"model and set lora.adapter to {directory}, or merge the two and give the result"
        )


def _read(readers: Mapping[str, Reader], hf: Hf) -> dict[str, Any]:
    return {name: hf[reader] if isinstance(reader, str) else reader(hf) for name, reader in readers.items()}


def _check_rope(config: ModelConfig, rope: Mapping[str, Any], where: str) -> None:
    """Raises ValueError about rotary parameters that cannot be computed; `where` is their place."""
    kind, share = rope["rope_type"], rope["partial_rotary_factor"]
    if kind not in tuple(ROPE_KEYS):
        raise ValueError(f"rope type {kind!r} is not supported; legal are {', '.join(ROPE_KEYS)}")
    if lacking := [key for key in ROPE_KEYS[kind] if key not in rope]:
        raise ValueError(f"rope_scaling of type {kind!r} lacks {lacking[0]}")
    try:
        CheckedFields(rope).get(_ORIGINAL_LENGTH)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    lists = [key for key in ROPE_KEYS[kind] if key in ("short_factor", "long_factor")]
    for key in ("rope_theta", "partial_rotary_factor", *ROPE_KEYS[kind]):
        if key not in lists and not is_positive(rope[key]):
            raise ValueError(f"{where}: {key} is {_json(rope[key])}: it must be a number above 0")
    head_dim = config.mla.qk_rope_head_dim if config.mla else config.head_dim
    half = (int(head_dim * share) + 1) // 2  # (An odd share of the dims is rounded up, as in transformers.)
    if not 0 < 2 * half <= head_dim:
        turned = f"partial_rotary_factor {share} of {head_dim} dims per head"
        raise ValueError(f"{where}: {turned}: an even number of dims, at most all, must turn")
    for key in lists:
        given = rope[key]
        if not isinstance(given, list) or len(given) != half or not all(map(is_positive, given)):
            raise ValueError(f"{where}: {key} must be a list of {half} numbers above 0, one per pair of dims")


def _key(family: str, name: str) -> str:
    """What config.json calls a field of ModelConfig."""
    described = FAMILIES.get(family)
    reader = {**COMMON, **(described.reads if described else {})}.get(name)
    special = {"num_kv_heads": "num_key_value_heads"}
    return reader if isinstance(reader, str) else special.get(name, name)


def _json(value: Any) -> str:
    return "not set" if value is None else json.dumps(value)


def labelled(hf: dict[str, Any], head: str) -> dict[str, Any]:
    """A config.json that has one label if the head gives scores."""
    if head == "score":
        hf = hf | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        hf.pop("num_labels", None)
    return hf
