"""Roles of any module: training against a plain loop of torch, and the same numbers under every plan."""

import json
import re
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from realhf import (
    ArrayDataset,
    DataflowGraph,
    ForwardFunction,
    FunctionCall,
    HostFunction,
    ModuleRole,
    TrainFunction,
)
from realhf.checkpoint.run_state import Manifest
from realhf.data.loader import make_loader
from realhf.data.order import row_order
from realhf.distributed.world import World
from realhf.execution_plan import ExecutionPlan
from realhf.models.model_config import ModuleConfig
from realhf.models.modules import module_of, module_spec
from realhf.runtime.checkpointer import Checkpoint, _host_states, newest_checkpoint
from realhf.runtime.compile.equal_programs import _actions
from realhf.runtime.compile.program import compile_program
from realhf.runtime.execute.asking import _Mail
from realhf.runtime.execute.module_trial import try_functions
from realhf.runtime.trainer import Trainer
from realhf.user_input.files import execute_file
from tests.cli_tools import REPO, TIMED
from tests.control.modules import (
    Net,
    Policy,
    Recurrent,
    Regression,
    act,
    data,
    experiment,
    play,
    squared_error,
)
from tests.docs_pages import fences

PLANS = {
    "regression": [{"net_train": "d4@0-3"}, {"net_train": "d3@3,1,2"}],
    "actor_critic": [
        {"value": "d1@1", "critic_train": "d2@0-1", "actor_train": "d1@1", "temperature_train": "d1@0"},
        {"value": "d2@0-1", "show": "d1@2", "critic_train": "d1@3", "actor_train": "d4@0-3",
         "temperature_train": "d1@1"}],
    "player": [
        {"play": "d1@0", "act": "d1@1", "actor_train": "d1@1"},
        {"play": "d1@0", "act": "d2@0,3", "actor_train": "d2@1-2"}],
}


def trained(world, kind: str, layouts: dict[str, str] | None, settings: dict) -> list[dict]:
    """Run an experiment under a plan, and return its metrics."""
    made = experiment(kind, **settings)
    plan = {call.name: {"layout": "d1@0"} for call in made.graph().calls}
    plan |= {name: {"layout": layout, "micro_batch_tokens": 5} for name, layout in (layouts or {}).items()}
    program = compile_program(made, ExecutionPlan.from_dict({"calls": plan}), world_size=world.size)
    return Trainer(program, world, quiet=True).run().metrics


def assert_equal(metrics: list[dict], expected: list[dict]) -> None:
    assert len(metrics) == len(expected) > 0
    for ours, theirs in zip(metrics, expected, strict=True):
        names = [name for name in theirs if not name.startswith((*TIMED, "realloc"))]
        assert any(name.endswith("/loss") for name in names)
        for name in names:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12), name


@pytest.mark.parametrize(("kind", "lag", "layouts"), [
    *((kind, 0, layouts) for kind, plans in PLANS.items() for layouts in plans),
    *(("player", 1, layouts) for layouts in PLANS["player"])])
def test_plans_do_not_change_results(pool, kind, lag, layouts):
    """Copies of roles that are read, averages, buffers, noise, and answers on other ranks are the same."""
    settings = {"max_lag": lag}
    expected = trained(World(), kind, None, settings)
    assert_equal(pool.run(trained, kind, layouts, settings)[0], expected)
    assert expected[0] != expected[-1]


JUDGED = {"early_train": "d1@1", "actor_train": "d1@1"}


@pytest.mark.parametrize("layouts", [
    {"prepare": "d1@1", "play": "d1@0", "act": "d1@1", "judge": "d1@1"},
    {"prepare": "d1@2", "play": "d1@0", "act": "d1@2", "judge": "d2@2-3"},
    {"prepare": "d1@1", "play": "d1@0", "act": "d1@0", "judge": "d1@2"}])
def test_one_rank_answers_several_calls_when_their_asker_runs(pool, layouts):
    """Whatever the plan, the weights that answer are those at the asker's turn, and no rank waits forever."""
    expected = trained(World(), "judged", None, {})
    assert_equal(pool.run(trained, "judged", JUDGED | layouts, {})[0], expected)
    assert [metrics["play/version"] for metrics in expected] == [1, 3, 5]


SIZES = (0, 1, 4087, 4088, 4089, 300_000)


def exchanged(world) -> list[tuple[int, list[int]]]:
    """Let ranks 1 to 3 send bytes of many sizes to rank 0, which takes them as they come, and sends sums."""
    ranks = [1, 2, 3] if world.rank == 0 else [0]
    tags = (900, 901) if world.rank else (901, 900)
    mail = _Mail(world, ranks, sends=tags[0], receives=tags[1])
    got: list[tuple[int, list[int]]] = []
    if world.rank:
        for size in SIZES:
            mail.send(0, torch.full((size,), world.rank, dtype=torch.uint8))
    for _ in range(len(SIZES) * len(ranks)):
        rank, data = mail.receive()
        got.append((rank, [len(data), int(data.long().sum())]))
        if world.rank == 0:
            mail.send(rank, data)
    mail.close()
    return got


def test_bytes_of_any_size_come_from_whoever_sends(pool):
    results = pool.run(exchanged)
    for rank in (1, 2, 3):
        expected = [[size, size * rank] for size in SIZES]
        assert [what for sender, what in results[0] if sender == rank] == expected
        assert [what for _, what in results[rank]] == expected


def test_lag_is_that_of_the_weights_that_answer():
    runs = {lag: trained(World(), "player", None, {"max_lag": lag}) for lag in (0, 1)}
    versions = {lag: [metrics.get("play/version") for metrics in run] for lag, run in runs.items()}
    assert versions == {0: [0, 1, 2, 3], 1: [0, 1, 2, None]}  # Step 1 plays twice, and the last one never.


def plain_loop(module: torch.nn.Module, steps: int) -> list[float]:
    """Train with torch's own AdamW on the rows that the run reads, in its mini-batches."""
    columns = data()
    values = (lambda x: module(x[:, None])) if isinstance(module, Recurrent) else module
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0)
    losses = []
    for step in range(steps):
        order = row_order(60, start=12 * step, count=12, seed=0, shuffle=True)
        of_step = []
        for _ in range(2):
            for rows in (order[:6], order[6:]):
                loss = (values(columns["x"][rows]) - columns["y"][rows]).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                of_step.append(loss.item())
        losses.append(sum(of_step) / 4)
    return losses


class Later(Net):
    """Changes its buffer in place after the layers, before their backward pass."""

    def forward(self, *inputs):
        value = self.net(torch.cat(inputs, -1)).squeeze(-1)
        self.seen.add_(value.detach().mean())
        return value


@pytest.mark.parametrize("module", [Net, Recurrent, Later])
def test_training_is_that_of_a_plain_loop(module, tmp_path):
    reads = squared_error
    if module is Recurrent:
        reads = lambda net, batch: (net(batch["x"][:, None]) - batch["y"]).square()  # noqa: E731
    made = Regression(
        module=module, dataset=ArrayDataset(data()), batch_size=12, steps=4,
        work=TrainFunction(reads, minibatches=2, epochs=2))
    program = compile_program(made, None, world_size=1)
    result = Trainer(program, World(), out=tmp_path, quiet=True).run()
    config = ModuleConfig.of(module, {})
    reference = module_of(config, seed=0).double()
    assert [m["net/loss"] for m in result.metrics] == pytest.approx(plain_loop(reference, 4), rel=1e-12)
    exported = load_file(tmp_path / "hf/step_4/model.safetensors")
    fresh = module().double()
    fresh.load_state_dict(exported)
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(exported[name], tensor, rtol=1e-12, atol=1e-12)
    again = Regression(
        module=module, settings={"model": str(tmp_path / "hf/step_4")}, dataset=ArrayDataset(data()),
        batch_size=12, steps=1, work=made.work)
    first = Trainer(compile_program(again, None, world_size=1), World(), quiet=True).run().metrics[0]
    assert first["net/loss"] == pytest.approx(plain_loop(fresh, 1)[0], rel=1e-12)


def test_optimizer_steps_take_no_stacks(monkeypatch):
    """`torch.manual_seed` takes one, for a CUDA device that may come into use, which costs milliseconds."""
    counts = []
    for steps in (1, 4):
        stacks = []
        monkeypatch.setattr(traceback, "format_stack", lambda *args: stacks.append(args) or [])  # noqa: B023
        assert len(trained(World(), "regression", None, {"steps": steps})) == steps
        counts.append(len(stacks))
    assert counts[1] - counts[0] <= 3, "at most one in a step, of several optimizer steps"


@pytest.mark.parametrize("kind", PLANS)
def test_hosts_compare_programs_without_addresses(kind):
    """Two hosts have the same functions at other addresses."""
    plan = {call.name: {"layout": "d1@0"} for call in experiment(kind).graph().calls}
    plan |= {name: {"layout": layout} for name, layout in PLANS[kind][0].items()}
    program = compile_program(experiment(kind), ExecutionPlan.from_dict({"calls": plan}), world_size=4)
    words = json.dumps(_actions(program))
    assert all(call.name in words for call in program.experiment.graph().calls) and " at 0x" not in words


def test_weighted_means_are_over_the_weights():
    seen = []

    def error(net, batch):
        loss = (net(batch["x"]) - batch["y"]).square()
        seen.append((loss.detach(), batch["reward"].abs()))
        return loss

    def weights(batch, context):
        return {"weight": batch["reward"].abs()}

    made = experiment("regression", steps=1)
    whole = DataflowGraph((
        FunctionCall("weights", inputs=("reward",), outputs=("weight",), work=HostFunction(weights)),
        FunctionCall(
            "net_train", role="net", inputs=("x", "y", "reward", "weight"),
            work=TrainFunction(error, weights="weight"))), inputs=("x", "y", "reward"))
    made.graph = lambda: whole
    (metrics,) = Trainer(compile_program(made, None, world_size=1), World(), quiet=True).run().metrics
    loss, weight = seen[0]
    assert metrics["net/loss"] == pytest.approx(float((loss * weight).sum() / weight.sum()), rel=1e-12)


def worst(net, batch):
    return net(batch["x"]).square(), {"y/max": batch["y"], "y": batch["y"]}


def test_maxima_are_over_all_rows(pool):
    settings = {"work": TrainFunction(worst), "steps": 1}
    expected = data()["y"][row_order(60, start=0, count=12, seed=0, shuffle=True)]
    for metrics in (trained(World(), "regression", None, settings)[0],
                    pool.run(trained, "regression", {"net_train": "d3@0-2"}, settings)[0][0]):
        assert metrics["y/max"] == pytest.approx(float(expected.max()))
        assert metrics["net/y"] == pytest.approx(float(expected.mean()))


@pytest.mark.gpu
def test_equal_weights_are_on_the_device_of_the_losses():
    made = experiment("regression", steps=1)
    program = compile_program(made, None, world_size=1)
    losses = [Trainer(program, World(device=torch.device(device)), quiet=True).run().metrics[0]["net/loss"]
              for device in ("cpu", "cuda")]
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("kind", ["actor_critic", "player"])
def test_resume_is_exact(kind, tmp_path):
    def run(name: str, steps: int):
        program = compile_program(
            experiment(kind, steps=steps, checkpoint_every=2, keep_checkpoints=9), None, world_size=1)
        out = tmp_path / name
        start = newest_checkpoint(World(), [*(out / "checkpoints").glob("step_*")])
        Trainer(program, World(), out=out, checkpoint=start, quiet=True).run()
        exported = sorted((out / f"hf/step_{steps}").rglob("*.safetensors"))
        return [load_file(path) for path in exported]

    expected = run("whole", 5)
    run("cut", 2)
    resumed = run("cut", 5)
    assert len(resumed) == len(expected) > 0
    for ours, theirs in zip(resumed, expected, strict=True):
        for name in theirs:
            assert torch.equal(ours[name], theirs[name]), name


def test_a_module_has_all_of_its_parameters_and_buffers():
    spec = module_spec(ModuleConfig.of(Net, {"inputs": 3}))
    module = Net(3)
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert {param.name: param.shape for param in spec.params} == shapes
    assert [p.name for p in spec.params if not p.trainable] == ["seen"]


def raises(net, batch):
    raise RuntimeError("not today")


REFUSALS = [
    ({"inputs": ("x", "z"), "graph_inputs": ("x", "z")}, "dataset .* has no column 'z', which the graph"),
    ({"work": TrainFunction(lambda net, batch: net(batch["x"]) - batch["z"])}, "reads the column 'z'.*x, y"),
    ({"work": TrainFunction(lambda net, batch: net(batch["x"]).mean())}, r"losses must .* \(12,\), .*\(\)$"),
    ({"work": TrainFunction(lambda net, batch: (net(batch["x"]), {"m": batch["x"]}))}, r"metric 'm' .*12, 5"),
    ({"work": TrainFunction(lambda net, batch: net(batch["x"]).detach())}, "depend on no parameter of net"),
    ({"work": TrainFunction(lambda net, batch: (net(batch["x"]), 1.0))}, "returned float as metrics"),
    ({"work": TrainFunction(lambda net, batch: (net(batch["x"]), {"lr": batch["y"]}))}, "the metric 'lr'"),
    ({"work": TrainFunction(raises)}, "call 'net_train' raised RuntimeError: not today"),
    ({"work": TrainFunction(lambda net: net)}, "cannot be called with two arguments, the module and the"),
    ({"work": TrainFunction(squared_error, weights="w")}, "weights is 'w': it must be one of its inputs, x"),
    ({"work": TrainFunction(squared_error, noise={"x": (1,)})}, "noise has 'x', which is an input"),
    ({"settings": {"arguments": {"inputs": "five"}}}, "tests.control.modules.Net cannot be made with"),
    ({"settings": {"model": "nowhere"}}, "net.model 'nowhere' has no model.safetensors"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSALS)
def test_faults_are_sentences(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        made = experiment("regression", steps=1, **settings)
        Trainer(compile_program(made, None, world_size=1), World(), quiet=True).run()


def test_the_regression_of_the_guide_learns(tmp_path):
    (text,) = (text for language, text in fences(REPO / "docs/control.md") if language == "python")
    (tmp_path / "regression.py").write_text(text)
    made = execute_file(tmp_path / "regression.py", name="regression_of_the_guide").experiment
    steps = Trainer(compile_program(made, None, world_size=1), World(), quiet=True).run().metrics
    assert len(steps) == 50 and steps[-1]["net/abs_error"] < 0.3 * steps[0]["net/abs_error"]


def test_forward_functions_draw_no_numbers_of_their_own():
    """A policy that samples with torch's generator would do otherwise after a resume."""
    made = experiment("player", steps=1)
    drawn = ForwardFunction(lambda actor, batch: {"action": torch.rand(len(batch), 1).double()})
    graph = made.graph().replace(replace(made.graph()["act"], work=drawn))
    made.graph = lambda: graph
    with pytest.raises(ValueError, match="call 'act' draws random numbers of torch, which would be others"):
        Trainer(compile_program(made, None, world_size=1), World(), quiet=True).run()


class Asked(Policy):
    """Counts questions in buffers, of which one is replaced each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("asked", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))


def remembering(actor, batch):
    actor.asked += 1
    actor.last = actor.asked * np.random.random()
    return act(actor, batch)


def only_four(actor, batch):
    assert len(batch) == 4
    return act(actor, batch)


def answering_with(function, **settings):
    """Return the player, whose forty questions of four rows a function answers."""
    made = experiment("player", **settings)
    graph = made.graph().replace(replace(made.graph()["act"], work=ForwardFunction(function)))
    made.graph = lambda: graph
    roles = {"actor": replace(made.roles()["actor"], module=Asked)}
    made.roles = lambda: roles
    return made


def asking(run: Path) -> list[dict]:
    """Return what each call of `play` on rank 0 has recorded of its questions."""
    events = map(json.loads, (run / "timeline.jsonl").read_text().splitlines())
    return [event["asking"] for event in events
            if event["name"] == "play" and event["rank"] == 0 and "asking" in event]


def test_answers_that_are_only_measured_leave_no_trace(tmp_path):
    """Buffers and numpy's random numbers are those of the questions of the program alone."""
    np.random.seed(3)
    made = answering_with(remembering)
    Trainer(compile_program(made, None, world_size=1), World(), quiet=True, out=tmp_path).run()
    drawn = np.random.RandomState(3).random(41)
    assert np.random.random() == drawn[40]
    buffers = load_file(tmp_path / "hf/step_4/model.safetensors")
    assert buffers["asked"].item() == 40 and buffers["last"].item() == pytest.approx(40 * drawn[39])
    assert [rows for rows, _ in asking(tmp_path)[-1]["tried"]["act"]] == [1, 4, 16, 64]


def test_functions_may_take_as_many_rows_as_the_program_asks(tmp_path):
    program = compile_program(answering_with(only_four), None, world_size=1)
    assert len(Trainer(program, World(), quiet=True, out=tmp_path).run().metrics) == 4
    recorded = asking(tmp_path)
    assert [of_step["answers"]["act"][0][:2] for of_step in recorded] == 4 * [[4, 10]]
    assert [of_step["tried"]["act"] for of_step in recorded] == 4 * [[]]


def test_the_check_asks_what_the_program_asks():
    sizes = []

    def counting(actor, batch):
        sizes.append(len(batch))
        return act(actor, batch)

    made = answering_with(counting)
    (of_play,) = (call for call in made.graph().calls if call.name == "play")

    def twice(batch, context):
        play(batch, context)
        return play(batch, context)

    graph = made.graph().replace(replace(of_play, work=HostFunction(twice, asks=("act",))))
    made.graph = lambda: graph
    try_functions(compile_program(made, None, world_size=1), plays=True)
    assert sizes == 20 * [4]


def late_play(batch, context):
    """Ask once; the second rank, whose rows are the last, when the first one has ended."""
    row = batch["dataset_row"]
    if int(row[0]):
        time.sleep(0.4)
    states = row[:, None].expand(-1, 3).double()
    action = context.ask("act", {"state": states, "noise": torch.zeros(len(row), 2).double()})["action"]
    return {"states": states[:, None], "actions": action[:, None]}


def play_late(world, out: Path) -> None:
    made = experiment("player", steps=2)
    late = HostFunction(late_play, asks=("act",), splittable=True)
    graph = made.graph().replace(replace(made.graph()["play"], work=late))
    made.graph = lambda: graph
    layouts = {"play": "d2@0-1", "act": "d1@0", "actor_train": "d1@0"}
    plan = ExecutionPlan.from_dict({"calls": {name: {"layout": at} for name, at in layouts.items()}})
    Trainer(compile_program(made, plan, world_size=world.size), world, quiet=True, out=out).run()


def test_answers_to_late_ranks_count_in_the_step_of_their_questions(pool, tmp_path):
    pool.run(play_late, tmp_path)
    assert [of_step["answers"]["act"][0][:2] for of_step in asking(tmp_path)] == [[4, 2]] * 2


def test_states_of_host_calls_go_from_place_to_place():
    """The ranks of a layout have an order, which is not that of their numbers."""
    made = experiment("player")
    work = HostFunction(play, asks=("act",), splittable=True)
    graph = made.graph().replace(replace(made.graph()["play"], work=work))
    made.graph = lambda: graph

    def program(layout: str):
        layouts = {"play": layout, "act": "d1@0", "actor_train": "d1@0"}
        plan = ExecutionPlan.from_dict({"calls": {name: {"layout": at} for name, at in layouts.items()}})
        return compile_program(made, plan, world_size=4)

    before = program("d2@1,0").plan.to_dict()
    states = [{"play": {"place": 1}}, {"play": {"place": 0}}, {}, {}]
    manifest = Manifest(1, 4, {}, before, {}, {}, {}, {}, tuple({"host_states": state} for state in states))
    for layout, places in (("d2@2-3", {2: 0, 3: 1}), ("d2@3,0", {3: 0, 0: 1})):
        for rank, place in places.items():
            states = _host_states(Checkpoint(Path(), manifest), program(layout), rank)
            assert states == {"play": {"place": place}}, (layout, rank)


@pytest.mark.parametrize("change", [{"max_rows": 3}, {"map": len}, {"split": "test"}, {"chat": True}])
def test_arrays_have_no_settings_of_texts(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} is .*: an ArrayDataset has no such setting"):
        ArrayDataset(num_rows=3, **change)


@pytest.mark.parametrize("layout", ["t2@0-1", "p2@0-1", "c2@0-1"])
def test_only_replicas_are_legal(layout):
    plan = ExecutionPlan.from_dict({"calls": {"net_train": {"layout": layout}}})
    with pytest.raises(ValueError, match="calls.net_train: layout .*: a module is in whole replicas only"):
        compile_program(experiment("regression"), plan, world_size=2)


@pytest.mark.parametrize(("change", "sentence"), [
    ({"module": None}, "module is not given"),
    ({"dtype": "bfloat16"}, "dtype is bfloat16: it must be float32 or float64"),
    ({"optimizer": replace(experiment("regression").roles()["net"].optimizer, lr=None)}, "lr is not given"),
    ({"arguments": {"inputs": object()}}, "arguments must be JSON values"),
    ({"module": lambda: Net(5)}, "it must have a name of its own"),
    ({"module": partial(Net, 5)}, "it must have a name of its own"),
])
def test_roles_of_modules_are_checked(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        ModuleRole(**{"module": Net} | change)


ASK = FunctionCall("act", role="actor", inputs=("dataset_row",), work=ForwardFunction(act))


@pytest.mark.parametrize(("asks", "call", "sentence"), [
    (("acts",), ASK, "asks 'acts': it must be a call with a ForwardFunction, and there are act"),
    (("act",), replace(ASK, outputs=("actions2",)), "call 'act' has outputs, and call 'play' asks it"),
    (("act",), replace(ASK, inputs=("states",)), "neither may need an output of the other"),
])
def test_questions_are_checked(asks, call, sentence):
    made = experiment("player")
    graph = made.graph().replace(
        FunctionCall(
            "play", inputs=("dataset_row",), outputs=("states", "actions"),
            work=HostFunction(play, asks=asks)), call)
    made.graph = lambda: graph
    with pytest.raises(ValueError, match=sentence):
        compile_program(made, None, world_size=1)


def test_arrays_are_read_in_the_order_of_rows(tmp_path):
    columns = data(7)
    loader = make_loader(
        ArrayDataset(columns), keys=("x", "dataset_row"), tokenizer=None, group_size=2, seed=5)
    batch = loader.batch([0, 1, 2, 9, 4])
    places = (0, 0, 1, 1, 2, 2, 9, 9, 4, 4)
    rows = [row_order(7, start=place, count=1, seed=5, shuffle=True)[0] for place in places]
    assert batch["dataset_row"].tolist() == rows
    assert torch.equal(batch["x"], columns["x"][rows])
    assert batch.ids == [0, 1, 2, 3, 4, 5, 18, 19, 8, 9]


@pytest.mark.parametrize(("given", "sentence"), [
    ({"path": {"x": torch.zeros(3), "y": torch.zeros(4)}}, "columns of different lengths"),
    ({"path": {"x": ["a"]}}, "must be an array of numbers"),
    ({}, "num_rows is 0: it must be above 0 without a path"),
])
def test_faults_of_arrays_are_sentences(given, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence) if "(" in sentence else sentence):
        ArrayDataset(**given)


def test_roles_begin_with_equal_weights_unless_drawn_differently():
    weights = [
        module_of(ModuleConfig.of(Policy, {}, draw=draw), seed=seed).net.weight
        for draw, seed in ((0, 0), (0, 0), (1, 0), (0, 1))]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert not torch.equal(weights[0], weights[3])
