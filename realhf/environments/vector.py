"""VectorSource: environments of gymnasium in worker processes, in slices that take turns (SRL's ring).

While the actions of one slice are computed, the environments of the others step. A source can be restored:
it keeps the actions of each unfinished episode, and plays them again. This module needs gymnasium.
"""

import base64
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from realhf.cluster import num_cores
from realhf.errors import UserError

_RETURN = "episode_return"
_TRUNCATED = "episode_truncated"
_FINAL = "episode_final"
Array = NDArray[Any]


class Observed(NamedTuple):
    """Observations of a slice of environments after a step, with one entry for each environment."""

    observation: Array  # If an episode has ended, the first of the next one; of EnvPool, its own last one.
    reward: Array
    terminated: Array  # Whether the step has ended an episode, as the task says.
    truncated: Array  # Whether something else has, such as a limit of time: it would have gone on.
    final: Array  # The last observations of the truncated episodes, in the order of their environments.
    returns: list[float]  # The sums of rewards of the episodes that have ended.

    @property
    def done(self) -> Array:
        """Whether the step has ended an episode."""
        return self.terminated | self.truncated


class Question(Protocol):
    """A question that has been asked about the observations of a slice (see `HostContext.ask_later`)."""

    def result(self) -> Any:
        """Return the answer, tensors by name; wait for it."""

    def then(self, do: Callable[[Any], Any]) -> "Question":
        """Call a function with the answer as soon as it is there."""


class Asking(Protocol):
    """A function that asks about observations, and returns columns to keep and the question."""

    def __call__(
        self, observation: Array, step: int, environments: Array
    ) -> tuple[Mapping[str, Array], Question]:
        """Ask before a step, counted from 0, about environments of the source, which are given by index."""


class Rolled(NamedTuple):
    """Columns of some steps of a source; arrays have the shape (steps, num_envs, ...)."""

    columns: dict[str, Array]  # What `ask` keeps, answers, `reward`, `terminated` and `truncated`.
    following: dict[str, Array]
    """The answers about the observation after each step. For a truncated episode that is its last one, and
    for a terminated one the first of the next episode."""
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
        self._taken = StepTimes()

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
        with self._taken:
            observation, reward, terminated, truncated, _ = self.env.step(action)
        self._return += float(reward)
        if not (terminated or truncated):
            return observation, float(reward), False, False, {}
        about: dict[str, Any] = {_RETURN: self._return}  # (The vector shall not reset this environment.)
        if not terminated:
            about |= {_TRUNCATED: True, _FINAL: np.array(observation)}
        self._episode += 1
        first, _ = self.reset()
        return first, float(reward), False, False, about

    def taken(self) -> tuple[int, float, float, float]:
        """Return what the steps since the last call of this method have taken (see StepTimes)."""
        taken = self._taken.figures()
        self._taken = StepTimes()
        return taken

    def restored(self, episodes: Sequence[int], actions: Sequence[Array]) -> Any:
        """Play the actions of the present episode again; return what the environment shows after them."""
        self._episode = episodes[self._row]
        observation, _ = self.reset()
        for action in actions[self._row]:
            observation, *_ = self.step(action)
        return observation


class StepTimes:
    """Seconds of the steps of an environment, and those of the processor in between, too."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._seconds = 0.0
        self._squares = 0.0
        self._cpu_start = time.process_time()
        self._start = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        seconds = time.perf_counter() - self._start
        self._num_steps += 1
        self._seconds += seconds
        self._squares += seconds**2

    def figures(self) -> tuple[int, float, float, float]:
        """Return the number of steps, their seconds, the sum of these squared, and CPU seconds.

        CPU seconds are those of the process from the beginning, with those that messages take.
        """
        return self._num_steps, self._seconds, self._squares, time.process_time() - self._cpu_start


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

    def taken(self) -> Sequence[tuple[int, float, float, float]]:
        """Return what the steps of each environment have taken; nothing if they are no processes."""

    def close(self) -> None:
        """End the processes."""


class GymnasiumSlice:
    """Environments in a process each, whose observations are in shared memory; or all in this process."""

    def __init__(self, makers: Sequence[Callable[[], gymnasium.Env]], *, processes: bool) -> None:
        kind: Callable[..., VectorEnv] = SyncVectorEnv
        if processes:
            kind = partial(AsyncVectorEnv, shared_memory=True)
        self._envs = kind(list(makers), copy=False, autoreset_mode=AutoresetMode.DISABLED)
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
        if _RETURN not in about:
            none = np.zeros(len(reward), bool)
            return Observed(observation, reward, none, none, observation[:0], [])
        ended = np.asarray(about[f"_{_RETURN}"])
        truncated = np.asarray(about.get(f"_{_TRUNCATED}", np.zeros(len(reward), bool)))
        final = np.asarray(about[_FINAL])[truncated] if truncated.any() else observation[:0]
        returns = np.asarray(about[_RETURN])[ended].tolist()
        return Observed(observation, reward, ended & ~truncated, truncated, final, returns)

    def restore(self, episodes: Sequence[int], actions: Sequence[Array]) -> Array:
        self._envs.reset()
        return np.stack(getattr(self._envs, "call")("restored", episodes, actions))  # noqa: B009

    def taken(self) -> Sequence[tuple[int, float, float, float]]:
        return getattr(self._envs, "call")("taken") if self._processes else []  # noqa: B009

    def close(self) -> None:
        self._envs.close()


class EnvPoolSlice:
    """Environments of EnvPool, which step in threads of this process. They cannot be restored.

    An ended episode takes one more step, in which the next one begins, as in EnvPool.
    """

    def __init__(self, task: str, *, seeds: Sequence[int], **settings: Any) -> None:
        import envpool

        num_envs = len(seeds)
        self._envs = envpool.make(
            task, env_type="gymnasium", num_envs=num_envs, seed=list(seeds), **settings)
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
        self._returns += reward
        done = terminated | truncated
        ended = self._returns[done].tolist()
        self._returns[done] = 0.0
        truncated = truncated & ~terminated
        return Observed(observation, reward, terminated, truncated, observation[truncated], ended)

    def restore(self, episodes: Sequence[int], actions: Sequence[Array]) -> Array:
        """Begin new episodes."""
        return self.first()

    def taken(self) -> Sequence[tuple[int, float, float, float]]:
        return []

    def close(self) -> None:
        self._envs.close()


def _seed(seed: int, number: int) -> int:
    """Return the seed of an environment of EnvPool, below 2^31."""
    return int(np.random.SeedSequence([seed, number]).generate_state(1)[0] >> 1)


class VectorSource:
    """`num_envs` environments in `ring` slices, each with the observations at which it waits for actions."""

    def __init__(
        self, make: Callable[[], gymnasium.Env] | str, num_envs: int, *, ring: int = 1, seed: int = 0,
        numbers: Sequence[int] | None = None, processes: bool = True,
        state: Mapping[str, Any] | None = None, **settings: Any,
    ) -> None:
        """`make` returns an environment, or is the name of a task of EnvPool, which gets the `settings`.

        With `processes`, each environment has a process of its own. `state` is that of a source to continue,
        or of several together, which may have had other environments, too.
        Episodes depend on the seed and on an environment's number (`numbers`; None: from 0): sources on
        several ranks together have the episodes of one.
        """
        if ring < 1 or num_envs % ring:
            raise UserError(f"VectorSource: num_envs is {num_envs}: it must be a multiple of ring, {ring}")
        self._numbers = list(range(num_envs) if numbers is None else numbers)
        parts = (state or {}).get("parts", {})
        if state and not all(str(number) in parts for number in self._numbers):
            raise UserError(
                f"VectorSource: this rank's environments have the numbers {self._numbers}, and the state is "
                f"of {', '.join(parts) or 'none'}: resume with as many environments")
        self.ring = ring
        self.num_envs = num_envs
        size = num_envs // ring
        self._rows = np.arange(num_envs).reshape(ring, size)
        self._slices: list[Slice] = []
        for i in range(ring):
            if isinstance(make, str):
                seeds = [_seed(seed, number) for number in self._numbers[i * size : (i + 1) * size]]
                self._slices.append(EnvPoolSlice(make, seeds=seeds, **settings))
            else:
                makers = [
                    partial(_episodes, make, index=self._numbers[i * size + row], row=row, seed=seed)
                    for row in range(size)]
                self._slices.append(GymnasiumSlice(makers, processes=processes))
        self.can_restore = not isinstance(make, str)
        """Whether `state` says where each environment is; a task of EnvPool begins new episodes."""
        self.observation_space, self.action_space = self._slices[0].spaces
        self._taken: dict[str, float] = {}
        self._handling = 0.0
        """CPU seconds in `send` and `recv`, which are proportional to the environments."""
        self._episodes = np.zeros(num_envs, np.int64)
        self._lengths = np.zeros(num_envs, np.int64)
        self._actions = [self._no_actions(64) for _ in range(ring)]
        """The actions of the present episode of each environment of each slice."""
        if not state:
            self._now = [one.first() for one in self._slices]
        else:
            self._now = self._restored([parts[str(number)] for number in self._numbers])

    def now(self, k: int) -> Array:
        """Return the observations of slice `k` at which it waits for actions."""
        return self._now[k]

    def send(self, k: int, actions: Array) -> None:
        """Let the environments of slice `k` take a step, which `recv` waits for."""
        start = time.thread_time()
        actions = np.asarray(actions, self.action_space.dtype)
        if self.can_restore:
            at = self._lengths[self._rows[k]]
            while at.max() >= self._actions[k].shape[1]:
                self._actions[k] = np.concatenate([self._actions[k], np.zeros_like(self._actions[k])], 1)
            self._actions[k][np.arange(len(at)), at] = actions
            self._lengths[self._rows[k]] += 1
        self._slices[k].send(actions)
        self._handling += time.thread_time() - start

    def _no_actions(self, most: int) -> Array:
        """Return room for so many actions of each environment of a slice."""
        shape = (self.num_envs // self.ring, most, *self.action_space.shape)
        return np.zeros(shape, self.action_space.dtype)

    def recv(self, k: int) -> Observed:
        """Return what the step of slice `k` has shown; wait until it has ended."""
        start = time.thread_time()
        observed = self._slices[k].recv()
        done = observed.done
        self._episodes[self._rows[k]] += done
        self._lengths[self._rows[k]] *= ~done
        self._now[k] = np.array(observed.observation)
        self._handling += time.thread_time() - start
        return observed._replace(observation=self._now[k])

    def roll(
        self, steps: int, ask: Asking, action_of: Callable[[Array], Array] = np.asarray
    ) -> Rolled:
        """Let all environments take so many steps; while some slices wait for their actions, others step.

        `ask` is called in the order of steps and slices. The answers have the column `action`, of which
        `action_of` makes actions of the environments, and which go to them as soon as they are there.
        """
        start = time.perf_counter()
        cpu_start = time.thread_time()
        self._handling = 0.0
        kept: list[dict[str, list[Array]]] = [{} for _ in range(self.ring)]
        answers: list[list[Mapping[str, Array]]] = [[] for _ in range(self.ring)]
        ended: list[tuple[int, Array, Question]] = []
        asked: list[Question] = []
        returns: list[float] = []

        def keep(k: int, columns: Mapping[str, Any]) -> None:
            for key, column in columns.items():
                kept[k].setdefault(key, []).append(np.asarray(column))

        def act(k: int, answer: Mapping[str, Any]) -> None:
            arrays = {key: np.asarray(column) for key, column in answer.items()}
            self.send(k, action_of(arrays["action"]))
            answers[k].append(arrays)

        def observe(k: int, step: int) -> None:
            observed = self.recv(k)
            returns.extend(observed.returns)
            ends = {"terminated": observed.terminated, "truncated": observed.truncated}
            keep(k, {"reward": observed.reward} | ends)
            if len(observed.final):
                which = self._rows[k][observed.truncated]
                ended.append((step, which, ask(observed.final, step + 1, which)[1]))

        for t in range(steps):
            for k, rows in enumerate(self._rows):
                if t:
                    asked[k].result()
                    observe(k, t - 1)
                columns, question = ask(self.now(k), t, rows)
                keep(k, columns)
                asked[k : k + 1] = [question.then(partial(act, k))]
        last = []
        for k, rows in enumerate(self._rows):
            asked[k].result()
            observe(k, steps - 1)
            last.append(ask(self.now(k), steps, rows)[1])
        for k, question in enumerate(last):
            answers[k].append({key: np.asarray(column) for key, column in question.result().items()})
        answered = {
            key: np.concatenate([np.stack([one[key] for one in of_slice]) for of_slice in answers], 1)
            for key in answers[0][0]}
        columns = {key: np.concatenate([np.stack(one[key]) for one in kept], 1) for key in kept[0]}
        following = {key: column[1:].copy() for key, column in answered.items()}
        for step, which, question in ended:
            for key, column in question.result().items():
                following[key][step, which] = column
        self._taken = {
            "steps": steps, "rolling_seconds": time.perf_counter() - start,
            "rolling_cpu_seconds": time.thread_time() - cpu_start, "handling_cpu_seconds": self._handling}
        return Rolled(columns | {key: column[:-1] for key, column in answered.items()}, following, returns)

    def taken(self) -> dict[str, float]:
        """Return what rolling has taken, for the planner; nothing if environments are no processes.

        For the last `roll`, that is `num` environments in `slices`, `steps` of each, the seconds in which
        they were rolled, and CPU seconds of the thread that rolled them, also those for sending and for
        receiving. For all steps since the last call of this method, with those that a restored source has
        played again, it is the mean and the standard deviation of the seconds of a step of an environment,
        and the CPU seconds of its process for a step. `cores` is the number that this process may use.
        """
        each = [figures for one in self._slices for figures in one.taken()]
        if not each:
            return {}
        num, seconds, squares, cpu_seconds = map(sum, zip(*each, strict=True))
        mean = seconds / max(num, 1)
        return self._taken | {
            "num": self.num_envs, "slices": self.ring, "step_seconds": mean,
            "step_deviation": max(0.0, squares / max(num, 1) - mean**2) ** 0.5,
            "step_cpu_seconds": cpu_seconds / max(num, 1), "cores": num_cores()}

    def state(self) -> dict[str, Any]:
        """Return, as JSON, the point of its episode at which each environment is, while none takes a step.

        It has a part for each environment by its number, so that other ranks can go on with some of them (see
        `HostContext.state`). It is empty if the source cannot be restored.
        """
        if not self.can_restore:
            return {}
        each = (row for of_slice in self._actions for row in of_slice)
        figures = zip(self._numbers, self._episodes.tolist(), self._lengths.tolist(), each, strict=True)
        return {"parts": {
            str(number): {
                "episode": episode, "length": length,
                "actions": base64.b64encode(row[:length].tobytes()).decode()}
            for number, episode, length, row in figures}}

    def _restored(self, parts: Sequence[Mapping[str, Any]]) -> list[Array]:
        """Bring each environment to where its part of a state says."""
        self._episodes[:] = [part["episode"] for part in parts]
        self._lengths[:] = [part["length"] for part in parts]
        observations = []
        for k, rows in enumerate(self._rows):
            self._actions[k] = self._no_actions(max(64, int(self._lengths[rows].max()) + 1))
            actions = []
            for i, room in zip(rows, self._actions[k], strict=True):
                played = np.frombuffer(base64.b64decode(parts[i]["actions"]), self.action_space.dtype)
                played = played.reshape(self._lengths[i], *self.action_space.shape)
                room[: len(played)] = played
                actions.append(played)
            observations.append(np.array(self._slices[k].restore(self._episodes[rows].tolist(), actions)))
        return observations

    def close(self) -> None:
        """End the processes of all environments."""
        for one in self._slices:
            one.close()


def _episodes(make: Callable[[], gymnasium.Env], *, index: int, row: int, seed: int) -> Episodes:
    return Episodes(make(), index=index, row=row, seed=seed)
