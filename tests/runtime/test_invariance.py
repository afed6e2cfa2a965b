"""Invariant 1: a plan changes speed, never results. Every layout against one process, in float64."""

import math
from functools import cache
from pathlib import Path

import pytest

from realhf.execution_plan import ExecutionPlan
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import TIMED
from tests.runtime.tiny import Recorder, make_experiment, recording, write_task
from tests.samples import marked

ROLE_CALLS = {
    "grpo": ("actor_generate", "ref_forward", "actor_train"),
    "ppo": (
        "actor_generate",
        "reward_forward",
        "ref_forward",
        "critic_forward",
        "actor_train",
        "critic_train",
    ),
}
UNIFORM = ("d4@0-3", "t2p2@0-3", "d3@1-3")
SLOW_UNIFORM = ("p4@0-3", "d2p2@0-3", "t4@0-3", "d2t2@0-3", "c4@0-3", "d2c2@0-3", "c2p2@0-3")
MIXED = {
    "grpo": [
        ("d4@0-3", "t2@2-3", "d2t2@0-3"),
        ("t2p2@0-3", "p2@0-1", "p4@3,2,1,0"),
        ("d2@0-1", "t2@0-1", "p2t2@0-3"),
        ("t4@0-3", "d1@3", "d2@1-2"),
        ("c2@0-1", "c4@0-3", "c2t2@3,1,0,2"),
    ],
    "ppo": [
        ("d4@0-3", "t2@2-3", "d2@0-1", "p2@2-3", "c2t2@3,1,0,2", "t2@0-1"),
        ("d2@0-1", "d1@2", "d1@3", "t2@2-3", "p2@0-1", "d2@2-3"),
    ],
}
SLOW = [(kind, (layout,) * len(calls)) for kind, calls in ROLE_CALLS.items() for layout in SLOW_UNIFORM]
SLOW += [("grpo", ("d2c2@0-3", "t2p2@0-3", "c2@1-2"))]
SLOW += [("ppo", ("c2p2@0-3", "c2@2-3", "d2@0-1", "c2t2@0-3", "d2c2@0-3", "c2@0-1"))]
SLOW += [("ppo", (layout,) * len(ROLE_CALLS["ppo"])) for layout in UNIFORM]
CASES = [("grpo", (layout,) * len(ROLE_CALLS["grpo"])) for layout in UNIFORM]
CASES += [(kind, layouts) for kind, rows in MIXED.items() for layouts in rows]


def run_plan(
    world, kind: str, layouts: tuple[str, ...], directory: Path
) -> tuple[list, list[dict], float] | None:
    recorder = Recorder()
    experiment = recording(make_experiment(kind, directory), recorder)
    calls = {
        call: {"layout": layout, "micro_batch_tokens": 40}
        for call, layout in zip(ROLE_CALLS[kind], layouts, strict=True)
    }
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=4)
    result = Trainer(program, world, quiet=True).run()
    return (recorder.steps, result.metrics, result.summary["eval_last"]) if world.rank == 0 else None


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    return write_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def reference(pool, task):
    """Return a function that gives the results of one process by kind."""
    return cache(lambda kind: pool.run(run_plan, kind, ("d1@0",) * len(ROLE_CALLS[kind]), task)[0])


@pytest.mark.parametrize(
    ("kind", "layouts"),
    marked([*CASES, *SLOW], quick=[8]),
    ids=lambda v: v if isinstance(v, str) else "-".join(dict.fromkeys(v)),
)
def test_plan_does_not_change_results(pool, task, reference, kind, layouts):
    tokens, metrics, score = pool.run(run_plan, kind, layouts, task)[0]
    expected_tokens, expected_metrics, expected_score = reference(kind)
    assert tokens == expected_tokens
    assert score == pytest.approx(expected_score, rel=1e-9)
    for ours, expected in zip(metrics, expected_metrics, strict=True):
        measured = (*TIMED, "realloc")
        names = [name for name in expected if not name.startswith(measured)]
        assert {"reward/mean", "actor/loss", "actor/grad_norm"} <= set(names)
        for name in names:
            assert math.isclose(ours[name], expected[name], rel_tol=1e-9, abs_tol=1e-12), (
                name,
                ours[name],
                expected[name],
            )


@pytest.mark.parametrize("kind", marked(ROLE_CALLS, quick=[1]))
def test_reference_run_learns_something(reference, kind):
    """Guards the table above: three steps must change the model and sample more than one response."""
    tokens, metrics, _ = reference(kind)
    assert len({tuple(t) for t in tokens[0]}) > 12
    assert all(m["actor/grad_norm"] > 1e-3 for m in metrics)
    assert metrics[-1]["actor/approx_kl"] > 1e-7
