"""A CUDA device that is not there: tensors in host memory that say they are on it, and refuse to be mixed
with others as real ones would. It finds what was left on the host, and nothing about kernels; host_traffic.py
counts when the host waits for it.

Tensors are told apart by their memory. Only this thread sees the device, its backward passes included.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from realhf.attention.dense import DenseAttention
from realhf.attention.flex import FlexAttention
from realhf.attention.interface import AttentionKind, Pages
from realhf.attention.reference import ReferenceAttention
from realhf.attention.triton_paged import TritonAttention
from realhf.calls import SamplingConfig
from realhf.devices import reserved
from realhf.distributed.group import Group
from realhf.distributed.world import World
from realhf.inference import page_pool, sampling
from realhf.nn.fused import TritonChains
from realhf.nn.vocab_parallel import Head
from tests.gpu.emulated_driver import EmulatedDriver, tensor_at
from tests.gpu.host_traffic import RECORDER, PretendedEvent, PretendedStream
from tests.nn import chains

_run_backward = torch.autograd._engine_run_backward
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
_MOVES = {torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda}
_INDEXING = ("aten::index", "aten::index_put", "aten::_index_put_impl")
"""Index tensors may lie on the host."""
_BETWEEN_DEVICES = ("aten::copy", "aten::_foreach_copy")
_OF_HOST_DATA = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
"""They copy numbers of Python to the device."""


@contextmanager
def pretended_device() -> Iterator[torch.device]:
    """The device, for as long as it is there."""
    kernels = patch.object(varlen, "varlen_attn", RECORDER.kernel(_varlen_attn))
    ours = patch.object(TritonAttention, "paged", RECORDER.kernel(ReferenceAttention.paged))
    fused = patch.multiple(
        TritonChains, **{name: RECORDER.kernel(chain) for name, chain in chains.BY_TORCH.items()})
    drawing = patch.object(sampling, "draw_by_kernels", _draw)
    compiled = patch.object(FlexAttention, "packed", RECORDER.kernel(DenseAttention.packed))
    graphs = patch.object(page_pool, "recorder", lambda device: Tape if device == CUDA else None)
    memory = patch.multiple(
        torch.cuda, mem_get_info=lambda device: (1 << 34, 1 << 35), memory_reserved=lambda device: 0,
        memory_allocated=lambda device: 0, empty_cache=lambda: None,
        get_device_properties=lambda device: SimpleNamespace(total_memory=driver.total),
    )
    driver = EmulatedDriver()
    mapping = patch.multiple(reserved, cuda_driver=lambda: driver, tensor_at=_tensor_at)
    stream = PretendedStream()
    streams = patch.multiple(
        torch.cuda, Event=PretendedEvent, Stream=PretendedStream, stream=lambda _: nullcontext(),
        current_stream=lambda *_: stream, synchronize=lambda *_: stream.synchronize(),
    )
    called = _Called(_MARKS)
    backward = patch.object(torch.autograd, "_engine_run_backward", called.seen_by(_run_backward))
    with (
        kernels, ours, fused, drawing, compiled, graphs, memory, mapping, streams, backward,
        _Dispatched(_MARKS), called,
    ):
        yield CUDA


class DeviceWorld(World):
    """A rank of another World, whose tensors are on the device, and whose groups communicate over gloo."""

    def __init__(self, world: World) -> None:
        self.__dict__.update(world.__dict__)
        self.device = CUDA
        self.memory = None

    def group(self, ranks: Sequence[int], *, purpose: str = "data") -> Group:
        self.device = CPU
        try:
            return super().group(ranks, purpose=purpose)
        finally:
            self.device = CUDA


class _Marks:
    """Which memory is the device's, and which of the host's is pinned."""

    def __init__(self) -> None:
        self._there: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}
        self.strict = True

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._there

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._pinned

    def set(self, tensors: Any, *, there: bool, pinned: bool = False) -> None:
        for tensor in _tensors(tensors):
            storage = tensor.untyped_storage()
            for marks, has in ((self._there, there), (self._pinned, pinned)):
                if has:  # The weak reference keeps its address from being used for another one.
                    marks[storage._cdata] = StorageWeakRef(storage)
                else:
                    marks.pop(storage._cdata, None)


_MARKS = _Marks()
"""Of this process: tensors may be kept from one time to the next."""


def mark_as_there(*tensors: torch.Tensor) -> None:
    """Say that the memory of these tensors is the device's."""
    _MARKS.set(tensors, there=True)


def _tensor_at(memory: Any, device: torch.device) -> torch.Tensor:
    with _disable_current_modes():
        tensor = tensor_at(memory, device)
    _MARKS.set(tensor, there=True)
    return tensor


def _varlen_attn(
    q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, starts: torch.Tensor,
    starts_k: torch.Tensor, longest: int, longest_k: int,
    *, return_aux: Any = None, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None, num_splits: int | None = None,
) -> Any:
    """torch's kernel of that name: over pages by our reference, else by a loop over sequences. It has the
    kernel's demands."""
    assert q_TND.shape[2] % 8 == 0 and q_TND.shape == (*q_TND.shape[:2], v_TKD.shape[-1])
    assert starts.dtype == starts_k.dtype == torch.int32
    sees_all = block_table is None and window_size == (-1, -1)  # Keys of earlier tokens.
    assert sees_all or window_size[1] == 0 or longest == 1 and window_size == (-1, -1)
    if block_table is not None:
        assert seqused_k is not None and block_table.dtype == seqused_k.dtype == torch.int32
        assert k_TKD.shape[1] % 256 == 0 and return_aux.lse
        window = None if window_size[0] < 0 else window_size[0] + 1
        kind = AttentionKind(scale or q_TND.shape[2] ** -0.5, window)
        pages = Pages(starts, longest, block_table, seqused_k, longest_k)
        out, lse = ReferenceAttention().paged(q_TND, k_TKD, v_TKD, pages, kind)
        return out, lse.T
    outs, lses, sizes, sizes_k = [], [], starts.diff().tolist(), starts_k.diff().tolist()
    assert longest == max(sizes) and longest_k == max(sizes_k)
    for q, k, v in zip(q_TND.split(sizes), k_TKD.split(sizes_k), v_TKD.split(sizes_k), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        behind = torch.arange(len(q), device=q.device)[:, None] - torch.arange(len(k), device=q.device)
        seen = (behind >= 0) & (behind <= (window_size[0] if window_size[0] >= 0 else len(q)))
        scores = torch.einsum("tnd,snd->nts", q, k).float() * (scale or q.shape[2] ** -0.5)
        scores = scores if sees_all else scores.masked_fill(~seen, -torch.inf)
        outs.append(torch.einsum("nts,snd->tnd", scores.softmax(-1).to(v.dtype), v))
        lses.append(scores.logsumexp(-1))
    return (torch.cat(outs), torch.cat(lses, 1)) if return_aux is not None else torch.cat(outs)


def _draw(
    product_BV: torch.Tensor, uniform_B: torch.Tensor,
    *, config: SamplingConfig, scale: float, softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernels of sampling compute, and as many launches."""
    filters = config.temperature != 0 and (config.top_k > 0 or config.top_p < 1 or config.min_p > 0)
    RECORDER.add(launches=2 + filters)
    group: Any = SimpleNamespace(size=1, index=0)
    head = Head(product_BV[:0], 0, group, scale=scale, softcap=softcap)
    with RECORDER.paused():
        logits_BV = head.to_logits(product_BV, temperature=1.0)
        return sampling.sample(logits_BV, uniform_B, config=config, vocab_start=0, group=group)


def _mm_to_dtype(x_TI: torch.Tensor, y_IO: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """torch's product of 16-bit operands with a wider result, which CPUs lack."""
    assert x_TI.dtype == y_IO.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32
    return x_TI.to(dtype) @ y_IO.to(dtype)


def _addmm_to_dtype(
    total_OI: torch.Tensor, x_OT: torch.Tensor, y_TI: torch.Tensor, dtype: torch.dtype, *, beta: float = 1,
    alpha: float = 1, out: torch.Tensor,
) -> torch.Tensor:
    """torch's product of 16-bit operands that is added to a wider sum, which CPUs lack."""
    assert total_OI.dtype == dtype == torch.float32 and x_OT.dtype == y_TI.dtype
    return torch.addmm(total_OI, x_OT.to(dtype), y_TI.to(dtype), beta=beta, alpha=alpha, out=out)


_CPUS_LACK = {
    torch.ops.aten.mm.dtype: _mm_to_dtype, torch.ops.aten.addmm.dtype_out: _addmm_to_dtype}


def _tensors(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


_WAITS = ("_local_scalar_dense", "lift_fresh", "nonzero", "_unique2", "bincount", "equal")
"""Kernels whose results, or arguments, are on the host."""


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


class Tape(TorchDispatchMode):
    """Records a function and plays it again as a CUDA graph does: the same kernels on the same memory. What
    ranks exchange is a kernel, too."""

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.kernels: list[tuple[Any, Any, Any, Any]] = []
        self.num_replays = 0
        self._collectives = {name: getattr(Group, name) for name in COLLECTIVES}
        recorded = {name: self._recorded(func) for name, func in self._collectives.items()}
        with patch.multiple(Group, **recorded), self:
            self.out = compute()

    def _recorded(self, collective: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """Return a collective that is recorded as a whole."""

        def run(group: Group, tensor: torch.Tensor) -> torch.Tensor:
            with _disable_current_modes(), patch.multiple(Group, **self._collectives):
                out = collective(group, tensor)
            if _MARKS.has(tensor):
                _MARKS.set(out, there=True)
            self.kernels.append((collective, (group, tensor), {}, out))
            return out

        return run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in _WAITS, f"{func} cannot be recorded"
        out = func(*args, **(kwargs or {}))
        self.kernels.append((func, args, kwargs or {}, out))
        return out

    def __call__(self) -> torch.Tensor:
        self.num_replays += 1
        RECORDER.add(replays=1)
        with RECORDER.paused():
            for func, args, kwargs, out in self.kernels:
                made = func(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(made), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():  # no view
                        old.copy_(new)
        return self.out


class _Dispatched(TorchDispatchMode):
    """What is computed of the device's tensors is on it, too; backward passes included."""

    def __init__(self, marks: _Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, given = func.name().split(".")[0].rstrip("_"), _tensors((args, kwargs))
        there = [x for x in given if self._marks.has(x)]
        here = [x for x in given if x.dim() > 0 and not self._marks.has(x)]
        if name in _INDEXING and self._marks.has(args[0]):
            here = [x for x in here if x.dtype not in (torch.long, torch.bool)]
        between = name in _BETWEEN_DEVICES
        if there and here and not between and self._marks.strict:
            shapes = [f"{tuple(x.shape)} {x.dtype}" for x in here]
            raise RuntimeError(f"{func} mixes tensors of {CUDA} with others: {', '.join(shapes)}")
        if there:
            RECORDER.operation(
                func, args, kwargs or {}, there=self._marks.has, pinned=self._marks.is_pinned)
        kernel = _CPUS_LACK.get(func, func)
        found = kernel(*args, **(kwargs or {}))
        if there and not between:
            self._marks.set(found, there=True)
        return found


class _Called(TorchFunctionMode):
    """Devices by name, and `Tensor.device`."""

    def __init__(self, marks: _Marks) -> None:
        super().__init__()
        self._marks = marks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__ and self._marks.has(args[0]):
            return CUDA
        if func == torch.Tensor.is_cuda.__get__:
            return self._marks.has(args[0])
        if func in (torch.Tensor.numpy, torch.Tensor.__array__) and self._marks.has(args[0]):
            raise TypeError(f"a tensor of {CUDA} has no numpy array: copy it to the host first")
        if func in _MOVES:
            return self._move(func, args, kwargs)
        if func in (torch.Tensor.pin_memory, torch.Tensor.is_pinned):
            return self._pin(func, args[0])
        if func is torch.Tensor.record_stream:
            return None
        if func in (torch.Tensor.tolist, torch.Tensor.__repr__) and self._marks.has(args[0]):
            RECORDER.add(wait=func.__name__, downloads=1)
        if func is F.scaled_dot_product_attention:  # Inside it makes its masks where it is.
            self._marks.strict = False
            try:
                return func(*args, **kwargs)
            finally:
                self._marks.strict = True
        return self._made(func, args, kwargs)

    def seen_by(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that sees the device even if torch calls it from `__torch_function__`."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return func(*args, **kwargs)

        return run

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call a function, which may make a tensor on a device by name."""
        device = kwargs.get("device")
        if func is torch.Tensor.new_tensor and device is None and self._marks.has(args[0]):
            device = CUDA
        pinned = kwargs.pop("pin_memory", False)
        is_meta = device is not None and torch.device(device).type == "meta"
        if is_meta or (device is None and not pinned):
            return func(*args, **kwargs)
        there = device is not None and torch.device(device).type == "cuda"
        if there and func in _OF_HOST_DATA:
            RECORDER.copy(func.__name__, upload=True, pinned=False, non_blocking=False)
        elif there and "empty" not in func.__name__:
            RECORDER.add(launches=1)
        with RECORDER.paused():
            found = func(*args, **{**kwargs, "device": CPU})
        self._marks.set(found, there=there, pinned=bool(pinned))
        return found

    def _pin(self, func: Any, x: torch.Tensor) -> Any:
        """`pin_memory` and `is_pinned`."""
        if func is torch.Tensor.is_pinned:
            return self._marks.is_pinned(x)
        found = x if self._marks.is_pinned(x) else x.clone()
        self._marks.set(found, there=False, pinned=True)
        return found

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`to`, `cpu` and `cuda`: a copy wherever the device changes."""
        there = goes = self._marks.has(args[0])
        words = [*args[1:], *kwargs.values()] if func is torch.Tensor.to else [func.__name__]
        for word in words:
            if isinstance(word, str | torch.device) and torch.device(word).type == "meta":
                return func(*args, **kwargs)
            if isinstance(word, str | torch.device):
                goes = torch.device(word).type == "cuda"
            elif isinstance(word, torch.Tensor):
                goes = self._marks.has(word)
        flags = [kwargs.get("non_blocking"), *(word for word in words if isinstance(word, bool))]
        non_blocking = any(flags[:2])
        if goes != there:  # A copy to the host that does not block makes pinned memory.
            pinned = self._marks.is_pinned(args[0]) if goes else non_blocking
            RECORDER.copy(func.__name__, upload=goes, pinned=pinned, non_blocking=non_blocking)
        if func is not torch.Tensor.to:
            args, kwargs = args[:1], {"device": CPU}
        args = [CPU if isinstance(x, str | torch.device) else x for x in args]
        kwargs = {key: CPU if isinstance(x, str | torch.device) else x for key, x in kwargs.items()}
        with nullcontext() if goes == there else RECORDER.paused():
            found = torch.Tensor.to(*args, **kwargs)
            if goes == there:
                return found
            if found.untyped_storage()._cdata == args[0].untyped_storage()._cdata:
                found = found.clone()
        self._marks.set(found, there=goes, pinned=not goes and non_blocking)
        return found
