"""The places of our table's parameters in a MegatronModel's tensors.

Megatron-Core fuses what the table keeps apart: `linear_qkv` has for each group of heads its queries, its key
and its value, and `linear_fc1` has gate above up-projection. The regions of a rank are the same as in the
native engine, only their memory differs. So each parameter is a few blocks of rows of one tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from realhf.engine.megatron.model import MegatronModel
from realhf.param_spec import ParamSpec
from realhf.realloc.pieces import Piece, Shards
from realhf.region import Region, region_size


@dataclass(frozen=True)
class Block:
    """Rows [start, stop) of a tensor of the model, which hold a region of a parameter."""

    name: str  # Of the parameter in our table.
    region: Region
    tensor: torch.nn.Parameter
    start: int
    stop: int

    def piece(self) -> Piece:
        """Return the region and its memory."""
        return self.region, self.tensor.detach()[self.start : self.stop]

    def elements(self, first: int, last: int, values: Tensor) -> Iterator[Piece]:
        """Yield the boxes of the elements [first, last) of the flattened tensor that lie in this block.

        `values` holds those elements. A range that cuts rows has up to three boxes: the end of a row, whole
        rows, and the start of a row.
        """
        width = self.tensor[:1].numel()
        low = max(first, self.start * width)
        high = min(last, self.stop * width)
        while low < high:
            row, column = divmod(low, width)
            whole_rows = (high - low) // width if column == 0 else 0
            count = whole_rows * width or min(high - low, width - column)
            yield self._box(row, column, count, width), self._view(values[low - first :][:count], width)
            low += count

    def _box(self, row: int, column: int, count: int, width: int) -> Region:
        """Return the region of `count` elements from (row, column) on: whole rows, or a part of one row."""
        num_rows = max(1, count // width)
        above = row - self.start + self.region[0][0]
        rows = (above, above + num_rows)
        if len(self.region) == 1:
            return (rows,)
        left = self.region[1][0] + column
        return rows, (left, left + min(count, width))

    def _view(self, values: Tensor, width: int) -> Tensor:
        if len(self.region) == 1:
            return values
        return values.view(-1, min(len(values), width))


def blocks_of(model: MegatronModel) -> list[Block]:
    """Return the blocks of all parameters of this rank, in no particular order."""
    found = list(_Finder(model).blocks())
    regions = model.spec.held_by(model.groups.layout, model.groups.rank)
    held: dict[str, int] = {}
    for block in found:
        held[block.name] = held.get(block.name, 0) + region_size(block.region)
    assert held == {name: region_size(region) for name, region in regions.items()}
    return found


def by_name(pieces: Iterable[tuple[str, Piece]]) -> Shards:
    """Return parameter name -> its pieces."""
    found: dict[str, tuple[Piece, ...]] = {}
    for name, piece in pieces:
        found[name] = (*found.get(name, ()), piece)
    return found


class _Finder:
    """Walks through a model and finds the block of each parameter."""

    def __init__(self, model: MegatronModel) -> None:
        self._model = model
        self._regions = model.spec.held_by(model.groups.layout, model.groups.rank)
        self._params: Mapping[tuple[int | None, str, int | None], ParamSpec] = {
            (param.layer, param.part, param.expert): param for param in model.spec.params
        }
        self._layer: int | None = None
        self._expert: int | None = None

    def blocks(self) -> Iterator[Block]:
        model = self._model
        config = model.shape
        if model.embedding is not None:
            self._layer = -1
            yield from self._stacked(model.embedding, "embedding.weight")
        layers = model.spec.stage_layers(model.groups.layout.strategy, model.groups.at.pp)
        for layer, module in zip(layers, model.decoder.layers, strict=True):
            self._layer = layer
            yield from self._of_layer(module)
        self._layer = None
        if model.post_process:
            yield from self._of_module(model.decoder.final_layernorm, "final_norm")
        if model.output is not None:
            self._layer = -1 if config.tied else None
            part = "embedding" if config.tied else "score" if config.head == "score" else "lm_head"
            yield from self._stacked(model.output, f"{part}.weight")

    def _of_layer(self, module: Any) -> Iterator[Block]:
        attention = module.self_attention
        yield from self._of_module(module.input_layernorm, "attn_norm")
        yield from self._of_module(attention.q_layernorm, "q_norm")
        yield from self._of_module(attention.k_layernorm, "k_norm")
        for kind, tensor in attention.linear_qkv.named_parameters():
            yield from self._heads(tensor, kind)
        yield from self._of_module(attention.linear_proj, "o")
        yield from self._of_module(module.pre_mlp_layernorm, "mlp_norm")
        if not self._model.shape.has_experts(self._layer or 0):
            yield from self._of_mlp(module.mlp, "")
            return
        mlp = module.mlp
        yield from self._stacked(mlp.router.weight, "router.weight")
        if mlp.shared_experts is not None:
            yield from self._of_mlp(mlp.shared_experts, "shared_")
            if mlp.shared_experts.gate_weight is not None:
                yield from self._stacked(mlp.shared_experts.gate_weight, "shared_router.weight")
        for expert, local in zip(mlp.local_expert_indices, mlp.experts.local_experts, strict=True):
            self._expert = expert
            yield from self._of_mlp(local, "expert_")
        self._expert = None

    def _of_mlp(self, mlp: Any, prefix: str) -> Iterator[Block]:
        ups = ("gate", "up") if self._model.shape.gated else ("up",)
        for kind, tensor in mlp.linear_fc1.named_parameters():
            yield from self._stacked(tensor, *(f"{prefix}{part}.{kind}" for part in ups))
        yield from self._of_module(mlp.linear_fc2, f"{prefix}down")

    def _of_module(self, module: Any, part: str) -> Iterator[Block]:
        for kind, tensor in () if module is None else module.named_parameters():
            yield from self._stacked(tensor, f"{part}.{kind}")

    def _stacked(self, tensor: torch.nn.Parameter, *parts: str) -> Iterator[Block]:
        """Yield the blocks of parameters of equal size, one below the other."""
        rows = len(tensor) // len(parts)
        for number, part in enumerate(parts):
            name = self._name(part)
            yield Block(name, self._regions[name], tensor, number * rows, (number + 1) * rows)

    def _heads(self, tensor: torch.nn.Parameter, kind: str) -> Iterator[Block]:
        """Yield the blocks of `linear_qkv`: for each group of heads its queries, key and value."""
        config = self._model.shape
        dim = config.head_dim
        sizes = {"q": config.num_heads // config.num_kv_heads * dim, "k": dim, "v": dim}
        start = 0
        for group in range(len(tensor) // sum(sizes.values())):
            for part, size in sizes.items():
                name = self._name(f"{part}.{kind}")
                (low, _), *rest = self._regions[name]
                rows = (low + group * size, low + (group + 1) * size)
                yield Block(name, (rows, *rest), tensor, start, start + size)
                start += size

    def _name(self, part: str) -> str:
        return self._params[self._layer, part, self._expert].name
