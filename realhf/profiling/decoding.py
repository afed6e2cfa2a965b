"""Decoding rows for measurements, set up with the scheduler and the model but without reading prompts."""

from collections.abc import Callable
from functools import partial

import torch

from realhf.calls import Generate, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.devices.pinned import upload
from realhf.distributed.world import World
from realhf.inference.cache_memory import CacheSizes, GenerationLimits
from realhf.inference.cpu_decoding import Decode, DecodingSteps
from realhf.inference.forward_batch import PagedBackends, Prefill, paged_rows
from realhf.inference.kv_cache import BlockManager, BlockTables, RowPages
from realhf.inference.page_pool import PagePool, page_pool
from realhf.inference.rollout_buffer import PromptGroup
from realhf.inference.scheduler import Prompt, Scheduler
from realhf.layout import even_split
from realhf.models.kv_blocks import block_size, shared_tokens, tokens_read
from realhf.nn.attention import Segment
from realhf.nn.transformer import Transformer
from realhf.profiling.surroundings import device_bytes

_CACHE_SHARE = 1 / 8  # The fraction of a device's memory for the cache of measured rows.
_NEW_TOKENS = 16  # New tokens that each row has cache blocks for.


def prompts(rows: int, length: int, *, vocab_size: int) -> Batch:
    """Return one prompt per row. They differ, since equal ones are read once and share blocks of the
    cache."""
    ids = torch.arange(length) + torch.arange(rows)[:, None]
    return Batch(list(range(rows)), {"prompt_ids": Packed(ids.flatten() % vocab_size, [length] * rows)})


def most_rows(model: Transformer, length: int, world: World) -> int:
    """Return how many rows of `length` tokens can be measured."""
    row_bytes = model.cache_token_bytes * length
    return max(1, min(world.control.all_gather_json(int(device_bytes(world) * _CACHE_SHARE / row_bytes))))


def cached_tokens(length: int, *, num_rows: int) -> float:
    """Return the tokens of the cache that a measured row reads, if its prompt of `length` tokens has
    `num_rows` rows."""
    size = block_size([(length, num_rows)], max_new_tokens=_NEW_TOKENS)
    shared = shared_tokens(length, num_rows)
    own = length + 1.0 - shared
    return float(shared + tokens_read(own, own, size))


class DecodingRows:
    """Rows that continue `num_prompts` prompts of one length; consecutive rows share a prompt.

    The cached keys and values of the prompts are made up, since reading prompts takes much longer than the
    steps after them and has no effect on the time of these.
    """

    def __init__(self, model: Transformer, rows: int, *, prompt_tokens: int, num_prompts: int) -> None:
        bounds = [even_split(rows, num_prompts, i) for i in range(num_prompts)]
        row_prompts = [Prompt([0] * prompt_tokens, list(range(*pair))) for pair in bounds]
        groups = [PromptGroup(prompt.tokens, prompt.samples) for prompt in row_prompts]
        work = Generate(SamplingConfig(max_new_tokens=_NEW_TOKENS), max_rows=rows)
        pool = page_pool(model, None) or PagePool(model)
        limits = GenerationLimits(
            [group.size for group in groups], work, token_bytes=1, num_cohorts=1,
            page_tokens=pool.page_tokens)
        sizes = CacheSizes(groups, limits)
        blocks = BlockManager(pool.lease(sizes.num_blocks, page_size=sizes.block_size))
        self._cache = pool.cache
        tables = sizes.tables(self._cache.num_blocks)
        scheduler = Scheduler(
            row_prompts, tables=tables, history=lambda _: [], blocks=blocks,
            prefill_tokens=rows * prompt_tokens)
        self._model = model
        device = model.flat.device
        for layer in self._cache.layers:
            layer.fill_(1.0)  # Memory pages that were never written would all map to one page.
        first = scheduler.plan()
        assert first is not None
        self._cache_positions = [chunk.cache_positions(tables.block_size) for chunk in first.chunks]
        scheduler.update([False] * rows)
        scheduler.plan()
        self.segment = next_tokens(tables, pool.backends, device)
        """The decode step after the prompts."""
        self._ids_B = torch.arange(rows, device=device) * 7919 % model.config.vocab_size

    def reading(self) -> Callable[[], object]:
        """Return a function that runs the pass of all prompts."""
        lens = list(map(len, self._cache_positions))
        device = self._ids_B.device
        batch = prompts(len(lens), lens[0], vocab_size=self._model.config.vocab_size)
        ids_T = batch["prompt_ids"].values.to(device)
        positions_T = torch.tensor([i for prompt in self._cache_positions for i in prompt], device=device)
        segment = Prefill(lens, positions_T, whole_lens=lens)
        run = partial(self._model.advance, ids_T, self._cache, [segment])
        return torch.no_grad()(run)

    @torch.no_grad()
    def decode(self, *, steps: int) -> None:
        """Run the same decode step `steps` times, without its head."""
        with self._model.gathering(len(self._ids_B)):
            for _ in range(steps):
                self._model.advance(self._ids_B, self._cache, [self.segment])


def next_tokens(tables: BlockTables, backends: PagedBackends | None, device: torch.device) -> Segment:
    """Return one new token of every running row, for the paged path or (`backends` is None) for a CPU."""
    if backends is None:
        return Decode(DecodingSteps(tables).advance())
    on_host = tables.advance_pages(len(tables.running()), tables.blocks_per_row)
    pages = RowPages(*(upload(array, device) for array in on_host))
    longest = int(on_host.lens_B.max())
    return paged_rows(backends, pages, page_size=tables.block_size, longest=longest)
