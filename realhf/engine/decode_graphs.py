"""DecodeGraphs: decoding passes, recorded once for each size and replayed from then on.

A GPU computes a small batch faster than the host launches its kernels one by one; a CUDA graph launches them
all at once. What is recorded finds its inputs where they were then, and may not wait for the host.

Shape suffixes: B rows, filled up to a number that recurs; X numbers that say where a row stands.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from realhf.nn.block_tables import BlockTables
from realhf.nn.kv_cache import KVCache
from realhf.nn.segments import DecodeByTable
from realhf.nn.transformer import Transformer

Compute = Callable[[], Tensor]
Record = Callable[[Compute], Compute]
"""Of a function on tensors that stay where they are, what does the same again and gives the same tensor."""


def recorder(device: torch.device) -> Record | None:
    """CUDA graphs, which share their memory: a result is overwritten by whichever runs next. None: there are
    none on such a device."""
    if device.type != "cuda":
        return None
    pool = torch.cuda.graph_pool_handle()

    def record(compute: Compute) -> Compute:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            out = compute()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return record


class DecodeGraphs:
    """Decodes all running rows of one cache."""

    def __init__(self, model: Transformer, cache: KVCache, tables: BlockTables, record: Record) -> None:
        """The model must be `recordable`."""
        self._model, self._cache, self._tables, self._record = model, cache, tables, record
        self._steps: dict[tuple[int, int], _Step] = {}

    def __call__(self, ids_B: Tensor) -> Tensor:
        """The pass of the rows' last tokens: hidden_BH, until the next call."""
        num_rows, num_blocks = self._tables.size()
        size = recurring(num_rows), recurring(num_blocks)
        is_new = size not in self._steps
        if is_new:
            self._steps[size] = _Step(self._model, self._cache, size, block_size=self._tables.block_size)
        step = self._steps[size]
        step.ids_B[:num_rows] = ids_B
        step.ids_B[num_rows:] = ids_B[0]
        step.numbers_BX.copy_(torch.from_numpy(self._tables.advance_by_table(*size)))
        if is_new:  # Libraries prepare themselves in a first pass, and some sizes never come up again.
            return step.compute()[:num_rows]
        if step.replay is None:
            step.replay = self._record(step.compute)
        return step.replay()[:num_rows]


class _Step:
    """A decoding pass of one size."""

    def __init__(
        self, model: Transformer, cache: KVCache, size: tuple[int, int], *, block_size: int
    ) -> None:
        num_rows, num_blocks = size
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
