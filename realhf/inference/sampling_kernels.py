# mypy: disable-error-code="no-untyped-def"
# (Triton compiles these functions from their source; their arguments have no types of Python.)
"""The Triton kernels with which a GPU samples from the product of the head with its weight; see
`sampling.draw_by_kernels`.

They follow `sampling.sample` step by step. Capital letters are fixed when a kernel is compiled. Suffixes: L
logits of a block, C chunks of the vocabulary, N logits of a chunk.
"""

import triton
import triton.language as tl

from realhf.nn.fused_kernels import logits_at

MASS_ROUNDING = tl.constexpr(1.5 * 2.0**18)
"""That of sampling.py: masses become multiples of 2^-34, whose sums are exact."""


@triton.jit
def thresholds(
    product, threshold, scale, softcap, temperature, top_p, log_min_p, V, top_k,
    HAS_SOFTCAP: tl.constexpr, BLOCK_L: tl.constexpr,
):
    """Write the least logit that may be drawn from each row (grid: rows).

    `top_k` of 0 or of at least V, `top_p` of 1 and `log_min_p` of minus infinity leave all tokens.
    """
    row = product + tl.program_id(0).to(tl.int64) * V
    most_L = tl.full([BLOCK_L], float("-inf"), tl.float32)
    for start in range(0, V, BLOCK_L):
        at_L = start + tl.arange(0, BLOCK_L)
        most_L = tl.maximum(most_L, logits_at(row, at_L, at_L < V, scale, softcap, temperature, HAS_SOFTCAP))
    most = tl.max(most_L, 0)
    least = most + log_min_p
    lowest = tl.full([], float("-inf"), tl.float32)
    if (top_k > 0) & (top_k < V):
        lowest = _least(
            row, lowest, most, 0.0, top_k, scale, softcap, temperature, V, True, HAS_SOFTCAP, BLOCK_L)
    if top_p < 1.0:
        lowest = _least(
            row, lowest, most, top_p, 0, scale, softcap, temperature, V, False, HAS_SOFTCAP, BLOCK_L)
    tl.store(threshold + tl.program_id(0), tl.maximum(lowest, least))


@triton.jit
def _least(
    row, lowest, most, top_p, top_k, scale, softcap, temperature, V, COUNTS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BLOCK_L: tl.constexpr,
):
    """Return the largest logit such that those that are no smaller reach `top_p` of the mass of all from
    `lowest` on; or with `COUNTS`, such that they are `top_k` tokens or more."""
    whole = tl.zeros([], tl.float64)
    if COUNTS:
        target = whole + top_k
    else:
        whole = _mass_from(
            row, -(2**31), lowest, most, scale, softcap, temperature, V, COUNTS, HAS_SOFTCAP, BLOCK_L)
        target = whole * top_p
    found = tl.full([], -(2**31), tl.int64)
    for i in range(32):  # Find the key bit by bit.
        wanted = found + (tl.full([], 1, tl.int64) << (31 - i))
        mass = _mass_from(
            row, wanted, lowest, most, scale, softcap, temperature, V, COUNTS, HAS_SOFTCAP, BLOCK_L)
        found = tl.where(mass >= target, wanted, found)
    bits = found.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mass_from(
    row, key, lowest, most, scale, softcap, temperature, V, COUNTS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Return the mass, or the number, of the logits from `lowest` on whose key is no smaller than `key`."""
    sum_L = tl.zeros([BLOCK_L], tl.float64)
    for start in range(0, V, BLOCK_L):
        at_L = start + tl.arange(0, BLOCK_L)
        x_L = logits_at(row, at_L, at_L < V, scale, softcap, temperature, HAS_SOFTCAP)
        bits_L = x_L.to(tl.int32, bitcast=True)
        key_L = (bits_L ^ ((bits_L >> 31) & 0x7FFFFFFF)).to(tl.int64)
        counts_L = (key_L >= key) & (x_L >= lowest) & (at_L < V)
        if COUNTS:
            sum_L += tl.where(counts_L, 1.0, 0.0)
        else:
            mass_L = tl.exp(x_L - most).to(tl.float64) + MASS_ROUNDING - MASS_ROUNDING
            sum_L += tl.where(counts_L, mass_L, 0.0)
    return tl.sum(sum_L, 0)


@triton.jit
def part_sums(
    product, threshold, part_most, part_best, part_sum, chunk_sum, scale, softcap, temperature, V, num_parts,
    FILTERS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr,
):
    """Write of a part of a row the largest logit and its token, the sum of all weights, and the sums of the
    weights that may be drawn, by chunk (grid: rows, parts). Weights are exp(logit - largest of the part)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    n = part * CHUNKS * CHUNK + tl.arange(0, CHUNKS)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    inside_CN = n < V
    x_CN = logits_at(product + row * V, n, inside_CN, scale, softcap, temperature, HAS_SOFTCAP)
    most = tl.max(tl.max(x_CN, 1), 0)
    best = tl.min(tl.min(tl.where(x_CN == most, n, V - 1), 1), 0)
    weight_CN = tl.where(inside_CN, tl.exp(x_CN - most), 0.0)
    at = row * num_parts + part
    tl.store(part_most + at, most)
    tl.store(part_best + at, best)
    sum_C = tl.sum(weight_CN, 1)
    tl.store(part_sum + at, tl.sum(sum_C.to(tl.float64), 0))
    if FILTERS:
        sum_C = tl.sum(tl.where(x_CN >= tl.load(threshold + row), weight_CN, 0.0), 1)
    tl.store(chunk_sum + at * CHUNKS + tl.arange(0, CHUNKS), sum_C.to(tl.float64))


@triton.jit
def draw(
    product, threshold, part_most, part_best, part_sum, chunk_sum, uniform, tokens, logprobs,
    scale, softcap, temperature, V, num_parts,
    IS_GREEDY: tl.constexpr, FILTERS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_P: tl.constexpr,
):
    """Write the token at `uniform` in the CDF of each row, or the most probable one, and its log-prob (grid:
    rows)."""
    row = tl.program_id(0).to(tl.int64)
    logits = product + row * V
    p = tl.arange(0, BLOCK_P)
    is_part_P = p < num_parts
    most_P = tl.load(part_most + row * num_parts + p, mask=is_part_P, other=float("-inf"))
    most = tl.max(most_P, 0)
    factor_P = tl.where(is_part_P, tl.exp((most_P - most).to(tl.float64)), 0.0)
    total = tl.sum(tl.load(part_sum + row * num_parts + p, mask=is_part_P, other=0.0) * factor_P, 0)
    if IS_GREEDY:
        first = tl.min(tl.where(most_P == most, p, num_parts - 1), 0)
        token = tl.load(part_best + row * num_parts + first).to(tl.int64)
    else:
        c = tl.arange(0, BLOCK_P * CHUNKS)
        is_chunk_C = c < num_parts * CHUNKS
        of_part_C = tl.load(
            part_most + row * num_parts + c // CHUNKS, mask=is_chunk_C, other=float("-inf"))
        sum_C = tl.load(chunk_sum + row * num_parts * CHUNKS + c, mask=is_chunk_C, other=0.0)
        sum_C = tl.where(is_chunk_C, sum_C * tl.exp((of_part_C - most).to(tl.float64)), 0.0)
        cdf_C = tl.cumsum(sum_C, 0)
        allowed = tl.sum(sum_C, 0)
        target = tl.load(uniform + row) * allowed
        chunk = tl.sum((cdf_C <= target).to(tl.int32), 0)
        # If rounding leads past the end, take the last chunk of positive weight.
        chunk = tl.minimum(chunk, tl.max(tl.where(sum_C > 0, c, 0), 0))
        start = tl.sum(tl.where(c < chunk, sum_C, 0.0), 0)
        of_chunk = tl.sum(tl.where(c == chunk, sum_C, 0.0), 0)
        n = chunk * CHUNK + tl.arange(0, CHUNK)
        inside_N = n < V
        x_N = logits_at(logits, n, inside_N, scale, softcap, temperature, HAS_SOFTCAP)
        weight_N = tl.where(inside_N, tl.exp((x_N - most).to(tl.float64)), 0.0)
        if FILTERS:
            weight_N = tl.where(x_N >= tl.load(threshold + row), weight_N, 0.0)
        cdf_N = tl.cumsum(weight_N, 0)
        # (The two ways to sum a chunk differ in the last digits.)
        inside = (target - start) * (tl.sum(weight_N, 0) / tl.maximum(of_chunk, 1e-300))
        index = tl.sum((cdf_N <= inside).to(tl.int32), 0)
        index = tl.minimum(index, tl.max(tl.where(weight_N > 0, tl.arange(0, CHUNK), 0), 0))
        token = tl.minimum(chunk * CHUNK + index, V - 1).to(tl.int64)
    chosen = logits_at(logits, token, token < V, scale, softcap, temperature, HAS_SOFTCAP)
    tl.store(tokens + row, token)
    tl.store(logprobs + row, chosen.to(tl.float64) - most - tl.log(total))
