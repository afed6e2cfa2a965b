"""The functions of modules on a few rows, as `realhf check` calls them, and what it says about arrays."""

import json
from dataclasses import dataclass, replace

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
from realhf.cli.main import main
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.distributed.world import World
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.models.modules import module_of
from realhf.runtime.compile.program import compile_program
from realhf.runtime.doubts.data import odd_arrays
from realhf.runtime.execute.module_trial import try_functions
from realhf.runtime.records.progress import shown_columns
from realhf.runtime.trainer import Trainer
from tests.control.modules import Net, Regression, data, experiment, squared_error

F = torch.nn.functional


def tried(work, *, plays=True, **settings):
    made = experiment("regression", work=work, **settings)
    return try_functions(compile_program(made, None, world_size=1), plays=plays)


def column(net, batch):
    return net(batch["x"])[:, None]


def bad_target(net, batch):  # The classic mistake of targets of Q-functions.
    with torch.no_grad():
        target = batch["y"] + 0.9 * net(batch["x"])[:, None]
    return F.smooth_l1_loss(net(batch["x"]), target, reduction="none").mean(1)


def own_dict(net, batch):
    return net(batch["x"]) * {"a": 1.0}["b"]


def nan(net, batch):
    return (net(batch["x"]) - 1e9).log()


FAULTS = [
    (lambda net, batch: net(batch["x"]).mean(),
     r"\(12,\), and <lambda>\(\) \(.*test_module_trial.py:\d+\) returned a tensor of shape \(\)"),
    (lambda net, batch: column(net, batch), r"returned a tensor of shape \(12, 1\)"),
    (lambda net, batch: (column(net, batch) - batch["y"]).square().mean(1), "meets one of shape .*each pair"),
    (lambda net, batch: F.mse_loss(column(net, batch), batch["y"], reduction="none").mean(1), "each pair"),
    (lambda net, batch: (column(net, batch) - batch["y"]).square(), "each pair of rows"),
    (bad_target, r"in bad_target\(\) .*each pair of rows"),
    (lambda net, batch: net(batch["x"]).detach(), "depend on no parameter of net .* without gradients"),
    (lambda net, batch: net(batch["x"]) * batch["z"], r"reads the column 'z' at .*py:\d+: .* are x, y"),
    (own_dict, r"raised KeyError: 'b' \(.*test_module_trial.py:\d+\)"),
    (lambda net, batch: 3.0, r"and <lambda>\(\) .* returned float"),
    (lambda net, batch: net(batch["x"]).long(), "losses must be floating-point numbers, .* returned int64"),
    (nan, "returned the loss nan for row 0 of 7, with the first weights"),
    (lambda net, batch: net(batch["x"].float()), "raised RuntimeError: .*dtype"),
]


@pytest.mark.parametrize(("function", "sentence"), FAULTS)
def test_check_calls_functions_of_modules(function, sentence):
    with pytest.raises(ValueError, match=sentence):
        tried(TrainFunction(function))


def test_columns_of_another_dtype_are_named():
    with pytest.raises(ValueError, match=r"column 'x' is float64 and the module float32: .*dtype='float64'"):
        tried(TrainFunction(squared_error), settings={"dtype": "float32"})


def pairs(net, batch):
    return (net(batch["x"])[:, None] - batch["y"][None, :]).square().mean(1)


def counts_rows(net, batch):
    return (net(batch["x"]).view(12) - batch["y"]).square()


@pytest.mark.parametrize(("function", "doubts"), [(squared_error, 0), (pairs, 1), (counts_rows, 0)])
def test_right_functions_pass_and_pairs_are_doubted(function, doubts):
    warnings = tried(TrainFunction(function))
    assert ["depends on which other rows are beside it" in one for one in warnings] == [True] * doubts


def test_what_is_tried_changes_nothing():
    program = compile_program(experiment("regression"), None, world_size=1)
    expected = Trainer(program, World(), quiet=True).run()
    program = compile_program(experiment("regression"), None, world_size=1)
    state = torch.get_rng_state()
    assert try_functions(program, plays=True) == []
    assert torch.equal(torch.get_rng_state(), state)
    again = Trainer(program, World(), quiet=True).run()
    assert [m["net/loss"] for m in again.metrics] == [m["net/loss"] for m in expected.metrics]


class Annealed:
    """A loss that keeps its number of calls, and draws random numbers of numpy."""

    calls = 0

    def __call__(self, net, batch):
        self.calls += 1
        return squared_error(net, batch)[0] * (1 + np.random.rand()) / self.calls


def test_functions_are_tried_as_copies_and_numpy_goes_on_where_it_was():
    loss = Annealed()
    np.random.seed(3)
    expected = np.random.RandomState(3).rand()
    tried(TrainFunction(loss))
    assert loss.calls == 0 and np.random.rand() == expected


class Counting:
    """Keeps what it has seen on itself."""

    seen = 0

    def __call__(self, batch, context):
        self.seen += len(batch)
        action = context.ask("act", {"x": batch["x"]})["wrong" if batch["x"].dim() == 3 else "value"]
        return {"target": action[:, None] if self.fault else action}, {"return": 1.0}

    def __init__(self, fault):
        self.fault = fault


@dataclass
class Asked(Regression):
    player: Counting | None = None

    def graph(self):
        def fit(net, batch):
            return (net(batch["x"]) - batch["target"]).square()

        def act(net, batch):
            return {"value": net(batch["x"])}

        return DataflowGraph((
            FunctionCall(
                "play", inputs=("x",), outputs=("target",), work=HostFunction(self.player, asks=("act",))),
            FunctionCall("act", role="net", inputs=("x",), work=ForwardFunction(act)),
            FunctionCall("net_train", role="net", inputs=("x", "target"), work=TrainFunction(fit)),
        ), inputs=("x",))


def test_host_calls_are_played_with_copies_and_what_they_return_is_trained_on():
    settings = {"dataset": ArrayDataset(data()), "batch_size": 12, "steps": 1}
    right = Asked(player=Counting(False), **settings)
    program = compile_program(right, None, world_size=1)
    (doubt,) = try_functions(program, plays=True)
    assert "'play' changes the attribute 'seen' of its function" in doubt and "context.state" in doubt
    assert right.player.seen == 0
    wrong = compile_program(Asked(player=Counting(True), **settings), None, world_size=1)
    assert try_functions(wrong, plays=False) == []  # Without the play, there is nothing to train on.
    with pytest.raises(ValueError, match="'net_train': in fit.*each pair of rows"):
        try_functions(wrong, plays=True)


class Counted(Net):
    """Counts its passes in an attribute, which is lost, beside the buffer of `Net`, which is not."""

    def __init__(self, inputs=5):
        super().__init__(inputs)
        self.passes = 0
        self.first_size = None
        self.best = float("nan")
        self.whole = []
        self.whole.append(self.whole)

    def forward(self, *inputs):
        self.passes += 1
        self.first_size = self.first_size or len(inputs[0])
        return super().forward(*inputs)


def test_attributes_that_a_resumed_run_would_lose_are_doubted():
    assert tried(TrainFunction(squared_error)) == []
    (doubt,) = tried(TrainFunction(Annealed()))
    assert doubt == (
        "call 'net_train' changes the attribute 'calls' of its function, which no checkpoint holds: a "
        "resumed run begins with 0 again; keep it in a floating-point buffer of the module")
    made = experiment("regression", work=TrainFunction(squared_error))
    made.roles = lambda: {"net": replace(Regression.roles(made)["net"], module=Counted)}
    (doubt,) = try_functions(compile_program(made, None, world_size=1), plays=True)
    assert "'net_train' changes the attribute 'passes' of the module net, which" in doubt


@pytest.mark.parametrize(("seen", "fault"), [
    ({1: 2}, r"'seen' has a dict with the key 1: keys must be text"),
    ([{"a": {0.5}}], "'seen' has a value of type set"),
    (Net, "'seen' has a value of type"),
])
def test_states_that_a_checkpoint_cannot_give_back_are_refused(seen, fault):
    def play(batch, context):
        context.state["seen"] = seen
        return {"target": context.ask("act", {"x": batch["x"]})["value"]}

    program = compile_program(
        Asked(player=play, dataset=ArrayDataset(data()), batch_size=12, steps=1), None, world_size=1)
    message = f"host call 'play': context.state must hold JSON values only: {fault}"
    with pytest.raises(UserError, match=message):
        try_functions(program, plays=True)


def test_outputs_that_are_missing_are_named():
    made = experiment("actor_critic")
    graph = made.graph()
    value = FunctionCall(
        "value", role="critic", inputs=("state", "action"), outputs=("value",),
        work=ForwardFunction(lambda critic, batch: {"values": critic(batch["state"], batch["action"])}))
    made.graph = lambda: graph.replace(value)
    with pytest.raises(ValueError, match=r"declares the output 'value', and <lambda>\(\) .* returned values"):
        try_functions(compile_program(made, None, world_size=1), plays=False)


def test_a_mistake_ends_check_and_run_with_one_sentence(tmp_path, capsys):
    file = tmp_path / "wrong.py"
    file.write_text(
        "from realhf import TrainFunction\nfrom tests.control.modules import experiment\n"
        "def wrong(net, batch):\n    return net(batch['x']).mean()\n"
        "experiment = experiment('regression', work=TrainFunction(wrong))\n")
    for words in (["check", str(file)], ["run", str(file), "--nproc", "1", "--out", str(tmp_path / "run")]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert f"and wrong() ({file}:3) returned a tensor of shape ()" in error and "Traceback" not in error


class Empty(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(0, 3))


@pytest.mark.parametrize(("module", "arguments", "sentence"), [
    (Empty, {}, r"net.module: .*Empty with {} has the tensor weight of shape \(0, 3\), without numbers"),
    (Net, {"width": 3}, "net.module: .*Net cannot be made with .*unexpected keyword argument 'width'"),
])
def test_faults_of_modules_name_the_module(module, arguments, sentence):
    settings = {"arguments": arguments}
    with pytest.raises(ValueError, match=sentence):
        compile_program(experiment("regression", module=module, settings=settings), None, world_size=1)


def test_odd_arrays_are_warned_about():
    columns = data()
    columns["x"][7, 2] = float("nan")
    columns["x"][50] = float("inf")
    columns["reward"][:] = 1.0  # A constant column is none.
    made = experiment("regression", dataset=ArrayDataset(columns), batch_size=150)
    assert list(odd_arrays(compile_program(made, None, world_size=1))) == [
        "dataset: column 'x' has NaN or infinite values in 2 of 60 rows, first in row 7",
        "batch_size is 150, and the dataset has 60 rows: each row is about 2.5 times in a batch"]


def test_the_loss_of_held_out_rows_is_that_of_the_function(tmp_path):
    columns = data()
    held_out = {key: column[40:] for key, column in columns.items()}
    made = experiment("regression", eval_dataset=ArrayDataset(held_out), eval_every=2)
    Trainer(compile_program(made, None, world_size=1), World(), out=tmp_path, quiet=True).run()
    net = Net().double().eval()
    net.load_state_dict(load_file(tmp_path / "hf/step_4/model.safetensors"))
    with torch.no_grad():
        error = net(held_out["x"]) - held_out["y"]
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["eval/net/loss"] == pytest.approx(float(error.square().mean()), rel=1e-9)
    assert last["eval/net/abs_error"] == pytest.approx(float(error.abs().mean()), rel=1e-9)


def test_losses_of_held_out_rows_may_draw_numbers_and_ask_for_gradients():
    def penalised(net, batch):
        losses = squared_error(net, batch)[0]
        x = batch["x"].clone().requires_grad_()
        noisy = x + 1e-3 * torch.randn(x.shape, dtype=x.dtype)
        (slope,) = torch.autograd.grad(net.net(noisy).sum(), x, create_graph=True)
        return losses + slope.square().sum(1)

    made = experiment(
        "regression", work=TrainFunction(penalised), eval_dataset=ArrayDataset(data()), eval_every=2)
    state = torch.get_rng_state()
    first, again = (
        Trainer(compile_program(made, None, world_size=1), World(), quiet=True).run().metrics[-1]
        for _ in range(2))
    assert first["eval/net/loss"] == again["eval/net/loss"] > 0 and torch.equal(torch.get_rng_state(), state)


def test_orthogonal_weights_are_those_of_one_thread():
    """Plans have other numbers of threads, and a decomposition in float32 rounds otherwise with several."""
    spec = ModuleRole(module=Orthogonal).config()
    drawn = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            drawn.append(module_of(spec, seed=3).layer.weight.detach().clone())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


class Orthogonal(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)
        torch.nn.init.orthogonal_(self.layer.weight)


class Tied(torch.nn.Module):
    """Has a weight with two names, a single number, and buffers of integers."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 5, bias=False)
        self.second = torch.nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.register_buffer("order", torch.tensor([3, 1, 2]))
        self.norm = torch.nn.BatchNorm1d(5)

    def forward(self, x):
        return self.scale * self.norm(self.second(torch.tanh(self.first(x)))).sum(-1)


def test_exports_are_the_whole_state_of_a_module(tmp_path):
    made = experiment("regression", module=Tied)
    Trainer(compile_program(made, None, world_size=1), World(), out=tmp_path, quiet=True).run()
    state = load_file(tmp_path / "hf/step_4/model.safetensors")
    fresh = Tied().double()
    assert {name: tensor.shape for name, tensor in state.items()} == {
        name: tensor.shape for name, tensor in fresh.state_dict().items()}
    fresh.load_state_dict(state, strict=True)
    assert fresh.scale != 2.0 and fresh.order.tolist() == [3, 1, 2]
    again = experiment("regression", module=Tied, settings={"model": str(tmp_path / "hf/step_4")}, steps=1)
    metrics = Trainer(compile_program(again, None, world_size=1), World(), quiet=True).run().metrics
    assert torch.isfinite(torch.tensor(metrics[0]["net/loss"]))


@dataclass
class Reading(Regression):
    """A module that reads a frozen one, which a call of its own uses, too."""

    def roles(self):
        return super().roles() | {"teacher": ModuleRole(module=Net, dtype="float64", draw=1)}

    def graph(self):
        def guess(teacher, batch):
            return {"guess": teacher(batch["x"])}

        def distil(net, batch, teacher):
            with torch.no_grad():
                wanted = teacher(batch["x"]) + batch["guess"]
            return (net(batch["x"]) - wanted).square()

        return DataflowGraph((
            FunctionCall(
                "guess", role="teacher", inputs=("x",), outputs=("guess",), work=ForwardFunction(guess)),
            FunctionCall(
                "net_train", role="net", reads=("teacher",), inputs=("x", "guess"),
                work=TrainFunction(distil)),
        ), inputs=("x",))


def test_weights_that_are_read_may_be_offloaded():
    losses = []
    for offload in (False, True):
        made = Reading(dataset=ArrayDataset(data()), batch_size=12, steps=2)
        plan = ExecutionPlan.from_dict({"calls": {
            "guess": {"layout": "d1@0", "offload": offload}, "net_train": {"layout": "d1@0"}}})
        run = Trainer(compile_program(made, plan, world_size=1), World(), quiet=True).run()
        losses.append([metrics["net/loss"] for metrics in run.metrics])
    assert losses[0] == losses[1]


def held_out_of(world, layouts):
    made = experiment("regression", steps=2, eval_dataset=ArrayDataset(data()), eval_every=1)
    plan = ExecutionPlan.from_dict({"calls": {name: {"layout": layout} for name, layout in layouts.items()}})
    run = Trainer(compile_program(made, plan, world_size=world.size), world, quiet=True).run()
    return [metrics["eval/net/loss"] for metrics in run.metrics]


def test_held_out_losses_are_equal_under_every_plan(pool):
    expected = held_out_of(World(), {"net_train": "d1@0"})
    layouts = {"net_train": "d2@0-1", "eval/net_train_held_out": "d3@1-3"}
    assert pool.run(held_out_of, layouts)[0] == pytest.approx(expected, rel=1e-9)


def test_held_out_losses_are_planned():
    made = experiment("regression", eval_dataset=ArrayDataset(data()), eval_every=1)
    (call,) = problem_of(made, Cluster.load("h100-1x8")).evaluations
    assert call.name == "eval/net_train_held_out" and call.workload.num_samples == 60


def test_the_line_of_a_step_shows_the_return():
    titles = [column.title for column in shown_columns({
        "play/return": 1.0, "return/mean": 2.0, "success": 0.5, "q/loss": 0.1, "returned": 3.0,
        "timing_s/step": 1.0})]
    assert titles == ["play/return", "return", "success", "q loss", "seconds"]


def test_messages_name_what_a_user_has_written():
    with pytest.raises(ValueError, match=r"dataset ArrayDataset\({...}\) has no column 'z'"):
        compile_program(experiment("regression", graph_inputs=("x", "y", "z")), None, world_size=1)
    with pytest.raises(ValueError, match=r"give it one, ModuleRole\(..., optimizer=OptimizerConfig\(lr="):
        compile_program(experiment("regression", settings={"optimizer": None}), None, world_size=1)
    with pytest.raises(ValueError, match=r"dataset is a dict: give arrays by column as ArrayDataset\("):
        experiment("regression", dataset=data())
    with pytest.raises(ValueError, match=r"ArrayDataset\({...}\) has columns of different lengths"):
        ArrayDataset({"x": torch.zeros(3), "y": torch.zeros(2)})
    with pytest.raises(ValueError, match="dataset is not given: it must be"):
        compile_program(Regression(), None, world_size=1)
