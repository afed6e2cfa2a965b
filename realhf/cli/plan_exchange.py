"""Sends the plan that rank 0 makes to all ranks of a run, over the store of torchrun's environment."""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from realhf.cli.worker import Place, repeat_later, report
from realhf.distributed.failures import FailureBoard
from realhf.distributed.world import open_store
from realhf.plan import ExecutionPlan

_KEY = "plan"
_QUIET_SECONDS = 5.0
"""Seconds after which one rank on each other host prints that it waits for the plan."""
_LEAST_SECONDS = 120.0
"""Shortest time that ranks wait besides the search: rank 0 may read models and data slowly."""


def share_plan(
    make: Callable[[], ExecutionPlan], *, search_seconds: float, timeout_seconds: float
) -> ExecutionPlan:
    """Return the plan that `make` makes on rank 0. Every rank must call this, once in a run.

    If rank 0 fails, or its plan does not come in time, the other ranks print why and end.
    """
    place = Place.from_environment()
    try:
        store = _connect(place.rank, place.size, timeout_seconds)
        if place.rank == 0:
            plan = make()
            store.set(_KEY, json.dumps(plan.to_dict()))
            return plan
        board = place.connect(timeout_seconds)
        limit = search_seconds + max(timeout_seconds, _LEAST_SECONDS)
        _wait(store, board, search_seconds=search_seconds, limit=limit)
        return ExecutionPlan.from_dict(json.loads(store.get(_KEY)))
    except dist.DistError as error:
        reason = str(error).partition("\n")[0]
        _end(f"rank {place.rank} has lost rank 0, which was making the plan ({reason})")


@functools.cache
def _connect(rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Return the store, which may be served by this process; the cache keeps it open for the other ranks."""
    store = open_store(rank=rank, size=size, timeout_seconds=timeout_seconds)
    return dist.PrefixStore("realhf/plan", store)


def _wait(store: dist.Store, board: FailureBoard, *, search_seconds: float, limit: float) -> None:
    """Wait for the plan, or end this process if rank 0 has failed or takes too long."""
    began = time.monotonic()
    speaks = os.environ["LOCAL_RANK"] == "0"
    rank = os.environ["RANK"]
    while not store.check([_KEY]):
        waited = time.monotonic() - began
        if failures := board.failures():
            if repeat_later(board) is None:  # The store has ended with rank 0.
                print(f"realhf: {failures[0].sentence}", file=sys.stderr, flush=True)
            sys.exit(failures[0].code)
        if waited > limit:
            _end(f"rank {rank} has waited {limit:.0f} s for the plan, and rank 0 has not sent it")
        if speaks and waited > _QUIET_SECONDS:
            speaks = False
            print(
                f"realhf: rank {rank} waits for the plan, "
                f"for which rank 0 searches at most {search_seconds:.0f} s", file=sys.stderr, flush=True)
        time.sleep(min(1.0, 0.05 + waited / 10))


def _end(sentence: str) -> NoReturn:
    """Tell all ranks why this one stops, and end it."""
    report(sentence, code=1, names_rank=True)
    sys.exit(1)
