"""EnvironmentWorkers: environments in processes of their own, as a run sees them.

Each call returns at once; `poll` returns what has been answered meanwhile. Between this process and the
objects of users stands a host process, which forks the workers (`worker_host`) and ends what takes too long.
All messages are JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NewType

from realhf.data.memory_rows import json_form
from realhf.environments.protocol import ChatMessage, Environment, Start, StopReason, Turn
from realhf.errors import UserError, shown
from realhf.job_process import start_process

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SMALL = {"MALLOC_ARENA_MAX": "2", **dict.fromkeys(_THREADS, "1")}
"""Variables that keep workers small: there are many of them, each with many threads."""
_STOPS: dict[str, StopReason] = {"failed": "step_error", "late": "step_timeout", "lost": "worker_lost"}


_EXPERIMENT = "realhf_experiment_"
"""Beginning of the names of the modules that experiment files are executed as."""
EnvironmentKey = NewType("EnvironmentKey", int)
"""The number of an environment among those of a process, by which its caller knows it."""


@dataclass(frozen=True)
class EnvironmentSource:
    """The place where a host process finds an Environment: an attribute of a Python file, or of a module.

    The attribute may be a path such as `experiment.environment`.
    """

    attribute: str = "experiment.environment"
    file: str | None = None
    module: str | None = None

    @staticmethod
    def of(make: Any) -> EnvironmentSource:
        """Return the source of a class or function that a module defines. Raises UserError."""
        module = getattr(make, "__module__", None)
        name = getattr(make, "__qualname__", None)
        if module is None or name is None or "<" in name:
            raise UserError(f"{shown(make)} must be a class or a function that a module has by name")
        if module == "__main__":
            return EnvironmentSource(name, file=str(sys.modules["__main__"].__file__))
        return EnvironmentSource(name, module=module)


def source_of(environment: Environment) -> EnvironmentSource:
    """Return where worker processes find an environment. Raises UserError if they cannot."""
    make = environment.make
    module_name = getattr(make, "__module__", None) or ""
    name = getattr(make, "__qualname__", "<")
    files = {n: m for n, m in list(sys.modules.items()) if n == "__main__" or n.startswith(_EXPERIMENT)}
    if make is not None and "<" not in name and module_name not in files:
        return EnvironmentSource.of(make)
    if "<" not in name and getattr(files[module_name], name.partition(".")[0], None) is not None:
        return EnvironmentSource(name, file=files[module_name].__file__)
    own = {tool.__module__: sys.modules[tool.__module__] for tool in environment.tools}
    for name, module in (files | own).items():
        if (attribute := _attribute_of(environment, module)) is not None:
            if name in files:
                return EnvironmentSource(attribute, file=module.__file__)
            return EnvironmentSource(attribute, module=name)
    raise UserError(
        "worker processes must find environment in the experiment's file: give a class of a module, or let "
        "the file have it as `experiment.environment` or as a variable of its own")


def _attribute_of(environment: Environment, module: ModuleType) -> str | None:
    """Return the path of the attribute under which a module has an environment, or its tools alone."""
    for name, value in list(vars(module).items()):
        for path, found in ((name, value), (f"{name}.environment", getattr(value, "environment", None))):
            if isinstance(found, Environment) and (found.make, found.tools) == (
                environment.make, environment.tools):
                return path
        tools = getattr(value, "tools", None)
        if environment.tools and isinstance(tools, list | tuple) and tuple(tools) == environment.tools:
            return f"{name}.tools"
    return None


@dataclass(frozen=True)
class Reply:
    """The outcome of an environment's last call.

    `start` and `turn` have what the environment has returned. `end` has the reason for which the rollout ends
    without its answer, and a sentence. `state` has what JSON can hold, or None if the class has no `state`.
    `closed` has the sentence of a `close` that has failed.
    """

    key: EnvironmentKey
    kind: Literal["start", "turn", "end", "state", "closed"]
    start: Start | None = None
    turn: Turn | None = None
    stop: StopReason | None = None
    sentence: str = ""
    seconds: float = 0.0  # How long the method took.
    state: Any = None


class EnvironmentWorkers:
    """The environments of the rollouts that this process generates, each with a key.

    An environment has at most one call at a time. After a turn that is done, and after an end, its object is
    closed by itself; its key may then be used anew. One thread uses this.
    """

    def __init__(
        self, environment: Environment, source: EnvironmentSource, *, prompt_key: str = "prompt"
    ) -> None:
        self._settings = {
            "source": {
                "attribute": source.attribute, "file": source.file and str(Path(source.file).resolve()),
                "module": source.module, "path": sys.path, "directory": os.getcwd()},
            "workers": environment.workers, "isolated": bool(environment.isolated), "prompt_key": prompt_key,
            "start_seconds": environment.start_seconds, "step_seconds": environment.step_seconds,
            "memory_bytes": int(environment.memory_gib * 2**30)}
        self._where = source.file or source.module
        self._number_of: dict[EnvironmentKey, int] = {}
        """Key -> number of the object, for those that go on. Each start has a number of its own."""
        self._key_of: dict[int, EnvironmentKey] = {}
        """Number of an object -> its key."""
        self._busy: set[EnvironmentKey] = set()
        """Environments whose call has no answer yet."""
        self._num_started = 0
        self._received = bytearray()
        self._begin()

    def start(self, key: EnvironmentKey, row: Mapping[str, Any], seed: int, *, state: Any = None) -> None:
        """Make an environment's object and call its `start`, and `restore` if a state is given."""
        assert key not in self._number_of, f"environment {key} has started"
        number = self._num_started
        self._num_started += 1
        self._number_of[key] = number
        self._key_of[number] = key
        self._busy.add(key)
        row = json_form(row, as_text=True)
        self._send({"do": "start", "id": number, "row": row, "seed": seed, "state": state})

    def step(self, key: EnvironmentKey, message: ChatMessage) -> None:
        """Call the `step` of an object. If it is lost meanwhile, its end is among the replies."""
        self._call(key, "step", message=message)

    def finish(self, key: EnvironmentKey, stop: StopReason) -> None:
        """Stop a rollout before it is done. The answer is a turn, whose rewards count for the last one."""
        self._call(key, "finish", stop=stop)

    def state(self, key: EnvironmentKey) -> None:
        """Ask for the state of an object."""
        self._call(key, "state")

    def close(self, key: EnvironmentKey) -> None:
        """End a rollout before its environment does. Nothing is answered."""
        if key in self._number_of:
            self._busy.discard(key)
            self._send({"do": "close", "id": self._number_of.pop(key)})

    def _call(self, key: EnvironmentKey, does: str, **arguments: Any) -> None:
        if key in self._number_of:
            assert key not in self._busy, f"environment {key} has not answered yet"
            self._busy.add(key)
            self._send({"do": does, "id": self._number_of[key], **arguments})

    def poll(self, timeout: float | None = 0.0) -> list[Reply]:
        """Return what has been answered; wait for it at most so long (None: for ever).

        Raises UserError if the user's file cannot be executed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._selector.select(left):
                return []
            assert self._process.stdout is not None
            data = os.read(self._process.stdout.fileno(), 1 << 20)
            if not data:
                return self._host_lost()
            self._received += data
            *lines, rest = self._received.split(b"\n")
            self._received = bytearray(rest)
            replies = [reply for line in lines if (reply := self._reply(json.loads(line))) is not None]
            if replies:
                return replies

    def shutdown(self) -> None:
        """End all environments and their processes."""
        self._selector.close()
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._number_of.clear()
        self._key_of.clear()
        self._busy.clear()

    def _begin(self) -> None:
        """Start the host process."""
        self._is_ready = False
        self._received.clear()
        self._process = start_process("realhf.environments.worker_host", "main", variables=_SMALL)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]
        self._send(self._settings)

    def _send(self, job: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `poll` finds out.
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def _host_lost(self) -> list[Reply]:
        """Begin again with a new host process, and end the rollouts of the one that is lost."""
        if not self._is_ready:
            self.shutdown()
            raise UserError(f"{self._where}: the process with the environments does not start")
        sentence = "the process that watches over the environments has ended"
        lost = [
            Reply(key, "end", stop="worker_lost", sentence=sentence) for key in sorted(self._number_of)]
        self.shutdown()
        self._begin()
        return lost

    def _reply(self, said: Mapping[str, Any]) -> Reply | None:
        event = said["event"]
        if event == "ready":
            self._is_ready = True
            return None
        if event == "refused":
            self.shutdown()
            raise UserError(f"{self._where}: {said['sentence']}")
        key = self._key_of[said["id"]]
        if event == "gone":
            del self._key_of[said["id"]]
            return None
        if event == "closed":
            return Reply(key, "closed", sentence=said["sentence"], seconds=said["seconds"])
        if self._number_of.get(key) != said["id"]:  # It was closed while it answered.
            return None
        self._busy.discard(key)
        seconds = said.get("seconds", 0.0)
        if event in _STOPS or said["ends"]:
            del self._number_of[key]
        if event in _STOPS:
            return Reply(key, "end", stop=_STOPS[event], sentence=said["sentence"], seconds=seconds)
        if event == "start":
            return Reply(key, "start", start=Start(**said["made"]), seconds=seconds)
        if event == "state":
            return Reply(key, "state", seconds=seconds, **said["made"])
        return Reply(key, "turn", turn=Turn(**said["made"]), seconds=seconds)
