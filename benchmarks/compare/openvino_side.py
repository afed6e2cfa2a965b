"""The side of openvino-genai's continuous batching, in its own environment; sides.py describes the protocol.

`model` is a directory that `optimum-cli export openvino` has written. Computation and cache have the
precision that is asked for, which openvino does not promise by default; the weights are those of the export.
Prompts are not kept from one call to the next: new weights would make their keys and values worthless.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare.sides import Desk, Measured, memory_bytes

_PAGE_TOKENS = 32
_BATCH_TOKENS = 8192  # Tokens of a pass: those of all prompts at once, as ours.
_PRECISION = {"float32": "f32", "bfloat16": "bf16"}


def generate(desk: Desk) -> None:
    """Generate for all prompts in one call, as many at once as the settings have rows."""
    import openvino
    import openvino_genai

    settings = desk.settings
    base = memory_bytes("VmRSS")
    scheduler = openvino_genai.SchedulerConfig()
    prompts = json.loads(Path(settings["data"]).read_text())
    longest = max(map(len, prompts)) + settings["most_tokens"]
    scheduler.max_num_seqs = settings["rows"]
    scheduler.num_kv_blocks = settings["rows"] * -(-longest // _PAGE_TOKENS) + settings["rows"]
    scheduler.max_num_batched_tokens = _BATCH_TOKENS
    properties = {
        "INFERENCE_PRECISION_HINT": _PRECISION[settings["dtype"]],
        "KV_CACHE_PRECISION": _PRECISION[settings["dtype"]],
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,  # No activations in int8.
        "INFERENCE_NUM_THREADS": settings["threads"]}
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        settings["openvino_model"], scheduler_config=scheduler, device="CPU", properties=properties)
    inputs = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
    desk.answer(base_bytes=base)
    for number, request in enumerate(desk.requests()):
        configs = [
            _config(openvino_genai.GenerationConfig(), settings, request, seed=number * len(inputs) + i)
            for i in range(len(inputs))]
        with Measured() as measured:
            results = pipeline.generate(inputs, configs)
        desk.answer(tokens=sum(len(result.m_generation_ids[0]) for result in results), **measured.cost)


def _config(config: Any, settings: dict[str, Any], request: dict[str, Any], *, seed: int) -> Any:
    """Return a configuration of one prompt."""
    config.max_new_tokens = request["max_new_tokens"]
    config.do_sample = True
    config.temperature = 1.0
    config.top_p = 1.0
    config.rng_seed = seed
    config.ignore_eos = not settings["ends"]
    return config


if __name__ == "__main__":
    at_desk = Desk()
    at_desk.serve(generate)
