"""ModelConfig: the shape of a decoder-only transformer, read from a Hugging Face config.json.

TransformersConfig and MegatronConfig are those of roles that other engines compute; each refuses what its
engine lacks. This module imports neither library.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Literal

from realhf.errors import cut, shown
from realhf.layout import Layout
from realhf.models.families import (
    COMMON,
    COMMON_DEFAULTS,
    FAMILIES,
    MAX_EXPERTS,
    MAX_SIZE,
    CheckedFields,
    Family,
    Hf,
    Reader,
    check_sizes,
)
from realhf.user_input.field_types import is_positive, is_whole, require
from realhf.user_input.files import read_object
from realhf.user_input.shipped import resolve

HEADS = ("lm", "score")
"""`lm` computes logits over the vocabulary, `score` one number per token (critics, reward models)."""
ACTIVATION_NAMES = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
LAYER_TYPES = ("full_attention", "sliding_attention")
_ORIGINAL_LENGTH = "original_max_position_embeddings"
_READ_OF_ALL = (
    "architectures", "eos_token_id", "head_dim", "initializer_range", "layer_types",
    "max_position_embeddings", "num_key_value_heads", "rope_parameters", "rope_scaling", "sliding_window",
    "torch_dtype")
"""Keys of config.json that functions read."""
ROPE_KEYS = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL_LENGTH),
    "longrope": ("short_factor", "long_factor"),
}
"""Rotary embeddings that `nn` computes -> the keys that config.json must have for each."""
_ARCHITECTURES = {
    architecture: (name, head)
    for name, family in FAMILIES.items() for head in HEADS
    if (architecture := family.architecture(head)) is not None
}
_SIZE_KEYS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
}
"""The sizes that all dense decoders have -> the keys under which families store them."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
MEGATRON_VERSION = "0.16.1"
"""The version of megatron-core whose classes and private names the engine uses."""
_USE_NATIVE = "use engine native"


@dataclass(frozen=True)
class MoeConfig:
    """The sizes and the routing of the experts that replace the MLP from layer `num_dense_layers` on."""

    num_experts: int
    num_experts_per_token: int
    expert_width: int
    shared_width: int = 0  # Width of the shared experts, which form one MLP; 0: there are none.
    num_dense_layers: int = 0
    router_bias: bool = False  # DeepSeek's e_score_correction_bias, which only affects the choice of experts.
    scores: Literal["softmax", "sigmoid"] = "softmax"  # Applied to the router's logits over all experts.
    normalize: bool = True  # Divide the chosen experts' scores by their sum.
    scale: float = 1.0  # Multiplies the chosen experts' scores.
    num_groups: int = 1  # Experts are chosen from the best `num_groups_per_token` of these groups.
    num_groups_per_token: int = 1
    shared_gate: bool = False  # Multiply the shared experts' output by the sigmoid of a gate of their own.

    def __post_init__(self) -> None:
        require(
            self.num_experts_per_token <= self.num_experts, "num_experts_per_tok", self.num_experts_per_token,
            f"be at most the {self.num_experts} experts to choose from")

    def check_groups(self) -> None:
        """Raise ValueError if no router can choose by these groups: such a model can only be planned."""
        experts, groups, chosen = self.num_experts, self.num_groups, self.num_groups_per_token
        # The score of a group is the sum of its two best experts' scores, so it needs two experts.
        require(
            experts % groups == 0 and (groups == 1 or experts >= 2 * groups), "n_group", groups,
            f"split the {experts} experts into equal groups of at least 2")
        require(chosen <= groups, "topk_group", chosen, f"be at most n_group {groups}")
        choice = experts // groups * chosen
        require(
            self.num_experts_per_token <= choice, "num_experts_per_tok", self.num_experts_per_token,
            f"be at most the {choice} experts to choose from")


@dataclass(frozen=True)
class MlaConfig:
    """The sizes of multi-head latent attention, which computes queries, keys and values from latents."""

    q_lora_rank: int | None  # None: queries are computed from the hidden state.
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder of attention and MLP blocks; the defaults are Llama's.

    With `mla`, every query head has its own keys and values, and `head_dim` is that of queries and keys.
    """

    interleaves: ClassVar[bool] = False
    """Whether the engine runs several chunks of the model on a pipeline stage (ParallelStrategy.vp)."""

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
    norm_offset: float = 0.0  # Added to the norms' weights (Gemma stores the weights minus 1).
    qk_norm: Literal["head", "all"] | None = None  # Normalise queries and keys by head, or all heads at once.
    qkv_bias: bool = False
    out_bias: bool = False  # The attention's output projection has a bias.
    mlp_bias: bool = False
    activation: str = "silu"
    gated: bool = True  # The MLP has a gate beside its up-projection.
    positions: Literal["rope", "learned"] = "rope"
    num_positions: int | None = None  # Rows of the table of learned positions; None: there is no table.
    rope_layers: tuple[bool, ...] = ()  # Whether each layer rotates queries and keys; empty: all do.
    rope_interleaved: bool = False  # Rotate dims 2i and 2i + 1 together; otherwise i and i + half.
    windows: tuple[int | None, ...] = ()  # Per layer, how many tokens a token sees, itself included.
    attention_scale: float | None = None  # Multiplies query times key; None: head_dim ** -0.5.
    attention_softcap: float | None = None  # Attention scores x become c * tanh(x / c).
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # Multiplies the outputs of attention and MLP before the residual sum.
    logit_scale: float = 1.0
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    hf: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)  # config.json as read.
    generation: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """generation_config.json as read."""

    def __post_init__(self) -> None:
        if self.head not in HEADS:
            raise ValueError(f"head is {shown(self.head)}: legal are {', '.join(HEADS)}")
        for name in ("vocab_size", "head_dim"):  # Readers of config.json check the other sizes.
            value = getattr(self, name)
            require(is_whole(value), name, shown(value), "be a whole number of at least 1")
            require(value <= MAX_SIZE, name, value, f"be at most {MAX_SIZE}")
        if self.moe is not None and self.num_layers * self.moe.num_experts > MAX_EXPERTS:
            layers = f"{self.num_layers} layers of {self.moe.num_experts} experts"
            raise ValueError(f"the model has {layers}: they must have at most {MAX_EXPERTS} experts in all")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is no multiple of "
                f"num_key_value_heads {self.num_kv_heads}")
        if self.activation not in ACTIVATION_NAMES:
            key = {**COMMON, **self.describes.reads}["activation"]
            raise ValueError(f"{key} is {self.activation!r}; supported are {', '.join(ACTIVATION_NAMES)}")
        for name in ("windows", "rope_layers"):
            if (by_layer := getattr(self, name)) and len(by_layer) != self.num_layers:
                what = "layer_types" if name == "windows" else "no_rope_layers"
                layers = f"the model has {self.num_layers} layers"
                raise ValueError(f"{what} has {len(by_layer)} entries; {layers}")

    @classmethod
    def from_hf(cls, hf: Hf, *, head: str | None = None, generation: Hf | None = None) -> "ModelConfig":
        """Build the config from the fields of a config.json; `head` overrides the head in `architectures`.

        Raises ValueError about fields that are missing, not legal or not supported.
        """
        architecture = (CheckedFields(hf).get("architectures") or ["(none)"])[0]
        if architecture not in _ARCHITECTURES:
            prefixes = ", ".join(family.prefix for family in FAMILIES.values())
            raise ValueError(
                f"architectures is {shown(architecture)}: supported are the causal and sequence "
                f"classification models of {prefixes}; docs/models.md shows how to add one, and "
                "engine transformers (--actor.engine transformers) takes those of other families as they are")
        name, own_head = _ARCHITECTURES[architecture]
        family = FAMILIES[name]
        full = CheckedFields({**COMMON_DEFAULTS, **family.defaults, **hf})
        for key, legal in family.only.items():
            if (value := hf.get(key)) not in (None, legal):
                raise ValueError(f"{key} is {_json(value)}; supported is {_json(legal)}")
        check_eos(full, generation)
        for key in ("initializer_range", "max_position_embeddings", _ORIGINAL_LENGTH):
            full.get(key)
        if other := [kind for kind in full.get("layer_types") or () if kind not in LAYER_TYPES]:
            raise ValueError(f"layer_types has {_json(other[0])}: legal are {' and '.join(LAYER_TYPES)}")
        try:
            config = cls(
                family=name, head=head or own_head, hf=dict(hf), generation=dict(generation or {}),
                mla=_latent_attention(full) if "kv_a" in family.names else None,
                moe=MoeConfig(**_read(family.moe, full)) if family.moe else None,
                **{**_read({**COMMON, **family.reads}, full), **family.sets},
            )
        except KeyError as error:
            raise ValueError(f"{error.args[0]} is missing") from error
        except (TypeError, ZeroDivisionError) as error:  # A reader computed with text, or divided by 0.
            raise ValueError(f"a field has the wrong type: {error}") from error
        if config.positions == "rope":
            for kind, rope in config.rope_kinds().items():
                _check_rope(config, rope, f"rope_parameters.{kind}" if kind else "rope_parameters")
        return config

    @classmethod
    def load(cls, name: str, *, head: str | None = None) -> "ModelConfig":
        """Load from a model directory, a config.json, a shipped name or a name on the hub.

        ValueErrors name file and field.
        """
        path = resolve(name, kind="models", suffix=".json")
        if path.is_file() and path.suffix != ".json":
            raise ValueError(f"model {name}: {_other_file(path)}")
        path = path / "config.json" if path.is_dir() else path
        if not path.exists():
            refuse_adapters(path.parent)
            raise ValueError(f"model {name}: there is no {path}{_other_directory(path.parent)}")
        _refuse_run(path.parent)
        generation = None
        beside = path.parent / "generation_config.json"
        if path.name == "config.json" and beside.exists():
            generation = read_object(beside)
        hf = read_object(path, what="model config")
        try:
            return cls.from_hf(hf, head=head, generation=generation)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"model config {path}: {error}") from error

    def to_hf(self) -> dict[str, Any]:
        """Return the config.json of an exported model. Raises ValueError if there is no class for it."""
        architecture = self.describes.architecture(self.head)
        if architecture is None:
            raise ValueError(
                f"transformers has no sequence classification model of {self.describes.prefix}, as which a "
                "model with a score head is exported: take one of another family")
        return labelled({**self.hf, "architectures": [architecture], "model_type": self.family}, self.head)

    @property
    def context_tokens(self) -> int | None:
        """Most tokens of a sequence for which the model was made, as far as its config says."""
        limit = self.hf.get("max_position_embeddings")
        return self.num_positions or (limit if isinstance(limit, int) else None)

    @property
    def hf_dtype(self) -> Any:
        """Return the dtype that config.json names, such as "bfloat16"; None if it names none.

        The config of a model that also reads images may name it for the text model only.
        """
        text = self.hf.get("text_config")
        for fields_ in (self.hf, text if isinstance(text, Mapping) else {}):
            for key in ("dtype", "torch_dtype"):
                if (name := fields_.get(key)) is not None:
                    return name.removeprefix("torch.") if isinstance(name, str) else name
        return None

    @property
    def describes(self) -> Family:
        """Return the family's entry in the table."""
        return FAMILIES[self.family]

    @property
    def read_keys(self) -> frozenset[str]:
        """Return the keys of config.json that matter for a model of this family."""
        family = self.describes
        readers = {**COMMON, **family.reads, **family.moe}.values()
        named = {*COMMON_DEFAULTS, *family.defaults, *family.only, *_READ_OF_ALL}
        return frozenset(named | {reader for reader in readers if isinstance(reader, str)})

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a response, from generation_config.json if it names any."""
        eos = self.generation.get("eos_token_id")
        eos = self.hf.get("eos_token_id") if eos is None else eos
        return () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)

    def has_experts(self, layer: int) -> bool:
        """Return whether this layer has routed experts instead of an MLP."""
        return self.moe is not None and layer >= self.moe.num_dense_layers

    @property
    def tied(self) -> bool:
        """Return whether the output head is the embedding itself."""
        return self.tie_word_embeddings and self.head == "lm"

    def can_share_prefixes(self, longest: int) -> bool:
        """Return whether what sequences of up to so many tokens begin with can pass once for all of them.

        Routers weigh the copies of a token, and soft caps, windows and latents have no kernels for it.
        """
        plain = all(window is None or window >= longest for window in self.windows)
        return plain and self.attention_softcap is None and self.mla is None and self.moe is None

    def window(self, layer: int) -> int | None:
        """Return how many tokens a token sees in this layer, itself included; None: all before it."""
        return self.windows[layer] if self.windows else None

    def rope_kinds(self) -> dict[str, dict[str, Any]]:
        """Return layer type ("full_attention") -> rotary parameters; under "" if all layers share them."""
        hf = CheckedFields({**COMMON_DEFAULTS, **self.describes.defaults, **self.hf})
        parameters = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
        common = {"partial_rotary_factor": hf["partial_rotary_factor"]}
        thetas = {"sliding_attention": hf.get("rope_local_base_freq", hf["rope_theta"])}
        if not any(key in LAYER_TYPES or isinstance(rope, Mapping) for key, rope in parameters.items()):
            rope = {**common, "rope_theta": hf["rope_theta"], **parameters}
            rope["rope_type"] = self._rope_type(parameters)
            if "rope_local_base_freq" not in hf:
                return {"": rope}
            local = {**common, "rope_type": "default", "rope_theta": thetas["sliding_attention"]}
            return {"full_attention": rope, "sliding_attention": local}
        kinds: dict[str, dict[str, Any]] = {}
        for kind in sorted({LAYER_TYPES[self.window(layer) is not None] for layer in range(self.num_layers)}):
            of_kind = parameters.get(kind)
            if not isinstance(of_kind, Mapping):
                raise ValueError(f"rope_parameters.{kind} is {_json(of_kind)}: it must be an object")
            theta = thetas.get(kind, hf["rope_theta"])
            kinds[kind] = {**common, "rope_theta": theta, **of_kind, "rope_type": self._rope_type(of_kind)}
        return kinds

    def _rope_type(self, rope: Mapping[str, Any]) -> Any:
        kind = rope.get("rope_type", rope.get("type", "default"))
        return "longrope" if kind == "su" or (kind == "yarn" and self.family == "phi3") else kind

    def check_layout(self, layout: Layout) -> None:
        """Raise ValueError if the model cannot be split this way."""
        s = layout.strategy
        heads, kv_heads = self.num_heads, self.num_kv_heads
        width = min(self._mlp_widths())
        num_experts = self.moe.num_experts if self.moe else 1
        for refused, why in (
            (s.pp > self.num_layers, f"pp={s.pp} exceeds the model's {self.num_layers} layers"),
            (heads % s.tp, f"tp={s.tp} does not divide the model's {heads} attention heads"),
            (kv_heads % s.tp and s.tp % kv_heads,
             f"tp={s.tp} neither divides nor is a multiple of the {kv_heads} kv heads"),
            (s.tp > self.vocab_size, f"tp={s.tp} exceeds the vocabulary {self.vocab_size}"),
            (s.tp > width, f"tp={s.tp} exceeds the MLP width {width}"),
            (heads % (s.tp * s.cp),
             f"tp*cp={s.tp * s.cp} does not divide the model's {heads} attention heads"),
            (s.ep > 1 and not self.moe, f"ep={s.ep} is not supported for {self.family} models; use ep=1"),
            (s.ep > num_experts, f"ep={s.ep} exceeds the model's {num_experts} experts"),
            (s.vp > 1 and not self.interleaves, f"vp={s.vp}: only the megatron engine interleaves chunks"),
        ):
            if refused:
                raise ValueError(f"layout {layout}: {why}")

    def check_generation_layout(self, layout: Layout) -> None:
        """Raise ValueError if the engine that generates with the model cannot split it this way."""
        self.check_layout(layout)

    def _mlp_widths(self) -> tuple[int, ...]:
        if self.moe is None:
            return (self.intermediate_size,)
        dense = self.intermediate_size if self.moe.num_dense_layers else 0
        return tuple(filter(None, (dense, self.moe.expert_width, self.moe.shared_width)))


def refuse_adapters(directory: Path) -> None:
    """Raise ValueError if the directory has LoRA adapters saved by PEFT instead of a model."""
    if (file := directory / "adapter_config.json").is_file():
        try:
            base = read_object(file).get("base_model_name_or_path")
        except ValueError:
            base = None
        raise ValueError(
            f"{directory} holds LoRA adapters of {base or 'another model'}, and no model: give that as the "
            f"model and set lora.adapter to {directory}, or merge the two and give the result")


def _other_file(path: Path) -> str:
    """Return in words why a file is no model, and what to give instead."""
    if path.suffix == ".gguf":
        return (
            f"{path.name} is a GGUF file, and a model is a directory with config.json, safetensors and a "
            f"tokenizer: transformers converts it, as examples/smollm2.py does (read it with "
            f"from_pretrained({str(path.parent)!r}, gguf_file={path.name!r}), load its state_dict into a new "
            "model of its config, and save that and the tokenizer with save_pretrained)")
    beside = path.parent / "config.json"
    instead = f"{path.parent}" if beside.is_file() else "the directory with its config.json and tokenizer"
    return f"{path.name} is a file of its own: give {instead}"


def _other_directory(directory: Path) -> str:
    """Return in words what a directory without config.json has instead; an empty string if it is unknown."""
    if files := sorted(directory.glob("*.gguf")):
        return f": {_other_file(files[0])}"
    if manifests := [*directory.glob("manifest.json"), *directory.glob("step_*/manifest.json")]:
        run = manifests[0].parents[2]
        return f": this is a checkpoint of the run {run}, and {_exported(run)}"
    if inner := sorted(path.parent for path in directory.glob("*/config.json"))[:3]:
        return f" (did you mean {' or '.join(map(str, inner))}?)"
    return ", which every Hugging Face model directory has"


def check_eos(hf: Hf, generation: Hf | None) -> None:
    """Raise ValueError about illegal tokens that end a response, in config.json or generation_config.json."""
    CheckedFields(hf).get("eos_token_id")
    try:
        CheckedFields(generation or {}).get("eos_token_id")
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from error


def _latent_attention(hf: Hf) -> MlaConfig:
    return MlaConfig(**{size.name: hf[size.name] for size in fields(MlaConfig)})


def _refuse_run(directory: Path) -> None:
    """Raise ValueError if the directory is that of a run, and name the model that the run has exported."""
    if (directory / "metrics.jsonl").is_file():
        raise ValueError(f"{directory} is the directory of a run, and {_exported(directory)}")


def _exported(run: Path) -> str:
    """Return in words where the model is that a run has exported."""
    exported = sorted(run.glob("hf/step_*"), key=lambda path: int(path.name.removeprefix("step_")))
    if exported:
        return f"its model is {exported[-1]}"
    return "it has exported no model yet, which happens after the last step and every `export_every` steps"


def _read(readers: Mapping[str, Reader], hf: Hf) -> dict[str, Any]:
    return {name: hf[reader] if isinstance(reader, str) else reader(hf) for name, reader in readers.items()}


def _check_rope(config: ModelConfig, rope: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if `nn` cannot compute these rotary parameters; `where` is their field."""
    kind = rope["rope_type"]
    share = rope["partial_rotary_factor"]
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
    half = (int(head_dim * share) + 1) // 2  # An odd number of dims is rounded up, as in transformers.
    if not 0 < 2 * half <= head_dim:
        raise ValueError(
            f"{where}: partial_rotary_factor {share} of {head_dim} dims per head: "
            "an even number of dims, at most all, must turn")
    for key in lists:
        factors = rope[key]
        if not isinstance(factors, list) or len(factors) != half or not all(map(is_positive, factors)):
            raise ValueError(f"{where}: {key} must be a list of {half} numbers above 0, one per pair of dims")


def _json(value: Any) -> str:
    return "not set" if value is None else cut(json.dumps(value))


def labelled(hf: dict[str, Any], head: str) -> dict[str, Any]:
    """Return the config.json, with a single label if the head computes scores."""
    if head == "score":
        hf = hf | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        hf.pop("num_labels", None)
    return hf


@dataclass(frozen=True)
class TransformersConfig(ModelConfig):
    """The config of a role whose engine is transformers, which builds the model from `hf`.

    The sizes serve the planner only. They come from the family's table if it has one; otherwise they are
    estimated as those of a dense decoder, from the usual fields.
    """

    unplannable: str = ""  # The reason why the sizes cannot be used, if they cannot.
    has_table: bool = False
    architecture: str = ""  # The name of the model's class, once the model has been built.

    @classmethod
    def from_hf(
        cls, hf: Hf, *, head: str | None = None, generation: Hf | None = None
    ) -> "TransformersConfig":
        family = hf.get("model_type")
        if not isinstance(family, str):
            raise ValueError("model_type is missing: it tells transformers which class to take")
        if "quantization_config" in hf:
            raise ValueError("the checkpoint is quantised (quantization_config): dequantise it first")
        check_eos(hf, generation)
        check_sizes(hf)
        read: dict[str, Any] = {"head": head or "lm", "hf": dict(hf), "generation": dict(generation or {})}
        try:
            name = FAMILIES[family].architecture("lm")
            native = ModelConfig.from_hf({**hf, "architectures": [name]}, head=head, generation=generation)
        except (KeyError, ValueError):
            sizes, unplannable = _estimate(hf)
            return cls(family, unplannable=unplannable, **read, **sizes)
        sizes = {field.name: getattr(native, field.name) for field in fields(native)}
        return cls(**{**sizes, **read}, has_table=True)

    def to_hf(self) -> dict[str, Any]:
        assert self.architecture, "only a class that was made is exported"
        return labelled(dict(self.hf) | {"architectures": [self.architecture]}, self.head)

    @property
    def describes(self) -> Family:
        return FAMILIES[self.family] if self.has_table else Family(self.family)

    def check_layout(self, layout: Layout) -> None:
        if layout.strategy.num_ranks != layout.dp or layout.ep > 1:
            raise ValueError(
                f"layout {layout}: the transformers engine has whole replicas only, "
                f"as in d{len(layout.ranks)}@{layout.mesh}; use engine native for other layouts")


@dataclass(frozen=True)
class ModuleConfig(ModelConfig):
    """The config of a role whose model is any module: how it is made, in the place of a decoder's sizes."""

    module: Callable[..., Any] = field(default=dict, compare=False, repr=False)
    name: str = ""  # The module's qualified name.
    arguments: str = "{}"  # As JSON.
    draw: int = 0

    @classmethod
    def of(cls, module: Callable[..., Any], arguments: Mapping[str, Any], *, draw: int = 0) -> "ModuleConfig":
        """Return the config. Raises ValueError unless the module can be called and the arguments are JSON."""
        if not callable(module):
            raise ValueError(f"module is {shown(module)}: it must be a class of modules, or return one")
        name = f"{module.__module__}.{module.__qualname__}" if hasattr(module, "__qualname__") else ""
        if not name or "<lambda>" in name:  # Two of them could not be told apart.
            raise ValueError(
                f"module is {shown(module)}: it must have a name of its own; give what it takes as arguments")
        try:
            given = json.dumps(dict(arguments), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise ValueError(f"arguments must be JSON values by name: {error}") from error
        return cls(
            "module", vocab_size=1, hidden_size=1, intermediate_size=1, num_layers=1, num_heads=1,
            num_kv_heads=1, head_dim=1, module=module, name=name, arguments=given, draw=draw)

    def to_hf(self) -> dict[str, Any]:
        return {"module": self.name, "arguments": json.loads(self.arguments), "draw": self.draw}

    @property
    def describes(self) -> Family:
        return Family(self.family)

    def check_layout(self, layout: Layout) -> None:
        if layout.strategy.num_ranks != layout.dp or layout.ep > 1:
            raise ValueError(
                f"layout {layout}: a module is in whole replicas only, "
                f"as in d{len(layout.ranks)}@{layout.mesh}")

    def check_generation_layout(self, layout: Layout) -> None:
        raise ValueError("a module does not generate tokens: ask it in a forward call (HostFunction.asks)")


def _estimate(hf: Hf) -> tuple[dict[str, Any], str]:
    """Return fields of ModelConfig, and the reason why the planner cannot use them, if it cannot."""
    if isinstance(text := hf.get("text_config"), Mapping):
        return _estimate({**text, "text_config": None})[0], "it has more than a text model (text_config)"
    counts = {name: _first(hf, keys) for name, keys in _SIZE_KEYS.items()}
    why = next((f"config.json has no {_SIZE_KEYS[name][0]}" for name, n in counts.items() if n is None), "")
    if why:
        counts = dict.fromkeys(_SIZE_KEYS, 1)
    elif experts := [key for key in _EXPERTS if is_whole(hf.get(key), least=2)]:
        why = f"it has experts ({experts[0]}), and its family no table"
    hidden = counts["hidden_size"] or 1
    heads = counts["num_heads"] or 1
    act = hf.get("hidden_act") or hf.get("activation_function") or hf.get("activation") or "gelu"
    kv_heads = 1 if hf.get("multi_query") else _first(hf, ("num_key_value_heads", "num_kv_heads"))
    sizes: dict[str, Any] = {
        **counts, "vocab_size": hf.get("vocab_size"),
        "head_dim": _first(hf, ("head_dim",)) or max(1, hidden // heads),
        "num_kv_heads": kv_heads if kv_heads and heads % kv_heads == 0 else heads,
        "intermediate_size": _first(hf, _WIDTHS) or 4 * hidden,
        "activation": act if act in ACTIVATION_NAMES else "gelu", "gated": act in ("silu", "swish"),
        "tie_word_embeddings": hf.get("tie_word_embeddings") is True,
    }
    return sizes, why


def _first(hf: Hf, keys: tuple[str, ...]) -> int | None:
    return next((hf[key] for key in keys if is_whole(hf.get(key))), None)


@dataclass(frozen=True)
class MegatronConfig(ModelConfig):
    """The config of a model that the megatron engine trains; the native engine generates from a copy."""

    interleaves: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, hf: Hf, *, head: str | None = None, generation: Hf | None = None) -> "MegatronConfig":
        config = super().from_hf(hf, head=head, generation=generation)
        assert isinstance(config, cls)
        if what := config._refused():
            raise ValueError(f"the megatron engine does not have {what}: {_USE_NATIVE}")
        return config

    def _refused(self) -> str:
        """Return the first feature of the model that the engine lacks, or an empty string."""
        names = self.describes.names
        biases = {self.out_bias, self.mlp_bias}
        moe = self.moe
        for refused, what in (
            (self.mla is not None, "multi-head latent attention"),
            (self.attention_softcap is not None, "soft caps of attention scores"),
            (self.positions != "rope", "learned positions, as micro-batches are padded"),
            (self.qk_norm == "all", "norms over all queries or keys at once"),
            ("attn_out_norm" in names or "mlp_out_norm" in names, "norms after attention or MLP"),
            ("attn_norm" not in names or "mlp_norm" not in names, "layers without norms before both parts"),
            (self.residual_scale != 1, "a residual multiplier"),
            (self.norm_offset not in (0, 1), f"an offset {self.norm_offset} of norms"),
            (len(biases) > 1 or (self.out_bias and not self.qkv_bias), "biases in some linear layers only"),
            (moe is not None and moe.scores != "softmax", "routers with sigmoid scores"),
            (moe is not None and moe.router_bias, "routers with a bias"),
            (moe is not None and moe.scale != 1, "routers with a scaling factor"),
            (moe is not None and moe.num_groups > 1, "routers that choose among groups of experts"),
            (moe is not None and self.mlp_bias, "experts beside biases"),
        ):
            if refused:
                return what
        return ""

    def native(self) -> ModelConfig:
        return ModelConfig(**{field.name: getattr(self, field.name) for field in fields(ModelConfig)})

    def check_layout(self, layout: Layout) -> None:
        super().check_layout(layout)
        s = layout.strategy
        moe = self.moe
        num_virtual = s.pp * s.vp
        for refused, why in (
            (s.cp > 1, f"cp={s.cp}: the megatron engine has no context parallelism"),
            (self.num_kv_heads % s.tp, f"tp={s.tp} does not divide the {self.num_kv_heads} kv heads"),
            (any(width % s.tp for width in self._mlp_widths()), f"tp={s.tp} does not divide the MLP's width"),
            (self.num_layers % num_virtual,
             f"{'pp*vp' if s.vp > 1 else 'pp'}={num_virtual} does not divide the {self.num_layers} layers"),
            (moe is not None and moe.num_experts % s.ep, f"ep={s.ep} does not divide the experts"),
            (list(layout.ranks) != sorted(layout.ranks), "the megatron engine needs rising ranks"),
        ):
            if refused:
                raise ValueError(f"layout {layout}: {why}; {_USE_NATIVE}, or another layout")

    def check_generation_layout(self, layout: Layout) -> None:
        """Raise ValueError if the native engine, which generates, cannot split the model this way."""
        self.native().check_layout(layout)


def check_megatron_installed() -> None:
    """Raise ValueError unless the right version of Megatron-Core is installed."""
    mend = "pip install 'realhf[megatron]'"
    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        raise ValueError(f"engine is megatron, which is not installed: {mend}") from None
    if installed != MEGATRON_VERSION:
        need = f"engine is megatron, for megatron-core {MEGATRON_VERSION}"
        raise ValueError(f"{need}, and {installed} is installed: {mend}")
