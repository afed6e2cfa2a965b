"""ReservedPlanes: memory at fixed addresses whose physical pages come and go.

A cache of keys and values is needed in one phase of a step only, but recorded decoding passes (CUDA graphs)
hold its addresses. So the addresses stay, and the memory behind them is given back to the device: by
CUDA's virtual memory functions, which torch's own `expandable_segments` is made of, and on a Linux host by
`madvise`. Elsewhere the memory is fixed: it neither shrinks nor grows.

The planes lie one after the other, each with room for as much as the device has. All of them have physical
memory from their beginning up to the same byte.
"""

import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

_NO_RESERVE = 0x4000
"""MAP_NORESERVE on Linux: memory that the system need not have. Python has the name from 3.13 on."""
_HUGE_BYTES = 2 << 20
"""From so many bytes of a plane on, memory of a host is asked for in huge pages."""


class ReservedPlanes(Protocol):
    """Planes of bytes, at addresses that do not change."""

    bytes_PU: Tensor
    """Shape (planes, capacity). Only the first `held` bytes of each plane may be read and written."""

    @property
    def held(self) -> int: ...

    def resize(self, num_bytes: int) -> None:
        """Hold at least so many bytes of each plane, no more than its capacity, and few others. What is held
        afterwards and was before keeps its contents; the rest is zero."""

    @property
    def can_shrink(self) -> bool:
        """Whether `resize` gives memory back."""


@torch.inference_mode(False)  # Generation makes the planes, and others may write to them, too.
def reserve_planes(num_planes: int, num_bytes: int, device: torch.device) -> ReservedPlanes:
    """Return planes that hold `num_bytes` each, with room for more where the device offers that."""
    if device.type == "cuda" and (driver := cuda_driver()) is not None:
        return CudaPlanes(num_planes, num_bytes, device, driver)
    if device.type == "cpu" and sys.platform == "linux":
        with suppress(OSError):  # A limit of addresses (`ulimit -v`), or a host that promises nothing.
            return HostPlanes(num_planes, num_bytes)
    return FixedPlanes(num_planes, num_bytes, device)


class FixedPlanes:
    """Planes in a tensor of torch, which hold their capacity all the time."""

    can_shrink = False

    def __init__(self, num_planes: int, num_bytes: int, device: torch.device) -> None:
        self.held = num_bytes
        shape = (num_planes, num_bytes)
        if device.type == "cpu":  # These zeros take no memory before they are written to.
            self.bytes_PU = torch.from_numpy(np.zeros(shape, np.uint8))
        else:
            self.bytes_PU = torch.zeros(shape, dtype=torch.uint8, device=device)

    def resize(self, num_bytes: int) -> None:
        assert num_bytes <= self.held


class HostPlanes:
    """Planes in host memory. Their pages come when they are first written to."""

    can_shrink = True

    def __init__(self, num_planes: int, num_bytes: int) -> None:
        page = mmap.PAGESIZE
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self._capacity = _rounded_up(max(num_bytes, total // num_planes, 1), page)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        self._memory = mmap.mmap(-1, num_planes * self._capacity, flags=flags)
        array = np.frombuffer(self._memory, np.uint8).reshape(num_planes, self._capacity)
        self.bytes_PU = torch.from_numpy(array)
        self.held = 0
        self.resize(num_bytes)

    def resize(self, num_bytes: int) -> None:
        held = _rounded_up(num_bytes, mmap.PAGESIZE)
        assert held <= self._capacity
        if held < self.held:
            self._advise(mmap.MADV_DONTNEED, held, self.held)  # What is read there later is zero.
        elif held - self.held >= _HUGE_BYTES:
            with suppress(OSError):  # The kernel may know none.
                self._advise(mmap.MADV_HUGEPAGE, self.held, held)
        self.held = held

    def _advise(self, advice: int, start: int, stop: int) -> None:
        for plane in range(len(self.bytes_PU)):
            self._memory.madvise(advice, plane * self._capacity + start, stop - start)


class _Mapped(NamedTuple):
    """Memory that all planes got in one piece; it can be given back as a whole only."""

    start: int
    stop: int
    handles: list[Any]


class CudaPlanes:
    """Planes on a GPU, whose memory comes from the driver and goes back to it."""

    can_shrink = True

    def __init__(self, num_planes: int, num_bytes: int, device: torch.device, driver: Any) -> None:
        """`driver` is `cuda.bindings.driver`."""
        self._device = device
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.synchronize(device)  # It also makes the device's context this thread's.
        self._range = _CudaRange(num_planes, max(num_bytes, total // num_planes), device, driver)
        self._range.grow(max(num_bytes, 1))  # torch asks for the device of the first address.
        self.bytes_PU = tensor_at(self._range, device).view(num_planes, self._range.capacity)
        self.bytes_PU[:, : self.held].zero_()

    @property
    def held(self) -> int:
        return self._range.held

    def resize(self, num_bytes: int) -> None:
        before = self.held
        if num_bytes > before:
            self._range.grow(num_bytes)
            self.bytes_PU[:, before : self.held].zero_()
        elif _rounded_up(num_bytes, self._range.granule) < before:
            torch.cuda.synchronize(self._device)  # The driver does not wait for kernels that still read.
            self._range.shrink(num_bytes)


class _CudaRange:
    """Reserved addresses, which a tensor keeps alive, and the memory that is mapped to them."""

    def __init__(self, num_planes: int, num_bytes: int, device: torch.device, driver: Any) -> None:
        self._driver = driver
        self._num_planes = num_planes
        prop = driver.CUmemAllocationProp()
        prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = torch.cuda.current_device() if device.index is None else device.index
        self._prop = prop
        self._access = driver.CUmemAccessDesc()
        self._access.location = prop.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        flags = driver.CUmemAllocationGranularity_flags
        minimum = flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granule = int(self._call("cuMemGetAllocationGranularity", prop, minimum))
        self.capacity = _rounded_up(num_bytes, self.granule)
        size = num_planes * self.capacity
        self.address = int(self._call("cuMemAddressReserve", size, 0, 0, 0))
        self.held = 0
        self._mapped: list[_Mapped] = []
        finalizer = weakref.finalize(
            self, _free, self._driver, partial(torch.cuda.synchronize, device), self.address, size,
            self._mapped, self.capacity,
        )
        finalizer.atexit = False  # The driver may have gone before.

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape = (self._num_planes * self.capacity,)
        return {"shape": shape, "typestr": "|u1", "data": (self.address, False), "version": 3}

    def grow(self, num_bytes: int) -> None:
        """Map memory, so that all planes hold so many bytes. Raises torch.OutOfMemoryError, and then holds
        what it has held."""
        stop = _rounded_up(num_bytes, self.granule)
        assert self.held < stop <= self.capacity
        piece = _Mapped(self.held, stop, [])
        size = stop - self.held
        try:
            for plane in range(self._num_planes):
                handle = self._create(size)
                address = self.address + plane * self.capacity + self.held
                try:
                    self._call("cuMemMap", address, size, 0, handle, 0)
                except BaseException:
                    self._call("cuMemRelease", handle)
                    raise
                piece.handles.append(handle)
                self._call("cuMemSetAccess", address, size, [self._access], 1)
        except BaseException:
            _unmap(self._driver, self.address, self.capacity, piece)
            raise
        self._mapped.append(piece)
        self.held = stop

    def shrink(self, num_bytes: int) -> None:
        """Give back all pieces that lie behind so many bytes."""
        while self._mapped and self._mapped[-1].start >= num_bytes:
            piece = self._mapped.pop()
            _unmap(self._driver, self.address, self.capacity, piece)
            self.held = piece.start

    def _create(self, size: int) -> Any:
        """Return new memory, if need be of what torch's allocator keeps for later."""
        error, handle = self._driver.cuMemCreate(size, self._prop, 0)
        out_of_memory = self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        if error == out_of_memory:
            torch.cuda.empty_cache()
            error, handle = self._driver.cuMemCreate(size, self._prop, 0)
        if error == out_of_memory:
            raise torch.OutOfMemoryError(f"CUDA out of memory: no {size / 2**20:.0f} MiB for the KV cache")
        _require(self._driver, "cuMemCreate", error)
        return handle

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._driver, name)(*arguments)
        _require(self._driver, name, error)
        return results[0] if results else None


def _require(driver: Any, name: str, error: Any) -> None:
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} failed: {error}")


def _unmap(driver: Any, address: int, capacity: int, piece: _Mapped) -> None:
    for plane, handle in enumerate(piece.handles):
        start = address + plane * capacity + piece.start
        _require(driver, "cuMemUnmap", driver.cuMemUnmap(start, piece.stop - piece.start)[0])
        _require(driver, "cuMemRelease", driver.cuMemRelease(handle)[0])


def _free(
    driver: Any,
    synchronize: Callable[[], None],
    address: int,
    size: int,
    mapped: list[_Mapped],
    capacity: int,
) -> None:
    synchronize()
    for piece in mapped:
        _unmap(driver, address, capacity, piece)
    _require(driver, "cuMemAddressFree", driver.cuMemAddressFree(address, size)[0])


def cuda_driver() -> Any | None:
    """Return the functions of CUDA's driver, which CUDA builds of torch bring; None without them."""
    try:
        from cuda.bindings import driver  # Optional: the builds of torch for CPUs do without.
    except ImportError:
        return None
    return driver


def tensor_at(memory: Any, device: torch.device) -> Tensor:
    """Return the bytes of a range as a tensor, which keeps the range alive."""
    return torch.as_tensor(memory, device=device)


def _rounded_up(num_bytes: int, step: int) -> int:
    return math.ceil(num_bytes / step) * step
