"""The choice of kernels by device, dtype and what is installed: an attention backend for each kind of layer,
and kernels for what lies between products. `kernel_choices` shows all choices of a model, with reasons."""

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import lcm
from typing import NamedTuple, TypeVar

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
from realhf.models.model_config import ModelConfig

_Kernels = TypeVar("_Kernels", bound=AttentionKernels)
_INT8_INPUTS = 16
_INT8_ROWS = {"cpu": 16, "cuda": 128}
_OLDEST_DEVICE = (8, 0)  # Compute capability (Ampere) from which FlashAttention-2 and bfloat16 work.


@dataclass(frozen=True)
class Installed:
    """The software and hardware of a machine that decide on its attention kernels on CUDA."""

    flash_attn: tuple[int, int] | None  # Version of flash-attn.
    varlen_pages: bool  # torch's varlen_attn takes a block table, as from 2.13 on.
    triton: bool
    capability: tuple[int, int] | None = None  # Of the device; None if torch sees none.


class KernelChoice(NamedTuple):
    """A kernel for a kind of work, and the reason why it is not another one."""

    work: str
    kernels: str
    reason: str


class PiecesAndDecoding:
    """Attention over pages by two libraries: one for pieces of prompts, and one for decoding rows."""

    def __init__(self, pieces: PagedAttention, decoding: PagedAttention) -> None:
        self.parts = (pieces, decoding)
        self.name = f"{pieces.name} for pieces of prompts, {decoding.name} for decoding"
        self.page_tokens = lcm(pieces.page_tokens, decoding.page_tokens)
        self.in_graph = decoding.in_graph

    def refuses(self, shape: AttentionShape, *, paged: bool) -> str | None:
        reasons = (backend.refuses(shape, paged=paged) for backend in self.parts)
        return next(filter(None, reasons), None)

    def paged(
        self, q_TND: Tensor, k_PLKD: Tensor, v_PLKD: Tensor, at: Pages, kind: AttentionKind,
        *, num_splits: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        backend = self.parts[at.max_q == 1]
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
        chosen = choose(installed_for(device), shape)
    except UserError as error:
        raise UserError(f"{device}: {error}") from None
    if prints and not device.index:
        print(f"realhf: {shape}: {chosen.name}", file=sys.stderr, flush=True)
    return chosen


def refuses_chains(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why no kernel computes chains of element-wise work at once (nn/fused.py); None if one does."""
    return chains_refusal(installed_for(device) if device.type == "cuda" else None, dtype)


def chains_refusal(installed: Installed | None, dtype: torch.dtype) -> str | None:
    """Return the same for CUDA devices of a machine with this installed, or for a CPU if that is None."""
    if installed is None:
        return "a CPU has no launches to save"
    if dtype == torch.float64:
        return "the kernels compute in float32"
    return None if installed.triton else "triton is not installed"


def grouped_refusal(device_type: str, dtype: torch.dtype) -> str | None:
    """Return why torch's grouped kernel does not compute experts of a dtype; None if it does."""
    if device_type == "cuda":
        return None if dtype == torch.bfloat16 else "torch makes the host wait in other dtypes than bfloat16"
    is_legal = dtype in (torch.bfloat16, torch.float16, torch.float32)
    return None if is_legal else "the grouped kernel has no float64"


def int8_refusal(device_type: str, dtype: torch.dtype, *, num_rows: int, num_inputs: int) -> str | None:
    """Return why no kernel multiplies so many rows with weights in int8 as they are stored; None if one does.

    More rows are multiplied faster with converted weights, as then the products take longer than the reading.
    """
    if dtype != torch.bfloat16:
        return "kernels for int8 weights have bfloat16 only"
    if device_type == "cpu" and num_inputs % _INT8_INPUTS:  # It would read beyond the rows.
        return f"torch's kernel takes multiples of {_INT8_INPUTS} inputs"
    most = _INT8_ROWS[device_type]
    return None if num_rows <= most else f"more than {most} rows"


def kernel_choices(
    config: ModelConfig, dtype: torch.dtype, installed: Installed | None, *, generates: bool,
    splits_logits: bool = False, int8: bool = False,
) -> list[KernelChoice]:
    """Return what computes the work of our own engine, on CUDA devices of a machine with this `installed`, or
    on a CPU if that is None. The same functions choose in a run.

    `splits_logits` says that a generation has its vocabulary on several ranks, `int8` that it has weights in
    int8. Raises UserError if no kernel can compute a kind of layer.
    """
    kinds = dict.fromkeys(AttentionKind.of(config, layer) for layer in range(config.num_layers))
    choices = [
        choice for kind in kinds
        for choice in _attention_choices(config, kind, dtype, installed, generates=generates)]
    refusal = chains_refusal(installed, dtype)
    by_torch = "torch's operations"
    chains = by_torch if refusal else "realhf's Triton kernels"
    choices.append(KernelChoice("norms, rotation, activations, logits", chains, refusal or ""))
    if generates:
        if splits_logits and not refusal:
            refusal = "each rank has a part of the vocabulary"
        choices.append(KernelChoice("sampling", by_torch if refusal else chains, refusal or ""))
    if int8:
        device_type = "cpu" if installed is None else "cuda"
        refusal = int8_refusal(device_type, dtype, num_rows=1, num_inputs=config.hidden_size)
        kernels = "torch's _weight_int8pack_mm" if installed is None else "realhf's Triton kernel"
        kernels = by_torch if refusal else f"{kernels}, up to {_INT8_ROWS[device_type]} rows"
        choices.append(KernelChoice("weights in int8", kernels, refusal or ""))
    if config.moe is not None:
        refusal = grouped_refusal("cpu" if installed is None else "cuda", dtype)
        kernels = "one product for each expert" if refusal else "torch's grouped_mm"
        choices.append(KernelChoice("experts", kernels, refusal or ""))
    return choices


def _attention_choices(
    config: ModelConfig, kind: AttentionKind, dtype: torch.dtype, installed: Installed | None,
    *, generates: bool,
) -> Iterator[KernelChoice]:
    mla = config.mla
    packed = paged = AttentionShape(kind, config.head_dim, config.head_dim, dtype)
    if mla is not None:
        packed = AttentionShape(kind, mla.qk_nope_head_dim + mla.qk_rope_head_dim, mla.v_head_dim, dtype)
        paged = AttentionShape(kind, mla.kv_lora_rank + mla.qk_rope_head_dim, mla.kv_lora_rank, dtype)
    if installed is None or dtype == torch.float64:
        reason = "as on all CPUs" if installed is None else "in float64"
        yield KernelChoice(str(packed), DenseAttention.name, reason)
        return
    chosen = choose_packed(installed, packed)
    reason = _passed_over(chosen, _for_packed(installed), installed, packed, paged=False)
    yield KernelChoice(f"training, first pass: {packed}", chosen.name, reason)
    if not generates:
        return
    cached = choose_paged(installed, paged)
    pair = cached.parts if isinstance(cached, PiecesAndDecoding) else (cached, cached)
    orders = _for_pieces(installed), _for_decoding(installed)
    for use, backend, order in zip(("later pieces", "decoding"), pair, orders, strict=True):
        reason = _passed_over(backend, order, installed, paged, paged=True)
        yield KernelChoice(f"{use}: {paged}", backend.name, reason)


def _passed_over(
    chosen: AttentionKernels, order: Sequence[AttentionKernels], installed: Installed, shape: AttentionShape,
    *, paged: bool,
) -> str:
    """Return why kernels that are preferred to the chosen ones do not compute this."""
    if not any(other.name == chosen.name for other in order):
        return "in float32, which is for tests"
    before = itertools.takewhile(lambda other: other.name != chosen.name, order)
    reasons = [f"{other.name}: {other.refuses(shape, paged=paged)}" for other in before]
    if installed.flash_attn is None:
        reasons.insert(0, "flash-attn is not installed")
    return "; ".join(reasons)


def choose_packed(installed: Installed, shape: AttentionShape) -> PackedAttention:
    """Return the fastest backend for packed sequences on CUDA devices of a machine with this installed."""
    if shape.dtype == torch.float32:
        return DenseAttention()
    return _first(_for_packed(installed), "train or prefill", installed, shape)


def _for_packed(installed: Installed) -> list[PackedAttention]:
    """Return the backends for packed sequences, the preferred ones first."""
    flex = [FlexAttention()] if installed.triton else []
    return [*_flash(installed), _varlen(installed), *flex]


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
    pieces = _first(_for_pieces(installed), "prefill over a KV cache", installed, shape, paged=True)
    decoding = _first(_for_decoding(installed), "decode over a KV cache", installed, shape, paged=True)
    return pieces if pieces.name == decoding.name else PiecesAndDecoding(pieces, decoding)


def _for_pieces(installed: Installed) -> list[PagedAttention]:
    """Return the backends for pieces of prompts, the preferred ones first."""
    return [*_flash(installed), _varlen(installed), *_triton(installed)]


def _for_decoding(installed: Installed) -> list[PagedAttention]:
    """Return the backends for decoding. Only flash-attn and our own kernel fold the queries of a group."""
    return [*_flash(installed), *_triton(installed), _varlen(installed)]


def _triton(installed: Installed) -> list[TritonAttention]:
    return [TritonAttention()] if installed.triton else []


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
def installed_for(device: torch.device) -> Installed:
    """Return what this machine has installed, for a CUDA device that may be another machine's."""
    try:
        major, minor, *_ = version("flash-attn").split(".")
        flash_attn = (int(major), int(minor))
    except PackageNotFoundError:
        flash_attn = None
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    return Installed(flash_attn, has_pages(), find_spec("triton") is not None, capability)
