"""Invariant 3: resume is exact. A run that continues from a checkpoint gives the same bits under the
same plan, and the same numbers to summation order under another.
"""

import json
import zlib
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from realhf import DatasetConfig, Evaluation, FunctionCall, HostFunction, LoraConfig, RewardKL, Role
from realhf.checkpoint.run_state import Manifest, tensor_name
from realhf.data.order import row_order
from realhf.distributed.world import World
from realhf.execution_plan import ExecutionPlan
from realhf.graph import DataflowGraph
from realhf.runtime.checkpointer import Checkpoint, _host_states, newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from realhf.user_input.files import execute_file
from tests.cli_tools import untimed
from tests.runtime.test_invariance import ROLE_CALLS
from tests.runtime.tiny import make_experiment, role, some_reward, write_task
from tests.samples import marked

STEPS = 3


def average(experiment):
    """Return the experiment with a reference that is the moving average of the actor."""
    roles = experiment.roles()
    roles["ref"] = replace(roles["ref"], follows="actor", follow_rate=0.25)
    experiment.roles = lambda: roles
    return experiment


def third(row):
    """Leave out two thirds of the rows."""
    return row if int(row["answer"]) % 3 == 0 else None


def build(variant: str, directory: Path):
    settings = {"steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": STEPS, "eval_every": 2}
    if variant == "large file":
        large = DatasetConfig(str(directory / "data.jsonl"), preload=False, map=third)
        held_out = Evaluation(large, max_rows=5)
        return make_experiment(
            "grpo", directory, dataset=large, eval_dataset=held_out, max_lag=2, rounds=3, **settings)
    if variant == "lora":
        lora = LoraConfig(rank=3, target_modules=("q_proj", "v_proj", "down_proj"), export_merged=True)
        return make_experiment("grpo", directory, actor=replace(role(directory), lora=lora), **settings)
    if variant == "average":
        return average(make_experiment("grpo", directory, **settings))
    return make_experiment(variant, directory, **settings)


def run(world, variant: str, layouts: tuple[str, ...], directory: Path, out: Path, start: Path | None):
    calls = ROLE_CALLS["ppo" if variant == "ppo" else "grpo"]
    chosen = {call: {"layout": layout} for call, layout in zip(calls, layouts, strict=True)}
    plan = ExecutionPlan.from_dict({"calls": chosen})
    experiment = build(variant, directory)
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    program = compile_program(experiment, plan, world_size=world.size)
    Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()


def tensors(checkpoint: Path) -> dict:
    """Return the whole parameters and moments of a checkpoint: (set, kind, parameter) -> tensor."""
    found: dict = {}
    manifest = Manifest.load(checkpoint)
    files = {name: load_file(checkpoint / name) for name in manifest.files if name.endswith(".safetensors")}
    for name, saved in manifest.sets.items():
        for param, pieces in saved.pieces.items():
            shape = [max(region[dim][1] for _, region in pieces) for dim in range(len(pieces[0][1]))]
            for kind in saved.kinds:
                names = [(file, tensor_name(name, kind, param, region)) for file, region in pieces]
                parts = [(files[file][key], box) for (file, key), (_, box) in zip(names, pieces, strict=True)]
                whole = parts[0][0].new_full(shape, float("nan"))
                for part, region in parts:
                    whole[tuple(slice(*bounds) for bounds in region)] = part
                assert not whole.isnan().any(), f"{name} {kind} {param} has a hole"
                found[name, kind, param] = whole
    return found


CASES = [
    ("grpo", ("d4@0-3", "t2@2-3", "d2t2@0-3")),
    ("average", ("d4@0-3", "t2@2-3", "d2@0-1")),
    ("grpo", ("t2p2@0-3", "p2@0-1", "p4@3,2,1,0")),
    ("ppo", ("d4@0-3", "t2@2-3", "d2@0-1", "p2@2-3", "d2t2@0-3", "t2@0-1")),
    ("lora", ("d2@0-1", "t2@0-1", "d2t2@0-3")),
]


@pytest.mark.parametrize(
    ("variant", "layouts", "step"), marked(((*case, step) for case in CASES for step in (2, 1)), quick=[0]))
def test_every_checkpoint_continues_bit_for_bit(pool, tmp_path, variant, layouts, step):
    directory = write_task(tmp_path)
    whole = tmp_path / "whole"
    pool.run(run, variant, layouts, directory, whole, None)
    final = f"checkpoints/step_{STEPS}"
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == [
        f"step_{step}" for step in range(1, STEPS + 1)
    ]
    out = tmp_path / f"from_{step}"
    pool.run(run, variant, layouts, directory, out, whole / f"checkpoints/step_{step}")
    assert untimed(out / "metrics.jsonl") == untimed(whole / "metrics.jsonl")
    theirs, ours = (Manifest.load(path / final) for path in (whole, out))
    weights = [name for name in theirs.files if name.endswith(".safetensors")]
    assert {name: ours.files[name] for name in weights} == {name: theirs.files[name] for name in weights}
    assert ours.sets == theirs.sets
    summaries = [json.loads((path / "summary.json").read_text()) for path in (whole, out)]
    assert summaries[0]["eval_first"] == summaries[1]["eval_first"]
    assert summaries[0]["eval_last"] == summaries[1]["eval_last"]


def test_a_run_that_was_killed_before_its_summary_gets_it(tmp_path):
    directory, out = write_task(tmp_path), tmp_path / "out"
    layouts = ("d1@0",) * 3
    run(World(), "grpo", layouts, directory, out, None)
    summary = out / "summary.json"
    whole = json.loads(summary.read_text())
    summary.unlink()
    run(World(), "grpo", layouts, directory, out, out / f"checkpoints/step_{STEPS}")
    again = json.loads(summary.read_text())
    assert again["steps"] == STEPS and Path(again["hf_dir"]).exists()
    assert {key: again[key] for key in ("eval_first", "eval_last", "hf_dir", "tokens")} == {
        key: whole[key] for key in ("eval_first", "eval_last", "hf_dir", "tokens")}


@pytest.mark.slow
def test_rows_of_a_large_file_go_on_where_the_checkpoint_was(tmp_path):
    """With lag, rows of earlier prompts are read again after a resume; rows that are left out shift them."""
    directory = write_task(tmp_path)
    layouts = ("d1@0",) * 3
    outs = [tmp_path / "whole", tmp_path / "resumed"]
    run(World(), "large file", layouts, directory, outs[0], None)
    run(World(), "large file", layouts, directory, outs[1], outs[0] / "checkpoints/step_2")
    assert untimed(outs[1] / "metrics.jsonl") == untimed(outs[0] / "metrics.jsonl")
    lines = (directory / "data.jsonl").read_text().splitlines()
    kept = [i for i, line in enumerate(lines) if third(json.loads(line))]
    order = [row for row in row_order(40, start=0, count=400, seed=0, shuffle=True) if row in kept]
    for out in outs:
        rollouts = [json.loads(line) for line in (out / "rollouts.jsonl").read_text().splitlines()]
        assert rollouts and all(line["dataset_row"] == order[line["prompt_number"]] for line in rollouts)
        held_out = [json.loads(line) for line in (out / "eval.jsonl").read_text().splitlines()]
        assert len({line["prompt"] for line in held_out}) == len(held_out) == 5


def test_files_of_rows_that_have_changed_are_named(tmp_path, capsys):
    """A file that has only moved is the same; one of equal size and other rows is not."""
    directory = write_task(tmp_path)
    run(World(), "grpo", ("d1@0",) * 3, directory, tmp_path / "whole", None)
    checkpoint = tmp_path / "whole/checkpoints/step_2"
    data, held_out = Manifest.load(checkpoint).data.values()
    text = (directory / "data.jsonl").read_text()
    assert data == [{"file": str(directory / "data.jsonl"), "rows": 40, "bytes": len(text),
                     "crc32": zlib.crc32(text.encode())}]
    assert held_out[0]["rows"] == 5

    def warned(changed: str):
        (directory / "data.jsonl").write_text(changed)
        program = compile_program(build("grpo", directory), None, world_size=1)
        Trainer(program, World(), checkpoint=newest_checkpoint(World(), [checkpoint]))
        lines = capsys.readouterr().err.splitlines()
        return [line.removeprefix("realhf: warning: ") for line in lines if "since the checkpoint" in line]

    assert warned(text) == []
    says = f"dataset: {directory}/data.jsonl has changed since the checkpoint was saved: "
    (fewer,) = warned("".join(text.splitlines(keepends=True)[:-1]))
    assert fewer.startswith(f"{says}it had 40 rows and has 39, so the run does not go on as it would have")
    (other,) = warned(text.replace("1", "2"))
    assert other.startswith(f"{says}its 40 rows are not those that it had, so ")


REWARD = """
LIMIT = {limit}

def reward(completions):
    {note}return [len(c) / LIMIT for c in completions]
"""


def test_code_and_models_that_have_changed_are_named(tmp_path, capsys):
    """A comment in a reward's file changes nothing; a constant that it reads does, and so do weights."""
    directory = write_task(tmp_path)
    file = tmp_path / "scores_of_mine.py"

    def program(*, limit: int, note: str = "", steps: int = 2):
        file.write_text(REWARD.format(limit=limit, note=note))
        reward = execute_file(file, name="scores_of_mine").reward
        experiment = make_experiment(
            "grpo", directory, reward_function=reward, ref=Role(str(model)) if model.exists() else None,
            steps=steps, checkpoint_every=1, eval_dataset=None)
        return compile_program(experiment, None, world_size=1)

    def warned(**changes):
        Trainer(program(**changes), World(), checkpoint=newest_checkpoint(World(), [checkpoint]))
        lines = capsys.readouterr().err.splitlines()
        return [line.removeprefix("realhf: warning: ") for line in lines if "since the checkpoint" in line]

    model = tmp_path / "first/hf/step_1"
    Trainer(program(limit=4, steps=1), World(), out=tmp_path / "first").run()
    Trainer(program(limit=4, steps=1), World(), out=tmp_path / "run").run()
    checkpoint = tmp_path / "run/checkpoints/step_1"
    assert warned(limit=4, note="# A comment.\n    ") == []
    assert warned(limit=8) == [
        "scores_of_mine.py has changed since the checkpoint was saved (LIMIT): the run goes on with the new "
        "code"]
    (weights,) = model.glob("*.safetensors")
    tensors = load_file(weights)
    changed = {name: tensor * 1.5 for name, tensor in tensors.items()}
    save_file(changed, weights, metadata={"format": "pt"})
    assert warned(limit=4) == [
        "ref.model: the weights in its files have changed since the checkpoint was saved: the run goes on "
        "with another ref than it began with"]


class Failing:
    """An object that fails from a call on, in place of what it calls."""

    def __init__(self, function, *, at):
        self.calls = 0
        self.function = function
        self.at = at

    def __call__(self, *arguments, **options):
        self.calls += 1
        if self.calls >= self.at:
            raise ConnectionError("it is away")
        return self.function(*arguments, **options)


def failing(variant: str, directory: Path, *, at: int):
    """Return an experiment of which something fails from a call on."""
    settings = {"steps": 4, "checkpoint_every": "1h", "eval_every": 2}
    if variant == "lag":
        settings["max_lag"] = 1
    experiment = make_experiment("grpo", directory, **settings)
    if variant == "average":
        experiment = average(experiment)
    if variant in ("train", "second minibatch"):
        graph = experiment.graph()
        train = graph["actor_train"]
        loss = Failing(train.work.loss, at=at)
        for name in ("output", "entropy", "learns", "group_size", "token_ids", "totals", "summarize"):
            setattr(loss, name, getattr(train.work.loss, name))
        work = replace(train.work, loss=loss)
        graph = DataflowGraph([replace(c, work=work) if c is train else c for c in graph.calls], graph.inputs)
        experiment.graph = lambda: graph
        return experiment

    reward = Failing(some_reward, at=at)

    def reward_function(prompts, completions, completion_ids, answer):
        return reward(prompts, completions, completion_ids, answer)

    experiment.reward_function = reward_function
    return experiment


# With evaluations before step 1 and after steps 2 and 4, the reward is called for: 0, 1, 2, 2, 3, 4, 4.
# A loss is called three times more in the first mini-batch, which is compared with its halves.
RESCUES = [
    ("reward", 5, 2), ("evaluation", 4, 2), ("evaluation", 7, 4), ("average", 5, 2), ("lag", 5, 2),
    ("train", 5, 2), ("second minibatch", 6, None), ("reward", 2, None),
]


@pytest.mark.parametrize(("variant", "at", "step"), marked(RESCUES, quick=[4, 6]))
def test_a_failing_run_saves_its_last_finished_step(tmp_path, capsys, variant, at, step):
    """What continues from there is what nothing has ended, bit for bit."""
    directory = write_task(tmp_path)
    whole = tmp_path / "whole"
    program = compile_program(failing(variant, directory, at=10**6), None, world_size=1)
    Trainer(program, World(), out=whole, quiet=True).run()
    out = tmp_path / "out"
    program = compile_program(failing(variant, directory, at=at), None, world_size=1)
    with pytest.raises(Exception, match="it is away"):
        Trainer(program, World(), out=out, quiet=True).run()
    saved = [path.name for path in (out / "checkpoints").iterdir()]
    assert saved == ([] if step is None else [f"step_{step}"])
    assert ("actor has been updated since" in capsys.readouterr().err) == (variant == "second minibatch")
    if step in (None, 4):
        return
    checkpoint = newest_checkpoint(World(), [out / "checkpoints" / saved[0]])
    program = compile_program(failing(variant, directory, at=10**6), None, world_size=1)
    Trainer(program, World(), out=out, checkpoint=checkpoint, quiet=True).run()
    theirs, ours = (Manifest.load(path / "checkpoints/step_4") for path in (whole, out))
    files = [name for name in theirs.files if name.endswith(".safetensors")]
    assert {name: ours.files[name] for name in files} == {name: theirs.files[name] for name in files}
    steps = [untimed(path / "metrics.jsonl") for path in (whole, out)]
    if variant == "evaluation":  # The one that has failed is not made up for.
        steps = [[{k: v for k, v in m.items() if not k.startswith("eval/")} for m in ms] for ms in steps]
        assert [m["step"] for m in steps[0]] == [m["step"] for m in steps[1]]
        steps = [[m for m in ms if m["step"] != step] for ms in steps]
    assert steps[0] == steps[1]


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["grpo", "average", "lora"])
def test_another_layout_continues_to_summation_order(pool, tmp_path, variant):
    directory = write_task(tmp_path)
    whole = tmp_path / "whole"
    pool.run(run, variant, ("d4@0-3", "d4@0-3", "d4@0-3"), directory, whole, None)
    expected = tensors(whole / f"checkpoints/step_{STEPS}")
    for layouts in [("t2p2@0-3", "d4@0-3", "t2p2@0-3"), ("d2@0-1", "t2@0-1", "p2@0-1"), ("d1@0",) * 3]:
        out = tmp_path / layouts[0]
        job = (variant, layouts, directory, out, whole / "checkpoints/step_1")
        if layouts[0] == "d1@0":
            run(World(), *job)
        else:
            pool.run(run, *job)
        found = tensors(out / f"checkpoints/step_{STEPS}")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert (found[key] - value).abs().max() <= 1e-9 * max(1.0, value.abs().max()), key
        steps = [
            [m for m in untimed(path / "metrics.jsonl") if m["step"] > 1] for path in (whole, out)
        ]
        for theirs, ours in zip(*steps, strict=True):
            for metric in theirs.keys() & ours.keys():
                if not metric.startswith("realloc_"):
                    assert ours[metric] == pytest.approx(theirs[metric], rel=1e-9, abs=1e-9), metric


def count_calls(batch, context):
    """Count the calls, and log what another call of the same rank has left in the state."""
    context.state.setdefault("steps", []).append(context.step)
    return {}, {"host/calls": float(len(context.state["steps"])), "host/keys": float(len(context.state))}


def _run_with_state(world, places, directory, out, start, steps):
    """Run up to `steps` with host calls on these ranks; the adaptive KL coefficient is a state of one."""
    experiment = make_experiment(
        "grpo", directory, steps=steps, checkpoint_every=1, keep_checkpoints=9, eval_every=1,
        reward_kl=RewardKL(kl_coef=0.1, kl_target=1e-6, kl_horizon=50),
        eval_dataset=DatasetConfig(str(directory / "data.jsonl"), max_rows=4))
    graph = experiment.graph()
    counter = FunctionCall("counter", "host", ("score",), (), work=HostFunction(count_calls))
    experiment.graph = lambda: graph.add(counter)
    named = zip(("advantages", "counter"), places, strict=True)
    calls = {name: {"layout": f"d1@{place}"} for name, place in named}
    for call in ("actor_generate", "ref_forward", "actor_train"):
        calls[call] = {"layout": "d2@0-1"}
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    plan = ExecutionPlan.from_dict({"calls": calls})
    program = compile_program(experiment, plan, world_size=world.size)
    Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()


@pytest.mark.slow
def test_states_of_host_calls_follow_them_through_changes_of_plan(pool, tmp_path):
    """Twice, so that a rank that had the state once has an old copy of it when it comes back."""
    directory = write_task(tmp_path)
    pool.run(_run_with_state, (0, 0), directory, tmp_path / "whole", None, 4)
    start = None
    for step, places in ((1, (3, 3)), (2, (0, 0)), (3, (3, 1)), (4, (2, 0))):
        out = tmp_path / f"to_{step}"
        pool.run(_run_with_state, places, directory, out, start, step)
        start = out / f"checkpoints/step_{step}"
    whole, parts = (untimed(tmp_path / name / "metrics.jsonl") for name in ("whole", "to_4"))
    for metric in ("reward/kl_coef", "host/calls", "host/keys"):
        expected = [record[metric] for record in whole if record["step"] > 0]
        found = [record[metric] for record in parts if record["step"] > 0]
        assert found == pytest.approx(expected, rel=1e-9), metric
    coefficients = [record["reward/kl_coef"] for record in whole if record["step"] > 0]
    assert len(set(coefficients)) == 4
    assert [record["host/calls"] for record in whole if record["step"] > 0] == [1, 2, 3, 4]
    assert all(record["host/keys"] == 1 for record in whole if record["step"] > 0)


def test_states_of_evaluations_go_from_place_to_place(tmp_path):
    """Those of the layout that the old plan has for evaluations alone, whose ranks have another order."""
    directory = write_task(tmp_path)
    experiment = make_experiment(
        "grpo", directory, eval_every=1,
        eval_dataset=DatasetConfig(str(directory / "data.jsonl"), max_rows=4))
    (name,) = (call.name for call in experiment.eval_graph().of_kind("host"))

    def program(layout: str):
        whole = compile_program(experiment, None, world_size=4).plan
        own = ExecutionPlan.from_dict({"calls": {f"eval/{name}": {"layout": layout}}})
        return compile_program(experiment, replace(whole, calls={**whole.calls, **own.calls}), world_size=4)

    states = [{f"eval/{name}": {"place": 1}}, {f"eval/{name}": {"place": 0}}, {}, {}]
    before = program("d2@1,0").plan.to_dict()
    manifest = Manifest(1, 4, {}, before, {}, {}, {}, {}, tuple({"host_states": state} for state in states))
    for rank, place in {2: 0, 3: 1}.items():
        restored = _host_states(Checkpoint(tmp_path, manifest), program("d2@2-3"), rank)
        assert restored == {f"eval/{name}": {"place": place}}


def test_a_failing_run_saves_a_step_whose_checkpoint_could_not_be_written(tmp_path, capsys):
    """The checkpoint of step 2 finds no directory for checkpoints; the reward of step 3 fails."""
    directory = write_task(tmp_path)
    out = tmp_path / "out"
    experiment = failing("reward", directory, at=5)
    reward = experiment.reward_function
    calls = []

    def reward_function(prompts, completions, completion_ids, answer):
        calls.append(1)
        if len(calls) == 3:  # That of step 2. A file takes the place of the directory.
            (out / "checkpoints").rename(out / "away")
            (out / "checkpoints").write_text("")
        if len(calls) == 5:
            (out / "checkpoints").unlink()
            (out / "away").rename(out / "checkpoints")
        return reward(prompts, completions, completion_ids, answer)

    experiment.reward_function = reward_function
    experiment.checkpoint_every = 2
    program = compile_program(experiment, None, world_size=1)
    with pytest.raises(Exception, match="it is away"):
        Trainer(program, World(), out=out, quiet=True).run()
    assert "there is no checkpoint of step 2: " in capsys.readouterr().err
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_2"]
    assert newest_checkpoint(World(), [out / "checkpoints/step_2"]).manifest.step == 2
