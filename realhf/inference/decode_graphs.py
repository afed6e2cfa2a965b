"""DecodeGraphs: decoding passes that are recorded once for each shape of their tables and then replayed.

A GPU computes a small batch faster than the host launches its kernels one by one; a CUDA graph launches them
all at once. A recorded pass reads its inputs from the same memory every time, and may not wait for the host.

Shape suffixes: B rows, padded to one of a few sizes; M pages of a row; H hidden.
"""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from realhf.inference.block_tables import PAGED_ROWS
from realhf.inference.forward_batch import paged_rows
from realhf.inference.kv_cache import KVCache
from realhf.inference.paged_backends import PagedBackends
from realhf.nn.transformer import Transformer

Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]
"""Records a function of tensors at fixed addresses; returns one that repeats it into the same output."""


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

    They hold the addresses of the cache and of the model's weights. All ranks of a tp group have the same
    rows, so that they record a shape in the same step.
    """

    def __init__(
        self, model: Transformer, cache: KVCache, backends: PagedBackends, record: Record
    ) -> None:
        """The model must be `recordable`, and the backends must work in graphs."""
        self._model = model
        self._cache = cache
        self._backends = backends
        self._record = record
        self._addresses = model.addresses
        self._inputs: dict[torch.Size, tuple[Tensor, dict[str, Tensor]]] = {}
        """Shape of the tables -> the memory from which passes of that shape read: ids_B, or hidden_BH of the
        stage before, and the arrays of BlockTables.advance_pages."""
        self._replays: dict[torch.Size, Compute] = {}

    @property
    def are_valid(self) -> bool:
        """Whether the weights are still where the passes read them."""
        return self._addresses == self._model.addresses

    def __call__(self, x: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
        """Decode the rows of BlockTables.advance_pages, which are in `numbers`; return hidden_BH, valid until
        the next call.

        `x` are the rows' last tokens, or the hidden states of the stage before, without padding.
        """
        shape = numbers["table_BM"].shape
        is_new = shape not in self._inputs
        if is_new:
            fixed = {name: torch.empty_like(numbers[name]) for name in PAGED_ROWS}
            self._inputs[shape] = x.new_zeros(shape[0], *x.shape[1:]), fixed
        padded_x, fixed = self._inputs[shape]
        padded_x[: len(x)] = x
        torch._foreach_copy_(list(fixed.values()), [numbers[name] for name in fixed])
        compute = partial(self._compute, padded_x, fixed)
        if is_new:  # Libraries initialise themselves in a first pass, and some shapes occur only once.
            return compute()[: len(x)]
        if shape not in self._replays:
            self._replays[shape] = self._record(compute)
        tp = self._model.groups.tp
        if tp.size > 1:  # Its collectives may not run beside earlier posts.
            self._model.groups.world.activity.communicators.join()
        out = self._replays[shape]()[: len(x)]
        if tp.size > 1:
            tp.note(tp.new_operation("recorded pass"))
        return out

    def _compute(self, x: Tensor, numbers: Mapping[str, Tensor]) -> Tensor:
        rows = paged_rows(self._backends, numbers, page_size=self._cache.block_size)
        return self._model.advance(x, self._cache, [rows])
