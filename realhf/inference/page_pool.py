"""PagePool: the pages of keys and values that one rank's layers have, and the recorded passes over them.

A GPU computes a small batch faster than the host launches its kernels one by one; a CUDA graph launches
them all at once. DecodeGraphs records a pass once for each shape of its tables and then replays it. A
recorded pass reads its inputs from the same memory every time, and may not wait for the host.

Shape suffixes: B rows, padded to one of a few sizes; M pages of a row; H hidden.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor

from realhf.attention.interface import AttentionBackend
from realhf.calls import SamplingConfig
from realhf.distributed.group import Group
from realhf.inference.forward_batch import PagedBackends, paged_rows
from realhf.inference.kv_cache import KVCache, RowPages
from realhf.inference.sampling import draw_tokens
from realhf.nn.transformer import Transformer


class Decoded(NamedTuple):
    """The results of a recorded pass for each row: the hidden states and, if it samples, the next token with
    its log-prob."""

    hidden_BH: Tensor
    tokens_B: Tensor | None = None
    logprobs_B: Tensor | None = None


class _Inputs(NamedTuple):
    """The memory that a recorded pass reads: ids_B, or hidden_BH of the stage before, the pages of the rows,
    and the random numbers with which it samples."""

    x: Tensor
    pages: RowPages[Tensor]
    uniform_B: Tensor


Compute = Callable[[], Decoded]
Record = Callable[[Compute], Compute]
"""Records a function of tensors at fixed addresses; returns one that replays it into the same output."""
_LEAST_WIDTH = 8  # Pages; the width of tables is this or a power of two above it, so that few widths occur.


class PagePool:
    """Pages of one size that cohorts of samples lease.

    With `backends`, kernels attend to pages (the paged path). The pool, and the recorded passes that hold its
    addresses, then outlive the generations of an engine, and its memory may go between them. Without
    `backends`, a CPU attends block by block, and every cohort has a pool of its own.
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
        return 0 if self._cache is None else self._cache.num_bytes

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the device that the pages take apart from torch's allocator."""
        return 0 if self._cache is None else self._cache.mapped_bytes

    @property
    def graph_bytes(self) -> int:
        """Bytes that the recorded passes hold apart from the pages."""
        return 0 if self._graphs is None else self._graphs.num_bytes

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
        if self._cache is not None and page_size != self._cache.block_size and not self._num_leased:
            self._drop()
        num_blocks = 0 if self._cache is None else self._cache.num_blocks
        num_spare = int(self.backends is not None)
        lacking = count - len(self._free)
        if self._cache is None or lacking > 0 or num_blocks < num_spare:
            self._grow(max(num_blocks, num_spare) + max(lacking, 0), page_size)
            self._free += range(max(num_blocks, num_spare), self.cache.num_blocks)
        assert self.cache.block_size == page_size, "leased pages have another size"
        leased = self._free[:count]
        del self._free[:count]
        self._num_leased += count
        return leased

    def _grow(self, num_blocks: int, page_size: int) -> None:
        """Make so many pages in all; only leased ones have contents that matter."""
        cache = self._cache
        if cache is None or not cache.fits_in_place(num_blocks):
            self._graphs = None
        if cache is None or not (self._num_leased or cache.fits_in_place(num_blocks)):
            self._cache = cache = None  # This frees the memory before there is more of it.
            self._cache = KVCache.of(self._model, num_blocks, page_size)
        else:
            cache.resize(num_blocks)

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
        """Give back the memory behind the last leased page. The recorded passes stay, as all addresses do,
        except where memory cannot be given back without them."""
        if self._cache is None:
            return
        if not self._cache.can_shrink:
            if not self._num_leased:
                self._drop()
            return
        leased = set(range(self._cache.num_blocks)) - set(self._free)
        num_kept = 1 + max(leased) if self._num_leased else 0
        self._cache.resize(num_kept)
        self._free = [page for page in self._free if page < num_kept]

    def _drop(self) -> None:
        """Forget the pages, none of which is leased, their addresses, and the recorded passes over them."""
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
        self._inputs: dict[torch.Size, _Inputs] = {}
        """By the shape of the tables."""
        self._replays: dict[tuple[torch.Size, SamplingConfig | None], Compute | None] = {}
        """By the shape of the tables and the way of sampling, if the pass samples; None: it has run once."""
        self.num_bytes = 0
        """What torch has reserved while passes were recorded."""

    @property
    def are_valid(self) -> bool:
        """Whether the weights are still where the passes read them."""
        return self._addresses == self._model.addresses

    @property
    def known(self) -> list[list[str]]:
        """The passes that have run: the shape of the tables, the way of sampling, and whether it is
        recorded."""
        return sorted(
            [str(tuple(shape)), str(sampling), str(replay is not None)]
            for (shape, sampling), replay in self._replays.items())

    def padding(self, num_rows: int, num_pages: int) -> RowPages[Tensor]:
        device = self._model.flat.device
        zeros_B = torch.zeros(num_rows, dtype=torch.long, device=device)
        table_BM = torch.zeros((num_rows, num_pages), dtype=torch.int32, device=device)
        lens_B = torch.ones(num_rows, dtype=torch.int32, device=device)
        return RowPages(zeros_B, zeros_B, lens_B, table_BM)

    def __call__(
        self, x: Tensor, pages: RowPages[Tensor], *, uniform_B: Tensor | None = None,
        sampling: SamplingConfig | None = None,
    ) -> Decoded:
        """Decode one token of each row; the result is valid until the next call.

        `x` are the rows' last tokens, or the hidden states of the stage before, without padding. With
        `sampling`, the pass also samples the next tokens with the random numbers `uniform_B`.
        """
        count = len(x)
        shape = pages.table_BM.shape
        if shape not in self._inputs:
            draws_B = torch.zeros(shape[0], dtype=torch.float64, device=x.device)
            fixed_pages = RowPages(*map(torch.empty_like, pages))
            self._inputs[shape] = _Inputs(x.new_zeros(shape[0], *x.shape[1:]), fixed_pages, draws_B)
        fixed = self._inputs[shape]
        copies = [(fixed.x[:count], x), *zip(fixed.pages, pages, strict=True)]
        if sampling is not None and count:
            assert uniform_B is not None
            copies.append((fixed.uniform_B[:count], uniform_B))
        torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies])
        decoded = self._run(shape, sampling)
        if decoded.tokens_B is None or decoded.logprobs_B is None:
            return Decoded(decoded.hidden_BH[:count])
        return Decoded(decoded.hidden_BH[:count], decoded.tokens_B[:count], decoded.logprobs_B[:count])

    def _run(self, shape: torch.Size, sampling: SamplingConfig | None) -> Decoded:
        """Run, record or replay the pass of a shape."""
        compute = partial(self._compute, self._inputs[shape], sampling)
        key = shape, sampling
        if key not in self._replays:  # Libraries initialise themselves, and some shapes occur only once.
            self._replays[key] = None
            return compute()
        replay = self._replays[key]
        if replay is None:
            before = self._reserved_bytes()
            replay = self._replays[key] = self._record(compute)
            self.num_bytes += max(0, self._reserved_bytes() - before)
        groups = self._model.groups
        shared = next((group for group in (groups.tp, groups.ep) if group.size > 1), None)
        if shared is not None:  # Collectives may not run beside earlier posts.
            groups.world.process.communicators.join()
        out = replay()
        if shared is not None:
            shared.note(shared.new_operation("recorded pass"))
        return out

    def _reserved_bytes(self) -> int:
        device = self._model.flat.device
        return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0

    def _compute(self, inputs: _Inputs, sampling: SamplingConfig | None) -> Decoded:
        rows = paged_rows(self._backends, inputs.pages, page_size=self._cache.block_size)
        with self._model.gathering(len(inputs.x)):
            hidden_BH = self._model.advance(inputs.x, self._cache, [rows])
        if sampling is None:
            return Decoded(hidden_BH)
        return Decoded(hidden_BH, *draw_tokens(self._model, hidden_BH, inputs.uniform_B, config=sampling))


def recorder(device: torch.device) -> Record | None:
    """Return a function that records CUDA graphs, or None if the device has none.

    The graphs share their memory: the next graph that runs overwrites the result.
    """
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    graphs = WeakSet[torch.cuda.CUDAGraph]()
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Compute) -> Compute:
        nonlocal pool
        if not graphs:  # The allocator takes no pool again whose graphs have all gone.
            pool = torch.cuda.graph_pool_handle()
        # (torch.cuda.graph would first wait for all streams and release the allocator's memory.)
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), _without_collection():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                out = compute()
            finally:
                graph.capture_end()
        graphs.add(graph)
        torch.cuda.current_stream().wait_stream(stream)

        def replay() -> Decoded:
            graph.replay()
            return out

        return replay

    return record


@contextmanager
def _without_collection() -> Iterator[None]:
    """Collect no garbage inside this context: memory of an earlier pool that is freed there would wait for
    the device, which ends a recording."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
