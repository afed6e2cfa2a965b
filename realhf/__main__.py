"""`python -m realhf` and the `realhf` command."""

import sys

from realhf.cli import main

if __name__ == "__main__":
    sys.exit(main())
