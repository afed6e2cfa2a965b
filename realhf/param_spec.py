"""The keystone: every parameter of a model with its global shape, pipeline stage and tensor-parallel split.

Parameters go by their Hugging Face names and a rank holds a box (Region) of each. `nn` builds from this
table, weights are loaded and saved by it, `realloc` schedules from it and the planner sizes with it. Nobody
else knows how a tensor is split.
"""

import math
from dataclasses import dataclass

from realhf.layout import Coordinate, Layout, ParallelStrategy, even_split
from realhf.model_config import ModelConfig

Region = tuple[tuple[int, int], ...]
"""A box of a tensor: one half-open index range per dim."""


def region_size(region: Region) -> int:
    """Number of elements in a region."""
    return math.prod(stop - start for start, stop in region)


def region_slices(region: Region) -> tuple[slice, ...]:
    """The region as an index into the whole tensor."""
    return tuple(slice(start, stop) for start, stop in region)


def intersect(a: Region, b: Region) -> Region | None:
    """The box that two regions share; None when they share no element."""
    box = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, of decoder layer `layer`: -1 for the embedding, None for what follows the last layer.

    `split_dim` is cut over tp in `num_units` indivisible units (attention heads, or single rows or columns);
    with fewer units than tp ranks, neighbours hold the same unit and each computes a part of its gradient.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    split_dim: int | None = None
    num_units: int = 1
    tied_to_head: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def _units(self, tp: int, index: int) -> tuple[int, int]:
        if tp <= self.num_units:
            return even_split(self.num_units, tp, index)
        unit = index * self.num_units // tp
        return unit, unit + 1

    def region(self, tp: int, index: int) -> Region:
        """What tensor-parallel rank `index` of `tp` holds, on a stage that has the parameter."""
        box = [(0, size) for size in self.shape]
        if self.split_dim is not None:
            first, last = self._units(tp, index)
            unit = self.shape[self.split_dim] // self.num_units
            box[self.split_dim] = (first * unit, last * unit)
        return tuple(box)

    def stages(self, num_layers: int, pp: int) -> tuple[int, ...]:
        """The pipeline stages that hold it: one, or first and last for an embedding that is also the head."""
        if self.layer is None:
            return (pp - 1,)
        if self.layer < 0:
            return (0, pp - 1) if self.tied_to_head and pp > 1 else (0,)
        return (next(s for s in range(pp) if self.layer < even_split(num_layers, pp, s)[1]),)

    def sharers(self, tp: int, index: int) -> tuple[int, ...]:
        """Tensor-parallel ranks that hold the same region as rank `index`."""
        if self.split_dim is None:
            return tuple(range(tp))
        mine = self._units(tp, index)
        return tuple(i for i in range(tp) if self._units(tp, i) == mine)

    def has_partial_gradient(self, tp: int) -> bool:
        """Whether ranks that share a region must add their gradients (else each has the whole gradient)."""
        return self.split_dim is not None and tp > self.num_units


@dataclass(frozen=True)
class ModelSpec:
    """The parameter table of a model, and who holds what under a layout."""

    config: ModelConfig
    params: tuple[ParamSpec, ...]

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    def stage_layers(self, strategy: ParallelStrategy, stage: int) -> range:
        return range(*even_split(self.config.num_layers, strategy.pp, stage))

    def held_by(self, layout: Layout, rank: int) -> dict[str, Region]:
        """Parameter name -> region on `rank`, in table order; empty for a rank outside the layout."""
        if rank not in layout:
            return {}
        at = layout.coordinate(rank)
        return {p.name: p.region(layout.tp, at.tp) for p in self.params if at.pp in self._stages(p, layout)}

    def is_primary(self, param: ParamSpec, layout: Layout, at: Coordinate) -> bool:
        """Whether sums over parameters count the region here: at one tp sharer and one stage, at every dp."""
        return at.pp == self._stages(param, layout)[0] and at.tp == param.sharers(layout.tp, at.tp)[0]

    def _stages(self, param: ParamSpec, layout: Layout) -> tuple[int, ...]:
        return param.stages(self.config.num_layers, layout.pp)


def model_spec(config: ModelConfig) -> ModelSpec:
    """The parameter table of a Llama- or Qwen2-style model under Hugging Face's names."""
    c = config
    hidden, q_rows, kv_rows = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    params = [ParamSpec("model.embed_tokens.weight", (c.vocab_size, hidden), -1, 0, c.vocab_size, c.tied)]
    for i in range(c.num_layers):
        at = f"model.layers.{i}"
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        qkv = [(f"{attn}.q_proj", q_rows, c.num_heads)]
        qkv += [(f"{attn}.{name}", kv_rows, c.num_kv_heads) for name in ("k_proj", "v_proj")]
        params.append(ParamSpec(f"{at}.input_layernorm.weight", (hidden,), i))
        params.extend(ParamSpec(f"{name}.weight", (rows, hidden), i, 0, heads) for name, rows, heads in qkv)
        if c.qkv_bias:
            params.extend(ParamSpec(f"{name}.bias", (rows,), i, 0, heads) for name, rows, heads in qkv)
        params.append(ParamSpec(f"{attn}.o_proj.weight", (hidden, q_rows), i, 1, c.num_heads))
        params.append(ParamSpec(f"{at}.post_attention_layernorm.weight", (hidden,), i))
        width = c.intermediate_size
        params.append(ParamSpec(f"{mlp}.gate_proj.weight", (width, hidden), i, 0, width))
        params.append(ParamSpec(f"{mlp}.up_proj.weight", (width, hidden), i, 0, width))
        params.append(ParamSpec(f"{mlp}.down_proj.weight", (hidden, width), i, 1, width))
    params.append(ParamSpec("model.norm.weight", (hidden,), None))
    if c.head == "score":
        params.append(ParamSpec("score.weight", (1, hidden), None))
    elif not c.tied:
        params.append(ParamSpec("lm_head.weight", (c.vocab_size, hidden), None, 0, c.vocab_size))
    return ModelSpec(config, tuple(params))
