"""Entry point of `python -m realhf` and of the `realhf` command."""

import faulthandler
import importlib
import os
import sys


def main() -> int:
    """Run the command line and return its exit code, also if Ctrl-C comes while modules are loaded."""
    faulthandler.enable()  # A crash in native code shows the Python lines that led to it.
    try:
        return importlib.import_module("realhf.cli.main").main()
    except KeyboardInterrupt as error:
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # Under torchrun the launcher prints it.
            print(f"realhf: {str(error) or 'ended by SIGINT'}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
