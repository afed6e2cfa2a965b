"""Ranks compare plans, experiments, programs and schedules on real processes before they rely on them."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from realhf.errors import UserError
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.layout import Layout
from realhf.realloc import schedule
from realhf.realloc.schedule import make_schedule
from realhf.runtime.compile.actions import parameter_specs
from realhf.runtime.compile.equal_programs import require_equal_programs
from realhf.runtime.compile.program import compile_program
from realhf.runtime.weights.model_store import ModelStore
from tests.runtime.tiny import make_experiment, write_task

LAYOUTS = {"actor_generate": "d4@0-3", "ref_forward": "t2@2-3", "actor_train": "d2t2@0-3"}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("task"))


def _plan(**layouts):
    return ExecutionPlan({name: CallPlan(Layout.parse(text)) for name, text in (LAYOUTS | layouts).items()})


def _other_plan(program, rank):
    return compile_program(program.experiment, _plan(ref_forward="d2@2-3"), world_size=4)


def _other_rate(program, rank):
    actor = program.experiment.actor
    actor = replace(actor, optimizer=replace(actor.optimizer, lr=0.5))
    return replace(program, experiment=replace(program.experiment, actor=actor))


def _other_actions(program, rank):
    return replace(program, parts={name: actions[::-1] for name, actions in program.parts.items()})


def _other_place(program, rank):
    """Keep the dataset in a place of this rank's own."""
    dataset = program.experiment.dataset
    path = Path(dataset.path).with_name(f"rows_{rank}.jsonl")
    shutil.copy(dataset.path, path)
    moved = replace(program.experiment, dataset=replace(dataset, path=str(path)))
    return compile_program(moved, program.plan, world_size=4)


def _compare(world, task, change, ranks):
    program = compile_program(make_experiment("grpo", task), _plan(), world_size=4)
    try:
        require_equal_programs(world, change(program, world.rank) if world.rank in ranks else program)
    except UserError as error:
        return str(error)
    return None


# What some ranks have -> those ranks, and the sentence that all ranks get.
DIFFERENCES = {
    _other_plan: ((2,), "rank 2 has another plan than rank 0: calls.ref_forward.layout is 't2@2-3' on rank 0 "
                        "and 'd2@2-3' on rank 2; write one with"),
    _other_rate: ((1, 3), "ranks 1 and 3 have another experiment than rank 0: actor.optimizer.lr is 0."),
    _other_actions: ((1, 2, 3), "ranks 1, 2 and 3 have another compiled program than rank 0: step.0 is '"),
    _other_place: ((0, 1, 2, 3), None),
}


@pytest.mark.parametrize("change", DIFFERENCES)
def test_all_ranks_say_what_differs(change, pool, task):
    ranks, sentence = DIFFERENCES[change]
    found = pool.run(_compare, task, change, ranks)
    assert len(set(found)) == 1
    assert found[0] is None if sentence is None else found[0].startswith(sentence), found[0]


def _with_other_schedules(world, task, rank):
    """Build the models of a run where one rank's library lists what moves in another order."""
    program = compile_program(make_experiment("grpo", task), _plan(), world_size=4)
    bundles = schedule.make_bundles
    try:
        if world.rank == rank:
            schedule.make_bundles = lambda *placements: bundles(*placements)[::-1]
        ModelStore(world, program)
    except UserError as error:
        return str(error)
    finally:
        schedule.make_bundles = bundles
    return None


def test_schedules_are_compared_before_groups_are_made(pool, task):
    found = pool.run(_with_other_schedules, task, 3)
    assert len(set(found)) == 1
    assert found[0].startswith("ranks 0 and 3 have different schedules for the reallocation of actor from")
    assert pool.run(_with_other_schedules, task, None) == [None] * 4


def test_the_digest_of_a_schedule_tells_messages_apart(task):
    program = compile_program(make_experiment("grpo", task), _plan(), world_size=4)
    spec = parameter_specs(program.roles)["actor"]
    ends = {"source": Layout.parse("d2t2@0-3"), "target": Layout.parse("t4@0-3")}
    ways = [{"itemsize": size, "forward": forward} for size in (4, 8) for forward in (True, False)]
    made = [make_schedule(spec, **ends, **way) for way in ways]
    for one in made:
        for other in made:
            same = all(one.messages(rank) == other.messages(rank) for rank in range(4))
            assert same or one.digest != other.digest
    again = make_schedule(spec, **ends, itemsize=4)
    assert again.digest == made[0].digest
