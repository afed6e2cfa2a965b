"""The places of our table's parameters in the tensors of MegatronModels.

Megatron-Core fuses what the table keeps apart: `linear_qkv` has for each group of heads its queries, its key
and its value, and `linear_fc1` has gate above up-projection. `GroupedMLP` keeps all experts of a rank in two
tensors, each expert's matrices transposed. The regions of a rank are the same as in the native engine, only
their memory differs. So each parameter is a few blocks of one tensor.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from torch import Tensor

from realhf.distributed.pieces import Piece, Shards
from realhf.engine.megatron.model import MegatronModel
from realhf.models.param_spec import ParamSpec, Region, region_size

_Range = tuple[int, int]


@dataclass(frozen=True)
class MatrixBlock:
    """Rows and columns of a tensor of the model, seen as a matrix, which hold a region of a parameter."""

    name: str  # Of the parameter in our table.
    region: Region
    tensor: torch.nn.Parameter
    rows: _Range
    columns: _Range | None = None  # All columns, unless given.
    transposed: bool = False  # Rows of the matrix are columns of the parameter.
    matrix_width: int | None = None  # Columns of the matrix, unless they are those of the tensor.

    @cached_property
    def _width(self) -> int:
        return self.tensor[:1].numel() if self.matrix_width is None else self.matrix_width

    def piece(self) -> Piece:
        """Return the region and its memory."""
        values = self.tensor.detach().view(-1, self._width)[slice(*self.rows)]
        return self.region, self._as_parameter(values[:, slice(*self.columns)] if self.columns else values)

    def elements(self, first: int, last: int, values: Tensor) -> Iterator[Piece]:
        """Yield the boxes of the elements [first, last) of the flattened tensor that lie in this block.

        `values` holds those elements. A range that cuts rows has up to three boxes: the end of a row, whole
        rows, and the start of a row.
        """
        low = max(first, self.rows[0] * self._width)
        high = min(last, self.rows[1] * self._width)
        left, right = self.columns or (0, self._width)
        while low < high:
            row, column = divmod(low, self._width)
            num_rows = max(1, (high - low) // self._width) if column == 0 else 1
            count = min(high - low, num_rows * self._width - column)
            start, stop = max(left, column), min(right, column + count // num_rows)
            if start < stop:
                part = values[low - first :][:count].view(num_rows, -1)[:, start - column : stop - column]
                yield self._box((row, row + num_rows), (start, stop)), self._as_parameter(part)
            low += count

    def _box(self, rows: _Range, columns: _Range) -> Region:
        """Return the region of the parameter that these rows and columns of the matrix hold."""
        inside = [(rows, self.rows[0]), (columns, self.columns[0] if self.columns else 0)]
        if self.transposed:
            inside.reverse()
        return tuple(
            (low - origin + begin, high - origin + begin)
            for ((low, high), origin), (begin, _) in zip(inside, self.region, strict=False)
        )

    def _as_parameter(self, values: Tensor) -> Tensor:
        """Return a part of the matrix as a part of the parameter."""
        if len(self.region) == 1:
            return values[:, 0]
        return values.T if self.transposed else values


def blocks_of(chunks: Sequence[MegatronModel]) -> list[MatrixBlock]:
    """Return the blocks of all parameters of this rank, in no particular order."""
    blocks = [block for chunk in chunks for block in _Finder(chunk).blocks()]
    regions = chunks[0].spec.held_by(chunks[0].groups.layout, chunks[0].groups.rank)
    held: dict[str, int] = {}
    for block in blocks:
        held[block.name] = held.get(block.name, 0) + region_size(block.region)
    assert held == {name: region_size(region) for name, region in regions.items()}
    return blocks


def by_name(pieces: Iterable[tuple[str, Piece]]) -> Shards:
    """Return parameter name -> its pieces."""
    pieces_of: dict[str, tuple[Piece, ...]] = {}
    for name, piece in pieces:
        pieces_of[name] = (*pieces_of.get(name, ()), piece)
    return pieces_of


class _Finder:
    """Walks through a chunk of a model and finds the block of each parameter."""

    def __init__(self, model: MegatronModel) -> None:
        self._model = model
        self._regions = model.spec.held_by(model.groups.layout, model.groups.rank)
        self._params: Mapping[tuple[int | None, str, int | None], ParamSpec] = {
            (param.layer, param.short_name, param.expert): param for param in model.spec.params
        }
        self._layer: int | None = None
        self._expert: int | None = None

    def blocks(self) -> Iterator[MatrixBlock]:
        model = self._model
        config = model.shape
        if model.embedding is not None:
            self._layer = -1
            yield from self._stacked(model.embedding, "embedding.weight")
        for layer, module in zip(model.layers, model.decoder.layers, strict=True):
            self._layer = layer
            yield from self._of_layer(module)
        self._layer = None
        if model.post_process:
            yield from self._of_module(model.decoder.final_layernorm, "final_norm")
        if model.output is not None:
            self._layer = -1 if config.tied else None
            part = "embedding" if config.tied else "score" if config.head == "score" else "lm_head"
            yield from self._stacked(model.output, f"{part}.weight")

    def _of_layer(self, module: Any) -> Iterator[MatrixBlock]:
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
        for index, expert in enumerate(mlp.local_expert_indices):
            self._expert = expert
            yield from self._of_expert(mlp.experts, index)
        self._expert = None

    def _of_expert(self, experts: Any, index: int) -> Iterator[MatrixBlock]:
        """Yield the blocks of one of a rank's experts."""
        if isinstance(experts, SequentialMLP):
            yield from self._of_mlp(experts.local_experts[index], "expert_")
        elif isinstance(experts, GroupedMLP):
            yield from self._transposed(experts, experts.weight1, index, *self._ups("expert_"))
            yield from self._transposed(experts, experts.weight2, index, "expert_down")
        else:  # TEGroupedMLP, whose linear layers have a tensor for each expert.
            ups = (f"{part}.weight" for part in self._ups("expert_"))
            yield from self._stacked(getattr(experts.linear_fc1, f"weight{index}"), *ups)
            yield from self._stacked(getattr(experts.linear_fc2, f"weight{index}"), "expert_down.weight")

    def _ups(self, prefix: str) -> list[str]:
        """Return the parts whose matrices `linear_fc1` has."""
        return [f"{prefix}{part}" for part in (("gate", "up") if self._model.shape.gated else ("up",))]

    def _of_mlp(self, mlp: Any, prefix: str) -> Iterator[MatrixBlock]:
        for kind, tensor in mlp.linear_fc1.named_parameters():
            yield from self._stacked(tensor, *(f"{part}.{kind}" for part in self._ups(prefix)))
        yield from self._of_module(mlp.linear_fc2, f"{prefix}down")

    def _of_module(self, module: Any, part: str) -> Iterator[MatrixBlock]:
        for kind, tensor in () if module is None else module.named_parameters():
            yield from self._stacked(tensor, f"{part}.{kind}")

    def _stacked(self, tensor: torch.nn.Parameter, *parts: str) -> Iterator[MatrixBlock]:
        """Yield the blocks of parameters of equal size, one below the other."""
        size = len(tensor) // len(parts)
        for number, part in enumerate(parts):
            name = self._name(part)
            yield MatrixBlock(name, self._regions[name], tensor, (number * size, (number + 1) * size))

    def _transposed(
        self, experts: GroupedMLP, tensor: torch.nn.Parameter, index: int, *parts: str
    ) -> Iterator[MatrixBlock]:
        """Yield the blocks of an expert's transposed matrices, which lie side by side."""
        names = [self._name(f"{part}.weight") for part in parts]
        (outputs, inputs) = (stop - start for start, stop in self._regions[names[0]])
        width = len(parts) * outputs
        assert tensor.numel() == experts.num_local_experts * inputs * width
        rows = (index * inputs, (index + 1) * inputs)
        for number, name in enumerate(names):
            columns = (number * outputs, (number + 1) * outputs)
            yield MatrixBlock(
                name, self._regions[name], tensor, rows, columns, transposed=True, matrix_width=width)

    def _heads(self, tensor: torch.nn.Parameter, kind: str) -> Iterator[MatrixBlock]:
        """Yield the blocks of `linear_qkv`: for each group of heads its queries, key and value."""
        config = self._model.shape
        dim = config.head_dim
        sizes = {"q": config.num_heads // config.num_kv_heads * dim, "k": dim, "v": dim}
        start = 0
        for group in range(len(tensor) // sum(sizes.values())):
            for part, size in sizes.items():
                name = self._name(f"{part}.{kind}")
                (low, _), *other_dims = self._regions[name]
                rows = (low + group * size, low + (group + 1) * size)
                yield MatrixBlock(name, (rows, *other_dims), tensor, (start, start + size))
                start += size

    def _name(self, part: str) -> str:
        return self._params[self._layer, part, self._expert].name
