"""The keystone: every parameter of a model with its global shape, pipeline stage and tensor-parallel split.

Parameters go by their Hugging Face names and a rank holds a box (Region) of each. `nn` builds by this table,
HF weights go in and out by it, `realloc` schedules by it. Nobody else knows how a tensor is split.
"""

import math
from dataclasses import dataclass

from realhf.layout import Coordinate, Layout, ParallelStrategy, even_split
from realhf.model_config import ModelConfig

Region = tuple[tuple[int, int], ...]  # A box of a tensor: one half-open index range per dim.


def region_size(region: Region) -> int:
    """Number of elements in a region."""
    return math.prod(stop - start for start, stop in region)


def region_slices(region: Region) -> tuple[slice, ...]:
    """The region as an index into the whole tensor."""
    return tuple(slice(start, stop) for start, stop in region)


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

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def region(self, tp: int, index: int) -> Region:
        """What tensor-parallel rank `index` of `tp` holds, on a stage that has the parameter."""
        box = [(0, size) for size in self.shape]
        if self.split_dim is not None:
            first, last = even_split(self.num_units, tp, index)
            unit = self.shape[self.split_dim] // self.num_units
            box[self.split_dim] = (first * unit, max(first + 1, last) * unit)
        return tuple(box)

    def sharers(self, tp: int, index: int) -> tuple[int, ...]:
        """Tensor-parallel ranks that hold the same region as rank `index`."""
        return tuple(i for i in range(tp) if self.region(tp, i) == self.region(tp, index))

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
        """The stages that hold a parameter: one, or first and last for an embedding that is also the head."""
        last = layout.pp - 1
        if param.layer is None:
            return (last,)
        if param.layer < 0:
            return (0, last) if self.config.tied and last else (0,)
        return (next(s for s in range(layout.pp) if param.layer in self.stage_layers(layout.strategy, s)),)


def model_spec(config: ModelConfig) -> ModelSpec:
    """The parameter table of a Llama- or Qwen2-style model under Hugging Face's names."""
    c, vocabulary, width, hidden = config, config.vocab_size, config.intermediate_size, config.hidden_size
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    params = [ParamSpec("model.embed_tokens.weight", (vocabulary, hidden), -1, 0, vocabulary)]
    for i in range(c.num_layers):
        at = f"model.layers.{i}"
        attn, mlp = f"{at}.self_attn", f"{at}.mlp"
        qkv = [(f"{attn}.q_proj", q_rows, c.num_heads)]
        qkv += [(f"{attn}.{name}", kv_rows, c.num_kv_heads) for name in ("k_proj", "v_proj")]
        params += [
            ParamSpec(f"{at}.input_layernorm.weight", (hidden,), i),
            *(ParamSpec(f"{name}.weight", (rows, hidden), i, 0, heads) for name, rows, heads in qkv),
            *(ParamSpec(f"{name}.bias", (rows,), i, 0, heads) for name, rows, heads in qkv if c.qkv_bias),
            ParamSpec(f"{attn}.o_proj.weight", (hidden, q_rows), i, 1, c.num_heads),
            ParamSpec(f"{at}.post_attention_layernorm.weight", (hidden,), i),
            ParamSpec(f"{mlp}.gate_proj.weight", (width, hidden), i, 0, width),
            ParamSpec(f"{mlp}.up_proj.weight", (width, hidden), i, 0, width),
            ParamSpec(f"{mlp}.down_proj.weight", (hidden, width), i, 1, width),
        ]
    params.append(ParamSpec("model.norm.weight", (hidden,), None))
    if c.head == "score":
        params.append(ParamSpec("score.weight", (1, hidden), None))
    elif not c.tied:
        params.append(ParamSpec("lm_head.weight", (vocabulary, hidden), None, 0, vocabulary))
    return ModelSpec(config, tuple(params))
