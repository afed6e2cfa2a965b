"""DecodeGraphs: decoding passes, recorded once for each size and replayed from then on.

A GPU computes a small batch faster than the host launches its kernels one by one; a CUDA graph launches them
all at once. What is recorded finds its inputs where they were then, and may not wait for the host.

Shape suffixes: B rows, filled up to a number that recurs; X position, place in cache and blocks of a row.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from realhf.inference.block_tables import BlockTables
from realhf.inference.forward_batch import DecodeByTable
from realhf.inference.kv_cache import KVCache
from realhf.nn.transformer import Transformer

Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]
"""Of a function on tensors that stay where they are, what does the same again and gives the same tensor."""


def recorder(device: torch.device) -> Record | None:
    """CUDA graphs, which share their memory: a result is overwritten by whichever runs next. None: there are
    none on such a device."""
    if device.type != "cuda":
        return None
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def record(compute: Compute) -> Compute:
        # (torch.cuda.graph would wait for all streams and give the allocator's memory back first.)
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
    """Decodes all running rows of one cache, which has one block more than its tables know."""

    def __init__(self, model: Transformer, cache: KVCache, tables: BlockTables, record: Record) -> None:
        """The model must be `recordable`."""
        self._model, self._cache, self._tables, self._record = model, cache, tables, record
        self._passes: dict[tuple[int, ...], _Pass] = {}

    def __call__(self, ids_B: Tensor) -> Tensor:
        """The pass of the rows' last tokens: hidden_BH, until the next call."""
        counts = zip(self._tables.size(), self._tables.largest_size, strict=True)
        num_rows, num_blocks = (min(recurring(count), most) for count, most in counts)
        is_new = (num_rows, num_blocks) not in self._passes
        if is_new:
            self._passes[num_rows, num_blocks] = _Pass(
                self._model, self._cache, num_rows, num_blocks, block_size=self._tables.block_size)
        step = self._passes[num_rows, num_blocks]
        step.ids_B[: len(ids_B)] = ids_B
        step.numbers_BX.copy_(torch.from_numpy(self._tables.advance_by_table(num_rows, num_blocks)))
        if is_new:  # Libraries prepare themselves in a first pass, and some sizes never come up again.
            return step.compute()[: len(ids_B)]
        if step.replay is None:
            step.replay = self._record(step.compute)
        return step.replay()[: len(ids_B)]


class _Pass:
    """A decoding pass of one size."""

    def __init__(
        self, model: Transformer, cache: KVCache, num_rows: int, num_blocks: int, *, block_size: int
    ) -> None:
        self.numbers_BX = model.flat.new_zeros(num_rows, 2 + num_blocks, dtype=torch.long)
        self.ids_B = self.numbers_BX.new_zeros(num_rows)
        self.replay: Compute | None = None
        self._model, self._cache, self._block_size = model, cache, block_size

    def compute(self) -> Tensor:
        rows = DecodeByTable.of(self.numbers_BX, self._block_size)
        return self._model.advance(self.ids_B, self._cache, [rows])


def recurring(count: int) -> int:
    """The next of a few sizes: up to 8 all of them, then four to each doubling."""
    step = max(1, 1 << (count - 1).bit_length() >> 3)
    return -(-count // step) * step
