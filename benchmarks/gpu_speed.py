"""Measures speed for gpu_check.py, one kind per process:

    python benchmarks/gpu_speed.py environment|generation|training DEVICE OUT.json [equal|spread]

Both sides run in this process, in turns, in bfloat16 on the same random weights. The model is "1b" of
workloads.py on CUDA, "tiny" on the CPU. The memory of a side includes its weights, but not the other side's.
"""

import gc
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch
import transformers
from limits import decode_work, measure_limits, median_seconds, train_flops
from ours import GENERATED, engine_of, train_step
from sides import alternate
from theirs import padded, padded_rows
from transformers import AutoModelForCausalLM, GenerationConfig
from workloads import config_of, geometric_lengths, sequences, write_model

from realhf.calls import Generate, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.dist.world import World
from realhf.graph import FunctionCall

DTYPE = "bfloat16"
PINNED_BYTES = 1 << 28
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
    micro_batch_sequences: int  # For the other side; our micro-batches have as many tokens.
    repeats: int


SCALES = {
    "cuda": Scale("1b", 256, (64, 128), 16, 128, 32, 1024, 4, 3),
    "cpu": Scale("tiny", 16, (8, 16), 4, 16, 16, 64, 4, 1),
}


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

        The peak is `own_bytes`, which the side always has, plus what the work adds.
        """
        if self.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, start = self.allocated(), perf_counter()
        found = work()
        if self.is_cuda:
            torch.cuda.synchronize()
        seconds = perf_counter() - start
        peak = torch.cuda.max_memory_allocated() - before + own_bytes if self.is_cuda else 0
        return found | {"seconds": seconds, "peak_bytes": peak}

    def allocated(self) -> int:
        return torch.cuda.memory_allocated() if self.is_cuda else 0

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


def environment(device: Device, _: str) -> dict[str, Any]:
    """Return the machine and its limits."""
    found: dict[str, Any] = {
        "python": sys.version.split()[0], "torch": torch.__version__,
        "transformers": transformers.__version__, "flash_attn": find_spec("flash_attn") is not None,
        "tyro": find_spec("tyro") is not None,
    }  # fmt: skip
    if device.is_cuda:
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "gpu": properties.name, "memory_gib": properties.total_memory / 2**30, "driver": _driver(),
            "cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }  # fmt: skip
        source = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=device.name)
        seconds = median_seconds(partial(target.copy_, source, non_blocking=True), device=device.name)
        found["pinned_to_device_bytes_per_second"] = PINNED_BYTES / seconds
    for dtype in ("float32", DTYPE):
        found[dtype] = measure_limits(dtype, device.name)
    return found


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()


def generation(device: Device, workload: str) -> dict[str, Any]:
    """Compare tokens per second with those of `generate`, and a decoding step with what the machine allows.

    equal: `rows` samples of the same length; spread: four times as many samples of geometric lengths.
    """
    scale = device.scale
    directory = _directory()
    end = 4 / scale.new_tokens if workload == "spread" else 0.0
    write_model(directory, scale.model, end_probability=end, dtype=DTYPE, device=device.name)
    gc.collect()
    config = config_of(scale.model)
    first, last = scale.prompt_tokens
    count = scale.rows * (4 if workload == "spread" else 1)
    lengths = [first + i % (last - first + 1) for i in range(count)]
    prompts = sequences(lengths, vocab_size=config.vocab_size)
    sides = {"ours": partial(_our_generation, device, directory, prompts),
             "generate": partial(_their_generation, device, directory, prompts)}  # fmt: skip
    made = {}
    own = {}
    for name, side in sides.items():
        before = device.allocated()
        made[name] = side()
        own[name] = device.allocated() - before
    asks = {
        (name, n): partial(device.measured, partial(run, n), own_bytes=own[name])
        for name, run in made.items()
        for n in ((scale.few_tokens, scale.new_tokens) if workload == "equal" else (scale.new_tokens,))}
    answers = alternate(asks, repeats=scale.repeats)  # type: ignore[arg-type]
    whole = {name: answers[name, scale.new_tokens] for name in made}  # type: ignore[index]
    found = {"model": scale.model, "dtype": DTYPE, "samples": count, **_speeds(whole, "generate")}
    if workload == "equal":
        steps = {
            name: (_median(whole[name]) - _median(answers[name, scale.few_tokens]))  # type: ignore[index]
            / (scale.new_tokens - scale.few_tokens) for name in made}
        limits = measure_limits(DTYPE, device.name)
        length = statistics.fmean(lengths) + (scale.few_tokens + scale.new_tokens) / 2
        flops, moved = decode_work(config, rows=scale.rows, length=length, dtype=DTYPE)
        least = max(flops / limits["peak_flops"], moved / limits["copy_bytes_per_second"])
        found["decode"] = {
            "step_seconds": steps, "attainable_seconds": least, "efficiency": least / steps["ours"], **limits}
        found["profile"] = device.profile(lambda: made["ours"](scale.few_tokens))
    return found


def _our_generation(
    device: Device, directory: Path, prompts: list[list[int]]
) -> Callable[[int], dict[str, Any]]:
    engine = engine_of({"model": str(directory), "dtype": DTYPE}, World(device=device.name))
    columns = {"prompt_ids": Packed.of([torch.tensor(prompt) for prompt in prompts])}
    batch = Batch(list(range(len(prompts))), columns)
    given = sum(map(len, prompts))

    def run(new_tokens: int) -> dict[str, Any]:
        work = Generate(SamplingConfig(max_new_tokens=new_tokens), max_rows=device.scale.rows)
        call = FunctionCall(
            "actor_generate", "generate", ("prompt_ids",), GENERATED, role="actor", work=work)
        made = engine.run(call, [batch], micro_batch_tokens=8192).batch
        return {"tokens": len(made["sequence_ids"].values) - given}

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


def training(device: Device, workload: str) -> dict[str, Any]:
    """Compare optimizer steps with a loop over padded micro-batches: tokens per second, share of the peak.

    bfloat16 is mixed precision on both sides: theirs is autocast. equal: sequences of one length; spread:
    twice as many, geometric with a mean of a quarter.
    """
    scale = device.scale
    directory = _directory()
    write_model(directory, scale.model, end_probability=0.0, device=device.name)
    gc.collect()
    config = config_of(scale.model)
    lengths = [scale.sequence_tokens] * scale.sequences
    if workload == "spread":
        lengths = geometric_lengths(
            2 * scale.sequences, mean=scale.sequence_tokens / 4, most=scale.sequence_tokens)
    rows = sequences(lengths, vocab_size=config.vocab_size)
    (directory / "rows.json").write_text(json.dumps(rows))
    micro_batch = scale.micro_batch_sequences * scale.sequence_tokens
    settings = {
        "model": str(directory), "data": str(directory / "rows.json"), "dtype": DTYPE,
        "optimizer": OPTIMIZER, "micro_batch": micro_batch,
    }  # fmt: skip
    before = device.allocated()
    ours = train_step(settings, World(device=device.name))
    middle = device.allocated()
    theirs = _padded_loop(device, directory, rows)
    theirs()  # Allocates the optimizer's state.
    asks: dict[str, Any] = {
        "ours": partial(device.measured, ours, own_bytes=middle - before),
        "padded": partial(device.measured, theirs, own_bytes=device.allocated() - middle),
    }
    ours()  # Both sides have then made as many steps.
    answers = alternate(asks, repeats=scale.repeats)
    tokens = {name: [answer | {"tokens": sum(lengths)} for answer in x] for name, x in answers.items()}
    limits = measure_limits(DTYPE, device.name)
    least = train_flops(config, lengths) / limits["peak_flops"]
    apart = [abs(a["loss"] / b["loss"] - 1) for a, b in zip(answers["ours"], answers["padded"], strict=True)]
    return {
        "model": scale.model, "dtype": DTYPE, "micro_batch_tokens": micro_batch,
        **_speeds(tokens, "padded"), "losses_apart": max(apart),
        "efficiency": {name: least / _median(found) for name, found in answers.items()}, **limits,
        "profile": device.profile(ours),
    }  # fmt: skip


def _padded_loop(device: Device, directory: Path, rows: list[list[int]]) -> Callable[[], dict[str, Any]]:
    """Return a train step over padded micro-batches, as Trainer does it."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device.name).train()
    betas = (OPTIMIZER["betas"][0], OPTIMIZER["betas"][1])  # type: ignore[index]
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=betas, weight_decay=0.01, fused=True)
    size = device.scale.micro_batch_sequences
    targets = sum(len(row) - 1 for row in rows)

    def run() -> dict[str, Any]:
        loss = torch.zeros((), device=device.name)
        for start in range(0, len(rows), size):
            batch = {name: x.to(device.name) for name, x in padded_rows(rows[start : start + size]).items()}
            with torch.autocast(device.name.split(":")[0], torch.bfloat16):
                part = model(**batch, num_items_in_batch=targets, use_cache=False).loss
            part.backward()
            loss += part.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.item(), "grad_norm": norm.item()}

    return run


def _speeds(answers: dict[str, list[dict[str, Any]]], rival: str) -> dict[str, Any]:
    """Return the medians of both sides, and the ratio of ours to the other's in the same repetition."""
    rates = {name: [a["tokens"] / a["seconds"] for a in found] for name, found in answers.items()}
    return {
        "tokens_per_second": {name: statistics.median(rate) for name, rate in rates.items()},
        "ratio": statistics.median(a / b for a, b in zip(rates["ours"], rates[rival], strict=True)),
        "peak_gib": {
            name: max(a["peak_bytes"] for a in found) / 2**30 for name, found in answers.items()},
        "repetitions": answers,
    }  # fmt: skip


def _median(answers: list[dict[str, Any]]) -> float:
    return statistics.median(answer["seconds"] for answer in answers)


def _directory() -> Path:
    """Make a scratch directory; the process that started this one removes it."""
    return Path(tempfile.mkdtemp(prefix="model-"))


KINDS = {"environment": environment, "generation": generation, "training": training}

if __name__ == "__main__":
    kind, device_name, out, *rest = sys.argv[1:]
    result = KINDS[kind](Device(device_name), rest[0] if rest else "")
    Path(out).write_text(json.dumps(result))
