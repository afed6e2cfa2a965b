"""PPO with environments at speed, as in SRL: a ring of environments, and inference where the plan puts it.

    realhf run examples/control/srl_ppo.py --task CartPole-v1 --nproc 1
    realhf run examples/control/srl_ppo.py --plan examples/control/remote.yaml    # inference on another rank

Tasks are those of gymnasium (`pip install 'realhf[control]'`), such as HalfCheetah-v5 and ALE/Pong-v5.
"""

from dataclasses import dataclass
from functools import partial

import gymnasium
import numpy as np
import torch
from torch.nn import Conv2d, Flatten, Linear, Module, Parameter, ReLU, Sequential, Tanh

import realhf as r
from realhf.environments.vector import VectorSource

COLUMNS = ("observation", "action", "logprob", "advantage", "target")


def make(task: str) -> gymnasium.Env:
    if not task.startswith("ALE/"):
        return gymnasium.make(task)
    import ale_py

    gymnasium.register_envs(ale_py)
    game = gymnasium.make(task, obs_type="grayscale")  # Each action is for four frames.
    small = gymnasium.spaces.Box(0, 255, (80, 80), np.uint8)
    game = gymnasium.wrappers.TransformObservation(game, lambda frame: frame[34:194:2, ::2], small)
    return gymnasium.wrappers.FrameStackObservation(game, 4)


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> Linear:
    made = Linear(inputs, outputs)
    torch.nn.init.zeros_(made.bias)
    torch.nn.init.orthogonal_(made.weight, gain)
    return made


def mlp(inputs: int, outputs: int, gain: float) -> Sequential:
    return Sequential(layer(inputs, 64), Tanh(), layer(64, 64), Tanh(), layer(64, outputs, gain))


class Agent(Module):
    """A policy, normal or over a few actions, and a value; pixels pass through convolutions first."""

    def __init__(self, shape: list[int], actions: int, discrete: bool) -> None:
        super().__init__()
        self.discrete = discrete
        pixels = len(shape) == 3
        self.body = Sequential(
            Conv2d(4, 32, 8, 4), ReLU(), Conv2d(32, 64, 4, 2), ReLU(), Conv2d(64, 64, 3, 1), ReLU(),
            Flatten(), layer(2304, 512), ReLU()) if pixels else Sequential()
        self.policy = layer(512, actions, 0.01) if pixels else mlp(shape[0], actions, 0.01)
        self.value = layer(512, 1, 1.0) if pixels else mlp(shape[0], 1, 1.0)
        self.log_std = Parameter(torch.zeros(1 if discrete else actions))

    def forward(self, x):
        x = self.body(x / 255 if x.dim() == 4 else x)
        outputs = self.policy(x)
        logits_or_std = outputs.log_softmax(-1) if self.discrete else self.log_std.exp().expand_as(outputs)
        return outputs, logits_or_std, self.value(x).squeeze(-1)

    def logprob(self, outputs, logits_or_std, action):
        """Return the log-probs of actions, and the entropies."""
        if self.discrete:
            entropy = -(logits_or_std.exp() * logits_or_std).sum(-1)
            return logits_or_std.gather(-1, action.long()).squeeze(-1), entropy
        normal = torch.distributions.Normal(outputs, logits_or_std, validate_args=False)
        return normal.log_prob(action).sum(-1), normal.entropy().sum(-1)


def act(agent, batch):
    outputs, logits_or_std, value = agent(batch["observation"])
    action = outputs + logits_or_std * batch["noise"]
    if agent.discrete:  # The noise is uniform: take the action at which it falls in the distribution.
        action = (logits_or_std.exp().cumsum(-1)[:, :-1] < batch["noise"]).sum(-1, keepdim=True)
    return {"action": action, "logprob": agent.logprob(outputs, logits_or_std, action)[0], "value": value}


class Rollout:
    """Plays `horizon` steps in all environments; returns segments of them, with advantages, a row each."""

    def __init__(self, ppo: "PPO") -> None:
        self.ppo = ppo
        self.source: VectorSource | None = None

    def __call__(self, batch, context):
        ppo = self.ppo
        if self.source is None:
            self.source = VectorSource(
                ppo.envpool or partial(make, ppo.task), ppo.num_envs, ring=ppo.ring, seed=ppo.seed,
                processes=ppo.processes, state=context.state.get("source"))
            self.scale = context.state.get("scale") or {"plays": 0, "count": 1e-4, "mean": 0.0, "var": 1.0}
        rng = np.random.default_rng([ppo.seed, self.scale["plays"]])
        self.scale["plays"] += 1

        def ask(now):
            shape = (len(now), 1 if ppo.discrete else ppo.action.shape[0])
            noise = rng.random(shape) if ppo.discrete else rng.standard_normal(shape)
            rows = {"observation": self.normalized(now), "noise": noise.astype(ppo.dtype)}
            return rows, context.ask_later("act", {key: torch.from_numpy(row) for key, row in rows.items()})

        columns, last, returns = self.source.roll(ppo.horizon, ask, lambda action: (
            action[:, 0] if ppo.discrete else action.clip(ppo.action.low, ppo.action.high)))
        advantage = self.advantages(columns, last["value"])
        columns["target"] = advantage + columns["value"]
        columns["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        context.state |= {"source": self.source.state(), "scale": self.scale}
        segments = {
            key: column.swapaxes(0, 1).reshape(-1, ppo.segment, *column.shape[2:])
            for key, column in columns.items() if key in COLUMNS}
        metrics = {"version": context.version("act"), "frames": self.scale["plays"] * ppo.frames}
        return segments, metrics | ({"return/mean": float(np.mean(returns))} if returns else {})

    def normalized(self, now):
        """Return observations less their mean so far, divided by their deviation; pixels as they are."""
        if now.ndim > 2:
            return now
        count, mean, var = self.scale["count"], np.array(self.scale["mean"]), np.array(self.scale["var"])
        total, delta = count + len(now), now.mean(0) - mean
        var = (var * count + now.var(0) * len(now) + delta**2 * count * len(now) / total) / total
        mean = mean + delta * len(now) / total
        self.scale |= {"count": total, "mean": mean.tolist(), "var": var.tolist()}
        return ((now - mean) / np.sqrt(var + 1e-8)).clip(-10, 10).astype(self.ppo.dtype)

    def advantages(self, columns, following):
        made, advantage = np.zeros_like(columns["value"]), np.zeros_like(following)
        for t in reversed(range(self.ppo.horizon)):
            going_on = 1 - columns["done"][t].astype(made.dtype)
            gain = self.ppo.reward_scale * columns["reward"][t] + self.ppo.gamma * following * going_on
            advantage = gain - columns["value"][t] + self.ppo.gamma * self.ppo.lam * going_on * advantage
            made[t] = advantage
            following = columns["value"][t]
        return made


def ppo_loss(agent, batch, clip: float, entropy_coef: float):
    flat = {key: column.flatten(0, 1) for key, column in batch.fields.items()}
    outputs, logits_or_std, value = agent(flat["observation"])
    logprob, entropy = agent.logprob(outputs, logits_or_std, flat["action"])
    ratio = (logprob - flat["logprob"]).exp()
    gain = torch.minimum(ratio * flat["advantage"], ratio.clamp(1 - clip, 1 + clip) * flat["advantage"])
    loss = -gain + 0.25 * (value - flat["target"]).square() - entropy_coef * entropy
    metrics = {"entropy": entropy, "kl": ratio - 1 - ratio.log(), "clip_fraction": (ratio - 1).abs() > clip}
    metrics = {name: metric.to(loss).view(len(batch), -1).mean(1) for name, metric in metrics.items()}
    return loss.view(len(batch), -1).mean(1), metrics


@dataclass
class PPO(r.Experiment):
    """PPO (Schulman et al. 2017) with the usual settings of MuJoCo tasks."""

    task: str = "HalfCheetah-v5"
    envpool: str = ""  # Name of the same task in EnvPool, whose environments step in threads.
    num_envs: int = 16
    ring: int = 2  # Slices of the environments that take turns.
    processes: bool = True  # Whether each environment has a process of its own.
    horizon: int = 128  # Steps of each environment in a step of training.
    segment: int = 8  # Steps in a row, which stay together in mini-batches.
    epochs: int = 10
    minibatches: int = 16
    lr: float = 3e-4
    gamma: float = 0.99
    lam: float = 0.95
    clip: float = 0.2
    entropy_coef: float = 0.0
    reward_scale: float = 0.1
    dtype: str = "float32"

    def __post_init__(self):
        super().__post_init__()
        self.frames = self.num_envs * self.horizon
        self.batch_size = self.frames // self.segment
        self.dataset = r.ArrayDataset(num_rows=self.batch_size, shuffle=False)
        env = make(self.task)
        self.shape, self.action = list(env.observation_space.shape), env.action_space
        self.discrete = isinstance(self.action, gymnasium.spaces.Discrete)

    def roles(self):
        count = int(self.action.n) if self.discrete else self.action.shape[0]
        arguments = {"shape": self.shape, "actions": count, "discrete": self.discrete}
        adam = r.OptimizerConfig(
            lr=self.lr, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.0, max_grad_norm=0.5, schedule="linear")
        return {"agent": r.ModuleRole(module=Agent, arguments=arguments, optimizer=adam, dtype=self.dtype)}

    def graph(self):
        loss = partial(ppo_loss, clip=self.clip, entropy_coef=self.entropy_coef)
        work = r.TrainFunction(loss, self.minibatches, self.epochs, shuffle_minibatches=True, seed=self.seed)
        play = r.HostFunction(Rollout(self), asks=("act",))
        return r.DataflowGraph((
            r.FunctionCall("play", inputs=("dataset_row",), outputs=COLUMNS, work=play),
            r.FunctionCall("act", role="agent", inputs=("dataset_row",), work=r.ForwardFunction(act)),
            r.FunctionCall("agent_train", role="agent", inputs=COLUMNS, work=work)), inputs=("dataset_row",))


experiment = PPO(steps=100)
