"""Times generation in several turns whose environments take a while, beside decoding alone:

    python benchmarks/measure/turns.py [SIZE] [--samples 64] [--turns 4] [--tokens 32]

The goal is at most 1.3 of the longer one of decoding alone and of the environments' own time. With a barrier
after each turn, the two would add up.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure.workloads import config_of, write_random_model
from realhf.calls import Generate, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.environments.protocol import Environment, Start, Turn
from realhf.environments.rollouts import EnvironmentCalls
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"
SLEEPS = (0.0, 0.05, 0.5)  # Seconds of a step of the environment.
REPEATS = 4


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
    for name, default in {"samples": 64, "turns": 4, "tokens": 32}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        # Turns of random lengths: an end is drawn with this probability at every token.
        write_random_model(directory, config_of(options.size), end_probability=1.5 / options.tokens)
        (directory / "chat_template.jinja").write_text(TEMPLATE)
        measure(directory, options)


def measure(directory: Path, options: argparse.Namespace) -> None:
    """Print the seconds of generation, the least of several, for each time of the environment's steps."""
    most = options.turns * (options.tokens + 8)
    environment = Environment(Sleeps, max_turns=options.turns, max_tokens=most)
    calls = EnvironmentCalls(environment, str(directory), group_size=options.samples)
    work = Generate(SamplingConfig(max_new_tokens=options.tokens), environment=calls)
    outputs = ("sequences", "mask", "logprobs", "finished", "rollout")
    call = FunctionCall("gen", "generate", ("prompts", "seconds"), outputs, role="actor", work=work)
    engine = NativeEngine(
        model_spec(ModelConfig.load(str(directory))), Layout.parse("d1@0"), World(), dtype="float32")
    engine.load(directory, seed=0)
    ids = list(range(options.samples))
    prompts = Packed.of([torch.tensor([5])] * len(ids), empty=torch.zeros(0, dtype=torch.long))
    took: dict[float, list[float]] = {seconds: [] for seconds in SLEEPS}
    for repeat in range(REPEATS + 1):
        for seconds, times in took.items():
            batch = Batch(ids, {"prompts": prompts, "seconds": [seconds] * len(ids)})
            start = time.perf_counter()
            made = engine.generate(call, batch).batch
            if repeat:  # The first round starts the workers.
                times.append(time.perf_counter() - start)
    turns = sum(len(rollout["turns"]) for rollout in made["rollout"])
    alone = min(took[0.0])
    for seconds, times in took.items():
        longest = max(alone, options.turns * seconds)
        barrier = alone + options.turns * seconds
        print(
            f"steps of {seconds:g} s: {min(times):.2f} s for {turns} turns, {min(times) / longest:.2f} of "
            f"the longer one (with barriers {barrier / longest:.2f})", flush=True)


if __name__ == "__main__":
    main()
