"""Counts what the host does with the pretended device: waits for it, copies, launches of kernels.

    with pretended_device() as device, host_traffic() as traffic:
        ...
    assert not traffic.waits

A wait is what makes the host stop until the device has caught up: a scalar that is read (`item`, `bool`,
`tolist`), a copy to the host or from its pageable memory, a kernel whose result has a size that depends on
its data (`nonzero`, `bincount`, a mask as an index), and `synchronize`. `torch.cuda.set_sync_debug_mode`
finds the same on a real device, except for events.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import torch

_ROOT = Path(__file__).parents[2]
_SIZED_BY_DATA = {
    f"aten::{name}"
    for name in ("nonzero", "bincount", "masked_select", "equal", "_unique", "_unique2", "unique_dim",
                 "unique_consecutive", "histc")
}
_WITHOUT_KERNEL = ("aten::empty", "aten::new_empty", "aten::_unsafe_view", "aten::resize", "aten::set")
_INDEXING = ("aten::index", "aten::index_put", "aten::_index_put_impl")


@dataclass
class HostTraffic:
    """What the host did. A wait is `what file:line`, where the line is the innermost one of the package."""

    waits: list[str] = field(default_factory=list)
    uploads: int = 0
    downloads: int = 0
    launches: int = 0
    """Operations that run kernels; a composite operation counts once."""
    replays: int = 0
    """Recorded passes that were launched at once."""

    @property
    def transfers(self) -> int:
        return self.uploads + self.downloads

    def waits_but(self, *kinds: str) -> list[str]:
        """Return the waits that are not of these kinds, such as `Event.synchronize`."""
        return [wait for wait in self.waits if wait.split()[0] not in kinds]


class Recorder:
    """Adds what happens to all HostTraffic objects that are being filled."""

    def __init__(self) -> None:
        self._filled: list[HostTraffic] = []
        self._num_pauses = 0

    @contextmanager
    def filling(self) -> Iterator[HostTraffic]:
        traffic = HostTraffic()
        self._filled.append(traffic)
        try:
            yield traffic
        finally:
            self._filled = [other for other in self._filled if other is not traffic]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside: a kernel's own operations are not those of the host."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1

    def add(self, *, wait: str | None = None, uploads: int = 0, downloads: int = 0, launches: int = 0,
            replays: int = 0) -> None:
        if self._num_pauses or not self._filled:
            return
        place = None if wait is None else f"{wait} {_place()}"
        for traffic in self._filled:
            traffic.uploads += uploads
            traffic.downloads += downloads
            traffic.launches += launches
            traffic.replays += replays
            if place is not None:
                traffic.waits.append(place)

    def copy(self, what: str, *, upload: bool, pinned: bool, non_blocking: bool) -> None:
        """Count a copy between host and device; `pinned` tells about the side on the host."""
        wait = None if pinned and non_blocking else what
        self.add(wait=wait, uploads=int(upload), downloads=int(not upload))

    def kernel(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return a stand-in for a kernel, which counts as one launch whatever it does."""

        @wraps(func)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.add(launches=1)
            with self.paused():
                return func(*args, **kwargs)

        return run

    def operation(
        self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any],
        *, there: Callable[[torch.Tensor], bool], pinned: Callable[[torch.Tensor], bool],
    ) -> None:
        """Count an operation of which some tensors are on the device, as `there` tells."""
        name = func.name().split(".")[0].rstrip("_")
        if name in ("aten::copy", "aten::_foreach_copy"):
            self._copies(args, kwargs, there=there, pinned=pinned)
        elif name == "aten::_local_scalar_dense":
            self.add(wait="item", downloads=1)
        elif name in _INDEXING:
            self._indexing(name, args, there=there)
        elif name in _SIZED_BY_DATA:
            self.add(wait=name.removeprefix("aten::"), launches=1)
        elif name == "aten::repeat_interleave" and kwargs.get("output_size") is None and len(args) < 2:
            self.add(wait="repeat_interleave", launches=1)
        elif name == "aten::_grouped_mm" and args[0].dtype != torch.bfloat16:
            self.add(wait="grouped_mm", launches=1)  # torch multiplies group by group then.
        elif not name.startswith(_WITHOUT_KERNEL) and not _is_view(func):
            self.add(launches=1)

    def _copies(
        self, args: Sequence[Any], kwargs: Mapping[str, Any],
        *, there: Callable[[torch.Tensor], bool], pinned: Callable[[torch.Tensor], bool],
    ) -> None:
        non_blocking = bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        pairs = zip(*args[:2], strict=True) if isinstance(args[0], list | tuple) else [args[:2]]
        for target, source in pairs:
            upload = there(target)
            if upload == there(source):
                self.add(launches=1)
                continue
            host = source if upload else target
            self.copy("copy_", upload=upload, pinned=pinned(host), non_blocking=non_blocking)

    def _indexing(self, name: str, args: Sequence[Any], *, there: Callable[[torch.Tensor], bool]) -> None:
        """Count reading or writing by indices. A mask is turned into indices, unless one number is written;
        indices, and numbers that are written, are copied from the host."""
        indices = [index for index in args[1] if index is not None]
        is_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        writes_number = name != "aten::index" and args[2].dim() == 0 and not there(args[2])
        self.add(launches=1)
        if is_mask and not writes_number:
            self.add(wait="mask")
        for index in indices:
            if not there(index):
                self.add(wait="index", uploads=1)
        if writes_number and not is_mask:
            self.add(wait="index_put", uploads=1)


def _is_view(func: Any) -> bool:
    aliases = [x.alias_info for x in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _place() -> str:
    """Return `file:line` of the innermost line of the package, or else of a test."""
    frame = sys._getframe(1)
    test = ""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_ROOT / "realhf"):
            return f"{path.relative_to(_ROOT)}:{frame.f_lineno}"
        if not test and path.is_relative_to(_ROOT / "tests") and path.parent.name != "gpu":
            test = f"{path.relative_to(_ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return test


RECORDER = Recorder()
"""Of this process, as the pretended device is."""


def host_traffic() -> Any:
    """Return a context manager that yields a HostTraffic, which is filled until it ends."""
    return RECORDER.filling()


class PretendedEvent:
    """An event of a device that computes at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "PretendedEvent") -> float:
        return 0.0

    def synchronize(self) -> None:
        RECORDER.add(wait="Event.synchronize")


class PretendedStream:
    """A stream of a device that computes at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or PretendedEvent()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        RECORDER.add(wait="Stream.synchronize")
