"""HostSlices: states of an optimizer in host memory, which pass through the device slice by slice.

A slice is a replica's chunk of a section, or some of a large one. Two buffers on the device take turns: while
the optimizer updates one slice, the states of the next one come up, and those of the one before go back
(ZeRO-Offload, Ren et al. 2021, with the update on the device). Every element is updated by the same kernel as
without a host copy, so results are equal bit for bit. Between steps the states take no memory of the device.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
from torch import Tensor

from realhf.devices.pinned import run_bounds


class HostSlices:
    """The states of an optimizer's slices in host memory, and two buffers for them on the device.

    On a CPU the same copies are made, and wait for one another.
    """

    def __init__(self, states: Sequence[Sequence[Tensor]], device: torch.device) -> None:
        """Take the states of each slice: flat tensors in host memory, of one dtype.

        Call `release` once all views of `on_device` are made, for which the buffers need their memory.
        """
        self._states = states
        self._device = device
        sizes = [sum(map(len, tensors)) for tensors in states]
        slots = [max(sizes[first::2], default=0) for first in (0, 1)]
        dtype = states[0][0].dtype
        self._buffers = [torch.empty(size, dtype=dtype, device=device) for size in slots]
        self.on_device = [
            list(self._buffers[i % 2][:size].split([len(tensor) for tensor in tensors]))
            for i, (tensors, size) in enumerate(zip(states, sizes, strict=True))
        ]
        """For each slice the views of a buffer that have its states while it is updated."""
        self._up = _copy_stream(device)
        self._down = _copy_stream(device)

    def update(self, update: Callable[[int], None]) -> None:
        """Call `update` with the number of each slice while `on_device` has its states.

        The host waits until all states are back, so that it may read them afterwards.
        """
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(buffer.nbytes)
        count = len(self._states)
        free = [self._now(), self._now()]
        """For each buffer an event after which it may be overwritten."""
        there = [self._bring(0, after=free[0])]
        for i in range(count):
            if i + 1 < count:
                there.append(self._bring(i + 1, after=free[(i + 1) % 2]))
            _wait(None, there[i])
            update(i)
            free[i % 2] = self._take_back(i, after=self._now())
        for event in free:
            if event is not None:
                event.synchronize()
        self.release()

    def _bring(self, number: int, *, after: "torch.cuda.Event | None") -> "torch.cuda.Event | None":
        """Copy a slice's states to the device; return an event after which they are there."""
        return self._copy(self._up, self.on_device[number], self._states[number], after)

    def _take_back(self, number: int, *, after: "torch.cuda.Event | None") -> "torch.cuda.Event | None":
        """Copy a slice's states back to the host; return an event after which they are there."""
        return self._copy(self._down, self._states[number], self.on_device[number], after)

    def _copy(
        self, stream: "torch.cuda.Stream | None", targets: Sequence[Tensor], sources: Sequence[Tensor],
        after: "torch.cuda.Event | None",
    ) -> "torch.cuda.Event | None":  # fmt: skip
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            _wait(stream, after)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            return None if stream is None else stream.record_event()

    def _now(self) -> "torch.cuda.Event | None":
        """Return an event after the work so far on the main stream; None on a CPU."""
        return torch.cuda.current_stream().record_event() if self._device.type == "cuda" else None

    def release(self) -> None:
        """Free the buffers until the next update; views of them stay valid."""
        for buffer in self._buffers:
            buffer.untyped_storage().resize_(0)


def host_tensors(sizes: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return flat tensors of zeros in host memory, from which a CUDA device can copy asynchronously.

    Some of them share an allocation, because torch rounds pinned memory up to a power of two.
    """
    pins = device.type == "cuda"
    bounds = run_bounds([size * dtype.itemsize for size in sizes]) if pins else [0, len(sizes)]
    runs = [list(sizes[first:stop]) for first, stop in pairwise(bounds)]
    return [part for run in runs for part in torch.zeros(sum(run), dtype=dtype, pin_memory=pins).split(run)]


def _copy_stream(device: torch.device) -> "torch.cuda.Stream | None":
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _wait(stream: "torch.cuda.Stream | None", event: "torch.cuda.Event | None") -> None:
    """Let a stream, or with None the main one, wait for an event, if there is one."""
    if event is not None:
        (stream or torch.cuda.current_stream()).wait_event(event)
