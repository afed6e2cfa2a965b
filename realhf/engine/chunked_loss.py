"""Outputs and losses from the last stage's hidden states, of which a chunk of logits exists at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from realhf.data.batch import Batch, Packed
from realhf.data.order import groups_of
from realhf.devices.pinned import upload
from realhf.distributed.group import sum_over_group
from realhf.nn.attention import token_range
from realhf.nn.transformer import Transformer

if TYPE_CHECKING:
    from realhf.engine.transformers import TransformersModel

Integers = NDArray[np.int64]


def compute_outputs(
    model: Transformer | TransformersModel, hidden_TH: torch.Tensor, tokens: Packed,
    *, mask: Packed | None, output: str, temperature: float = 1.0, entropy: bool = False, top: int = 0,
    ids_TK: torch.Tensor | None = None, row_of_token: Integers | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return `logprobs` (and `entropy`) or `values` per token, or `scores` per sequence; in at least float32.

    With `ids_TK`, return also `logprobs_at` of these tokens in the place of each token. With `top`, return
    instead only `top_ids` and `top_logprobs` of so many most probable tokens.

    Each rank of a cp group passes the hidden states of its own tokens and gets the outputs of all tokens.
    `row_of_token`, on the host, says which rows these are, unless there is one row per token. All indices are
    computed on the host, which waits for nothing if it has the mask.
    """
    cp = model.groups.cp
    start, stop = token_range(len(tokens.values), cp)

    def there(index: Integers) -> torch.Tensor:
        return upload(index, hidden_TH.device)

    def states(index: Integers) -> torch.Tensor:
        """Return the hidden states after these tokens, which rise."""
        return _Rows.apply(hidden_TH, there(index - start if row_of_token is None else row_of_token[index]))

    def scatter(values_N: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
        zeros = values_N.new_zeros(size, *values_N.shape[1:])
        return sum_over_group(zeros.index_put((positions,), values_N), cp)

    if output == "scores":
        ends = np.cumsum(tokens.lengths, dtype=np.int64)
        local = np.flatnonzero((ends > start) & (ends <= stop))
        return {"scores": scatter(model.scores(states(ends[local] - 1)), there(local), len(ends))}
    num_tokens = len(tokens.values)
    chosen = np.flatnonzero(wanted(tokens, mask))
    chosen = chosen[(chosen > start) & (chosen <= stop)]  # The previous state chooses a token.
    positions = there(chosen)
    states_NH = states(chosen - 1)
    if output == "values":
        return {"values": scatter(model.scores(states_NH), positions, num_tokens)}
    if top:
        ids_NK, logprobs_NK = model.top_logprobs(states_NH, top, temperature=temperature)
        columns = {"top_ids": ids_NK, "top_logprobs": logprobs_NK}
        return {name: scatter(values, positions, num_tokens) for name, values in columns.items()}
    labels = tokens.values if ids_TK is None else torch.cat([tokens.values[:, None], ids_TK], dim=1)
    logprobs, entropy_N = model.logprobs(
        states_NH, labels[positions], temperature=temperature, entropy=entropy)
    logprobs = scatter(logprobs, positions, num_tokens)
    if ids_TK is None:
        outputs = {"logprobs": logprobs}
    else:
        outputs = {"logprobs": logprobs[:, 0], "logprobs_at": logprobs[:, 1:]}
    if entropy_N is not None:
        outputs["entropy"] = scatter(entropy_N, positions, num_tokens)
    return outputs


def side_by_side(samples: Batch, keys: Sequence[str]) -> torch.Tensor | None:
    """Return the columns of shape (tokens, k) in one tensor, or None if there are none."""
    return torch.cat([samples[key].values for key in keys], dim=1) if keys else None


def wanted(tokens: Packed, mask: Packed | None) -> NDArray[np.bool_]:
    """Return which tokens' outputs are wanted: those in the mask that are not the first of their sequence."""
    wanted_T = np.ones(len(tokens.values), bool) if mask is None else (mask.host_values != 0).numpy()
    counts = np.array(tokens.lengths, np.int64)
    wanted_T[(counts.cumsum() - counts)[counts > 0]] = False
    return wanted_T


def loss_by_chunks(
    model: Transformer, hidden_TH: torch.Tensor, samples: Batch,
    loss: Callable[[dict[str, torch.Tensor], Batch], Any],
    *, key: str, group_size: int = 1, token_ids: Sequence[str] = (), **settings: Any,
) -> Any:  # fmt: skip
    """Compute the loss of `compute_outputs`; with gradients, for one chunk of the samples after another. The
    columns `token_ids` hold the ids of the tokens whose log-probs are wanted, too.

    A chunk has samples with at most `chunk_tokens` rows of logits, or one group, as groups are never split.
    Each chunk runs its backward pass at once, up to the hidden states. Only a group with more rows must
    compute its logits twice.
    """
    tokens = samples[key]

    def loss_of(rows_TH: torch.Tensor, chunk: Batch) -> Any:
        outputs = compute_outputs(
            model, rows_TH, chunk[key], mask=chunk.fields.get("response_mask"),
            ids_TK=side_by_side(chunk, token_ids), **settings)
        return loss(outputs, chunk)

    by_chunks = hidden_TH.requires_grad and settings["output"] == "logprobs" and model.groups.cp.size == 1
    limit = model.head.chunk_tokens if by_chunks else len(tokens.values)
    if len(tokens.values) <= limit:
        return loss_of(hidden_TH, samples)
    starts = [0, *accumulate(tokens.lengths)]
    counts = np.append(0, wanted(tokens, samples.fields.get("response_mask")).cumsum())
    sums = counts[starts[1:]].tolist()
    bounds = _chunk_bounds(sums, limit, groups=groups_of(samples.ids, group_size))
    grad_TH = torch.empty_like(hidden_TH)
    values = []
    for first, last in pairwise(bounds):
        rows = slice(starts[first], starts[last])
        chunk_TH = hidden_TH.detach()[rows].requires_grad_()
        value = loss_of(chunk_TH, samples.select(range(first, last)))
        value.backward()
        grad_TH[rows] = 0.0 if chunk_TH.grad is None else chunk_TH.grad
        values.append(value.detach())
    return _KnownGradient.apply(hidden_TH, torch.stack(values).sum(), grad_TH)


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


class _Rows(torch.autograd.Function):
    """Select rows by rising indices. (The backward pass of indexing would add to rows one by one.)"""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out = grad.new_zeros(ctx.num_rows, *grad.shape[1:])
        return out.index_copy_(0, ctx.saved_tensors[0], grad), None


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
