"""PagedBackends: which attention backend computes each kind of layer over the pages of a cache."""

from collections.abc import Sequence
from math import lcm

from realhf.attention.choose import paged_backend, partial_backend
from realhf.attention.interface import (
    AttentionBackend,
    AttentionKind,
    AttentionShape,
    PagedAttention,
    PartialAttention,
)
from realhf.errors import UserError
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
