"""Outputs and losses from the last stage's hidden states, of which a chunk of logits exists at a time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from realhf.calls import Output
from realhf.data.batch import Batch, Packed
from realhf.data.order import groups_of
from realhf.devices.pinned import upload
from realhf.distributed.group import sum_over_group
from realhf.engine.base import Outputs, PassSettings
from realhf.nn.attention import token_range
from realhf.nn.linear import add_rows
from realhf.nn.transformer import Transformer

if TYPE_CHECKING:
    from realhf.engine.transformers import TransformersModel

Integers = NDArray[np.int64]


def run_head(
    model: Transformer | TransformersModel, hidden_TH: torch.Tensor, samples: Batch, settings: PassSettings,
    *, row_of_token: Integers | None = None,
) -> tuple[torch.Tensor | None, list[Outputs]]:
    """Compute a micro-batch's outputs from the last stage's hidden states, and their loss if there is one.

    Return the loss to differentiate (None without one), and either the outputs, or the value and the metrics
    of the loss for each part of the samples. With gradients, log-probs are computed for one chunk of the
    samples after another: a chunk has samples with at most `chunk_tokens` rows of logits, or one group, as
    groups are never split. Each chunk runs its backward pass at once, up to the hidden states. Only a group
    with more rows must compute its logits twice.
    """
    loss = settings.loss
    chunks = _chunks(model, hidden_TH, samples, settings)
    if not chunks:
        outputs = compute_outputs(model, hidden_TH, samples, settings, row_of_token=row_of_token)
        if loss is None:
            return None, [outputs]
        value, metrics = loss(outputs, samples, settings.totals)
        return value, [_detached(value, metrics)]
    assert loss is not None, "only a loss has gradients"
    grad_TH = torch.zeros_like(hidden_TH)
    parts = []
    for indices, tokens in chunks:
        chunk = samples.select(indices)
        rows: slice | torch.Tensor = tokens
        row_in_chunk = None
        if row_of_token is not None:
            rows_of_chunk, row_in_chunk = np.unique(row_of_token[tokens], return_inverse=True)
            rows = upload(rows_of_chunk, hidden_TH.device)
        chunk_TH = hidden_TH.detach()[rows].requires_grad_()
        outputs = compute_outputs(model, chunk_TH, chunk, settings, row_of_token=row_in_chunk)
        value, metrics = loss(outputs, chunk, settings.totals)
        value.backward()
        if chunk_TH.grad is not None:
            grad_TH[rows] += chunk_TH.grad  # Chunks may share rows; a chunk has each row once.
        parts.append(_detached(value, metrics))
    total = torch.stack([part["loss"] for part in parts]).sum()
    return _KnownGradient.apply(hidden_TH, total, grad_TH), parts


def _detached(value: torch.Tensor, metrics: Outputs) -> Outputs:
    """Return a loss and its metrics without their graph, which would keep the hidden states in memory."""
    return {name: x.detach() for name, x in {"loss": value, **metrics}.items()}


def _chunks(
    model: Transformer | TransformersModel, hidden_TH: torch.Tensor, samples: Batch, settings: PassSettings
) -> list[tuple[range, slice]]:
    """Return the samples and the tokens of each chunk; none if there is no need to split them."""
    tokens = samples[settings.key]
    splits = hidden_TH.requires_grad and settings.output.needs_logits and model.groups.cp.size == 1
    head = model.head if splits else None
    if head is None or len(tokens.values) <= head.chunk_tokens:
        return []
    assert settings.loss is not None, "only a loss has gradients"
    starts = [0, *accumulate(tokens.lengths)]
    counts = np.append(0, wanted(tokens, samples.fields.get("response_mask")).cumsum())
    groups = groups_of(samples.ids, settings.loss.group_size)
    bounds = _chunk_bounds(counts[starts[1:]].tolist(), head.chunk_tokens, groups=groups)
    return [(range(first, last), slice(starts[first], starts[last])) for first, last in pairwise(bounds)]


def _chunk_bounds(sums: Sequence[int], limit: int, *, groups: Sequence[Sequence[int]]) -> list[int]:
    """Split samples, whose running totals are `sums`, into runs of at most `limit` or of one group; return
    the runs' bounds."""
    bounds = [0]
    before = 0
    for group in groups:
        first, last = group[0], group[-1]
        if sums[last] - before > limit and first > bounds[-1]:
            bounds.append(first)
            before = sums[first - 1]
    return [*bounds, len(sums)]


def compute_outputs(
    model: Transformer | TransformersModel, hidden_TH: torch.Tensor, samples: Batch, settings: PassSettings,
    *, row_of_token: Integers | None = None,
) -> Outputs:
    """Return `logprobs` (and `entropy`) or `values` per token, or `scores` per sequence; in at least float32.

    If the loss has `token_ids`, return also `logprobs_at` of these in the place of each token. With `top`,
    return instead only `top_ids` and `top_logprobs` of so many most probable tokens.

    Each rank of a cp group passes the hidden states of its own tokens and gets the outputs of all tokens.
    `row_of_token`, on the host, says which rows these are, unless there is one row per token. All indices are
    computed on the host, which waits for nothing if it has the mask.
    """
    tokens = samples[settings.key]
    mask = samples.fields.get("response_mask")
    loss = settings.loss
    token_ids = () if loss is None else loss.token_ids
    ids_TK = torch.cat([samples[key].values for key in token_ids], dim=1) if token_ids else None
    cp = model.groups.cp
    start, stop = token_range(len(tokens.values), cp)

    def there(index: Integers) -> torch.Tensor:
        return upload(index, hidden_TH.device)

    def states(index: Integers) -> torch.Tensor:
        """Return the hidden states after these tokens, which rise."""
        if row_of_token is None:
            return _Rows.apply(hidden_TH, there(index - start), False)
        rows = row_of_token[index]
        return _Rows.apply(hidden_TH, there(rows), len(np.unique(rows)) < len(rows))

    def scatter(values_N: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
        zeros = values_N.new_zeros(size, *values_N.shape[1:])
        return sum_over_group(zeros.index_put((positions,), values_N), cp)

    if settings.output is Output.SCORES:
        ends = np.cumsum(tokens.lengths, dtype=np.int64)
        local = np.flatnonzero((ends > start) & (ends <= stop))
        return {"scores": scatter(model.scores(states(ends[local] - 1)), there(local), len(ends))}
    num_tokens = len(tokens.values)
    chosen = np.flatnonzero(wanted(tokens, mask))
    chosen = chosen[(chosen > start) & (chosen <= stop)]  # The previous state chooses a token.
    positions = there(chosen)
    states_NH = states(chosen - 1)
    if settings.output is Output.VALUES:
        return {"values": scatter(model.scores(states_NH), positions, num_tokens)}
    if settings.top:
        ids_NK, logprobs_NK = model.top_logprobs(states_NH, settings.top, temperature=settings.temperature)
        columns = {"top_ids": ids_NK, "top_logprobs": logprobs_NK}
        return {name: scatter(values, positions, num_tokens) for name, values in columns.items()}
    labels = tokens.values if ids_TK is None else torch.cat([tokens.values[:, None], ids_TK], dim=1)
    logprobs, entropy_N = model.logprobs(
        states_NH, labels[positions], temperature=settings.temperature,
        entropy=settings.entropy or (loss is not None and loss.entropy))
    logprobs = scatter(logprobs, positions, num_tokens)
    if ids_TK is None:
        outputs = {"logprobs": logprobs}
    else:
        outputs = {"logprobs": logprobs[:, 0], "logprobs_at": logprobs[:, 1:]}
    if entropy_N is not None:
        outputs["entropy"] = scatter(entropy_N, positions, num_tokens)
    return outputs


def wanted(tokens: Packed, mask: Packed | None) -> NDArray[np.bool_]:
    """Return which tokens' outputs are wanted: those in the mask that are not the first of their sequence."""
    wanted_T = np.ones(len(tokens.values), bool) if mask is None else (mask.host_values != 0).numpy()
    counts = np.array(tokens.lengths, np.int64)
    wanted_T[(counts.cumsum() - counts)[counts > 0]] = False
    return wanted_T


class _Rows(torch.autograd.Function):
    """Select rows. (The backward pass of indexing would always add to rows one by one.)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor, has_equal: bool) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.settings = len(x), has_equal
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        num_rows, has_equal = ctx.settings
        out = grad.new_zeros(num_rows, *grad.shape[1:])
        (index,) = ctx.saved_tensors
        return add_rows(out, index, grad) if has_equal else out.index_copy_(0, index, grad), None, None


class _KnownGradient(torch.autograd.Function):
    """A loss of `x` whose gradient has been computed already."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        ctx.grad = grad
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        known, ctx.grad = ctx.grad, None
        return known.mul_(grad), None, None
