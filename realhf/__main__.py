"""`python -m realhf` and the `realhf` command."""

import importlib
import os
import sys


def main() -> int:
    """Run the command line. Return its exit code, also when Ctrl-C comes while modules are loaded."""
    try:
        return importlib.import_module("realhf.cli.main").main()
    except KeyboardInterrupt:
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # Else the launcher says so.
            print("realhf: ended by SIGINT", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
