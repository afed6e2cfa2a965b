"""MemoryMeter: makes room for each call on this rank, and measures memory beside what was predicted."""

import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from realhf.distributed.world import World
from realhf.runtime.compile.actions import Run
from realhf.runtime.compile.program import PredictedMemory
from realhf.runtime.weights.engine_store import EngineKey, EngineStore

_COUNTED = ("weights", "copy", "gradients", "optimizer", "cache")
"""Last words of the parts of roles (as in "actor gradients") that are counted on a CPU."""
_OF_CALLS = {
    "perf/memory_bytes/": "measured", "perf/predicted_memory_bytes/": "predicted",
    "perf/counted_bytes/": "counted", "perf/predicted_counted_bytes/": "predicted"}
_OF_PROCESSES = {"perf/process_bytes": "measured", "perf/predicted_process_bytes": "predicted"}
"""The metrics of memory, and what the summary of a run calls them."""
_USABLE = 0.95
"""Share of a GPU's memory that a call and the caches beside it may take."""
_GROWTH = 1.1
"""A call without a prediction may need this many times the most that it has needed so far."""


class MemoryMeter:
    """Adds to the event of each call what memory it took, beside what was predicted.

    - On CUDA, `memory_bytes` is the peak of torch's allocator, `max_memory_allocated`, during the call.
    - On a CPU nobody counts temporary tensors. There, `counted_bytes` is what the engines of this rank hold
      at the end of the call, and its cache, and the prediction has the same parts.
    - `process_bytes` is the most that the process has held so far in the host's memory: its resident set,
      with libraries, and with what malloc keeps for later tensors. On a CPU its prediction is all parts of
      the call, and what the process holds beside its models when the run begins.
    """

    def __init__(
        self, world: World, engines: EngineStore, predicted: PredictedMemory
    ) -> None:
        self.beside_models = 0
        """The bytes of this process beside its models, see `begin`."""
        self._device = world.device
        self._rank = world.rank
        self._engines = engines
        self._predicted = predicted
        self._most: dict[tuple[str, EngineKey], int] = {}
        """The most bytes that a call has needed on CUDA, without the caches of other calls."""

    def begin(self) -> None:
        """Measure what the process holds beside its models, such as libraries and rows of data."""
        self.beside_models = max(0, resident_bytes() - sum(self._engines.memory().values()))

    @contextmanager
    def of_call(self, action: Run, event: dict[str, Any]) -> Iterator[None]:
        """Release memory that the call does not need; measure while the context lasts."""
        beside = self._make_room(action)
        on_cuda = self._device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        yield
        parts = self._engines.memory()
        if action.call.kind == "generate":
            engine = self._engines.generating(self._engine_key(action))
            parts["kv_cache"] = max(0, engine.last_cache_bytes - parts.get("cache", 0))
        event["memory"] = {part: size for part, size in parts.items() if size}
        event["process_bytes"] = resident_bytes(peak=True)
        predicted = self._predicted.get(action.call.name, {}).get(self._rank)
        if on_cuda:
            event["memory_bytes"] = torch.cuda.max_memory_allocated(self._device)
            name = (action.call.name, self._engine_key(action))
            self._most[name] = max(self._most.get(name, 0), event["memory_bytes"] - beside)
        else:
            event["counted_bytes"] = sum(parts.values())
        if predicted is not None and on_cuda:
            event["predicted_memory_bytes"] = _sum_of(predicted, _is_allocated)
        elif predicted is not None:
            event["predicted_counted_bytes"] = _sum_of(predicted, _is_counted)
            event["predicted_process_bytes"] = self.beside_models + round(sum(predicted.values()))

    def _make_room(self, action: Run) -> int:
        """Release gradients that the call does not need, and caches beside which it might not fit.

        Return the bytes of caches that stay beside the call, without its own.
        """
        key = self._engine_key(action)
        self._engines.release("gradients", besides=key if action.call.kind == "train_step" else None)
        if self._device.type != "cuda":
            return 0
        own_engine = key if action.call.kind == "generate" else None
        need = self._need(action)
        kept_bytes = self._engines.kept_bytes(besides=own_engine)
        total = torch.cuda.get_device_properties(self._device).total_memory
        if need is None or need + kept_bytes > _USABLE * total:
            self._engines.release("cache", besides=own_engine)
            kept_bytes = self._engines.kept_bytes(besides=own_engine)
        return kept_bytes

    def _need(self, action: Run) -> float | None:
        """Return the bytes that a call needs on CUDA, with its own cache and communicators.

        They are predicted, or estimated from earlier runs of the call; None if there were none.
        """
        predicted = self._predicted.get(action.call.name, {}).get(self._rank)
        if predicted is not None:
            return sum(predicted.values())
        most = self._most.get((action.call.name, self._engine_key(action)))
        if most is None:
            return None
        free, total = torch.cuda.mem_get_info(self._device)
        return _GROWTH * most + total - free - torch.cuda.memory_reserved(self._device)

    def _engine_key(self, action: Run) -> EngineKey:
        assert action.call.role is not None
        return action.call.role, action.layout


def _sum_of(predicted: Mapping[str, float], is_compared: Callable[[str], bool]) -> int:
    return round(sum(size for part, size in predicted.items() if is_compared(part)))


def _is_allocated(part: str) -> bool:
    """Return whether a predicted part is memory that torch's allocator gives out."""
    return part != "communicators"


def _is_counted(part: str) -> bool:
    """Return whether a predicted part is counted on a CPU, such as "actor gradients" or the cache."""
    return part == "kv_cache" or (" " in part and part.split()[-1] in _COUNTED)


def largest_by_call(history: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return for each call the most bytes of a rank in any step, by what they are, such as `measured`."""
    largest: dict[str, dict[str, float]] = {}
    for metrics in history:
        for name, value in metrics.items():
            for prefix, key in _OF_CALLS.items():
                if name.startswith(prefix):
                    of_call = largest.setdefault(name.removeprefix(prefix), {})
                    of_call[key] = max(of_call.get(key, 0.0), value)
    return largest


def largest_of_processes(history: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the most bytes of a process in any step, by what they are, such as `measured`."""
    found = {key: [metrics[name] for metrics in history if name in metrics]
             for name, key in _OF_PROCESSES.items()}
    return {key: max(sizes) for key, sizes in found.items() if sizes}


def resident_bytes(*, peak: bool = False) -> int:
    """Return the bytes of memory that this process holds, with the pages that it shares with others.

    With `peak`, return the most that it has held so far; so it does, too, where the system tells no more.
    """
    name = "VmHWM:" if peak else "VmRSS:"
    if sys.platform == "linux":  # `ru_maxrss` of a started program may be that of its parent.
        lines = Path("/proc/self/status").read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith(name)), 0)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
