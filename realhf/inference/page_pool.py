"""PagePool: the pages of keys and values that one rank's layers have, and the recorded passes over them.

A GPU computes a small batch faster than the host launches its kernels one by one; a CUDA graph launches
them all at once. DecodeGraphs records a pass once for each shape of its tables and then replays it. A
recorded pass reads its inputs from the same memory every time, and may not wait for the host.

Shape suffixes: B rows, padded to one of a few sizes; M pages of a row; H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from realhf.attention.interface import AttentionBackend
from realhf.distributed.group import Group
from realhf.inference.forward_batch import PagedBackends, paged_rows
from realhf.inference.kv_cache import KVCache, RowPages
from realhf.nn.transformer import Transformer

Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]
"""Records a function of tensors at fixed addresses; returns one that replays it into the same output."""
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


class DecodeGraphs:
    """The decoding passes of one cache, whose page 0 is spare: padding rows write to it.

    They hold the addresses of the cache and of the model's weights. All ranks must record a pass with
    collectives in the same step. So ranks of a tp group have the same rows, ranks of an ep group agree on the
    shapes (DecodeWindows), and both drop their passes if they have not recorded the same ones
    (PagePool.drop_unequal_graphs).
    """

    def __init__(self, model: Transformer, cache: KVCache, backends: PagedBackends, record: Record) -> None:
        """The model must be `recordable`, and the backends must work in graphs."""
        self._model = model
        self._cache = cache
        self._backends = backends
        self._record = record
        self._addresses = model.addresses
        self._inputs: dict[torch.Size, tuple[Tensor, RowPages[Tensor]]] = {}
        """Shape of the tables -> the memory from which passes of that shape read: ids_B, or hidden_BH of the
        stage before, and the pages of the rows."""
        self._replays: dict[torch.Size, Compute] = {}

    @property
    def are_valid(self) -> bool:
        """Whether the weights are still where the passes read them."""
        return self._addresses == self._model.addresses

    @property
    def known(self) -> list[tuple[int, ...]]:
        """The shapes of tables that have run, each with 1 if it is recorded and else 0."""
        return sorted((*shape, int(shape in self._replays)) for shape in self._inputs)

    def padding(self, num_rows: int, num_pages: int) -> RowPages[Tensor]:
        device = self._model.flat.device
        zeros_B = torch.zeros(num_rows, dtype=torch.long, device=device)
        table_BM = torch.zeros((num_rows, num_pages), dtype=torch.int32, device=device)
        lens_B = torch.ones(num_rows, dtype=torch.int32, device=device)
        return RowPages(zeros_B, zeros_B, lens_B, table_BM)

    def __call__(self, x: Tensor, pages: RowPages[Tensor]) -> Tensor:
        """Decode one token of each row and return hidden_BH, which is valid until the next call.

        `x` are the rows' last tokens, or the hidden states of the stage before, without padding.
        """
        shape = pages.table_BM.shape
        is_new = shape not in self._inputs
        if is_new:
            fixed = RowPages(*map(torch.empty_like, pages))
            self._inputs[shape] = x.new_zeros(shape[0], *x.shape[1:]), fixed
        padded_x, fixed = self._inputs[shape]
        padded_x[: len(x)] = x
        torch._foreach_copy_(list(fixed), list(pages))
        compute = partial(self._compute, padded_x, fixed)
        if is_new:  # Libraries initialise themselves in the first pass, and some shapes occur only once.
            return compute()[: len(x)]
        if shape not in self._replays:
            self._replays[shape] = self._record(compute)
        groups = self._model.groups
        shared = next((group for group in (groups.tp, groups.ep) if group.size > 1), None)
        if shared is not None:  # Collectives may not run beside earlier posts.
            groups.world.process.communicators.join()
        out = self._replays[shape]()[: len(x)]
        if shared is not None:
            shared.note(shared.new_operation("recorded pass"))
        return out

    def _compute(self, x: Tensor, pages: RowPages[Tensor]) -> Tensor:
        rows = paged_rows(self._backends, pages, page_size=self._cache.block_size)
        with self._model.gathering(len(x)):
            return self._model.advance(x, self._cache, [rows])


def recorder(device: torch.device) -> Record | None:
    """Return a function that records CUDA graphs, or None if the device has none.

    The graphs share their memory: the next graph that runs overwrites the result.
    """
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def record(compute: Compute) -> Compute:
        # (torch.cuda.graph would first wait for all streams and release the allocator's memory.)
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                out = compute()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return record
