"""Attention over pages by our own Triton kernel, for what the libraries' kernels cannot do.

It has soft caps, and latent attention, whose cache holds one key per token, of 576 dims, the first 512 of
which are its value. With TRITON_INTERPRET=1 it runs on a CPU.
"""

from functools import lru_cache

import torch
from torch import Tensor

from realhf.attention.interface import AttentionKind, AttentionShape, Pages
from realhf.models.kv_blocks import TRITON_PAGE_TOKENS

MOST_VALUE_DIMS = 512
_MIN_BLOCK = 16  # Least size of each dim of a product in Triton.
_MAX_TILE = 64  # Rows of a program, each a query and a head, when it has many queries.
_PART_TOKENS = 256  # A part of the keys has at least so many, unless the caller says otherwise.
_MAX_SPLITS = 32
_PROGRAMS_PER_UNIT = 2  # Programs that keep a multiprocessor busy.


class TritonAttention:
    """Our own kernel: grouped heads, windows, soft caps, values inside of keys; without gradients."""

    name = "realhf's Triton kernel"
    page_tokens = TRITON_PAGE_TOKENS
    in_graph = True

    def refuses(self, shape: AttentionShape, *, paged: bool) -> str | None:
        if not paged:
            return "it has no gradients"
        if shape.dtype not in (torch.float16, torch.bfloat16, torch.float32):
            return f"it does not compute in {str(shape.dtype).removeprefix('torch.')}"
        if shape.value_dim > MOST_VALUE_DIMS:
            return f"a value has at most {MOST_VALUE_DIMS} dims, not {shape.value_dim}"
        return None

    @torch.no_grad()
    def paged(
        self, q_TND: Tensor, k_PLKD: Tensor, v_PLKD: Tensor, at: Pages, kind: AttentionKind,
        *, num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert all(x.stride(-1) == 1 for x in (q_TND, k_PLKD, v_PLKD)) and at.table.stride(1) == 1
        num_tokens, num_heads, dim = q_TND.shape
        page, num_kv_heads, value_dim = v_PLKD.shape[1:]
        group = num_heads // num_kv_heads
        in_keys = k_PLKD.data_ptr() == v_PLKD.data_ptr() and k_PLKD.stride() == v_PLKD.stride()
        block_m, block_j = _tile(at.max_q * group, max(dim, value_dim), q_TND.itemsize)
        tiles = -(-at.max_q * group // block_m)
        num_rows = len(at.lens_k)
        splits = num_splits or _num_splits(num_rows * tiles * num_kv_heads, at, q_TND.device)
        out_TND = q_TND.new_empty(num_tokens, num_heads, value_dim)
        lse_TN = q_TND.new_empty(num_tokens, num_heads, dtype=torch.float32)
        parts_STND, lse_STN = out_TND[None], lse_TN[None]
        if splits > 1:
            parts_STND = lse_TN.new_empty(splits, *out_TND.shape)
            lse_STN = lse_TN.new_empty(splits, *lse_TN.shape)
        from realhf.attention import paged_kernel as kernels

        block_v = _power_of_two(value_dim)
        block_r = _power_of_two(dim - value_dim) if in_keys and dim > value_dim else 0
        kernels.attend_to_pages[(num_rows * tiles, num_kv_heads, splits)](
            q_TND, k_PLKD, v_PLKD, parts_STND, lse_STN, at.cu_q, at.table, at.lens_k, kind.scale,
            kind.softcap or 1.0, tiles, *q_TND.stride()[:2], *k_PLKD.stride()[:3], *v_PLKD.stride()[:3],
            at.table.stride(0), *parts_STND.stride()[:3], *lse_STN.stride()[:2],
            GROUP=group, PAGE=page, WINDOW=kind.window or 0, HAS_SOFTCAP=kind.softcap is not None, DIM=dim,
            VALUE_DIM=value_dim, VALUES_IN_KEYS=in_keys, SPLITS=splits, BLOCK_M=block_m, BLOCK_J=block_j,
            BLOCK_D=block_v if in_keys else _power_of_two(dim), BLOCK_R=block_r,
            BLOCK_V=block_v, num_warps=8 if block_m == _MAX_TILE else 4)
        if splits > 1:
            kernels.merge_splits[(num_tokens, num_heads)](
                parts_STND, lse_STN, out_TND, lse_TN, *parts_STND.stride()[:3], *lse_STN.stride()[:2],
                *out_TND.stride()[:2], SPLITS=splits, BLOCK_S=_power_of_two(splits, least=2),
                VALUE_DIM=value_dim, BLOCK_V=block_v)
        return out_TND, lse_TN


def _tile(rows: int, dim: int, itemsize: int) -> tuple[int, int]:
    """Return how many rows and keys a program works on at a time; they fit into its registers.

    In float32 there are half as many keys: Triton compiles a kernel for twice as many twice as long.
    """
    block_m = min(max(_power_of_two(rows), _MIN_BLOCK), _MIN_BLOCK if dim > 256 else _MAX_TILE)
    return block_m, (32 if dim > 128 else 64) // (1 if itemsize == 2 or dim <= 64 else 2)


def _num_splits(num_programs: int, at: Pages, device: torch.device) -> int:
    """Return into how many parts to split the keys, so that few rows keep the whole device busy."""
    if at.max_q > 1 or device.type != "cuda":
        return 1
    wanted = -(-_PROGRAMS_PER_UNIT * _num_units(device) // num_programs)
    return max(1, min(wanted, at.max_k // _PART_TOKENS, _MAX_SPLITS))


@lru_cache
def _num_units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _power_of_two(size: int, *, least: int = _MIN_BLOCK) -> int:
    return max(1 << (size - 1).bit_length(), least)
