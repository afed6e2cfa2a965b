"""Times generation in several turns whose environments take a while, beside decoding alone:

    python benchmarks/measure/turns.py [SIZE] [--samples 64] [--turns 4] [--tokens 32] [--hosts 2]
    python benchmarks/measure/turns.py --planned [--json]

The goal is at most 1.3 of the longer one of decoding alone and of the environments' own time. With a barrier
after each turn, which `deterministic` makes, the two add up. With `--hosts 2`, two network namespaces share
the samples (needs root and iproute2).

`--planned` compares the planner's seconds with measured ones instead, for four times of the environment's
steps and two numbers of rows at once. It first profiles the machine; generations without environments between
the others say by how much its load has changed since. The goal is 15 %.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Goal, machine, report
from benchmarks.measure.two_hosts import meet, run_again, two_hosts
from benchmarks.measure.workloads import config_of, write_random_model
from realhf.calls import Generate, SamplingConfig
from realhf.cluster import Cluster
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.environments.protocol import Environment, Start, Turn
from realhf.environments.rollouts import EnvironmentTurnSourceFactory
from realhf.execution_plan import CallPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout, even_split
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from realhf.planner.call_cost import CallCost, call_cost
from realhf.planner.lengths import Lengths, observed
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.profiled_rates import ProfiledRates
from realhf.planner.turns import Turns
from realhf.profiling import measure as profiling

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
SLEEPS = (0.0, 0.05, 0.5)  # Seconds of a step of the environment.
REPEATS = 4
KV_GIB = 0.5
OUTPUTS = ("sequences", "mask", "logprobs", "finished", "rollout")
PLANNED_SECONDS = (0.0, 0.1, 0.5, 1.5)
PLANNED_ROWS = (16, 64)
GROUP = 4
WIDER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8,
         "layer_types": ["full_attention"] * 8}
"""So large that decode steps take longer than what Python does for a turn."""


class Sleeps:
    """An environment whose steps take the time that the row says."""

    def start(self, row: dict[str, Any], seed: int) -> Start:
        self.seconds = row["seconds"]
        return Start("abcd")

    def step(self, message: dict[str, Any]) -> Turn:
        time.sleep(self.seconds)
        return Turn("efgh")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("size", nargs="?", default="tiny")
    for name, default in {"samples": 64, "turns": 4, "tokens": 32, "hosts": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--planned", action="store_true", help="compare with the planner's predictions")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.planned:
        return show_planned(compare(options), as_json=options.json)
    if options.hosts == 1:
        show(measure(World(), options), options)
    elif options.address is None:
        with two_hosts() as hosts:
            show(run_again(hosts, ranks_per_host=1), options)
    else:
        found = measure(meet(options.rank, options.address, ranks_per_host=1), options)
        if options.rank == 0:
            print(json.dumps(found))
    return 0


def show(found: dict[str, dict[str, float]], options: argparse.Namespace) -> None:
    """Print the seconds, and their ratios to the longer one of decoding and of the environments."""
    alone = found["0"]["at once"]
    for name, times in found.items():
        longest = max(alone, options.turns * float(name))
        ratios = [f"{way} {seconds:.2f} s ({seconds / longest:.2f})" for way, seconds in times.items()]
        print(f"steps of {name} s, {options.samples} samples on {options.hosts} hosts: {', '.join(ratios)}")


def measure(world: World, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the seconds of generation, the least of several, for each time of the environment's steps: with
    answers taken up at once, and with a barrier after each turn."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        calls = write_task(directory, options)
        layout = Layout.parse(f"d{options.hosts}@0-{options.hosts - 1}" if options.hosts > 1 else "d1@0")
        engine = NativeEngine(model_spec(ModelConfig.load(str(directory))), layout, world, dtype="float32")
        engine.load(directory, seed=0)
        works = {
            way: Generate(
                SamplingConfig(max_new_tokens=options.tokens), environment=calls, work_stealing=False,
                kv_cache_gib=KV_GIB, deterministic=way == "barrier")
            for way in ("at once", "barrier")}
        ids = list(range(*even_split(options.samples, options.hosts, world.rank)))
        prompts = Packed.of([torch.tensor([5])] * len(ids), empty=torch.zeros(0, dtype=torch.long))
        took: dict[str, dict[str, float]] = {f"{seconds:g}": {} for seconds in SLEEPS}
        control = world.group(layout.ranks, purpose="control")
        for repeat in range(REPEATS + 1):
            for seconds, times in took.items():
                batch = Batch(ids, {"prompts": prompts, "seconds": [float(seconds)] * len(ids)})
                for way, work in works.items():
                    call = FunctionCall(
                        "gen", "generate", ("prompts", "seconds"), OUTPUTS, role="actor", work=work)
                    control.barrier()
                    start = time.perf_counter()
                    engine.generate(call, batch)
                    control.barrier()
                    spent = time.perf_counter() - start
                    if repeat:  # The first round starts the workers.
                        times[way] = min(spent, times.get(way, spent))
        return took


def write_task(
    directory: Path, options: argparse.Namespace, *, group_size: int = 0
) -> EnvironmentTurnSourceFactory:
    """Write a model whose turns have random lengths, and return the environments of its samples."""
    # An end is drawn with this probability at every token.
    config = config_of(options.size)
    if options.planned:
        config.update(WIDER)
    write_random_model(directory, config, end_probability=1.5 / options.tokens)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    most = options.turns * (options.tokens + 8)
    environment = Environment(Sleeps, max_turns=options.turns, max_tokens=most)
    return EnvironmentTurnSourceFactory(environment, str(directory), group_size=group_size or options.samples)


def compare(options: argparse.Namespace) -> list[dict[str, float]]:
    """Return the measured and the predicted seconds of each setting, and the parts of the prediction."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        calls = write_task(directory, options, group_size=GROUP)
        config = ModelConfig.load(str(directory))
        layout = Layout.parse("d1@0")
        engine = NativeEngine(model_spec(config), layout, World(), dtype="float32")
        engine.load(directory, seed=0)
        ids = list(range(options.samples))
        prompts = Packed.of([torch.tensor([5])] * len(ids), empty=torch.zeros(0, dtype=torch.long))
        measured: dict[tuple[float, int], float] = {}
        rollouts: list[dict[str, Any]] = []
        plain: dict[int, float] = {}
        rates = profile(config, options)
        for repeat in range(REPEATS + 1):
            for seconds, rows in product(PLANNED_SECONDS, PLANNED_ROWS):
                work = Generate(
                    SamplingConfig(max_new_tokens=options.tokens), environment=calls, work_stealing=False,
                    kv_cache_gib=KV_GIB, max_rows=rows)
                call = FunctionCall(
                    "gen", "generate", ("prompts", "seconds"), OUTPUTS, role="actor", work=work)
                batch = Batch(ids, {"prompts": prompts, "seconds": [seconds] * len(ids)})
                start = time.perf_counter()
                made = engine.generate(call, batch).batch
                spent = time.perf_counter() - start
                if repeat:  # The first round starts the workers.
                    measured[seconds, rows] = min(spent, measured.get((seconds, rows), spent))
                rollouts = made["rollout"]
                work = Generate(
                    SamplingConfig(max_new_tokens=options.tokens), work_stealing=False, kv_cache_gib=KV_GIB,
                    max_rows=rows)
                call = FunctionCall("gen", "generate", ("prompts",), OUTPUTS[:-1], role="actor", work=work)
                start = time.perf_counter()
                alone = engine.generate(call, Batch(ids, {"prompts": prompts})).batch
                plain[rows] = min(time.perf_counter() - start, plain.get(rows, math.inf))
        start_tokens = [rollout["turns"][0]["start"] for rollout in rollouts]
        spans = [span for rollout in rollouts for span in rollout["turns"]]
        gaps = [
            after["start"] - before["stop"] for rollout in rollouts
            for before, after in zip(rollout["turns"], rollout["turns"][1:], strict=False)]
        turns = Turns(
            observed([len(rollout["turns"]) for rollout in rollouts], options.turns),
            observed([span["stop"] - span["start"] for span in spans], options.tokens),
            sum(gaps) / max(1, len(gaps)))
        alone_lengths = observed([len(row) - 1 for row in alone["sequences"].split()], options.tokens)
        predicted = planned(
            rates, config, turns, options, prompt_tokens=sum(start_tokens) / len(start_tokens),
            plain=plain, lengths=alone_lengths)
        return [
            {"environment_seconds": seconds, "rows": rows, "measured": spent,
             "predicted": predicted[seconds, rows].seconds, **predicted[seconds, rows].seconds_by_cause}
            for (seconds, rows), spent in measured.items()]


class ScaledRates(ProfiledRates):
    """Rates of a profile at another load of the machine than it was made under."""

    factor = 1.0

    def decode_block(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        compute, communication = super().decode_block(*args, **kwargs)
        return compute * self.factor, communication * self.factor

    def decode_head(self, *args: Any, **kwargs: Any) -> Any:
        return super().decode_head(*args, **kwargs) * self.factor

    def block(self, *args: Any, **kwargs: Any) -> Any:
        return super().block(*args, **kwargs).times(self.factor)


def profile(config: ModelConfig, options: argparse.Namespace) -> ScaledRates:
    """Return rates that were measured on this machine."""
    work = Generate(SamplingConfig(max_new_tokens=options.turns * (options.tokens + 8)))
    call = FunctionCall("gen", "generate", ("prompts",), OUTPUTS[:-1], role="actor", work=work)
    workload = Workload(options.samples, 8, work.sampling.max_new_tokens, work.sampling.max_new_tokens)
    problem = Problem(
        DataflowGraph((call,), ("prompts",)), {"actor": ModelRole(config, "float32")}, {"gen": workload},
        replace(Cluster.load("cpu-laptop"), devices_per_host=1))
    return ScaledRates(profiling.measure(World(), problem))


def planned(
    rates: ScaledRates, config: ModelConfig, turns: Turns, options: argparse.Namespace,
    *, prompt_tokens: float, plain: dict[int, float], lengths: Lengths,
) -> dict[tuple[float, int], CallCost]:
    """Return the planner's cost of each setting.

    Decoding is as fast as in generations without environments between the others, which took `plain` seconds
    for each number of rows and had these lengths.
    """
    limit = options.turns * (options.tokens + 8)
    whole = turns.whole(limit)
    work = Workload(
        options.samples, prompt_tokens, whole.mean, limit, GROUP, response_lengths=whole,
        turns=turns, kv_cache_gib=KV_GIB, work_stealing=False)
    call = FunctionCall("gen", "generate", ("prompts",), OUTPUTS[:-1], role="actor")
    single = Workload(
        options.samples, 1, lengths.mean, options.tokens, GROUP, response_lengths=lengths,
        kv_cache_gib=KV_GIB, work_stealing=False)

    def cost(work: Workload) -> CallCost:
        plan = CallPlan(Layout.parse("d1@0"))
        return call_cost(rates, call, ModelRole(config, "float32"), work, plan, per_host=1)

    costs = {}
    for seconds, rows in product(PLANNED_SECONDS, PLANNED_ROWS):
        rates.factor = 1.0
        rates.factor = plain[rows] / cost(replace(single, max_rows=rows)).seconds
        here = replace(work, max_rows=rows, turns=replace(turns, seconds=seconds))
        costs[seconds, rows] = cost(here)
    return costs


def show_planned(found: list[dict[str, float]], *, as_json: bool) -> int:
    """Print measured and predicted seconds, and return whether the predictions are near."""
    for row in found:
        parts = ", ".join(f"{name} {row[name]:.2f}" for name in list(row)[4:])
        print(
            f"steps of {row['environment_seconds']:g} s, {row['rows']} rows: {row['measured']:.2f} s, "
            f"predicted {row['predicted']:.2f} s ({row['predicted'] / row['measured']:.2f}): {parts}",
            file=sys.stderr)
    worst = max(abs(row["predicted"] / row["measured"] - 1) for row in found)
    goals = [Goal("worst relative error of the predicted seconds", worst, at_most=0.15)]
    document = {"benchmark": "turns", "machine": machine(), "rows": found}
    return report(document, tables=[], goals=goals, as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
