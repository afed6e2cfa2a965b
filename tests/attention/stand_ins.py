"""Functions with the signatures of FlashAttention-2 in flash-attn 2.8 and in torch, for tests without a GPU.

They compute by a formula, and have the kernels' demands. Calls are noted in `CALLS`.
"""

import torch

from realhf.attention.interface import AttentionKind
from tests.attention.cases import by_formula

CALLS = []


def _check(q, k, v, *, cu_q, window, is_causal, max_q, sees_all=False):
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    assert cu_q is None or cu_q.dtype == torch.int32
    # Otherwise a query would see what follows it.
    assert sees_all or is_causal or window[1] == 0 or (max_q == 1 and window == (-1, -1))
    if k.dim() == 4:
        assert k.shape[1] % 256 == 0, "a page has a multiple of 256 tokens"


def _sees_all(cu_q, cu_k, *, table, window, is_causal):
    """Return whether queries see all keys, which must then be other tokens' than their own."""
    found = table is None and not is_causal and window == (-1, -1)
    if found:
        assert int(cu_k.diff().min()) > 0, "a query without keys has a log-sum-exp of +inf"
    return found and cu_q is not cu_k


def _rows(q, k, v, cu_q, lens_k, table, kind, *, sees_all):
    outs, lses, start = [], [], 0
    for i, (first, last) in enumerate(zip(cu_q.tolist(), cu_q.tolist()[1:], strict=False)):
        length = int(lens_k[i])
        if table is None:
            keys, values = (x[start : start + length] for x in (k, v))
            start += length
        else:
            keys, values = (x[table[i].long()].flatten(0, 1)[:length] for x in (k, v))
        out, lse = by_formula(q[first:last], keys, values, kind, is_causal=not sees_all)
        outs.append(out.to(q.dtype))
        lses.append(lse.float())
    return torch.cat(outs), torch.cat(lses)


def _kind(q, scale, window, softcap=0.0):
    left = window[0]
    return AttentionKind(scale or q.shape[-1] ** -0.5, None if left < 0 else left + 1, softcap or None)


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None,
):
    sees_all = _sees_all(
        cu_seqlens_q, cu_seqlens_k, table=block_table, window=window_size, is_causal=causal)
    _check(q, k, v, cu_q=cu_seqlens_q, window=window_size, is_causal=causal, max_q=max_seqlen_q,
           sees_all=sees_all)
    assert cu_seqlens_k.dtype == torch.int32 and (block_table is None or block_table.dtype == torch.int32)
    lens_q, lens_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    assert int(lens_q.max()) <= max_seqlen_q and int(lens_k.max()) <= max_seqlen_k
    CALLS.append("flash_attn_varlen_func")
    kind = _kind(q, softmax_scale, window_size, softcap)
    out, lse = _rows(q, k, v, cu_seqlens_q, lens_k, block_table, kind, sees_all=sees_all)
    return (out, lse.T.contiguous(), None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):
    assert k is None and q.shape[1] == 1 and cache_seqlens.dtype == block_table.dtype == torch.int32
    _check(q, k_cache, v_cache, cu_q=None, window=window_size, is_causal=causal, max_q=1)
    CALLS.append(f"flash_attn_with_kvcache, {num_splits} splits")
    cu_q = torch.arange(len(q) + 1)
    kind = _kind(q, softmax_scale, window_size, softcap)
    out, lse = _rows(q[:, 0], k_cache, v_cache, cu_q, cache_seqlens, block_table, kind, sees_all=False)
    return (out[:, None], lse[:, :, None]) if return_softmax_lse else out[:, None]


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None,
    window_size=(-1, -1), enable_gqa=False, seqused_k=None, block_table=None, num_splits=None,
):
    """torch 2.13's."""
    assert enable_gqa or query.shape[1] == key.shape[-2]
    sees_all = _sees_all(cu_seq_q, cu_seq_k, table=block_table, window=window_size, is_causal=False)
    _check(
        query, key, value, cu_q=cu_seq_q, window=window_size, is_causal=False, max_q=max_q, sees_all=sees_all)
    assert (seqused_k is None) == (block_table is None) and cu_seq_k.dtype == torch.int32
    if block_table is not None:  # Otherwise results, or the order of log-sum-exps, are wrong.
        assert num_splits == 1 and window_size[1] == 0
    CALLS.append(f"varlen_attn, {num_splits} splits")
    lens_k = cu_seq_k.diff() if seqused_k is None else seqused_k
    kind = _kind(query, scale, window_size)
    out, lse = _rows(query, key, value, cu_seq_q, lens_k, block_table, kind, sees_all=sees_all)
    return (out, lse.T.contiguous()) if return_aux is not None and return_aux.lse else out


def old_varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, *, return_aux=None, scale=None,
    window_size=(-1, -1),
):
    """torch 2.11's, as far as it is used: it has no pages, and takes fewer heads of keys without a word."""
    return varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale,
        window_size=window_size, enable_gqa=True)
