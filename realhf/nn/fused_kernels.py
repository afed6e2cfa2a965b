# mypy: disable-error-code="no-untyped-def"
# (Triton compiles these functions from their source; their arguments have no types of Python.)
"""The Triton kernels of TritonChains, which imports this module when it is first used.

Capital letters are fixed when a kernel is compiled. All compute in float32 and round once. Suffixes: H hidden
dims; D dims of a head; F width of an MLP.
"""

import triton
import triton.language as tl


@triton.jit
def add_norm(
    x, y, total, normed, out_weight, out_bias, weight, bias, scale, out_eps, out_offset, eps, offset, H,
    HAS_Y: tl.constexpr, OUT_NORM: tl.constexpr, NORM: tl.constexpr, BLOCK_H: tl.constexpr,
):
    """Write x + scale norm(y), and the norm of that, for one token (grid: tokens). All rows are contiguous.

    `OUT_NORM` and `NORM` are 0 without such a norm, 1 for RMSNorm and 2 for LayerNorm.
    """
    start = tl.program_id(0).to(tl.int64) * H
    h = tl.arange(0, BLOCK_H)
    inside_H = h < H
    total_H = tl.load(x + start + h, mask=inside_H, other=0.0).to(tl.float32)
    if HAS_Y:
        y_H = tl.load(y + start + h, mask=inside_H, other=0.0).to(tl.float32)
        if OUT_NORM > 0:
            y_H = _normed(y_H, out_weight, out_bias, out_eps, out_offset, h, H, OUT_NORM)
            y_H = y_H.to(y.dtype.element_ty).to(tl.float32)
        total_H += scale * y_H
        tl.store(total + start + h, total_H.to(total.dtype.element_ty), mask=inside_H)
        total_H = total_H.to(total.dtype.element_ty).to(tl.float32)
    if NORM > 0:
        normed_H = _normed(total_H, weight, bias, eps, offset, h, H, NORM)
        tl.store(normed + start + h, normed_H.to(normed.dtype.element_ty), mask=inside_H)


@triton.jit
def _normed(x_H, weight, bias, eps, offset, h, H, NORM: tl.constexpr):
    """Return RMSNorm or LayerNorm of a row, which is 0 beyond its H dims."""
    inside_H = h < H
    weight_H = tl.load(weight + h, mask=inside_H, other=0.0).to(tl.float32)
    if NORM == 2:
        x_H = tl.where(inside_H, x_H - tl.sum(x_H, 0) / H, 0.0)
    x_H = x_H / tl.sqrt(tl.sum(x_H * x_H, 0) / H + eps) * (weight_H + offset)
    if NORM == 2:
        x_H += tl.load(bias + h, mask=inside_H, other=0.0).to(tl.float32)
    return x_H


@triton.jit
def rotate_and_store(
    qkv, out, cos, sin, q_weight, k_weight, keys, values, positions, eps, offset, num_q, num_k,
    qkv_token, keys_token, values_token,
    DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr,
    STORES: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Normalise and rotate one head of one token, and write it to the cache (grid: tokens, heads).

    The heads are `num_q` of queries, then `num_k` of keys and of values each. `ROTATED` dims are rotated, the
    cosines and sines of which are (tokens, ROTATED / 2). Norms are of each head, or with a `BLOCK_N` of all
    queries, and of all keys, of a token at once.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    is_value = head >= num_q + num_k
    d = tl.arange(0, BLOCK_D)
    inside_D = d < DIM
    at = qkv + token * qkv_token + head * DIM
    x_D = tl.load(at + d, mask=inside_D, other=0.0)
    if not is_value:
        scale = 1.0
        weight = q_weight
        if HAS_NORM:
            if head >= num_q:
                weight = k_weight
            if BLOCK_N > 0:
                n = tl.arange(0, BLOCK_N)
                first = tl.where(head >= num_q, num_q, 0)
                size = tl.where(head >= num_q, num_k, num_q) * DIM
                wide = tl.load(qkv + token * qkv_token + first * DIM + n, mask=n < size, other=0.0)
                weight += (head - first) * DIM
            else:
                size = DIM
                wide = x_D
            wide = wide.to(tl.float32)
            scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / size + eps)
            x_D = _scaled(x_D, weight, scale, offset, d, inside_D)
        if ROTATED > 0:
            partner_D = _partner(d, ROTATED, INTERLEAVED)
            y_D = tl.load(at + partner_D, mask=d < ROTATED, other=0.0)
            if HAS_NORM:
                y_D = _scaled(y_D, weight, scale, offset, partner_D, d < ROTATED)
            x_D = _turned(x_D, y_D, cos, sin, token, d, ROTATED, INTERLEAVED)
    tl.store(out + (token * (num_q + 2 * num_k) + head) * DIM + d, x_D, mask=inside_D)
    if STORES and head >= num_q:
        position = tl.load(positions + token).to(tl.int64)
        if is_value:
            place = values + position * values_token + (head - num_q - num_k) * DIM
        else:
            place = keys + position * keys_token + (head - num_q) * DIM
        tl.store(place + d, x_D, mask=inside_D)


@triton.jit
def rotate_latent(
    q, kv, q_out, out, cos, sin, weight, memory, positions, eps, num_q, q_token, q_head, kv_token,
    memory_token, RANK: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    STORES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):
    """Rotate the `DIM` dims of one head of queries, or of the key that all heads share; with the key go the
    RMSNorm of the latent, of `RANK` dims, and the write of both to the cache (grid: tokens, `num_q` + 1)."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    is_key = head == num_q
    d = tl.arange(0, BLOCK_D)
    inside_D = d < DIM
    if is_key:
        at = kv + token * kv_token + RANK
        target = out + token * (RANK + DIM) + RANK
    else:
        at = q + token * q_token + head * q_head
        target = q_out + (token * num_q + head) * DIM
    x_D = tl.load(at + d, mask=inside_D, other=0.0)
    if ROTATED > 0:
        y_D = tl.load(at + _partner(d, ROTATED, INTERLEAVED), mask=d < ROTATED, other=0.0)
        x_D = _turned(x_D, y_D, cos, sin, token, d, ROTATED, INTERLEAVED)
    tl.store(target + d, x_D, mask=inside_D)
    if is_key:
        c = tl.arange(0, BLOCK_C)
        inside_C = c < RANK
        latent_C = tl.load(kv + token * kv_token + c, mask=inside_C, other=0.0)
        wide_C = latent_C.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(wide_C * wide_C, 0) / RANK + eps)
        latent_C = _scaled(latent_C, weight, scale, 0.0, c, inside_C)
        tl.store(out + token * (RANK + DIM) + c, latent_C, mask=inside_C)
        if STORES:
            place = memory + tl.load(positions + token).to(tl.int64) * memory_token
            tl.store(place + c, latent_C, mask=inside_C)
            tl.store(place + RANK + d, x_D, mask=inside_D)


@triton.jit
def _partner(d, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the dim together with which each dim is rotated."""
    return d ^ 1 if INTERLEAVED else tl.where(d < ROTATED // 2, d + ROTATED // 2, d - ROTATED // 2)


@triton.jit
def _turned(x_D, y_D, cos, sin, token, d, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the dims `d` of a head, rotated and rounded; `y_D` are their partners."""
    half: tl.constexpr = ROTATED // 2
    is_rotated_D = d < ROTATED
    if INTERLEAVED:
        angle_D = d // 2
        is_first_D = d % 2 == 0
    else:
        angle_D = d % half
        is_first_D = d < half
    cos_D = tl.load(cos + token * half + angle_D, mask=is_rotated_D, other=1.0).to(tl.float32)
    sin_D = tl.load(sin + token * half + angle_D, mask=is_rotated_D, other=0.0).to(tl.float32)
    sin_D = tl.where(is_first_D, -sin_D, sin_D)
    return (x_D.to(tl.float32) * cos_D + y_D.to(tl.float32) * sin_D).to(x_D.dtype)


@triton.jit
def _scaled(x_D, weight, scale, offset, d, inside_D):
    """Return the dims `d` of a head, normalised by RMSNorm and rounded."""
    weight_D = tl.load(weight + d, mask=inside_D, other=0.0).to(tl.float32) + offset
    return (x_D.to(tl.float32) * scale * weight_D).to(x_D.dtype)


@triton.jit
def angles(positions, frequencies, factor, cos, sin, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Write the cosines and sines of the angles of one token (grid: tokens)."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    position = tl.load(positions + token).to(tl.float32)
    angle = position * tl.load(frequencies + i, mask=inside, other=0.0)
    tl.store(cos + token * HALF + i, (tl.cos(angle) * factor).to(cos.dtype.element_ty), mask=inside)
    tl.store(sin + token * HALF + i, (tl.sin(angle) * factor).to(sin.dtype.element_ty), mask=inside)


@triton.jit
def gated(up, out, F, ACTIVATION: tl.constexpr, BLOCK_F: tl.constexpr):
    """Write activation(gate) times up (grid: tokens, blocks of F); a row of `up` has the gate first."""
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_F = f < F
    gate_F = tl.load(up + token * 2 * F + f, mask=inside_F, other=0.0).to(tl.float32)
    up_F = tl.load(up + token * 2 * F + F + f, mask=inside_F, other=0.0).to(tl.float32)
    out_F = _activated(gate_F, ACTIVATION) * up_F
    tl.store(out + token * F + f, out_F.to(out.dtype.element_ty), mask=inside_F)


@triton.jit
def gated_backward(grad, up, grad_up, F, ACTIVATION: tl.constexpr, BLOCK_F: tl.constexpr):
    """Write the gradient of `up`, and over `grad` the output of `gated` (grid: tokens, blocks of F)."""
    token = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)
    inside_F = f < F
    gate_F = tl.load(up + token * 2 * F + f, mask=inside_F, other=0.0).to(tl.float32)
    up_F = tl.load(up + token * 2 * F + F + f, mask=inside_F, other=0.0).to(tl.float32)
    grad_F = tl.load(grad + token * F + f, mask=inside_F, other=0.0).to(tl.float32)
    activated_F = _activated(gate_F, ACTIVATION)
    grad_gate_F = grad_F * up_F * _slope(gate_F, ACTIVATION)
    tl.store(grad_up + token * 2 * F + f, grad_gate_F.to(grad_up.dtype.element_ty), mask=inside_F)
    tl.store(
        grad_up + token * 2 * F + F + f, (grad_F * activated_F).to(grad_up.dtype.element_ty), mask=inside_F)
    tl.store(grad + token * F + f, (activated_F * up_F).to(grad.dtype.element_ty), mask=inside_F)


@triton.jit
def route(
    logits, bias, weights, experts, scale, num_experts, NUM: tl.constexpr, NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr, BIAS_TERMS: tl.constexpr, GROUPS: tl.constexpr, CHOSEN_GROUPS: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):
    """Write the `NUM` experts of a token with the highest scores, and their weights (grid: tokens).

    Experts are chosen by score and bias, the sum of `BIAS_TERMS` rows; with more than one of `GROUPS`, from
    the `CHOSEN_GROUPS` whose two best have the largest sums. There are then `BLOCK_E` experts.
    """
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    inside_E = e < num_experts
    x_E = tl.load(logits + token * num_experts + e, mask=inside_E, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        score_E = tl.sigmoid(x_E)
    else:
        score_E = tl.exp(x_E - tl.max(x_E, 0))
        score_E = score_E / tl.sum(score_E, 0)
    left_E = score_E
    for i in tl.static_range(BIAS_TERMS):
        left_E += tl.load(bias + i * num_experts + e, mask=inside_E, other=0.0).to(tl.float32)
    left_E = tl.where(inside_E, left_E, float("-inf"))
    if GROUPS > 1:
        left_GI = tl.reshape(left_E, [GROUPS, BLOCK_E // GROUPS])
        best_G = tl.max(left_GI, 1)
        at_G = tl.argmax(left_GI, 1)
        is_best_GI = tl.arange(0, BLOCK_E // GROUPS)[None, :] == at_G[:, None]
        left_G = best_G + tl.max(tl.where(is_best_GI, float("-inf"), left_GI), 1)
        g = tl.arange(0, GROUPS)
        is_chosen_G = g < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            at = tl.argmax(left_G, 0)
            is_chosen_G = is_chosen_G | (g == at)
            left_G = tl.where(g == at, float("-inf"), left_G)
        left_E = tl.reshape(tl.where(is_chosen_G[:, None], left_GI, float("-inf")), [BLOCK_E])
    weight_K = tl.zeros([BLOCK_K], tl.float32)
    expert_K = tl.zeros([BLOCK_K], tl.int64)
    for i in tl.static_range(NUM):
        at = tl.argmax(left_E, 0)
        weight_K = tl.where(k == i, tl.sum(tl.where(e == at, score_E, 0.0), 0), weight_K)
        expert_K = tl.where(k == i, at.to(tl.int64), expert_K)
        left_E = tl.where(e == at, float("-inf"), left_E)
    if NORMALIZE:
        weight_K = weight_K / (tl.sum(weight_K, 0) + 1e-20)
    weight_K *= scale
    tl.store(weights + token * NUM + k, weight_K.to(weights.dtype.element_ty), mask=k < NUM)
    tl.store(experts + token * NUM + k, expert_K, mask=k < NUM)


@triton.jit
def group_rows(experts, tokens, places, ends, R, NUM: tl.constexpr, BLOCK_R: tl.constexpr):
    """Sort the rows of one expert behind those of the experts before it (grid: experts, and one more for the
    rows of other ranks' experts).

    `experts` has the expert of each row, `NUM` for each token. Writes the token of each sorted row, the place
    of each row among the sorted ones, and where the rows of each expert end.
    """
    expert = tl.program_id(0)
    r = tl.arange(0, BLOCK_R)
    num_before_R = tl.zeros([BLOCK_R], tl.int32)
    for start in range(0, R, BLOCK_R):
        inside_R = start + r < R
        expert_R = tl.load(experts + start + r, mask=inside_R, other=0)
        num_before_R += (inside_R & (expert_R < expert)).to(tl.int32)
    end = tl.sum(num_before_R, 0)
    for start in range(0, R, BLOCK_R):
        inside_R = start + r < R
        is_mine_R = inside_R & (tl.load(experts + start + r, mask=inside_R, other=0) == expert)
        place_R = (end + tl.cumsum(is_mine_R.to(tl.int32), 0) - 1).to(tl.int64)
        tl.store(tokens + place_R, ((start + r) // NUM).to(tl.int64), mask=is_mine_R)
        tl.store(places + start + r, place_R, mask=is_mine_R)
        end += tl.sum(is_mine_R.to(tl.int32), 0)
    tl.store(ends + expert, end)


@triton.jit
def mix(y, weights, places, out, H, NUM: tl.constexpr, BLOCK_H: tl.constexpr):
    """Write the weighted sum of a token's `NUM` rows of `y`, which are at its places (grid: tokens, blocks of
    H). Rows without weight are not read, as they may have no values."""
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    sum_H = tl.zeros([BLOCK_H], tl.float32)
    for k in tl.static_range(NUM):
        weight_H = tl.zeros([BLOCK_H], tl.float32) + tl.load(weights + token * NUM + k).to(tl.float32)
        row = tl.load(places + token * NUM + k).to(tl.int64) * H
        is_read_H = (h < H) & (weight_H != 0.0)
        sum_H += weight_H * tl.load(y + row + h, mask=is_read_H, other=0.0).to(tl.float32)
    tl.store(out + token * H + h, sum_H.to(out.dtype.element_ty), mask=h < H)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        y = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    else:  # tanh(z) = 2 sigmoid(2 z) - 1
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return y


@triton.jit
def _slope(x, ACTIVATION: tl.constexpr):
    """Return the derivative of the activation."""
    if ACTIVATION == "silu":
        sigmoid = tl.sigmoid(x)
        y = sigmoid * (1 + x * (1 - sigmoid))
    elif ACTIVATION == "gelu":
        y = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif ACTIVATION == "relu":
        y = tl.where(x > 0, 1.0, 0.0)
    else:
        sigmoid = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        y = sigmoid + x * sigmoid * (1 - sigmoid) * 1.5957691216057308 * (1 + 0.134145 * x * x)
    return y


@triton.jit
def logits_at(product, at, inside, scale, softcap, temperature, HAS_SOFTCAP: tl.constexpr):
    """Return logits at the temperature, in float32, and minus infinity beyond the vocabulary."""
    x = tl.load(product + at, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_SOFTCAP:  # tanh(z) = 2 sigmoid(2 z) - 1
        x = softcap * (2 * tl.sigmoid(2 * x / softcap) - 1)
    return tl.where(inside, x / temperature, float("-inf"))


@triton.jit
def logit_statistics(
    product, labels, out, scale, softcap, temperature, V, num_labels,
    HAS_SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Write the log-sum-exp of a token's logits, the logits of its labels and, with `ENTROPY`, its mean logit
    (grid: tokens). The vocabulary is read once, a block at a time."""
    token = tl.program_id(0).to(tl.int64)
    row = product + token * V
    out += token * (1 + num_labels + ENTROPY)
    most_V = tl.full([BLOCK_V], float("-inf"), tl.float32)
    sum_V = tl.zeros([BLOCK_V], tl.float32)
    moment_V = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, V, BLOCK_V):
        at_V = start + tl.arange(0, BLOCK_V)
        x_V = logits_at(row, at_V, at_V < V, scale, softcap, temperature, HAS_SOFTCAP)
        new_V = tl.maximum(most_V, x_V)
        finite_V = tl.where(new_V == float("-inf"), 0.0, new_V)
        factor_V = tl.exp(most_V - finite_V)
        weight_V = tl.exp(x_V - finite_V)
        sum_V = sum_V * factor_V + weight_V
        if ENTROPY:
            moment_V = moment_V * factor_V + tl.where(weight_V > 0, weight_V * x_V, 0.0)
        most_V = new_V
    most = tl.max(most_V, 0)
    factor_V = tl.exp(most_V - most)
    total = tl.sum(sum_V * factor_V, 0)
    tl.store(out, most + tl.log(total))
    for k in range(num_labels):
        at = tl.load(labels + token * num_labels + k)
        tl.store(out + 1 + k, logits_at(row, at, at < V, scale, softcap, temperature, HAS_SOFTCAP))
    if ENTROPY:
        tl.store(out + 1 + num_labels, tl.sum(moment_V * factor_V, 0) / total)


@triton.jit
def logit_gradient(
    product, labels, label_grads, grads, lse, entropy, entropy_grads, scale, softcap, temperature, V,
    num_labels, HAS_SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK_V: tl.constexpr,
):
    """Write the gradient of a token's product over it (grid: tokens, blocks of the vocabulary); see
    `vocab_parallel._to_gradient`. `grads` are sums over labels, `label_grads` are 0 for those of other
    ranks."""
    token = tl.program_id(0).to(tl.int64)
    row = product + token * V
    at_V = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside_V = at_V < V
    x_V = logits_at(row, at_V, inside_V, scale, softcap, temperature, HAS_SOFTCAP)
    logp_V = x_V - tl.load(lse + token)
    factor_V = tl.load(grads + token)
    if ENTROPY:
        factor_V += (logp_V + tl.load(entropy + token)) * tl.load(entropy_grads + token)
    weight_V = tl.exp(logp_V)
    grad_V = tl.where(weight_V > 0, -weight_V * factor_V, 0.0)
    for k in range(num_labels):
        at = tl.load(labels + token * num_labels + k)
        grad_V += tl.where(at_V == at, tl.load(label_grads + token * num_labels + k), 0.0)
    grad_V = grad_V / temperature * scale
    if HAS_SOFTCAP:  # 1 - tanh^2
        share_V = x_V * temperature / softcap
        grad_V *= 1 - share_V * share_V
    tl.store(row + at_V, grad_V.to(product.dtype.element_ty), mask=inside_V)
