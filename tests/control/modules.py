"""Small modules and experiments of them: regression, an actor with a critic and a target, and a player."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from realhf import (
    ArrayDataset,
    DataflowGraph,
    Experiment,
    ForwardFunction,
    FunctionCall,
    HostFunction,
    ModuleRole,
    OptimizerConfig,
    TrainFunction,
)

ADAM = OptimizerConfig(lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=float("inf"))


class Net(torch.nn.Module):
    """A value of states and actions that also counts, in a buffer, what it has seen in training."""

    def __init__(self, inputs: int = 5) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(inputs, 16), torch.nn.LayerNorm(16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        x = torch.cat(inputs, -1)
        if self.training:
            self.seen += x.mean()
        return self.net(x).squeeze(-1)


class Policy(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(3, 2)

    def forward(self, state: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.net(state) + noise)


class Temperature(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log = torch.nn.Parameter(torch.tensor(-1.0))


class Recurrent(torch.nn.Module):
    """torch's recurrent layers keep lists of their parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.GRU(5, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0].sum((1, 2))


def squared_error(net, batch):
    error = net(batch["x"]) - batch["y"]
    return error.square(), {"abs_error": error.abs()}


def data(rows: int = 60) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (rows, 5), "y": (rows,), "state": (rows, 3), "action": (rows, 2), "reward": (rows,)}
    return {key: torch.randn(*s, generator=generator, dtype=torch.float64) for key, s in shapes.items()}


@dataclass
class Regression(Experiment):
    """A module that learns `y` from `x`."""

    module: Any = Net
    settings: dict[str, Any] = field(default_factory=dict)
    work: Any = field(default_factory=lambda: TrainFunction(squared_error, minibatches=2, epochs=2))
    inputs: tuple[str, ...] = ("x", "y")
    graph_inputs: tuple[str, ...] = ("x", "y")

    def roles(self):
        settings = {"dtype": "float64", "optimizer": ADAM} | self.settings
        return {"net": ModuleRole(module=self.module, **settings)}

    def graph(self):
        train = FunctionCall("net_train", role="net", inputs=self.inputs, work=self.work)
        return DataflowGraph((train,), inputs=self.graph_inputs)


def critic_loss(critic, batch, actor, target):
    with torch.no_grad():
        wanted = batch["reward"] + 0.9 * target(batch["state"], actor(batch["state"], batch["noise"]))
    return (critic(batch["state"], batch["action"]) - wanted).square()


def actor_loss(actor, batch, critic, temperature):
    action = actor(batch["state"], batch["noise"])
    return temperature.log.exp() * action.square().sum(-1) - critic(batch["state"], action)


def temperature_loss(temperature, batch, actor):
    return temperature.log * actor(batch["state"], batch["noise"]).detach().sum(-1)


def value(critic, batch):
    return {"value": critic(batch["state"], batch["action"])}


def show(batch, context):
    return {}, {"value/mean": float(batch["value"].mean())}


@dataclass
class ActorCritic(Experiment):
    """Four roles whose calls read each other: an actor, a critic, its moving average and a temperature."""

    def roles(self):
        of_all: dict[str, Any] = {"dtype": "float64"}
        return {
            "critic": ModuleRole(module=Net, optimizer=ADAM, **of_all),
            "actor": ModuleRole(module=Policy, optimizer=ADAM, **of_all),
            "temperature": ModuleRole(module=Temperature, optimizer=ADAM, **of_all),
            "target": ModuleRole(module=Net, follows="critic", follow_rate=0.1, **of_all)}

    def graph(self):
        noise = {"noise": (2,)}
        transition = ("state", "action", "reward")
        return DataflowGraph((
            FunctionCall(
                "value", role="critic", inputs=("state", "action"), outputs=("value",),
                work=ForwardFunction(value)),
            FunctionCall("show", inputs=("value",), work=HostFunction(show)),
            FunctionCall(
                "critic_train", role="critic", reads=("actor", "target"), inputs=transition,
                work=TrainFunction(critic_loss, noise=noise, minibatches=2)),
            FunctionCall(
                "actor_train", role="actor", reads=("critic", "temperature"), inputs=("state",),
                work=TrainFunction(actor_loss, noise=noise)),
            FunctionCall(
                "temperature_train", role="temperature", reads=("actor",), inputs=("state",),
                work=TrainFunction(temperature_loss, noise=noise))), inputs=transition)


def act(actor, batch):
    return {"action": actor(batch["state"], batch["noise"])}


def play(batch, context):
    """Play a game of five moves in each row, with two questions under way at a time."""
    rng = np.random.default_rng([7, context.step])
    halves = [torch.from_numpy(rng.standard_normal((4, 3))) for _ in range(2)]
    rows: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[], []]
    for _ in range(5):
        asked = [
            context.ask_later("act", {"state": s, "noise": torch.from_numpy(rng.standard_normal((4, 2)))})
            for s in halves]
        for i in (1, 0):  # Not in the order of the questions.
            action = asked[i].result()["action"]
            rows[i].append((halves[i], action))
            halves[i] = 0.5 * halves[i] + torch.nn.functional.pad(action, (0, 1))
    columns = [torch.cat([torch.stack([row[k] for row in half], 1) for half in rows]) for k in (0, 1)]
    total = -columns[0].square().sum((1, 2))
    metrics = {"play/return": float(total.mean()), "play/version": context.version("act")}
    return {"states": columns[0], "actions": columns[1]}, metrics


def judge(actor, batch):
    return {"worth": actor.net(batch["state"]).sum(-1)}


def prepare(batch, context):
    return {"start": batch["dataset_row"].double() / 8}


def play_judged(batch, context):
    """Ask two calls in turns, more often than messages are kept."""
    states = batch["start"][:, None].expand(-1, 3)
    asked = [context.ask_later("judge", {"state": states * i}) for i in range(200)]
    action = context.ask("act", {"state": states, "noise": torch.zeros(len(batch), 2).double()})["action"]
    worth = sum(one.result()["worth"] for one in asked)
    metrics = {"play/worth": float(worth.mean()), "play/version": context.version("act")}
    return {"states": states[:, None], "actions": action[:, None]}, metrics


@dataclass
class Judged(Experiment):
    """A player that asks two calls, listed first, and starts where another call on the model says."""

    def roles(self):
        return {"actor": ModuleRole(module=Policy, dtype="float64", optimizer=ADAM)}

    def graph(self):
        return DataflowGraph((
            FunctionCall("act", role="actor", inputs=("dataset_row",), work=ForwardFunction(act)),
            FunctionCall("judge", role="actor", inputs=("dataset_row",), work=ForwardFunction(judge)),
            FunctionCall(
                "early_train", role="actor", inputs=("dataset_row",),
                work=TrainFunction(lambda actor, batch: actor.net.weight.sum() * batch["dataset_row"])),
            FunctionCall("prepare", inputs=("dataset_row",), outputs=("start",), work=HostFunction(prepare)),
            FunctionCall(
                "play", inputs=("start",), outputs=("states", "actions"),
                work=HostFunction(play_judged, asks=("act", "judge"))),
            FunctionCall(
                "actor_train", role="actor", inputs=("states",), work=TrainFunction(imitation)),
        ), inputs=("dataset_row",))


def imitation(actor, batch):
    error = actor(batch["states"], torch.zeros(())) - 0.5 * batch["states"][..., :2]
    return error.square().mean((1, 2))


@dataclass
class Player(Experiment):
    """An actor that plays, and learns to take another action in the states that it has seen."""

    def roles(self):
        return {"actor": ModuleRole(module=Policy, dtype="float64", optimizer=ADAM)}

    def graph(self):
        return DataflowGraph((
            FunctionCall(
                "play", inputs=("dataset_row",), outputs=("states", "actions"),
                work=HostFunction(play, asks=("act",))),
            FunctionCall("act", role="actor", inputs=("dataset_row",), work=ForwardFunction(act)),
            FunctionCall(
                "actor_train", role="actor", inputs=("states",),
                work=TrainFunction(imitation, minibatches=2)),
        ), inputs=("dataset_row",))


def experiment(kind: str, **settings: Any) -> Experiment:
    """Return an experiment of a few steps."""
    if kind == "player":
        return Player(**{
            "dataset": ArrayDataset(num_rows=8, shuffle=False), "batch_size": 8, "steps": 4} | settings)
    if kind == "judged":
        return Judged(dataset=ArrayDataset(num_rows=8, shuffle=False), batch_size=8, steps=3)
    make = {"regression": Regression, "actor_critic": ActorCritic}[kind]
    return make(**{"dataset": ArrayDataset(data()), "batch_size": 12, "steps": 4} | settings)
