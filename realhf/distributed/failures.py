"""Tells all ranks of a run why one of them stops, and prints each reason once per host."""

import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from realhf.distributed.group import PeerError, name_ranks

_EQUALS_SECONDS = 1.0
"""The first rank with a sentence waits this long for others with the same one, to name them all."""
_PRINTING_SECONDS = 5.0
"""The others wait this long for it to print, because the launcher ends all workers as soon as one exits."""


@dataclass(frozen=True)
class Failure:
    """A rank's reason to stop; the earliest failure of a run has the lowest number.

    `host` is the number of the rank's host, `code` its exit code.
    """

    number: int
    rank: int
    host: int
    sentence: str
    code: int


class FailureBoard:
    """The failures of a run, kept in its store, where all ranks can read them.

    A failing rank posts its sentence before it exits. Ranks on one host that fail for the same reason print
    one sentence together; ranks on other hosts repeat it, so that every terminal shows the reason.
    """

    def __init__(self, store: dist.Store, *, rank: int, size: int, host: int) -> None:
        self._store = dist.PrefixStore("realhf/failures", store)
        self._rank = rank
        self._size = size
        self._host = host

    def roll_call(self, timeout_seconds: float) -> None:
        """Wait until every rank has called this. Raises PeerError if one has failed or is too late."""
        self._store.set(f"here/{self._rank}", "")
        if self._store.add("num_here", 1) == self._size:
            self._store.set("roll_call", "complete")
        try:
            self._store.wait(["roll_call"], timedelta(seconds=timeout_seconds))
        except RuntimeError as error:
            missing = [rank for rank in range(self._size) if not self._store.check([f"here/{rank}"])]
            who = name_ranks(missing)
            raise PeerError(f"{who} did not start within {timeout_seconds:g} s") from error
        if failures := self.failures():
            raise PeerError(f"rank {failures[0].rank} has failed: {failures[0].sentence}")

    def failures(self) -> list[Failure]:
        """Return the failures posted so far, the earliest first."""
        count = self._store.add("num_failures", 0)
        return [Failure(**json.loads(self._store.get(f"failure/{i}"))) for i in range(1, count + 1)]

    def report(self, sentence: str, *, code: int, text: str | None = None, names_rank: bool = False) -> None:
        """Post why this rank stops, and print it unless another rank of this host does.

        The printed sentence ends with the ranks that posted it, unless all ranks did or it `names_rank`
        already. `text`, such as a traceback, is printed in place of both. Returns when it has been printed.
        """
        write_error_file(sentence)
        number = self._store.add("num_failures", 1)
        failure = Failure(number, self._rank, self._host, sentence, code)
        self._store.set(f"failure/{number}", json.dumps(asdict(failure)))
        self._store.set("roll_call", "failure")
        equals = self._equals(sentence)
        first = min(failure.number for failure in equals if failure.host == self._host)
        if first != number:
            with suppress(RuntimeError):
                self._store.wait([f"printed/{first}"], timedelta(seconds=_PRINTING_SECONDS))
            return
        deadline = time.monotonic() + _EQUALS_SECONDS
        while len(equals) < self._size and time.monotonic() < deadline:
            time.sleep(0.05)
            equals = self._equals(sentence)
        ranks = sorted(failure.rank for failure in equals)
        where = "" if names_rank or len(ranks) == self._size else f" ({name_ranks(ranks)})"
        print(text or f"realhf: {sentence}{where}", file=sys.stderr, flush=True)
        self._store.set(f"printed/{number}", "")

    def repeat(self) -> int | None:
        """Print the failures of other hosts; return the exit code of the first failure, if there is any."""
        failures = self.failures()
        if failures:
            write_error_file(failures[0].sentence)
        printed = {failure.sentence for failure in failures if failure.host == self._host}
        for failure in failures:
            if failure.sentence in printed:
                continue
            printed.add(failure.sentence)
            if self._store.add(f"repeated/{failure.number}/{self._host}", 1) == 1:
                ranks = sorted(equal.rank for equal in self._equals(failure.sentence))
                where = f"{name_ranks(ranks)}, host {failure.host}"
                print(f"realhf: {failure.sentence} ({where})", file=sys.stderr, flush=True)
        return failures[0].code if failures else None

    def _equals(self, sentence: str) -> list[Failure]:
        return [failure for failure in self.failures() if failure.sentence == sentence]


def write_error_file(sentence: str) -> None:
    """Write the sentence to the file from which torchrun's own report takes the reason of a failure."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        reason = {"message": sentence, "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": reason}))
