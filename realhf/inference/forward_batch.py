"""Segments of a forward pass: tokens that attend in the same way, and whose keys and values are cached.

Shape suffixes: T tokens, L all tokens so far of the sequence that is continued, B rows or pieces of prompts,
M pages of each, N query heads, K key-value heads, D head dim.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realhf.attention.dense import masked_attention
from realhf.attention.interface import AttentionKind, Pages, PartialAttention, Sequences, merge_into
from realhf.devices import chunk_sizes
from realhf.devices.pinned import upload
from realhf.inference.block_attention import BlockAttention
from realhf.inference.block_tables import BlockTables, Decoding
from realhf.inference.kv_cache import KVCache
from realhf.inference.paged_backends import PagedBackends
from realhf.inference.step_inputs import ChunkPages, RowPages
from realhf.inference.steps import Chunk
from realhf.nn.attention import Expand, packed_attention
from realhf.nn.packed import Segment, token_positions


class Decode(Segment):
    """A new token of every running row, attended to block by block."""

    def __init__(self, decoding: Decoding) -> None:
        super().__init__(decoding.positions_B, decoding.positions_B + 1, decoding.cache_positions_B)
        self.decoding = decoding

    def attend(
        self, cache: KVCache, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        attention = BlockAttention(kind, value_dim=cache.value_dim)
        return attention.decode(q_TND, cache.layers[layer], self.decoding)


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


class ChunkedPrefill(Segment):
    """The next `num_tokens` of a sequence whose final length is `longest`, as a CPU computes them.

    `cache_positions_L` belong to all its tokens so far, these included.
    """

    def __init__(self, cache_positions_L: Tensor, *, num_tokens: int, longest: int) -> None:
        self._cache_positions_L = cache_positions_L
        self._position_L = torch.arange(len(cache_positions_L), device=cache_positions_L.device)
        position_T = self._position_L[-num_tokens:]
        length_T = torch.full_like(position_T, longest)
        super().__init__(position_T, length_T, cache_positions_L[-num_tokens:], longest=longest)

    def attend(
        self, cache: KVCache, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        distance_TL = self.position_T[:, None] - self._position_L
        visible_TL = (distance_TL >= 0) & (distance_TL < (kind.window or len(self._position_L)))
        kv = (x.flatten(0, 1).index_select(0, self._cache_positions_L) for x in cache.pages(layer))
        q, k, v = (y.transpose(0, 1)[None] for y in (q_TND, *kv))
        return masked_attention(q, k, v, visible_TL, kind)[0].transpose(0, 1)


class Prefill(Segment):
    """The first `seq_lens` tokens of several sequences, whose final lengths are `whole_lens`."""

    from_cache = False

    def __init__(
        self, seq_lens: Sequence[int], cache_positions_T: Tensor, *, whole_lens: Sequence[int]
    ) -> None:
        device = cache_positions_T.device
        _, position_T, _ = token_positions(seq_lens, device)
        length_T = upload(np.repeat(np.array(whole_lens, np.int64), seq_lens), device)
        super().__init__(position_T, length_T, cache_positions_T, longest=max(whole_lens))
        self._at = Sequences.of(seq_lens, device)

    def attend(
        self, cache: KVCache, layer: int, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        return packed_attention(q_TND, k_TKD, v_TKD, self._at, kind)


def next_tokens(tables: BlockTables, backends: PagedBackends | None, device: torch.device) -> Segment:
    """Return one new token of every running row, for the paged path or (`backends` is None) for a CPU."""
    if backends is None:
        return Decode(tables.advance())
    on_host = tables.advance_pages(len(tables.running()), tables.blocks_per_row)
    pages = RowPages(*(upload(array, device) for array in on_host))
    longest = int(on_host.lens_B.max())
    return paged_rows(backends, pages, page_size=tables.block_size, longest=longest)


def prefill(fresh: Sequence[Chunk], *, page_size: int, device: torch.device) -> Prefill:
    """Return the first pieces of some prompts."""
    positions = [i for chunk in fresh for i in chunk.cache_positions(page_size)]
    whole_lens = [len(chunk.prompt.tokens) for chunk in fresh]
    return Prefill([chunk.stop for chunk in fresh], upload(np.array(positions, np.int64), device),
                   whole_lens=whole_lens)


def cpu_segments(rows: BlockTables | None, chunks: Sequence[Chunk], *, page_size: int) -> Iterator[Segment]:
    """Yield the segments of a pass on a CPU: the new tokens of `rows`, if any, then the chunks."""
    if rows is not None:
        yield Decode(rows.advance())
    for chunk in chunks:
        if chunk.start > 0:
            positions_L = torch.tensor(chunk.cache_positions(page_size))
            yield ChunkedPrefill(positions_L, num_tokens=len(chunk.tokens), longest=len(chunk.prompt.tokens))
    if fresh := [chunk for chunk in chunks if chunk.start == 0]:
        yield prefill(fresh, page_size=page_size, device=torch.device("cpu"))
