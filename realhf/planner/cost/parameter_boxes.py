"""The box of parameters that every rank of a layout holds, in coordinates that are quick to intersect.

Parameters that layouts split alike form a kind. A kind is a box with three axes: rows (the embedding, every
layer, and what follows the last layer), columns (the part of a tensor that a tensor-parallel rank has) and
experts. A rank holds a smaller box of each kind.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from realhf.layout import DeviceMesh, Layout, ParallelStrategy, even_split
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.planner.memory.shard import parameter_kinds

_WHOLE = 0  # Columns of parameters that every tensor-parallel rank holds whole.
_EVEN = -1  # Columns that are split evenly, or nearly so.
_FINE = 64  # With this many units per rank, a split counts as even.


class ContiguousLayout(NamedTuple):
    """A layout on a range of ranks. It is quick to make, compare and hash."""

    strategy: ParallelStrategy
    first_rank: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.strategy.num_ranks)

    @property
    def as_layout(self) -> Layout:
        return Layout(self.strategy, DeviceMesh(tuple(self.ranks)))


class MovedModel(NamedTuple):
    """The parameters to move: all of a model, or only its adapters.

    `section_numel` is that of ModelSpec.
    """

    config: ModelConfig
    lora: LoraConfig | None
    section_numel: int


class Kind(NamedTuple):
    """Parameters that two layouts split alike."""

    ends: np.ndarray  # ends[i] is the number of elements in the rows before row i.
    units: int  # The number of indivisible units of the column axis, `_EVEN` or `_WHOLE`.
    is_expert: bool
    is_vocabulary: bool  # Whether they are the embedding or the head.
    on_both_ends: bool  # Whether the first and the last stage hold them: an embedding that is also the head.

    def numel(self, first: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Return the elements between two rows, which may be fractions."""
        rows = np.arange(len(self.ends))
        between: np.ndarray = np.interp(stop, rows, self.ends) - np.interp(first, rows, self.ends)
        return between


class Boxes(NamedTuple):
    """The box of every rank in a range of ranks, as a start and a stop on each axis.

    Ranks outside the layout have empty boxes. If `num_shards` replicas share an optimizer, each of them holds
    another shard of their common box.
    """

    rows: np.ndarray  # Shape (ranks, chunks, 2), as a rank may have several chunks of the layers.
    columns: np.ndarray  # Shape (ranks, 2), as fractions of all columns.
    experts: np.ndarray  # Shape (ranks, 2), as fractions of all experts.
    num_shards: int = 1


@lru_cache(maxsize=1 << 12)
def kinds_of(model: MovedModel, source: ParallelStrategy, target: ParallelStrategy) -> tuple[Kind, ...]:
    """Return the kinds of a model's parameters under two strategies."""
    config = model.config
    on_two_stages = config.tied and (source.pp > 1 or target.pp > 1)
    by_kind: dict[tuple[int, bool, bool, bool], np.ndarray] = {}
    for (param, is_expert), counts in parameter_kinds(config, model.lora).items():
        units = _WHOLE if param.split_dim is None else param.num_units
        if units and all(units % s.tp == 0 or units >= _FINE * s.tp for s in (source, target)):
            units = _EVEN
        numel = counts * param.numel
        is_vocabulary = units != _WHOLE and not numel[1:-1].any()
        key = (units, is_expert, is_vocabulary, is_vocabulary and on_two_stages)
        by_kind[key] = by_kind.get(key, 0) + numel
    return tuple(
        Kind(np.concatenate([[0], numel.cumsum()]).astype(float), *key) for key, numel in by_kind.items())


def boxes_of(
    model: MovedModel, kind: Kind, placed: ContiguousLayout, ranks: range, *, sharded: bool
) -> Boxes:
    """Return the boxes of a kind on a range of ranks that includes the layout's.

    With `sharded`, they are those of the optimizer's copy, each section of which is split over the replicas,
    end to end. If a rank has a single section, its replicas thus split the rows, for example 12 layers into
    0-3, 4-7 and 8-11 (of the vocabulary, the columns). If it has several, each replica has a shard of every
    section; then the boxes are those of a whole replica, with `num_shards`.
    """
    s = placed.strategy
    pp, dp, cp, tp = np.indices((s.pp, s.dp, s.cp, s.tp)).reshape(4, -1)
    num_layers = model.config.num_layers
    virtual_stages = [even_split(num_layers, s.pp * s.vp, i) for i in range(s.pp * s.vp)]
    edges = np.array(virtual_stages, float).reshape(s.vp, s.pp, 2) + 1
    edges[0, 0, 0] = 0
    edges[-1, -1, 1] = num_layers + 2
    rows = edges[:, pp].swapaxes(0, 1)
    if kind.on_both_ends:
        is_end = (pp == 0) | (pp == s.pp - 1)
        rows = np.stack([np.zeros(len(pp)), is_end.astype(float)], axis=1)[:, None]
    columns = _columns(kind.units, s.tp)[tp]
    experts = np.tile([0.0, 1.0], (len(pp), 1))
    replica = dp * s.cp + cp
    num_shards = s.num_replicas if sharded else 1
    if kind.is_expert and s.ep > 1:
        num_experts = model.config.moe.num_experts if model.config.moe else 1
        experts = np.array([even_split(num_experts, s.ep, i) for i in range(s.ep)])[dp % s.ep] / num_experts
        replica = dp // s.ep * s.cp + cp
        num_shards = s.num_expert_replicas if sharded else 1
    if sharded and kind.is_vocabulary:
        width = np.diff(columns) / num_shards
        columns = columns[:, :1] + width * np.stack([replica, replica + 1], axis=1)
        num_shards = 1
    elif sharded and s.vp == 1 and _most_elements(kind, rows, columns, experts) <= model.section_numel:
        rows = _rows_of_replica(kind, rows[:, 0], replica, num_shards)[:, None]
        num_shards = 1
    rows, columns, experts = (_spread(box, placed, ranks) for box in (rows, columns, experts))
    return Boxes(rows, columns, experts, num_shards)


def _most_elements(kind: Kind, rows: np.ndarray, columns: np.ndarray, experts: np.ndarray) -> float:
    """Return the elements of the largest box."""
    in_rows = kind.numel(rows[..., 0], rows[..., 1]).sum(axis=1)
    return float(in_rows.max() * np.diff(columns).max() * np.diff(experts).max())


@lru_cache(maxsize=256)
def _columns(units: int, tp: int) -> np.ndarray:
    """Return the part of the columns that each tensor-parallel rank holds, as ParamSpec.region has it."""
    index = np.arange(tp)
    if units == _WHOLE:
        return np.tile([0.0, 1.0], (tp, 1))
    if units == _EVEN:
        return np.stack([index, index + 1], axis=1) / tp
    first, stop = units * index // tp, units * (index + 1) // tp
    return np.stack([first, np.maximum(first + 1, stop)], axis=1) / units


def _rows_of_replica(kind: Kind, rows: np.ndarray, replica: np.ndarray, num_replicas: int) -> np.ndarray:
    """Return the rows of each replica, in order, so that all have the same number of elements."""
    row_numbers = np.arange(len(kind.ends))
    before = np.interp(rows[:, 0], row_numbers, kind.ends)
    numel = kind.numel(*rows.T)
    start, stop = (
        np.interp(before + numel * (replica + i) / num_replicas, kind.ends, row_numbers) for i in (0, 1))
    return np.clip(np.stack([start, stop], axis=1), rows[:, :1], rows[:, 1:])


def _spread(box: np.ndarray, placed: ContiguousLayout, ranks: range) -> np.ndarray:
    """Return the boxes of a layout's ranks at their places in a range of ranks."""
    everywhere = np.zeros((len(ranks), *box.shape[1:]))
    start = placed.first_rank - ranks.start
    everywhere[start : start + len(box)] = box
    return np.round(everywhere, 9)
