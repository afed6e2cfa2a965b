"""The pages that kernels on CUDA can read, which the planner knows without torch."""

from realhf.models.model_config import ModelConfig
from realhf.sizes.kv_blocks import cached_heads

FLASH_PAGE_TOKENS = 256
"""FlashAttention-2 reads pages of a multiple of so many tokens, in flash-attn as in torch."""
TRITON_PAGE_TOKENS = 16
"""Our own kernel reads pages of a multiple of so many tokens."""
DIM_STEP = 8
_MAX_DIM = 256


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
    larger. In float32, which is for tests, no kernel asks for anything.
    """
    if dtype not in ("float16", "bfloat16"):
        return 1
    heads = cached_heads(config, tp=1)
    value_dim = heads.value_dim or heads.head_dim
    is_refused = flash_refusal(dim=heads.head_dim, value_dim=value_dim, dtype=dtype, paged=True) is not None
    return TRITON_PAGE_TOKENS if is_refused else FLASH_PAGE_TOKENS
