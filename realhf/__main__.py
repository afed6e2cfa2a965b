"""Entry point of `python -m realhf` and of the `realhf` command."""

import faulthandler
import importlib
import os
import signal
import sys
from collections.abc import MutableMapping

from realhf.signals import signals_end_the_process

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
    if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun has the signal, too, and says so.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        return _run()
    with signals_end_the_process(signal.SIGINT, signal.SIGTERM):
        return _run()


def _run() -> int:
    faulthandler.enable()  # A crash in native code shows the Python lines that led to it.
    set_allocator(os.environ)
    return importlib.import_module("realhf.cli.main").main()


if __name__ == "__main__":
    sys.exit(main())
