"""The configs of models that other engines compute: transformers' own classes, and Megatron-Core.

Each refuses what its engine lacks. This module imports neither of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar

from realhf.layout import Layout
from realhf.models.families import FAMILIES, Family, Hf
from realhf.models.model_config import ACTIVATION_NAMES, ModelConfig, check_eos, labelled
from realhf.user_input.hf_fields import check_sizes, is_whole

_KEYS = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
}
"""The sizes that all dense decoders have -> the keys under which families store them."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WIDTHS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")


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


def _estimate(hf: Hf) -> tuple[dict[str, Any], str]:
    """Return fields of ModelConfig, and the reason why the planner cannot use them, if it cannot."""
    if isinstance(text := hf.get("text_config"), Mapping):
        return _estimate({**text, "text_config": None})[0], "it has more than a text model (text_config)"
    counts = {name: _first(hf, keys) for name, keys in _KEYS.items()}
    why = next((f"config.json has no {_KEYS[name][0]}" for name, n in counts.items() if n is None), "")
    if why:
        counts = dict.fromkeys(_KEYS, 1)
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


VERSION = "0.16.1"
"""The version of megatron-core whose classes and private names the engine uses."""
_NATIVE = "use engine native"


@dataclass(frozen=True)
class MegatronConfig(ModelConfig):
    """The config of a model that the megatron engine trains; the native engine generates from a copy."""

    interleaves: ClassVar[bool] = True

    @classmethod
    def from_hf(cls, hf: Hf, *, head: str | None = None, generation: Hf | None = None) -> "MegatronConfig":
        config = super().from_hf(hf, head=head, generation=generation)
        assert isinstance(config, cls)
        if what := config._refused():
            raise ValueError(f"the megatron engine does not have {what}: {_NATIVE}")
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
        """Return the config of the native engine, which generates with the model."""
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
                raise ValueError(f"layout {layout}: {why}; {_NATIVE}, or another layout")

    def check_generation_layout(self, layout: Layout) -> None:
        """Raise ValueError if the native engine, which generates, cannot split the model this way."""
        self.native().check_layout(layout)


def check_installed() -> None:
    """Raise ValueError unless the right version of Megatron-Core is installed."""
    mend = "pip install 'realhf[megatron]'"
    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        raise ValueError(f"engine is megatron, which is not installed: {mend}") from None
    if installed != VERSION:
        need = f"engine is megatron, for megatron-core {VERSION}"
        raise ValueError(f"{need}, and {installed} is installed: {mend}")
