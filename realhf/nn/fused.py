"""Chains of element-wise work as single kernels on a GPU.

torch launches a kernel for every operation, and a decoding step has so little to compute that it takes as
long as its launches. Between two products of a layer there is then one kernel each: the sum with its norm;
the rotation of queries and keys with the write to the cache; the gated activation. In training the kernels of
activations and logits read and write memory once, where torch's operations do so many times. Everywhere else,
torch's operations do the same, and the kernels are compared with them (tests/nn/test_fused.py).

Shape suffixes: T tokens, H hidden, F width of an MLP, V this rank's vocabulary; K labels of a token.
"""

import sys
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from realhf.attention.choose import refuses_chains
from realhf.distributed.group import Group
from realhf.models.model_config import MoeConfig

if TYPE_CHECKING:
    from realhf.nn.norm import Norm
    from realhf.nn.vocab_parallel import Head

_GATED_BLOCK = 1024  # Elements of a row that a program activates.
_VOCABULARY_BLOCK = 4096  # Logits that a program reads at a time.
_ROWS_BLOCK = 1024  # Rows of experts that a program sorts at a time.
_NUMEL_PER_WARP = 512  # Elements of a row that a warp normalises.
_MOST_WARPS = 16


class CachePlace(NamedTuple):
    """The place in a cache for the keys and values of a pass: one or two tensors of a layer, of shape (tokens
    in the cache, heads, dim), and the cache positions of the pass's tokens."""

    memory: Tensor
    positions_T: Tensor
    written_T: Tensor | None = None  # The token that each position gets; None: the tokens in order.

    def write(self, *news: Tensor) -> None:
        for cached, new in zip(self.memory, news, strict=True):
            rows = new if self.written_T is None else new.index_select(0, self.written_T)
            cached.index_copy_(0, self.positions_T, rows)


class TritonChains:
    """Our own kernels. Their arguments must be contiguous, without gradients."""

    def add_norm(
        self, x_TH: Tensor, y_TH: Tensor | None, *, scale: float, out_norm: "Norm | None", norm: "Norm | None"
    ) -> tuple[Tensor, Tensor]:
        """Return x + scale out_norm(y), which is x without `y_TH`, and the norm of that."""
        from realhf.nn import fused_kernels as kernels

        size = x_TH.shape[1]
        kind, out_kind = _kind(norm), _kind(out_norm)
        if y_TH is None and not kind:
            return x_TH, x_TH
        total_TH = x_TH if y_TH is None else torch.empty_like(x_TH)
        normed_TH = torch.empty_like(x_TH) if kind else total_TH
        weights = (*_weights(out_norm, x_TH), *_weights(norm, x_TH))
        numbers = (*_numbers(out_norm), *_numbers(norm))
        kernels.add_norm[(len(x_TH),)](
            x_TH, x_TH if y_TH is None else y_TH, total_TH, normed_TH, *weights, float(scale), *numbers, size,
            HAS_Y=y_TH is not None, OUT_NORM=out_kind, NORM=kind, BLOCK_H=_power_of_two(size),
            num_warps=min(_power_of_two(size // _NUMEL_PER_WARP), _MOST_WARPS))
        return total_TH, normed_TH

    def rotate_and_store(
        self, qkv: Tensor, *, num_kv_heads: int, angles: tuple[Tensor, Tensor] | None, interleaved: bool,
        norms: "tuple[Norm, Norm] | None", place: CachePlace | None, by_head: bool = True,
    ) -> Tensor:
        """Return `qkv` (tokens, heads of queries, keys and values, dim) with queries and keys normalised,
        `by_head` or all heads at once, and rotated, after keys and values have been written to the cache."""
        from realhf.nn import fused_kernels as kernels

        num_heads, dim = qkv.shape[1:]
        out = torch.empty_like(qkv)
        cos, sin = (qkv, qkv) if angles is None else angles
        q_weight, k_weight = (qkv, qkv) if norms is None else (norm.weight for norm in norms)
        memory = (qkv, qkv) if place is None else tuple(place.memory)
        most_heads = max(num_heads - 2 * num_kv_heads, num_kv_heads)
        normed_at_once = 0 if norms is None or by_head else _power_of_two(most_heads * dim)
        kernels.rotate_and_store[(len(qkv), num_heads)](
            qkv, out, cos, sin, q_weight, k_weight, *memory, qkv if place is None else place.positions_T,
            *_numbers(norms and norms[0]),
            num_heads - 2 * num_kv_heads, num_kv_heads, qkv.stride(0), *(x.stride(0) for x in memory),
            DIM=dim, ROTATED=0 if angles is None else 2 * cos.shape[-1], INTERLEAVED=interleaved,
            HAS_NORM=norms is not None, STORES=place is not None, BLOCK_D=_power_of_two(dim),
            BLOCK_N=normed_at_once, num_warps=4 if normed_at_once else 1)
        return out

    def rotate_latent(
        self, q_TND: Tensor, kv_TL: Tensor, *, norm: "Norm", angles: tuple[Tensor, Tensor] | None,
        interleaved: bool, place: CachePlace | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the last dims of the queries, rotated (T, heads, R), and the latents, normalised, with the
        rotated key behind them (T, 1, L), after these have been written to the cache. `kv_TL` are the latents
        with the keys."""
        from realhf.nn import fused_kernels as kernels

        assert norm.weight is not None
        num_tokens, num_heads, head_dim = q_TND.shape
        rank = len(norm.weight)
        dim = kv_TL.shape[1] - rank
        q_TNR = q_TND.new_empty(num_tokens, num_heads, dim)
        out_T1L = kv_TL.new_empty(num_tokens, 1, rank + dim)
        cos, sin = (kv_TL, kv_TL) if angles is None else angles
        memory, positions = (kv_TL, kv_TL) if place is None else (place.memory[0], place.positions_T)
        kernels.rotate_latent[(num_tokens, num_heads + 1)](
            q_TND[..., head_dim - dim :], kv_TL, q_TNR, out_T1L, cos, sin, norm.weight, memory, positions,
            float(norm.eps), num_heads, *q_TND.stride()[:2], kv_TL.stride(0), memory.stride(0),
            RANK=rank, DIM=dim, ROTATED=0 if angles is None else 2 * cos.shape[-1], INTERLEAVED=interleaved,
            STORES=place is not None, BLOCK_C=_power_of_two(rank), BLOCK_D=_power_of_two(dim), num_warps=1)
        return q_TNR, out_T1L

    def angles(
        self, position_T: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions times frequencies: factor * cos, (T, 1, frequencies)."""
        from realhf.nn import fused_kernels as kernels

        shape = (len(position_T), 1, len(frequencies))
        cos, sin = (torch.empty(shape, dtype=dtype, device=position_T.device) for _ in range(2))
        kernels.angles[(len(position_T),)](
            position_T, frequencies, float(factor), cos, sin, HALF=len(frequencies),
            BLOCK=_power_of_two(len(frequencies)), num_warps=1)
        return cos, sin

    def gated(self, up_TF: Tensor, activation: str) -> Tensor:
        """Return activation(gate) * up, of a tensor that has the gate in its first half."""
        from realhf.nn import fused_kernels as kernels

        width = up_TF.shape[1] // 2
        out_TF = up_TF.new_empty(len(up_TF), width)
        kernels.gated[(len(up_TF), -(-width // _GATED_BLOCK))](
            up_TF, out_TF, width, ACTIVATION=activation, BLOCK_F=_GATED_BLOCK)
        return out_TF

    def gated_backward(self, grad_TF: Tensor, up_TF: Tensor, activation: str) -> Tensor:
        """Return the gradient of `up_TF`; the output of `gated` is written over `grad_TF`."""
        from realhf.nn import fused_kernels as kernels

        width = grad_TF.shape[1]
        out_TF = torch.empty_like(up_TF)
        kernels.gated_backward[(len(up_TF), -(-width // _GATED_BLOCK))](
            grad_TF, up_TF, out_TF, width, ACTIVATION=activation, BLOCK_F=_GATED_BLOCK)
        return out_TF

    def route(
        self, logits_TE: Tensor, moe: MoeConfig, bias: Tensor | None, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return weights_TK, in this dtype, and expert_TK: each token's experts. The `bias`, which counts in
        their choice only, is a sum of terms."""
        from realhf.nn import fused_kernels as kernels

        num_tokens, num_experts = logits_TE.shape
        num = moe.num_experts_per_token
        weights_TK = logits_TE.new_empty(num_tokens, num, dtype=dtype)
        expert_TK = torch.empty_like(weights_TK, dtype=torch.int64)
        kernels.route[(num_tokens,)](
            logits_TE, logits_TE if bias is None else bias, weights_TK, expert_TK, float(moe.scale),
            num_experts, NUM=num, NORMALIZE=moe.normalize, SIGMOID=moe.scores == "sigmoid",
            BIAS_TERMS=0 if bias is None else len(bias), GROUPS=moe.num_groups,
            CHOSEN_GROUPS=moe.num_groups_per_token, BLOCK_E=_power_of_two(num_experts),
            BLOCK_K=_power_of_two(num))
        return weights_TK, expert_TK

    def group_rows(self, expert_TK: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sort the rows, each a token and one of its experts, by expert. Return the token of each sorted row,
        the place of each row among the sorted ones, and where each expert's rows end (int32).

        Rows whose expert is `num_experts` come last, those of the same expert in order.
        """
        from realhf.nn import fused_kernels as kernels

        num_rows = expert_TK.numel()
        token_R, place_R = (expert_TK.new_empty(num_rows) for _ in range(2))
        ends = token_R.new_empty(num_experts + 1, dtype=torch.int32)
        kernels.group_rows[(num_experts + 1,)](
            expert_TK, token_R, place_R, ends, num_rows, NUM=expert_TK.shape[1], BLOCK_R=_ROWS_BLOCK)
        return token_R, place_R, ends[:-1]

    def mix(self, y_RH: Tensor, weights_TK: Tensor, place_R: Tensor) -> Tensor:
        """Return the weighted sum of each token's rows, which are at their places in `y_RH`."""
        from realhf.nn import fused_kernels as kernels

        num_tokens, num = weights_TK.shape
        size = y_RH.shape[1]
        out_TH = y_RH.new_empty(num_tokens, size)
        kernels.mix[(num_tokens, -(-size // _GATED_BLOCK))](
            y_RH, weights_TK, place_R, out_TH, size, NUM=num, BLOCK_H=_GATED_BLOCK)
        return out_TH

    def logit_statistics(
        self, product_TV: Tensor, at_TK: Tensor, head: "Head", temperature: float, entropy: bool
    ) -> Tensor:
        """Return each token's log-sum-exp, its labels' logits and, if wanted, its mean logit."""
        from realhf.nn import fused_kernels as kernels

        num_tokens, num_labels = at_TK.shape
        statistics = product_TV.new_empty(num_tokens, 1 + num_labels + entropy, dtype=torch.float32)
        kernels.logit_statistics[(num_tokens,)](
            product_TV, at_TK.contiguous(), statistics, *_of_logits(head, temperature), product_TV.shape[1],
            num_labels, HAS_SOFTCAP=head.softcap is not None, ENTROPY=entropy, BLOCK_V=_VOCABULARY_BLOCK,
            num_warps=8)
        return statistics

    def logit_gradient(
        self, product_TV: Tensor, grad_TK: Tensor, lse_T: Tensor, labels: tuple[Tensor, Tensor],
        of_entropy: tuple[Tensor, Tensor] | None, head: "Head", temperature: float,
    ) -> None:
        """Turn the product of the head in place into its gradient; see `vocab_parallel._to_gradient`."""
        from realhf.nn import fused_kernels as kernels

        at_TK, here_TK = labels
        num_tokens, size = product_TV.shape
        grad_T = grad_TK.sum(1)
        entropy_T, entropy_grad_T = (grad_T, grad_T) if of_entropy is None else of_entropy
        kernels.logit_gradient[(num_tokens, -(-size // _VOCABULARY_BLOCK))](
            product_TV, at_TK.contiguous(), (grad_TK * here_TK).contiguous(), grad_T, lse_T.contiguous(),
            entropy_T.contiguous(), entropy_grad_T.contiguous(), *_of_logits(head, temperature), size,
            at_TK.shape[1], HAS_SOFTCAP=head.softcap is not None, ENTROPY=of_entropy is not None,
            BLOCK_V=_VOCABULARY_BLOCK, num_warps=8)


def chains_of(x: Tensor, dtype: torch.dtype | None = None) -> TritonChains | None:
    """Return the kernels for the tensor's device and a dtype (default: its own); None: torch's operations
    compute the chains, as for no tokens."""
    if not x.is_cuda or not len(x):
        return None
    return _chosen(x.device, x.dtype if dtype is None else dtype)


@lru_cache
def _chosen(device: torch.device, dtype: torch.dtype) -> TritonChains | None:
    reason = refuses_chains(device, dtype)
    if reason is None:
        return TritonChains()
    if not device.index:
        what = f"element-wise work in {str(dtype).removeprefix('torch.')}"
        print(f"realhf: {what}: torch's operations, as {reason}", file=sys.stderr, flush=True)
    return None


def takes_bias(x: Tensor, group: Group) -> bool:
    """Return whether a product adds the bias that follows its sum over the group, as there is no such sum."""
    return group.size == 1 and not torch.is_grad_enabled() and chains_of(x) is not None


def _of_logits(head: "Head", temperature: float) -> tuple[float, float, float]:
    return float(head.scale), float(head.softcap or 1.0), float(temperature)


def _kind(norm: "Norm | None") -> int:
    if norm is None or norm.weight is None:
        return 0
    return 1 if norm.bias is None else 2


def _weights(norm: "Norm | None", other: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias; any tensor stands for those that the norm does not have."""
    if norm is None or norm.weight is None:
        return other, other
    return norm.weight, norm.weight if norm.bias is None else norm.bias


def _numbers(norm: "Norm | None") -> tuple[float, float]:
    return (0.0, 0.0) if norm is None else (float(norm.eps), float(norm.offset))


def _power_of_two(size: int) -> int:
    return 1 << max(0, size - 1).bit_length()
