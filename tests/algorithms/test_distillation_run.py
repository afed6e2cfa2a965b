"""Runs of distillation from two teachers: a plan that splits all calls gives the results of one process."""

import json
import math

import pytest
import torch
import transformers

from realhf import Distillation, Role
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.runtime.tiny import HF_CONFIG, common, role, some_reward, write_task
from tests.samples import marked

SPREAD = {
    "actor_generate": "d2t2@0-3", "teacher_1_forward": "t2@2-3", "teacher_2_forward": "c2p2@0-3",
    "actor_train": "d2t2@3,1,0,2", "reward_forward": "d2@0-1",
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """Return a directory with data, whose rows name teachers in turn, and with two teachers."""
    directory = write_task(tmp_path_factory.mktemp("task"))
    rows = [json.loads(line) for line in (directory / "data.jsonl").read_text().splitlines()]
    named = [row | {"domain": f"teacher_{1 + number % 2}"} for number, row in enumerate(rows)]
    (directory / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in named))
    config = transformers.AutoConfig.for_model(**HF_CONFIG)
    for seed in (1, 2):
        torch.manual_seed(seed)
        transformers.Qwen2ForCausalLM(config).double().save_pretrained(directory / f"teacher_{seed}")
    return directory


def _experiment(directory, changes):
    teachers = tuple(Role(str(directory / f"teacher_{number}"), dtype="float64") for number in (1, 2))
    settings = common(directory) | {"minibatches": 2, "eval_function": some_reward, "steps": 2}
    return Distillation(actor=role(directory), teachers=teachers, **(settings | changes))


def _run(world, changes, directory, layouts):
    experiment = _experiment(directory, changes)
    calls = {
        call.name: {"layout": layouts.get(call.name, "d1@0"), "micro_batch_tokens": 40}
        for call in experiment.graph().calls
    }
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=4)
    result = Trainer(program, world, quiet=True).run()
    return (result.metrics, result.summary["eval_last"]) if world.rank == 0 else None


VARIANTS = {
    "sampled": {"teacher_column": "domain"},
    "top_k": {"variant": "top_k", "top_k": 5, "teacher_weights": (3.0, 1.0)},
    "top_k_with_lag": {"variant": "top_k", "top_k": 18, "teacher_column": "domain", "max_lag": 1},
}


@pytest.mark.parametrize("name", marked(VARIANTS, quick=[2]))
@pytest.mark.slow
def test_a_plan_does_not_change_the_algorithm(pool, task, name):
    alone, score = pool.run(_run, VARIANTS[name], task, {})[0]
    spread, same_score = pool.run(_run, VARIANTS[name], task, SPREAD)[0]
    assert same_score == pytest.approx(score, rel=1e-9)
    measured = ("timing_s/", "perf/", "realloc", "bubble/", "compute/")
    for ours, expected in zip(spread, alone, strict=True):
        names = [key for key in expected if not key.startswith(measured)]
        if "actor/loss" in expected:  # With a lag, the first steps train on nothing.
            assert {"actor/reverse_kl", "actor/reverse_kl/teacher_1", "actor/entropy"} <= set(names)
            assert expected["actor/grad_norm"] > 1e-3 and expected["actor/reverse_kl/teacher_1"] > 0
        for key in names:
            assert math.isclose(ours[key], expected[key], rel_tol=1e-9, abs_tol=1e-12), key
    assert "actor/loss" in alone[-1]


def test_a_row_that_names_no_teacher_ends_the_check(task, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "domain": "teacher_2", "answer": "2"}\n'
                    '{"prompt": "1+2=", "domain": "math", "answer": "3"}\n')
    experiment = _experiment(task, VARIANTS["sampled"])
    experiment.dataset = experiment.eval_dataset = type(experiment.dataset)(str(path))
    experiment.batch_size = experiment.minibatches = 2
    plan = {"calls": {call.name: {"layout": "d1@0"} for call in experiment.graph().calls}}
    sentence = "line 2: domain is 'math': it must be one of teacher_1, teacher_2"
    with pytest.raises(ValueError, match=sentence):
        compile_program(experiment, ExecutionPlan.from_dict(plan), world_size=1)


def test_k_is_at_most_the_vocabulary(task):
    experiment = _experiment(task, {"variant": "top_k", "top_k": 19})
    plan = {"calls": {call.name: {"layout": "d1@0"} for call in experiment.graph().calls}}
    with pytest.raises(ValueError, match="k is 19: it must be at most 18, the vocabulary of teacher_1"):
        compile_program(experiment, ExecutionPlan.from_dict(plan), world_size=1)
