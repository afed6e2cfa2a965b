"""Agreements: answers of host calls, which some ranks compute and all ranks of a step program may read."""

import json
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from realhf.distributed.group import peer_errors
from realhf.distributed.world import World

_ANY_TIME = timedelta(days=365)
_KEPT_STEPS = 8
"""Steps for which an answer stays: no rank is further behind (see Outbox and StepDecisions)."""


class Agreements:
    """Answers of host calls by operation, in the store that all ranks share. Posting one waits for nobody."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._store = world.unused_store("agreements") if world.size > 1 else None
        self._own: dict[str, Any] = {}
        self._posted: deque[list[str]] = deque([[]])

    def post(self, call: str, operation: int, answer: Any) -> None:
        """Post this rank's answer, a JSON value."""
        key = _key(call, operation, self._world.rank)
        self._own[key] = answer
        self._posted[-1].append(key)
        if self._store is not None:
            self._store.set(key, json.dumps(answer))

    def read(self, call: str, operation: int, ranks: Sequence[int]) -> list[Any]:
        """Return the answers of these ranks, in their order; wait until they are there."""
        return [self._read(_key(call, operation, rank), rank) for rank in ranks]

    def _read(self, key: str, rank: int) -> Any:
        if rank == self._world.rank:
            return self._own[key]
        assert self._store is not None, "a rank of another process needs a store"
        with self._world.activity.waiting([rank]), peer_errors():
            self._store.wait([key], _ANY_TIME)
            return json.loads(self._store.get(key))

    def next_step(self) -> None:
        """Delete this rank's oldest answers, which no rank will read any more."""
        self._posted.append([])
        if len(self._posted) > _KEPT_STEPS:
            for key in self._posted.popleft():
                del self._own[key]
                if self._store is not None:
                    self._store.delete_key(key)


def _key(call: str, operation: int, rank: int) -> str:
    return f"{operation}/{call}/{rank}"
