"""Processes that start at once, forked from one that has imported what they need; and the pool, four of them
that serve the whole test session."""

import contextlib
import faulthandler
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

SIZE = 4
_START_SECONDS = 60.0
_GRACE_SECONDS = 0.5
"""After a first failure, how long the other ranks may still report theirs."""
PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # For the first backward pass.
    "realhf.cli.worker",
    "realhf.cli.overrides",
    "realhf.runtime.records.pictures",
    "transformers.models.auto.tokenization_auto",
    "matplotlib.figure",
    "tensorboard.summary.writer.record_writer",
    "pytest",
    "tests.kills",
]
"""What most tests of processes import, imported once for all of them."""
MARK = "REALHF_TEST_COMMAND"
"""Environment variable by which tests find the processes of a command. What fork servers get as its value has
the length of those of commands, which are written over it."""


class ForkServer:
    """A process from which others are forked, which has imported `preload`; it starts on first use."""

    def __init__(self, preload: Sequence[str] = PRELOAD) -> None:
        self._server = multiprocessing.forkserver.ForkServer()
        self._server.set_forkserver_preload(list(preload))

    def start(self, function: Callable[..., Any], *args: Any, daemon: bool = True) -> Any:
        """Start a process that calls the function, and return it as multiprocessing describes it."""
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_begin, args=(function, *args), daemon=daemon)
        variables = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", MARK: "0" * 32}
        with contextlib.chdir(Path(__file__).parent.parent), patch.dict(os.environ, variables):
            self._server.ensure_running()
        connect = self._server.connect_to_new_process
        with patch("multiprocessing.forkserver.connect_to_new_process", connect):
            process.start()
        return process


def _begin(function: Callable[..., Any], *args: Any) -> None:
    gc.freeze()  # What is imported stays: collections need not look at it.
    function(*args)


FORK_SERVER = ForkServer()


class Pool:
    """Runs functions `fn(world, *args)` of test modules on ranks 0 to num_ranks - 1 of one World of four.

    Workers start on first use and live on, groups included, until something goes wrong: then they are killed,
    as they may be out of step, and the next run gets new ones. Functions and arguments travel by pickle.
    """

    def __init__(self, server: ForkServer = FORK_SERVER) -> None:
        """Set up a pool whose workers are forked from this server."""
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._server = server

    def run(self, fn: Callable[..., Any], *args: Any, num_ranks: int = SIZE, timeout: float = 120) -> list:
        """The results by rank. An exception of a worker is raised here, its traceback attached as a note."""
        try:
            if not all(process.is_alive() for process in self._processes):
                self.stop()
            if not self._processes:
                self._start()
            job = pickle.dumps((fn, args))
            for pipe in self._pipes[:num_ranks]:
                pipe.send_bytes(job)
            return self._collect(num_ranks, timeout)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(SIZE):
            ours, theirs = multiprocessing.Pipe()
            self._processes.append(self._server.start(_serve, theirs, rank, port))
            theirs.close()
            self._pipes.append(ours)
        self._collect(SIZE, _START_SECONDS)

    def _collect(self, num_ranks: int, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:num_ranks])}
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                succeeded, value = self._receive(pipe, rank)
                (results if succeeded else errors)[rank] = value
                if not succeeded and len(errors) == 1:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        if errors:  # a broken connection is the echo of what happened elsewhere
            raise min(errors.values(), key=lambda error: type(error).__name__ == "PeerError")
        if waiting:
            silent = sorted(waiting.values())
            for rank in silent:
                os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(_GRACE_SECONDS)
            raise TimeoutError(f"ranks {silent} silent for {timeout} s; see stacks on standard error")
        return [results[rank] for rank in range(num_ranks)]

    def _receive(self, pipe: Connection, rank: int) -> tuple[bool, Any]:
        try:
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            self._processes[rank].join(1)
            return False, RuntimeError(f"rank {rank} died with exit code {self._processes[rank].exitcode}")


def _serve(pipe: Connection, rank: int, port: int) -> None:
    """The life of one worker: join the world, then one job after the other until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.register(signal.SIGUSR1)
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(SIZE)})
    world: Any = None
    try:
        job = b""
        while True:
            try:
                if world is None:
                    world, result = _join(rank), None
                else:
                    result = _execute(world, job)
                answer = pickle.dumps((True, result))
            except BaseException as error:
                answer = pickle.dumps((False, _portable(error, rank)))
            pipe.send_bytes(answer)
            job = pipe.recv_bytes()
    except (EOFError, ConnectionError):  # the session has ended
        os._exit(0)


def _join(rank: int) -> Any:
    import torch  # inside, so that a session without workers does not pay for it

    from realhf.distributed.world import World, open_store, own_device

    torch.set_num_threads(1)
    store = open_store(rank=rank, size=SIZE, timeout_seconds=60)
    return World(rank=rank, size=SIZE, device=own_device(rank), store=store, timeout_seconds=60)


def _execute(world: Any, job: bytes) -> Any:
    import torch

    fn, args = pickle.loads(job)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    return fn(world, *args)


def _portable(error: BaseException, rank: int) -> BaseException:
    """The exception as it can travel, with rank and traceback as a note."""
    note = f"on rank {rank}:\n{''.join(traceback.format_exception(error))}"
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(note)
    return error
