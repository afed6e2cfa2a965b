"""Checks attention and generation on a device for gpu_check.py, one kind per process:

    python benchmarks/measure/gpu_generation.py KIND DEVICE OUT.json

The kinds are in `KINDS`. The measurements are in bfloat16 with random weights. Each figure is written as soon
as it is known.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare.ours import GENERATED, engine_of
from benchmarks.measure.gpu_speed import Device, Found, run_kind, scratch_directory
from benchmarks.measure.limits import median_seconds
from benchmarks.measure.workloads import config_of, sequences, write_model
from realhf.attention.choose import refuses_chains
from realhf.attention.reference import ReferenceAttention
from realhf.calls import Generate, LogProbs, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.devices import half_precision
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.inference.page_pool import PagePool, page_pool
from realhf.inference.sampling import draw_by_kernels, nucleus_threshold, sample
from realhf.models.model_config import ModelConfig
from realhf.nn.fused import chains_of
from realhf.nn.linear import Int8Weight
from realhf.nn.mlp import ACTIVATIONS
from realhf.nn.norm import Norm
from realhf.nn.rope import rotate
from realhf.runtime.execute.meters import resident_bytes

_MOST_APART = 0.05
"""The largest legal mean difference between log-probs of the generator and of a forward pass, in bfloat16."""
_MOST_ERROR = 2e-2  # The largest legal error of attention, relative to its largest output.
_MOST_ERROR_OF_SUMS = 1e-5  # The same of products that are added up in float32.
_LATENT = "latent"
"""DeepSeek's attention to cached latents: one key-value head of 576 dims, of which the values are 512."""
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 100}, "soft cap": {"softcap": 50.0},
    "soft cap and window": {"softcap": 50.0, "window": 100}, _LATENT: {},
}


def attention(device: Device, found: Found) -> None:
    """Compare each kind of attention, as the package chooses its kernels, with the formula in float32."""
    interface = import_module("realhf.attention.interface")
    choose = import_module("realhf.attention.choose")
    reference = import_module("realhf.attention.reference").ReferenceAttention()
    lens = (8000, 513, 1, 64) if device.is_cuda else (90, 33, 1, 16)
    generator = torch.Generator().manual_seed(0)
    found.add(lengths=lens)
    for name, settings in _KINDS.items():
        with found.part(name):
            found.add(**{name: _attention(
                name, settings, lens, interface, choose, reference, generator, device)})
            _require_errors(name, found[name])


def _attention(
    name: str, settings: dict[str, Any], lens: tuple[int, ...], interface: Any, choose: Any, reference: Any,
    generator: torch.Generator, device: Device,
) -> dict[str, Any]:
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
    figures = {"backend": backend.name, **_paged(interface, backend, qkv, lens, kind, exact, device)}
    if not is_latent:
        run = partial(choose.packed_backend(where, shape).packed, *qkv, sequences, kind)
        figures["packed_error"] = _error(run(), exact)
        figures["packed_seconds"] = median_seconds(run, device=device.name)
    return figures


def _paged(
    interface: Any, backend: Any, qkv: list[Tensor], lens: tuple[int, ...], kind: Any, exact: Tensor,
    device: Device,
) -> dict[str, Any]:
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
    figures: dict[str, Any] = {}
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


def _require_errors(name: str, figures: dict[str, Any]) -> None:
    for key, value in figures.items():
        if key.endswith("_error") and not value <= _MOST_ERROR:
            raise Failed(f"{name}: {key} is {value:.3g}, above {_MOST_ERROR}")


class Failed(Exception):
    """A check that failed."""


def long_prompts(device: Device, found: Found) -> None:
    """Generate from prompts of 8,000 tokens, and compare the log-probs with those of a forward pass."""
    count, length, new_tokens = (4, 8000, 64) if device.is_cuda else (2, 200, 8)
    engine = _engine(device, "1b")
    lengths = [length - 7 * i for i in range(count)]
    measured = device.measured(lambda: {"batch": _generate(
        engine, lengths, new_tokens=new_tokens, prefill_tokens=2048 if device.is_cuda else 64)})
    tokens = sum(lengths) + count * new_tokens
    found.add(
        tokens_per_second=tokens / measured["seconds"], peak_gib=measured["peak_bytes"] / 2**30)
    found.add(**_apart(engine, measured.pop("batch")))
    _require_small_mismatch(found)


def long_tail(device: Device, found: Found) -> None:
    """Generate with 512 rows at once, of which a few get far longer than the others."""
    rows, new_tokens = (512, 1024) if device.is_cuda else (24, 24)
    engine = _engine(device, "1b", end_probability=8 / new_tokens)
    lengths = [16 + i % 48 for i in range(2 * rows)]
    run = partial(_generate, engine, lengths, new_tokens=new_tokens, max_rows=rows)
    measured = device.measured(lambda: {"batch": run()})
    batch = measured.pop("batch")
    answers = [row - n for row, n in zip(batch["sequence_ids"].lengths, lengths, strict=True)]
    found.add(
        tokens_per_second=sum(answers) / measured["seconds"], peak_gib=measured["peak_bytes"] / 2**30,
        longest_answer=max(answers), mean_answer=sum(answers) / len(answers))
    found.add(**_apart(engine, batch))
    eager = run(cuda_graphs=False)
    pairs = zip(batch["sequence_ids"].split(), eager["sequence_ids"].split(), strict=True)
    found.add(same_without_graphs=sum(torch.equal(a, b) for a, b in pairs) / len(lengths))
    _require_small_mismatch(found)


def no_waits(device: Device, found: Found) -> None:
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
            found.add(steps=step, waits=str(error).partition("\n")[0])
            raise Failed(f"the host waited in step {step}: {found['waits']}") from error
    found.add(steps=step, watched_steps=last - first, waits=None)


def pages(device: Device, found: Found) -> None:
    """Give the memory of pages back to the device and take it again, under passes that are recorded."""
    rows, new_tokens = (512, 96) if device.is_cuda else (24, 24)
    engine = _engine(device, "1b")
    if not device.is_cuda:  # A CPU has no pages; the reference attends to them, and nothing is recorded.
        engine.pages = page_pool(engine.model, ReferenceAttention())
    pool = engine.pages
    assert pool is not None
    lengths = [16 + i % 48 for i in range(rows)]
    run = partial(_generate, engine, lengths, new_tokens=new_tokens, max_rows=rows)
    run()
    expected = run()["sequence_ids"].values
    held = pool.mapped_bytes
    num_pages = pool.cache.num_blocks - 1
    recorded = _num_recorded(pool)
    found.add(page_bytes=pool.num_bytes, mapped_bytes=held, recorded=recorded)
    if not held:
        raise Failed("the pages are in the memory of torch's allocator: is cuda-bindings installed?")
    before = _free_bytes(device)
    start = perf_counter()
    engine.release("cache")
    found.add(release_seconds=perf_counter() - start, freed_bytes=_free_bytes(device) - before)
    if device.is_cuda and found["freed_bytes"] < 0.9 * held:
        raise Failed(f"{found['freed_bytes']} bytes came back, of {held}")
    start = perf_counter()
    pool.give_back(pool.lease(num_pages, page_size=pool.cache.block_size))
    if device.is_cuda:
        torch.cuda.synchronize()
    found.add(map_seconds=perf_counter() - start)
    again = run()["sequence_ids"].values
    found.add(same_tokens=float((again == expected).float().mean()) if len(again) == len(expected) else 0.0)
    if _num_recorded(pool) != recorded:
        raise Failed(f"{recorded} passes were recorded, and {_num_recorded(pool)} afterwards")
    if found["same_tokens"] < 1:
        raise Failed(f"only {found['same_tokens']:.0%} of the tokens are the same")


def _num_recorded(pool: PagePool) -> int:
    return 0 if pool.graphs is None else sum(is_recorded == "True" for *_, is_recorded in pool.graphs.known)


def _free_bytes(device: Device) -> int:
    return torch.cuda.mem_get_info()[0] if device.is_cuda else -resident_bytes()


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


def _apart(engine: NativeEngine, generated: Batch) -> dict[str, Any]:
    """Compare the generator's log-probs with those of a forward pass."""
    work = LogProbs()
    call = FunctionCall("actor_forward", inputs=GENERATED[:2], outputs=("logprobs",), role="actor", work=work)
    sequences = generated.pick(GENERATED[:2])
    again = engine.forward(call, sequences, micro_batch_tokens=16384)["logprobs"].values
    mask = generated["response_mask"].values != 0
    apart = (again.double() - generated["gen_logprobs"].values.double())[mask].abs()
    return {"logprobs_apart_mean": float(apart.mean()), "logprobs_apart_max": float(apart.max())}


def _require_small_mismatch(found: Found) -> None:
    if not found["logprobs_apart_mean"] <= _MOST_APART:
        raise Failed(f"log-probs differ by {found['logprobs_apart_mean']:.3g} in the mean")


def kernels(device: Device, found: Found) -> None:
    """Compare the kernels of element-wise chains and of sampling with torch's operations, and time both."""
    config = ModelConfig("llama", 151936 if device.is_cuda else 5000, 1536, 8960, 1, 12, 2, 128)
    rows = 64 if device.is_cuda else 4
    chains = chains_of(torch.empty(1, device=device.name), torch.bfloat16)
    found.add(chains=refuses_chains(torch.device(device.name), torch.bfloat16) or "Triton")
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(device.name)

    x, y, up, weight = (draw(rows, 1536), draw(rows, 1536), draw(rows, 2 * 8960), draw(1536))
    norm = Norm(config, {"n.weight": weight}, "n")
    function = ACTIVATIONS["silu"]
    pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {}
    if chains is not None:
        pairs["add_norm"] = (
            lambda: chains.add_norm(x, y, scale=1.0, out_norm=None, norm=norm)[1], lambda: norm(x + y))
        pairs["gated"] = (
            lambda: chains.gated(up, "silu"),
            lambda: function.compute(up[:, :8960]) * up[:, 8960:])
        latent, angles = Norm(config, {"n.weight": draw(512)}, "n"), (draw(rows, 1, 32), draw(rows, 1, 32))
        q, kv = draw(rows, 128, 192), draw(rows, 576)
        turn = partial(rotate, angles=angles, interleaved=True)
        pairs["rotate_latent"] = (
            lambda: chains.rotate_latent(
                q, kv, norm=latent, angles=angles, interleaved=True, place=None)[1],
            lambda: torch.cat((latent(kv[:, :512])[:, None], turn(kv[:, None, 512:].clone())), dim=2))
    logits = draw(rows, config.vocab_size)
    uniform = torch.rand(rows, dtype=torch.float64, generator=generator).to(device.name)
    group = World(device=device.name).group((0,))
    for name, sampling in (
        ("sample", SamplingConfig()), ("top_p", SamplingConfig(top_p=0.9)),
        ("top_k_top_p", SamplingConfig(top_k=50, top_p=0.9)), ("greedy", SamplingConfig(temperature=0.0)),
    ):
        wide = partial(sample, config=sampling, vocab_start=0, group=group)
        ours = partial(draw_by_kernels, config=sampling, scale=1.0, softcap=None)
        if chains is not None:
            pairs[name] = (
                lambda ours=ours: ours(logits, uniform)[0],
                lambda wide=wide: wide(logits.float(), uniform)[0])
        else:
            pairs[name] = (lambda wide=wide: wide(logits.float(), uniform)[0],) * 2
    pairs["sort"] = (lambda: nucleus_threshold(logits.float(), 0.9), partial(_by_sort, logits.float(), 0.9))
    with found.part("int8"):
        _int8(device, found)
    with found.part("weight_gradient"):
        _weight_gradient(device, found, draw(4 * rows, 1536), draw(4 * rows, 512))
    for name, (by_kernels, by_torch) in pairs.items():
        with found.part(name), torch.inference_mode():
            made, wanted = by_kernels(), by_torch()
            apart = float((made.double() - wanted.double()).abs().max() / wanted.double().abs().max())
            found.add(**{name: {
                "seconds": median_seconds(by_kernels, device=device.name),
                "torch_seconds": median_seconds(by_torch, device=device.name),
                "apart": apart, "equal": float((made == wanted).float().mean())}})
            is_chain = name in ("add_norm", "gated", "rotate_latent")
            if not apart <= _MOST_ERROR and is_chain:
                raise Failed(f"{name} differs by {apart:.3g}")
            if not is_chain and found[name]["equal"] < 0.95:
                raise Failed(f"{name} gives other results in {1 - found[name]['equal']:.0%} of the rows")


def _int8(device: Device, found: Found) -> None:
    """Multiply few and many rows with weights in int8, and time that beside the same weights in bfloat16.

    The shapes are those of the two products of an MLP."""
    width = 8960 if device.is_cuda else 96
    generator = torch.Generator().manual_seed(0)
    times: dict[str, Any] = {}
    for num_outputs, num_inputs in ((2 * width, 1536), (1536, width)):
        values = torch.randint(-127, 128, (num_outputs, num_inputs), generator=generator, dtype=torch.int8)
        weight = Int8Weight(values.to(device.name), requires_grad=False)
        weight.scale_O = (torch.rand(num_outputs, generator=generator) / 100).bfloat16().to(device.name)
        plain = weight.dequantised()
        for rows in (1, 16, 64, 256):
            x = torch.randn(rows, num_inputs, generator=generator).bfloat16().to(device.name)
            run, beside = partial(weight.product, x), partial(torch.nn.functional.linear, x, plain)
            wanted = (x.double() @ weight.data.double().T) * weight.scale_O.double()
            apart = float((run().double() - wanted).abs().max() / wanted.abs().max())
            times[f"{rows}x{num_inputs}x{num_outputs}"] = {
                "seconds": median_seconds(run, device=device.name),
                "bfloat16_seconds": median_seconds(beside, device=device.name), "apart": apart}
            found.add(int8=times)
            if not apart <= _MOST_ERROR:
                raise Failed(f"{rows} rows with a weight in int8 differ by {apart:.3g}")


def _weight_gradient(device: Device, found: Found, grad: Tensor, x: Tensor) -> None:
    """Add the gradient of a weight twice to a float32 sum, and compare that with the same in float64."""
    total = torch.full((grad.shape[1], x.shape[1]), torch.nan, device=device.name)
    for is_empty in (True, False):
        half_precision.add_product(total, grad, x, is_empty=is_empty)
    wanted = 2 * (grad.double().T @ x.double())
    apart = float((total - wanted).abs().max() / wanted.abs().max())
    in_product = device.is_cuda and half_precision.adds_in_product(torch.device(device.name))
    found.add(weight_gradient={"apart": apart, "added_by_the_product": in_product})
    if not apart <= _MOST_ERROR_OF_SUMS:
        raise Failed(f"the gradient of a weight differs by {apart:.3g}")


def _by_sort(logits: Tensor, top_p: float) -> Tensor:
    ranked = logits.sort(-1, descending=True).values
    probs = ranked.double().softmax(-1)
    outside = probs.cumsum(-1) - probs >= top_p
    return ranked.masked_fill(outside, torch.inf).amin(-1)


def launches(device: Device, found: Found) -> None:
    """Count the kernels of decoding, by the profiler: without recording, per token of a row."""
    engine = _engine(device, "1.5b")
    layers = len(engine.model.blocks)
    few, many = (8, 24) if device.is_cuda else (4, 8)
    counts = {}
    for new_tokens in (few, many):
        run = partial(
            _generate, engine, [16] * 4, new_tokens=new_tokens, max_rows=4, cuda_graphs=False)
        run()
        counts[new_tokens] = device.count_kernels(run)
    per_step = (counts[many] - counts[few]) / (many - few)
    found.add(layers=layers, kernels_per_step=per_step, kernels_per_layer=per_step / layers)
    if device.is_cuda:
        before = torch.cuda.memory_reserved()
        _generate(engine, [16] * 4, new_tokens=few, max_rows=4)
        found.add(bytes_of_graphs=torch.cuda.memory_reserved() - before)


KINDS = {
    "kernels": kernels, "launches": launches, "attention": attention, "long-prompts": long_prompts,
    "long-tail": long_tail, "no-waits": no_waits, "pages": pages,
}

if __name__ == "__main__":
    sys.exit(run_kind(KINDS, sys.argv[1:]))
