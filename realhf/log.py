"""Logging: one line per message on standard error, with the rank where there is more than one."""

import logging
import os
import sys


def setup_logging() -> None:
    where = f" rank {os.environ['RANK']}" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s{where} %(name)s: %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("realhf")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
