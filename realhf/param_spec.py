"""The keystone: every parameter of a model with its global shape, pipeline stage and tensor-parallel split.

Parameters go by their Hugging Face names and a rank holds a box (Region) of each. `nn` builds by this table,
HF weights go in and out by it, `realloc` schedules by it. Nobody else knows how a tensor is split.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from realhf.layout import Coordinate, Layout, ParallelStrategy, even_part, even_split
from realhf.model_config import ModelConfig

Region = tuple[tuple[int, int], ...]  # A box of a tensor: one half-open index range per dim.
Placement = tuple[tuple[Region, tuple[int, ...]], ...]
"""Distinct regions of a parameter under a layout, by tp index, each with the sorted ranks that hold it."""
_BOTH_ENDS = -1  # The stage of an embedding that is also the head.


def region_size(region: Region) -> int:
    """Number of elements in a region."""
    return math.prod(stop - start for start, stop in region)


def region_slices(region: Region) -> tuple[slice, ...]:
    """The region as an index into the whole tensor."""
    return tuple(slice(start, stop) for start, stop in region)


def is_sharded(layout: Layout) -> bool:
    """Whether the optimizer's copy of a model that trains in this layout is spread over replicas (ZeRO-1)."""
    return layout.dp > 1


def shards_of_rows(regions: Mapping[str, Region], num_parts: int) -> list[dict[str, Region]]:
    """Regions that lie end to end, in parts as even as whole rows allow: name -> region, for each part."""
    stops = list(accumulate(map(region_size, regions.values())))
    names, starts = list(regions), [0, *stops]
    edges = [(0, 0)]  # (number of the parameter, row in it)
    for index in range(1, num_parts):
        position = starts[-1] * index // num_parts
        number = min(bisect_right(stops, position), len(names) - 1)
        (low, high), *rest = regions[names[number]]
        row = math.prod(b - a for a, b in rest)
        edges.append((number, min(high - low, round((position - starts[number]) / row))))
    edges.append((len(names), 0))
    parts: list[dict[str, Region]] = []
    for (first, begin), (last, end) in itertools.pairwise(edges):
        part: dict[str, Region] = {}
        for number in range(first, min(last + 1, len(names))):
            (low, high), *rest = regions[names[number]]
            rows = (low + begin if number == first else low, low + end if number == last else high)
            if rows[0] < rows[1]:
                part[names[number]] = (rows, *rest)
        parts.append(part)
    return parts


@dataclass(frozen=True)
class ParamSpec:
    """One parameter, of decoder layer `layer`: -1 for the embedding, None for what follows the last layer.

    `split_dim` is cut over tp in `num_units` indivisible units (attention heads, or single rows or columns);
    with fewer units than tp ranks, neighbours hold the same unit and each computes a part of its gradient.
    A parameter of expert `expert` is only where that expert is; experts are split evenly over ep.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    split_dim: int | None = None
    num_units: int = 1
    expert: int | None = None

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

    def held_by(self, layout: Layout, rank: int, *, sharded: bool = False) -> dict[str, Region]:
        """Parameter name -> region on `rank`, in table order; empty for a rank outside the layout.

        With `sharded`, of the optimizer's copy, of which every dp replica has a part (ZeRO-1).
        """
        if rank not in layout:
            return {}
        if sharded:
            at = layout.coordinate(rank)
            return shards_of_rows(self.held_by(layout, rank), layout.dp)[at.dp]
        at, (kinds, stages, owners) = layout.coordinate(rank), self._places(layout)
        on_stage = (stages == at.pp) | ((stages == _BOTH_ENDS) & (at.pp in (0, layout.pp - 1)))
        here = np.flatnonzero(on_stage & ((owners < 0) | (owners == at.dp % layout.ep)))
        regions: dict[int, Region] = {}
        for kind, first in zip(*np.unique(kinds[here], return_index=True), strict=True):
            regions[int(kind)] = self.params[here[first]].region(layout.tp, at.tp)
        held = zip(here.tolist(), kinds[here].tolist(), strict=True)
        return {self.params[i].name: regions[kind] for i, kind in held}

    def placements(self, layout: Layout, *, sharded: bool = False) -> list[Placement]:
        """The placement of every parameter, in table order; parameters placed alike share one object."""
        if sharded:
            return self._sharded_placements(layout)
        kinds, stages, owners = self._places(layout)
        keys = (kinds * (layout.pp + 1) + stages + 1) * (layout.ep + 1) + owners + 1
        _, firsts, groups = np.unique(keys, return_index=True, return_inverse=True)
        distinct = [
            _place(self.params[i], layout, stage, owner)
            for i, stage, owner in zip(firsts, stages[firsts].tolist(), owners[firsts].tolist(), strict=True)
        ]
        return [distinct[group] for group in groups.tolist()]

    def _sharded_placements(self, layout: Layout) -> list[Placement]:
        if layout.ep > 1:
            raise ValueError(f"layout {layout}: the optimizer is not sharded over ep; use ep=1")
        boxes: dict[str, dict[Region, list[int]]] = {param.name: {} for param in self.params}
        for stage, index in np.ndindex(layout.pp, layout.tp):
            ranks = layout.grid[stage, :, :, index]
            parts = shards_of_rows(self.held_by(layout, int(ranks[0, 0])), layout.dp)
            for part, replicas in zip(parts, ranks.tolist(), strict=True):
                for name, region in part.items():
                    boxes[name].setdefault(region, []).extend(replicas)
        found: dict[Placement, Placement] = {}
        made = (tuple((r, tuple(sorted(ranks))) for r, ranks in boxes[p.name].items()) for p in self.params)
        return [found.setdefault(placement, placement) for placement in made]

    def is_primary(self, param: ParamSpec, layout: Layout, at: Coordinate) -> bool:
        """Whether sums over parameters count the region here: at one tp sharer and one stage, at every dp."""
        stage = self._first_stage(param.layer, layout.pp)
        return at.pp == stage and at.tp == param.sharers(layout.tp, at.tp)[0]

    def _first_stage(self, layer: int | None, pp: int) -> int:
        return pp - 1 if layer is None else max(0, even_part(self.config.num_layers, pp, layer))

    @cached_property
    def _columns(self) -> np.ndarray:
        """Per parameter: number of its shape and split, layer (num_layers: past it), expert (-1: none)."""
        kinds: dict[tuple[object, ...], int] = {}
        rows = [
            (
                kinds.setdefault((p.shape, p.split_dim, p.num_units), len(kinds)),
                self.config.num_layers if p.layer is None else p.layer,
                -1 if p.expert is None else p.expert,
            )
            for p in self.params
        ]
        return np.array(rows).T

    def _places(self, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What decides placements. Per parameter: shape and split, stage, ep index (-1: at each)."""
        kinds, layers, experts = self._columns
        of_layer = [self._first_stage(i, layout.pp) for i in (*range(self.config.num_layers), None, -1)]
        if self.config.tied and layout.pp > 1:
            of_layer[-1] = _BOTH_ENDS
        num_experts = self.config.moe.num_experts if self.config.moe else 1
        of_expert = [even_part(num_experts, layout.ep, j) for j in range(num_experts)] + [-1]
        return kinds, np.array(of_layer)[layers], np.array(of_expert)[experts]


def _place(param: ParamSpec, layout: Layout, stage: int, owner: int) -> Placement:
    grid = layout.grid[[0, -1] if stage == _BOTH_ENDS else [stage]]
    grid = grid if owner < 0 else grid[:, owner :: layout.ep]
    holders: dict[Region, list[int]] = {}
    for index in range(layout.tp):
        holders.setdefault(param.region(layout.tp, index), []).extend(grid[..., index].ravel().tolist())
    return tuple((region, tuple(sorted(ranks))) for region, ranks in holders.items())


def model_spec(config: ModelConfig) -> ModelSpec:
    """The parameter table of a model under the names in its Hugging Face checkpoint."""
    c, vocabulary, hidden = config, config.vocab_size, config.hidden_size
    params = [ParamSpec("model.embed_tokens.weight", (vocabulary, hidden), -1, 0, vocabulary)]
    for i in range(c.num_layers):
        at = f"model.layers.{i}"
        params.append(ParamSpec(f"{at}.input_layernorm.weight", (hidden,), i))
        params += _latent_attention(c, i) if c.mla else _attention(c, i)
        params.append(ParamSpec(f"{at}.post_attention_layernorm.weight", (hidden,), i))
        routed = c.moe and i >= c.moe.num_dense_layers
        params += _experts(c, i) if routed else _mlp(c, f"{at}.mlp", c.intermediate_size, layer=i)
    params.append(ParamSpec("model.norm.weight", (hidden,), None))
    if c.head == "score":
        params.append(ParamSpec("score.weight", (1, hidden), None))
    elif not c.tied:
        params.append(ParamSpec("lm_head.weight", (vocabulary, hidden), None, 0, vocabulary))
    return ModelSpec(config, tuple(params))


def _attention(c: ModelConfig, layer: int) -> list[ParamSpec]:
    at, hidden = f"model.layers.{layer}.self_attn", c.hidden_size
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = [("q", q_rows, c.num_heads), ("k", kv_rows, c.num_kv_heads), ("v", kv_rows, c.num_kv_heads)]
    params = [ParamSpec(f"{at}.{x}_proj.weight", (rows, hidden), layer, 0, heads) for x, rows, heads in qkv]
    if c.qkv_bias:
        params += [ParamSpec(f"{at}.{x}_proj.bias", (rows,), layer, 0, heads) for x, rows, heads in qkv]
    if c.qk_norm:
        params += [ParamSpec(f"{at}.{x}_norm.weight", (c.head_dim,), layer) for x in "qk"]
    return [*params, ParamSpec(f"{at}.o_proj.weight", (hidden, q_rows), layer, 1, c.num_heads)]


def _latent_attention(c: ModelConfig, layer: int) -> list[ParamSpec]:
    """DeepSeek's: down-projections to the latents are on every tp rank, what makes heads of them is split."""
    assert c.mla is not None
    at, hidden, heads, mla = f"model.layers.{layer}.self_attn", c.hidden_size, c.num_heads, c.mla
    q_rank, kv_rank = mla.q_lora_rank, mla.kv_lora_rank
    q_rows, kv_rows = heads * c.head_dim, heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    if q_rank is None:
        params = [ParamSpec(f"{at}.q_proj.weight", (q_rows, hidden), layer, 0, heads)]
    else:
        params = [
            ParamSpec(f"{at}.q_a_proj.weight", (q_rank, hidden), layer),
            ParamSpec(f"{at}.q_a_layernorm.weight", (q_rank,), layer),
            ParamSpec(f"{at}.q_b_proj.weight", (q_rows, q_rank), layer, 0, heads),
        ]
    return [
        *params,
        ParamSpec(f"{at}.kv_a_proj_with_mqa.weight", (kv_rank + mla.qk_rope_head_dim, hidden), layer),
        ParamSpec(f"{at}.kv_a_layernorm.weight", (kv_rank,), layer),
        ParamSpec(f"{at}.kv_b_proj.weight", (kv_rows, kv_rank), layer, 0, heads),
        ParamSpec(f"{at}.o_proj.weight", (hidden, heads * mla.v_head_dim), layer, 1, heads),
    ]


def _experts(c: ModelConfig, layer: int) -> list[ParamSpec]:
    """The router, the routed experts and the shared ones."""
    assert c.moe is not None
    at, moe = f"model.layers.{layer}.mlp", c.moe
    params = [ParamSpec(f"{at}.gate.weight", (moe.num_experts, c.hidden_size), layer)]
    if moe.router_bias:
        params.append(ParamSpec(f"{at}.gate.e_score_correction_bias", (moe.num_experts,), layer))
    for j in range(moe.num_experts):
        params += _mlp(c, f"{at}.experts.{j}", moe.expert_width, layer=layer, expert=j)
    if moe.shared_width:
        params += _mlp(c, f"{at}.shared_experts", moe.shared_width, layer=layer)
    return params


def _mlp(
    c: ModelConfig, at: str, width: int, *, layer: int, expert: int | None = None
) -> tuple[ParamSpec, ...]:
    up, down = (width, c.hidden_size), (c.hidden_size, width)
    return (
        ParamSpec(f"{at}.gate_proj.weight", up, layer, 0, width, expert),
        ParamSpec(f"{at}.up_proj.weight", up, layer, 0, width, expert),
        ParamSpec(f"{at}.down_proj.weight", down, layer, 1, width, expert),
    )
