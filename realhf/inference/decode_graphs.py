"""DecodeGraphs: decoding passes that are recorded once for each shape of their tables and then replayed.

A GPU computes a small batch faster than the host launches its kernels one by one; a CUDA graph launches them
all at once. A recorded pass reads its inputs from the same memory every time, and may not wait for the host.

Shape suffixes: B rows, padded to one of a few sizes; M pages of a row; H hidden.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from realhf.inference.forward_batch import paged_rows
from realhf.inference.kv_cache import KVCache
from realhf.inference.paged_backends import PagedBackends
from realhf.inference.step_inputs import RowPages
from realhf.nn.transformer import Transformer

Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]
"""Records a function of tensors at fixed addresses; returns one that replays it into the same output."""


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


class DecodeGraphs:
    """The decoding passes of one cache, whose page 0 is spare: padding rows write to it.

    They hold the addresses of the cache and of the model's weights. All ranks must record a pass with
    collectives in the same step. So ranks of a tp group have the same rows, ranks of an ep group agree on the
    shapes (decode_windows.py), and both drop their passes if they have not recorded the same ones
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
        """Return rows that are all padding."""
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
            groups.world.activity.communicators.join()
        out = self._replays[shape]()[: len(x)]
        if shared is not None:
            shared.note(shared.new_operation("recorded pass"))
        return out

    def _compute(self, x: Tensor, pages: RowPages[Tensor]) -> Tensor:
        rows = paged_rows(self._backends, pages, page_size=self._cache.block_size)
        with self._model.gathering(len(x)):
            return self._model.advance(x, self._cache, [rows])
