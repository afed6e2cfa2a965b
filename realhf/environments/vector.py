"""VectorSource: environments of gymnasium in worker processes, in slices that take turns (SRL's ring).

While the actions of one slice are computed, the environments of the others step. A source can be restored:
it keeps the actions of each unfinished episode, and plays them again. This module needs gymnasium.
"""

import base64
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from realhf.errors import UserError

_RETURN = "episode_return"
Array = NDArray[Any]


class Observed(NamedTuple):
    """Observations of a slice of environments after a step, with one entry for each environment."""

    observation: Array  # If an episode has ended, the first of the next one.
    reward: Array
    done: Array  # Whether the step has ended an episode.
    returns: list[float]  # The sums of rewards of the episodes that have ended.


class Question(Protocol):
    """A question that has been asked about the observations of a slice (see `HostContext.ask_later`)."""

    @property
    def is_here(self) -> bool:
        """Whether the answer is there already."""

    def result(self) -> Mapping[str, Any]:
        """Return the answer, tensors by name; wait for it."""


class Rolled(NamedTuple):
    """Columns of some steps of a source; arrays have the shape (steps, num_envs, ...)."""

    columns: dict[str, Array]  # Observations, what was asked and answered, rewards, and ends of episodes.
    last: dict[str, Array]  # The answers about the observations after these steps, of shape (num_envs, ...).
    returns: list[float]  # The sums of rewards of the episodes that have ended.


class Episodes(gymnasium.Wrapper):
    """An environment that begins its next episode itself, from a seed of its own for each episode."""

    def __init__(self, env: gymnasium.Env, *, index: int, row: int, seed: int) -> None:
        """Take the environment's index in its source, which decides its seeds, and its row in its slice."""
        super().__init__(env)
        self._index = index
        self._row = row
        self._seed = seed
        self._episode = 0
        self._return = 0.0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the present episode from its beginning."""
        words = np.random.SeedSequence([self._seed, self._index, self._episode]).generate_state(1)
        self._return = 0.0
        observation, _ = self.env.reset(seed=int(words[0]))
        return observation, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Take a step; at the end of an episode, the observation is that of the next one."""
        observation, reward, terminated, truncated, _ = self.env.step(action)
        self._return += float(reward)
        if not (terminated or truncated):
            return observation, float(reward), False, False, {}
        about = {_RETURN: self._return}  # (The vector of environments shall not reset this one.)
        self._episode += 1
        first, _ = self.reset()
        return first, float(reward), False, False, about

    def restored(self, episodes: Sequence[int], actions: Sequence[Array]) -> Any:
        """Play the actions of the present episode again; return what the environment shows after them."""
        self._episode = episodes[self._row]
        observation, _ = self.reset()
        for action in actions[self._row]:
            observation, *_ = self.step(action)
        return observation


class Slice(Protocol):
    """Environments that step together."""

    @property
    def spaces(self) -> tuple[Any, Any]:
        """The spaces of one environment's observations and actions."""

    def first(self) -> Array:
        """Begin, and return the first observations."""

    def send(self, actions: Array) -> None:
        """Let all environments take a step; they may do so in the background."""

    def recv(self) -> Observed:
        """Return what the step has shown; wait until it has ended."""

    def restore(self, episodes: Sequence[int], actions: Sequence[Array]) -> Array:
        """Go back to a point of an episode, and return the observations there."""

    def close(self) -> None:
        """End the processes."""


class GymnasiumSlice:
    """Environments in a process each, whose observations are in shared memory; or all in this process."""

    def __init__(self, makers: Sequence[Callable[[], gymnasium.Env]], *, processes: bool) -> None:
        kind: Callable[..., VectorEnv] = SyncVectorEnv
        if processes:
            kind = partial(AsyncVectorEnv, shared_memory=True)
        self._envs = kind(list(makers), autoreset_mode=AutoresetMode.DISABLED)
        self._processes = processes
        self._actions: Array | None = None

    @property
    def spaces(self) -> tuple[gymnasium.Space, gymnasium.Space]:
        return self._envs.single_observation_space, self._envs.single_action_space

    def first(self) -> Array:
        observation, _ = self._envs.reset()
        return np.array(observation)

    def send(self, actions: Array) -> None:
        self._actions = actions
        if self._processes:
            self._envs.step_async(actions)  # type: ignore[attr-defined]

    def recv(self) -> Observed:
        wait = getattr(self._envs, "step_wait", None)
        step = wait() if wait is not None else self._envs.step(self._actions)
        observation, reward, _, _, about = step
        ended = np.asarray(about.get(f"_{_RETURN}", np.zeros(len(reward), bool)))
        returns = np.asarray(about[_RETURN])[ended].tolist() if ended.any() else []
        return Observed(observation, reward, ended, returns)

    def restore(self, episodes: Sequence[int], actions: Sequence[Array]) -> Array:
        self._envs.reset()
        return np.stack(getattr(self._envs, "call")("restored", episodes, actions))  # noqa: B009

    def close(self) -> None:
        self._envs.close()


class EnvPoolSlice:
    """Environments of EnvPool, which step in threads of this process. They cannot be restored.

    An ended episode takes one more step, in which the next one begins, as in EnvPool.
    """

    def __init__(self, task: str, *, num_envs: int, seed: int, **settings: Any) -> None:
        import envpool

        self._envs = envpool.make(task, env_type="gymnasium", num_envs=num_envs, seed=seed, **settings)
        self._all = np.arange(num_envs)
        self._returns = np.zeros(num_envs)

    @property
    def spaces(self) -> tuple[gymnasium.Space, gymnasium.Space]:
        return self._envs.observation_space, self._envs.action_space

    def first(self) -> Array:
        return self._envs.reset()[0]

    def send(self, actions: Array) -> None:
        self._envs.send(actions, self._all)

    def recv(self) -> Observed:
        observation, reward, terminated, truncated, _ = self._envs.recv()
        done = terminated | truncated
        self._returns += reward
        ended = self._returns[done].tolist()
        self._returns[done] = 0.0
        return Observed(observation, reward, done, ended)

    def restore(self, episodes: Sequence[int], actions: Sequence[Array]) -> Array:
        """Begin new episodes."""
        return self.first()

    def close(self) -> None:
        self._envs.close()


class VectorSource:
    """`num_envs` environments in `ring` slices, each with the observations at which it waits for actions."""

    def __init__(
        self, make: Callable[[], gymnasium.Env] | str, num_envs: int, *, ring: int = 1, seed: int = 0,
        processes: bool = True, state: Mapping[str, Any] | None = None, **settings: Any,
    ) -> None:
        """`make` returns an environment, or is the name of a task of EnvPool, which gets the `settings`.

        With `processes`, each environment has a process of its own. `state` is that of a source to continue.
        """
        if ring < 1 or num_envs % ring:
            raise UserError(f"VectorSource: num_envs is {num_envs}: it must be a multiple of ring, {ring}")
        self.ring = ring
        self.num_envs = num_envs
        size = num_envs // ring
        self._rows = [slice(i * size, (i + 1) * size) for i in range(ring)]
        self._slices: list[Slice] = []
        for i in range(ring):
            if isinstance(make, str):
                first = seed * num_envs + i * size  # EnvPool counts on from it.
                self._slices.append(EnvPoolSlice(make, num_envs=size, seed=first, **settings))
            else:
                makers = [partial(_episodes, make, index=i * size + j, row=j, seed=seed) for j in range(size)]
                self._slices.append(GymnasiumSlice(makers, processes=processes))
        self.can_restore = not isinstance(make, str)
        """Whether `state` says where each environment is; a task of EnvPool begins new episodes."""
        self.observation_space, self.action_space = self._slices[0].spaces
        self._episodes = np.zeros(num_envs, np.int64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._actions = np.zeros((num_envs, 64, *self.action_space.shape), self.action_space.dtype)
        """The actions of the present episode of each environment."""
        self._sent: list[Array | None] = [None] * ring
        if not state:
            self._now = [one.first() for one in self._slices]
        else:
            self._now = self._restored(state)

    def now(self, k: int) -> Array:
        """Return the observations of slice `k` at which it waits for actions."""
        return self._now[k]

    def send(self, k: int, actions: Array) -> None:
        """Let the environments of slice `k` take a step, which `recv` waits for."""
        actions = np.asarray(actions, self.action_space.dtype)
        if self.can_restore:
            rows = self._rows[k]
            at = self._lengths[rows]
            while at.max() >= self._actions.shape[1]:
                self._actions = np.concatenate([self._actions, np.zeros_like(self._actions)], 1)
            self._actions[np.arange(rows.start, rows.stop), at] = actions
            self._lengths[rows] += 1
        self._slices[k].send(actions)

    def recv(self, k: int) -> Observed:
        """Return what the step of slice `k` has shown; wait until it has ended."""
        observed = self._slices[k].recv()
        rows = self._rows[k]
        self._episodes[rows] += observed.done
        self._lengths[rows] *= ~observed.done
        self._now[k] = np.array(observed.observation)
        return observed._replace(observation=self._now[k])

    def roll(
        self, steps: int, ask: Callable[[Array], tuple[Mapping[str, Array], Question]],
        action_of: Callable[[Array], Array] = np.asarray,
    ) -> Rolled:
        """Let all environments take so many steps, slice after slice, while others wait for their actions.

        `ask` takes observations, and returns columns to keep and a question about them, whose answer has the
        column `action`; `action_of` turns that into actions of the environments.
        """
        kept: list[dict[str, list[Array]]] = [{} for _ in range(self.ring)]
        asked: deque[tuple[int, Mapping[str, Array], Question]] = deque()
        returns: list[float] = []

        def keep(k: int, columns: Mapping[str, Any]) -> None:
            for key, column in columns.items():
                kept[k].setdefault(key, []).append(np.asarray(column))

        def act() -> None:
            k, columns, question = asked.popleft()
            answer = question.result()
            self.send(k, action_of(np.asarray(answer["action"])))
            keep(k, {**columns, **answer})

        def observe(k: int) -> None:
            observed = self.recv(k)
            returns.extend(observed.returns)
            keep(k, {"reward": observed.reward, "done": observed.done})

        for t in range(steps):
            for k in range(self.ring):
                if t:
                    observe(k)
                asked.append((k, *ask(self.now(k))))
                while asked and (asked[0][2].is_here or len(asked) == self.ring):
                    act()
        while asked:
            act()
        last = []
        for k in range(self.ring):
            observe(k)
            last.append({key: np.asarray(value) for key, value in ask(self.now(k))[1].result().items()})
        columns = {key: np.concatenate([np.stack(one[key]) for one in kept], 1) for key in kept[0]}
        return Rolled(columns, {key: np.concatenate([one[key] for one in last]) for key in last[0]}, returns)

    def state(self) -> dict[str, Any]:
        """Return, as JSON, the point of its episode at which each environment is, while none takes a step.

        It is empty if the source cannot be restored.
        """
        if not self.can_restore:
            return {}
        actions = [
            base64.b64encode(self._actions[i, :n].tobytes()).decode() for i, n in enumerate(self._lengths)]
        return {"episodes": self._episodes.tolist(), "lengths": self._lengths.tolist(), "actions": actions}

    def _restored(self, state: Mapping[str, Any]) -> list[Array]:
        self._episodes[:] = state["episodes"]
        self._lengths[:] = state["lengths"]
        most = max(64, int(self._lengths.max()) + 1)
        self._actions = np.zeros((self.num_envs, most, *self.action_space.shape), self.action_space.dtype)
        for i, (length, text) in enumerate(zip(state["lengths"], state["actions"], strict=True)):
            played = np.frombuffer(base64.b64decode(text), self.action_space.dtype)
            self._actions[i, :length] = played.reshape(length, *self.action_space.shape)
        observations = []
        for one, rows in zip(self._slices, self._rows, strict=True):
            actions = [self._actions[i, : self._lengths[i]] for i in range(rows.start, rows.stop)]
            observations.append(one.restore(state["episodes"][rows], actions))
        return observations

    def close(self) -> None:
        """End the processes of all environments."""
        for one in self._slices:
            one.close()


def _episodes(make: Callable[[], gymnasium.Env], *, index: int, row: int, seed: int) -> Episodes:
    return Episodes(make(), index=index, row=row, seed=seed)
