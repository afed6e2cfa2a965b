"""The parameter table: every parameter with its global shape, pipeline stage and tensor-parallel split.

Parameters have their names in Hugging Face checkpoints, and a rank holds a box (Region) of each. `nn` builds
models from this table, `checkpoint` reads and writes by it, `realloc` schedules by it, and the planner sizes
by it. No other module knows how a tensor is split.
"""

import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from realhf.layout import Coordinate, Layout, ParallelStrategy, even_part, even_split
from realhf.models.model_config import ModelConfig

CHUNK_MULTIPLE = 128
"""All chunks but the last have a multiple of this many elements, so that all start at aligned addresses."""
Region = tuple[tuple[int, int], ...]
"""A half-open index range for each dim."""
Placement = tuple[tuple[Region, tuple[int, ...]], ...]
"""The distinct regions of a parameter under a layout, each with the ranks that hold it."""
NUM_TERMS = 3  # A float32 has 24 significant bits, a bfloat16 has 8.
_INT8_MODULES = ("q", "k", "v", "o", "gate", "up", "down", "q_a", "q_b", "kv_a")
SCALE = "/scale"
"""What follows a parameter's name in that of its scales, of which a copy in int8 has one for each row."""
_BOTH_ENDS = -1  # Stands for the stages of an embedding that is also the head: the first and the last.


def is_sharded(layout: Layout) -> bool:
    """Return whether training in this layout spreads the optimizer's copy over replicas (ZeRO-1)."""
    return layout.strategy.num_replicas > 1


class InFile(NamedTuple):
    """A parameter's position in a checkpoint: tensor `name`, from row `start` on (column, if transposed)."""

    name: str
    start: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class ParamSpec:
    """A parameter of decoder layer `layer`: -1 for embeddings, None for what follows the last layer.

    `split_dim` is split over tp in `num_units` indivisible units (attention heads, or single rows or
    columns). If there are fewer units than tp ranks, neighbours hold the same unit, and each computes a part
    of its gradient. Experts are split evenly over ep: only the ranks that have `expert` hold the parameter.
    `name` is the name of the tensor in a checkpoint, and "/module" after it if that holds several parameters.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None
    split_dim: int | None = None
    num_units: int = 1
    expert: int | None = None
    short_name: str = ""  # Without the layer, the same in every family: "q.weight".
    partial: bool = False  # Every tp rank holds the whole parameter and computes a part of its gradient.
    in_file: InFile = InFile("")
    trainable: bool = True  # The optimizer changes it.
    num_terms: int = 1
    """Terms of a split float32 (devices/half_precision.py); if above 1, the first dim of `shape`. Their sum,
    which checkpoints hold, keeps float32 precision in a model of any dtype."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def takes_int8(self) -> bool:
        """Whether generation may have it in int8: the weight of a linear layer or an expert.

        Embeddings, heads, norms, biases and routers keep their precision, as does the up-projection of
        latents (MLA), which attention also multiplies with queries and outputs.
        """
        module, _, kind = self.short_name.rpartition(".")
        module = module.removeprefix("expert_").removeprefix("shared_")
        return kind == "weight" and module in _INT8_MODULES

    @property
    def is_vector(self) -> bool:
        """Whether it has one dim in checkpoints, as norms and biases have; no weight decay applies to it."""
        return len(self.shape) - (self.num_terms > 1) <= 1

    def region(self, tp: int, index: int) -> Region:
        """Return the region of tensor-parallel rank `index` of `tp`, on a stage that has the parameter."""
        box = [(0, size) for size in self.shape]
        if self.split_dim is not None:
            first, last = even_split(self.num_units, tp, index)
            unit = self.shape[self.split_dim] // self.num_units
            box[self.split_dim] = (first * unit, max(first + 1, last) * unit)
        return tuple(box)

    def sharers(self, tp: int, index: int) -> tuple[int, ...]:
        """Return the tensor-parallel ranks that hold the same region as rank `index`."""
        return tuple(i for i in range(tp) if self.region(tp, i) == self.region(tp, index))

    def has_partial_gradient(self, tp: int) -> bool:
        """Return whether the ranks that share a region each compute only a part of its gradient."""
        return tp > 1 and (self.partial or (self.split_dim is not None and tp > self.num_units))


@dataclass(frozen=True)
class ModelSpec:
    """The parameter table of a model; computes which rank holds which regions under a layout."""

    config: ModelConfig
    params: tuple[ParamSpec, ...]
    section_numel: int = 1 << 24  # The fewest elements of each section but the last (see `sections`).
    whole: "ModelSpec | None" = None  # The table of which this is a part; only that one has sections.

    @property
    def numel(self) -> int:
        """Number of parameters, counted as in the checkpoint."""
        return sum(param.numel // param.num_terms for param in self.params)

    def as_in_checkpoints(self) -> "ModelSpec":
        """Return the table with every parameter in the shape that it has in a checkpoint."""
        params = (replace(p, shape=p.shape[1:], num_terms=1) if p.num_terms > 1 else p for p in self.params)
        return replace(self, params=tuple(params))

    def fused_name(self, param: ParamSpec) -> str:
        """Return the short name of the weight that holds a parameter in `nn`, alone or with others: q, k and
        v are one ("qkv.weight"), gate and up another."""
        name = param.short_name
        if name.endswith("lora_B") and param.in_file.name == param.name:
            return name
        if self.config.gated:
            name = re.sub(r"(^|_)(gate|up)(\.\w+)$", r"\1gate_up\3", name)
        return name if self.config.mla else re.sub(r"^[qkv](\.\w+)$", r"qkv\1", name)

    def part(self, *, int8: bool) -> "ModelSpec":
        """Return the part of the table that takes int8 in generation, or the rest of it."""
        params = tuple(param for param in self.params if param.takes_int8 == int8)
        return replace(self, params=params, whole=self)

    def chunk_layers(self, strategy: ParallelStrategy, stage: int) -> list[range]:
        """Return the layers of each chunk of a pipeline stage; one, unless chunks are interleaved."""
        n = strategy.pp * strategy.vp
        return [range(*even_split(self.config.num_layers, n, i)) for i in range(stage, n, strategy.pp)]

    def stage_layers(self, strategy: ParallelStrategy, stage: int) -> list[int]:
        return [layer for layers in self.chunk_layers(strategy, stage) for layer in layers]

    def held_by(self, layout: Layout, rank: int) -> dict[str, Region]:
        """Return parameter name -> region on `rank`, in table order; empty for a rank outside the layout."""
        if rank not in layout:
            return {}
        stage, dp, _, tp = layout.coordinate(rank)
        kinds, stages, owners = self._placement_keys(layout)
        on_stage = (stages == stage) | ((stages == _BOTH_ENDS) & (stage in (0, layout.pp - 1)))
        here = np.flatnonzero(on_stage & ((owners < 0) | (owners == dp % layout.ep)))
        regions: dict[int, Region] = {}
        for kind, first in zip(*np.unique(kinds[here], return_index=True), strict=True):
            regions[int(kind)] = self.params[here[first]].region(layout.tp, tp)
        numbers = zip(here.tolist(), kinds[here].tolist(), strict=True)
        return {self.params[i].name: regions[kind] for i, kind in numbers}

    def boxes_held_by(
        self, layout: Layout, rank: int, *, sharded: bool = False
    ) -> dict[str, tuple[Region, ...]]:
        """Return parameter name -> the boxes of it on `rank`, which do not overlap.

        With `sharded`, these are boxes of the optimizer's copy, which is split over the replicas (ZeRO-1): at
        most three of a matrix.
        """
        if not sharded:
            return {name: (region,) for name, region in self.held_by(layout, rank).items()}
        if self.whole is not None:
            boxes = self.whole.boxes_held_by(layout, rank, sharded=True)
            return {name: boxes[name] for name in self.layer_of if name in boxes}
        sections = self.sections(layout, rank) if rank in layout else []
        chunks = [split_evenly(section, len(ranks))[ranks.index(rank)] for section, ranks in sections]
        return {name: boxes for chunk in chunks for name, boxes in chunk.items()}

    def sections(self, layout: Layout, rank: int) -> list[tuple[dict[str, Region], tuple[int, ...]]]:
        """Split the regions on `rank` into sections, each with the ranks that hold the same regions.

        These ranks sum the section's gradients and share its optimizer. They are the replicas over dp and cp
        (for experts, replicas with the same ep index). Large sections are split between layers, so that
        gradients of the last layers can be summed while the backward pass continues.
        """
        by_name = self.held_by(layout, rank)
        if layout.ep == 1:
            return [(section, layout.replicas(rank)) for section in self._split_by_layer(by_name)]
        shared = {name: region for name, region in by_name.items() if name not in self._expert_names}
        experts = {name: region for name, region in by_name.items() if name in self._expert_names}
        both = ((shared, layout.replicas(rank)), (experts, layout.expert_replicas(rank)))
        return [(section, ranks) for regions, ranks in both for section in self._split_by_layer(regions)]

    def _split_by_layer(self, regions: Mapping[str, Region]) -> list[dict[str, Region]]:
        """Split into sections of whole layers; all but the last have at least `section_numel` elements."""
        sections: list[dict[str, Region]] = []
        numel, last = 0, None
        for name, region in regions.items():
            layer = self.layer_of[name]
            if not sections or (numel >= self.section_numel and layer != last):
                sections.append({})
                numel = 0
            sections[-1][name] = region
            numel += region_size(region)
            last = layer
        return sections

    def placements(self, layout: Layout, *, sharded: bool = False) -> list[Placement]:
        """Return every parameter's placement, in table order; parameters placed alike share one object."""
        if sharded and self.whole is not None:
            by_name = dict(zip(self.whole.layer_of, self.whole.placements(layout, sharded=True), strict=True))
            return [by_name[param.name] for param in self.params]
        if sharded:
            return self._sharded_placements(layout)
        kinds, stages, owners = self._placement_keys(layout)
        keys = (kinds * (layout.pp + 1) + stages + 1) * (layout.ep + 1) + owners + 1
        _, firsts, groups = np.unique(keys, return_index=True, return_inverse=True)
        distinct = [
            _placement(self.params[i], layout, stage, owner)
            for i, stage, owner in zip(firsts, stages[firsts].tolist(), owners[firsts].tolist(), strict=True)]
        return [distinct[group] for group in groups.tolist()]

    def _sharded_placements(self, layout: Layout) -> list[Placement]:
        boxes: dict[str, dict[Region, list[int]]] = {param.name: {} for param in self.params}
        for stage, owner, index in np.ndindex(layout.pp, layout.ep, layout.tp):
            sections = self.sections(layout, int(layout.grid[stage, owner, 0, index]))
            for regions, ranks in sections:
                if owner and not self._expert_names & regions.keys():  # Counted with the first owner.
                    continue
                for chunk, rank in zip(split_evenly(regions, len(ranks)), ranks, strict=True):
                    for name, boxes_of_name in chunk.items():
                        for box in boxes_of_name:
                            boxes[name].setdefault(box, []).append(rank)
        equal: dict[Placement, Placement] = {}  # So that equal placements are one object.
        all_of = [boxes[param.name].items() for param in self.params]
        placements = (tuple((box, tuple(sorted(ranks))) for box, ranks in items) for items in all_of)
        return [equal.setdefault(placement, placement) for placement in placements]

    def is_primary(self, param: ParamSpec, layout: Layout, coordinate: Coordinate) -> bool:
        """Return whether the rank at this coordinate counts its region in a sum over all parameters.

        Each replica counts a region once: on the first stage and the first tp rank that hold it.
        """
        stage = self._first_stage(param.layer, layout)
        return coordinate.pp == stage and coordinate.tp == param.sharers(layout.tp, coordinate.tp)[0]

    def _first_stage(self, layer: int | None, layout: Layout) -> int:
        if layer is None:
            return layout.pp - 1
        return max(0, even_part(self.config.num_layers, layout.pp * layout.vp, layer)) % layout.pp

    @cached_property
    def layer_of(self) -> dict[str, int | None]:
        return {param.name: param.layer for param in self.params}

    @cached_property
    def _expert_names(self) -> frozenset[str]:
        return frozenset(param.name for param in self.params if param.expert is not None)

    @cached_property
    def _columns(self) -> np.ndarray:
        """Return the columns of all parameters: index of shape and split, layer index, expert (-1: none)."""
        kinds: dict[tuple[object, ...], int] = {}
        rows = [
            (kinds.setdefault((p.shape, p.split_dim, p.num_units), len(kinds)), self._layer_index(p),
             -1 if p.expert is None else p.expert)
            for p in self.params]
        return np.array(rows).T

    def _layer_index(self, param: ParamSpec) -> int:
        """Return the layer: num_layers for what follows the last one, -1 for the token embedding.

        Learned positions count as layer 0: unlike the token embedding, they are never on two stages.
        """
        if param.layer is None:
            return self.config.num_layers
        return 0 if param.short_name == "positions.weight" else param.layer

    def _placement_keys(self, layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the columns that decide placements: index of shape and split, stage, ep index (-1: all)."""
        kinds, layers, experts = self._columns
        stage_of_layer = [self._first_stage(i, layout) for i in (*range(self.config.num_layers), None, -1)]
        if self.config.tied and layout.pp > 1:
            stage_of_layer[-1] = _BOTH_ENDS
        num_experts = self.config.moe.num_experts if self.config.moe else 1
        owner_of_expert = [even_part(num_experts, layout.ep, j) for j in range(num_experts)] + [-1]
        return kinds, np.array(stage_of_layer)[layers], np.array(owner_of_expert)[experts]


def _placement(param: ParamSpec, layout: Layout, stage: int, owner: int) -> Placement:
    grid = layout.grid[[0, -1] if stage == _BOTH_ENDS else [stage]]
    grid = grid if owner < 0 else grid[:, owner :: layout.ep]
    holders: dict[Region, list[int]] = {}
    for index in range(layout.tp):
        holders.setdefault(param.region(layout.tp, index), []).extend(grid[..., index].ravel().tolist())
    return tuple((region, tuple(sorted(ranks))) for region, ranks in holders.items())


def model_spec(config: ModelConfig) -> ModelSpec:
    """Return the parameter table of a model, layer by layer, with the routed experts at the end.

    Within a layer, all gates and up-projections of the experts come before all down-projections.
    """
    c = config
    table = _ParamTable(config)
    table.add("embedding.weight", (c.vocab_size, c.hidden_size), -1, 0, c.vocab_size)
    if c.positions == "learned":
        assert c.num_positions is not None
        table.add("positions.weight", (c.num_positions, c.hidden_size), -1)
    for i in range(c.num_layers):
        table.norm("attn_norm", i)
        (_latent_attention if c.mla else _attention)(table, i)
        table.norm("attn_out_norm", i)
        table.norm("mlp_norm", i)
        if c.has_experts(i):
            _routing(table, i)
        else:
            _mlp(table, "", c.intermediate_size, i)
        table.norm("mlp_out_norm", i)
    table.norm("final_norm", None)
    if c.head == "score":
        table.add("score.weight", (1, c.hidden_size), None)
    elif not c.tied:
        table.add("lm_head.weight", (c.vocab_size, c.hidden_size), None, 0, c.vocab_size)
    if c.moe:
        for i in range(c.moe.num_dense_layers, c.num_layers):
            for modules in (("gate", "up"), ("down",)):
                for j in range(c.moe.num_experts):
                    _mlp(table, "expert_", c.moe.expert_width, i, expert=j, modules=modules)
    return ModelSpec(config, tuple(table.params))


class _ParamTable:
    """A builder of the parameter table, to which rows are added in order."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.params: list[ParamSpec] = []
        self._names = config.describes.names
        stored = list(self._names.values())
        self._fused = {name for name in stored if stored.count(name) > 1}
        self._filled: dict[str, int] = {}  # Fused tensor -> how many of its rows have been assigned.

    def norm(self, module: str, layer: int | None) -> None:
        """Add a norm over the hidden states, if the family has it."""
        if module in self._names:
            self.add(f"{module}.weight", (self.config.hidden_size,), layer)
            if self.config.norm == "layer":
                self.add(f"{module}.bias", (self.config.hidden_size,), layer)

    def add(
        self, short_name: str, shape: tuple[int, ...], layer: int | None, split_dim: int | None = None,
        num_units: int = 1, *, expert: int | None = None, partial: bool = False, trainable: bool = True,
        num_terms: int = 1,
    ) -> None:
        module, _, kind = short_name.rpartition(".")
        stored_module = self._names[module]
        in_file = f"{stored_module.format(layer=layer, expert=expert)}.{kind}"
        name, start = in_file, 0
        if stored_module in self._fused:
            name, start = f"{in_file}/{module}", self._filled.get(in_file, 0)
            self._filled[in_file] = start + shape[0]
        is_linear = kind == "weight" and len(shape) == 2 and layer not in (None, -1)
        transposed = self.config.describes.transposed and is_linear
        self.params.append(ParamSpec(
            name, shape, layer, split_dim, num_units, expert, short_name, partial,
            InFile(in_file, start, transposed), trainable, num_terms))


def _attention(table: _ParamTable, layer: int) -> None:
    c = table.config
    hidden, q_rows, kv_rows = c.hidden_size, c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    qkv = (("q", q_rows, c.num_heads), ("k", kv_rows, c.num_kv_heads), ("v", kv_rows, c.num_kv_heads))
    for module, rows, heads in qkv:
        table.add(f"{module}.weight", (rows, hidden), layer, 0, heads)
    if c.qkv_bias:
        for module, rows, heads in qkv:
            table.add(f"{module}.bias", (rows,), layer, 0, heads)
    if c.qk_norm == "head":
        for module in ("q_norm", "k_norm"):
            table.add(f"{module}.weight", (c.head_dim,), layer, partial=True)
    if c.qk_norm == "all":
        table.add("q_norm.weight", (q_rows,), layer, 0, c.num_heads)
        table.add("k_norm.weight", (kv_rows,), layer, 0, c.num_kv_heads)
    table.add("o.weight", (hidden, q_rows), layer, 1, c.num_heads)
    if c.out_bias:
        table.add("o.bias", (hidden,), layer)


def _latent_attention(table: _ParamTable, layer: int) -> None:
    """Add DeepSeek's attention. Every tp rank has the projections to latents; those to heads are split."""
    c, mla = table.config, table.config.mla
    assert mla is not None
    hidden, heads = c.hidden_size, c.num_heads
    q_rank, kv_rank = mla.q_lora_rank, mla.kv_lora_rank
    if q_rank is None:
        table.add("q.weight", (heads * c.head_dim, hidden), layer, 0, heads)
    else:
        table.add("q_a.weight", (q_rank, hidden), layer)
        table.add("q_a_norm.weight", (q_rank,), layer)
        table.add("q_b.weight", (heads * c.head_dim, q_rank), layer, 0, heads)
    table.add("kv_a.weight", (kv_rank + mla.qk_rope_head_dim, hidden), layer)
    table.add("kv_a_norm.weight", (kv_rank,), layer)
    table.add("kv_b.weight", (heads * (mla.qk_nope_head_dim + mla.v_head_dim), kv_rank), layer, 0, heads)
    table.add("o.weight", (hidden, heads * mla.v_head_dim), layer, 1, heads)


def _routing(table: _ParamTable, layer: int) -> None:
    """Add the router and the shared experts; the routed experts come at the end of the table."""
    c, moe = table.config, table.config.moe
    assert moe is not None
    table.add("router.weight", (moe.num_experts, c.hidden_size), layer)
    if moe.router_bias:
        shape = (NUM_TERMS, moe.num_experts)  # As in transformers, it is float32 in a model of any dtype.
        table.add("router.e_score_correction_bias", shape, layer, trainable=False, num_terms=NUM_TERMS)
    if moe.shared_width:
        _mlp(table, "shared_", moe.shared_width, layer)
    if moe.shared_gate:
        table.add("shared_router.weight", (1, c.hidden_size), layer)


def _mlp(
    table: _ParamTable, prefix: str, width: int, layer: int,
    *, expert: int | None = None, modules: tuple[str, ...] = ("gate", "up", "down"),
) -> None:
    c = table.config
    for module in modules:
        if module == "down":
            table.add(f"{prefix}down.weight", (c.hidden_size, width), layer, 1, width, expert=expert)
        elif module == "up" or c.gated:
            table.add(f"{prefix}{module}.weight", (width, c.hidden_size), layer, 0, width, expert=expert)
    if c.mlp_bias and expert is None:
        for module in ("gate", "up") if c.gated else ("up",):
            table.add(f"{prefix}{module}.bias", (width,), layer, 0, width)
        table.add(f"{prefix}down.bias", (c.hidden_size,), layer)


def region_size(region: Region) -> int:
    return math.prod(stop - start for start, stop in region)


def overlap(region: Region, other: Region) -> Region | None:
    """Return the box that two regions of a parameter share, or None if they share nothing."""
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(region, other, strict=True))
    return box if all(start < stop for start, stop in box) else None


def region_slices(region: Region, *, within: Region | None = None) -> tuple[slice, ...]:
    """Return the region as an index into the whole tensor, or into a tensor that holds region `within`."""
    lows = (low for low, _ in within) if within is not None else (0 for _ in region)
    return tuple(slice(start - low, stop - low) for (start, stop), low in zip(region, lows, strict=True))


def row_blocks(num_rows: int, row_size: int, block_size: int) -> Iterator[slice]:
    """Yield slices of rows that have `block_size` elements or bytes at most, or a single row each.

    Yields one slice even if there are no rows.
    """
    step = max(1, block_size // max(1, row_size))
    for start in range(0, max(1, num_rows), step):
        yield slice(start, start + step)


def boxes_between(region: Region, start: int, stop: int) -> Iterator[Region]:
    """Yield elements [start, stop) of a region, in row-major order, as at most 2 * dims - 1 boxes."""
    if start >= stop:
        return
    low = region[0][0]
    inner = region[1:]
    row = region_size(inner)
    first = start // row
    last = stop // row

    def inside_row(row_index: int, start: int, stop: int) -> Iterator[Region]:
        for box in boxes_between(inner, start, stop):
            yield ((low + row_index, low + row_index + 1), *box)

    if first == last:
        yield from inside_row(first, start % row, stop % row)
        return
    if start % row:
        yield from inside_row(first, start % row, row)
        first += 1
    if first < last:
        yield ((low + first, low + last), *inner)
    yield from inside_row(last, 0, stop % row)


def chunk_edges(numel: int, num_chunks: int) -> list[int]:
    """Return where the chunks of a flat tensor start, and where the last one stops.

    All chunks have `chunk_body` elements, so that one collective operation can send them all; the last one
    also has the elements that are left, fewer than num_chunks * (CHUNK_MULTIPLE + 1).
    """
    body = chunk_body(numel, num_chunks)
    return [*(body * i for i in range(num_chunks)), numel]


def chunk_body(numel: int, num_chunks: int) -> int:
    """Return the number of elements that every chunk of a flat tensor has (see `chunk_edges`)."""
    return numel // (num_chunks * CHUNK_MULTIPLE) * CHUNK_MULTIPLE if num_chunks > 1 else numel


def split_evenly(regions: Mapping[str, Region], num_chunks: int) -> list[dict[str, tuple[Region, ...]]]:
    """Split regions that are stored end to end into chunks (see `chunk_edges`).

    Returns, for each chunk, name -> the boxes of that region that the chunk holds.
    """
    sizes = [region_size(region) for region in regions.values()]
    edges = chunk_edges(sum(sizes), num_chunks)
    chunks: list[dict[str, tuple[Region, ...]]] = [{} for _ in range(num_chunks)]
    start = 0
    for (name, region), size in zip(regions.items(), sizes, strict=True):
        for i in range(bisect_right(edges, start, hi=num_chunks) - 1, num_chunks):
            first, last = max(edges[i], start), min(edges[i + 1], start + size)
            if first >= last:
                break
            chunks[i][name] = tuple(boxes_between(region, first - start, last - start))
        start += size
    return chunks
