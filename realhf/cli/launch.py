"""Starts local workers through torch's elastic launcher.

The workers are forked from one process that has imported what they all need: they start sooner than programs
of their own, and share the memory of the libraries.
"""

import ctypes
import faulthandler
import logging
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import socket
import sys
import traceback
import uuid
from collections.abc import Sequence
from types import FrameType

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from realhf.cli.job import LOCAL_LAUNCHER, WORKER_NAME
from realhf.cli.main import main
from realhf.errors import UserError

PRELOAD = (
    "realhf.cli.worker",
    "realhf.cli.launch",
    "torch.fx.experimental.symbolic_shapes",  # The first backward pass imports it.
    "transformers.models.auto.tokenization_auto",
)
"""What all workers import. None of it may ask for devices: CUDA cannot be used in a fork of a process that
has initialized it."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PR_SET_NAME = 15  # From Linux's prctl.h.
_SAVING_SECONDS = 24 * 3600
"""Time that workers may take for their step and its checkpoint after a first signal; a second ends them."""


def launch(argv: Sequence[str], num_ranks: int, *, restarts: int = 0) -> int:
    """Run a command on `num_ranks` local workers, which start again up to `restarts` times if one fails.

    Return 0 if all succeed, 2 if a worker ended with 2 (wrong input of the user), else 1.
    """
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # Each logger has its own level.
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, run_id=uuid.uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=restarts, monitor_interval=0.1,
        shutdown_timeout=_SAVING_SECONDS, signals_to_handle="SIGINT,SIGHUP,SIGQUIT",
        start_method="forkserver")
    os.environ[LOCAL_LAUNCHER] = "1"
    _start_fork_server()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _require_loopback()
        elastic_launch(config, _work)(*argv)
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        causes = {rank: code for rank, code in codes.items() if code != -signal.SIGTERM} or codes
        for rank, code in causes.items():
            if code < 0:  # A signal ended the worker; the launcher itself ends the others by SIGTERM.
                ended = f"was ended by {signal.Signals(-code).name}; the run stops"
                if code == -signal.SIGKILL:
                    ended += " (killed from outside, or by the launcher as it did not stop with the others)"
                print(f"realhf: the worker of rank {rank} {ended}", file=sys.stderr)
            elif code not in (1, 2):  # Our own workers say why they end with these.
                ended = f"ended with exit code {code} and without a word: something has called os._exit"
                print(f"realhf: the worker of rank {rank} {ended}", file=sys.stderr)
        return 2 if 2 in codes.values() else 1
    except SignalException as error:
        name = "SIGTERM" if str(error) == "SIGTERM" else error.sigval.name  # See _interrupt.
        print(f"realhf: ended by {name}", file=sys.stderr)
        return 1
    return 0


def _start_fork_server() -> None:
    """Start the process from which workers are forked.

    It ignores signals that a terminal or a supervisor sends to all processes of a job: workers still need it
    while they save.
    """
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    multiprocessing.forkserver.ensure_running()
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _work(*argv: str) -> None:
    """Be a worker that executes `realhf` with these arguments, and end the process with its exit code."""
    os.setsid()  # Signals come from the launcher alone.
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"{WORKER_NAME}{os.environ['RANK']}".encode(), 0, 0, 0)
    faulthandler.enable()  # A crash in native code shows the Python lines that led to it.
    sys.argv = ["realhf", *argv]
    try:
        code = main()
    except KeyboardInterrupt:  # The launcher prints it.
        code = 1
    except Exception:  # The launcher would keep it to itself.
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    if code:
        sys.exit(code)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Pass SIGTERM on to the workers as SIGINT; the launcher uses SIGTERM for those that have lost a peer."""
    raise SignalException("SIGTERM", signal.SIGINT)


def _require_loopback() -> None:
    """Raise UserError unless a port can be opened on localhost, over which local workers connect."""
    try:
        with socket.create_server(("localhost", 0)) as server, socket.create_connection(server.getsockname()):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            f"local workers meet on a free TCP port of localhost, and none can be opened ({reason}): "
            "set up the loopback interface (ip link set lo up) or run one process (--nproc 1)") from error
