"""Attention over blocks, shared or not, against softmax over the rows' own tokens."""

import random

import pytest
import torch

from realhf.attention.interface import AttentionKind
from realhf.inference.cpu_decoding import BlockAttention, DecodingSteps
from realhf.inference.kv_cache import BlockTables, KVCache
from realhf.models.kv_blocks import num_blocks

HEADS, GROUP, DIM = 2, 3, 16
BLOCK_SIZE = 64
CPU = torch.device("cpu")
ROWS = {0: (130, 2, 0), 3: (1, 0, 0), 4: (64, 0, 0), 5: (200, 2, 0), 7: (65, 0, 0)}
"""Slot -> number of tokens, number of shared blocks, first shared block."""
SIDE_BY_SIDE = {
    0: (130, 2, 10), 1: (200, 2, 12), 3: (1, 0, 0), 5: (129, 2, 10), 6: (190, 2, 12), 7: (230, 2, 16)}


class _Rows:
    """A cache, and separately the keys and values of each row."""

    def __init__(self, dtype, value_dim, rows=ROWS):
        self.dtype, self.value_dim = dtype, value_dim
        self.cache = KVCache(1, (40, BLOCK_SIZE, HEADS, DIM), value_dim=value_dim, dtype=dtype, device=CPU)
        self.tables = BlockTables(
            num_slots=9, num_blocks=40, block_size=BLOCK_SIZE, blocks_per_row=4)
        self.decoding = DecodingSteps(self.tables)
        starts = {first for _, num_shared, first in rows.values() if num_shared}
        self.free = [block for block in range(40) if all(block - first not in (0, 1, 2) for first in starts)]
        random.Random(0).shuffle(self.free)
        self.tokens = {}
        prefixes = {first: self._draw(2 * BLOCK_SIZE) for first in starts}
        for slot, (length, num_shared, first) in rows.items():
            own = [self.free.pop() for _ in range(num_blocks(length, BLOCK_SIZE) - num_shared)]
            blocks, tokens = [first, first + 1][:num_shared] + own, self._draw(length)
            if num_shared:
                tokens[:, : 2 * BLOCK_SIZE] = prefixes[first]
            positions = [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(length)]
            self.cache.place(0, torch.tensor(positions)).write(*tokens[: len(self.cache.layers[0])])
            self.tokens[slot] = tokens
            ordinal = 2 if slot in (5, 6) else 0
            self.tables.start(slot, blocks, length=length, num_shared=num_shared, ordinal=ordinal)

    def _draw(self, count):
        """Draw random keys and values."""
        return torch.randn(2, count, HEADS, DIM).to(self.dtype)

    def step(self, kind):
        """Decode one token per row; return the cache's attention, and the expected one."""
        for slot in self.tables.full():
            self.tables.append(slot, self.free.pop())
        decoding = self.decoding.advance()
        count = len(decoding.slots)
        q, new = torch.randn(count, HEADS * GROUP, DIM).to(self.dtype), self._draw(count)
        self.cache.place(0, decoding.cache_positions_B).write(*new[: len(self.cache.layers[0])])
        expected = []
        for row, slot in enumerate(decoding.slots.tolist()):
            self.tokens[slot] = torch.cat((self.tokens[slot], new[:, row : row + 1]), dim=1)
            expected.append(self._attend(q[row], *self.tokens[slot], kind))
        attention = BlockAttention(kind, value_dim=self.value_dim)
        return attention.decode(q, self.cache.layers[0], decoding), torch.stack(expected)

    def _attend(self, q, k, v, kind):
        v = v if self.value_dim is None else k[..., : self.value_dim]
        seen = slice(-kind.window if kind.window else None, None)
        k, v = (x[seen].double().repeat_interleave(GROUP, dim=1) for x in (k, v))
        scores = torch.einsum("nd,lnd->nl", q.double(), k) * kind.scale
        if kind.softcap is not None:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        return torch.einsum("nl,lnd->nd", scores.softmax(-1), v).to(self.dtype)


KINDS = [
    (AttentionKind(0.25), None), (AttentionKind(0.25), 12), (AttentionKind(0.25, softcap=3.0), None),
    (AttentionKind(0.25, window=70), None), (AttentionKind(0.25, window=5), None),
]


ACCURACY = [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)]


@pytest.mark.parametrize("dtype, atol", ACCURACY)
@pytest.mark.parametrize("kind, value_dim", KINDS)
def test_attention_over_blocks_is_that_over_the_rows_tokens(dtype, atol, kind, value_dim):
    torch.manual_seed(0)
    rows = _Rows(dtype, value_dim)
    for number in range(3):
        ours, expected = rows.step(kind)
        torch.testing.assert_close(ours, expected, rtol=0, atol=atol)
        if number == 1:  # One of two sharers remains, and unshared blocks that lie far apart.
            rows.tables.stop(5)
            rows.tables.stop(4)


@pytest.mark.parametrize("dtype, atol", ACCURACY)
@pytest.mark.parametrize("kind, value_dim", KINDS)
def test_shared_blocks_side_by_side_are_attended_to_as_one(dtype, atol, kind, value_dim):
    torch.manual_seed(0)
    rows = _Rows(dtype, value_dim, SIDE_BY_SIDE)
    for stopped in (None, 5, 1, 0):  # Until one prompt has one row left, another none.
        ours, expected = rows.step(kind)
        torch.testing.assert_close(ours, expected, rtol=0, atol=atol)
        if stopped is not None:
            rows.tables.stop(stopped)
    assert _joined(rows) == 2
    rows.tables.start(2, [14, rows.free.pop()], length=100, num_shared=1)  # Prompts of one block and of two.
    assert _joined(rows) == 1


def _joined(rows):
    for slot in rows.tables.full():
        rows.tables.append(slot, rows.free.pop())
    return rows.decoding.advance().sets[1].joined


def test_a_copied_block_goes_its_own_way():
    cache = KVCache(2, (3, BLOCK_SIZE, HEADS, DIM), dtype=torch.float32, device=CPU)
    tokens = torch.randn(2, 5, HEADS, DIM)
    for layer in range(2):
        cache.place(layer, torch.arange(5)).write(*tokens)
    cache.copy((0,), (2,))
    cache.place(0, torch.tensor([2])).write(*tokens[:, :1] * 0)
    for layer in range(2):
        for pages, expected in zip(cache.pages(layer), tokens, strict=True):
            assert torch.equal(pages[2, :5], expected)
    assert not cache.pages(0)[0][0, 2].any()
