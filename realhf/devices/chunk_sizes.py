"""Sizes of the chunks in which operators work, from which the planner predicts their memory.

On CPU a chunk stays in a core's cache. On a GPU chunks are larger, because each costs kernel launches.
"""

PART_NUMEL = 1 << 17
"""Elements that a norm or an activation processes at a time on CPU; a GPU processes all at once."""
CHUNK_NUMEL = 1 << 24
KEPT_CHUNKS = 4
"""Chunks of logits that are kept for the backward pass; those of further chunks are computed again."""
SMALL_PRODUCT = 1 << 21
"""Up to this many multiplications, a product is faster in float32 than torch can prepare it in bfloat16."""
WIDENED_WEIGHT_NUMEL = 1 << 19
"""Elements of a weight that are converted to float32 at a time for a product on CPU."""
WIDENED_TOKENS_NUMEL = 1 << 21
"""Elements of the tokens that are converted to float32 at a time for a product on CPU."""
INT8_NUMEL = 1 << 20
"""Elements of a weight in int8 that are converted at a time for a product on CPU."""
LEAST_PACKED_NUMEL = 1 << 18
"""Elements from which a CPU packs a weight for decoding: smaller ones stay in its caches, and MKL reserves
8 MB of addresses for each."""
LEAST_PREFIX = 16
"""Sequences share what they begin with if it has this many tokens: each prefix takes some calls of kernels in
every layer."""
LEAST_SHARE = 0.1
"""The share of the tokens of a pass that must be saved by computing what sequences begin with once."""
EXPANDED_TOKENS = 8192
"""Cached latents whose keys and values are computed at a time, for the later pieces of long prompts."""
OPTIMIZER_SLICE_NUMEL = 1 << 24
"""Parameters whose states of an optimizer in host memory are on the device together."""
CUDA_PARTS = 16
"""A GPU converts this many times more elements at a time, because each chunk costs kernel launches."""


def chunk_numel(*, is_cuda: bool) -> int:
    """Return how many logits exist at a time. Products of few tokens are slow on a GPU."""
    return CHUNK_NUMEL * (8 if is_cuda else 1)


def slice_numel(*, is_cuda: bool) -> int:
    """Return how many logits are converted at a time: on CPU 1 MiB of float32."""
    return (1 << 18) * (256 if is_cuda else 1)


def block_numel(*, is_cuda: bool) -> int:
    """Return how many elements of a product are computed in one dtype before they are added in another."""
    return (1 << 22) * (64 if is_cuda else 1)
