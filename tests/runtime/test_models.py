"""ModelStore on four processes: shared memory, and the order of reallocations."""

import pytest
import torch
from safetensors.torch import load_file

from realhf.data.loader import Loader
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.layout import Layout
from realhf.runtime.compile.actions import Reallocate, Run
from realhf.runtime.compile.program import compile_program
from realhf.runtime.execute.executor import Executor, PartsProgram, RankState
from realhf.runtime.execute.host_call import HostContext
from realhf.runtime.trainer import Trainer
from realhf.runtime.weights import model_store
from realhf.runtime.weights.model_store import ModelStore
from realhf.runtime.weights.reallocations import StreamRunner
from tests.runtime.tiny import make_experiment, write_task
from tests.samples import marked

TRAIN = "d2t2@0-3"


def _program(task, **layouts):
    layouts = {"actor_generate": "t2@0-1", "ref_forward": "d4@0-3", "actor_train": TRAIN} | layouts
    plan = ExecutionPlan({name: CallPlan(Layout.parse(text)) for name, text in layouts.items()})
    return compile_program(make_experiment("grpo", task), plan, world_size=4)


def test_what_a_train_step_has_changed_goes_out_right_behind_it(tmp_path):
    actions = _program(write_task(tmp_path), actor_generate="d4@0-3").parts["step"]
    at = next(i for i, a in enumerate(actions) if isinstance(a, Run) and a.call.name == "actor_train")
    assert all(isinstance(a, Reallocate) and a.ahead for a in actions[at + 1 :])
    assert [(str(a.source), str(a.target), a.sharded) for a in actions[at + 1 :]] == [
        (TRAIN, "d4@0-3", True),  # out of the optimizer's shards
        ("d4@0-3", TRAIN, False),  # gathered for the next step where the generator's copy already is
    ]
    before = [a for a in actions[:at] if isinstance(a, Reallocate) and a.source_set == "actor"]
    assert before and not any(a.ahead for a in before)


def _share(world, task):
    program = _program(task)
    store = ModelStore(world, program)
    home = store.engines["actor", Layout.parse(TRAIN)].model.flat
    if world.rank > 1:
        return None
    return store.engines["actor", Layout.parse("t2@0-1")].model.flat.data_ptr() == home.data_ptr()


def test_equal_shards_are_one(pool, tmp_path):
    assert pool.run(_share, write_task(tmp_path)) == [True, True, None, None]


def _steps(world, task):
    """Return events of the reallocations of three steps, and how many were in flight after each step."""
    program = _program(task, actor_generate="d4@0-3")
    store = ModelStore(world, program)
    context, experiment = HostContext(str(task)), program.experiment
    settings = {"keys": program.graph.inputs, "group_size": experiment.group_size, "seed": 0}
    loader = Loader(experiment.dataset, tokenizer=context.tokenizer, **settings)
    executor = Executor(
        RankState(world, store, context),
        PartsProgram(program.parts, program.plan, loader.batch, experiment.group_size))
    seen = []
    for step in range(3):
        executor.begin_step(is_last=step == 2)
        executor.run("step", range(step * 6, step * 6 + 6))
        record = executor.take_record()
        events = [e for e in record.events if e["kind"] == "realloc" and e["name"] == "actor"]
        seen.append(([(e["transfer"], e["sent_bytes"]) for e in events], len(store.reallocations.in_flight)))
    return seen


def test_moves_once_per_update_and_gathers_for_nothing(pool, tmp_path):
    for steps in pool.run(_steps, write_task(tmp_path)):
        out, back = f"{TRAIN}->d4@0-3", f"d4@0-3->{TRAIN}"
        moved = [[transfer for transfer, _ in events] for events, _ in steps]
        assert moved == [[out], [out, back], [out, back]]
        assert [under_way for _, under_way in steps] == [2, 2, 0], "the last step sends nothing ahead"
        assert all(sent == 0 for events, _ in steps for transfer, sent in events if transfer == back)


def _train(world, task, out, layouts):
    plan = ExecutionPlan({name: CallPlan(Layout.parse(text)) for name, text in layouts.items()})
    experiment = make_experiment("grpo", task, eval_dataset=None, steps=3, export_every=1)
    program = compile_program(experiment, plan, world_size=4)
    return Trainer(program, world, out=out, quiet=True).run().metrics


@pytest.mark.parametrize("train", marked(["t2@0-1", "d2@0-1"], quick=[1]))
@pytest.mark.slow
def test_an_export_takes_its_turn_among_the_reallocations(pool, tmp_path, train):
    """Both use the same ranks, and reallocations for the next step are in flight when the export starts."""
    layouts = {"actor_generate": "p2@0-1", "ref_forward": "d2@0-1", "actor_train": train}
    (out := tmp_path / "run").mkdir()
    metrics, *_ = pool.run(_train, write_task(tmp_path), out, layouts)
    assert [step["realloc_over_bound/actor"] > 0 for step in metrics] == [True] * 3
    exported = [load_file(out / "hf" / f"step_{step}" / "model.safetensors") for step in (1, 2, 3)]
    for name, weight in exported[0].items():
        assert not torch.equal(weight, exported[1][name]) and not torch.equal(weight, exported[2][name]), name


def _train_with_one_posting_thread(world, *arguments):
    make = model_store.make_runner
    model_store.make_runner = StreamRunner
    try:
        return _train(world, *arguments)
    finally:
        model_store.make_runner = make


@pytest.mark.slow
@pytest.mark.parametrize("generate", marked(["t2@0-1", "d2@2-3"], quick=[1]))
def test_reallocations_that_the_main_thread_posts_change_nothing(pool, tmp_path, generate):
    """As on CUDA: at their place among the calls, in the thread of the calls, once all ranks are ready."""
    layouts = {"actor_generate": generate, "ref_forward": "d2@0-1", "actor_train": "d2t2@0-3"}
    task = write_task(tmp_path)
    metrics = []
    for name, train in (("thread", _train), ("posted", _train_with_one_posting_thread)):
        (out := tmp_path / name).mkdir()
        metrics.append(pool.run(train, task, out, layouts)[0])
    for thread, posted in zip(*metrics, strict=True):
        same = [name for name in thread if not name.startswith(("timing_s/", "perf/", "bubble/", "compute/"))]
        assert {name: thread[name] for name in same} == {name: posted[name] for name in same}
        assert "timing_s/realloc/actor" in posted
