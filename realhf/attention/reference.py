"""The reference of all attention backends: plain formulas, on any device and in any dtype.

Shape suffixes as in interface.py; Q queries of the row that has most, G queries per key-value head, J cached
tokens of a row, up to the end of its last page; I query tokens of a sequence, J its key tokens.
"""

import torch
from torch import Tensor

from realhf.attention.interface import AttentionKind, AttentionShape, Pages, Sequences, nothing_attended


class ReferenceAttention:
    """Attention by the formula, in float32 or wider. It holds all scores in memory at once."""

    name = "reference"
    page_tokens = 1
    in_graph = False

    def refuses(self, shape: AttentionShape, *, paged: bool) -> str | None:
        return None

    def packed(
        self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, at: Sequences, kind: AttentionKind
    ) -> Tensor:
        if not len(q_TND):
            return nothing_attended(q_TND, k_TKD, v_TKD)
        outs = []
        for q_IND, k_JKD, v_JKD in zip(*(x.split(at.lens) for x in (q_TND, k_TKD, v_TKD)), strict=True):
            position = torch.arange(len(q_IND), device=q_IND.device)
            visible = _visible(position[:, None], position, kind)
            out_IND, _ = _attended(q_IND[None], k_JKD[None], v_JKD[None], visible[None], kind)
            outs.append(out_IND[0])
        return torch.cat(outs)

    @torch.no_grad()
    def paged(
        self, q_TND: Tensor, k_PLKD: Tensor, v_PLKD: Tensor, at: Pages, kind: AttentionKind,
        *, num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        num_pages = min(at.table.shape[1], -(-at.max_k // k_PLKD.shape[1]))
        table_BM = at.table[:, :num_pages].long()
        k_BJKD, v_BJKD = (cached[table_BM].flatten(1, 2) for cached in (k_PLKD, v_PLKD))
        key_J = torch.arange(k_BJKD.shape[1], device=q_TND.device)
        # What follows a row's end may be anything, even NaN, which a weight of zero would keep.
        v_BJKD = v_BJKD.masked_fill((key_J >= at.lens_k[:, None])[:, :, None, None], 0)
        counts_B = at.cu_q.diff()
        rows = torch.arange(len(counts_B), device=q_TND.device)
        row_T = rows.repeat_interleave(counts_B, output_size=len(q_TND))
        index_T = torch.arange(len(q_TND), device=q_TND.device) - at.cu_q[row_T]
        q_BQND = q_TND.new_zeros(len(counts_B), at.max_q, *q_TND.shape[1:])
        q_BQND[row_T, index_T] = q_TND
        index_Q = torch.arange(at.max_q, device=q_TND.device)
        position_BQ = (at.lens_k - counts_B)[:, None] + index_Q
        out_BQND, lse_BQN = _attended(
            q_BQND, k_BJKD, v_BJKD, _visible(position_BQ[:, :, None], key_J, kind), kind)
        return out_BQND[row_T, index_T], lse_BQN[row_T, index_T]

    @torch.no_grad()
    def over_part(
        self, q_TND: Tensor, k_JND: Tensor, v_JND: Tensor, queries: Sequences, keys: Sequences,
        kind: AttentionKind, *, is_causal: bool,
    ) -> tuple[Tensor, Tensor]:
        found = []
        split = q_TND.split(queries.lens), k_JND.split(keys.lens), v_JND.split(keys.lens)
        for q_IND, k_IND, v_IND in zip(*split, strict=True):
            visible = torch.ones(len(q_IND), len(k_IND), dtype=torch.bool, device=q_IND.device)
            visible = visible.tril() if is_causal else visible
            found.append(_attended(q_IND[None], k_IND[None], v_IND[None], visible[None], kind))
        outs, lses = zip(*found, strict=True)
        return torch.cat([out[0] for out in outs]), torch.cat([lse[0] for lse in lses])


def _visible(query: Tensor, key: Tensor, kind: AttentionKind) -> Tensor:
    """Return whether queries see keys, by their positions."""
    visible = key <= query
    return visible if kind.window is None else visible & (key > query - kind.window)


def _attended(
    q_BIND: Tensor, k_BJKD: Tensor, v_BJKD: Tensor, visible_BIJ: Tensor, kind: AttentionKind
) -> tuple[Tensor, Tensor]:
    """Return out_BIND and lse_BIN. Queries that see nothing get 0 and -inf."""
    wide = torch.promote_types(q_BIND.dtype, torch.float32)
    q_BIKGD = q_BIND.to(wide).unflatten(2, (k_BJKD.shape[2], -1))
    scores_BIKGJ = torch.einsum("bikgd,bjkd->bikgj", q_BIKGD, k_BJKD.to(wide)) * kind.scale
    if kind.softcap is not None:
        scores_BIKGJ = kind.softcap * torch.tanh(scores_BIKGJ / kind.softcap)
    scores_BIKGJ = scores_BIKGJ.masked_fill(~visible_BIJ[:, :, None, None], -torch.inf)
    lse_BIKG = scores_BIKGJ.logsumexp(-1)
    weights_BIKGJ = (scores_BIKGJ - lse_BIKG.masked_fill(lse_BIKG == -torch.inf, 0)[..., None]).exp()
    out_BIKGD = torch.einsum("bikgj,bjkd->bikgd", weights_BIKGJ, v_BJKD.to(wide))
    return out_BIKGD.flatten(2, 3).to(q_BIND.dtype), lse_BIKG.flatten(2)
