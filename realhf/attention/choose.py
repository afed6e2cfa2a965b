"""The choice of the attention backend for a kind of layer, by device, dtype and what is installed."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import lcm
from typing import TypeVar

import torch
from torch import Tensor

from realhf.attention.dense import DenseAttention
from realhf.attention.flash import FlashAttention, VarlenAttention, has_pages
from realhf.attention.flex import FlexAttention
from realhf.attention.interface import (
    AttentionKernels,
    AttentionKind,
    AttentionShape,
    PackedAttention,
    PagedAttention,
    Pages,
    PartialAttention,
)
from realhf.attention.triton_paged import MOST_VALUE_DIMS, TritonAttention
from realhf.errors import UserError

_Kernels = TypeVar("_Kernels", bound=AttentionKernels)
_OLDEST_DEVICE = (8, 0)  # Compute capability (Ampere) from which FlashAttention-2 and bfloat16 work.


@dataclass(frozen=True)
class Installed:
    """The software and hardware of a machine that decide on its attention kernels on CUDA."""

    flash_attn: tuple[int, int] | None  # Version of flash-attn.
    varlen_pages: bool  # torch's varlen_attn takes a block table, as from 2.13 on.
    triton: bool
    capability: tuple[int, int] | None = None  # Of the device; None if torch sees none, as in tests.


class PiecesAndDecoding:
    """Attention over pages by two libraries: one for pieces of prompts, and one for decoding rows."""

    def __init__(self, pieces: PagedAttention, decoding: PagedAttention) -> None:
        self._pieces = pieces
        self._decoding = decoding
        self.name = f"{pieces.name} for pieces of prompts, {decoding.name} for decoding"
        self.page_tokens = lcm(pieces.page_tokens, decoding.page_tokens)
        self.in_graph = decoding.in_graph

    def refuses(self, shape: AttentionShape, *, paged: bool) -> str | None:
        reasons = (backend.refuses(shape, paged=paged) for backend in (self._pieces, self._decoding))
        return next(filter(None, reasons), None)

    def paged(
        self, q_TND: Tensor, k_PLKD: Tensor, v_PLKD: Tensor, at: Pages, kind: AttentionKind,
        *, num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        backend = self._decoding if at.max_q == 1 else self._pieces
        return backend.paged(q_TND, k_PLKD, v_PLKD, at, kind, num_splits=num_splits)


@lru_cache(maxsize=256)
def packed_backend(device: torch.device, shape: AttentionShape) -> PackedAttention:
    """Return the backend for packed sequences, and print the choice on the first CUDA device of a host.

    Raises UserError if no backend can compute this; on CUDA, none computes float16 or bfloat16 with a matrix
    of all scores.
    """
    return _backend(choose_packed, device, shape)


@lru_cache(maxsize=256)
def partial_backend(device: torch.device, shape: AttentionShape) -> PartialAttention:
    """Return the backend for packed queries and some of their keys; see `packed_backend`."""
    return _backend(choose_partial, device, shape, prints=False)


@lru_cache(maxsize=256)
def paged_backend(device: torch.device, shape: AttentionShape) -> PagedAttention:
    """Return the backend for the pages of a cache; see `packed_backend`."""
    return _backend(choose_paged, device, shape)


def _backend(
    choose: Callable[[Installed, AttentionShape], _Kernels], device: torch.device, shape: AttentionShape,
    *, prints: bool = True,
) -> _Kernels | DenseAttention:
    if device.type != "cuda" or shape.dtype == torch.float64:
        return DenseAttention()
    try:
        chosen = choose(_installed(device), shape)
    except UserError as error:
        raise UserError(f"{device}: {error}") from None
    if prints and not device.index:
        print(f"realhf: {shape}: {chosen.name}", file=sys.stderr, flush=True)
    return chosen


def refuses_chains(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no kernel computes chains of element-wise work at once (nn/fused.py); None if one does."""
    if device.type != "cuda":
        return "torch's operations are used on a CPU, which has no launches to save"
    if dtype == torch.float64:
        return "the kernels compute in float32"
    return None if _installed(device).triton else "triton is not installed"


def choose_packed(installed: Installed, shape: AttentionShape) -> PackedAttention:
    """Return the fastest backend for packed sequences on CUDA devices of a machine with this installed."""
    if shape.dtype == torch.float32:
        return DenseAttention()
    flex = [FlexAttention()] if installed.triton else []
    backends: list[PackedAttention] = [*_flash(installed), _varlen(installed), *flex]
    return _first(backends, "train or prefill", installed, shape)


def choose_partial(installed: Installed, shape: AttentionShape) -> PartialAttention:
    """Return the fastest backend for some of the keys; see `choose_packed`."""
    if shape.dtype == torch.float32:
        return DenseAttention()
    backends: list[PartialAttention] = [*_flash(installed), _varlen(installed)]
    return _first(backends, "attend to some of the keys", installed, shape)


def choose_paged(installed: Installed, shape: AttentionShape) -> PagedAttention:
    """Return the fastest backend for the pages of a cache; see `choose_packed`."""
    is_old = installed.capability is not None and installed.capability < _OLDEST_DEVICE
    if shape.dtype == torch.float32 and (is_old or not installed.triton or shape.value_dim > MOST_VALUE_DIMS):
        return DenseAttention()
    triton = [TritonAttention()] if installed.triton else []
    for_pieces: list[PagedAttention] = [*_flash(installed), _varlen(installed), *triton]
    # Only flash-attn and our own kernel fold the queries of a group when they decode.
    for_decoding: list[PagedAttention] = [*_flash(installed), *triton, _varlen(installed)]
    pieces = _first(for_pieces, "prefill over a KV cache", installed, shape, paged=True)
    decoding = _first(for_decoding, "decode over a KV cache", installed, shape, paged=True)
    return pieces if pieces.name == decoding.name else PiecesAndDecoding(pieces, decoding)


def _flash(installed: Installed) -> list[FlashAttention]:
    return [] if installed.flash_attn is None else [FlashAttention(installed.flash_attn)]


def _varlen(installed: Installed) -> VarlenAttention:
    return VarlenAttention(has_pages=installed.varlen_pages)


def _first(
    backends: Sequence[_Kernels], task: str, installed: Installed, shape: AttentionShape,
    *, paged: bool = False,
) -> _Kernels:
    """Return the first backend that does not refuse; if all do, raise UserError with their reasons."""
    capability = installed.capability or _OLDEST_DEVICE
    if capability < _OLDEST_DEVICE:
        has, needs = (".".join(map(str, pair)) for pair in (capability, _OLDEST_DEVICE))
        raise UserError(f"{shape} needs a GPU of compute capability {needs} or newer, and this one has {has}")
    reasons = []
    for backend in backends:
        reason = backend.refuses(shape, paged=paged)
        if reason is None:
            return backend
        reasons.append(f"{backend.name}: {reason}")
    missing = [] if installed.flash_attn else ["flash-attn"]
    missing += [] if installed.triton else ["triton"]
    helps = f"; not installed: {' and '.join(missing)}" if missing else ""
    raise UserError(f"{shape}: no installed kernel can {task} ({'; '.join(reasons)}){helps}")


@cache
def _installed(device: torch.device) -> Installed:
    try:
        major, minor, *_ = version("flash-attn").split(".")
        flash_attn = (int(major), int(minor))
    except PackageNotFoundError:
        flash_attn = None
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    return Installed(flash_attn, has_pages(), find_spec("triton") is not None, capability)
