"""Sizes of a KV cache: elements per token, tokens per block, and the blocks that a generation needs.

Kernels call blocks pages. The planner computes these sizes as generation does, and without torch.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from realhf.models.model_config import ModelConfig

FLASH_PAGE_TOKENS = 256
"""FlashAttention-2 reads pages of a multiple of so many tokens, in flash-attn as in torch."""
TRITON_PAGE_TOKENS = 16
"""Our own kernel reads pages of a multiple of so many tokens."""
DIM_STEP = 8
_MAX_DIM = 256
SMALL = 64
"""Tokens in a small block, which shares more and wastes less."""
_LARGE = 128
"""Tokens in a large block, faster to attend to; smaller ones have a multiple of `_BLOCK_MULTIPLE`."""
_BLOCK_MULTIPLE = 16
_FINE_ROWS = 32
"""Recorded passes have 1, 2, 4, 8, 16 or 32 rows, then a multiple of 32, and of 64 beyond `_COARSE_FROM`."""
_COARSE_FROM = 256
DENSE = 0.5
"""A range of blocks is read in place if at least this share of it is in use; else it is copied."""
SHARE_OF_HOST = 0.5
"""Share of a host's free memory that a cache may take, unless the user sets a limit."""
SHARE_OF_DEVICE = 0.9
"""Share of a GPU's free memory for a cache together with the passes."""


class CachedHeads(NamedTuple):
    """The keys and values of one token that a rank caches in each layer."""

    num_heads: int
    head_dim: int
    value_dim: int | None  # The values are the first dims of the keys; None: they are stored as well.

    @property
    def width(self) -> int:
        """Elements of one token."""
        return self.num_heads * self.head_dim * (2 if self.value_dim is None else 1)


def cached_heads(config: ModelConfig, tp: int) -> CachedHeads:
    """Return what one of `tp` ranks caches: its key-value heads, or the latent that all heads share."""
    if mla := config.mla:
        return CachedHeads(1, mla.kv_lora_rank + mla.qk_rope_head_dim, mla.kv_lora_rank)
    return CachedHeads(max(1, config.num_kv_heads // tp), config.head_dim, None)


def block_size(
    prompts: Sequence[tuple[int, int]], *, max_new_tokens: int, page_tokens: int | None = None
) -> int:
    """Return the number of tokens in a block, for prompts of (tokens, samples).

    Blocks are small if samples of a prompt can share one; no block is longer than the longest row. A paged
    cache, whose kernels need multiples of `page_tokens`, has one block size for the whole run.
    """
    if page_tokens is not None:
        return -(-SMALL // page_tokens) * page_tokens
    if any(length >= SMALL and count > 1 for length, count in prompts):
        return SMALL
    longest = max(length for length, _ in prompts) + max_new_tokens
    return min(_LARGE, -(-longest // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE)


def num_blocks(num_tokens: int, size: int) -> int:
    return -(-num_tokens // size)


def shared_tokens(length: int, count: int) -> int:
    """Return how many of a prompt's tokens lie in blocks that its samples share."""
    return length // SMALL * SMALL if count > 1 else 0


def tokens_read(context: Any, longest: Any, size: int) -> Any:
    """Return how many tokens of the cache a decode step reads for a row with `context` cached tokens.

    If the `longest` row has a single block, blocks are read up to that row's end; else they are read as a
    whole. The arguments may be arrays.
    """
    return np.maximum(1.0, np.ceil(context / size)) * np.minimum(longest, size)


def blocks_for(prompts: Iterable[tuple[int, int]], *, size: int, num_slots: int, max_new_tokens: int) -> int:
    """Return how many blocks suffice for `num_slots` rows of full length at once, so that none has to wait.

    Prompts are (tokens, samples). Shared blocks are counted for twice as many prompts as fill the slots,
    because the last samples of earlier prompts may still be running.
    """
    unshared: list[int] = []
    shared: list[int] = []
    for length, count in prompts:
        whole = length // size * (count > 1)
        shared.append(whole + (count > 1))  # The last block is not full: all samples but one copy it.
        unshared += [num_blocks(length + max_new_tokens, size) - whole] * count
    num_prompts = -(-2 * num_slots * len(shared) // max(1, len(unshared)))
    return sum(sorted(unshared)[-num_slots:]) + sum(sorted(shared)[-num_prompts:])


def tokens_for(
    length: int, samples_per_prompt: int, *, num_slots: int, num_samples: int, max_new_tokens: int,
    page_tokens: int | None = None,
) -> int:
    """Return how many tokens fit in the blocks that `blocks_for` returns if all prompts are alike."""
    shares = samples_per_prompt > 1
    size = block_size([(length, samples_per_prompt)], max_new_tokens=max_new_tokens, page_tokens=page_tokens)
    whole = length // size * shares
    prompts = -(-num_samples // samples_per_prompt)
    prompts = min(prompts, -(-2 * num_slots * prompts // num_samples))
    unshared = num_blocks(length + max_new_tokens, size) - whole
    return (num_slots * unshared + prompts * (whole + 1) * shares) * size


def padded_size(count: int) -> int:
    """Return the number of rows of the recorded decoding pass that computes `count` rows."""
    if count <= _FINE_ROWS:
        return 1 << max(0, count - 1).bit_length()
    step = _FINE_ROWS if count <= _COARSE_FROM else 2 * _FINE_ROWS
    return -(-count // step) * step


def cache_limit(free_bytes: float, pass_bytes: float, *, device_type: str, takes_all: bool = False) -> float:
    """Return the most bytes that a cache takes, beside passes that need `pass_bytes` at their peak.

    With `takes_all` it may have all memory that the passes leave. The result is below 0 if they leave none.
    """
    if takes_all:
        return free_bytes - pass_bytes
    if device_type == "cuda":
        return SHARE_OF_DEVICE * free_bytes - pass_bytes
    return SHARE_OF_HOST * free_bytes


def flash_refusal(*, dim: int, value_dim: int, dtype: str, paged: bool) -> str | None:
    """Return why FlashAttention-2 cannot compute this, in words; None if it can."""
    if dtype not in ("float16", "bfloat16"):
        return f"it computes in float16 and bfloat16, not in {dtype}"
    if max(dim, value_dim) > _MAX_DIM:
        return f"its heads have at most {_MAX_DIM} dims, not {max(dim, value_dim)}"
    if paged and (dim != value_dim or dim % DIM_STEP):
        return (
            f"in a cache, keys and values have one dim, a multiple of {DIM_STEP}, not {dim} and {value_dim}")
    return None


def page_tokens(config: ModelConfig, dtype: str) -> int:
    """Return the number of tokens of which the pages of a model's cache on CUDA have a multiple.

    This assumes that FlashAttention-2 is installed, which torch has from 2.13 on; without it, pages are not
    larger. In float64, which is for tests, no kernel asks for anything.
    """
    if dtype == "float64":
        return 1
    heads = cached_heads(config, tp=1)
    value_dim = heads.value_dim or heads.head_dim
    is_refused = flash_refusal(dim=heads.head_dim, value_dim=value_dim, dtype=dtype, paged=True) is not None
    return TRITON_PAGE_TOKENS if is_refused else FLASH_PAGE_TOKENS
