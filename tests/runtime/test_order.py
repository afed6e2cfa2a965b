"""Whole runs by the code for NCCL, over gloo: one thread posts, and all posts drain as one chain."""

import pytest
import torch

from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.layout import Layout
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from realhf.runtime.weights import model_store
from realhf.runtime.weights.reallocations import StreamRunner
from tests.distributed.emulated_nccl import NcclWorld
from tests.distributed.recording import MESSAGES, fault_of
from tests.runtime.tiny import Recorder, make_experiment, recording, write_task

CALLS = ("actor_generate", "ref_forward", "actor_train")
RUNS = [
    (("t2@0-1", "d2@2-3", "d2t2@0-3"), 0),
    (("d2@0-1", "t2@2-3", "d2@2-3"), 2),
    (("d4@0-3", "d2p2@0-3", "t2p2@3,1,0,2"), 1),
    (("d1@3", "p2@0-1", "d2t2@0-3"), 1),
    (("p4@0-3", "d2@2-3", "t2p2@0-3"), 0),
    (("d2p2@0-3", "t2p2@3,1,0,2", "p2@1-2"), 1),
    (("t2p2@0-3", "p2@0-1", "d2p2@0-3"), 0),
    (("p2@2-3", "d2@0-1", "d2@0-1"), 1),
]


def _run(world, task, layouts, max_lag, by_nccl):
    """Train three steps; return the metrics, the tokens of each step on one rank, and this rank's posts."""
    plans = zip(CALLS, layouts, strict=True)
    plan = ExecutionPlan({name: CallPlan(Layout.parse(text)) for name, text in plans})
    options = {"eval_dataset": None, "steps": 3, "max_lag": max_lag, "work_stealing": False}
    recorder = Recorder()
    experiment = recording(make_experiment("grpo", task, **options), recorder)
    program = compile_program(experiment, plan, world_size=4)
    if not by_nccl:
        return Trainer(program, world, quiet=True).run().metrics, recorder.steps, []
    store = torch.distributed.PrefixStore(f"order {layouts} {max_lag}", world._store)
    nccl = NcclWorld(rank=world.rank, size=world.size, store=store, shared_memory=False)
    make = model_store.make_runner
    model_store.make_runner = StreamRunner
    try:
        return Trainer(program, nccl, quiet=True).run().metrics, recorder.steps, nccl.log.posts
    finally:
        model_store.make_runner = make


@pytest.mark.slow
@pytest.mark.parametrize(("layouts", "max_lag"), RUNS)
def test_posts_of_a_run_drain_as_one_chain_and_results_are_those_of_gloo(pool, tmp_path, layouts, max_lag):
    task = write_task(tmp_path)
    expected = pool.run(_run, task, layouts, max_lag, False)
    answers = pool.run(_run, task, layouts, max_lag, True)
    logs = {rank: posts for rank, (_, _, posts) in enumerate(answers)}
    assert fault_of(logs) == ""
    moved = [post for post in logs[0] if post.communicator.startswith("realloc")]
    assert moved and all(post.operation == MESSAGES for post in moved)
    assert [tokens for _, tokens, _ in answers] == [tokens for _, tokens, _ in expected]
    assert any(tokens for _, tokens, _ in answers)
    for step, wanted in zip(answers[0][0], expected[0][0], strict=True):
        for name in ("actor/grad_norm", "reward/mean", "response_length/mean"):
            assert step[name] == pytest.approx(wanted[name], rel=1e-4), name
