"""Times train steps of two replicas on two hosts, with gradients summed during the backward pass or after it.

    python benchmarks/measure/gradients.py                    # as root; minutes
    python benchmarks/measure/gradients.py --mbit 500 --tokens 1024 --repeats 3

The hosts are network namespaces with one rank of one thread each, joined by a link of --mbit each way. Both
ways train the same model of 100M parameters in float32 on the same sequences, in turns, with the same engine.
One splits the gradients into sections, which are summed while the backward pass continues
(ModelSpec.sections); the other has a single section. Half of the gradients must cross the link each way. The
exit code is 1 if a goal was missed, and 2 if no namespaces can be made here.
"""

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from rich.table import Table

from benchmarks.harness import Goal, machine, progress, report
from benchmarks.measure.two_hosts import NoNamespacesError, add_options, meet, run_again, two_hosts
from benchmarks.measure.workloads import config_of, sequences
from realhf import OptimizerConfig
from realhf.algorithms.sft import CrossEntropy
from realhf.calls import TrainStep
from realhf.data.batch import Batch, Packed
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import ModelSpec, model_spec

MTU = 9000
WAYS: dict[str, dict[str, Any]] = {"during": {}, "after": {"section_numel": sys.maxsize}}
_LENGTH = 256


def work(rank: int, address: str, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return, on every rank, the seconds of steps by way; "alone" is a step that does not sum gradients."""
    world = meet(rank, address, ranks_per_host=1)
    steps = {way: step_of(world, "d2@0-1", tokens=args.tokens, **how) for way, how in WAYS.items()}
    steps["alone"] = step_of(World(), "d1@0", tokens=args.tokens)
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for repeat in range(-1, args.repeats):
        for way in list(steps)[:: 1 if repeat % 2 else -1]:
            world.control.barrier()
            start = time.perf_counter()
            steps[way]()
            world.control.barrier()
            if repeat >= 0:
                seconds[way].append(time.perf_counter() - start)
        if rank == 0:
            progress(f"repetition {repeat}: {({way: times[-1:] for way, times in seconds.items()})}")
    world.control.barrier()  # Rank 0 keeps the store alive until all are done.
    return seconds


def model(**changes: Any) -> ModelSpec:
    hf = config_of("100m").to_dict() | {"architectures": ["Qwen2ForCausalLM"]}
    return replace(model_spec(ModelConfig.from_hf(hf)), **changes)


def step_of(world: World, layout: str, *, tokens: int, **changes: Any) -> Callable[[], object]:
    """Return an optimizer step on so many tokens of this rank.

    The step does not gather the new weights, because in a run this is part of the reallocation.
    """
    spec = model(**changes)
    optimizer = OptimizerConfig(lr=1e-5)
    engine = NativeEngine(spec, Layout.parse(layout), world, dtype="float32", optimizer=optimizer)
    engine.load(None, seed=0)
    rows = sequences([_LENGTH] * (tokens // _LENGTH), vocab_size=spec.config.vocab_size, seed=world.rank)
    ids = [torch.tensor(row) for row in rows]
    mask = [torch.ones(len(row)) for row in rows]
    columns = {"sequence_ids": Packed.of(ids), "response_mask": Packed.of(mask)}
    batch = Batch(list(range(len(rows))), columns)
    work = TrainStep(CrossEntropy())
    call = FunctionCall("actor_train", inputs=tuple(columns), role="actor", work=work)
    return partial(engine.train, call, [batch], micro_batch_tokens=tokens, gather=False)


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--tokens", type=int, default=1024, help="of a rank in a step")
    add_options(parser, mbit=1000)
    args = parser.parse_args()
    if args.rank is not None:
        torch.set_num_threads(1)
        print(json.dumps(work(args.rank, args.address, args)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    hardware = machine()
    try:
        with two_hosts(mbit=args.mbit, mtu=MTU) as hosts:
            seconds = run_again(hosts, ranks_per_host=1)
    except NoNamespacesError as error:
        progress(str(error))
        return 2
    spec = model()
    wire = spec.numel * 4 / 2 * 8 / (args.mbit * 1e6)
    apart = [a - b for a, b in zip(seconds["after"], seconds["alone"], strict=True)]
    left = [a - b for a, b in zip(seconds["during"], seconds["alone"], strict=True)]
    ratio = statistics.median(a / b for a, b in zip(seconds["after"], seconds["during"], strict=True))
    sections = len(spec.sections(Layout.parse("d2@0-1"), 0))
    row = {
        "seconds": seconds, "wire_seconds": wire, "num_sections": sections, "ratio": ratio,
        "beside_computing": {"after": statistics.median(apart), "during": statistics.median(left)},
    }
    times_table = Table(title=f"Seconds of a train step; the link alone needs {wire:.2f}")
    for column in ("gradients", "sections", "seconds", "of these beside computing"):
        times_table.add_column(column, justify="left" if column == "gradients" else "right")
    for way, count in (("during", sections), ("after", 1)):
        times = statistics.median(seconds[way]), row["beside_computing"][way]
        times_table.add_row(f"{way} the backward pass", str(count), *(f"{time:.2f}" for time in times))
    times_table.add_row("not summed", "", f"{statistics.median(seconds['alone']):.2f}", "")
    settings = {name: value for name, value in vars(args).items() if name not in ("rank", "address")}
    document = {
        "benchmark": "gradients", "machine": hardware, "settings": {**settings, "mtu": MTU}, "rows": [row]}
    goals = [Goal("after / during the backward pass, seconds of a step", ratio, at_least=1.0)]
    return report(document, tables=[times_table], goals=goals, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
