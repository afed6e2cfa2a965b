"""Lets Megatron-Core 0.16.1 run on a CPU over gloo, by replacing the CUDA functions that it calls always.

Importing this module patches torch for the whole process, so only the workers of these tests import it (see
conftest.py). No numbers change: what is replaced are devices, streams, events and random states.
"""

import contextlib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

VERSION = "0.16.1"
assert version("megatron-core") == VERSION, f"these replacements were made for megatron-core {VERSION}"
assert not torch.cuda.is_available(), "with a GPU nothing has to be replaced"

_CPU = torch.device("cpu")
_MAKERS = (
    "arange", "as_tensor", "empty", "empty_like", "full", "ones", "ones_like", "rand", "randn", "tensor",
    "zeros", "zeros_like",
)


class _Event:
    """An event or a stream of a device that has finished all work already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        pass

    wait = synchronize = wait_stream = wait_event = record

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> "_Event":
        return _Event()


def _is_cuda(device: Any) -> bool:
    return device is not None and not isinstance(device, int) and str(device).startswith("cuda")


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes tensors on the CPU when asked for the GPU."""

    def made(*args: Any, **options: Any) -> Any:
        if _is_cuda(options.get("device")):
            options["device"] = _CPU
        return function(*args, **options)

    return made


def _moved(to: Callable[..., Any]) -> Callable[..., Any]:
    def moved(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        args = tuple(_CPU if isinstance(x, str | torch.device) and _is_cuda(x) else x for x in args)
        if _is_cuda(options.get("device")):
            options["device"] = _CPU
        return to(self, *args, **options)

    return moved


def _typed(type_of: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Tensor.type` with the names of types on a GPU, by which the optimizer tells dtypes apart."""

    def typed(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        name = type_of(self, *args, **options)
        return name.replace("torch.", "torch.cuda.") if isinstance(name, str) else name

    return typed


def _gather_uneven(gather: Callable[..., Any]) -> Callable[..., Any]:
    """Return `all_gather` for tensors of any sizes, which NCCL has and gloo has not."""

    def gathered(outputs: list[torch.Tensor], tensor: torch.Tensor, *, group: Any, **options: Any) -> Any:
        if len({x.shape for x in outputs}) == 1:
            return gather(outputs, tensor, group=group, **options)
        for index, output in enumerate(outputs):
            if index == group.rank():
                output.copy_(tensor)
            dist.broadcast(output, group=group, group_src=index)
        return None

    return gathered


def _scatter_uneven(scatter: Callable[..., Any]) -> Callable[..., Any]:
    """Return `reduce_scatter` for tensors of any sizes, which NCCL has and gloo has not."""

    def scattered(output: torch.Tensor, tensors: list[torch.Tensor], *, group: Any, **options: Any) -> Any:
        if len({x.shape for x in tensors}) == 1:
            return scatter(output, tensors, group=group, **options)
        total = torch.cat(tensors)
        dist.all_reduce(total, group=group)
        output.copy_(total.split([len(x) for x in tensors])[group.rank()])
        return None

    return scattered


def _patch() -> None:
    cuda: Any = torch.cuda
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.current_device = lambda: _CPU
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda.Event = cuda.Stream = _Event
    cuda.current_stream = cuda.default_stream = lambda *_, **__: _Event()
    cuda.stream = lambda _: contextlib.nullcontext()
    cuda.FloatTensor = lambda values: torch.tensor(values, dtype=torch.float32)
    cuda.IntTensor = lambda values: torch.tensor(values, dtype=torch.int32)
    for name in _MAKERS:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    dist.all_gather = _gather_uneven(dist.all_gather)
    dist.reduce_scatter = _scatter_uneven(dist.reduce_scatter)
    tensor: Any = torch.Tensor
    tensor.cuda = lambda self, *_, **__: self
    tensor.to = _moved(tensor.to)
    tensor.type = _typed(tensor.type)


_patch()

import megatron.core.extensions.transformer_engine as transformer_engine  # noqa: E402
import megatron.core.tensor_parallel.random as random  # noqa: E402 (it must come after the patches)
import megatron.core.transformer.moe.experts as experts  # noqa: E402
import megatron.core.transformer.moe.grouped_gemm_util as grouped_gemm_util  # noqa: E402
import megatron.core.transformer.moe.moe_utils as moe_utils  # noqa: E402
import megatron.core.transformer.moe.token_dispatcher as token_dispatcher  # noqa: E402

random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
# Counts of tokens become numpy arrays when they come from a GPU.
token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
    tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor)
if not hasattr(moe_utils, "te_general_gemm"):
    moe_utils.te_general_gemm = None


class _GroupedLinear(torch.nn.Module):
    """Transformer Engine's GroupedLinear with Megatron-Core's parameters: a weight for each expert."""

    def __init__(
        self, num_gemms: int, input_size: int, output_size: int, *, config: Any, pg_collection: Any, **_: Any
    ) -> None:
        super().__init__()
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            weight.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        parts = zip(x.split(m_splits), self.parameters(), strict=True)
        return torch.cat([part @ weight.T for part, weight in parts]), None


class _ColumnGroupedLinear(_GroupedLinear):
    def __init__(self, n: int, inputs: int, outputs: int, *, pg_collection: Any, **options: Any) -> None:
        outputs //= pg_collection.expt_tp.size()
        super().__init__(n, inputs, outputs, pg_collection=pg_collection, **options)


class _RowGroupedLinear(_GroupedLinear):
    def __init__(self, n: int, inputs: int, outputs: int, *, pg_collection: Any, **options: Any) -> None:
        inputs //= pg_collection.expt_tp.size()
        super().__init__(n, inputs, outputs, pg_collection=pg_collection, **options)


def _gmm(
    x: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor, *, trans_b: bool = False
) -> torch.Tensor:
    """Return the product of each expert's rows with its matrix, as the library grouped_gemm does."""
    assert not trans_b
    parts = zip(x.split(counts.tolist()), weights, strict=True)
    return torch.cat([part @ weight for part, weight in parts])


@contextlib.contextmanager
def installed(library: str | None) -> Iterator[None]:
    """Put a loop over experts in the place of a library for grouped products, which needs a GPU."""
    if library is None:
        yield
        return
    if library == "grouped_gemm":
        places = {grouped_gemm_util: {"grouped_gemm": _gmm, "ops": SimpleNamespace(gmm=_gmm)}}
    else:
        places = {transformer_engine: {
            "TEColumnParallelGroupedLinear": _ColumnGroupedLinear,
            "TERowParallelGroupedLinear": _RowGroupedLinear}}
    places[experts] = {"jit_fuser": lambda function: function}  # No compiler is needed.
    with contextlib.ExitStack() as stack:
        for place, names in places.items():
            for name, value in names.items():
                stack.enter_context(patch.object(place, name, value))
        yield
