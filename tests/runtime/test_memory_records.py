"""Memory of a run: recorded for each call beside the prediction; limits of caches kept by checkpoints."""

import json
from dataclasses import replace

import pytest

from realhf.checkpoint.run_state import Manifest
from realhf.cli.memory_prediction import predict_memory
from realhf.dist.world import World
from realhf.errors import UserError
from realhf.inference import cache_limit
from realhf.plan import ExecutionPlan
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import read_jsonl, untimed
from tests.runtime.tiny import make_experiment, role, write_task
from tests.samples import marked


def _trainer(directory, out, *, start=None, predicts=False, plan=None, **changes):
    settings = {"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 2, "eval_dataset": None} | changes
    experiment = make_experiment("grpo", directory, **settings)
    program = compile_program(experiment, plan, world_size=1)
    if predicts:
        found = predict_memory(experiment, program, nproc=1, cluster=None, profile=None)
        program = replace(program, predicted_memory=found)
    world = World()
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    return Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True)


@pytest.mark.parametrize("offload", marked([False, True], quick=[1]))
def test_each_call_records_its_memory_beside_the_prediction(tmp_path, offload):
    """On a CPU what the engines hold is counted. The parameters are float64: 8 bytes each."""
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
        assert event["memory_bytes"] == sum(parts.values())
        difference = event["predicted_memory_bytes"] - event["memory_bytes"]
        cache = parts.get("kv_cache", 0)
        assert (0 <= difference <= 0.5 * cache) if cache else difference == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())["memory"]
    for metrics in read_jsonl(tmp_path / "run" / "metrics.jsonl"):
        for call in ("actor_generate", "ref_forward", "actor_train"):
            of_call = [e for e in events if (e["step"], e["name"]) == (metrics["step"], call)]
            assert metrics[f"perf/memory_bytes/{call}"] == max(e["memory_bytes"] for e in of_call)
            assert metrics[f"perf/predicted_memory_bytes/{call}"] == of_call[0]["predicted_memory_bytes"]
            assert summary[call]["measured"] >= metrics[f"perf/memory_bytes/{call}"]
            assert summary[call]["predicted"] == of_call[0]["predicted_memory_bytes"]


def _limits(trainer):
    engines = trainer._state.models.engines._engines
    (engine,) = [engine for (name, _), engine in engines.items() if name == "actor"]
    return engine.cache_limits.agreed


@pytest.mark.slow
def test_a_resumed_run_keeps_the_cache_that_was_agreed(monkeypatch, tmp_path):
    """Few blocks change the order in which rows run. The limit stays although more memory is free later."""
    directory = write_task(tmp_path)
    free = [1 << 17]
    monkeypatch.setattr(cache_limit, "free_bytes", lambda device, *, num_users: free[0])
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
               if name.startswith("rank_")}  # fmt: skip
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
    monkeypatch.setattr(cache_limit, "free_bytes", lambda device, *, num_users: free[0])
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
    monkeypatch.setattr(cache_limit, "free_bytes", lambda device, *, num_users: 1 << 24)
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
