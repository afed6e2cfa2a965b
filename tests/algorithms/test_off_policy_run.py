"""Runs with recomputed log-probs, without lag: generator and trainer have the same weights."""

import math
from dataclasses import replace

import pytest

from realhf.execution_plan import ExecutionPlan
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import TIMED
from tests.runtime.tiny import make_experiment, write_task

CALLS = ("actor_generate", "actor_forward", "actor_train")
ONE = ("d1@0",) * len(CALLS)


def _run(world, kind, task, proximal, layouts):
    """Return the metrics of a run, on rank 0."""
    experiment = make_experiment(kind, task, eval_dataset=None, steps=2)
    experiment = replace(experiment, loss=replace(experiment.loss, proximal=proximal))
    layout_of = dict(zip(CALLS, layouts, strict=True))
    names = [call.name for call in experiment.graph().calls if call.kind != "host"]
    calls = {name: {"layout": layout_of.get(name, "d1@0"), "micro_batch_tokens": 40} for name in names}
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=4)
    metrics = Trainer(program, world, quiet=True).run().metrics
    return metrics if world.rank == 0 else None


@pytest.mark.parametrize("kind", ["grpo", pytest.param("ppo", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_without_lag_recomputed_log_probs_are_those_of_the_generator(pool, tmp_path, kind):
    task = write_task(tmp_path)
    expected = pool.run(_run, kind, task, "generated", ONE)[0]
    spread = pool.run(_run, kind, task, "recomputed", ("d4@0-3", "t2@2-3", "d2t2@0-3"))[0]
    for plain, step in zip(expected, spread, strict=True):
        for one in (plain, step):
            assert 0 <= one["mismatch/kl"] < 1e-12 and 0 < one["mismatch/max"] < 1e-9
            assert one["mismatch/ess"] == pytest.approx(1.0, abs=1e-9) and one["mismatch/updates"] == 0
        assert step["actor/importance_weight"] == pytest.approx(1.0, rel=1e-9)
        measured = (*TIMED, "realloc", "compute/")  # One forward pass more.
        names = [name for name in plain if not name.startswith(measured)]
        assert {"actor/grad_norm", "actor/approx_kl"} <= set(names) <= set(step)
        for name in names:
            assert math.isclose(step[name], plain[name], rel_tol=1e-9, abs_tol=1e-12), name
    assert expected[0]["actor/approx_kl"] > 1e-9 and expected[-1]["actor/grad_norm"] > 1e-3
