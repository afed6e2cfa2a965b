"""MegatronConfig: the config of a role that trains with Megatron-Core. It refuses what that engine lacks.

This module does not import Megatron-Core.
"""

from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar

from realhf.layout import Layout
from realhf.models.families import Hf
from realhf.models.model_config import ModelConfig

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
