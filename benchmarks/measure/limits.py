"""Measures the limits of a machine, and counts the FLOPs and bytes of a model's work."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_GEMMS = ((1024, 1024, 1024), (2048, 2048, 2048), (256, 768, 32000), (256, 768, 4096), (4096, 768, 4096))
"""Square matrices, and the shapes in a model of 100M parameters."""
_CUDA_GEMMS = ((8192, 8192, 8192), (16384, 8192, 8192), (4096, 2048, 8192))
_COPY_BYTES, _CUDA_COPY_BYTES = 1 << 28, 1 << 32
"""Sizes that exceed the caches."""
_SECONDS_EACH = 0.4


def measure_limits(dtype: str, device: str = "cpu") -> dict[str, float]:
    """Measure the FLOP/s of the fastest matrix product and the bytes/s (read and written) of a copy."""
    make: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
    on_cuda = device.startswith("cuda")
    rates = []
    for m, k, n in _CUDA_GEMMS if on_cuda else _GEMMS:
        a, b = (torch.randn(rows, k, device=device).to(make["dtype"]) for rows in (m, n))
        run = partial(torch.matmul, a, b.T, out=torch.empty(m, n, **make))
        rates.append(2 * m * k * n / median_seconds(run, device=device))
    num_bytes = _CUDA_COPY_BYTES if on_cuda else _COPY_BYTES
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = source.clone()
    copy_seconds = median_seconds(partial(target.copy_, source), device=device)
    return {"peak_flops": max(rates), "copy_bytes_per_second": 2 * num_bytes / copy_seconds}


def median_seconds(run: Callable[[], object], *, device: str = "cpu") -> float:
    """Return the median seconds of a call, including the work that it has started on the device."""
    wait = torch.cuda.synchronize if device.startswith("cuda") else _nothing
    run()
    wait()
    times = list[float]()
    end = time.perf_counter() + _SECONDS_EACH
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _nothing() -> None:
    pass


def matrix_parameters(config: Any) -> int:
    """Count the parameters that multiply every token, output head included, for a Qwen2-like config."""
    c = config
    head = config.hidden_size // config.num_attention_heads
    attention = c.hidden_size * head * 2 * (c.num_attention_heads + c.num_key_value_heads)
    layer = attention + 3 * c.hidden_size * c.intermediate_size
    return c.num_hidden_layers * layer + c.vocab_size * c.hidden_size


def decode_work(config: Any, *, rows: int, length: float, dtype: str) -> tuple[float, float]:
    """Return the FLOPs and bytes of a decoding step of rows of this mean length.

    The step moves the weights, the cached keys and values, and the logits (float32) once.
    """
    c = config
    item = getattr(torch, dtype).itemsize
    head = c.hidden_size // c.num_attention_heads
    keys = rows * length * c.num_hidden_layers * head
    flops = 2 * rows * matrix_parameters(c) + 4 * keys * c.num_attention_heads
    moved = item * matrix_parameters(c) + 2 * item * keys * c.num_key_value_heads + 4 * rows * c.vocab_size
    return flops, moved


def train_flops(config: Any, lengths: list[int]) -> float:
    """Return the FLOPs of forward and backward pass: 6 per parameter and token, plus causal attention."""
    attention = 12 * config.num_hidden_layers * config.hidden_size * sum(n * n / 2 for n in lengths)
    return 6 * matrix_parameters(config) * sum(lengths) + attention
