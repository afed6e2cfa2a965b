"""Entry point of `python -m realhf` and of the `realhf` command."""

import faulthandler
import importlib
import os
import sys
from collections.abc import MutableMapping

_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def set_allocator(environment: MutableMapping[str, str]) -> None:
    """Let torch's CUDA allocator grow its segments, unless the user has set it up.

    Caches, logits and activations take turns, which would otherwise leave gaps that none of them fits into.
    torch reads the setting when it first allocates.
    """
    if not any(name in environment for name in _ALLOCATOR_SETTINGS):
        environment[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


def main() -> int:
    """Run the command line and return its exit code, also if Ctrl-C comes while modules are loaded."""
    faulthandler.enable()  # A crash in native code shows the Python lines that led to it.
    set_allocator(os.environ)
    try:
        return importlib.import_module("realhf.cli.main").main()
    except KeyboardInterrupt as error:
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # Under torchrun the launcher prints it.
            print(f"realhf: {str(error) or 'ended by SIGINT'}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
