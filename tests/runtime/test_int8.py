"""Generation with weights in int8: every plan gives the results of one process, and runs resume exactly."""

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from realhf import LoraConfig, OptimizerConfig, PolicyLossConfig
from realhf.distributed.world import World
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.doubts.rules import warnings_of
from realhf.runtime.trainer import Trainer
from tests.cli_tools import TIMED
from tests.runtime.tiny import HF_CONFIG, Recorder, make_experiment, recording, role, write_task
from tests.samples import marked

CALLS = ("actor_generate", "ref_forward", "actor_forward", "actor_train")
PLANS = [
    ("d4@0-3", "d4@0-3", "d4@0-3", "d4@0-3"),  # From parts of each replica to whole copies.
    ("t2@0-1", "d1@2", "d1@3", "d2t2@0-3"),
    ("t2p2@0-3", "p2@0-1", "t4@0-3", "p4@3,2,1,0"),
    ("d1@0", "d1@1", "d1@2", "d2@1-2"),  # No rank has both.
    ("t4@0-3", "d1@3", "d2@1-2", "d1@0"),
    ("d2t2@0-3", "d1@3", "c2@1-2", "c2t2@3,1,0,2"),
]
MOE_PLANS = [("d2e2@0-1", "d1@2", "d1@3", "d2e2t2@0-3"), ("t2@0-1", "d1@2", "d1@3", "d4e4@0-3")]
EXPERTS = {
    "qwen3": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 8,
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True},
}
LOSS = PolicyLossConfig(kl_coef=0.05, proximal="recomputed", importance_cap=2.0)


def run_plan(
    world, layouts: tuple[str, ...], directory: Path, weights: str, lora: bool = False,
    out: Path | None = None, resume: bool = False,
) -> tuple[list, list[dict], dict] | None:
    recorder = Recorder()
    actor = replace(role(directory), lora=LoraConfig(rank=4, export_merged=True) if lora else None)
    experiment = recording(
        make_experiment(
            "grpo", directory, generation_weights=weights, loss=LOSS, actor=actor, checkpoint_every=1,
            keep_checkpoints=3, deterministic=True, work_stealing=False, kv_cache_gib=0.01),
        recorder)
    calls = {call: {"layout": layout} for call, layout in zip(CALLS, layouts, strict=True)}
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=4)
    start = newest_checkpoint(world, [out / "checkpoints" / "step_1"]) if resume and out else None
    result = Trainer(
        program, world, out=None if resume else out, checkpoint=start, quiet=True).run()
    return (recorder.steps, result.metrics, result.summary) if world.rank == 0 else None


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def experts(tmp_path_factory) -> Path:
    directory = write_task(tmp_path_factory.mktemp("experts"))
    (directory / "config.json").write_text(json.dumps(HF_CONFIG | EXPERTS["qwen3"]))
    return directory


@pytest.fixture(scope="module")
def reference(pool):
    """Return a function that gives the results of one process."""
    return cache(lambda *given: pool.run(run_plan, ("d1@0",) * 4, *given)[0])


def numbers(metrics: dict) -> dict:
    measured = (*TIMED, "realloc", "compute")
    return {name: value for name, value in metrics.items() if not name.startswith(measured)}


def assert_equal(ours, expected) -> None:
    assert ours[0] == expected[0]
    for mine, theirs in zip(ours[1], expected[1], strict=True):
        assert numbers(mine).keys() == numbers(theirs).keys()
        for name, value in numbers(theirs).items():
            assert math.isclose(mine[name], value, rel_tol=1e-9, abs_tol=1e-12), (name, mine[name], value)


@pytest.mark.parametrize(("layouts",), marked([(plan,) for plan in PLANS], quick=[1, 3]), ids="-".join)
def test_a_plan_does_not_change_results(pool, task, reference, layouts):
    assert_equal(pool.run(run_plan, layouts, task, "int8")[0], reference(task, "int8"))


@pytest.mark.parametrize(("layouts",), marked([(plan,) for plan in MOE_PLANS], quick=[0]), ids="-".join)
def test_nor_with_experts(pool, experts, reference, layouts):
    assert_equal(pool.run(run_plan, layouts, experts, "int8")[0], reference(experts, "int8"))


@pytest.mark.parametrize(("layouts",), marked([(plan,) for plan in PLANS[:2]], quick=[1]), ids="-".join)
def test_nor_under_adapters(pool, task, reference, layouts):
    assert_equal(pool.run(run_plan, layouts, task, "int8", True)[0], reference(task, "int8", True))


def test_a_run_resumes_bit_for_bit(pool, task, tmp_path):
    layouts = PLANS[1]
    steps, metrics, _ = pool.run(run_plan, layouts, task, "int8", False, tmp_path)[0]
    resumed = pool.run(run_plan, layouts, task, "int8", False, tmp_path, True)[0]
    assert resumed[0] == steps[1:]
    assert [numbers(m) for m in resumed[1]] == [numbers(m) for m in metrics[1:]]


def test_it_is_another_policy_whose_mismatch_is_logged(reference, task):
    int8, full = reference(task, "int8"), reference(task, "full")
    assert int8[0] != full[0]
    assert int8[1][0]["mismatch/max"] > 1e-3
    assert full[1][0]["mismatch/max"] < 1e-9
    assert int8[1][0]["mismatch/ess"] > 0.9


def sevens(completions: list[str], **_: object) -> list[float]:
    return [text.count("7") / max(1, len(text)) for text in completions]


def test_the_reward_rises(task):
    actor = replace(role(task), dtype="float32", optimizer=OptimizerConfig(lr=1e-2))
    experiment = make_experiment(
        "grpo", task, generation_weights="int8", loss=replace(LOSS, kl_coef=0.0), actor=actor,
        reward_function=sevens, steps=12, eval_dataset=None)
    plan = ExecutionPlan.from_dict({"calls": {
        call.name: {"layout": "d1@0"} for call in experiment.graph().calls if call.kind != "host"}})
    metrics = Trainer(compile_program(experiment, plan, world_size=1), World(), quiet=True).run().metrics
    rewards = [step["reward/mean"] for step in metrics]
    assert sum(rewards[:3]) / 3 < 0.3 and sum(rewards[-3:]) / 3 > 0.6


@pytest.mark.parametrize("changes, sentence", [
    ({"generation_weights": "int4"}, "generation_weights is int4: it must be one of full, int8"),
    ({"engine": "transformers"}, "actor.engine is transformers, which has them in full precision only"),
    ({"merge": True}, "actor.lora.merge writes the adapters into weights of full precision"),
    ({"layout": "d1@0/int8"}, "calls.actor_generate: layout ends in /int8: leave it out"),
])
def test_what_cannot_be_is_refused(task, changes, sentence):
    actor = role(task)
    if "engine" in changes:
        actor = replace(actor, engine="transformers")
    if "merge" in changes:
        actor = replace(actor, lora=LoraConfig(rank=4, export_merged=True, merge=True))
    with pytest.raises(ValueError, match=sentence):
        weights = changes.get("generation_weights", "int8")
        experiment = make_experiment("grpo", task, generation_weights=weights, loss=LOSS, actor=actor)
        calls = {call.name: {"layout": "d1@0"} for call in experiment.graph().calls if call.kind != "host"}
        calls["actor_generate"] = {"layout": changes.get("layout", "d1@0")}
        compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=1)


@pytest.mark.parametrize("loss, warns", [(PolicyLossConfig(), True), (LOSS, False)])
def test_weights_without_a_limit_are_doubted(task, loss, warns):
    experiment = make_experiment("grpo", task, generation_weights="int8", loss=loss, eval_dataset=None)
    calls = {call.name: {"layout": "d1@0"} for call in experiment.graph().calls if call.kind != "host"}
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=1)
    doubts = [text for text in warnings_of(program, None, {}) if "generation_weights is int8" in text]
    assert len(doubts) == warns
