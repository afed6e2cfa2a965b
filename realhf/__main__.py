"""Entry point of `python -m realhf` and of the `realhf` command."""

import faulthandler
import os
import signal
import sys
import traceback
from collections.abc import MutableMapping
from contextlib import nullcontext, suppress

from realhf.signals import (
    ENDING,
    end_by_signal,
    end_with_parent,
    end_without_teardown,
    signals_end_the_process,
)

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Let torch's CUDA allocator grow its segments, unless the user has set it up.

    Caches, logits and activations take turns, which would otherwise leave gaps that none of them fits into.
    torch reads the setting when it first allocates.
    """
    if not any(name in environment for name in _ALLOCATOR_SETTINGS):
        environment[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def main() -> int:
    """Run the command line and return its exit code. A signal ends it with a sentence, unless it trains."""
    for number in (signal.SIGINT, signal.SIGTERM):  # No exceptions while Python starts and ends.
        signal.signal(number, signal.SIG_DFL)
    is_worker = "TORCHELASTIC_RUN_ID" in os.environ  # torchrun has the signal, too, and prints a sentence.
    with nullcontext() if is_worker else signals_end_the_process(*ENDING):
        faulthandler.enable()  # A crash in native code shows the Python lines that led to it.
        set_allocator(os.environ)
        code = _run_apart() if sys.argv[1:2] == ["check"] else _run()
    if is_worker:
        end_without_teardown(code)
    return code


def _run() -> int:
    """Run the command line. What it imports takes a while, in which signals are handled already."""
    from realhf.errors import catch_exits

    catch_exits()  # Before modules that may exit.
    from realhf.cli.main import main as run_command

    return run_command()


def _run_apart() -> int:
    """Run the command in a process of its own, so that a sentence tells if the user's code kills it."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            end_with_parent()
            code = _run()
        except SystemExit as error:  # A help text has been printed.
            code = error.code if isinstance(error.code, int) else 0
        except BaseException:
            traceback.print_exc()
        with suppress(OSError):  # The reader of a pipe may have ended.
            sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code >= 0:
        return code
    if -code in ENDING:  # This process has it, too, or will have it.
        end_by_signal(signal.Signals(-code))
    why = "a reward or other code of the experiment has crashed, or memory has run out"
    print(f"realhf: check was ended by {signal.Signals(-code).name}: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
