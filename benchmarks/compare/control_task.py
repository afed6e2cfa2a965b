"""An environment that sleeps, for sweeps of the ring: `benchmarks.compare.control_task:Slow-v0`."""

import time
from typing import Any

import gymnasium
import numpy as np


class Slow(gymnasium.Env):
    """An environment that sleeps in each step; episodes have 100 steps, and the reward is 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (17,), np.float64)
    action_space = gymnasium.spaces.Box(-1, 1, (6,), np.float32)

    def __init__(self, seconds: float = 0.005) -> None:
        self._seconds = seconds
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return self.np_random.uniform(-1, 1, 17), {}

    def step(self, action: Any) -> Any:
        time.sleep(self._seconds)
        self._steps += 1
        return self.np_random.uniform(-1, 1, 17), 1.0, False, self._steps == 100, {}


gymnasium.register("Slow-v0", entry_point=Slow)
