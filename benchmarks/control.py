"""PPO on environments: the ring, and frames per second beside a loop in CleanRL's manner with EnvPool.

    python benchmarks/control.py ring
    python benchmarks/control.py speed --rounds 3 --steps 6

`ring` plays with an environment that takes 5 ms for a step, in rings of 1 to 8 slices. `speed` trains both
sides on HalfCheetah in turns, with the same network, environments and settings; the other loop is written as
CleanRL's PPO is. One process, whose environments step in processes (ring) or in threads of EnvPool (speed).
"""

import json
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import tyro

from realhf.distributed.world import World
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from realhf.user_input.files import execute_file

EXAMPLE = Path(__file__).parents[1] / "examples/control/srl_ppo.py"
STEP_SECONDS = 0.005
GOAL = 3.0
"""Gain of the best ring over a ring of one."""
SETTINGS: dict[str, Any] = {
    "task": "HalfCheetah-v5", "envpool": "HalfCheetah-v4", "num_envs": 64, "horizon": 64, "segment": 8,
    "epochs": 4, "minibatches": 8, "reward_scale": 0.1}


class Slow(gymnasium.Env):
    """An environment that waits."""

    observation_space = gymnasium.spaces.Box(-1, 1, (8,))
    action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(8, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(STEP_SECONDS)
        return np.zeros(8, np.float32), 0.0, False, False, {}


gymnasium.register("Slow-v0", Slow)


def run(ppo: Any) -> tuple[float, float]:
    """Run an experiment in this process; return its frames per second, and per second of the processor, of
    all steps but the first, which starts the environments."""
    clocks: list[tuple[float, float]] = []
    ppo.on_step = lambda event: clocks.append(_clocks())
    Trainer(compile_program(ppo, None, world_size=1), World(), quiet=True).run()
    return _rates(ppo, clocks)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _rates(ppo: Any, clocks: list[tuple[float, float]]) -> tuple[float, float]:
    frames = ppo.frames * (len(clocks) - 1)
    return frames / (clocks[-1][0] - clocks[0][0]), frames / (clocks[-1][1] - clocks[0][1])


@dataclass
class Ring:
    """Sweep the number of slices, each with the same number of environments."""

    size: int = 2  # Environments of a slice.
    steps: int = 4
    horizon: int = 64

    def __call__(self) -> int:
        example = execute_file(EXAMPLE, name="srl_ppo_benchmark")
        speeds = {}
        for ring in (1, 2, 4, 8):
            ppo = example.PPO(
                task="Slow-v0", ring=ring, num_envs=self.size * ring, horizon=self.horizon, steps=self.steps,
                epochs=1, minibatches=1)
            speeds[ring], of_processor = run(ppo)
            gain = f"{speeds[ring] / speeds[1]:.2f} x"
            print(
                f"ring {ring}: {speeds[ring]:,.0f} frames/s, {gain}; {of_processor:,.0f} per second of the "
                "processor in this process", flush=True)
        gain = max(speeds.values()) / speeds[1]
        print(json.dumps({"frames_per_s": speeds, "gain": gain, "goal": GOAL, "reached": gain >= GOAL}))
        return int(gain < GOAL)


@dataclass
class Speed:
    """Train both sides in turns, each time anew for some seconds."""

    rounds: int = 3
    steps: int = 6

    def __call__(self) -> int:
        example = execute_file(EXAMPLE, name="srl_ppo_benchmark")
        torch.set_num_threads(1)
        sides = {
            "ours, ring 2": lambda: run(example.PPO(**SETTINGS, ring=2, steps=self.steps)),
            "ours, ring 1": lambda: run(example.PPO(**SETTINGS, ring=1, steps=self.steps)),
            "loop": lambda: loop(example.PPO(**SETTINGS, ring=1, steps=self.steps), example)}
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for number in range(self.rounds):
            for name, side in sides.items():
                rates[name].append(side())
                each, of_processor = rates[name][-1]
                print(
                    f"round {number + 1}, {name}: {each:,.0f} frames/s, {of_processor:,.0f} per second of "
                    "the processor", flush=True)
        medians = {
            name: [statistics.median(pair[i] for pair in pairs) for i in (0, 1)]
            for name, pairs in rates.items()}
        print(json.dumps({"rates": rates, "medians": medians}))
        return int(max(medians["ours, ring 2"], medians["ours, ring 1"]) < medians["loop"])


def loop(ppo: Any, example: Any) -> tuple[float, float]:
    """Return the same rates of a plain loop with the same network and settings."""
    import envpool

    count, horizon = ppo.num_envs, ppo.horizon
    envs = envpool.make(ppo.envpool, env_type="gymnasium", num_envs=count, seed=0)
    agent = example.Agent(**ppo.roles()["agent"].arguments)
    optimizer = torch.optim.Adam(agent.parameters(), lr=ppo.lr, eps=1e-5)
    now = torch.tensor(envs.reset()[0]).float()
    mean, var, seen = torch.zeros(now.shape[1]), torch.ones(now.shape[1]), 1e-4
    clocks = []
    for _ in range(ppo.steps):
        kept: dict[str, list[torch.Tensor]] = defaultdict(list)
        for _ in range(horizon):
            delta, total = now.mean(0) - mean, seen + count
            spread = var * seen + now.var(0, unbiased=False) * count + delta**2 * seen * count / total
            mean, var, seen = mean + delta * count / total, spread / total, total
            scaled = ((now - mean) / (var + 1e-8).sqrt()).clamp(-10, 10)
            with torch.no_grad():
                rows = {"observation": scaled, "noise": torch.randn(count, ppo.action.shape[0])}
                answer = example.act(agent, rows)
            following, reward, terminated, truncated, _ = envs.step(answer["action"].numpy().clip(-1, 1))
            for key, value in {
                "observation": scaled, **answer, "reward": torch.tensor(reward).float() * ppo.reward_scale,
                "done": torch.tensor(terminated | truncated).float(),
            }.items():
                kept[key].append(value)
            now = torch.tensor(following).float()
        with torch.no_grad():
            value = agent(((now - mean) / (var + 1e-8).sqrt()).clamp(-10, 10))[2]
        advantage, advantages = torch.zeros(count), []
        for t in reversed(range(horizon)):
            delta = kept["reward"][t] + ppo.gamma * value * (1 - kept["done"][t]) - kept["value"][t]
            advantage = delta + ppo.gamma * ppo.lam * (1 - kept["done"][t]) * advantage
            advantages.append(advantage)
            value = kept["value"][t]
        keys = ("observation", "action", "logprob", "value")
        flat = {key: torch.stack(kept[key]).flatten(0, 1) for key in keys}
        flat["advantage"] = torch.stack(advantages[::-1]).flatten()
        flat["target"] = flat["advantage"] + flat["value"]
        for _ in range(ppo.epochs):
            for part in torch.randperm(count * horizon).chunk(ppo.minibatches):
                rows = {key: column[part] for key, column in flat.items()}
                gains = rows["advantage"]
                gains = (gains - gains.mean()) / (gains.std() + 1e-8)
                outputs, std, value = agent(rows["observation"])
                logprob, _ = agent.logprob(outputs, std, rows["action"])
                ratio = (logprob - rows["logprob"]).exp()
                gain = torch.minimum(ratio * gains, ratio.clamp(1 - ppo.clip, 1 + ppo.clip) * gains)
                loss = (-gain + 0.25 * (value - rows["target"]).square()).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        clocks.append(_clocks())
    envs.close()
    return _rates(ppo, clocks)


if __name__ == "__main__":
    sys.exit(tyro.extras.subcommand_cli_from_dict({"ring": Ring, "speed": Speed})())
