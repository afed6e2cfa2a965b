"""Transformer: one rank's shard of a decoder of any family, built from the parameter table.

Shape suffixes: T tokens of all sequences end to end, B rows of a decoding step, H hidden; of this rank: N
query heads, K key-value heads, V part of the vocabulary; D head dim.
"""

import hashlib
from collections.abc import Callable, Collection
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realhf.dist.autograd import copy_to_group, sum_over_group
from realhf.dist.parallel import ParallelGroups
from realhf.nn.attention import Attend, AttentionKind, packed_attention
from realhf.nn.block import Block, Norm
from realhf.nn.context_parallel import attend_over_group, token_range
from realhf.nn.kv_cache import KVCache
from realhf.nn.moe import RouterLosses
from realhf.nn.rope import Rotary
from realhf.param_spec import ModelSpec, ParamSpec, region_size, region_slices
from realhf.realloc.bind import shards_of

_FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}
"""Parts that lie side by side and are computed with as one."""


class Transformer(torch.nn.Module):
    """The layers of this rank's pipeline stage and its tensor-parallel part of each.

    `flat` holds all parameters end to end in table order; what autograd sees are views into it, q/k/v as one
    and gate/up as one, as they lie side by side. A new model is frozen and zero: call `init_random` or load
    weights, and `enable_grad` to train.
    """

    def __init__(
        self, spec: ModelSpec, groups: ParallelGroups, *, dtype: torch.dtype, memory: Tensor | None = None
    ) -> None:
        super().__init__()
        self.spec, self.groups, self.config = spec, groups, spec.config
        self.wide = torch.promote_types(dtype, torch.float32)
        """Of what needs precision: float32, or float64 in a float64 model."""
        self.regions = spec.held_by(groups.layout, groups.rank)
        """HF name -> region that this rank holds."""
        sizes = [region_size(region) for region in self.regions.values()]
        stops = zip(self.regions, sizes, accumulate(sizes), strict=True)
        self._offsets = {name: (stop - size, stop) for name, size, stop in stops}
        self.flat = groups.world.zeros(sum(sizes), dtype) if memory is None else memory
        assert self.flat.numel() == sum(sizes) and self.flat.dtype == dtype
        self._shards = shards_of(self.flat, self.regions)
        self.grad_buffer: Tensor | None = None
        """Gradients in the places of `flat`; every backward pass adds to it."""
        self._by_layer = self._fuse_weights()
        """Layer (as in ParamSpec) -> part -> weight."""
        layers = spec.stage_layers(groups.layout.strategy, groups.at.pp)
        self._layers = layers
        self.blocks = torch.nn.ModuleList(Block(self.config, self._by_layer[i], i, groups) for i in layers)
        self._ends = torch.nn.ParameterDict(
            {part.replace(".", "_"): w for i in (-1, None) for part, w in self._by_layer.get(i, {}).items()})
        self._final_norm = Norm(self.config, self._by_layer.get(None, {}), "final_norm")
        self._rope = None
        if self.config.positions == "rope":
            self._rope = Rotary(self.config, dtype=dtype, device=self.flat.device)
        tp, index = groups.layout.tp, groups.at.tp
        self._embedding = next(p for p in spec.params if p.part == "embedding.weight")
        self.vocab_range = self._embedding.region(tp, index)[0]
        """Global token ids of this rank's logits: [start, stop)."""
        self._partial: dict[tuple[int, ...], list[str]] = {}
        """Members of the tp group that add their gradients -> of these parameters."""
        for p in spec.params:
            if p.name in self.regions and p.has_partial_gradient(tp):
                self._partial.setdefault(p.sharers(tp, index), []).append(p.name)
        self._sharers = {members: groups.tp_subgroup(members) for members in self._partial}

    def _fuse_weights(self) -> dict[int | None, dict[str, torch.nn.Parameter]]:
        starts: dict[tuple[int | None, str], int] = {}
        weights: dict[int | None, dict[str, torch.nn.Parameter]] = {}
        for p in self.spec.params:
            if p.name not in self.regions:
                continue
            start, stop = self._offsets[p.name]
            part = self._fused_part(p)
            rows = self.flat[starts.setdefault((p.layer, part), start) : stop]
            rows = rows.view(-1, *(hi - lo for lo, hi in self.regions[p.name][1:]))
            weights.setdefault(p.layer, {})[part] = torch.nn.Parameter(rows, requires_grad=False)
        return weights

    def _fused_part(self, param: ParamSpec) -> str:
        module, _, kind = param.part.rpartition(".")
        prefix, _, last = module.rpartition("_")
        is_mlp = last in ("gate", "up")
        if is_mlp and self.config.gated:
            return f"{prefix}_gate_up.{kind}".lstrip("_")
        if module in _FUSED and not is_mlp and self.config.mla is None:
            return f"{_FUSED[module]}.{kind}"
        return param.part

    # Parameters and gradients

    def flat_offsets(self) -> dict[str, tuple[int, int]]:
        """HF name -> [start, stop) in `flat` and `grad_buffer`."""
        return self._offsets

    def shards(self) -> dict[str, Tensor]:
        """HF name -> this rank's region of it, a view of `flat`; always the same mapping."""
        return self._shards

    def grad_shards(self) -> dict[str, Tensor]:
        """HF name -> gradient of this rank's region, a view of `grad_buffer`."""
        assert self.grad_buffer is not None, "enable_grad comes first"
        return shards_of(self.grad_buffer, self.regions)

    @torch.no_grad()
    def init_random(self, seed: int, *, names: Collection[str] | None = None) -> None:
        """Normal weights, norms 1, biases 0; same in every layout: each parameter has its own generator.

        With `names` of these parameters only.
        """
        std = self.config.hf.get("initializer_range", 0.02)
        shapes = {param.name: param.shape for param in self.spec.params}
        parts = {param.name: param.part for param in self.spec.params}
        for name, shard in self.shards().items():
            if names is not None and name not in names:
                continue
            if parts[name].endswith(("norm.weight", "bias")):
                shard.fill_(1 - self.config.norm_offset if parts[name].endswith("norm.weight") else 0)
                continue
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            whole = torch.empty(shapes[name]).normal_(0.0, std, generator=generator)
            shard.copy_(whole[region_slices(self.regions[name])])

    def enable_grad(self) -> None:
        """Makes the model trainable; call it once."""
        self.grad_buffer = torch.zeros_like(self.flat, dtype=self.wide)
        for weight in (w for weights in self._by_layer.values() for w in weights.values()):
            view = self.grad_buffer[weight.storage_offset() :][: weight.numel()].view_as(weight)
            weight.requires_grad_(True).register_post_accumulate_grad_hook(partial(_move_grad, view))

    def zero_grad_buffer(self) -> None:
        assert self.grad_buffer is not None, "enable_grad comes first"
        self.grad_buffer.zero_()

    def finish_grads(self) -> None:
        """Completes gradients after the last backward pass of a step, within one dp replica.

        Adds up what tp ranks have of a parameter that they share and use each for itself (key-value heads,
        norms of heads), and what both holders of a tied embedding have.
        """
        grads = self.grad_shards()
        for members, names in self._partial.items():
            parts = [grads[name].view(-1) for name in names]
            total = self._sharers[members].all_reduce(torch.cat(parts))
            for part, value in zip(parts, total.split([len(p) for p in parts]), strict=True):
                part.copy_(value)
        if self.config.tied and self.groups.ends is not None:
            self.groups.ends.all_reduce(grads[self._embedding.name])

    # Computation

    def forward(
        self, x: Tensor, seq_lens: list[int], cache: KVCache | None = None, *, recompute: bool = False,
        router_losses: RouterLosses | None = None,
    ) -> Tensor:  # fmt: skip
        """Packed sequences through this stage: ids_T on the first stage, else hidden_TH; gives hidden_TH.

        With a cache it is the prefill: sequence i goes to row i of the emptied cache. Without one, ranks
        over cp share out the tokens: hidden_TH is of this rank's `token_range`. With `recompute`, every block
        keeps only its input and is computed again in the backward pass (Chen et al. 2016). Routers add what
        they find to `router_losses`.
        """
        counts = torch.tensor(seq_lens, dtype=torch.long)
        row_T = torch.repeat_interleave(counts)
        position_T = (torch.arange(len(row_T)) - (counts.cumsum(0) - counts)[row_T]).to(x.device)
        length_T = counts[row_T].to(x.device)
        row_T = row_T.to(x.device)
        if cache is not None:
            cache.start(counts)
        cp, more = self.groups.cp, dict[str, Any](recompute=recompute, router_losses=router_losses)
        mine = slice(*token_range(len(row_T), cp))
        if router_losses is not None:
            router_losses.start(row_T[mine], length_T[mine], num_sequences=len(seq_lens), group=cp)
        if cache is None and cp.size > 1:
            x = x[mine] if self.groups.is_first_stage else x
            attends = partial(Attend, compute=partial(self._attend_part, seq_lens), decoding=False)
            return self._stage(x, position_T[mine], length_T[mine], attends, **more)

        def attend(
            index: int, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *cached: Tensor
        ) -> Tensor:
            if cache is not None:
                cache.write(index, *cached, row_T=row_T, position_T=position_T)
            return packed_attention(q_TND, k_TKD, v_TKD, seq_lens, kind)

        attends = partial(Attend, compute=attend, decoding=False)
        return self._stage(x, position_T, length_T, attends, **more)

    def _attend_part(
        self, seq_lens: list[int], _: int, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor,
        *__: Tensor,
    ) -> Tensor:  # fmt: skip
        """Attention of this rank's tokens, by exchanging them with the other ranks over cp."""
        attention = partial(packed_attention, seq_lens=seq_lens, kind=kind)
        return attend_over_group(
            attention, q_TND, k_TKD, v_TKD, group=self.groups.cp, num_tokens=sum(seq_lens))

    def decode(self, x: Tensor, cache: KVCache) -> Tensor:
        """One new token per cache row: ids_B on the first stage, else hidden_BH; gives hidden_BH."""
        position_B = cache.lens
        row_B = torch.arange(len(position_B), device=x.device)
        cache.advance()

        def attend(
            index: int, kind: AttentionKind, q_BND: Tensor, k_BKD: Tensor, v_BKD: Tensor, *_: Tensor
        ) -> Tensor:
            cache.write(index, k_BKD, v_BKD, row_T=row_B, position_T=position_B)
            return cache.attention(index, q_BND, kind)

        return self._stage(x, position_B, cache.lens, partial(Attend, compute=attend, decoding=True))

    def _stage(
        self, x: Tensor, position_T: Tensor, length_T: Tensor, attends: Callable[[int], Attend],
        *, recompute: bool = False, router_losses: RouterLosses | None = None,
    ) -> Tensor:  # fmt: skip
        x_TH = self._embed(x, position_T) if self.groups.is_first_stage else x
        angles = None if self._rope is None else self._rope(position_T, length_T)
        for index, (layer, block) in enumerate(zip(self._layers, self.blocks, strict=True)):
            # The ranks of a tp group compute it again at the same place of their backward passes and stop
            # behind the same last saved tensor: their collectives stay in step.
            again = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
            run = again if recompute else block
            x_TH = run(x_TH, None if angles is None else angles(layer), attends(index), router_losses)
        return self._final_norm(x_TH) if self.groups.is_last_stage else x_TH

    def _embed(self, ids_T: Tensor, position_T: Tensor) -> Tensor:
        weights, (start, stop) = self._by_layer[-1], self.vocab_range
        if self.groups.tp.size == 1:
            x_TH = F.embedding(ids_T, weights["embedding.weight"])
        else:
            here_T = (ids_T >= start) & (ids_T < stop)
            x_TH = F.embedding(torch.where(here_T, ids_T - start, 0), weights["embedding.weight"])
            x_TH = sum_over_group(x_TH * here_T[:, None], self.groups.tp)
        if (scale := self.config.embedding_scale) != 1:
            x_TH = x_TH * float(torch.tensor(scale, dtype=x_TH.dtype))  # Rounded first, as transformers does.
        if "positions.weight" in weights:
            x_TH = x_TH + F.embedding(position_T, weights["positions.weight"])
        return x_TH

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Last stage: logits_TV over `vocab_range`, in `wide`."""
        c, ends = self.config, self._by_layer
        weight = ends[-1]["embedding.weight"] if c.tied else ends[None]["lm_head.weight"]
        logits_TV = F.linear(copy_to_group(hidden_TH, self.groups.tp), weight).to(self.wide)
        if c.logit_scale != 1:
            logits_TV = logits_TV * c.logit_scale
        if (cap := c.logit_softcap) is not None:
            logits_TV = cap * torch.tanh(logits_TV / cap)
        return logits_TV

    def scores(self, hidden_TH: Tensor) -> Tensor:
        """Last stage of a model with a score head: scores_T, in `wide`."""
        return F.linear(hidden_TH, self._by_layer[None]["score.weight"])[:, 0].to(self.wide)

    def new_cache(self, rows: int, max_len: int) -> KVCache:
        """An empty cache for this stage's layers."""
        block = self.blocks[0]
        assert isinstance(block, Block)
        heads, dim, value_dim = block.attention.cache_heads
        return KVCache(
            len(self.blocks), (rows, heads, max_len, dim), value_dim=value_dim, dtype=self.flat.dtype,
            device=self.flat.device)


def _move_grad(view: Tensor, weight: Tensor) -> None:
    """Adds a fresh gradient to its place in the gradient buffer."""
    assert weight.grad is not None
    view.add_(weight.grad)
    weight.grad = None
