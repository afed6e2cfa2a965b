"""PPO with environments at speed, as in SRL: a ring of environments, and inference where the plan puts it.

    realhf run examples/control/srl_ppo.py --task CartPole-v1 --nproc 1
    realhf run examples/control/srl_ppo.py --plan examples/control/remote.yaml    # inference on another rank

Tasks are those of gymnasium (`pip install 'realhf[control]'`), such as HalfCheetah-v5 and ALE/Pong-v5.
"""

from dataclasses import dataclass
from functools import cache, partial

import gymnasium
import numpy as np
import torch
from networks import Agent

import realhf as r
from realhf.environments.vector import VectorSource

COLUMNS = ("observation", "action", "logprob", "advantage", "target")
TRAINED = ("observation", "action", "logprob", "scaled", "target")


def make(task: str) -> gymnasium.Env:
    if not task.startswith("ALE/"):
        return gymnasium.make(task)
    import ale_py

    gymnasium.register_envs(ale_py)
    game = gymnasium.make(task, obs_type="grayscale", repeat_action_probability=0.0)
    small = gymnasium.spaces.Box(0, 255, (40, 40), np.uint8)
    game = gymnasium.wrappers.TransformObservation(game, shrunk, small)  # Each action is for four frames.
    return gymnasium.wrappers.FrameStackObservation(game, 4)


def shrunk(frame: np.ndarray) -> np.ndarray:
    """Return the field of a frame with 40 x 40 pixels: the brightest of each four that are two apart."""
    field = frame[34:194:2, ::2]
    rows = np.maximum(field[::2], field[1::2])
    return np.maximum(rows[:, ::2], rows[:, 1::2])


@cache
def spaces(task: str) -> tuple[list[int], gymnasium.Space]:
    """Return the shape of a task's observations, and the space of its actions."""
    env = make(task)
    env.close()
    return list(env.observation_space.shape), env.action_space


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
        """Play those environments whose segments are the rows of the batch: row % num_envs is a number."""
        ppo = self.ppo
        numbers = batch["dataset_row"].remainder(ppo.num_envs).unique().tolist()
        if len(numbers) * ppo.horizon != len(batch) * ppo.segment:
            raise ValueError("the ranks of `play` must divide num_envs")
        if self.source is None:
            self.source = VectorSource(
                ppo.envpool or partial(make, ppo.task), len(numbers), ring=context.ring or ppo.ring,
                seed=ppo.seed, numbers=numbers, processes=ppo.processes, state=context.state.get("source"))
            self.plays = context.state.get("plays", 0)
        action = self.source.action_space
        size = (ppo.horizon + 1, action.shape[0] if action.shape else 1)
        noise = np.stack([self.noise(number, size) for number in numbers], 1).astype(ppo.dtype)
        self.plays += 1

        def ask(now, step, environments):
            observation = now if now.ndim > 2 else now.astype(ppo.dtype)
            rows = {"observation": observation, "noise": noise[step, environments]}
            return rows, context.ask_later("act", {key: torch.from_numpy(row) for key, row in rows.items()})

        columns, following, returns = self.source.roll(ppo.horizon, ask, lambda chosen: (
            chosen.clip(action.low, action.high) if action.shape else chosen[:, 0]))
        columns["advantage"] = self.advantages(columns, following["value"])
        columns["target"] = columns["advantage"] + columns["value"]
        context.measured(self.source.taken())
        context.state |= {"source": self.source.state(), "plays": self.plays}
        segments = {
            key: column.reshape(-1, ppo.segment, *column.shape[1:]).swapaxes(1, 2).reshape(
                -1, ppo.segment, *column.shape[2:])
            for key, column in columns.items() if key in COLUMNS}
        metrics = {"version": context.version("act"), "frames": self.plays * ppo.frames}
        return segments, metrics | ({"return/mean": float(np.mean(returns))} if returns else {})

    def noise(self, environment, size):
        """Return the noise of an environment's actions: uniform if these are a few, and else normal."""
        rng = np.random.default_rng([self.ppo.seed, self.plays, environment])
        return rng.standard_normal(size) if self.source.action_space.shape else rng.random(size)

    def advantages(self, columns, following):
        """Return generalised advantages; the rest of an episode that was truncated is worth its value."""
        ppo, value = self.ppo, columns["value"]
        gain = ppo.reward_scale * columns["reward"] + ppo.gamma * following * ~columns["terminated"] - value
        going_on = ppo.gamma * ppo.lam * ~(columns["terminated"] | columns["truncated"])
        made, advantage = np.zeros_like(value), np.zeros_like(value[0])
        for t in reversed(range(ppo.horizon)):
            made[t] = advantage = gain[t] + going_on[t] * advantage
        return made


def scale(batch, context):
    """Scale the advantages of the whole step, wherever they were played."""
    advantage = batch["advantage"]
    return {"scaled": (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8)}


def ppo_loss(agent, batch, clip: float, entropy_coef: float):
    flat = {key: column.flatten(0, 1) for key, column in batch.fields.items()}
    outputs, logits_or_std, value = agent(flat["observation"])
    if flat["observation"].dim() == 2:  # Replicas see different rows, and then take the mean.
        agent.observed(flat["observation"])
    logprob, entropy = agent.logprob(outputs, logits_or_std, flat["action"])
    log_ratio = logprob - flat["logprob"]
    ratio = log_ratio.exp()
    gain = torch.minimum(ratio * flat["scaled"], ratio.clamp(1 - clip, 1 + clip) * flat["scaled"])
    loss = -gain + 0.25 * (value - flat["target"]).square() - entropy_coef * entropy
    with torch.no_grad():
        above = ratio - 1
        of_steps = torch.stack([entropy, above - log_ratio, (above.abs() > clip).to(loss)])
        of_rows = of_steps.view(3, len(batch), -1).mean(2)
    metrics = dict(zip(("entropy", "kl", "clip_fraction"), of_rows, strict=True))
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

    def roles(self):
        shape, action = spaces(self.task)
        arguments = {
            "shape": shape, "actions": action.shape[0] if action.shape else int(action.n),
            "discrete": not action.shape}
        adam = r.OptimizerConfig(
            lr=self.lr, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.0, max_grad_norm=0.5, schedule="linear")
        return {"agent": r.ModuleRole(module=Agent, arguments=arguments, optimizer=adam, dtype=self.dtype)}

    def graph(self):
        loss = partial(ppo_loss, clip=self.clip, entropy_coef=self.entropy_coef)
        work = r.TrainFunction(loss, self.minibatches, self.epochs, shuffle_minibatches=True, seed=self.seed)
        play = r.HostFunction(Rollout(self), asks=("act",), splittable=True)
        return r.DataflowGraph((
            r.FunctionCall("play", inputs=("dataset_row",), outputs=COLUMNS, work=play),
            r.FunctionCall("act", role="agent", inputs=("dataset_row",), work=r.ForwardFunction(act)),
            r.FunctionCall("scale", inputs=("advantage",), outputs=("scaled",), work=r.HostFunction(scale)),
            r.FunctionCall("agent_train", role="agent", inputs=TRAINED, work=work)), inputs=("dataset_row",))


experiment = PPO(steps=100)
