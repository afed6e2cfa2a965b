"""The compute that a run logs: FLOPs against a naive count over its tokens, and sums over resumed runs."""

import tracemalloc

import pytest
import torch

from realhf import FunctionCall, HostFunction, SamplingConfig
from realhf.calls import Generate
from realhf.checkpoint.run_state import Manifest
from realhf.data.batch import Batch, Packed
from realhf.distributed.group import Outbox
from realhf.distributed.world import World
from realhf.execution_plan import ExecutionPlan
from realhf.models.model_config import ModelConfig
from realhf.models.model_flops import ModelFlops
from realhf.models.param_spec import model_spec
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.execute.meters import DEVICE_SECONDS, FLOPS, ComputeMeter, generate_flops
from realhf.runtime.journal import History, Journal
from realhf.runtime.records.step_record import StepRecord
from realhf.runtime.trainer import Trainer
from tests.cli_tools import read_jsonl
from tests.runtime.tiny import HF_CONFIG, make_experiment, write_task

GROUP = 4


class Lengths:
    """A host function that keeps the lengths of every step's prompts and responses."""

    def __init__(self):
        self.steps = []

    def __call__(self, batch, context):
        drawn = [int(mask.sum()) for mask in batch["response_mask"].split()]
        self.steps.append([(n - d, d) for n, d in zip(batch["sequence_ids"].lengths, drawn, strict=True)])
        return {}


def naive_pass(tokens: range, *, outputs: int) -> int:
    """Return the FLOPs of a forward pass over the tokens at these positions of a sequence, one by one."""
    hidden, layers, width = (HF_CONFIG[k] for k in ("hidden_size", "num_hidden_layers", "intermediate_size"))
    kv_width = hidden // HF_CONFIG["num_attention_heads"] * HF_CONFIG["num_key_value_heads"]
    linear = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * width
    total = 2 * HF_CONFIG["vocab_size"] * hidden * outputs
    for position in tokens:
        total += layers * (2 * linear + 2 * 2 * hidden * (position + 1))
    return total


def naive_step(samples: list[tuple[int, int]]) -> int:
    """Return the FLOPs of a step of GRPO: generation, a forward pass of the reference, and training."""
    total = sum(naive_pass(range(prompt), outputs=0) for prompt, _ in samples[::GROUP])
    for prompt, drawn in samples:
        total += naive_pass(range(prompt, prompt + drawn - 1), outputs=drawn)
        total += (1 + 3) * naive_pass(range(prompt + drawn), outputs=drawn)
    return total


def run(world, directory, out, layout, start=None):
    experiment = make_experiment("grpo", directory, checkpoint_every=1, keep_checkpoints=3, eval_every=2)
    lengths = Lengths()
    call = FunctionCall("lengths", "host", ("sequence_ids", "response_mask"), work=HostFunction(lengths))
    graph = experiment.graph().add(call)
    experiment.graph = lambda: graph
    calls = {name: {"layout": layout} for name in ("actor_generate", "ref_forward", "actor_train")}
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=world.size)
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()
    return lengths.steps


@pytest.mark.slow
def test_a_run_and_its_continuation_log_their_compute(pool, tmp_path):
    directory = write_task(tmp_path)
    whole, alone = tmp_path / "whole", tmp_path / "alone"
    steps = pool.run(run, directory, whole, "d2t2@0-3")[0]
    run(World(), directory, alone, "d1@0", whole / "checkpoints/step_1")
    theirs, ours = read_jsonl(whole / "metrics.jsonl"), read_jsonl(alone / "metrics.jsonl")
    assert [m["step"] for m in ours] == [0, 1, 2, 3]
    assert (theirs[0][DEVICE_SECONDS], theirs[0][FLOPS]) == (0, 0) and "eval/score" in theirs[0]
    expected = 0
    for before, after, samples in zip(theirs, theirs[1:], steps, strict=False):
        expected += naive_step(samples)
        assert after[FLOPS] == expected
        seconds = after[DEVICE_SECONDS] - before[DEVICE_SECONDS]
        assert seconds == pytest.approx(4 * after["timing_s/step"])
    assert [m[FLOPS] for m in ours] == [m[FLOPS] for m in theirs]
    assert ours[1] == theirs[1]  # From the checkpoint.
    for before, after in zip(ours[1:], ours[2:], strict=False):
        seconds = after[DEVICE_SECONDS] - before[DEVICE_SECONDS]
        assert seconds == pytest.approx(after["timing_s/step"])
    events = read_jsonl(alone / "timeline.jsonl")
    assert sum(e.get("flops", 0) for e in events if e["step"] == 3) == ours[3][FLOPS] - ours[2][FLOPS]
    assert Manifest.load(alone / "checkpoints/step_3").num_ranks == 1
    assert "perf/mfu" not in ours[3]


def generated(samples: dict[int, tuple[int, int]]) -> Batch:
    """Return the columns of samples, given as id -> tokens of prompt and response."""
    lengths = [prompt + drawn for prompt, drawn in samples.values()]
    mask = torch.cat([torch.tensor([0.0] * p + [1.0] * d) for p, d in samples.values()])
    fields = {name: Packed(torch.zeros(sum(lengths)), lengths) for name in ("ids", "logprobs")}
    return Batch([*samples], {**fields, "mask": Packed(mask, lengths)})


def test_rounds_of_a_generation_add_up():
    """Unfinished samples count up to where they are; computing their tokens again does not count."""
    work = Generate(sampling=SamplingConfig(max_new_tokens=9))
    outputs = ("ids", "mask", "logprobs", "finished")
    call = FunctionCall("actor_generate", "generate", ("prompts",), outputs, role="actor", work=work)
    flops = ModelFlops.of(model_spec(ModelConfig.from_hf(HF_CONFIG)))
    prompts = Batch([0, 1, 2, 3], {"prompts": Packed(torch.zeros(16), [3, 3, 5, 5])})
    nothing = Batch([])

    def count(new, before, *after):
        return generate_flops(call, flops, new, group_size=2, before=before, after=after)

    ended = {0: (3, 2), 1: (3, 9), 2: (5, 1), 3: (5, 7)}
    whole = count(prompts, nothing, generated(ended), nothing)
    middle = generated({1: (3, 4), 3: (5, 4)})
    first = count(prompts, nothing, generated({i: ended[i] for i in (0, 2)}), middle)
    second = count(nothing, middle, generated({i: ended[i] for i in (1, 3)}), nothing)
    assert first + second == whole and min(first, second) > 0
    expected = naive_pass(range(3), outputs=0) + naive_pass(range(5), outputs=0)
    expected += sum(naive_pass(range(p, p + d - 1), outputs=d) for p, d in ended.values())
    assert whole == expected


def event(call: str, start: float, end: float, **more) -> dict:
    return {"rank": 0, "name": call, "kind": "forward", "start": start, "end": end, **more}


def meter(**changes) -> ComputeMeter:
    return ComputeMeter(**{"num_devices": 2, "has_flops": True, "peaks": {}, **changes})


def test_mfu_is_the_share_of_the_time_at_peak():
    records = [StepRecord([], [event("a", 0, 1, flops=30), event("b", 1, 2, flops=50)]),
               StepRecord([], [event("a", 0, 1, flops=10), event("move", 0, 1)])]
    metrics = meter(peaks={"a": 40.0, "b": 10.0}).add(records, 4.0)
    assert metrics == {DEVICE_SECONDS: 8.0, FLOPS: 90.0, "perf/mfu": (40 / 40 + 50 / 10) / 8}
    assert "perf/mfu" not in meter(peaks={"a": 40.0}).add(records, 4.0)
    assert meter(has_flops=False, peaks={"a": 40.0, "b": 10.0}).add(records, 4.0) == {DEVICE_SECONDS: 8.0}


def test_what_a_run_has_not_counted_from_the_start_is_not_logged():
    earlier = [{"step": 0, DEVICE_SECONDS: 0.0}, {"step": 1, DEVICE_SECONDS: 5.0}]
    assert meter(earlier=earlier).add([], 1.0) == {DEVICE_SECONDS: 7.0}


@pytest.mark.parametrize(("pauses", "seconds"), [(False, 20.0), (True, 15.0)])
def test_a_checkpoint_between_two_steps_does_not_count(pauses, seconds):
    journal = Journal(World(), Outbox(), None, None, meter(num_devices=1))
    journal.add(1, StepRecord([], [event("a", 100, 110)]))
    if pauses:
        journal.pause()
    journal.add(2, StepRecord([], [event("a", 115, 120)]))
    journal.finish()
    assert [m[DEVICE_SECONDS] for m in journal.history] == [10.0, seconds]


def test_the_history_of_a_run_takes_little_memory():
    """Every step's names are new strings, as metrics are made; 60 of them took 7 kB of a step."""
    names = [f"timing_s/call_{i}" for i in range(60)]
    history = History([{name: 0.5 for name in names}])
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for step in range(2000):
            history.append({f"timing_s/call_{i}": step + i / 7 for i in range(60)})
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 2000 * 700
    assert len(history) == 2001 and history[0] == dict.fromkeys(names, 0.5)
    assert history[-1] == {name: 1999 + i / 7 for i, name in enumerate(names)}
    assert history[1:3] == [history[1], history[2]] and list(history)[5] == history[5]
    history.append({"a": 1.0, "b": None})  # As metrics.jsonl has a number that is none.
    assert history[-1]["a"] == 1.0 and history[-1]["b"] != history[-1]["b"]
