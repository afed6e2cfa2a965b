"""PagePool: the pages of keys and values that one rank's layers have, and the recorded passes over them."""

from collections.abc import Iterable

from realhf.attention.interface import AttentionBackend
from realhf.distributed.group import Group
from realhf.inference.decode_graphs import DecodeGraphs, Record, recorder
from realhf.inference.kv_cache import KVCache
from realhf.inference.paged_backends import PagedBackends
from realhf.nn.transformer import Transformer

_LEAST_WIDTH = 8  # Pages; the width of tables is this or a power of two above it, so that few widths occur.


class PagePool:
    """Pages of one size that cohorts of samples lease.

    With `backends`, kernels attend to pages (the paged path). The pool, and the recorded passes that hold its
    addresses, then outlive the generations of an engine. Without `backends`, a CPU attends block by block,
    and every cohort has a pool of its own.
    """

    def __init__(
        self, model: Transformer, *, backends: PagedBackends | None = None, record: Record | None = None
    ) -> None:
        """`record` records decoding passes; None: nothing is recorded."""
        self._model = model
        self._record = record
        self.backends = backends
        self._cache: KVCache | None = None
        self._free: list[int] = []
        self._num_leased = 0
        self._graphs: DecodeGraphs | None = None

    @property
    def cache(self) -> KVCache:
        assert self._cache is not None, "pages are leased first"
        return self._cache

    @property
    def num_bytes(self) -> int:
        """Bytes of the pages, leased or not."""
        return 0 if self._cache is None else sum(layer.nbytes for layer in self._cache.layers)

    @property
    def page_tokens(self) -> int | None:
        """The number of tokens in a page must be a multiple of this; None: a CPU has blocks of any size."""
        return None if self.backends is None else self.backends.page_tokens

    @property
    def graphs(self) -> DecodeGraphs | None:
        """The recorded passes over the pages; None if nothing can be recorded."""
        if self._record is None or self.backends is None or not self.backends.in_graph:
            return None
        if not self._model.recordable:
            return None
        if self._graphs is None or not self._graphs.are_valid:
            self._graphs = DecodeGraphs(self._model, self.cache, self.backends, self._record)
        return self._graphs

    def drop_graphs(self) -> None:
        """Forget the recorded passes; they are recorded anew when they are needed."""
        self._graphs = None

    def drop_unequal_graphs(self, group: Group) -> None:
        """Forget the recorded passes unless all ranks of a group (over gloo) have recorded the same ones.

        A rank may have lost some, for example when its pool grew or its memory was needed. All ranks then
        record their passes anew, in the same steps.
        """
        if group.size == 1:
            return
        graphs = None if self._cache is None else self.graphs
        recorded = group.all_gather_json(None if graphs is None else graphs.known)
        if any(other != recorded[0] for other in recorded):
            self.drop_graphs()

    def lease(self, count: int, *, page_size: int) -> list[int]:
        """Return `count` pages of `page_size` tokens; the pool grows if it has too few.

        Pages that are leased already keep their contents. The first lease also makes the spare page 0.
        """
        if count == 0 and self._cache is not None:
            return []
        lacking = count - len(self._free)
        if self._cache is None or (page_size != self._cache.block_size and not self._num_leased):
            self.release()
            num_spare = int(self.backends is not None)
            self._cache = KVCache.of(self._model, num_spare + count, page_size)
            self._free = list(range(num_spare, num_spare + count))
        elif lacking > 0:
            self._grow(lacking)
        assert self.cache.block_size == page_size, "leased pages have another size"
        leased = self._free[:count]
        del self._free[:count]
        self._num_leased += count
        return leased

    def _grow(self, count: int) -> None:
        """Add pages; only leased ones have contents that matter."""
        cache = self.cache
        old = cache.num_blocks
        self._graphs = None
        if self._num_leased:
            cache.grow(old + count)
        else:
            self._cache = None  # This frees the memory before there is more of it.
            size = cache.block_size
            del cache
            self._cache = KVCache.of(self._model, old + count, size)
        self._free += range(old, old + count)

    def give_back(self, pages: Iterable[int]) -> None:
        """Take back pages that were leased."""
        num_free = len(self._free)
        self._free = sorted([*self._free, *pages])
        self._num_leased -= len(self._free) - num_free

    def table_width(self, row_pages: int) -> int:
        """Return the width of the tables of rows, which have up to `row_pages` pages.

        It depends on nothing else, because kernels choose by it into how many pieces to split keys, and a run
        that continues from a checkpoint must choose the same.
        """
        return max(_LEAST_WIDTH, 1 << (row_pages - 1).bit_length())

    def release(self) -> None:
        """Free all memory, and the recorded passes with it, unless pages are leased."""
        if self._num_leased:
            return
        self._graphs = None
        self._cache = None
        self._free = []


def page_pool(model: Transformer, backend: AttentionBackend | None) -> PagePool | None:
    """Return an empty pool for the paged path; None if the model decodes block by block on a CPU."""
    device = model.flat.device
    if backend is None and device.type == "cpu":
        return None
    return PagePool(model, backends=PagedBackends(model, backend), record=recorder(device))
