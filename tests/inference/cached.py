"""Rows in a KV cache whose blocks are assigned by hand: no row shares a block with another."""

import torch

from realhf.inference.cpu_decoding import ChunkedPrefill, Decode, DecodingSteps
from realhf.inference.forward_batch import Prefill
from realhf.inference.kv_cache import BlockTables, KVCache

BLOCK_SIZE = 64
_BLOCKS = 3  # Blocks of each row.


class CachedRows:
    """Sequences that a model decodes together."""

    def __init__(self, model, lens):
        self.model, self.lens = model, list(lens)
        self.cache = KVCache.of(model, len(lens) * _BLOCKS, BLOCK_SIZE)
        self.tables = BlockTables(
            num_slots=len(lens), num_blocks=len(lens) * _BLOCKS, block_size=BLOCK_SIZE,
            blocks_per_row=_BLOCKS)
        self.decoding = DecodingSteps(self.tables)

    def cache_positions(self, row, length):
        # (The blocks of a row do not lie in order.)
        blocks = [(row * 7 + i) % len(self.lens) * _BLOCKS + i for i in range(_BLOCKS)]
        return blocks, [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(length)]

    def prefill(self, x, *, first=None):
        """Prefill whole sequences, or the `first` tokens of each."""
        lens = self.lens if first is None else [min(first, length) for length in self.lens]
        positions = [i for row, length in enumerate(lens) for i in self.cache_positions(row, length)[1]]
        segment = Prefill(lens, torch.tensor(positions), whole_lens=self.lens)
        hidden = self.model.advance(x, self.cache, [segment])
        for row, length in enumerate(self.lens):
            self.tables.start(row, self.cache_positions(row, length)[0], length=length)
        return hidden

    def extend(self, x, row):
        """Prefill the last tokens of a row, whose other tokens are cached already."""
        length = self.lens[row]
        positions = torch.tensor(self.cache_positions(row, length)[1])
        segment = ChunkedPrefill(positions, num_tokens=len(x), longest=length)
        return self.model.advance(x, self.cache, [segment])

    def decode(self, x):
        return self.model.advance(x, self.cache, [Decode(self.decoding.advance())])

    def stop(self, row):
        self.tables.stop(row)
