"""Memory of a run: recorded for each call beside the prediction; limits of caches kept by checkpoints."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from realhf.checkpoint.run_state import Manifest
from realhf.cli.program import with_predictions
from realhf.devices import chunk_sizes
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.inference import cache_memory
from realhf.models.param_spec import model_spec
from realhf.nn.linear import can_pack
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.records.progress import memory_lines
from realhf.runtime.trainer import Trainer
from tests.cli_tools import read_jsonl, untimed
from tests.runtime.tiny import make_experiment, role, write_task
from tests.samples import marked


def _trainer(directory, out, *, start=None, predicts=False, plan=None, **changes):
    settings = {"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 2, "eval_dataset": None} | changes
    experiment = make_experiment("grpo", directory, **settings)
    program = compile_program(experiment, plan, world_size=1)
    if predicts:
        program = with_predictions(experiment, program, nproc=1, cluster=None, profile=None)
    world = World()
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    return Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True)


@pytest.mark.parametrize("offload", marked([False, True], quick=[1]))
def test_each_call_records_its_memory_beside_the_prediction(tmp_path, offload):
    """On a CPU what engines hold is counted, and the process measured. Parameters have 8 bytes each."""
    directory = write_task(tmp_path)
    actor = role(directory)
    actor = replace(actor, optimizer=replace(actor.optimizer, offload=offload))
    trainer = _trainer(directory, tmp_path / "run", predicts=True, actor=actor)
    trainer.run()
    numel = next(iter(trainer._state.models.engines._engines.values())).flat.numel()
    events = [e for e in read_jsonl(tmp_path / "run" / "timeline.jsonl") if "memory" in e]
    assert {e["name"] for e in events} == {"actor_generate", "ref_forward", "actor_train"}
    for event in events:
        parts = event["memory"]
        assert parts["actor weights"] == parts["ref weights"] == 8 * numel
        assert parts["actor optimizer"] == 2 * 8 * numel
        assert parts.get("actor gradients", 0) == 8 * numel * (event["name"] == "actor_train")
        assert ("kv_cache" in parts) == (event["name"] == "actor_generate")
        assert event["counted_bytes"] == sum(parts.values()) and "memory_bytes" not in event
        difference = event["predicted_counted_bytes"] - event["counted_bytes"]
        cache = parts.get("kv_cache", 0)
        assert (0 <= difference <= 0.5 * cache) if cache else difference == 0
        assert event["process_bytes"] >= trainer._executor.memory.beside_models
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    of_process = summary["process_memory"]
    assert of_process["measured"] == max(event["process_bytes"] for event in events)
    assert of_process["predicted"] == max(event["predicted_process_bytes"] for event in events)
    sums = [sum(trainer._program.predicted_memory[e["name"]][0].values()) for e in events]
    assert of_process["predicted"] == of_process["beside_models"] + round(max(sums))
    summary = summary["memory"]
    for metrics in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        for call in ("actor_generate", "ref_forward", "actor_train"):
            of_call = [e for e in events if (e["step"], e["name"]) == (metrics["step"], call)]
            assert metrics[f"perf/counted_bytes/{call}"] == max(e["counted_bytes"] for e in of_call)
            assert metrics[f"perf/predicted_counted_bytes/{call}"] == of_call[0]["predicted_counted_bytes"]
            assert summary[call]["counted"] >= metrics[f"perf/counted_bytes/{call}"]
            assert summary[call]["predicted"] == of_call[0]["predicted_counted_bytes"]


def test_a_copy_in_int8_has_the_memory_that_is_predicted(tmp_path):
    directory = write_task(tmp_path)
    trainer = _trainer(directory, tmp_path / "run", predicts=True, generation_weights="int8")
    trainer.run()
    params = trainer._program.experiment.actor.config()
    spec = model_spec(params)
    int8 = [param for param in spec.params if param.takes_int8]
    saved = sum(7 * param.numel - 8 * param.shape[0] for param in int8)
    for event in read_jsonl(tmp_path / "run" / "timeline.jsonl"):
        if "memory" in event:
            assert event["memory"]["actor copy"] == 8 * spec.numel - saved
            assert event["memory"]["actor weights"] == 8 * spec.numel
            if event["name"] != "actor_generate":  # Its cache is predicted for rows of full length.
                assert event["predicted_counted_bytes"] == event["counted_bytes"]


def test_packed_weights_are_counted_as_predicted(tmp_path, monkeypatch):
    """They exist in generations only."""
    if not can_pack(torch.float32):
        pytest.skip("no packed weights on this CPU")
    monkeypatch.setattr(chunk_sizes, "LEAST_PACKED_NUMEL", 1)
    directory = write_task(tmp_path)
    changes = {name: replace(role(directory), dtype="float32") for name in ("actor", "ref")}
    trainer = _trainer(directory, tmp_path / "run", predicts=True, steps=1, **changes)
    trainer.run()
    predicted = trainer._program.predicted_memory
    for event in read_jsonl(tmp_path / "run" / "timeline.jsonl"):
        if "memory" in event:
            packed = event["memory"].get("packed", 0)
            assert packed == predicted[event["name"]][0].get("packed", 0)
            assert (packed > 0) == (event["name"] == "actor_generate")
            cache = event["memory"].get("kv_cache", 0)
            assert 0 <= event["predicted_counted_bytes"] - event["counted_bytes"] <= 0.5 * cache


@pytest.mark.slow
def test_the_measured_memory_is_that_of_the_process():
    """A block that is written and freed stays in the peak. The kernel's sum over all mappings is the same."""
    lines = ["from realhf.runtime.execute.meters import resident_bytes as held",
             "before = held(), held(peak=True)", "block = b'1' * (300 << 20)", "during = held()",
             "mapped = open('/proc/self/smaps_rollup').read().split('Rss:')[1].split()[0]", "del block",
             "print(*before, during, 1024 * int(mapped), held(), held(peak=True))"]
    shown = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, check=True)
    now, peak_before, during, mapped, after, peak = map(int, shown.stdout.split())
    assert during - now == pytest.approx(300 << 20, rel=0.02) and mapped == pytest.approx(during, rel=0.01)
    assert abs(after - now) < 10 << 20 and peak > 0.99 * during and peak - peak_before > 200 << 20


def test_the_last_lines_tell_measured_from_counted():
    process = {"measured": 5.5e9, "predicted": 5.25e9, "beside_models": 6e8}
    calls = {"actor_generate": {"counted": 2.15e9, "predicted": 2.15e9}, "actor_train": {"counted": 2e9}}
    assert memory_lines(process, calls) == [
        "memory of a process: 5.5 GB measured at its peak (600 MB of it beside the models), "
        "5.25 GB predicted",
        "  weights, gradients, optimizer and cache in actor_generate, where they are most: 2.15 GB counted, "
        "2.15 GB predicted"]
    on_gpu = memory_lines({"measured": 5e9, "beside_models": 4e9}, {"actor_train": {"measured": 7e10}})
    assert on_gpu == [
        "memory of a process: 5 GB measured at its peak (4 GB of it beside the models)",
        "memory of a rank in actor_train: 70 GB measured"]


def _limits(trainer):
    engines = trainer._state.models.engines._engines
    (engine,) = [engine for (name, _), engine in engines.items() if name == "actor"]
    return engine.cache_limits.agreed


@pytest.mark.slow
def test_a_resumed_run_keeps_the_cache_that_was_agreed(monkeypatch, tmp_path):
    """Few blocks change the order in which rows run. The limit is measured again after the first step, before
    its checkpoint, and stays although more memory is free later."""
    directory = write_task(tmp_path)
    free = [1 << 17, 1 << 18]

    def free_bytes(device, *, num_users):
        return free.pop() if len(free) > 1 else free[0]

    monkeypatch.setattr(cache_memory, "free_bytes", free_bytes)
    whole = tmp_path / "whole"
    trainer = _trainer(directory, whole)
    trainer.run()
    assert _limits(trainer) == {"actor_generate": 1 << 16}
    first = whole / "checkpoints" / "step_1"
    (saved,) = Manifest.load(first).ranks
    assert saved["cache_limits"] == {"actor": {"d1@0": {"actor_generate": 1 << 16}}}
    free[0] = 1 << 30
    resumed = _trainer(directory, tmp_path / "again", start=first)
    resumed.run()
    assert _limits(resumed) == {"actor_generate": 1 << 16}
    assert untimed(tmp_path / "again" / "metrics.jsonl") == untimed(whole / "metrics.jsonl")
    weights = {name: entry for name, entry in Manifest.load(whole / "checkpoints" / "step_2").files.items()
               if name.startswith("rank_")}
    again = Manifest.load(tmp_path / "again" / "checkpoints" / "step_2").files
    assert {name: again[name] for name in weights} == weights
    other = _trainer(
        directory, tmp_path / "other", start=first,
        plan=ExecutionPlan.from_dict({"calls": dict.fromkeys(
            ("actor_generate", "ref_forward", "actor_train"), {"layout": "d1@0"}) | {
            "actor_generate": {"layout": "d1@0", "max_rows": 5}}}))
    other.run()
    assert _limits(other)["actor_generate"] > 1 << 29, "another plan agrees anew"


def test_a_recorded_cache_that_does_not_fit_any_more_is_refused(monkeypatch, tmp_path):
    directory = write_task(tmp_path)
    free = [1 << 30]
    monkeypatch.setattr(cache_memory, "free_bytes", lambda device, *, num_users: free[0])
    _trainer(directory, tmp_path / "whole").run()
    free[0] = 1 << 10
    resumed = _trainer(directory, tmp_path / "again", start=tmp_path / "whole" / "checkpoints" / "step_1")
    with pytest.raises(UserError) as error:
        resumed.run()
    text = str(error.value)
    assert text.startswith("actor_generate: the KV cache of this run takes ")
    assert " on rank 0, as when it began, and " in text and "set kv_cache_gib" in text


@pytest.mark.slow
def test_a_plan_with_rows_may_take_all_that_passes_leave(monkeypatch, tmp_path):
    directory = write_task(tmp_path)
    monkeypatch.setattr(cache_memory, "free_bytes", lambda device, *, num_users: 1 << 24)
    layouts = dict.fromkeys(("actor_generate", "ref_forward", "actor_train"), {"layout": "d1@0"})
    limits = []
    for extra in ({}, {"max_rows": 24}):
        plan = ExecutionPlan.from_dict(
            {"calls": layouts | {"actor_generate": {"layout": "d1@0", **extra}}})
        trainer = _trainer(directory, tmp_path / f"run{len(limits)}", plan=plan, steps=1)
        trainer.run()
        limits.append(_limits(trainer)["actor_generate"])
    assert limits[0] == 1 << 23
    assert 1 << 23 < limits[1] < 1 << 24  # The passes take the rest.
