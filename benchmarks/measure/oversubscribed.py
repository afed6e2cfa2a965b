"""Times generation in a cache that reserves the full length of every row, and with more rows in the same
cache, beside the planner's prediction:

    python benchmarks/measure/oversubscribed.py [SIZE] [--samples 192] [--mean 60] [--limit 512] [--whole 8]

Answers end at random, with the same chance after each token. The cache has room for `whole` rows of full
length. The predicted speed-up is that of the cost model with the rooflines of a laptop. Tokens must be equal.
The goal is a measured speed-up within a quarter of the predicted one.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness import Goal, machine, report
from benchmarks.measure.workloads import config_of, write_random_model
from realhf.calls import Generate, SamplingConfig
from realhf.cluster import Cluster
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.execution_plan import CallPlan
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.planner.call_cost import call_cost
from realhf.planner.lengths import observed
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.rates import Rates
from realhf.planner.rows import GIB, RankRows

REPEATS = 3
PROMPT_TOKENS = 8
ONE = Layout.parse("d1@0")


def generated(
    engine: NativeEngine, options: argparse.Namespace, *, rows: int, gib: float
) -> tuple[float, list[list[int]]]:
    """Return the seconds of a generation, the least of several, and the sequences."""
    work = Generate(SamplingConfig(max_new_tokens=options.limit), seed=1, max_rows=rows, kv_cache_gib=gib)
    outputs = ("sequences", "mask", "logprobs", "finished")
    call = FunctionCall("gen", "generate", ("prompts",), outputs, role="actor", work=work)
    ids = list(range(options.samples))
    prompt = torch.arange(5, 5 + PROMPT_TOKENS)
    prompts = Packed.of([prompt.roll(i) for i in ids], empty=torch.zeros(0, dtype=torch.long))
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        made = engine.generate(call, Batch(ids, {"prompts": prompts})).batch
        times.append(time.perf_counter() - start)
    return min(times), [row.tolist() for row in made["sequences"].split()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("size", nargs="?", default="tiny")
    for name, default in {"samples": 192, "mean": 60, "limit": 512, "whole": 8}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        write_random_model(Path(name), config_of(options.size), end_probability=1 / options.mean)
        config = ModelConfig.load(name)
        engine = NativeEngine(model_spec(config), ONE, World(), dtype="float32")
        engine.load(Path(name), seed=0)
        rows = measured(engine, ModelRole(config, "float32"), options)
    least = min(row["measured"] / row["predicted"] for row in rows)
    most = max(row["measured"] / row["predicted"] for row in rows)
    goals = [Goal("measured over predicted speed-up, least", least, at_least=0.75),
             Goal("the same, most", most, at_most=1.25)]
    for row in rows:
        print(
            f"{row['rows']} rows in a cache for {options.whole} whole ones: {row['seconds']:.2f} s, "
            f"{row['measured']:.2f} times as fast as {options.whole} rows (predicted {row['predicted']:.2f}, "
            f"with {row['held']:.1f} rows at once)", file=sys.stderr)
    document = {"benchmark": "oversubscribed", "machine": machine(), "rows": rows}
    return report(document, tables=[], goals=goals, as_json=options.json)


def measured(engine: NativeEngine, role: ModelRole, options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the speed-up of each number of rows over rows of full length, measured and predicted."""
    work = Workload(options.samples, PROMPT_TOKENS, options.mean, options.limit, max_rows=options.whole)
    whole = RankRows(role, work, ONE.strategy, is_cuda=False)
    gib = 1.001 * whole.whole_tokens * whole.token_bytes / GIB
    reserving, expected = generated(engine, options, rows=options.whole, gib=gib)
    lengths = observed([len(row) - PROMPT_TOKENS for row in expected], options.limit)
    work = Workload(
        options.samples, PROMPT_TOKENS, lengths.mean, options.limit, response_lengths=lengths,
        max_rows=options.samples)
    rates = Rates(Cluster.load("cpu-laptop"))
    call = FunctionCall("gen", "generate", ("prompts",), ("sequences",), role="actor")

    def predicted(rows: int) -> float:
        plan = CallPlan(ONE, max_rows=rows, kv_cache_gib=gib)
        return call_cost(rates, call, role, work, plan, per_host=1).seconds

    found = []
    for rows in (2 * options.whole, 4 * options.whole, options.samples):
        seconds, sequences = generated(engine, options, rows=rows, gib=gib)
        assert sequences == expected, "other rows give other tokens"
        plan = CallPlan(ONE, max_rows=rows, kv_cache_gib=gib)
        held = RankRows(role, work.under(plan), ONE.strategy, is_cuda=False).held
        found.append({
            "rows": rows, "held": held, "seconds": seconds, "reserving_seconds": reserving,
            "measured": reserving / seconds, "predicted": predicted(options.whole) / predicted(rows)})
    return found


if __name__ == "__main__":
    sys.exit(main())
