"""Segments of a forward pass: tokens that attend in the same way, and whose keys and values are cached.

Rows that decode and pieces of prompts attend to pages of the cache by the kernels of PagedBackends, which a
GPU can record. The first pieces of prompts attend to themselves, on a CPU too, which computes all others as
in cpu_decoding.py.

Shape suffixes: T tokens, L all tokens so far of the sequence that is continued, B rows or pieces of
prompts, M pages of each, N query heads, K key-value heads, D head dim, J cached tokens that are expanded.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import lcm
from typing import Any, Generic, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realhf.attention.choose import paged_backend, partial_backend
from realhf.attention.interface import (
    AttentionBackend,
    AttentionKind,
    AttentionShape,
    PagedAttention,
    Pages,
    PartialAttention,
    Prefix,
    Sequences,
    merge_into,
    token_positions,
)
from realhf.devices import chunk_sizes
from realhf.devices.pinned import upload
from realhf.errors import UserError
from realhf.inference.kv_cache import HostOrDevice, KVCache, RowPages
from realhf.inference.scheduler import Chunk
from realhf.nn.attention import Expand, Segment, packed_attention
from realhf.nn.transformer import Transformer


class PagedBackends:
    """The backends of one rank's layers, which share a page size."""

    def __init__(self, model: Transformer, backend: AttentionBackend | None) -> None:
        """Use `backend` for all layers; None: the best one for each kind of them. Raises UserError if a kind
        cannot be computed."""
        _, dim, value_dim = model.cache_heads
        device = model.flat.device
        dtype = model.flat.dtype
        self._of: dict[AttentionKind, PagedAttention] = {}
        for kind in {block.attention.kind: None for block in model.blocks}:
            shape = AttentionShape(kind, dim, value_dim or dim, dtype)
            chosen = backend or paged_backend(device, shape)
            reason = chosen.refuses(shape, paged=True)
            if reason is not None:
                raise UserError(f"{chosen.name} cannot compute the attention of the cache: {reason}")
            self._of[kind] = chosen
        self._mla = model.config.mla
        self._expanding: PartialAttention | None = None
        if self._mla is not None:
            kind = next(iter(self._of))
            shape = AttentionShape(kind, model.config.head_dim, self._mla.v_head_dim, dtype)
            self._expanding = backend or partial_backend(device, shape)
        self.page_tokens = lcm(*(backend.page_tokens for backend in self._of.values()))
        """The number of tokens in a page is a multiple of this."""
        self.in_graph = all(backend.in_graph for backend in self._of.values())
        """Whether CUDA graphs can record all of them."""

    def for_expanded(self, pieces: Sequence[tuple[int, int]]) -> PartialAttention | None:
        """Return the backend that attends to keys and values computed from cached latents. Return None if it
        takes fewer FLOPs to attend to the latents themselves, as for few tokens.

        Pieces of prompts are (tokens, earlier tokens). FLOPs are counted per head.
        """
        mla = self._mla
        if mla is None:
            return None
        expanded_dims = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
        saved = 2 * mla.kv_lora_rank + mla.qk_rope_head_dim - expanded_dims
        expansion = mla.kv_lora_rank * (mla.qk_nope_head_dim + mla.v_head_dim)
        num_pairs = sum(tokens * earlier for tokens, earlier in pieces)
        pays = saved * num_pairs > expansion * sum(earlier for _, earlier in pieces)
        return self._expanding if pays else None

    def of(self, kind: AttentionKind) -> PagedAttention:
        """Return the backend of a kind of layers."""
        return self._of[kind]


class ChunkPages(NamedTuple, Generic[HostOrDevice]):
    """The tokens of chunks of prompts, and the pages to which they attend."""

    position_T: HostOrDevice
    length_T: HostOrDevice  # Tokens of the whole prompt.
    cache_position_T: HostOrDevice
    cu_q: HostOrDevice  # The first token of each chunk, and the end.
    table_BM: HostOrDevice
    lens_B: HostOrDevice  # Cached tokens, those of the chunk included.


class PagedTokens(Segment):
    """The last tokens of rows, or of pieces of prompts, which attend to the pages of the cache.

    It consists of tensors alone, whose shapes do not depend on the rows' lengths.
    """

    def __init__(
        self, backends: PagedBackends, pages: Pages, *, position_T: Tensor, length_T: Tensor,
        cache_positions_T: Tensor, longest: int = 0,
    ) -> None:
        super().__init__(position_T, length_T, cache_positions_T, longest=longest)
        self._backends = backends
        self._at = pages

    def attend(
        self, cache: KVCache, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        # How many parts a kernel chooses depends on the other rows of the batch.
        num_splits = 1 if torch.are_deterministic_algorithms_enabled() else None
        out_TND, _ = self._backends.of(kind).paged(
            q_TND, *cache.pages(layer), self._at, kind, num_splits=num_splits)
        return out_TND


def paged_rows(
    backends: PagedBackends, pages: RowPages[Tensor], *, page_size: int, longest: int | None = None
) -> PagedTokens:
    """Return the segment of one new token of every row.

    No row has more than `longest` tokens (None: as many as fit in its pages).
    """
    position_B = pages.position_B
    cu_q = torch.arange(len(position_B) + 1, dtype=torch.int32, device=position_B.device)
    at = Pages(cu_q, 1, pages.table_BM, pages.lens_B, longest or pages.table_BM.shape[1] * page_size)
    return PagedTokens(
        backends, at, position_T=position_B, length_T=position_B + 1,
        cache_positions_T=pages.cache_position_B)


def chunk_pages(chunks: Sequence[Chunk], *, page_size: int) -> ChunkPages[NDArray[Any]]:
    """Return the tokens and pages of some pieces of prompts, as arrays on the host."""
    counts = np.array([chunk.stop - chunk.start for chunk in chunks])
    num_pages = max(len(chunk.prompt.blocks) for chunk in chunks)
    table_BM = np.zeros((len(chunks), num_pages), np.int32)
    for row, chunk in zip(table_BM, chunks, strict=True):
        row[: len(chunk.prompt.blocks)] = chunk.prompt.blocks
    piece_T = np.repeat(np.arange(len(chunks)), counts)
    position_T = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
    wholes = np.array([len(chunk.prompt.tokens) for chunk in chunks])
    block_T = table_BM[piece_T, position_T // page_size].astype(np.int64)
    return ChunkPages(
        position_T=position_T, length_T=wholes[piece_T],
        cache_position_T=block_T * page_size + position_T % page_size,
        cu_q=np.concatenate(([0], counts.cumsum())).astype(np.int32), table_BM=table_BM,
        lens_B=np.array([chunk.stop for chunk in chunks], np.int32))


def paged_chunks(backends: PagedBackends, pages: ChunkPages[Tensor], chunks: Sequence[Chunk]) -> Segment:
    """Return the segment of these pieces of prompts; `pages` are the `chunk_pages` on the device."""
    expanding = backends.for_expanded([(chunk.stop - chunk.start, chunk.start) for chunk in chunks])
    if expanding is not None:
        return ExpandedPieces(expanding, pages, chunks)
    longest_piece = max(chunk.stop - chunk.start for chunk in chunks)
    at = Pages(pages.cu_q, longest_piece, pages.table_BM, pages.lens_B, max(chunk.stop for chunk in chunks))
    return PagedTokens(
        backends, at, position_T=pages.position_T, length_T=pages.length_T,
        cache_positions_T=pages.cache_position_T,
        longest=max(len(chunk.prompt.tokens) for chunk in chunks))


class _Context(NamedTuple):
    """A range of the cached tokens before some consecutive pieces of prompts, computed at a time."""

    tokens: slice  # The pieces' own tokens in the segment.
    queries: Sequences  # The pieces.
    keys: Sequences  # The cached tokens of each.
    cached_J: Tensor  # Cache positions of the keys.


class ExpandedPieces(Segment):
    """Later pieces of prompts with latent attention, for which keys and values are computed from latents.

    Their tokens attend to one another, and then to the earlier tokens of their prompts, EXPANDED_TOKENS at a
    time, so that keys and values exist for no more of these at once.
    """

    from_cache = False
    expands = True

    def __init__(self, backend: PartialAttention, pages: ChunkPages[Tensor], chunks: Sequence[Chunk]) -> None:
        super().__init__(
            pages.position_T, pages.length_T, pages.cache_position_T,
            longest=max(len(chunk.prompt.tokens) for chunk in chunks))
        self._backend = backend
        self._chunks = chunks
        self._at = Sequences(pages.cu_q, tuple(chunk.stop - chunk.start for chunk in chunks))
        self._contexts: list[_Context] = []

    def attend(
        self, cache: KVCache, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind,
        expand: Expand | None = None,
    ) -> Tensor:
        assert expand is not None, "only latents are expanded"
        self._contexts = self._contexts or self._split(cache.block_size, q_TND.device)
        latents = cache.pages(layer)[0].flatten(0, 1)
        over_part = self._backend.over_part
        narrow_TND, lse_TN = over_part(q_TND, k_TKD, v_TKD, self._at, self._at, kind, is_causal=True)
        out_TND = narrow_TND.to(lse_TN.dtype)
        for tokens, queries, keys, cached_J in self._contexts:
            k_JND, v_JND = expand(latents.index_select(0, cached_J))
            part = over_part(q_TND[tokens], k_JND, v_JND, queries, keys, kind, is_causal=False)
            del k_JND, v_JND
            merge_into(out_TND[tokens], lse_TN[tokens], *part)
        return out_TND.to(q_TND.dtype)

    def _split(self, page_size: int, device: torch.device) -> list[_Context]:
        """Lay the cached tokens before the pieces end to end, and cut them into ranges."""
        positions = [np.arange(chunk.start) for chunk in self._chunks]
        blocks = [np.array(chunk.prompt.blocks, np.int64) for chunk in self._chunks]
        pairs = zip(blocks, positions, strict=True)
        cached = [table[i // page_size] * page_size + i % page_size for table, i in pairs]
        cached_J = upload(np.concatenate(cached), device)
        spans = list(pairwise(accumulate((chunk.start for chunk in self._chunks), initial=0)))
        places = list(accumulate(self._at.lens, initial=0))
        contexts = []
        for first in range(0, len(cached_J), chunk_sizes.EXPANDED_TOKENS):
            last = min(first + chunk_sizes.EXPANDED_TOKENS, len(cached_J))
            here = [i for i, (start, stop) in enumerate(spans) if start < last and stop > first]
            lens = [min(spans[i][1], last) - max(spans[i][0], first) for i in here]
            tokens = slice(places[here[0]], places[here[-1] + 1])
            queries = Sequences.of([self._at.lens[i] for i in here], device)
            contexts.append(_Context(tokens, queries, Sequences.of(lens, device), cached_J[first:last]))
        return contexts


class Prefill(Segment):
    """The first `seq_lens` tokens of several sequences, whose final lengths are `whole_lens`."""

    from_cache = False

    def __init__(
        self, seq_lens: Sequence[int], cache_positions_T: Tensor, *, whole_lens: Sequence[int],
        num_shared: int = 0,
    ) -> None:
        """With `num_shared`, all sequences begin with so many equal tokens, which pass with the first one."""
        device = cache_positions_T.device
        lens = [seq_lens[0], *(count - num_shared for count in seq_lens[1:])]
        _, position_T, _ = token_positions(lens, device)
        prefixes = []
        if num_shared:
            position_T[lens[0] :] += num_shared
            prefixes.append(Prefix(slice(lens[0], sum(lens)), (slice(0, num_shared),)))
        length_T = upload(np.repeat(np.array(whole_lens, np.int64), lens), device)
        super().__init__(position_T, length_T, cache_positions_T, longest=max(whole_lens))
        self._at = Sequences.of(lens, device, prefixes)
        if num_shared:
            own = np.split(np.arange(lens[0], sum(lens)), np.cumsum(lens[1:-1]))
            rows = [part for rows in own for part in (np.arange(num_shared), rows)]
            self.written_T = torch.from_numpy(np.concatenate([np.arange(lens[0]), *rows]))

    def attend(
        self, cache: KVCache, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        return packed_attention(q_TND, k_TKD, v_TKD, self._at, kind)


def prefill(fresh: Sequence[Chunk], *, page_size: int, device: torch.device) -> Prefill:
    """Return the first pieces of some prompts."""
    positions = [i for chunk in fresh for i in chunk.cache_positions(page_size)]
    whole_lens = [len(chunk.prompt.tokens) for chunk in fresh]
    return Prefill([chunk.stop for chunk in fresh], upload(np.array(positions, np.int64), device),
                   whole_lens=whole_lens, num_shared=max(chunk.num_shared for chunk in fresh))


