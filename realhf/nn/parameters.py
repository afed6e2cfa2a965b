"""ShardedParameters: one rank's regions of the parameters in a table, and their gradients."""

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from realhf.distributed.pieces import Shards, one_piece_each, pairs, shards_of
from realhf.distributed.world import ParallelGroups
from realhf.errors import UserError
from realhf.models.param_spec import SCALE, ModelSpec, ParamSpec, region_size
from realhf.nn.linear import Int8Weight, Weight

_DRAWN_NUMEL = 1 << 20
"""Random numbers to draw at a time."""
Weights = Mapping[str, Weight]
"""Short name ("o.weight") -> a layer's weight; q, k and v are one ("qkv.weight"), gate and up another."""


class ShardedParameters:
    """The parameters of a table that one rank holds, in one flat tensor, and their gradients.

    `flat` holds all parameters end to end in table order. Autograd sees views of it, in which q, k and v are
    one weight, and gate and up another. New parameters are zero and frozen: call `init_random` or load them,
    and call `enable_grad` to train them.
    """

    weight_class: type[Weight] = Weight

    def __init__(
        self, spec: ModelSpec, groups: ParallelGroups, *, dtype: torch.dtype, memory: Tensor | None = None
    ) -> None:
        self.spec = spec
        self.groups = groups
        self.config = spec.config
        self.wide = torch.promote_types(dtype, torch.float32)
        """Dtype of values that need precision: float32, or float64 in a float64 model."""
        self.regions = spec.held_by(groups.layout, groups.rank)
        """Parameter name -> region that this rank holds."""
        sizes = [region_size(region) for region in self.regions.values()]
        stops = zip(self.regions, sizes, accumulate(sizes), strict=True)
        self.offsets = {name: (stop - size, stop) for name, size, stop in stops}
        """Parameter name -> [start, stop) in `flat` and `grad_buffer`."""
        self.flat = groups.world.zeros(sum(sizes), dtype) if memory is None else memory
        assert self.flat.numel() == sum(sizes) and self.flat.dtype == dtype
        self._shards = shards_of(self.flat, self.regions)
        self._pieces = one_piece_each(self._shards, self.regions)
        self.grad_buffer: Tensor | None = None
        """Gradients in the order of `flat`: backward passes add to them, `finish_grads` completes them.
        Between `release_grads` and `hold_grads` they have no memory."""
        self._grad_shards: dict[str, Tensor] = {}
        mine = [p for p in spec.params if p.name in self.regions]
        self._fused: dict[tuple[int | None, str], list[ParamSpec]] = {}
        """(layer, short name of a weight) -> the parameters of which that weight consists."""
        for p in mine:
            self._fused.setdefault((p.layer, self._weight_name(p)), []).append(p)
        self._by_layer: dict[int | None, dict[str, Weight]] = {}
        """Layer (as in ParamSpec) -> short name -> weight."""
        self._weight_of: dict[str, Weight] = {}
        for (layer, name), params in self._fused.items():
            whole = self.flat[self.offsets[params[0].name][0] : self.offsets[params[-1].name][1]]
            rows = whole.view(-1, *self._shards[params[0].name].shape[1:])
            weight = self.weight_class(rows, requires_grad=False)
            self._by_layer.setdefault(layer, {})[name] = weight
            self._weight_of |= {p.name: weight for p in params}
        partial: dict[tuple[int, ...], list[str]] = {}
        tp = groups.layout.tp
        for p in mine:
            if p.has_partial_gradient(tp):
                partial.setdefault(p.sharers(tp, groups.at.tp), []).append(p.name)
        self._partial = [(groups.tp_subgroup(members), names) for members, names in partial.items()]
        """Groups of ranks, and the parameters whose gradients they must add up."""
        if self.config.tied and groups.ends is not None:
            self._partial.append((groups.ends, [p.name for p in mine if p.short_name == "embedding.weight"]))

    def _weight_name(self, param: ParamSpec) -> str:
        """Return the short name of the weight that holds a parameter, alone or fused with others."""
        return self.spec.fused_name(param)

    @property
    def memory(self) -> list[Tensor]:
        """The flat tensors of all parameters."""
        return [self.flat]

    def of_layer(self, layer: int | None) -> Weights:
        """Return the weights of a layer (as in ParamSpec), by short name; none if it is on another stage."""
        return self._by_layer.get(layer, {})

    def fused(self, layer: int | None, weight_name: str) -> Mapping[str, int]:
        """Return the short names of a weight's parameters -> their numbers of rows on this rank."""
        return {p.short_name: len(self._shards[p.name]) for p in self._fused[layer, weight_name]}

    def check_lengths(self, seq_lens: Sequence[int]) -> None:
        """Raise UserError if a sequence has more tokens than the model has positions."""
        limit = self.config.num_positions
        longest = max(seq_lens, default=0)
        if limit is not None and longest > limit:
            raise UserError(f"a sequence has {longest} tokens; the model has {limit} positions")

    def shards(self) -> dict[str, Tensor]:
        """Return parameter name -> this rank's region, a view of `flat`; always the same mapping."""
        return self._shards

    def pieces(self) -> Shards:
        """Return parameter name -> this rank's region as its only piece; always the same mapping."""
        return self._pieces

    def grad_shards(self) -> dict[str, Tensor]:
        """Return parameter name -> gradient of this rank's region, a view of `grad_buffer`."""
        assert self.grad_buffer is not None, "enable_grad comes first"
        self.hold_grads()
        return self._grad_shards

    def init_random(self, seed: int, *, names: Collection[str] | None = None) -> None:
        """Initialise the parameters, or only those in `names`; see `draw_parameters`."""
        draw_parameters(self.spec, self.pieces(), seed=seed, names=names)

    def enable_grad(self) -> None:
        """Make the parameters trainable; call this once."""
        self.grad_buffer = torch.zeros_like(self.flat, dtype=self.wide)
        self._grad_shards = shards_of(self.grad_buffer, self.regions)
        for weight in self.weights():
            weight.collect(self.grad_buffer[weight.storage_offset() :][: weight.numel()].view_as(weight))

    @property
    def grad_bytes(self) -> int:
        return 0 if self.grad_buffer is None else self.grad_buffer.untyped_storage().nbytes()

    def hold_grads(self) -> None:
        """Allocate the gradients' memory, unless it is there; its values are arbitrary.

        The first gradient of a step overwrites them.
        """
        assert self.grad_buffer is not None, "enable_grad comes first"
        if self.grad_bytes < self.grad_buffer.nbytes:
            self.grad_buffer.untyped_storage().resize_(self.grad_buffer.nbytes)

    def release_grads(self) -> None:
        """Free the gradients' memory after a step; all views of it stay valid and need `hold_grads`."""
        assert all(weight.is_empty for weight in self.weights()), "the step has not ended"
        if self.grad_buffer is not None:
            self.grad_buffer.untyped_storage().resize_(0)

    def requires_grad_(self, requires_grad: bool) -> None:
        for weight in self.weights():
            weight.requires_grad_(requires_grad)

    def weights(self) -> list[Weight]:
        """Return the parameters that autograd sees."""
        return [weight for weights in self._by_layer.values() for weight in weights.values()]

    def forget_grads(self) -> None:
        """Begin a step: let the next gradient of each weight overwrite its sum."""
        for weight in self.weights():
            weight.is_empty = True

    def finish_grads(self, names: Collection[str] | None = None) -> None:
        """Complete the gradients of this replica, or those in `names`, after a step's last backward pass.

        Tp ranks that share a parameter but use it for different work (key-value heads, norms of heads, the
        unsplit side of adapters) add up their gradients, and so do the two stages that hold a tied embedding.
        The optimizer later adds up the gradients of the replicas, over dp and cp.
        """
        wanted = set(self.regions if names is None else names)
        for name in wanted:
            self._weight_of[name].finish()
        grads = self.grad_shards()
        for group, partial in self._partial:
            flats = [grads[name].view(-1) for name in partial if name in wanted]
            if len(flats) == 1:
                group.all_reduce(flats[0])
            elif flats:
                total = group.all_reduce(torch.cat(flats))
                for flat, value in zip(flats, total.split([len(flat) for flat in flats]), strict=True):
                    flat.copy_(value)


class Int8Parameters(ShardedParameters):
    """The part of a model's parameters that a copy for generation has in int8, with their scales.

    A reallocation fills both.
    """

    weight_class = Int8Weight

    def __init__(self, spec: ModelSpec, groups: ParallelGroups, *, dtype: torch.dtype) -> None:
        """`spec` is the whole table, and `dtype` that of the other parameters and of the scales."""
        super().__init__(spec.part(int8=True), groups, dtype=torch.int8)
        rows = {name + SCALE: region[:1] for name, region in self.regions.items()}
        self._scales = groups.world.zeros(sum(map(region_size, rows.values())), dtype)
        scale_of = shards_of(self._scales, rows)
        self._pieces = {**self._pieces, **one_piece_each(scale_of, rows)}
        for (layer, name), params in self._fused.items():
            weight = self._by_layer[layer][name]
            assert isinstance(weight, Int8Weight)
            start = scale_of[params[0].name + SCALE].storage_offset()
            weight.scale_O = self._scales[start:][: len(weight)]

    @property
    def memory(self) -> list[Tensor]:
        return [self.flat, self._scales]


def _row_blocks(shape: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield [first, stop) of the rows to draw at a time: one small buffer is faster than much fresh memory.

    The numbers are the same as if all were drawn at once: the generator makes normal numbers 16 at a time, so
    blocks have a multiple of 16 rows, and the last block also has the rows that are left.
    """
    width = math.prod(shape[1:])
    step = max(1, _DRAWN_NUMEL // (16 * max(1, width))) * 16
    starts = range(0, max(1, shape[0] - step + 1), step)
    yield from zip(starts, [*starts[1:], shape[0]], strict=True)


@torch.no_grad()
def draw_parameters(
    spec: ModelSpec, shards: Shards, *, seed: int, names: Collection[str] | None = None
) -> None:
    """Initialise the parameters, or only those in `names`, to the same values in every layout.

    Weights are normal, norms 1 and biases 0; an adapter's A is drawn as in PEFT, and its B is 0. Each
    parameter has its own generator.
    """
    config = spec.config
    params = {param.name: param for param in spec.params}
    for name in shards if names is None else shards.keys() & names:
        short_name = params[name].short_name
        if short_name.endswith(("norm.weight", "bias", "lora_B")):
            for _, tensor in shards[name]:
                tensor.fill_(1 - config.norm_offset if short_name.endswith("norm.weight") else 0)
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        shape = params[name].shape
        for first, stop in _row_blocks(shape):
            whole = torch.empty(stop - first, *shape[1:])
            if short_name.endswith("lora_A"):  # Kaiming's uniform initialisation with a = sqrt(5).
                bound = 1 / math.sqrt(shape[1])
                whole.uniform_(-bound, bound, generator=generator)
            else:
                std = config.hf.get("initializer_range", 0.02)
                whole.normal_(0.0, std, generator=generator)
            drawn = ((first, stop), *((0, size) for size in shape[1:]))
            for mine, values in pairs(shards[name], [(drawn, whole)], drawn):
                mine.copy_(values)
