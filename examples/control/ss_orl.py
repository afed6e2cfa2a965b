"""Semi-supervised offline RL (SS-ORL, Zheng et al. 2023): only a tenth of the trajectories has actions.

An inverse-dynamics model learns from these which action lies between two states, and labels the others. Then
TD3+BC (Fujimoto & Gu 2021) learns from all of them.

    realhf run examples/control/ss_orl.py --source proxy       # or oracle, labelled, shuffled
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from networks import Actor, Critic, InverseDynamics, adam, per_row
from offline_rows import PER_ROW, labelled_rows, normal, rows_path
from torch import Tensor
from trajectories import TASKS, returns

import realhf as r

DISCOUNT = 0.99
FOLLOW_RATE = 0.02  # Of the target networks in an update.
ALPHA = 2.5  # Weight of the critic against the data.
TARGET_NOISE = 0.2  # Standard deviation of the noise on the next action.
STATES = ("previous", "state", "following")
LARGEST = 0.999  # Actions are cut here before their inverse hyperbolic tangent is learned.


def inverse_loss(idm: InverseDynamics, batch: r.Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the negative log-likelihood of labelled actions, without the terms that no weight changes."""
    mean, log_deviation = idm(*(batch[key] for key in STATES))
    target = batch["label"].clamp(-LARGEST, LARGEST).atanh()
    loss = 0.5 * ((target - mean) / log_deviation.exp()) ** 2 + log_deviation
    return per_row(loss), {"error": per_row((mean.tanh() - batch["label"]) ** 2)}


def proxy(idm: InverseDynamics, batch: r.Batch) -> dict[str, Tensor]:
    """Return the true action where it is known, and else the one that the model holds for most probable."""
    guess = idm(*(batch[key] for key in STATES))[0].tanh()
    return {"proxy": torch.where(batch["labelled"][..., None] > 0, batch["oracle"], guess)}


def critic_loss(
    critic: Critic, batch: r.Batch, next_actor: Actor, next_critic: Critic, *, action: str
) -> Tensor:
    """Return the error of both values: clipped double Q-learning with noise on the next action."""
    with torch.no_grad():
        noise = (TARGET_NOISE * batch["noise"]).clamp(-0.5, 0.5)
        following = (next_actor(batch["following"]) + noise).clamp(-1, 1)
        value = torch.minimum(*next_critic(batch["following"], following))
        target = batch["reward"] + DISCOUNT * (1 - batch["ended"]) * value
    first, second = critic(batch["state"], batch[action])
    return per_row((first - target) ** 2 + (second - target) ** 2)


def values(critic: Critic, batch: r.Batch, actor: Actor) -> dict[str, Tensor]:
    """Return how large the values of the policy's actions are."""
    return {"size": per_row(critic(batch["state"], actor(batch["state"]))[0].abs())}


def mean_size(batch, context):
    """Return the mean over the step as a column, by which TD3+BC divides values."""
    mean = batch["size"].mean()
    return {"scale": mean.expand(len(batch))}, {"value_size": float(mean)}


def actor_loss(
    actor: Actor, batch: r.Batch, critic: Critic, *, action: str
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of TD3+BC: near the data, and where the critic's value is high."""
    chosen = actor(batch["state"])
    cloned = per_row((chosen - batch[action]) ** 2)
    value = per_row(critic(batch["state"], chosen)[0])
    return cloned - ALPHA * value / batch["scale"], {"cloned": cloned, "value": value}


def keep_labelled(batch, context):
    """Drop the rows without actions."""
    return {"label": batch["oracle"], "keep": batch["labelled"][:, 0] > 0}


def act(actor: Actor, batch: r.Batch) -> dict[str, Tensor]:
    return {"action": actor(batch["state"].to(next(actor.parameters()).dtype))}


def play(batch, context, *, task: str, episodes: int):
    """Return the policy's mean return over a few episodes."""
    mean, deviation = normal(TASKS[task])

    def policy(observations):
        state = torch.as_tensor((observations - mean) / deviation, dtype=torch.float32)
        return context.ask("act", {"state": state})["action"].numpy()

    return {}, {"return": float(returns(TASKS[task], policy, episodes=episodes, seed=1000).mean())}


@dataclass
class SSORL(r.Experiment):
    """First inverse dynamics, then labels and TD3+BC. A step has `updates`, and half as many of the actor."""

    task: Literal[*TASKS] = "pendulum"
    source: Literal["proxy", "oracle", "labelled", "shuffled"] = "proxy"
    """Where actions come from: the model; the data; the labelled data alone; the data, in another order."""
    labelled: Literal["lower", "all"] = "lower"  # Half of the trajectories that actions are known of, or all.
    updates: int = 20
    inverse_steps: int = 30  # Steps of the inverse dynamics.
    play_every: int = 20  # Steps between returns, each over `play_episodes`.
    play_episodes: int = 10
    width: int = 64
    rate: float = 1e-3  # Learning rate of actor and critic.
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.dataset = r.ArrayDataset(str(rows_path(self.task, self.seed, self.labelled)))

    def sizes(self) -> dict[str, int]:
        """Return the sizes of a state and of an action; make the rows if they are not there."""
        if not Path(self.dataset.path).exists():
            labelled_rows(self.task, self.seed, self.labelled)
        shapes = self.dataset.columns()
        return {"states": shapes["state"][-1], "actions": shapes["oracle"][-1]}

    def roles(self) -> dict[str, r.ModuleRole]:
        of = partial(r.ModuleRole, arguments=self.sizes() | {"width": self.width}, dtype=self.dtype)
        follow = 1 - (1 - FOLLOW_RATE) ** self.updates  # As if the targets had moved after each update.
        roles = {
            "actor": of(module=Actor, optimizer=adam(self.rate)),
            "critic": of(module=Critic, optimizer=adam(self.rate)),
            "next_actor": of(module=Actor, follows="actor", follow_rate=follow),
            "next_critic": of(module=Critic, follows="critic", follow_rate=follow)}
        if self.source == "proxy":
            roles["idm"] = of(module=InverseDynamics, optimizer=adam(1e-3))
        return roles

    def graph(self) -> r.DataflowGraph:
        action = {"labelled": "label"}.get(self.source, self.source)
        noise = {"noise": (PER_ROW, self.sizes()["actions"])}
        player = partial(play, task=self.task, episodes=self.play_episodes)
        calls = [
            r.FunctionCall("values", role="critic", reads=("actor",), inputs=("state", action),
                           outputs=("size",), work=r.ForwardFunction(values)),
            r.FunctionCall("mean_size", inputs=("size",), outputs=("scale",), work=r.HostFunction(mean_size)),
            r.FunctionCall(
                "critic_train", role="critic", reads=("next_actor", "next_critic"),
                inputs=("state", action, "reward", "following", "ended"),
                work=r.TrainFunction(
                    partial(critic_loss, action=action), minibatches=self.updates, noise=noise)),
            r.FunctionCall(
                "actor_train", role="actor", reads=("critic",), inputs=("state", action, "scale"),
                work=r.TrainFunction(partial(actor_loss, action=action), minibatches=self.updates // 2)),
            r.FunctionCall("play", inputs=("dataset_row",), work=r.HostFunction(player, asks=("act",))),
            r.FunctionCall("act", role="actor", inputs=("dataset_row",), work=r.ForwardFunction(act))]
        if self.source in ("proxy", "labelled"):
            calls.append(r.FunctionCall(
                "keep_labelled", inputs=("labelled", "oracle"), outputs=("label",),
                work=r.HostFunction(keep_labelled, filters=True)))
        if self.source == "proxy":
            calls += [
                r.FunctionCall("idm_train", role="idm", inputs=(*STATES, "label"),
                               work=r.TrainFunction(inverse_loss, minibatches=self.updates)),
                r.FunctionCall("label", role="idm", inputs=(*STATES, "labelled", "oracle"),
                               outputs=("proxy",), work=r.ForwardFunction(proxy))]
        written = {key for call in calls for key in call.outputs}
        read = {key for call in calls for key in call.inputs}
        return r.DataflowGraph(tuple(calls), inputs=tuple(sorted(read - written)))

    def parts(self, graph: r.DataflowGraph) -> dict[str, tuple[str, ...]]:
        names = {call.name for call in graph.calls}
        learn = tuple(sorted(names - {"play", "act", "keep_labelled", "idm_train"}))
        parts = {"play": ("play", "act"), "learn": learn}
        if self.source == "labelled":
            parts["learn"] = ("keep_labelled", *learn)
        elif self.source == "proxy":
            parts["inverse"] = ("keep_labelled", "idm_train")
        return parts

    def step(self, run) -> None:
        """Train on the rows with actions, a tenth of many, or on all of fewer rows."""
        number = run.number - (self.inverse_steps if self.source == "proxy" else 0)
        if number < 0:
            run("inverse", run.prompts(10 * self.batch_size))
            return
        run("learn", run.prompts(self.batch_size * (10 if self.source == "labelled" else 1)))
        if number % self.play_every == self.play_every - 1:
            run("play", run.prompts(1))


experiment = SSORL(batch_size=160, steps=90)
