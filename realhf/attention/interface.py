"""The interface of attention backends, behind which the kernels of different libraries stand.

Shape suffixes: T query tokens of all rows end to end, N query heads, K key-value heads, D head dim; S
sequences; B rows, M pages of a row; P pages of the cache, L tokens in a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realhf.devices.chunk_sizes import LEAST_PREFIX
from realhf.devices.pinned import upload
from realhf.models.model_config import ModelConfig


@dataclass(frozen=True)
class AttentionKind:
    """The options of a layer's causal attention."""

    scale: float  # Factor of query times key.
    window: int | None = None  # Number of tokens that a token sees, itself included.
    softcap: float | None = None  # Scores x become c * tanh(x / c).

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> "AttentionKind":
        scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
        return cls(scale, config.window(layer), config.attention_softcap)


class Prefix(NamedTuple):
    """Tokens to which those of some sequences attend beside the ones before them in their own sequence."""

    queries: slice  # The tokens of these sequences, among all packed ones.
    keys: tuple[slice, ...]  # The tokens to which they attend, in order.

    @property
    def num_keys(self) -> int:
        return sum(keys.stop - keys.start for keys in self.keys)


def num_common_tokens(sequences: Sequence[NDArray[np.integer]]) -> int:
    """Return how many tokens all of several sequences begin with; 0 if they are too few to share."""
    if len(sequences) < 2:
        return 0
    count = min(map(len, sequences))
    differs = np.any([sequence[:count] != sequences[0][:count] for sequence in sequences], axis=0)
    count = int(differs.argmax()) if differs.any() else count
    return count if count >= LEAST_PREFIX else 0


@dataclass(frozen=True)
class Sequences:
    """Packed sequences, each of which attends to itself. All layers of a micro-batch share one.

    With `prefixes`, of which a sequence has one at most, what is packed are the ends of sequences.
    """

    cu: Tensor  # int32 (S + 1,), on the device: where each sequence starts, and where the last one ends.
    lens: tuple[int, ...]  # Tokens of each sequence; some may have none.
    prefixes: tuple[Prefix, ...] = ()
    derived: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What a backend has computed from the lengths, for the other layers."""

    @classmethod
    def of(
        cls, lens: Sequence[int], device: torch.device, prefixes: Sequence[Prefix] = ()
    ) -> "Sequences":
        """Return the sequences of these lengths; the copy to a GPU does not wait for it."""
        cu = np.array((0, *accumulate(lens)), np.int32)
        return cls(upload(cu, device), tuple(lens), tuple(prefixes))

    @property
    def longest(self) -> int:
        return max(self.lens, default=0)


@dataclass(frozen=True)
class Pages:
    """Rows whose keys and values lie in pages of a cache.

    A row with n queries, at least one, and a length of `lens_k` has its query i at position
    `lens_k - n + i`: its queries are its last tokens. Entries of the table behind a row's last page are
    arbitrary page numbers. Numbers on the host do not depend on the contents of `lens_k` and `table`, so that
    these may change in a CUDA graph.
    """

    cu_q: Tensor  # int32 (B + 1,), on the device: where each row's queries start.
    max_q: int  # Queries of the row that has most.
    table: Tensor  # int32 (B, M): numbers of each row's pages, in order.
    lens_k: Tensor  # int32 (B,): cached tokens of each row, those of its queries included.
    max_k: int  # Upper bound of `lens_k`.


@dataclass(frozen=True)
class AttentionShape:
    """A kind of attention with heads of these dims, for which a backend is chosen."""

    kind: AttentionKind
    dim: int
    value_dim: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = self.kind
        dims = f"{self.dim}" if self.dim == self.value_dim else f"{self.dim} and {self.value_dim}"
        options = "" if kind.window is None else f", a window of {kind.window} tokens"
        options += "" if kind.softcap is None else f", a soft cap of {kind.softcap:g}"
        return f"attention in {str(self.dtype).removeprefix('torch.')} with heads of {dims} dims{options}"


class AttentionKernels(Protocol):
    """Kernels of one library for causal attention with grouped heads.

    Queries, keys and values have one dtype. A head's values may have another dim than its keys.
    """

    name: str
    """The name under which the choice is logged."""

    def refuses(self, shape: AttentionShape, *, paged: bool) -> str | None:
        """Return why these kernels cannot compute this, over pages or packed, in words; None if they can."""


class PackedAttention(AttentionKernels, Protocol):
    """Kernels for packed sequences, in training and at the start of generations."""

    def packed(
        self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, at: Sequences, kind: AttentionKind
    ) -> Tensor:
        """Return the attention within each sequence, out_TND; has gradients."""


class PagedAttention(AttentionKernels, Protocol):
    """Kernels for rows whose keys and values lie in pages of a cache."""

    page_tokens: int
    """A page must have a multiple of so many tokens."""
    in_graph: bool
    """Whether a CUDA graph can record `paged`."""

    def paged(
        self, q_TND: Tensor, k_PLKD: Tensor, v_PLKD: Tensor, at: Pages, kind: AttentionKind,
        *, num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return out_TND, and the natural log-sum-exp lse_TN of the scores in float32 or wider.

        The cache already holds the keys and values of the queries' own tokens. `v_PLKD` may be a view of the
        first dims of `k_PLKD`. A kernel may attend to a row's keys in `num_splits` parts, so that few rows
        keep a whole device busy; None leaves the number to it. With 1, a row's result does not depend on
        the other rows. There are no gradients.
        """


class PartialAttention(AttentionKernels, Protocol):
    """Kernels for packed queries and some of their keys."""

    def over_part(
        self, q_TND: Tensor, k_JND: Tensor, v_JND: Tensor, queries: Sequences, keys: Sequences,
        kind: AttentionKind, *, is_causal: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention of each sequence's queries to some of its keys, out_TND and lse_TN, for
        `merge_into`.

        The keys are those of the queries' own tokens if it `is_causal`, and else of earlier tokens. Every
        sequence has some of both, and as many heads of queries as of keys. `kind` has neither a window nor a
        soft cap. There are no gradients.
        """


class AttentionBackend(PackedAttention, PagedAttention, PartialAttention, Protocol):
    """A library that has kernels for all of these."""


def nothing_attended(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
    """Return the attention of no tokens, which depends on its inputs.

    Ranks of an ep group run the same backward pass, even if one of them has no tokens.
    """
    return q_TND[..., :1] * v_TKD.new_zeros(v_TKD.shape[-1]) + k_TKD.sum() + v_TKD.sum()


def repeatable(out_TND: Tensor) -> Tensor:
    """Return the output of one of torch's kernels, whose backward pass adds up in one order if the run is
    deterministic.

    Torch's attention kernels do so only if operations without such an order would raise. In a deterministic
    run they warn (see `repeat_exactly`), so that is changed for this backward pass alone.
    """
    node = out_TND.grad_fn
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    if node is not None and is_deterministic and torch.is_deterministic_algorithms_warn_only_enabled():
        node.register_prehook(_raise_without_order)
        node.register_hook(_warn_without_order)
    return out_TND


def _raise_without_order(_: Any) -> None:
    torch.use_deterministic_algorithms(True)


def _warn_without_order(*_: Any) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


def merge_into(out_TND: Tensor, lse_TN: Tensor, part_TND: Tensor, part_TN: Tensor) -> None:
    """Add attention over further keys, `part_TND` with its log-sum-exp `part_TN`, to `out_TND` and `lse_TN`.

    These are changed in place; `out_TND` is in float32 or wider. Where a query has no keys, its log-sum-exp
    is -inf.
    """
    both_TN = torch.logaddexp(lse_TN, part_TN)
    finite_TN = both_TN.masked_fill(both_TN == -torch.inf, 0)
    out_TND.mul_((lse_TN - finite_TN).exp()[..., None])
    out_TND.add_(part_TND * (part_TN - finite_TN).exp()[..., None])
    lse_TN.copy_(both_TN)


def token_positions(seq_lens: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for every packed token: sequence index, position in the sequence, sequence length."""
    counts = np.array(seq_lens, np.int64)
    row_T = np.repeat(np.arange(len(counts)), counts)
    position_T = np.arange(len(row_T)) - (counts.cumsum() - counts)[row_T]
    numbers_3T = upload(np.stack((row_T, position_T, counts[row_T])), device)
    return numbers_3T[0], numbers_3T[1], numbers_3T[2]
