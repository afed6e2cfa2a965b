"""LoRA (Hu et al. 2021, arXiv:2106.09685): settings, and the parameter table of a model's adapters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import InFile, ModelSpec, ParamSpec, model_spec
from realhf.user_input.field_types import check_types, is_positive, is_whole, require

PREFIX = "base_model.model."
"""PEFT puts this before the names of parameters."""
_ATTENTION = {f"{module}.weight" for module in ("q", "k", "v", "o", "q_a", "q_b", "kv_a", "kv_b")}
_MLP = {f"{prefix}{module}.weight" for prefix in ("", "shared_") for module in ("gate", "up", "down")}


@dataclass(frozen=True)
class LoraConfig:
    """Settings of adapters: y = x W^T + alpha / rank * (x A^T) B^T, where only A and B are trained.

    There is no dropout. A score head (critics, reward models) is trained in full, along with the adapters.
    """

    rank: int = 16  # Rows of A, and columns of B.
    alpha: float = 32.0  # The adapters' share of y is scaled by alpha / rank.
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers of the blocks, by the last part of their names in checkpoints, such as q_proj."""
    use_rslora: bool = False  # Scale by alpha / sqrt(rank) instead (Kalajdzievski 2023).
    merge: bool = False  # Generate with W + scale B A, in memory of its own.
    adapter: str | None = None
    """PEFT directory, or the hub's `org/name`, to start from; its rank, alpha, targets and rslora apply."""
    export_merged: bool = False  # Export whole models with the adapters merged in, not PEFT directories.

    def __post_init__(self) -> None:
        check_types(self, "lora.")
        require(is_whole(self.rank), "lora.rank", self.rank, "be a whole number of at least 1")
        require(is_positive(self.alpha), "lora.alpha", self.alpha, "be a number above 0")
        targets: Any = self.target_modules
        names = (targets,) if isinstance(targets, str) else tuple(targets)
        if not all(names) or not names:
            raise ValueError("lora.target_modules is empty: name linear layers, or all-linear")
        object.__setattr__(self, "target_modules", targets if targets == "all-linear" else names)

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def all_linear(self) -> bool:
        return self.target_modules in ("all-linear", ("all-linear",))


def adapter_spec(config: ModelConfig, lora: LoraConfig) -> ModelSpec:
    """Return the parameter table of a model's adapters, under PEFT's names: for each layer all A, then all B.

    If a linear layer's rows are split over tp, B is split like them and every tp rank has the whole A. If its
    columns are split, A is split like them and every tp rank has the whole B. Linear layers that a checkpoint
    stores in one tensor have one A. Raises ValueError about target modules that do not exist, and about a
    rank that a layer cannot use.
    """
    weights = model_spec(config).params
    linear = _linear_layers(config)
    _check_targets(config, lora, linear, weights)
    targets = [p for p in linear if lora.all_linear or any(_is_named(n, p) for n in lora.target_modules)]
    if lora.adapter is None:  # Existing adapters may have a higher rank.
        _check_rank(lora, targets)
    params: list[ParamSpec] = []
    for layer in range(config.num_layers):
        mine = [p for p in targets if p.layer == layer]
        if not mine:
            raise ValueError(f"lora.target_modules: none of them is in layer {layer}")
        modules = {_module(p): p for p in reversed(mine)}  # Module in the checkpoint -> its first weight.
        params += [_factor(p, "lora_A", lora.rank) for p in reversed(modules.values())]
        params += [_factor(p, "lora_B", lora.rank) for p in mine]
    if config.head == "score":
        name = f"{PREFIX}score.weight"
        params.append(ParamSpec(
            name, (1, config.hidden_size), None, short_name="score.weight", in_file=InFile(name)))
    return ModelSpec(config, tuple(params))


def legal_targets(config: ModelConfig) -> list[str]:
    """Return the last parts of the names of the linear layers that can have adapters."""
    return list(dict.fromkeys(_module(p).rpartition(".")[2] for p in _linear_layers(config)))


def _linear_layers(config: ModelConfig) -> list[ParamSpec]:
    """Return the weights that can have adapters.

    DeepSeek's MLPs cannot, because PEFT would take their names for those of its routed experts.
    """
    names = _ATTENTION if config.family == "deepseek_v3" else _ATTENTION | _MLP
    return [p for p in model_spec(config).params if p.short_name in names]


def _module(param: ParamSpec) -> str:
    return param.in_file.name.removesuffix(".weight")


def _is_named(name: str, param: ParamSpec) -> bool:
    return f".{_module(param)}".endswith(f".{name}")


def _check_targets(
    config: ModelConfig, lora: LoraConfig, linear: Sequence[ParamSpec], weights: Sequence[ParamSpec]
) -> None:
    for name in () if lora.all_linear else lora.target_modules:
        if any(_is_named(name, p) for p in linear):
            continue
        routed = [p for p in weights if p.expert is not None or "router." in p.short_name]
        is_routed = any(_is_named(name, p) for p in routed)
        why = "routed experts and routers cannot be targeted; " if is_routed else ""
        raise ValueError(
            f"lora.target_modules has {name!r}: {why}legal are {', '.join(legal_targets(config))}, "
            "or all-linear")


def _check_rank(lora: LoraConfig, targets: Sequence[ParamSpec]) -> None:
    """Raise ValueError if the rank exceeds the smaller dim of a layer, at which B A can be any matrix."""
    rows: dict[str, int] = {}  # Linear layers in one tensor count together.
    columns: dict[str, int] = {}
    for p in targets:
        module = _module(p)
        rows[module] = rows.get(module, 0) + p.shape[0]
        columns[module] = p.shape[1]
    most, module = min(((min(rows[name], columns[name]), name) for name in rows), default=(lora.rank, ""))
    layer = module.rpartition(".")[2]
    require(lora.rank <= most, "lora.rank", lora.rank, f"be at most {most}, the smaller dim of {layer}")


def _factor(p: ParamSpec, kind: Literal["lora_A", "lora_B"], rank: int) -> ParamSpec:
    """Return the A or the B of a linear layer.

    Linear layers in one tensor have one A: `p` is then the first of them.
    """
    is_down = kind == "lora_A"
    file = f"{PREFIX}{_module(p)}.{kind}.weight"
    suffix = "" if is_down else p.name.removeprefix(p.in_file.name)
    shape = (rank, p.shape[1]) if is_down else (p.shape[0], rank)
    dim = 1 if is_down else 0  # The dim that it shares with the weight.
    is_split = p.split_dim == dim
    return ParamSpec(
        file + suffix, shape, p.layer, dim if is_split else None, p.num_units if is_split else 1,
        short_name=p.short_name.replace(".weight", f".{kind}"), partial=p.split_dim == 1 - dim,
        in_file=InFile(file, 0 if is_down else p.in_file.start),
    )
