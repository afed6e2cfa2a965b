"""A worker: a forked process with objects of users' classes, which takes jobs and returns their answers.

Jobs and answers are lines of JSON in a socket whose other end the host process has (see `worker_host`).
Objects with `async` methods share an event loop; each of the others has a thread of its own, in which it is
made, too. An isolated object has the main thread, as some libraries need it.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import errno
import inspect
import json
import os
import queue
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from numpy import random as numpy_random

from realhf.data.memory_rows import json_form
from realhf.environments.protocol import MAX_REPLY_BYTES, Turn, checked_start, checked_turn
from realhf.environments.tool_calls import schema_of
from realhf.errors import UserError, described, one_line
from realhf.job_process import limit_memory
from realhf.user_input.units import format_bytes

WorkerJob = dict[str, Any]
"""`do` (start, step, finish, state, close or abandon), `id` of the rollout, and what the method gets."""


_RESERVE_BYTES = 1 << 22
"""Memory that is set free when there is no more, to say so."""


class _Abandoned(BaseException):
    """Raised within a method that takes too long."""


class Worker:
    """The objects of a process, by the rollouts that they belong to."""

    def __init__(
        self, connection: socket.socket, make: Callable[[], Any], *, isolated: bool, memory_bytes: int,
        prompt_key: str,
    ) -> None:
        self.make = make
        self.isolated = isolated
        self.memory_bytes = memory_bytes
        self.prompt_key = prompt_key
        self._connection = connection
        self._lock = threading.Lock()
        self._objects: dict[int, _Object] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._reserve: bytearray | None = None

    def serve(self) -> None:
        """Take jobs until the socket is closed."""
        limit_memory(self.memory_bytes)
        self._reserve = bytearray(_RESERVE_BYTES)
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        with self._connection.makefile("rb") as lines:
            for line in lines:
                job = json.loads(line)
                sample = job["id"]
                if job["do"] == "abandon":
                    if (found := self._objects.pop(sample, None)) is not None:
                        found.abandon()
                    continue
                if job["do"] == "start":
                    self._objects[sample] = _Object(self, sample)
                self._objects[sample].take(job)

    def forget(self, sample: int) -> None:
        self._objects.pop(sample, None)

    def free_reserve(self) -> None:
        """Make room for what is to be said about the lack of memory."""
        self._reserve = None

    def send(self, sample: int, event: str, **more: Any) -> None:
        """Send a line to the host."""
        line = json.dumps({"id": sample, "event": event, **more}, allow_nan=False).encode() + b"\n"
        with self._lock:
            self._connection.sendall(line)

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop, which runs in a thread from its first use on."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="async", daemon=True).start()
            return self._loop


class _UnusableClass(UserError):
    """A fault of a user's class, with which no rollout can succeed: it ends the run."""


class _Object:
    """An object of a user's class, made with the first job."""

    def __init__(self, worker: Worker, sample: int) -> None:
        self._worker = worker
        self._sample = sample
        self._environment: Any = None
        self._row: dict[str, Any] = {}
        self._name = getattr(worker.make, "__name__", type(worker.make).__name__)
        self._is_async = False
        self._is_abandoned = False
        self._in_loop = False
        """Whether the method that runs is a task of the event loop."""
        self._task: asyncio.Future[None] | None = None
        self._jobs: queue.SimpleQueue[WorkerJob | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"sample {sample}", daemon=True)
        if not worker.isolated:
            self._thread.start()

    def take(self, job: WorkerJob) -> None:
        """Do a job in the object's thread, or in the event loop if its step is `async`."""
        if self._worker.isolated:
            self._do(job)
        elif self._is_async:
            self._worker.loop().call_soon_threadsafe(self._do, job)
        else:
            self._jobs.put(job)

    def abandon(self) -> None:
        """Interrupt the method that runs. Tell the host that this process lives, and when that is over.

        The host ends the whole process of an isolated object instead.
        """
        self._is_abandoned = True
        self._jobs.put(None)
        if self._in_loop:
            self._worker.loop().call_soon_threadsafe(self._cancel)
            return
        self._worker.send(self._sample, "alive")
        thread = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_Abandoned))

    def _cancel(self) -> None:
        self._worker.send(self._sample, "alive")
        assert self._task is not None
        self._task.add_done_callback(lambda _: self._worker.send(self._sample, "freed"))
        self._task.cancel()

    def _work(self) -> None:
        """Do jobs in this thread until the object is closed, or its methods turn out to be `async`."""
        try:
            while not self._is_async and (job := self._jobs.get()) is not None:
                self._do(job)
        except _Abandoned:
            pass
        except BaseException:  # Nothing could be said, such as for lack of memory: the host sees the end.
            traceback.print_exc()
            os._exit(1)
        finally:
            if self._is_abandoned and not self._in_loop:
                self._worker.send(self._sample, "freed")

    def _do(self, job: WorkerJob) -> None:
        started = time.perf_counter()
        try:
            answer = self._call(job)
        except BaseException as error:
            if isinstance(error, _Abandoned):
                raise
            self._fail(job, error, started)
            return
        if not inspect.isawaitable(answer):
            self._in_loop = False
            self._answer(job, answer, started)
            return

        async def waits() -> None:
            try:
                value = await answer
            except asyncio.CancelledError:
                if not self._is_abandoned:
                    self._fail(job, RuntimeError("it was cancelled"), started)
                raise
            except BaseException as error:
                self._fail(job, error, started)
            else:
                self._answer(job, value, started)

        def begin() -> None:
            self._task = asyncio.ensure_future(waits())

        self._in_loop = True
        self._worker.loop().call_soon_threadsafe(begin)

    def _call(self, job: WorkerJob) -> Any:
        if job["do"] == "start":
            self._row = job["row"]
            if self._worker.isolated:
                _seed_everything(job["seed"])
            self._environment = self._worker.make()
            self._name = type(self._environment).__name__
            if not callable(getattr(self._environment, "step", None)):
                is_trls = callable(getattr(self._environment, "reset", None))
                mend = ": wrap a class of TRL's form, Environment(partial(TRLEnvironment, C))" * is_trls
                raise _UnusableClass(
                    f"{self._name} has no method step(message), which an environment must have{mend}")
            self._is_async = inspect.iscoroutinefunction(self._environment.step)
            if not callable(getattr(self._environment, "start", None)):
                return None
            started = self._environment.start(self._row, job["seed"])
            return started if job["state"] is None else self._restored(started, job["state"])
        arguments = {"step": "message", "finish": "stop"}
        method = getattr(self._environment, job["do"], None)
        if not callable(method):  # Users may have data of this name.
            return Turn(done=True) if job["do"] == "finish" else None
        return method(*(job[name] for do, name in arguments.items() if do == job["do"]))

    def _restored(self, started: Any, state: Any) -> Any:
        """Let the object go on from a state after its start."""
        if not callable(getattr(self._environment, "restore", None)):
            raise UserError(f"{self._name} has state() but no restore(state): give it both or none")
        if not inspect.isawaitable(started):
            restored = self._environment.restore(state)
            return _then(restored, started) if inspect.isawaitable(restored) else started

        async def both() -> Any:
            value = await started
            restored = self._environment.restore(state)
            if inspect.isawaitable(restored):
                await restored
            return value

        return both()

    def _answer(self, job: WorkerJob, value: Any, started: float) -> None:
        """Send what a method has returned, if it is legal."""
        seconds = time.perf_counter() - started
        where = f"{self._name}.{job['do']}"
        try:
            if job["do"] == "close":
                self._end(seconds)
                return
            if job["do"] == "start":
                start = checked_start(value, self._row, where, prompt_key=self._worker.prompt_key)
                tools = [_schema(tool, where) for tool in start.tools]
                made = {"messages": json_form(start.messages), "tools": json_form(tools)}
            elif job["do"] == "state":
                made = {"state": json_form(value)}
            else:
                if job["do"] == "finish":
                    value = dataclasses.replace(value, done=True) if isinstance(value, Turn) else value
                made = dataclasses.asdict(checked_turn(value, where))
            length = len(json.dumps(made, allow_nan=False))
            if length > MAX_REPLY_BYTES:
                raise UserError(
                    f"{where} returned {format_bytes(length)} of JSON: it must be at most "
                    f"{format_bytes(MAX_REPLY_BYTES)}")
        except Exception as error:
            self._fail(job, error, started)
            return
        if not self._is_abandoned:
            self._worker.send(
                self._sample, job["do"], made=made, seconds=seconds, ends=bool(made.get("done")))

    def _fail(self, job: WorkerJob, error: BaseException, started: float) -> None:
        """Send why a method has failed."""
        seconds = time.perf_counter() - started
        no_memory = isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM
        if no_memory:
            self._worker.free_reserve()
        if self._is_abandoned:
            return
        if isinstance(error, UserError):
            sentence = str(error)
        else:
            sentence = f"{self._name}.{job['do']} raised {described(error)}"
        if no_memory:
            most = format_bytes(self._worker.memory_bytes)
            sentence += f"; a worker may have {most} of memory (environment.memory_gib)"
        sentence = one_line(sentence)
        if job["do"] == "close":
            self._end(seconds, sentence)
        else:
            event = "refused" if isinstance(error, _UnusableClass) else "failed"
            self._worker.send(
                self._sample, event, sentence=sentence, seconds=seconds, no_memory=no_memory, ends=True)

    def _end(self, seconds: float, sentence: str = "") -> None:
        self._worker.forget(self._sample)
        self._jobs.put(None)
        self._worker.send(self._sample, "closed", sentence=sentence, seconds=seconds)


def _schema(tool: Any, where: str) -> dict[str, Any]:
    try:
        return schema_of(tool)
    except UserError as error:
        raise _UnusableClass(f"{where} returned Start.tools with one that has no schema: {error}") from error


async def _then(first: Awaitable[Any], value: Any) -> Any:
    await first
    return value


def _seed_everything(seed: int) -> None:
    """Seed the random numbers that are global to the process."""
    random.seed(seed)
    numpy_random.seed(seed)
