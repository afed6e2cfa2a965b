"""The functions of CUDA's driver that manage virtual memory, on pages of the host.

It demands what the driver demands: granules, ranges that were reserved, whole mappings, access. Reserved
addresses without memory cannot be touched: the process would end with a signal.
"""

import ctypes
import mmap
from types import SimpleNamespace
from typing import Any

import torch

GRANULE = 1 << 16
_READ_WRITE = 3
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class EmulatedDriver:
    """A driver of one device that has `total` bytes for it."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=0, CUDA_ERROR_INVALID_VALUE=1, CUDA_ERROR_OUT_OF_MEMORY=2)
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)

    def __init__(self, total: int = 1 << 33) -> None:
        self.total = total
        self.ranges: dict[int, mmap.mmap] = {}
        """Address -> its reserved range."""
        self.mapped: dict[int, tuple[int, int]] = {}
        """Address -> size and handle of what is mapped there."""
        self._sizes: dict[int, int] = {}
        """Handle -> bytes, until it is released and nowhere mapped."""
        self._num_handles = 0

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes.values())

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    @staticmethod
    def CUmemAccessDesc() -> Any:
        return SimpleNamespace()

    def cuMemGetAllocationGranularity(self, prop: Any, option: int) -> tuple[int, int]:
        assert prop.type == prop.location.type == 1 and prop.location.id == 0
        return 0, GRANULE

    def cuMemAddressReserve(self, size: int, alignment: int, addr: int, flags: int) -> tuple[int, int]:
        assert size % GRANULE == alignment == addr == flags == 0
        range_ = mmap.mmap(-1, size + GRANULE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
        start = ctypes.addressof(ctypes.c_char.from_buffer(range_))
        address = -(-start // GRANULE) * GRANULE
        _protect(address, size, 0)
        self.ranges[address] = range_
        return 0, address

    def cuMemCreate(self, size: int, prop: Any, flags: int) -> tuple[int, int]:
        if size % GRANULE or flags:
            return 1, 0
        if self.used_bytes + size > self.total:
            return 2, 0
        self._num_handles += 1
        self._sizes[self._num_handles] = size
        return 0, self._num_handles

    def cuMemMap(self, ptr: int, size: int, offset: int, handle: int, flags: int) -> tuple[int]:
        assert self._sizes[handle] == size and ptr % GRANULE == offset == flags == 0
        assert any(start <= ptr < ptr + size <= start + len(r) for start, r in self.ranges.items())
        for start, (length, _) in self.mapped.items():
            assert ptr + size <= start or start + length <= ptr, "something is mapped there"
        self.mapped[ptr] = (size, handle)
        return (0,)

    def cuMemSetAccess(self, ptr: int, size: int, desc: list[Any], count: int) -> tuple[int]:
        (one,) = desc
        assert count == 1 and one.location.type == 1 and one.flags == 3
        assert self.mapped[ptr][0] == size
        _protect(ptr, size, _READ_WRITE)
        ctypes.memset(ptr, 0xFF, size)  # Nobody promises zeros; these are NaN.
        return (0,)

    def cuMemUnmap(self, ptr: int, size: int) -> tuple[int]:
        length, _ = self.mapped.pop(ptr)
        assert length == size, "only a whole mapping can be taken away"
        _LIBC.madvise(ctypes.c_void_p(ptr), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
        _protect(ptr, size, 0)
        return (0,)

    def cuMemRelease(self, handle: int) -> tuple[int]:
        assert all(other != handle for _, other in self.mapped.values()), "it is unmapped first"
        del self._sizes[handle]
        return (0,)

    def cuMemAddressFree(self, ptr: int, size: int) -> tuple[int]:
        range_ = self.ranges.pop(ptr)
        assert len(range_) == size + GRANULE and not any(ptr <= start < ptr + size for start in self.mapped)
        return (0,)


def _protect(address: int, size: int, access: int) -> None:
    assert _LIBC.mprotect(address, size, access) == 0


def tensor_at(memory: Any, device: torch.device) -> torch.Tensor:
    """What `torch.as_tensor` makes of device memory: a tensor at its addresses, which keeps it alive."""
    found = memory.__cuda_array_interface__
    (size,) = found["shape"]
    assert found["typestr"] == "|u1" and not found["data"][1]
    array: Any = (ctypes.c_uint8 * size).from_address(found["data"][0])
    array.memory = memory
    return torch.frombuffer(array, dtype=torch.uint8)
