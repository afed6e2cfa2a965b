"""Trajectories of policies from random to good, for the examples that learn from data alone.

Augmented random search (Mania et al. 2018, version V2-t) finds linear policies, which is cheap on a CPU.
Policies on its way, with noise on their actions, walk the trajectories: a mixture like that of a replay
buffer. The file of a task is written once, in less than a minute.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import gymnasium
import numpy as np

from realhf import prepare_once


@dataclass(frozen=True)
class Task:
    """A task of gymnasium, and how its policies are searched."""

    name: str
    iterations: int = 45
    directions: int = 16  # Directions that are tried in an iteration.
    best: int = 8  # Directions of these that are followed.
    step_size: float = 0.02
    deviation: float = 0.03  # Of the directions.
    length: int = 1000  # Steps of an episode that does not end before.
    bonus: float = 0.0  # Reward of a step for not having fallen, which the search leaves out.
    policies: int = 6  # That walk the trajectories, from random to best.
    episodes: int = 14  # Of each of these.
    noise: float = 0.3  # Standard deviation of what is added to their actions.


TASKS = {
    "pendulum": Task(
        "InvertedPendulum-v5", iterations=12, directions=4, best=4, step_size=0.05, deviation=0.1,
        episodes=40),
    "double_pendulum": Task(
        "InvertedDoublePendulum-v5", iterations=60, step_size=0.3, deviation=0.5, episodes=40, length=500),
    "reacher": Task(
        "Reacher-v5", directions=8, best=4, step_size=0.05, deviation=0.05, episodes=100, length=50),
    "hopper": Task("Hopper-v5", iterations=50, episodes=40, noise=0.1, deviation=0.025, bonus=1.0),
    "swimmer": Task("Swimmer-v5", iterations=25, directions=4, best=4, deviation=0.02),
    "hopper_small": Task("Hopper-v5", iterations=2, directions=2, best=2, episodes=5, length=100),
}

Policy = Callable[[np.ndarray], np.ndarray]
"""Returns the action for the observation: a share, from -1 to 1, of the largest action."""


@dataclass(frozen=True)
class Linear:
    """A policy that multiplies normalised observations with a matrix."""

    matrix: np.ndarray
    mean: np.ndarray
    scale: np.ndarray

    def __call__(self, observation: np.ndarray) -> np.ndarray:
        return np.clip(self.matrix @ ((observation - self.mean) / self.scale), -1, 1)


def make(task: Task, seed: int) -> gymnasium.Env:
    """Return the environment without wrappers, which take longer than the physics."""
    env = gymnasium.make(task.name, disable_env_checker=True).unwrapped
    env.reset(seed=seed)
    return env


def episode(env: gymnasium.Env, policy: Policy, length: int) -> dict[str, np.ndarray]:
    """Return observations (one more than actions), actions, rewards, and whether the last step ended it."""
    observations = [env.reset()[0]]
    actions, rewards, ended = [], [], False
    while len(actions) < length and not ended:
        actions.append(policy(observations[-1]))
        observation, reward, ended, _, _ = env.step(actions[-1] * env.action_space.high)
        observations.append(observation)
        rewards.append(reward)
    return {
        "observations": np.array(observations), "actions": np.array(actions), "rewards": np.array(rewards),
        "ended": np.array(ended)}


def returns(task: Task, policy: Policy, *, episodes: int, seed: int) -> np.ndarray:
    """Return the sums of rewards of new episodes, whose observations the policy gets all at once."""
    envs = [make(task, seed + i) for i in range(episodes)]
    observations = np.stack([env.reset()[0] for env in envs])
    totals = np.zeros(episodes)
    running = list(range(episodes))
    for _ in range(task.length):
        actions = policy(observations)
        for i in list(running):
            observations[i], reward, ended, _, _ = envs[i].step(actions[i] * envs[i].action_space.high)
            totals[i] += reward
            if ended:
                running.remove(i)
        if not running:
            break
    return totals


def search(task: Task, seed: int) -> list[Linear]:
    """Return the policy after every iteration; the first one is zero."""
    env = make(task, seed)
    rng = np.random.default_rng(seed)
    shape = env.action_space.shape + env.observation_space.shape
    policies = [Linear(np.zeros(shape), np.zeros(shape[1]), np.ones(shape[1]))]
    seen = np.zeros((3, shape[1]))  # Sums of 1, of the observations and of their squares.
    for _ in range(task.iterations):
        now = policies[-1]
        directions = rng.standard_normal((task.directions, *shape))
        tried = [
            [episode(env, replace(now, matrix=now.matrix + step), task.length) for step in (change, -change)]
            for change in task.deviation * directions]
        scores = np.array([[np.sum(e["rewards"] - task.bonus) for e in pair] for pair in tried])
        top = np.argsort(-scores.max(axis=1))[:task.best]
        slopes = (scores[top, 0] - scores[top, 1]) / (scores[top].std() + 1e-8)
        matrix = now.matrix + task.step_size / task.best * np.tensordot(slopes, directions[top], axes=1)
        walked = np.concatenate([e["observations"] for pair in tried for e in pair])
        seen += [np.full(shape[1], len(walked)), walked.sum(axis=0), (walked**2).sum(axis=0)]
        mean = seen[1] / seen[0]
        policies.append(Linear(matrix, mean, np.sqrt(np.maximum(seen[2] / seen[0] - mean**2, 1e-4))))
    return policies


def collect(task: Task, policies: Sequence[Policy], *, seed: int) -> list[dict[str, np.ndarray]]:
    """Return episodes of each policy with noisy actions."""
    env = make(task, seed)
    rng = np.random.default_rng(seed)

    def noisy(policy: Policy) -> Policy:
        return lambda o: np.clip(policy(o) + task.noise * rng.standard_normal(env.action_space.shape), -1, 1)

    return [episode(env, noisy(policy), task.length) for policy in policies for _ in range(task.episodes)]


@lru_cache
def load(task: Task, directory: str | Path = "runs/control") -> list[dict[str, np.ndarray]]:
    """Return the trajectories of a task in the order of their returns; make them if they are not there."""
    path = Path(directory) / f"{task.name}-{zlib.crc32(repr(task).encode()):08x}.npz"
    prepare_once(path, partial(_write, task))
    with np.load(path, allow_pickle=False) as arrays:
        ends = arrays["lengths"].cumsum()
        parts = {key: np.split(arrays[key], ends[:-1]) for key in ("actions", "rewards")}
        # A trajectory has one observation more than actions.
        parts["observations"] = np.split(arrays["observations"], (ends + np.arange(1, len(ends) + 1))[:-1])
        parts["ended"] = list(arrays["ended"])
    trajectories = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    return sorted(trajectories, key=lambda t: t["rewards"].sum())


def _write(task: Task, path: Path) -> None:
    found = search(task, seed=0)
    env = make(task, seed=1)
    scored = sorted(found[1:], key=lambda policy: episode(env, policy, task.length)["rewards"].sum())
    chosen = [found[0], *(scored[i] for i in np.linspace(0, len(scored) - 1, task.policies - 1).astype(int))]
    trajectories = collect(task, chosen, seed=2)
    arrays = {key: np.concatenate([np.atleast_1d(t[key]) for t in trajectories]) for key in trajectories[0]}
    with path.open("wb") as file:
        np.savez(file, lengths=np.array([len(t["actions"]) for t in trajectories]), **arrays)
