"""Measures speed for gpu_check.py, one kind per process:

    python benchmarks/measure/gpu_speed.py environment|generation|rows|training|grpo DEVICE OUT.json

Each figure is written as soon as it is known; a part that fails leaves the others.

Generation runs in turns with transformers' `generate` in this process, in bfloat16 on the same random
weights. The model is "1.5b" of workloads.py on CUDA, "tiny" on the CPU. The memory of a side includes its
weights, but not the other side's.
"""

import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.compare.ours import GENERATED, engine_of
from benchmarks.compare.sides import alternate
from benchmarks.compare.theirs import padded
from benchmarks.measure.limits import decode_work, measure_limits, median_seconds, train_flops
from benchmarks.measure.workloads import config_of, sequences, write_model
from realhf import GRPO, Expected, OptimizerConfig, Role, SamplingConfig
from realhf.algorithms.policy_loss import PolicyLoss, PolicyLossConfig
from realhf.calls import Generate, LogProbs, TrainStep
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.data.batch import Batch, Packed
from realhf.devices.reserved import reserve_planes
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.execution_plan import ExecutionPlan
from realhf.graph import FunctionCall
from realhf.inference.page_pool import Decoded, recorder
from realhf.layout import Layout
from realhf.planner.memory_account import check_memory

DTYPE = "bfloat16"
PINNED_BYTES = 1 << 28
_PACKAGES = ("triton", "cuda-bindings", "flash-attn", "megatron-core", "numpy", "tokenizers", "tyro")
ROWS = (1, 64, 512)
CACHE_GIB = 4.0
OPTIMIZER = {"lr": 1e-4, "betas": [0.9, 0.95], "weight_decay": 0.01}


class Scale(NamedTuple):
    """The sizes of the measurements on a device."""

    model: str
    rows: int  # Decoded at once.
    prompt_tokens: tuple[int, int]
    few_tokens: int
    new_tokens: int
    sequences: int  # Per training batch.
    sequence_tokens: int
    micro_batch_tokens: int
    repeats: int


SCALES = {
    "cuda": Scale("1.5b", 64, (64, 128), 16, 128, 32, 2048, 16384, 3),
    "cpu": Scale("tiny", 16, (8, 16), 4, 16, 16, 64, 256, 1),
}


class Found(dict[str, Any]):
    """Figures, which are written to a file as they come."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path

    def add(self, **figures: Any) -> None:
        self.update(figures)
        self._path.write_text(json.dumps(self))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Note that a part of the check has failed, and go on with the next one."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            sentence = str(error).partition("\n")[0][:200]
            self.add(failed={**self.get("failed", {}), name: f"{type(error).__name__}: {sentence}"})


def run_kind(kinds: dict[str, Callable[["Device", Found], None]], arguments: list[str]) -> int:
    """Run a kind of check on a device and write its figures; return 1 if a part of it failed."""
    kind, device_name, out = arguments
    found = Found(Path(out))
    with found.part(kind):
        kinds[kind](Device(device_name), found)
    return int("failed" in found)


class Device(NamedTuple):
    name: str

    @property
    def is_cuda(self) -> bool:
        return self.name.startswith("cuda")

    @property
    def scale(self) -> Scale:
        return SCALES["cuda" if self.is_cuda else "cpu"]

    def measured(self, work: Callable[[], dict[str, Any]], *, own_bytes: int = 0) -> dict[str, Any]:
        """Return the result of `work` with its seconds and its peak memory.

        The peak is `own_bytes`, which the side always has, plus what the work adds, and the `mapped_bytes` of
        its result, which torch's allocator does not know.
        """
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, start = self.allocated(), perf_counter()
        result = work()
        if self.is_cuda:
            torch.cuda.synchronize()
        seconds = perf_counter() - start
        mapped_bytes = result.pop("mapped_bytes", 0)
        peak = 0
        if self.is_cuda:
            peak = torch.cuda.max_memory_allocated() - before + own_bytes + mapped_bytes
        return result | {"seconds": seconds, "peak_bytes": peak}

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.is_cuda else 0

    def count_kernels(self, work: Callable[[], object]) -> int:
        """Return how many kernels `work` launches; on a CPU, how many operations."""
        activity = torch.profiler.ProfilerActivity
        with torch.profiler.profile(activities=[activity.CUDA if self.is_cuda else activity.CPU]) as profiler:
            self.measured(lambda: work() and {} or {})
        kind = "CUDA" if self.is_cuda else "CPU"
        return sum(event.count for event in profiler.key_averages() if event.device_type.name == kind)

    def profile(self, work: Callable[[], object], *, rows: int = 14) -> dict[str, Any]:
        """Profile `work`: return the seconds of the call, of its kernels, and the longest kernels."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if self.is_cuda else []
        with torch.profiler.profile(activities=kinds) as profiler:
            seconds = self.measured(lambda: work() and {} or {})["seconds"]
        key, kind = ("self_device_time_total", "CUDA") if self.is_cuda else ("self_cpu_time_total", "CPU")
        events = [event for event in profiler.key_averages() if event.device_type.name == kind]
        events.sort(key=lambda event: -getattr(event, key))
        longest = [
            {"name": e.key[:90], "calls": e.count, "seconds": getattr(e, key) / 1e6} for e in events[:rows]]
        total = sum(getattr(event, key) for event in events) / 1e6
        return {"seconds": seconds, "seconds_of_kernels": total, "longest": longest}


def environment(device: Device, found: Found) -> None:
    """Find the machine and its limits, and whether what generation is built on works at all."""
    found.add(
        python=sys.version.split()[0], torch=torch.__version__, transformers=transformers.__version__,
        versions={name: _version(name) for name in _PACKAGES})
    if device.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        found.add(
            gpu=properties.name, memory_gib=properties.total_memory / 2**30, driver=_driver(),
            cuda=torch.version.cuda, nccl=".".join(map(str, torch.cuda.nccl.version())))
        source = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=device.name)
        seconds = median_seconds(partial(target.copy_, source, non_blocking=True), device=device.name)
        found.add(pinned_to_device_bytes_per_second=PINNED_BYTES / seconds)
    with found.part("planes"):
        found.add(planes=_planes(torch.device(device.name)))
    with found.part("graphs"):
        found.add(graphs=_graphs(torch.device(device.name)))
    for dtype in (DTYPE, "float32"):
        found.add(**{dtype: measure_limits(dtype, device.name)})


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _planes(device: torch.device) -> dict[str, Any]:
    """Let the memory of a few planes go and come, as that of pages does."""
    size = 32 << 20
    planes = reserve_planes(3, size, device)
    held, address = planes.held, planes.bytes_PU.data_ptr()
    planes.bytes_PU[:, :size] = 7
    planes.resize(2 * size)
    assert (planes.bytes_PU[:, :size] == 7).all(), "memory that was there has changed"
    assert not planes.bytes_PU[:, held : 2 * size].any(), "new memory is not zero"
    planes.resize(0)
    start = perf_counter()
    planes.resize(size)
    assert not planes.bytes_PU[:, :size].any(), "memory that came back is not zero"
    assert planes.bytes_PU.data_ptr() == address, "addresses have changed"
    assert planes.bytes_PU.device == torch.empty(0, device=device).device
    return {"kind": type(planes).__name__, "seconds": perf_counter() - start}


def _graphs(device: torch.device) -> str:
    """Record and replay a small computation, and again after all that was recorded has gone."""
    record = recorder(device)
    if record is None:
        return "none on a CPU"
    x = torch.ones(8, 8, device=device)

    def compute() -> Decoded:
        return Decoded(x @ x + x)

    for number in (1.0, 2.0):
        x.fill_(number)
        compute()  # Libraries initialise themselves.
        replay = record(compute)
        x.fill_(3.0)
        assert (replay().hidden_BH == 75.0).all(), "a recorded product is wrong"
        del replay
    return "work"


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def rows(device: Device, found: Found) -> None:
    """Measure decoding steps of few and of many rows beside what the machine allows."""
    scale = device.scale
    directory = scratch_directory()
    write_model(directory, scale.model, end_probability=0.0, dtype=DTYPE, device=device.name)
    gc.collect()
    limits = measure_limits(DTYPE, device.name)
    config = config_of(scale.model)
    first, last = scale.prompt_tokens
    for count in ROWS if device.is_cuda else ROWS[:2]:
        with found.part(f"{count} rows"):
            lengths = [first + i % (last - first + 1) for i in range(count)]
            prompts = sequences(lengths, vocab_size=config.vocab_size)
            run = _our_generation(device, directory, prompts)
            run(scale.few_tokens)
            few, many = (
                statistics.median(device.measured(partial(run, n))["seconds"] for _ in range(scale.repeats))
                for n in (scale.few_tokens, scale.new_tokens))
            step = (many - few) / (scale.new_tokens - scale.few_tokens)
            length = statistics.fmean(lengths) + (scale.few_tokens + scale.new_tokens) / 2
            flops, moved = decode_work(config, rows=count, length=length, dtype=DTYPE)
            least = max(flops / limits["peak_flops"], moved / limits["copy_bytes_per_second"])
            found.add(**{f"rows_{count}": {
                "step_seconds": step, "attainable_seconds": least, "efficiency": least / step,
                "tokens_per_second": count / step}})


def generation(device: Device, found: Found) -> None:
    """Compare the tokens per second with those of `generate`, and a step with what the machine allows."""
    scale = device.scale
    directory = scratch_directory()
    write_model(directory, scale.model, end_probability=0.0, dtype=DTYPE, device=device.name)
    gc.collect()
    config = config_of(scale.model)
    first, last = scale.prompt_tokens
    lengths = [first + i % (last - first + 1) for i in range(scale.rows)]
    prompts = sequences(lengths, vocab_size=config.vocab_size)
    sides = {"ours": partial(_our_generation, device, directory, prompts),
             "generate": partial(_their_generation, device, directory, prompts)}
    runs = {}
    weight_bytes = {}
    for name, side in sides.items():
        before = device.allocated()
        runs[name] = side()
        weight_bytes[name] = device.allocated() - before
    asks = {
        (name, n): partial(device.measured, partial(run, n), own_bytes=weight_bytes[name])
        for name, run in runs.items() for n in (scale.few_tokens, scale.new_tokens)}
    answers = alternate(asks, repeats=scale.repeats)  # type: ignore[arg-type]
    whole = {name: answers[name, scale.new_tokens] for name in runs}  # type: ignore[index]
    steps = {
        name: (_median(whole[name]) - _median(answers[name, scale.few_tokens]))  # type: ignore[index]
        / (scale.new_tokens - scale.few_tokens) for name in runs}
    limits = measure_limits(DTYPE, device.name)
    length = statistics.fmean(lengths) + (scale.few_tokens + scale.new_tokens) / 2
    flops, moved = decode_work(config, rows=scale.rows, length=length, dtype=DTYPE)
    least = max(flops / limits["peak_flops"], moved / limits["copy_bytes_per_second"])
    found.add(
        model=scale.model, dtype=DTYPE, samples=scale.rows, **_speeds(whole, "generate"),
        decode={"step_seconds": steps, "attainable_seconds": least, "efficiency": least / steps["ours"],
                **limits})
    found.add(profile=device.profile(lambda: runs["ours"](scale.few_tokens)))


def _our_generation(
    device: Device, directory: Path, prompts: list[list[int]]
) -> Callable[[int], dict[str, Any]]:
    engine = engine_of({"model": str(directory), "dtype": DTYPE}, World(device=device.name))
    columns = {"prompt_ids": Packed.of([torch.tensor(prompt) for prompt in prompts])}
    batch = Batch(list(range(len(prompts))), columns)
    prompt_tokens = sum(map(len, prompts))

    def run(new_tokens: int) -> dict[str, Any]:
        work = Generate(SamplingConfig(max_new_tokens=new_tokens), max_rows=len(prompts))
        call = FunctionCall(
            "actor_generate", inputs=("prompt_ids",), outputs=GENERATED, role="actor", work=work)
        generated = engine.generate(call, batch).batch
        tokens = len(generated["sequence_ids"].values) - prompt_tokens
        return {"tokens": tokens, "mapped_bytes": engine.mapped_bytes}

    return run


def _their_generation(
    device: Device, directory: Path, prompts: list[list[int]]
) -> Callable[[int], dict[str, Any]]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, DTYPE)).to(device.name)
    rows = device.scale.rows
    batches = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]

    @torch.no_grad()
    def run(new_tokens: int) -> dict[str, Any]:
        config = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens,
            eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id)
        return {"tokens": sum(padded(model, batch, config) for batch in batches)}

    return run


def training(device: Device, found: Found) -> None:
    """Measure optimizer steps on packed sequences: their share of the fastest matrix product (MFU), and the
    peak memory of training and of generation beside what the planner predicts."""
    scale = device.scale
    directory = scratch_directory()
    write_model(directory, scale.model, end_probability=0.0, device=device.name)
    gc.collect()
    torch.cuda.empty_cache()
    lengths = [scale.sequence_tokens] * scale.sequences
    rows = sequences(lengths, vocab_size=config_of(scale.model).vocab_size)
    settings = {"model": str(directory), "dtype": DTYPE, "optimizer": OPTIMIZER}
    before = device.allocated()
    engine = engine_of(settings, World(device=device.name))
    columns = {"sequence_ids": Packed.of([torch.tensor(row) for row in rows])}
    mask = Packed.of([(torch.arange(len(row)) > 0).float() for row in rows])
    columns |= {"response_mask": mask, "gen_logprobs": mask.like(-5 * mask.values), "advantages": mask}
    batch = Batch(list(range(len(rows))), columns)
    work = TrainStep(PolicyLoss(PolicyLossConfig()))
    call = FunctionCall("actor_train", inputs=tuple(columns), role="actor", work=work)

    def step() -> dict[str, Any]:
        return engine.train(call, [batch], micro_batch_tokens=scale.micro_batch_tokens)

    step()
    weight_bytes = device.allocated() - before
    answers = [device.measured(step, own_bytes=weight_bytes) for _ in range(scale.repeats)]
    limits = measure_limits(DTYPE, device.name)
    least = train_flops(config_of(scale.model), lengths) / limits["peak_flops"]
    found.add(
        mfu=least / _median(answers), tokens_per_second={"ours": sum(lengths) / _median(answers)},
        model=scale.model, dtype=DTYPE, micro_batch_tokens=scale.micro_batch_tokens, **limits)
    peaks = {"actor_train": max(answer["peak_bytes"] for answer in answers)}
    generate = _trained_generation(engine, scale)
    peaks["actor_generate"] = device.measured(generate, own_bytes=device.allocated() - before)["peak_bytes"]
    peaks["actor_generate"] += engine.mapped_bytes
    found.add(peak_gib={name: peak / 2**30 for name, peak in peaks.items()}, predicted_gib={
        "actor_train": _predicted_gib("actor_train", str(directory), scale, 1, scale.sequence_tokens - 1),
        "actor_generate": _predicted_gib(
            "actor_generate", str(directory), scale, scale.prompt_tokens[1], scale.new_tokens)})
    found.add(profile=device.profile(step))


def grpo(device: Device, found: Found) -> None:
    """Measure the calls of a GRPO step on random weights: generation, log-probs of the reference, update."""
    scale = device.scale
    directory = scratch_directory()
    write_model(directory, scale.model, end_probability=0.0, dtype=DTYPE, device=device.name)
    gc.collect()
    settings = {"model": str(directory), "dtype": DTYPE, "optimizer": OPTIMIZER}
    engine = engine_of(settings, World(device=device.name))
    first, last = scale.prompt_tokens
    lengths = [first + i % (last - first + 1) for i in range(scale.rows)]
    prompts = sequences(lengths, vocab_size=config_of(scale.model).vocab_size)
    columns = {"prompt_ids": Packed.of([torch.tensor(prompt) for prompt in prompts])}
    batch = Batch(list(range(scale.rows)), columns)
    work = Generate(SamplingConfig(max_new_tokens=scale.new_tokens), max_rows=scale.rows)
    generate = FunctionCall(
        "actor_generate", inputs=("prompt_ids",), outputs=GENERATED, role="actor", work=work)
    forward = FunctionCall(
        "ref_forward", inputs=GENERATED[:2], outputs=("logprobs",), role="actor", work=LogProbs())
    inputs = (*GENERATED[:3], "advantages")
    train = FunctionCall(
        "actor_train", inputs=inputs, role="actor", work=TrainStep(PolicyLoss(PolicyLossConfig())))
    tokens = sum(lengths) + scale.rows * scale.new_tokens
    for repeat in range(2):  # The first one compiles and records.
        made: dict[str, Batch] = {}
        seconds = {"generate": device.measured(
            lambda made=made: made.update(samples=engine.generate(generate, batch).batch) or {})["seconds"]}
        samples = made["samples"]
        seconds["logprobs"] = device.measured(lambda samples=samples: engine.forward(
            forward, samples.pick(GENERATED[:2]), micro_batch_tokens=scale.micro_batch_tokens) and {})[
                "seconds"]
        mask = samples["response_mask"]
        fields = {name: samples[name] for name in GENERATED[:3]}
        fields["advantages"] = mask.like(mask.values * 0.5)
        whole = Batch(samples.ids, fields)
        seconds["train"] = device.measured(lambda whole=whole: engine.train(
            train, [whole], micro_batch_tokens=scale.micro_batch_tokens) and {})["seconds"]
        name = "first_step" if repeat == 0 else "step"
        found.add(**{name: seconds | {
            "seconds": sum(seconds.values()), "tokens_per_second": tokens / sum(seconds.values())}})
    if device.is_cuda:
        found.add(peak_gib=torch.cuda.max_memory_allocated() / 2**30)


def _trained_generation(engine: NativeEngine, scale: Scale) -> Callable[[], dict[str, Any]]:
    """Return a generation by an engine that also trains."""
    prompts = sequences([scale.prompt_tokens[1]] * scale.rows, vocab_size=64)
    batch = Batch(
        list(range(scale.rows)), {"prompt_ids": Packed.of([torch.tensor(prompt) for prompt in prompts])})
    work = Generate(
        SamplingConfig(max_new_tokens=scale.new_tokens), max_rows=scale.rows, kv_cache_gib=CACHE_GIB)
    call = FunctionCall("actor_generate", inputs=("prompt_ids",), outputs=GENERATED, role="actor", work=work)

    def run() -> dict[str, Any]:
        engine.generate(call, batch)
        return {}

    return run


def _predicted_gib(call: str, directory: str, scale: Scale, prompt: int, response: int) -> float:
    """Return the memory that the planner predicts for a call of GRPO, without what the allocator does not
    see, for samples with these numbers of tokens."""
    num_samples = scale.rows if call == "actor_generate" else scale.sequences
    experiment = GRPO(
        actor=Role(directory, dtype=DTYPE, optimizer=OptimizerConfig(**OPTIMIZER)),  # type: ignore[arg-type]
        reward_function=_reward, sampling=SamplingConfig(max_new_tokens=response), kv_cache_gib=CACHE_GIB,
        max_rows=scale.rows, batch_size=num_samples, group_size=1, baseline="none", normalize="none",
        expected=Expected(prompt_tokens=prompt, response_tokens=response))
    cluster = replace(Cluster.load("h200-8x8"), num_hosts=1, devices_per_host=1)
    problem = problem_of(experiment, cluster)
    plan = ExecutionPlan.single(
        problem.graph, Layout.parse("d1@0"), micro_batch_tokens=scale.micro_batch_tokens)
    outside = ("communicators", "context")
    parts = check_memory(problem, plan).by_call[call].bytes_by_use
    return sum(size for part, size in parts.items() if not part.endswith(outside)) / 2**30


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


def _speeds(answers: dict[str, list[dict[str, Any]]], rival: str) -> dict[str, Any]:
    """Return the medians of both sides, and the ratio of ours to the other's in the same repetition."""
    rates = {name: [a["tokens"] / a["seconds"] for a in of_side] for name, of_side in answers.items()}
    return {
        "tokens_per_second": {name: statistics.median(rate) for name, rate in rates.items()},
        "ratio": statistics.median(a / b for a, b in zip(rates["ours"], rates[rival], strict=True)),
        "peak_gib": {
            name: max(a["peak_bytes"] for a in of_side) / 2**30 for name, of_side in answers.items()},
        "repetitions": answers,
    }


def _median(answers: list[dict[str, Any]]) -> float:
    return statistics.median(answer["seconds"] for answer in answers)


def scratch_directory() -> Path:
    """Make a scratch directory; the process that started this one removes it."""
    return Path(tempfile.mkdtemp(prefix="model-"))


KINDS = {
    "environment": environment, "generation": generation, "rows": rows, "training": training, "grpo": grpo}

if __name__ == "__main__":
    sys.exit(run_kind(KINDS, sys.argv[1:]))
