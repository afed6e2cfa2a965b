"""Transformer: one rank's shard of a Llama- or Qwen2-style decoder, built from the parameter table.

Shape suffixes: T tokens of all sequences end to end, B rows of a decoding step, H hidden; of this rank: F MLP
width, N query heads, K key-value heads, V part of the vocabulary; D head dim.
"""

import hashlib
import re
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realhf.dist.autograd import copy_to_group, sum_over_group
from realhf.dist.group import Group
from realhf.dist.parallel import ParallelGroups
from realhf.model_config import ModelConfig
from realhf.nn.attention import packed_attention
from realhf.nn.kv_cache import KVCache
from realhf.param_spec import ModelSpec, region_size, region_slices
from realhf.realloc.bind import shards_of

_EMBEDDING = "model.embed_tokens.weight"

Rope = tuple[Tensor, Tensor]
"""cos and sin of every token's angles, each of shape (T, 1, D / 2)."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q_TND, k_TKD, v_TKD) -> out_TND."""


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
        starts: dict[str, int] = {}
        self._weights: dict[str, torch.nn.Parameter] = {}
        for name, (start, stop) in self._offsets.items():
            fused = re.sub("[qkv]_proj", "qkv_proj", re.sub("(gate|up)_proj", "gate_up_proj", name))
            rows = self.flat[starts.setdefault(fused, start) : stop]
            rows = rows.view(-1, *(hi - lo for lo, hi in self.regions[name][1:]))
            self._weights[fused] = torch.nn.Parameter(rows, requires_grad=False)
        for name, weight in self._weights.items():
            if not name.startswith("model.layers."):
                self.register_parameter(name.replace(".", "_"), weight)
        layers = spec.stage_layers(groups.layout.strategy, groups.at.pp)
        self.blocks = torch.nn.ModuleList(Block(self.config, self._weights, i, groups.tp) for i in layers)
        tp, index = groups.layout.tp, groups.at.tp
        self.vocab_range = next(p for p in spec.params if p.name == _EMBEDDING).region(tp, index)[0]
        """Global token ids of this rank's logits: [start, stop)."""
        shared = [p for p in spec.params if p.name in self.regions and p.has_partial_gradient(tp)]
        self._shared = [p.name for p in shared]
        self._sharers = groups.tp_subgroup(shared[0].sharers(tp, index)) if shared else None

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
    def init_random(self, seed: int) -> None:
        """Normal weights, norms 1, biases 0; same in every layout: each parameter has its own generator."""
        std = self.config.hf.get("initializer_range", 0.02)
        shapes = {param.name: param.shape for param in self.spec.params}
        for name, shard in self.shards().items():
            if name.endswith(("norm.weight", ".bias")):
                shard.fill_(name.endswith("norm.weight"))
                continue
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
            whole = torch.empty(shapes[name]).normal_(0.0, std, generator=generator)
            shard.copy_(whole[region_slices(self.regions[name])])

    def enable_grad(self) -> None:
        """Makes the model trainable; call it once."""
        self.grad_buffer = torch.zeros_like(self.flat, dtype=self.wide)
        for weight in self._weights.values():
            view = self.grad_buffer[weight.storage_offset() :][: weight.numel()].view_as(weight)
            weight.requires_grad_(True).register_post_accumulate_grad_hook(partial(_move_grad, view))

    def zero_grad_buffer(self) -> None:
        assert self.grad_buffer is not None, "enable_grad comes first"
        self.grad_buffer.zero_()

    def finish_grads(self) -> None:
        """Completes gradients after the last backward pass of a step, within one dp replica.

        Adds up what tp ranks with the same key-value heads and what both holders of a tied embedding have.
        """
        grads = self.grad_shards()
        if self._sharers is not None:
            parts = [grads[name].view(-1) for name in self._shared]
            total = self._sharers.all_reduce(torch.cat(parts))
            for part, value in zip(parts, total.split([len(p) for p in parts]), strict=True):
                part.copy_(value)
        if self.config.tied and self.groups.ends is not None:
            self.groups.ends.all_reduce(grads[_EMBEDDING])

    # Computation

    def forward(
        self, x: Tensor, seq_lens: list[int], cache: KVCache | None = None, *, recompute: bool = False
    ) -> Tensor:
        """Packed sequences through this stage: ids_T on the first stage, else hidden_TH; gives hidden_TH.

        With a cache it is the prefill: sequence i goes to row i of the emptied cache. With `recompute`, every
        block keeps only its input and is computed again in the backward pass (Chen et al. 2016).
        """
        counts = torch.tensor(seq_lens, dtype=torch.long)
        row_T = torch.repeat_interleave(counts)
        position_T = (torch.arange(len(row_T)) - (counts.cumsum(0) - counts)[row_T]).to(x.device)
        row_T = row_T.to(x.device)
        if cache is not None:
            cache.start(counts)

        def attend(layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
            if cache is not None:
                cache.write(layer, k_TKD, v_TKD, row_T=row_T, position_T=position_T)
            return packed_attention(q_TND, k_TKD, v_TKD, seq_lens)

        return self._stage(x, position_T, attend, recompute=recompute)

    def decode(self, x: Tensor, cache: KVCache) -> Tensor:
        """One new token per cache row: ids_B on the first stage, else hidden_BH; gives hidden_BH."""
        position_B = cache.lens
        row_B = torch.arange(len(position_B), device=x.device)
        cache.advance()

        def attend(layer: int, q_BND: Tensor, k_BKD: Tensor, v_BKD: Tensor) -> Tensor:
            cache.write(layer, k_BKD, v_BKD, row_T=row_B, position_T=position_B)
            return cache.attention(layer, q_BND)

        return self._stage(x, position_B, attend)

    def _stage(
        self, x: Tensor, position_T: Tensor, attend: Callable[..., Tensor], *, recompute: bool = False
    ) -> Tensor:
        x_TH = self._embed(x) if self.groups.is_first_stage else x
        rope = self._rope(position_T)
        for layer, block in enumerate(self.blocks):
            # The ranks of a tp group compute it again at the same place of their backward passes and stop
            # behind the same last saved tensor: their collectives stay in step.
            again = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
            run = again if recompute else block
            x_TH = run(x_TH, rope, partial(attend, layer))
        if self.groups.is_last_stage:
            x_TH = _rms_norm(x_TH, self._weights["model.norm.weight"], self.config)
        return x_TH

    def _embed(self, ids_T: Tensor) -> Tensor:
        weight, (start, stop) = self._weights[_EMBEDDING], self.vocab_range
        if self.groups.tp.size == 1:
            return F.embedding(ids_T, weight)
        here_T = (ids_T >= start) & (ids_T < stop)
        x_TH = F.embedding(torch.where(here_T, ids_T - start, 0), weight) * here_T[:, None]
        return sum_over_group(x_TH, self.groups.tp)

    def _rope(self, position_T: Tensor) -> Rope:
        dim = self.config.head_dim
        exponent = torch.arange(0, dim, 2, dtype=self.wide, device=self.flat.device) / dim
        angles = position_T[:, None, None].to(self.wide) * (1.0 / self.config.rope_theta**exponent)
        return angles.cos().to(self.flat.dtype), angles.sin().to(self.flat.dtype)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Last stage: logits_TV over `vocab_range`, in `wide`."""
        weight = self._weights[_EMBEDDING if self.config.tied else "lm_head.weight"]
        return F.linear(copy_to_group(hidden_TH, self.groups.tp), weight).to(self.wide)

    def scores(self, hidden_TH: Tensor) -> Tensor:
        """Last stage of a model with a score head: scores_T, in `wide`."""
        return F.linear(hidden_TH, self._weights["score.weight"])[:, 0].to(self.wide)

    def new_cache(self, rows: int, max_len: int) -> KVCache:
        """An empty cache for this stage's layers."""
        block = self.blocks[0]
        assert isinstance(block, Block)
        shape = (rows, block.num_kv_heads, max_len, self.config.head_dim)
        return KVCache(len(self.blocks), shape, dtype=self.flat.dtype, device=self.flat.device)


class Block(torch.nn.Module):
    """One decoder layer's tensor-parallel part: attention and SwiGLU MLP, each behind an RMSNorm."""

    def __init__(
        self, config: ModelConfig, weights: dict[str, torch.nn.Parameter], layer: int, tp: Group
    ) -> None:
        super().__init__()
        self.config, self.tp = config, tp
        at = f"model.layers.{layer}"
        self.input_norm = weights[f"{at}.input_layernorm.weight"]
        self.qkv = weights[f"{at}.self_attn.qkv_proj.weight"]
        self.qkv_bias = weights.get(f"{at}.self_attn.qkv_proj.bias")
        self.attn_out = weights[f"{at}.self_attn.o_proj.weight"]
        self.mlp_norm = weights[f"{at}.post_attention_layernorm.weight"]
        self.gate_up = weights[f"{at}.mlp.gate_up_proj.weight"]
        self.down = weights[f"{at}.mlp.down_proj.weight"]
        self.num_heads = self.attn_out.shape[1] // config.head_dim
        self.num_kv_heads = (self.qkv.shape[0] // config.head_dim - self.num_heads) // 2

    def forward(self, x_TH: Tensor, rope: Rope, attend: Attend) -> Tensor:
        x_TH = x_TH + self._attention(_rms_norm(x_TH, self.input_norm, self.config), rope, attend)
        return x_TH + self._mlp(_rms_norm(x_TH, self.mlp_norm, self.config))

    def _attention(self, x_TH: Tensor, rope: Rope, attend: Attend) -> Tensor:
        N, K = self.num_heads, self.num_kv_heads
        qkv = F.linear(copy_to_group(x_TH, self.tp), self.qkv, self.qkv_bias)
        qk, v_TKD = qkv.unflatten(1, (-1, self.config.head_dim)).split((N + K, K), dim=1)
        q_TND, k_TKD = _rotate(qk, rope).split((N, K), dim=1)
        return sum_over_group(F.linear(attend(q_TND, k_TKD, v_TKD).flatten(1), self.attn_out), self.tp)

    def _mlp(self, x_TH: Tensor) -> Tensor:
        gate_TF, up_TF = F.linear(copy_to_group(x_TH, self.tp), self.gate_up).chunk(2, dim=1)
        return sum_over_group(F.linear(F.silu(gate_TF) * up_TF, self.down), self.tp)


def _rms_norm(x_TH: Tensor, weight_H: Tensor, config: ModelConfig) -> Tensor:
    return F.rms_norm(x_TH, weight_H.shape, weight_H, config.rms_norm_eps)


def _rotate(x_TND: Tensor, rope: Rope) -> Tensor:
    """Rotary position embedding in Hugging Face's convention: dim i turns together with dim i + D/2."""
    cos, sin = rope
    a, b = x_TND.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _move_grad(view: Tensor, weight: Tensor) -> None:
    """Adds a fresh gradient to its place in the gradient buffer."""
    assert weight.grad is not None
    view.add_(weight.grad)
    weight.grad = None
