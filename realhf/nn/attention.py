"""Attention layers: grouped-query and latent attention, over the tokens of a pass or over a cache, and the
exchange of heads under context parallelism.

Attend says over which tokens a layer attends, and Segment how a part of a pass attends to a cache.
LatentAttention is DeepSeek's multi-head latent attention (arXiv:2405.04434, section 2.1).

Under context parallelism each rank does the token-wise work for its own range of the packed tokens; a
sequence may be split anywhere. Before attention, a rank has all heads of its tokens; an all-to-all
exchanges these for all tokens of some heads. Another all-to-all after attention turns that back. Attention
itself does not change (DeepSpeed-Ulysses, arXiv:2309.14509).

Shape suffixes: T tokens of all sequences end to end, H hidden, N query heads, K key-value heads, D head
dim. In LatentAttention: C latent dims, L = C + R cached dims; per head: P dims of queries and keys without
rotation, R rotated ones, D = P + R, V value dims; J cached tokens. In `attend_over_group`: t tokens of this
rank's range, C ranks of the group, R = C * t; N heads of queries and K of keys and values before the
exchange, n and k after it; E dims of values, W numbers that one token sends to one rank.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from realhf.attention.choose import packed_backend
from realhf.attention.interface import AttentionKind, AttentionShape, Sequences
from realhf.devices.half_precision import widened
from realhf.distributed.group import Group, copy_to_group, exchange_rows, sum_over_group
from realhf.layout import even_split
from realhf.models.model_config import ModelConfig
from realhf.nn.fused import CachePlace, chains_of, takes_bias
from realhf.nn.linear import add_bias, wide
from realhf.nn.lora import Adapted, adapted_linear
from realhf.nn.norm import Norm
from realhf.nn.parameters import Weights
from realhf.nn.rope import Angles, rotate

Expand = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Returns the keys and values of tokens, k_JND and v_JND, from what a cache holds of them."""


@dataclass(frozen=True)
class Attend:
    """The attention of one layer over all or some tokens of a pass: (kind, q_TND, k_TKD, v_TKD) -> out_TND.

    With `from_cache`, the tokens attend to the cache, to which their own keys and values have been written;
    it does not read `k_TKD` and `v_TKD`. Without it, the tokens attend to one another. If it also `expands`,
    they attend to earlier tokens as well, whose keys and values `expand` computes from the cache.
    """

    compute: Callable[..., Tensor]
    from_cache: bool = False
    tokens: slice | None = None  # Which tokens of the pass; None: all.
    expands: bool = False

    def __call__(
        self, kind: AttentionKind, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor,
        *, expand: Expand | None = None,
    ) -> Tensor:
        options = {"expand": expand} if self.expands else {}
        return self.compute(q_TND, k_TKD, v_TKD, kind=kind, **options)


def attend_each(attends: Sequence[Attend], compute: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Call `compute(attend, *tensors)` on the tokens of each Attend, and return out_TND of all tokens."""
    if len(attends) == 1:
        return compute(attends[0], *tensors)
    slices = ((attend, [x[attend.tokens or slice(None)] for x in tensors]) for attend in attends)
    return torch.cat([compute(attend, *own_tensors) for attend, own_tensors in slices])


def packed_attention(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, sequences: Sequences, kind: AttentionKind
) -> Tensor:
    """Return the causal grouped-query attention within each sequence, out_TND, by the device's backend."""
    shape = AttentionShape(kind, q_TND.shape[-1], v_TKD.shape[-1], q_TND.dtype)
    return packed_backend(q_TND.device, shape).packed(q_TND, k_TKD, v_TKD, sequences, kind)


class Segment(ABC):
    """Tokens of one pass that attend in the same way, and whose keys and values go into a cache.

    It has, for each token, the position, the final length of its sequence, and the cache position: block *
    block_size + offset in the block.
    """

    from_cache = True
    """Whether the tokens attend to the cache's contents, rather than to one another."""
    expands = False
    """Whether tokens that attend to one another also attend to earlier ones (see Attend.expands)."""
    written_T: Tensor | None = None
    """The token whose keys and values each cache position gets; None: the tokens in order."""

    def __init__(
        self, position_T: Tensor, length_T: Tensor, cache_positions_T: Tensor, *, longest: int = 0
    ) -> None:
        """`longest` is the final length of the longest sequence; 0 if an earlier pass has checked it."""
        self.position_T = position_T
        self.length_T = length_T
        self.cache_positions_T = cache_positions_T
        self.longest = longest

    @abstractmethod
    def attend(
        self, cache: Any, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        """Return the attention's output out_TND; the cache already has the keys and values of the tokens."""


class Attention:
    """Grouped-query attention over this rank's heads."""

    def __init__(
        self, config: ModelConfig, weights: Weights, layer: int, tp: Group, adapters: Adapted
    ) -> None:
        self.config = config
        self.tp = tp
        self.adapters = adapters
        self.qkv = weights["qkv.weight"]
        self.qkv_bias = weights.get("qkv.bias")
        self.out = weights["o.weight"]
        self.out_bias = weights.get("o.bias")
        self.q_norm = Norm(config, weights, "q_norm")
        self.k_norm = Norm(config, weights, "k_norm")
        self.num_heads = self.out.shape[1] // config.head_dim
        self.num_kv_heads = (self.qkv.shape[0] // config.head_dim - self.num_heads) // 2
        self.kind = AttentionKind.of(config, layer)
        # If no kernel computes this kind, this raises now, and not in the middle of a run.
        dim = config.head_dim
        packed_backend(self.qkv.device, AttentionShape(self.kind, dim, dim, self.qkv.compute_dtype))

    def __call__(
        self, x_TH: Tensor, angles: Angles | None, attends: Sequence[Attend], place: CachePlace | None = None
    ) -> Tensor:
        N, K = self.num_heads, self.num_kv_heads
        x_TH = copy_to_group(x_TH, self.tp)
        qkv = adapted_linear(x_TH, self.qkv, self.qkv_bias, self.adapters.get("qkv.weight"))
        qkv = self._placed(qkv.view(len(qkv), N + 2 * K, self.config.head_dim), angles, place)
        q_TND, k_TKD, v_TKD = qkv.split((N, K, K), dim=1)
        out_TND = attend_each(attends, lambda attend, *qkv: attend(self.kind, *qkv), q_TND, k_TKD, v_TKD)
        out_TH = out_TND.flatten(1)
        adapter = self.adapters.get("o.weight")
        if takes_bias(out_TH, self.tp):
            return adapted_linear(out_TH, self.out, self.out_bias, adapter)
        y_TH = adapted_linear(out_TH, self.out, adapter=adapter)
        return add_bias(sum_over_group(y_TH, self.tp), self.out_bias)

    def _placed(self, qkv: Tensor, angles: Angles | None, place: CachePlace | None) -> Tensor:
        """Return queries, keys and values, normalised and rotated, after these are written to the cache."""
        N, K = self.num_heads, self.num_kv_heads
        interleaved = self.config.rope_interleaved
        chains = None if torch.is_grad_enabled() else chains_of(qkv)
        by_head = self.config.qk_norm == "head"
        in_chain = self.config.qk_norm is not None and (by_head or self.tp.size == 1)
        if self.config.qk_norm is not None and not (chains is not None and in_chain):
            q_TND, k_TKD, v_TKD = qkv.split((N, K, K), dim=1)
            q_TND = self._normed(q_TND, self.q_norm)
            k_TKD = self._normed(k_TKD, self.k_norm)
            qkv = torch.cat((q_TND, k_TKD, v_TKD), dim=1)
        if chains is not None:
            norms = (self.q_norm, self.k_norm) if in_chain else None
            return chains.rotate_and_store(
                qkv, num_kv_heads=K, angles=angles, interleaved=interleaved, norms=norms, place=place,
                by_head=by_head)
        if angles is not None:
            qkv = rotate(qkv, angles, interleaved=interleaved, num_heads=N + K)
        if place is not None:
            place.write(*qkv.split((N, K, K), dim=1)[1:])
        return qkv

    def _normed(self, x_TND: Tensor, norm: Norm) -> Tensor:
        """Return queries or keys normalised per head, or over all heads, those of other ranks included."""
        if self.config.qk_norm == "head":
            return norm(x_TND)
        if self.tp.size == 1:
            return norm(x_TND.flatten(1)).view_as(x_TND)
        assert norm.weight is not None
        whole = (self.config.num_heads if norm is self.q_norm else self.config.num_kv_heads) * x_TND.shape[2]
        copies = self.tp.size * x_TND.shape[1] * x_TND.shape[2] // whole  # Number of ranks that hold a head.
        x = x_TND.to(torch.promote_types(x_TND.dtype, torch.float32))
        squares_T = sum_over_group(x.square().sum((1, 2)) / (copies * whole), self.tp)
        squares_T = copy_to_group(squares_T, self.tp)  # The outputs of every rank depend on it.
        x = x * (squares_T + norm.eps).rsqrt()[:, None, None]
        weight_ND = wide(norm.weight).view(x_TND.shape[1:])
        return (x.to(x_TND.dtype) * weight_ND).to(x_TND.dtype)


_NORM_EPS = 1e-6  # The latents' norms do not use the epsilon of config.json, as in transformers.


class LatentAttention:
    """Attention over this rank's heads, with keys and values computed from one latent vector per token.

    The cache holds the latent and the rotated dims of the key, which all heads share. Attention to the cache
    is multi-query attention over these: instead of keys and values, queries and outputs are multiplied with
    the up-projections.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, layer: int, tp: Group, adapters: Adapted
    ) -> None:
        assert config.mla is not None
        self.config = config
        self.mla = config.mla
        self.tp = tp
        self.adapters = adapters
        modules = ("q", "q_a", "q_b", "kv_a", "kv_b", "o")
        self.linears = {name: weights[f"{name}.weight"] for name in modules if f"{name}.weight" in weights}
        self.q_a_norm, self.kv_a_norm = (
            Norm(config, weights, module, eps=_NORM_EPS) for module in ("q_a_norm", "kv_a_norm"))
        self.num_heads = self.linears["o"].shape[1] // config.mla.v_head_dim
        self.kind = AttentionKind.of(config, layer)
        mla = config.mla
        norm = weights["kv_a_norm.weight"]
        dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        packed_backend(norm.device, AttentionShape(self.kind, dim, mla.v_head_dim, norm.dtype))

    def __call__(
        self, x_TH: Tensor, angles: Angles | None, attends: Sequence[Attend], place: CachePlace | None = None
    ) -> Tensor:
        mla = self.mla
        sizes = (mla.kv_lora_rank, mla.qk_rope_head_dim)
        q_TND = self._queries(x_TH)
        kv_TL = self._project("kv_a", x_TH)
        q_TNP, q_TNR = q_TND.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=2)
        interleaved = self.config.rope_interleaved
        chains = None if torch.is_grad_enabled() else chains_of(kv_TL)
        if chains is not None:
            q_TNR, kv_T1L = chains.rotate_latent(
                q_TND, kv_TL, norm=self.kv_a_norm, angles=angles, interleaved=interleaved, place=place)
            latent_T1C, k_T1R = kv_T1L.split(sizes, dim=2)
            latent_TC = latent_T1C[:, 0]
        else:
            latent_TC, k_TR = kv_TL.split(sizes, dim=1)
            latent_TC = self.kv_a_norm(latent_TC)
            latent_TC, k_T1R = (copy_to_group(x, self.tp) for x in (latent_TC, k_TR[:, None]))
            if angles is not None:
                turn = partial(rotate, angles=angles, interleaved=interleaved)
                q_TNR, k_T1R = turn(q_TNR), turn(k_T1R)
            if place is not None:
                place.write(torch.cat((latent_TC[:, None], k_T1R), dim=2))
        out_TNV = attend_each(attends, self._attended, q_TNP, q_TNR, latent_TC, k_T1R)
        return sum_over_group(self._project("o", out_TNV.flatten(1)), self.tp)

    def _attended(
        self, attend: Attend, q_TNP: Tensor, q_TNR: Tensor, latent_TC: Tensor, k_T1R: Tensor
    ) -> Tensor:
        """Return out_TNV for the tokens of one Attend."""
        if attend.from_cache:
            up_NPC, up_NVC = self._up()
            q_TNL = torch.cat((_by_head("tnp,npc->tnc", q_TNP, up_NPC), q_TNR), dim=2)
            out_TNC = attend(self.kind, q_TNL, k_T1R, latent_TC[:, None])
            return _by_head("tnc,nvc->tnv", out_TNC, up_NVC)
        q_TND = torch.cat((q_TNP, q_TNR), dim=2)
        k_TND, v_TNV = self._keys_and_values(latent_TC, k_T1R)
        return attend(self.kind, q_TND, k_TND, v_TNV, expand=self._expanded)

    def _keys_and_values(self, latent_TC: Tensor, k_T1R: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of this rank's heads: k_TND, v_TNV."""
        kv = self._project("kv_b", latent_TC).unflatten(1, (self.num_heads, -1))
        k_TNP, v_TNV = kv.split((self.mla.qk_nope_head_dim, self.mla.v_head_dim), dim=2)
        return torch.cat((k_TNP, k_T1R.expand(-1, self.num_heads, -1)), dim=2), v_TNV

    def _expanded(self, cached_J1L: Tensor) -> tuple[Tensor, Tensor]:
        latent_J1C, k_J1R = cached_J1L.split((self.mla.kv_lora_rank, self.mla.qk_rope_head_dim), dim=2)
        return self._keys_and_values(latent_J1C[:, 0], k_J1R)

    def _queries(self, x_TH: Tensor) -> Tensor:
        if "q" in self.linears:
            q = self._project("q", copy_to_group(x_TH, self.tp))
        else:
            latent = self._project("q_a", x_TH)
            chains = None if torch.is_grad_enabled() else chains_of(latent)
            if chains is not None:
                _, latent = chains.add_norm(latent, None, scale=1.0, out_norm=None, norm=self.q_a_norm)
            else:
                latent = self.q_a_norm(latent)
            q = self._project("q_b", copy_to_group(latent, self.tp))
        return q.unflatten(1, (self.num_heads, -1))

    def _project(self, module: str, x: Tensor) -> Tensor:
        return adapted_linear(x, self.linears[module], adapter=self.adapters.get(f"{module}.weight"))

    def _up(self) -> tuple[Tensor, Tensor]:
        """Return the up-projections from the latent to keys (without rotation) and to values."""
        adapter = self.adapters.get("kv_b.weight")
        weight = self.linears["kv_b"] if adapter is None else adapter.merged()
        per_head = weight.unflatten(0, (self.num_heads, -1))
        key, value = per_head.split((self.mla.qk_nope_head_dim, self.mla.v_head_dim), dim=1)
        return key, value


def _by_head(equation: str, x: Tensor, weight: Tensor) -> Tensor:
    """Return each head's product with its own weight."""
    return torch.einsum(equation, widened(x), widened(weight)).to(x.dtype)


def token_range(num_tokens: int, group: Group) -> tuple[int, int]:
    """Return this rank's range [start, stop) of the tokens of a micro-batch; it may be empty."""
    return even_split(num_tokens, group.size, group.index)


def attend_over_group(
    attention: Callable[[Tensor, Tensor, Tensor], Tensor], q_tND: Tensor, k_tKD: Tensor, v_tKE: Tensor,
    *, group: Group, num_tokens: int,
) -> Tensor:
    """Return out_tNE of this rank's tokens; each rank runs `attention` on all tokens and N / C query heads.

    A key-value head goes to every rank that has one of its query heads, and its gradients are added up.
    """
    t, N, D = q_tND.shape
    K, E = v_tKE.shape[1:]
    C = group.size
    assert N % C == 0 and N % K == 0, "check_layout refuses such layouts"
    # Each copy of a key-value head serves `share` query heads, all of which are on one rank.
    share = math.gcd(N // C, N // K)
    k_tKD, v_tKE = (x.repeat_interleave(N // K // share, dim=1) for x in (k_tKD, v_tKE))
    n, k = N // C, N // C // share
    shapes = ((n, D), (k, D), (k, E))
    widths = [num_heads * dim for num_heads, dim in shapes]
    sent = zip((q_tND, k_tKD, v_tKE), widths, strict=True)
    mine = [t] * C
    whole = [stop - start for start, stop in (even_split(num_tokens, C, i) for i in range(C))]
    got_TW = exchange_rows(  # Sends (C, t, W): t rows to each rank.
        torch.cat([x.reshape(t, C, width).transpose(0, 1) for x, width in sent], dim=2).flatten(0, 1),
        group, mine, whole,
    )
    q_TnD, k_TkD, v_TkE = (
        x.unflatten(1, shape) for x, shape in zip(got_TW.split(widths, dim=1), shapes, strict=True))
    out_RW = exchange_rows(attention(q_TnD, k_TkD, v_TkE).flatten(1), group, whole, mine)
    return out_RW.view(C, t, n * E).transpose(0, 1).reshape(t, N, E)
