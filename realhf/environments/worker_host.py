"""The host of environments: a small process without torch that forks workers, and watches over them.

It executes the user's file once, so that workers begin in milliseconds and share its memory. Apart from that
it runs no code of users: it passes jobs on to workers and answers back, ends what takes too long, and
replaces what is lost. It ends when its standard input does.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from realhf.environments.protocol import MAX_REPLY_BYTES, Environment
from realhf.environments.tool_calls import ToolEnvironment, schema_of
from realhf.environments.worker import Worker
from realhf.errors import UserError, described, one_line
from realhf.signals import end_with_parent
from realhf.user_input.files import execute_file

_TAIL_BYTES = 2048
"""How much of what a worker prints is kept."""
_LOOK_SECONDS = 5.0
"""Time in which a worker must show that it lives, and let go what it was told to abandon."""


@dataclass
class _Sample:
    """A sample whose object is in a worker, or will be."""

    worker: _WorkerProcess
    does: str = ""
    deadline: float = 0.0
    """When the method that runs (`does`) has taken too long."""


@dataclass(eq=False)
class _WorkerProcess:
    """A forked process, and what has not been sent to it or read from it yet."""

    pid: int
    connection: socket.socket
    output: int
    samples: set[int] = field(default_factory=set)
    to_send: bytearray = field(default_factory=bytearray)
    received: bytearray = field(default_factory=bytearray)
    tail: bytes = b""
    silent: dict[int, float] = field(default_factory=dict)
    """Abandoned samples after which it has shown no life yet, with the time at which it is killed."""
    stuck: set[int] = field(default_factory=set)
    """Abandoned samples whose methods still run."""
    is_retired: bool = False
    """Whether it gets no new samples, and ends with its last one."""


class Host:
    """Passes jobs to workers and answers back, in one thread that never waits for either."""

    def __init__(self, settings: dict[str, Any], make: Callable[[], Any], *, jobs: int, replies: int) -> None:
        self._settings = settings
        self._make = make
        self._jobs = jobs
        self._replies = replies
        self._received = bytearray()
        self._to_send = bytearray()
        self._workers: list[_WorkerProcess] = []
        self._samples: dict[int, _Sample] = {}
        self._waiting: deque[dict[str, Any]] = deque()
        """Starts that wait for a free process."""
        self._selector = selectors.DefaultSelector()
        os.set_blocking(jobs, False)
        os.set_blocking(replies, False)
        self._selector.register(jobs, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Serve until the run ends."""
        self._say({"event": "ready"})
        while True:
            self._flush()
            for key, events in self._selector.select(self._seconds_left()):
                if key.fd == self._jobs:
                    if not self._read_jobs():
                        self._end_all()
                        return
                elif key.data is not None:
                    self._serve(key, events)
            self._look_at_the_clock()

    # Jobs of the run

    def _read_jobs(self) -> bool:
        """Take jobs; return whether more may come."""
        data = os.read(self._jobs, 1 << 16)
        self._received += data
        *lines, rest = self._received.split(b"\n")
        self._received = bytearray(rest)
        for line in lines:
            self._take(json.loads(line))
        return bool(data)

    def _take(self, job: dict[str, Any]) -> None:
        sample = self._samples.get(job["id"])
        if job["do"] == "start":
            self._waiting.append(job)
            self._start_waiting()
        elif job["do"] == "close" and sample is None:  # It has ended, or has not begun.
            self._waiting = deque(other for other in self._waiting if other["id"] != job["id"])
            self._say({"id": job["id"], "event": "gone"})
        elif sample is not None and sample.does != "close":
            if job["do"] == "close" and sample.does:
                self._abandon(job["id"])
            else:
                self._give(sample, job)

    def _start_waiting(self) -> None:
        while self._waiting and (worker := self._free_worker()) is not None:
            job = self._waiting.popleft()
            worker.samples.add(job["id"])
            self._samples[job["id"]] = sample = _Sample(worker)
            self._give(sample, job)

    def _free_worker(self) -> _WorkerProcess | None:
        """Return the worker that gets the next sample; None: it must wait."""
        most = self._settings["workers"]
        if self._settings["isolated"]:
            return self._fork() if most is None or len(self._workers) < most else None
        usable = [worker for worker in self._workers if not worker.is_retired and not worker.stuck]
        idle = min(usable, key=lambda worker: len(worker.samples), default=None)
        if idle is not None and (not idle.samples or len(usable) >= (most or 2)):
            return idle
        return self._fork()

    def _give(self, sample: _Sample, job: dict[str, Any]) -> None:
        """Send a job to a worker; its time begins now."""
        sample.does = job["do"]
        limit = self._settings["start_seconds" if job["do"] == "start" else "step_seconds"]
        sample.deadline = time.monotonic() + limit
        self._send(sample.worker, job)

    # Workers

    def _fork(self) -> _WorkerProcess:
        ours, theirs = socket.socketpair()
        output, their_output = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                os.close(output)
                self._be_worker(theirs, their_output)
            finally:
                os._exit(1)
        theirs.close()
        os.close(their_output)
        ours.setblocking(False)
        os.set_blocking(output, False)
        worker = _WorkerProcess(pid, ours, output)
        self._workers.append(worker)
        self._selector.register(ours, selectors.EVENT_READ, worker)
        self._selector.register(output, selectors.EVENT_READ, worker)
        return worker

    def _be_worker(self, connection: socket.socket, output: int) -> None:
        """Serve as a worker, in a process that has just been forked."""
        end_with_parent()
        os.dup2(output, 1)
        os.dup2(output, 2)
        for worker in self._workers:
            worker.connection.close()
            os.close(worker.output)
        for descriptor in (self._jobs, self._replies, output):
            os.close(descriptor)
        self._selector.close()
        settings = self._settings
        Worker(
            connection, self._make, isolated=settings["isolated"], memory_bytes=settings["memory_bytes"],
            prompt_key=settings["prompt_key"]).serve()
        os._exit(0)

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        """Read what a worker has sent or printed, and send it what waits."""
        worker: _WorkerProcess = key.data
        if worker not in self._workers:  # It has just been lost.
            return
        if key.fd == worker.output:
            data = _read(worker.output)
            worker.tail = (worker.tail + (data or b""))[-_TAIL_BYTES:]
            if data == b"":
                self._selector.unregister(worker.output)
            return
        if events & selectors.EVENT_WRITE:
            self._send(worker)
        if events & selectors.EVENT_READ:
            data = _read(worker.connection.fileno())
            if data is None:
                return
            worker.received += data
            *lines, rest = worker.received.split(b"\n")
            worker.received = bytearray(rest)
            for line in lines:
                self._hear(worker, json.loads(line))
            if not data or len(rest) > 2 * MAX_REPLY_BYTES:
                self._lose(worker)

    def _send(self, worker: _WorkerProcess, job: dict[str, Any] | None = None) -> None:
        if job is not None:
            worker.to_send += json.dumps(job).encode() + b"\n"
        with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            while worker.to_send:
                del worker.to_send[: worker.connection.send(worker.to_send)]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.to_send else 0)
        self._selector.modify(worker.connection, events, worker)

    def _hear(self, worker: _WorkerProcess, said: dict[str, Any]) -> None:
        """Take a worker's answer."""
        number = said["id"]
        if said["event"] in ("alive", "freed"):
            worker.silent.pop(number, None)
            if said["event"] == "freed":
                worker.stuck.discard(number)
                self._retire_if_empty(worker)
            return
        sample = self._samples.get(number)
        if sample is None:  # It has been abandoned.
            return
        sample.does = ""
        if said["event"] == "closed":
            if said["sentence"]:
                self._say(said)
            self._forget(number)
            self._retire_if_empty(worker)
            return
        worker.is_retired |= bool(said.pop("no_memory", False))
        self._say(said)
        if said["ends"]:
            self._give(sample, {"do": "close", "id": number})

    def _abandon(self, number: int) -> None:
        """Forget a sample whose method still runs, and let its worker interrupt this."""
        worker = self._samples[number].worker
        self._forget(number)
        if self._settings["isolated"]:
            os.kill(worker.pid, signal.SIGKILL)
            return
        worker.silent[number] = time.monotonic() + _LOOK_SECONDS
        worker.stuck.add(number)
        self._send(worker, {"do": "abandon", "id": number})
        self._retire_if_empty(worker)

    def _forget(self, number: int) -> None:
        worker = self._samples.pop(number).worker
        worker.samples.discard(number)
        self._say({"id": number, "event": "gone"})
        if self._settings["isolated"]:
            worker.is_retired = True

    def _retire_if_empty(self, worker: _WorkerProcess) -> None:
        """End a worker that gets no new samples, or in which methods are stuck, when it has none."""
        if (worker.is_retired or worker.stuck) and not worker.samples:
            os.kill(worker.pid, signal.SIGKILL)

    def _lose(self, worker: _WorkerProcess) -> None:
        """Take leave of a worker that has ended, and say so for each of its samples."""
        self._workers.remove(worker)
        self._selector.unregister(worker.connection)
        worker.connection.close()
        while data := _read(worker.output):
            worker.tail = (worker.tail + data)[-_TAIL_BYTES:]
        with suppress(KeyError):
            self._selector.unregister(worker.output)
        os.close(worker.output)
        with suppress(ProcessLookupError):
            os.kill(worker.pid, signal.SIGKILL)
        how = _how_ended(os.waitpid(worker.pid, 0)[1], memory_bytes=self._settings["memory_bytes"])
        tail = worker.tail.decode("utf-8", "replace").strip()
        printed = f"; it has printed last: {tail[-400:]}" if tail else ""
        for number in sorted(worker.samples):
            sample = self._samples.pop(number)
            if sample.does != "close":
                self._say({"id": number, "event": "lost", "sentence": one_line(
                    f"the worker with the environment {how}{printed}")})
            self._say({"id": number, "event": "gone"})
        self._start_waiting()

    # Time

    def _seconds_left(self) -> float | None:
        times = [sample.deadline for sample in self._samples.values() if sample.does]
        times += [time for worker in self._workers for time in worker.silent.values()]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _look_at_the_clock(self) -> None:
        now = time.monotonic()
        late = [(number, s) for number, s in self._samples.items() if s.does and s.deadline <= now]
        for number, sample in late:
            if sample.does != "close":
                name = "start_seconds" if sample.does == "start" else "step_seconds"
                self._say({"id": number, "event": "late", "sentence": (
                    f"the environment's {sample.does} has taken more than {self._settings[name]:g} s "
                    f"(environment.{name})"), "seconds": self._settings[name]})
            self._abandon(number)
        for worker in list(self._workers):
            if any(limit <= now for limit in worker.silent.values()):
                worker.silent.clear()
                os.kill(worker.pid, signal.SIGKILL)

    # The run

    def _say(self, said: dict[str, Any]) -> None:
        self._to_send += json.dumps(said).encode() + b"\n"

    def _flush(self) -> None:
        """Send answers to the run, as far as it reads them."""
        with suppress(BlockingIOError, BrokenPipeError):
            while self._to_send:
                del self._to_send[: os.write(self._replies, self._to_send[: 1 << 16])]
        waits = self._replies in self._selector.get_map()
        if self._to_send and not waits:
            self._selector.register(self._replies, selectors.EVENT_WRITE, None)
        elif waits and not self._to_send:
            self._selector.unregister(self._replies)

    def _end_all(self) -> None:
        for worker in self._workers:
            with suppress(ProcessLookupError):
                os.kill(worker.pid, signal.SIGKILL)


def _read(descriptor: int) -> bytes | None:
    """Return what can be read; None: nothing now, and no bytes: it has been closed."""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _how_ended(status: int, *, memory_bytes: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        more = ""
        if -code in (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT):
            more = f"; it may have {memory_bytes / 2**30:g} GiB of memory (environment.memory_gib)"
        return f"was ended by {signal.Signals(-code).name}{more}"
    return f"ended with code {code}"


def main() -> None:
    """Run a host, with jobs from standard input and answers to standard output."""
    jobs, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    line = bytearray()
    while not line.endswith(b"\n"):
        if not (byte := os.read(jobs, 1)):
            return
        line += byte
    settings = json.loads(line)
    try:
        make = load(settings["source"])
    except BaseException as error:
        sentence = str(error) if isinstance(error, UserError) else described(error)
        os.write(replies, json.dumps({"event": "refused", "sentence": one_line(sentence)}).encode() + b"\n")
        return
    Host(settings, make, jobs=jobs, replies=replies).run()


def load(source: dict[str, Any]) -> Callable[[], Any]:
    """Return what makes environments: the user's class or function, or a ToolEnvironment of functions.

    The source is a file or a module, and the path of attributes in it to an Environment or to what makes one.
    """
    os.chdir(source["directory"])
    sys.path[:] = list(dict.fromkeys([*source["path"], *sys.path]))
    if source["file"] is not None:
        path = Path(source["file"])
        found: Any = execute_file(path, name=f"realhf_experiment_{path.stem}")
    else:
        found = importlib.import_module(source["module"])
    for name in source["attribute"].split("."):
        found = getattr(found, name)
    if isinstance(found, list | tuple):
        found = Environment(tools=tuple(found))
    make = found.make if isinstance(found, Environment) else found
    if isinstance(found, Environment) and found.tools:
        make = partial(ToolEnvironment, found.tools, [schema_of(tool) for tool in found.tools])
    prepare = getattr(getattr(make, "func", make), "prepare", None)
    if callable(prepare):
        prepare()
    if not callable(make):
        raise UserError(f"{source['attribute']} must be an Environment, a class or a function")
    return make
