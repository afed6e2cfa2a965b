"""The choice of the attention backend for a kind of layer, by device, dtype and what is installed."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch import Tensor

from realhf.attention.cpu import CpuAttention
from realhf.attention.flash import FlashAttention
from realhf.attention.flex import FlexAttention
from realhf.attention.interface import AttentionBackend, AttentionKind, Pages, Sequences
from realhf.attention.triton_paged import TritonAttention
from realhf.attention.varlen import VarlenAttention, has_pages
from realhf.errors import UserError

_OLDEST_DEVICE = (8, 0)  # Compute capability (Ampere) from which FlashAttention-2 and bfloat16 work.


@dataclass(frozen=True)
class Installed:
    """What a machine offers for attention on CUDA."""

    flash_attn: tuple[int, int] | None  # Version of flash-attn.
    varlen_pages: bool  # torch's varlen_attn takes a block table, as from 2.13 on.
    triton: bool
    capability: tuple[int, int] | None = None  # Of the device; None if torch sees none, as in tests.


class CombinedAttention:
    """A backend whose two methods are those of two others."""

    def __init__(self, packed: AttentionBackend, paged: AttentionBackend) -> None:
        self.packed_by = packed
        self.paged_by = paged
        self.name = f"{packed.name} (packed), {paged.name} (pages)"
        self.page_tokens = paged.page_tokens
        self.in_graph = paged.in_graph

    def refuses(
        self, kind: AttentionKind, *, dim: int, value_dim: int, dtype: torch.dtype, paged: bool
    ) -> str | None:
        backend = self.paged_by if paged else self.packed_by
        return backend.refuses(kind, dim=dim, value_dim=value_dim, dtype=dtype, paged=paged)

    def packed(
        self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, at: Sequences, kind: AttentionKind
    ) -> Tensor:
        return self.packed_by.packed(q_TND, k_TKD, v_TKD, at, kind)

    def paged(
        self, q_TND: Tensor, k_PLKD: Tensor, v_PLKD: Tensor, at: Pages, kind: AttentionKind,
        *, num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        return self.paged_by.paged(q_TND, k_PLKD, v_PLKD, at, kind, num_splits=num_splits)


@lru_cache(maxsize=256)
def attention_backend(
    device: torch.device, kind: AttentionKind, *, dim: int, value_dim: int, dtype: torch.dtype,
    packed: bool = True, paged: bool = True,
) -> AttentionBackend:  # fmt: skip
    """Return the backend of a kind of layer, and print the choice on the first CUDA device of a host.

    `packed` and `paged` say which of its methods will be called: with latent attention they have other dims.
    Raises UserError if no backend can compute this; on CUDA, none computes float16 or bfloat16 with a matrix
    of all scores.
    """
    if device.type != "cuda" or dtype in (torch.float32, torch.float64):
        return CpuAttention()
    try:
        chosen = choose(
            _installed(device), kind, dim=dim, value_dim=value_dim, dtype=dtype, packed=packed, paged=paged)
    except UserError as error:
        raise UserError(f"{device}: {error}") from None
    if not device.index:
        what = _described(kind, dim, value_dim, dtype)
        print(f"realhf: {what}: {chosen.name}", file=sys.stderr, flush=True)
    return chosen


def choose(
    installed: Installed, kind: AttentionKind, *, dim: int, value_dim: int, dtype: torch.dtype,
    packed: bool, paged: bool,
) -> AttentionBackend:  # fmt: skip
    """Return the backend on a CUDA device of a machine with this installed; see `attention_backend`."""
    what = _described(kind, dim, value_dim, dtype)
    capability = installed.capability or _OLDEST_DEVICE
    if capability < _OLDEST_DEVICE:
        has, needs = (".".join(map(str, pair)) for pair in (capability, _OLDEST_DEVICE))
        raise UserError(f"{what} needs a GPU of compute capability {needs} or newer, and this one has {has}")
    found = []
    for is_wanted, is_paged in ((packed, False), (paged, True)):
        if is_wanted:
            candidates = _candidates(installed, paged=is_paged)
            refusals = [
                candidate.refuses(kind, dim=dim, value_dim=value_dim, dtype=dtype, paged=is_paged)
                for candidate in candidates]
            if None not in refusals:
                raise UserError(_refusal(what, is_paged, candidates, refusals, installed))
            found.append(candidates[refusals.index(None)])
    assert found, "a backend is chosen for at least one method"
    return found[0] if len({backend.name for backend in found}) == 1 else CombinedAttention(*found)


def _candidates(installed: Installed, *, paged: bool) -> list[AttentionBackend]:
    """Return the backends for one of the methods, the fastest first."""
    found: list[AttentionBackend] = []
    if installed.flash_attn is not None:
        found.append(FlashAttention(installed.flash_attn))
    found.append(VarlenAttention(has_pages=installed.varlen_pages))
    if installed.triton:
        found.append(TritonAttention() if paged else FlexAttention())
    return found


def _described(kind: AttentionKind, dim: int, value_dim: int, dtype: torch.dtype) -> str:
    dims = f"{dim}" if dim == value_dim else f"{dim} and {value_dim}"
    options = "" if kind.window is None else f", a window of {kind.window} tokens"
    options += "" if kind.softcap is None else f", a soft cap of {kind.softcap:g}"
    return f"attention in {str(dtype).removeprefix('torch.')} with heads of {dims} dims{options}"


def _refusal(
    what: str, is_paged: bool, candidates: Sequence[AttentionBackend], refusals: Sequence[str | None],
    installed: Installed,
) -> str:  # fmt: skip
    """Return the sentence of a refusal: each backend's reason, and what would help."""
    reasons = [f"{candidate.name}: {reason}" for candidate, reason in zip(candidates, refusals, strict=True)]
    missing = [] if installed.flash_attn else ["flash-attn"]
    missing += [] if installed.triton else ["triton"]
    helps = f"; not installed: {' and '.join(missing)}" if missing else ""
    task = "generate over a KV cache" if is_paged else "train or prefill"
    return f"{what}: no installed kernel can {task} ({'; '.join(reasons)}){helps}"


@cache
def _installed(device: torch.device) -> Installed:
    try:
        major, minor, *_ = version("flash-attn").split(".")
        flash_attn = (int(major), int(minor))
    except PackageNotFoundError:
        flash_attn = None
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    return Installed(flash_attn, has_pages(), find_spec("triton") is not None, capability)
