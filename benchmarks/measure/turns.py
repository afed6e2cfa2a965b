"""Times generation in several turns whose environments take a while, beside decoding alone:

    python benchmarks/measure/turns.py [SIZE] [--samples 64] [--turns 4] [--tokens 32] [--hosts 2]

The goal is at most 1.3 of the longer one of decoding alone and of the environments' own time. With a barrier
after each turn, which `deterministic` makes, the two add up. With `--hosts 2`, two network namespaces share
the samples (needs root and iproute2).
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.two_hosts import meet, run_again, two_hosts
from benchmarks.measure.workloads import config_of, write_random_model
from realhf.calls import Generate, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.environments.protocol import Environment, Start, Turn
from realhf.environments.rollouts import EnvironmentCalls
from realhf.graph import FunctionCall
from realhf.layout import Layout, even_split
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
SLEEPS = (0.0, 0.05, 0.5)  # Seconds of a step of the environment.
REPEATS = 4
KV_GIB = 0.5


class Sleeps:
    """An environment whose steps take the time that the row says."""

    def start(self, row: dict[str, Any], seed: int) -> Start:
        self.seconds = row["seconds"]
        return Start("abcd")

    def step(self, message: dict[str, Any]) -> Turn:
        time.sleep(self.seconds)
        return Turn("efgh")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("size", nargs="?", default="tiny")
    for name, default in {"samples": 64, "turns": 4, "tokens": 32, "hosts": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hosts == 1:
        show(measure(World(), options), options)
    elif options.address is None:
        with two_hosts() as hosts:
            show(run_again(hosts, ranks_per_host=1), options)
    else:
        found = measure(meet(options.rank, options.address, ranks_per_host=1), options)
        if options.rank == 0:
            print(json.dumps(found))


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
        # Turns of random lengths: an end is drawn with this probability at every token.
        write_random_model(directory, config_of(options.size), end_probability=1.5 / options.tokens)
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        most = options.turns * (options.tokens + 8)
        environment = Environment(Sleeps, max_turns=options.turns, max_tokens=most)
        calls = EnvironmentCalls(environment, str(directory), group_size=options.samples)
        layout = Layout.parse(f"d{options.hosts}@0-{options.hosts - 1}" if options.hosts > 1 else "d1@0")
        engine = NativeEngine(model_spec(ModelConfig.load(str(directory))), layout, world, dtype="float32")
        engine.load(directory, seed=0)
        outputs = ("sequences", "mask", "logprobs", "finished", "rollout")
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
                        "gen", "generate", ("prompts", "seconds"), outputs, role="actor", work=work)
                    control.barrier()
                    start = time.perf_counter()
                    engine.generate(call, batch)
                    control.barrier()
                    spent = time.perf_counter() - start
                    if repeat:  # The first round starts the workers.
                        times[way] = min(spent, times.get(way, spent))
        return took


if __name__ == "__main__":
    main()
