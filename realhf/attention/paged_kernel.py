# mypy: disable-error-code="no-untyped-def"
# (Triton compiles these functions from their source; their arguments have no types of Python.)
"""The Triton kernels of TritonAttention, which imports this module when it is first used.

Capital letters are fixed when a kernel is compiled. Suffixes: M rows of a tile, each a query and a head; J
keys of a block; D dims of a key, or those that are its values; R the remaining dims of a key; V dims of a
value; S parts into which the keys are split.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend_to_pages(
    q, k, v, out, lse, cu_q, table, lens_k, scale, softcap, tiles_per_row,
    q_token, q_head, k_page, k_token, k_head, v_page, v_token, v_head, table_row,
    out_split, out_token, out_head, lse_split, lse_token,
    GROUP: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUES_IN_KEYS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Attend with one tile of a row's queries to one part of its keys (online softmax, arXiv:1805.02867).

    Grid: tiles of all rows, key-value heads, parts. The arguments after `tiles_per_row` are strides. A row of
    a tile is a query and one of the `GROUP` heads that share a key-value head.
    """
    row = tl.program_id(0) // tiles_per_row
    tile = tl.program_id(0) % tiles_per_row
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(cu_q + row)
    count = tl.load(cu_q + row + 1) - start
    if tile * BLOCK_M >= count * GROUP:
        return
    length = tl.load(lens_k + row)
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query_M = m // GROUP
    head_M = kv_head * GROUP + m % GROUP
    inside_M = query_M < count
    token_M = (start + query_M).to(tl.int64)
    first_dims: tl.constexpr = VALUE_DIM if VALUES_IN_KEYS else DIM
    q_M1 = q + token_M[:, None] * q_token + head_M[:, None] * q_head
    q_MD = _dims(q_M1, inside_M, 0, first_dims, BLOCK_D)
    q_MR = _dims(q_M1, inside_M, first_dims, DIM, BLOCK_R) if BLOCK_R > 0 else q_MD
    begin, stop = _part_of_keys(length - count, count, tile, split, GROUP, WINDOW, SPLITS, BLOCK_M, BLOCK_J)
    most_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    sum_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for block in range(begin, stop, BLOCK_J):
        j = block + tl.arange(0, BLOCK_J)
        exists_J = j < stop
        page_J = tl.load(table + row * table_row + j // PAGE, mask=exists_J, other=0).to(tl.int64)
        k_J1 = k + (page_J * k_page + (j % PAGE) * k_token + kv_head * k_head)[:, None]
        k_JD = _dims(k_J1, exists_J, 0, first_dims, BLOCK_D)
        scores_MJ = tl.dot(q_MD, tl.trans(k_JD), input_precision="ieee")
        if BLOCK_R > 0:
            k_JR = _dims(k_J1, exists_J, first_dims, DIM, BLOCK_R)
            scores_MJ += tl.dot(q_MR, tl.trans(k_JR), input_precision="ieee")
        scores_MJ = _seen(
            scores_MJ, length - count + query_M, j, exists_J, scale, softcap, WINDOW, HAS_SOFTCAP)
        weights_MJ, factor_M, most_M = _weights(scores_MJ, most_M)
        total_M = total_M * factor_M + tl.sum(weights_MJ, 1)
        v_J1 = v + (page_J * v_page + (j % PAGE) * v_token + kv_head * v_head)[:, None]
        v_JV = k_JD if VALUES_IN_KEYS else _dims(v_J1, exists_J, 0, VALUE_DIM, BLOCK_V)
        sum_MV = sum_MV * factor_M[:, None]
        sum_MV += tl.dot(weights_MJ.to(v_JV.dtype), v_JV, input_precision="ieee")
    out_M1 = out + split.to(tl.int64) * out_split + token_M[:, None] * out_token + head_M[:, None] * out_head
    lse_M = lse + split.to(tl.int64) * lse_split + token_M * lse_token + head_M
    _store(out_M1, lse_M, inside_M, sum_MV, total_M, most_M, VALUE_DIM, BLOCK_V)


@triton.jit
def _dims(at_X1, exists_X, first, stop, BLOCK: tl.constexpr):
    """Return dims [first, stop) of the vectors at some addresses, as many as fit in a block; zeros beyond."""
    dims = first + tl.arange(0, BLOCK)
    return tl.load(at_X1 + dims[None, :], mask=exists_X[:, None] & (dims < stop)[None, :], other=0.0)


@triton.jit
def _part_of_keys(
    before, count, tile, split, GROUP: tl.constexpr, WINDOW: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_J: tl.constexpr,
):
    """Return the range of keys that any query of a tile sees, or a part of it; `before` the row's `count`
    queries are so many keys."""
    last_query = tl.minimum(tile * BLOCK_M + BLOCK_M - 1, count * GROUP - 1) // GROUP
    stop = before + last_query + 1
    begin = 0
    if WINDOW > 0:
        first_seen = before + tile * BLOCK_M // GROUP - WINDOW + 1
        begin = tl.maximum(first_seen, 0) // BLOCK_J * BLOCK_J
    part = tl.cdiv(tl.cdiv(stop - begin, BLOCK_J), SPLITS) * BLOCK_J
    begin += split * part
    return begin, tl.minimum(begin + part, stop)


@triton.jit
def _seen(
    scores_MJ, position_M, j, exists_J, scale, softcap, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr
):
    """Return scaled and capped scores, in powers of 2; -inf for keys that a query does not see."""
    scores_MJ *= scale
    if HAS_SOFTCAP:  # tanh(x) = 2 sigmoid(2 x) - 1
        scores_MJ = softcap * (2 * tl.sigmoid(2 * scores_MJ / softcap) - 1)
    scores_MJ *= LOG2_E
    visible_MJ = exists_J[None, :] & (j[None, :] <= position_M[:, None])
    if WINDOW > 0:
        visible_MJ = visible_MJ & (j[None, :] > position_M[:, None] - WINDOW)
    return tl.where(visible_MJ, scores_MJ, float("-inf"))


@triton.jit
def _weights(scores_MJ, most_M):
    """Return weights beside the highest score so far, the factor of earlier weights, and that score."""
    new_M = tl.maximum(most_M, tl.max(scores_MJ, 1))
    finite_M = tl.where(new_M == float("-inf"), 0.0, new_M)
    return tl.exp2(scores_MJ - finite_M[:, None]), tl.exp2(most_M - finite_M), new_M


@triton.jit
def _store(
    out_M1, lse_M, inside_M, sum_MV, total_M, most_M, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Write the outputs and the log-sum-exps of a tile."""
    has_any_M = total_M > 0
    total_M = tl.where(has_any_M, total_M, 1.0)
    n = tl.arange(0, BLOCK_V)
    result_MV = (sum_MV / total_M[:, None]).to(out_M1.dtype.element_ty)
    tl.store(out_M1 + n[None, :], result_MV, mask=inside_M[:, None] & (n < VALUE_DIM)[None, :])
    tl.store(
        lse_M, tl.where(has_any_M, (most_M + tl.log2(total_M)) / LOG2_E, float("-inf")), mask=inside_M)


@triton.jit
def merge_splits(
    parts, part_lse, out, lse, part_split, part_token, part_head, lse_split, lse_token, out_token, out_head,
    SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Merge the results of all parts of the keys, for one token and head (grid: tokens, heads)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    s = tl.arange(0, BLOCK_S)
    n = tl.arange(0, BLOCK_V)
    lse_S = tl.load(
        part_lse + s * lse_split + token * lse_token + head, mask=s < SPLITS, other=float("-inf"))
    most = tl.max(lse_S, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    weights_S = tl.exp2((lse_S - most) * LOG2_E)
    total = tl.sum(weights_S, 0)
    at_SV = parts + s[:, None] * part_split + token * part_token + head * part_head + n[None, :]
    part_SV = tl.load(at_SV, mask=(s < SPLITS)[:, None] & (n < VALUE_DIM)[None, :], other=0.0)
    result_V = tl.sum(part_SV * weights_S[:, None], 0) / tl.where(total > 0, total, 1.0)
    at_V = out + token * out_token + head * out_head + n
    tl.store(at_V, result_V.to(out.dtype.element_ty), mask=n < VALUE_DIM)
    merged = tl.where(total > 0, most + tl.log2(tl.where(total > 0, total, 1.0)) / LOG2_E, float("-inf"))
    tl.store(lse + token * lse_token + head, merged)
