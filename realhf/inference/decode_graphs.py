"""DecodeGraphs: decoding passes that are recorded once for each size and then replayed.

A GPU computes a small batch faster than the host launches its kernels one by one; a CUDA graph launches them
all at once. A recorded pass reads its inputs from the same memory every time, and may not wait for the host.

Shape suffixes: B rows, padded to one of a few sizes; X position, cache position and blocks of a row.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from realhf.inference.block_tables import BlockTables
from realhf.inference.forward_batch import DecodeByTable
from realhf.inference.kv_cache import KVCache
from realhf.kv_blocks import padded_size
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
    """The decoding passes of one cache, which must have a spare block that its tables do not know."""

    def __init__(self, model: Transformer, cache: KVCache, tables: BlockTables, record: Record) -> None:
        """The model must be `recordable`."""
        self._model = model
        self._cache = cache
        self._tables = tables
        self._record = record
        self._inputs: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """Numbers of rows and of blocks -> the memory from which passes of that size read ids_B and
        numbers_BX."""
        self._replays: dict[tuple[int, int], Compute] = {}

    def __call__(self, ids_B: Tensor) -> Tensor:
        """Decode the last tokens of all running rows; return hidden_BH, valid until the next call."""
        counts = zip(self._tables.size(), self._tables.largest_size, strict=True)
        num_rows, num_blocks = (min(padded_size(count), most) for count, most in counts)
        size = (num_rows, num_blocks)
        is_new = size not in self._inputs
        if is_new:
            numbers_BX = ids_B.new_zeros(num_rows, 2 + num_blocks)
            self._inputs[size] = numbers_BX.new_zeros(num_rows), numbers_BX
        padded_ids_B, numbers_BX = self._inputs[size]
        padded_ids_B[: len(ids_B)] = ids_B
        numbers_BX.copy_(torch.from_numpy(self._tables.advance_by_table(num_rows, num_blocks)))
        compute = partial(self._compute, padded_ids_B, numbers_BX)
        if is_new:  # Libraries initialise themselves in a first pass, and some sizes occur only once.
            return compute()[: len(ids_B)]
        if size not in self._replays:
            self._replays[size] = self._record(compute)
        return self._replays[size]()[: len(ids_B)]

    def _compute(self, ids_B: Tensor, numbers_BX: Tensor) -> Tensor:
        rows = DecodeByTable(numbers_BX, self._tables.block_size)
        return self._model.advance(ids_B, self._cache, [rows])
