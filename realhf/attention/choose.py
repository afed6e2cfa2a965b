"""The choice of the attention backend for a kind of layer, by device, dtype and what is installed."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import lcm

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
    """The software and hardware of a machine that decide on its attention kernels on CUDA."""

    flash_attn: tuple[int, int] | None  # Version of flash-attn.
    varlen_pages: bool  # torch's varlen_attn takes a block table, as from 2.13 on.
    triton: bool
    capability: tuple[int, int] | None = None  # Of the device; None if torch sees none, as in tests.


class CombinedAttention:
    """A backend whose work is shared among others: packed sequences, pieces of prompts, decoding rows.

    It may be for pages alone; then `packed` is None.
    """

    def __init__(
        self, packed: AttentionBackend | None, pieces: AttentionBackend, decoding: AttentionBackend
    ) -> None:
        self._packed = packed
        self._pieces = pieces
        self._decoding = decoding
        names = [] if packed is None else [f"{packed.name} for packed sequences"]
        names += [f"{pieces.name} for pieces of prompts", f"{decoding.name} for decoding"]
        self.name = ", ".join(names)
        self.page_tokens = lcm(pieces.page_tokens, decoding.page_tokens)
        self.in_graph = decoding.in_graph

    def refuses(
        self, kind: AttentionKind, *, dim: int, value_dim: int, dtype: torch.dtype, paged: bool
    ) -> str | None:
        for backend in (self._pieces, self._decoding) if paged else (self._packed,):
            if backend is None:
                return "it was chosen for pages alone"
            reason = backend.refuses(kind, dim=dim, value_dim=value_dim, dtype=dtype, paged=paged)
            if reason is not None:
                return reason
        return None

    def packed(
        self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, at: Sequences, kind: AttentionKind
    ) -> Tensor:
        assert self._packed is not None, "it was chosen for pages alone"
        return self._packed.packed(q_TND, k_TKD, v_TKD, at, kind)

    def over_part(
        self, q_TND: Tensor, k_JND: Tensor, v_JND: Tensor, queries: Sequences, keys: Sequences,
        kind: AttentionKind, *, is_causal: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert self._packed is not None, "it was chosen for pages alone"
        return self._packed.over_part(q_TND, k_JND, v_JND, queries, keys, kind, is_causal=is_causal)

    def paged(
        self, q_TND: Tensor, k_PLKD: Tensor, v_PLKD: Tensor, at: Pages, kind: AttentionKind,
        *, num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        backend = self._decoding if at.max_q == 1 else self._pieces
        return backend.paged(q_TND, k_PLKD, v_PLKD, at, kind, num_splits=num_splits)


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

    def first(task: str, names: str, *, paged: bool) -> AttentionBackend:
        refusals = {}
        for backend in _candidates(installed, names):
            reason = backend.refuses(kind, dim=dim, value_dim=value_dim, dtype=dtype, paged=paged)
            if reason is None:
                return backend
            refusals[backend.name] = reason
        raise UserError(_refusal(what, task, refusals, installed))

    # The fastest first. Only flash-attn and our own kernel fold the queries of a group when they decode.
    for_packed = first("train or prefill", "flash varlen flex", paged=False) if packed else None
    if not paged:
        assert for_packed is not None, "a backend is chosen for at least one method"
        return for_packed
    pieces = first("prefill over a KV cache", "flash varlen triton", paged=True)
    decoding = first("decode over a KV cache", "flash triton varlen", paged=True)
    if pieces.name == decoding.name and (for_packed is None or for_packed.name == pieces.name):
        return pieces
    return CombinedAttention(for_packed, pieces, decoding)


def _candidates(installed: Installed, names: str) -> Iterator[AttentionBackend]:
    """Yield the installed ones of these backends, in their order."""
    for name in names.split():
        if name == "flash" and installed.flash_attn is not None:
            yield FlashAttention(installed.flash_attn)
        elif name == "varlen":
            yield VarlenAttention(has_pages=installed.varlen_pages)
        elif name == "triton" and installed.triton:
            yield TritonAttention()
        elif name == "flex" and installed.triton:
            yield FlexAttention()


def _described(kind: AttentionKind, dim: int, value_dim: int, dtype: torch.dtype) -> str:
    dims = f"{dim}" if dim == value_dim else f"{dim} and {value_dim}"
    options = "" if kind.window is None else f", a window of {kind.window} tokens"
    options += "" if kind.softcap is None else f", a soft cap of {kind.softcap:g}"
    return f"attention in {str(dtype).removeprefix('torch.')} with heads of {dims} dims{options}"


def _refusal(what: str, task: str, refusals: Mapping[str, str], installed: Installed) -> str:
    """Return the sentence of a refusal: each backend's reason, and what is not installed."""
    reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
    missing = [] if installed.flash_attn else ["flash-attn"]
    missing += [] if installed.triton else ["triton"]
    helps = f"; not installed: {' and '.join(missing)}" if missing else ""
    return f"{what}: no installed kernel can {task} ({reasons}){helps}"


@cache
def _installed(device: torch.device) -> Installed:
    try:
        major, minor, *_ = version("flash-attn").split(".")
        flash_attn = (int(major), int(minor))
    except PackageNotFoundError:
        flash_attn = None
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    return Installed(flash_attn, has_pages(), find_spec("triton") is not None, capability)
