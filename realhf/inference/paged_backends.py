"""PagedBackends: which attention backend computes each kind of layer over the pages of a cache."""

from math import lcm

from realhf.attention.interface import AttentionBackend, AttentionKind
from realhf.errors import UserError
from realhf.nn.transformer import Transformer


class PagedBackends:
    """The backends of one rank's layers, which share a page size."""

    def __init__(self, model: Transformer, backend: AttentionBackend) -> None:
        """Use `backend` for all layers. Raises UserError if it cannot compute one of them."""
        _, dim, value_dim = model.cache_heads
        value_dim = value_dim or dim
        self._of: dict[AttentionKind, AttentionBackend] = {}
        for kind in {block.attention.kind: None for block in model.blocks}:
            reason = backend.refuses(kind, dim=dim, value_dim=value_dim, dtype=model.flat.dtype, paged=True)
            if reason is not None:
                raise UserError(f"{backend.name} cannot compute the attention of the cache: {reason}")
            self._of[kind] = backend
        self.page_tokens = lcm(*(backend.page_tokens for backend in self._of.values()))
        """A page has a multiple of so many tokens."""

    @property
    def in_graph(self) -> bool:
        """Whether CUDA graphs can record all of them."""
        return all(backend.in_graph for backend in self._of.values())

    def of(self, kind: AttentionKind) -> AttentionBackend:
        """Return the backend of a kind of layers."""
        return self._of[kind]
