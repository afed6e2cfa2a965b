"""PagedBackends: which attention backend computes each kind of layer over the pages of a cache."""

from math import lcm

from realhf.attention.choose import attention_backend
from realhf.attention.interface import AttentionBackend, AttentionKind
from realhf.errors import UserError
from realhf.nn.transformer import Transformer


class PagedBackends:
    """The backends of one rank's layers, which share a page size."""

    def __init__(self, model: Transformer, backend: AttentionBackend | None) -> None:
        """Use `backend` for all layers; None: the best one for each kind of them. Raises UserError if a kind
        cannot be computed."""
        _, dim, value_dim = model.cache_heads
        value_dim = value_dim or dim
        dtype = model.flat.dtype
        self._of: dict[AttentionKind, AttentionBackend] = {}
        for kind in {block.attention.kind: None for block in model.blocks}:
            chosen = backend or attention_backend(
                model.flat.device, kind, dim=dim, value_dim=value_dim, dtype=dtype, packed=False)
            reason = chosen.refuses(kind, dim=dim, value_dim=value_dim, dtype=dtype, paged=True)
            if reason is not None:
                raise UserError(f"{chosen.name} cannot compute the attention of the cache: {reason}")
            self._of[kind] = chosen
        self.page_tokens = lcm(*(backend.page_tokens for backend in self._of.values()))
        """A page has a multiple of so many tokens."""
        self.in_graph = all(backend.in_graph for backend in self._of.values())
        """Whether CUDA graphs can record all of them."""

    def of(self, kind: AttentionKind) -> AttentionBackend:
        """Return the backend of a kind of layers."""
        return self._of[kind]
