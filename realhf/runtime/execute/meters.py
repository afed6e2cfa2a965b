"""ComputeMeter and MemoryMeter: count FLOPs, make room for calls, and measure memory beside predictions."""

import resource
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from realhf.calls import GenerateOutputs, ModelWork, TrainStep
from realhf.data.batch import Batch
from realhf.data.order import prompt_of
from realhf.distributed.world import World
from realhf.engine.chunked_loss import wanted
from realhf.experiment import Role
from realhf.graph import FunctionCall
from realhf.models.model_config import TransformersConfig
from realhf.models.model_flops import ModelFlops, TokenSpan
from realhf.models.param_spec import model_spec
from realhf.runtime.compile.actions import Run
from realhf.runtime.compile.program import PredictedMemory
from realhf.runtime.records.step_record import Event, StepRecord
from realhf.runtime.weights.engine_store import EngineKey, EngineStore

DEVICE_SECONDS = "compute/device_seconds"
FLOPS = "compute/flops"


def flops_by_role(roles: Mapping[str, Role]) -> dict[str, ModelFlops]:
    """Return the FLOPs of the models of all roles, except those whose sizes are not known."""
    flops = {}
    for name, role in roles.items():
        config = role.config()
        if not role.is_language_model:
            continue
        if not isinstance(config, TransformersConfig) or not config.unplannable:
            flops[name] = ModelFlops.of(model_spec(config), role.resolved_lora())
    return flops


def peaks_by_call(
    calls: Sequence[FunctionCall], roles: Mapping[str, Role], peak_flops: Mapping[str, float]
) -> dict[str, float]:
    """Return the peak FLOP/s of a device for each call whose role has a dtype with a known peak."""
    dtypes = {call.name: roles[call.role].weights_dtype for call in calls if call.role is not None}
    return {name: peak_flops[dtype] for name, dtype in dtypes.items() if dtype in peak_flops}


def generate_flops(
    call: FunctionCall, flops: ModelFlops, prompts: Batch, *, group_size: int, before: Batch,
    after: Sequence[Batch],
) -> int:
    """Return the FLOPs of a round of generation on some samples.

    `before` are the samples that earlier rounds left unfinished, and `after` all samples after this round.
    The samples of a prompt share the pass over it. The last token of a sample is not passed through the
    model.
    """
    if flops.generates_merged:
        flops = replace(flops, adapters=0)
    pairs = zip(*_lengths(prompts, call.inputs[0]), strict=True)
    by_prompt = {prompt_of(sample, group_size): length for sample, length in pairs}
    total = flops.forward(((0, length) for length in by_prompt.values()), 0)
    for sign, samples in ((-1, before), *((1, batch) for batch in after)):
        if samples.ids:
            outputs = GenerateOutputs.of(call)
            drawn = samples[outputs.mask].response_lengths().tolist()
            lengths = samples[outputs.sequences].lengths
            spans = [(n - d, max(n - d, n - 1)) for n, d in zip(lengths, drawn, strict=True)]
            total += sign * flops.forward(spans, sum(drawn))
    return total


def sampled_tokens(call: FunctionCall, *, before: Batch, after: Sequence[Batch]) -> int:
    """Return the tokens that a round of generation has sampled; the arguments are those of generate_flops."""
    outputs = GenerateOutputs.of(call)
    total = 0
    for sign, samples in ((-1, before), *((1, batch) for batch in after)):
        if samples.ids and outputs.rollout is not None:  # An environment's tokens are not sampled.
            total += sign * int(samples[outputs.mask].values.sum())
        elif samples.ids:
            total += sign * int(samples[outputs.mask].response_lengths().sum())
    return total


def pass_flops(call: FunctionCall, flops: ModelFlops, minibatches: Sequence[Batch]) -> int:
    """Return the FLOPs of a call that computes log-probs, values or scores, or trains on them."""
    work = call.work_as(ModelWork)
    total = 0
    for batch in minibatches:
        if not batch.ids:
            continue
        tokens = batch[call.inputs[0]]
        num_outputs = len(batch.ids)
        if not work.output.per_sequence:
            num_outputs = int(wanted(tokens, batch.fields.get("response_mask")).sum())
        spans: list[TokenSpan] = [(0, length) for length in tokens.lengths]
        if isinstance(work, TrainStep):
            total += work.repeats * flops.train(spans, num_outputs)
        else:
            total += flops.forward(spans, num_outputs)
    return total


def _lengths(batch: Batch, key: str) -> tuple[list[int], list[int]]:
    return (list(batch.ids), list(batch[key].lengths)) if batch.ids else ([], [])


class ComputeMeter:
    """Adds up device-seconds and FLOPs over the steps of a run, on rank 0.

    A resumed run continues the sums in the last of its `earlier` metrics; others are not logged.
    """

    def __init__(
        self, *, num_devices: int, has_flops: bool, peaks: Mapping[str, float],
        earlier: Sequence[Mapping[str, float]] = (),
    ) -> None:
        """`peaks` are the FLOP/s of a device for each call; MFU is logged only if no call lacks its peak."""
        self._num_devices = num_devices
        self._peaks = peaks
        start = {DEVICE_SECONDS: 0.0, FLOPS: 0.0} if has_flops else {DEVICE_SECONDS: 0.0}
        last = earlier[-1] if earlier else start
        self._totals = {name: last[name] for name in start if name in last}

    def totals(self) -> dict[str, float]:
        return dict(self._totals)

    def add(self, records: Sequence[StepRecord], seconds: float) -> dict[str, float]:
        """Add a step, given the records of all ranks; return the metrics of the compute so far, and MFU."""
        flops: dict[str, int] = {}
        for name, value in _counted(records):
            flops[name] = flops.get(name, 0) + value
        for name, value in ((DEVICE_SECONDS, seconds * self._num_devices), (FLOPS, sum(flops.values()))):
            if name in self._totals:
                self._totals[name] += float(value)
        metrics = self.totals()
        if FLOPS in metrics and flops and flops.keys() <= self._peaks.keys():
            at_peak = sum(value / self._peaks[name] for name, value in flops.items())
            metrics["perf/mfu"] = at_peak / (seconds * self._num_devices)
        return metrics


def _counted(records: Sequence[StepRecord]) -> Iterator[tuple[str, Any]]:
    return ((e["name"], e["flops"]) for record in records for e in record.events if "flops" in e)


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

    - On CUDA, `memory_bytes` is the peak of torch's allocator, `max_memory_allocated`, during the call, and
      the pages of caches, which lie beside it.
    - On a CPU nobody counts temporary tensors. There, `counted_bytes` is what the engines of this rank hold
      at the end of the call, its cache and its packed weights, and the prediction has the same parts.
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
    def of_call(self, action: Run, event: Event) -> Iterator[None]:
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
            parts["packed"] = engine.last_packed_bytes
        event["memory"] = {part: size for part, size in parts.items() if size}
        event["process_bytes"] = resident_bytes(peak=True)
        predicted = self._predicted.get(action.call.name, {}).get(self._rank)
        if on_cuda:
            peak = torch.cuda.max_memory_allocated(self._device)
            event["memory_bytes"] = peak + self._engines.mapped_bytes
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
        """Release gradients that the call does not need, and caches beside which it might not fit; then what
        recorded passes hold, if it still might not.

        Return the bytes of caches that stay beside the call, without its own and without recorded passes.
        """
        key = self._engine_key(action)
        self._engines.release("gradients", besides=key if action.call.kind == "train_step" else None)
        if self._device.type != "cuda":
            return 0
        own_engine = key if action.call.kind == "generate" else None
        need = self._need(action)
        usable = _USABLE * torch.cuda.get_device_properties(self._device).total_memory
        cached = self._engines.cached_bytes(besides=own_engine)
        releasable: tuple[Literal["cache", "graphs"], ...] = ("cache", "graphs")
        for what in releasable:
            if need is None or need + sum(cached.values()) > usable:
                self._engines.release(what, besides=own_engine)
                cached = self._engines.cached_bytes(besides=own_engine)
        return sum(size for part, size in cached.items() if part != "graphs")

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
        of_torch = torch.cuda.memory_reserved(self._device) + self._engines.mapped_bytes
        return _GROWTH * most + total - free - of_torch

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
    return part in ("kv_cache", "packed") or (" " in part and part.split()[-1] in _COUNTED)


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
