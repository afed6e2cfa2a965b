"""Checks attention and generation on a device for gpu_check.py, one kind per process:

    python benchmarks/measure/gpu_generation.py attention|long-prompts|long-tail|no-waits DEVICE OUT.json

The measurements are in bfloat16 with random weights. A check fails by an exception, after what it has found
is written.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare.ours import GENERATED, engine_of
from benchmarks.measure.gpu_speed import Device, scratch_directory
from benchmarks.measure.limits import median_seconds
from benchmarks.measure.workloads import config_of, sequences, write_model
from realhf.calls import Generate, LogProbs, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall

_MOST_APART = 0.05
"""The largest legal mean difference between log-probs of the generator and of a forward pass, in bfloat16."""
_MOST_ERROR = 2e-2  # The largest legal error of attention, relative to its largest output.
_LATENT = "latent"
"""DeepSeek's attention to cached latents: one key-value head of 576 dims, of which the values are 512."""
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 100}, "soft cap": {"softcap": 50.0},
    "soft cap and window": {"softcap": 50.0, "window": 100}, _LATENT: {},
}
Found = dict[str, Any]


def attention(device: Device) -> Found:
    """Compare each kind of attention, as the package chooses its kernels, with the formula in float32."""
    if find_spec("realhf.attention") is None:
        return {"not_run": "this version has no realhf.attention"}
    interface = import_module("realhf.attention.interface")
    choose = import_module("realhf.attention.choose")
    reference = import_module("realhf.attention.reference").ReferenceAttention()
    lens = (8000, 513, 1, 64) if device.is_cuda else (90, 33, 1, 16)
    generator = torch.Generator().manual_seed(0)
    figures: Found = {"lengths": lens}
    for name, settings in _KINDS.items():
        kind = interface.AttentionKind(128**-0.5, **settings)
        where = torch.device(device.name)
        is_latent = name == _LATENT
        dim, value_dim = (576, 512) if is_latent else (128, 128)
        shape = interface.AttentionShape(kind, dim, value_dim, torch.bfloat16)
        backend = choose.paged_backend(where, shape)
        shapes = ((sum(lens), heads, dim) for heads in (8, *([1, 1] if is_latent else [2, 2])))
        q, k, v = (torch.randn(shape, generator=generator).bfloat16().to(where) for shape in shapes)
        qkv = [q, k, k[..., :value_dim] if is_latent else v]
        sequences = interface.Sequences.of(lens, where)
        exact = reference.packed(*(x.float() for x in qkv), sequences, kind)
        paged = _paged(interface, backend, qkv, lens, kind, exact, device)
        figures[name] = {"backend": backend.name, **paged}
        if not is_latent:
            run = partial(choose.packed_backend(where, shape).packed, *qkv, sequences, kind)
            figures[name]["packed_error"] = _error(run(), exact)
            figures[name]["packed_seconds"] = median_seconds(run, device=device.name)
    _require_errors(figures)
    return figures


def _paged(
    interface: Any, backend: Any, qkv: list[Tensor], lens: tuple[int, ...], kind: Any, exact: Tensor,
    device: Device,
) -> Found:
    """Compare the last tokens of each row, over pages in random order, with the same of the packed rows."""
    where = qkv[0].device
    page = max(16, backend.page_tokens)
    counts = [-(-length // page) for length in lens]
    numbers = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).to(where)
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32, device=where)
    cached = [x.new_zeros(sum(counts), page, *x.shape[1:]) for x in qkv[1:]]
    if qkv[1].data_ptr() == qkv[2].data_ptr():
        cached[1] = cached[0][..., : qkv[2].shape[-1]]
    keys, values = (x.split(lens) for x in qkv[1:])
    for row, (mine, *pair) in enumerate(zip(numbers.split(counts), keys, values, strict=True)):
        table[row, : len(mine)] = mine
        for pages, x in zip(cached, pair, strict=True):
            padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, len(mine) * page - len(x)))
            pages[mine.long()] = padded.unflatten(0, (-1, page))
    figures: Found = {}
    for name, most in (("decode", 1), ("chunk", 40)):
        queries = [min(most, length) for length in lens]
        ends = torch.tensor(lens).cumsum(0).tolist()
        chosen = torch.cat([torch.arange(end - n, end) for end, n in zip(ends, queries, strict=True)])
        chosen = chosen.to(where)
        cu = torch.tensor([0, *queries]).cumsum(0).int().to(where)
        pages_of_rows = interface.Pages(
            cu, max(queries), table, torch.tensor(lens).int().to(where), table.shape[1] * page)
        run = partial(backend.paged, qkv[0][chosen], *cached, pages_of_rows, kind)
        figures[f"{name}_error"] = _error(run()[0], exact[chosen])
        figures[f"{name}_seconds"] = median_seconds(run, device=device.name)
    return figures


def _error(computed: Tensor, exact: Tensor) -> float:
    return float((computed.float() - exact).abs().max() / exact.abs().max())


def _require_errors(found: Found) -> None:
    for name, figures in found.items():
        for key, value in figures.items() if isinstance(figures, dict) else ():
            if key.endswith("_error") and not value <= _MOST_ERROR:
                raise Failed(f"attention, {name}: {key} is {value:.3g}, above {_MOST_ERROR}", found)


class Failed(Exception):
    """A check that failed, with what it has found."""

    def __init__(self, sentence: str, found: Found) -> None:
        super().__init__(sentence)
        self.found = found


def long_prompts(device: Device) -> Found:
    """Generate from prompts of 8,000 tokens, and compare the log-probs with those of a forward pass."""
    count, length, new_tokens = (4, 8000, 64) if device.is_cuda else (2, 200, 8)
    engine = _engine(device, "1b")
    lengths = [length - 7 * i for i in range(count)]
    measured = device.measured(lambda: {"batch": _generate(
        engine, lengths, new_tokens=new_tokens, prefill_tokens=2048 if device.is_cuda else 64)})
    apart = _apart(engine, measured.pop("batch"))
    tokens = sum(lengths) + count * new_tokens
    speed = tokens / measured["seconds"]
    figures = {"tokens_per_second": speed, "peak_gib": measured["peak_bytes"] / 2**30, **apart}
    return _with_small_mismatch(figures)


def long_tail(device: Device) -> Found:
    """Generate with 512 rows at once, of which a few get far longer than the others."""
    rows, new_tokens = (512, 1024) if device.is_cuda else (24, 24)
    engine = _engine(device, "1b", end_probability=8 / new_tokens)
    lengths = [16 + i % 48 for i in range(2 * rows)]
    run = partial(_generate, engine, lengths, new_tokens=new_tokens, max_rows=rows)
    measured = device.measured(lambda: {"batch": run()})
    batch = measured.pop("batch")
    eager = run(cuda_graphs=False)
    answers = [row - n for row, n in zip(batch["sequence_ids"].lengths, lengths, strict=True)]
    pairs = zip(batch["sequence_ids"].split(), eager["sequence_ids"].split(), strict=True)
    figures = {
        "tokens_per_second": sum(answers) / measured["seconds"], "peak_gib": measured["peak_bytes"] / 2**30,
        "longest_answer": max(answers), "mean_answer": sum(answers) / len(answers),
        "same_without_graphs": sum(torch.equal(a, b) for a, b in pairs) / len(lengths),
        **_apart(engine, batch),
    }
    return _with_small_mismatch(figures)


def no_waits(device: Device) -> Found:
    """Decode with 64 rows while torch refuses what makes the host wait for the device."""
    rows, new_tokens = (64, 160) if device.is_cuda else (8, 40)
    engine = _engine(device, "1b")
    first, last = new_tokens // 4, new_tokens * 3 // 4  # The steps before capture graphs.
    step = 0

    def report(_: str) -> None:
        nonlocal step
        step += 1
        if device.is_cuda and step in (first, last):
            torch.cuda.set_sync_debug_mode("error" if step == first else "default")

    with _default_debug_mode(device):
        lengths = [16 + i % 48 for i in range(rows)]
        try:
            _generate(engine, lengths, new_tokens=new_tokens, max_rows=rows, report=report)
        except RuntimeError as error:
            figures = {"steps": step, "waits": str(error).partition("\n")[0]}
            raise Failed(f"the host waited in step {step}: {figures['waits']}", figures) from error
    return {"steps": step, "watched_steps": last - first, "waits": None}


@contextmanager
def _default_debug_mode(device: Device) -> Iterator[None]:
    try:
        yield
    finally:
        if device.is_cuda:
            torch.cuda.set_sync_debug_mode("default")


def _engine(device: Device, size: str, *, end_probability: float = 0.0) -> NativeEngine:
    directory = scratch_directory()
    size = size if device.is_cuda else "tiny"
    write_model(
        directory, size, end_probability=end_probability, dtype="bfloat16", device=device.name)
    return engine_of({"model": str(directory), "dtype": "bfloat16"}, World(device=device.name))


def _generate(
    engine: NativeEngine, lengths: list[int], *, new_tokens: int, report: Any = None, **settings: Any
) -> Batch:
    """Return the sequences that continue random prompts of these lengths."""
    prompts = sequences(lengths, vocab_size=config_of("tiny").vocab_size)
    columns = {"prompt_ids": Packed.of([torch.tensor(prompt) for prompt in prompts])}
    work = Generate(SamplingConfig(max_new_tokens=new_tokens), **settings)
    call = FunctionCall("actor_generate", inputs=("prompt_ids",), outputs=GENERATED, role="actor", work=work)
    batch = Batch(list(range(len(lengths))), columns)
    more = {} if report is None else {"report": report}
    return engine.generate(call, batch, **more).batch


def _apart(engine: NativeEngine, generated: Batch) -> Found:
    """Compare the generator's log-probs with those of a forward pass."""
    work = LogProbs()
    call = FunctionCall("actor_forward", inputs=GENERATED[:2], outputs=("logprobs",), role="actor", work=work)
    sequences = generated.pick(GENERATED[:2])
    again = engine.forward(call, sequences, micro_batch_tokens=16384)["logprobs"].values
    mask = generated["response_mask"].values != 0
    apart = (again.double() - generated["gen_logprobs"].values.double())[mask].abs()
    return {"logprobs_apart_mean": float(apart.mean()), "logprobs_apart_max": float(apart.max())}


def _with_small_mismatch(figures: Found) -> Found:
    if not figures["logprobs_apart_mean"] <= _MOST_APART:
        raise Failed(f"log-probs differ by {figures['logprobs_apart_mean']:.3g} in the mean", figures)
    return figures


KINDS = {
    "attention": attention, "long-prompts": long_prompts, "long-tail": long_tail, "no-waits": no_waits,
}

if __name__ == "__main__":
    kind_name, device_name, out = sys.argv[1:4]
    try:
        result = KINDS[kind_name](Device(device_name))
    except Failed as failure:
        Path(out).write_text(json.dumps(failure.found))
        raise
    Path(out).write_text(json.dumps(result))
