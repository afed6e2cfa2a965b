"""Measures generation on this CPU with weights in int8 beside full ones: tokens per second, and how far apart
the log-probs are. Prints JSON.

    OMP_NUM_THREADS=1 python benchmarks/measure/int8_generation.py --layers 6 --rows 1 4 16 64

The model has random weights with the widths of Qwen2.5-0.5B and a vocabulary of 16,384.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from realhf.calls import Generate, LogProbs, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.realloc.execute import Staging
from realhf.realloc.quantise import Int8Reallocator, make_int8_schedules

PROMPT_TOKENS = 16


def config_of(directory: Path, layers: int) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps({
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 16384,
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": layers,
        "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 1024,
        "tie_word_embeddings": True, "eos_token_id": None}))
    return ModelConfig.load(str(directory))


def engines(config: ModelConfig, dtype: str) -> tuple[NativeEngine, NativeEngine, float]:
    """Return an engine, its copy in int8, and the seconds of the reallocation between them."""
    world, spec = World(), model_spec(config)
    home, target = Layout.parse("d1@0"), Layout.parse("d1@0/int8")
    full = NativeEngine(spec, home, world, dtype=dtype)
    full.load(None, seed=0)
    int8 = NativeEngine(spec, target, world, dtype=dtype)
    schedules = make_int8_schedules(
        spec, source=home, target=target, itemsize=full.flat.itemsize, sharded=False, links=None)
    reallocator = Int8Reallocator(
        schedules, world, dtype=full.flat.dtype, staging=Staging(world.device), role="actor", posts=False)
    reallocator.run(full.shards(), int8.shards())
    start = time.perf_counter()
    reallocator.run(full.shards(), int8.shards())
    return full, int8, time.perf_counter() - start


def generated(engine: NativeEngine, rows: int, new_tokens: int) -> tuple[float, Batch]:
    ids = torch.randint(0, 16384, (rows, PROMPT_TOKENS), generator=torch.Generator().manual_seed(rows))
    call = FunctionCall(
        "actor_generate", inputs=("prompt_ids",), role="actor",
        outputs=("sequence_ids", "response_mask", "gen_logprobs", "finished"),
        work=Generate(SamplingConfig(max_new_tokens=new_tokens)))
    batch = Batch(list(range(rows)), {"prompt_ids": Packed.of(list(ids))})
    start = time.perf_counter()
    result = engine.generate(call, batch).batch
    return rows * new_tokens / (time.perf_counter() - start), result


def mismatch(full: NativeEngine, drawn: Batch) -> dict[str, float]:
    """Compare the generator's log-probs with those of the full weights; see docs/algorithms.md."""
    call = FunctionCall(
        "actor_forward", inputs=("sequence_ids", "response_mask"), outputs=("logprobs",), role="actor",
        work=LogProbs())
    logprobs = full.forward(call, drawn, micro_batch_tokens=4096)["logprobs"].values
    at = drawn["response_mask"].values.bool()
    difference = (logprobs - drawn["gen_logprobs"].values)[at].double()
    weights = difference.exp()
    return {
        "kl": float((difference.expm1() - difference).mean()), "max": float(difference.abs().max()),
        "ess": float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    found = []
    with TemporaryDirectory() as directory:
        config = config_of(Path(directory), options.layers)
    for dtype in ("bfloat16", "float32"):
        full, int8, seconds = engines(config, dtype)
        pair = {"full": full, "int8": int8}
        sizes = {name: engine.memory()["weights"] for name, engine in pair.items()}
        for rows in options.rows:
            rates: dict[str, list[float]] = {name: [] for name in pair}
            for _ in range(options.repeats):
                for name, engine in pair.items():
                    rate, drawn = generated(engine, rows, options.new_tokens)
                    rates[name].append(round(rate, 1))
            found.append({
                "dtype": dtype, "rows": rows, "weight_bytes": sizes, "reallocation_seconds": seconds,
                "tokens_per_s": {name: statistics.median(values) for name, values in rates.items()},
                "mismatch": mismatch(full, drawn)})
            print(json.dumps(found[-1]), flush=True)


if __name__ == "__main__":
    main()
