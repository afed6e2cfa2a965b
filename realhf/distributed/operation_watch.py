"""Finds out when the ranks of a run execute different operations of a step program."""

import json
import threading
from dataclasses import dataclass

import torch.distributed as dist

_MAX_TEXT = 400
"""Most characters of an operation's text that are kept."""


class OperationLog:
    """The operations of this rank since they were last taken; the main thread adds, another thread takes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: list[tuple[int, str, str]] = []
        self._is_used = False

    def add(self, number: int, text: str, digest: str) -> None:
        """Add an operation, with the digest of all operations so far."""
        self._is_used = True
        with self._lock:
            self._new.append((number, text[:_MAX_TEXT], digest[:16]))

    @property
    def is_used(self) -> bool:
        """Whether this rank has ever added an operation."""
        return self._is_used

    def take(self) -> list[tuple[int, str, str]]:
        """Return the operations since the last call."""
        with self._lock:
            new = self._new
            self._new = []
        return new


@dataclass(frozen=True)
class _Operation:
    rank: int
    text: str
    digest: str


class OperationWatch:
    """Compares the operations of all ranks, on rank 0; the other ranks post theirs to it."""

    def __init__(self, store: dist.Store, log: OperationLog, *, rank: int, size: int) -> None:
        self._store = dist.PrefixStore("realhf/operations", store)
        self._log = log
        self._rank = rank
        self._num_posted = 0
        self._num_read = dict.fromkeys(range(1, size), 0)
        self._reached = dict.fromkeys(range(size), 0)
        self._known: dict[int, _Operation] = {}

    def exchange(self) -> str:
        """Post or compare what is new; return how two ranks differ, or an empty string.

        Only rank 0 finds differences.
        """
        new = self._log.take()
        if self._rank != 0:
            if new:
                self._num_posted += 1
                self._store.set(f"{self._rank}/{self._num_posted}", json.dumps(new))
            return ""
        fault = self._compare(0, new)
        for rank in self._num_read:
            key = f"{rank}/{self._num_read[rank] + 1}"
            while not fault and self._store.check([key]):
                fault = self._compare(rank, json.loads(self._store.get(key)))
                self._store.delete_key(key)
                self._num_read[rank] += 1
                key = f"{rank}/{self._num_read[rank] + 1}"
        passed = min(self._reached.values())
        self._known = {number: operation for number, operation in self._known.items() if number > passed}
        return fault

    def _compare(self, rank: int, operations: list[tuple[int, str, str]]) -> str:
        for number, text, digest in operations:
            other = self._known.setdefault(number, _Operation(rank, text, digest))
            if other.digest != digest:
                ways = sorted([(rank, text), (other.rank, other.text)])
                does = [f"rank {rank} does `{text}`" for rank, text in ways]
                which = f"operation {number}: {' and '.join(does)}"
                return f"step() differs between ranks in {which}; it may depend on agreed values only"
            self._reached[rank] = number
        return ""
