"""Heartbeats and failure boards, which end a run on all ranks, each of whose hosts prints the reason.

A heartbeat distinguishes a busy rank from a dead one, and detects a run in which all ranks wait. It compares
the operations of a step program between ranks. A failure board tells all ranks why one of them stops.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from realhf.distributed.group import PeerError, name_ranks
from realhf.distributed.process import RESCUE, OperationLog, WatchedProcess

_EQUALS_SECONDS = 1.0
"""The first rank with a sentence waits this long for others with the same one, to name them all."""
_PRINTING_SECONDS = 5.0
"""The others wait this long for it to print, because the launcher ends all workers as soon as one exits."""
_MAX_INTERVAL_SECONDS = 5.0
_OPERATIONS_SECONDS = 1.0
"""Time between comparisons of the ranks' operations."""
_GRACE_SECONDS = 4.0
"""Time for the main thread, after a failure elsewhere, to end this process with a sentence of its own."""
_ABORT_GRACE_SECONDS = 10.0
"""The same time where operations of NCCL must first be aborted, so that the main thread can go on."""
_SILENT_SHARE = 0.05
"""Over NCCL, a rank counts as dead if it is silent for this share of the timeout."""
_SHORTEST_SILENCE_SECONDS = 30.0
"""The shortest such silence, unless the timeout is shorter."""
_MAX_NAMED = 8
"""Most ranks that the sentence about a standstill lists."""
_USER_ERROR = 2
"""Exit code of a run whose ranks execute different operations in the experiment's step()."""
_FAILED = 1
"""Exit code of a rank that stops because of a failure."""


# Reasons to stop


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


# Signs of life


def silence_over_nccl(timeout_seconds: float) -> float:
    """Return the time without a sign of life after which a rank counts as dead over NCCL.

    It is shorter than over gloo, where a connection that breaks tells of a dead rank, too.
    """
    return min(timeout_seconds, max(_SHORTEST_SILENCE_SECONDS, _SILENT_SHARE * timeout_seconds))


@dataclass(frozen=True)
class Beat:
    """A sign of life: its number, and the main thread's work as WatchedProcess has it."""

    number: int
    doing: str
    waits_for: tuple[int, ...] | None = None
    num_waits: int = 0
    unfinished: Sequence[tuple[str, float]] = ()
    """Operations in which the rank waits, and the seconds since they were posted (see WatchedProcess)."""

    def has_moved(self, before: "Beat") -> bool:
        """Return whether the rank has made progress since an earlier beat, or waits for nobody."""
        if self.waits_for is None and not self.unfinished:
            return True
        now, then = ([text for text, _ in beat.unfinished] for beat in (self, before))
        return now != then or (self.doing, self.num_waits) != (before.doing, before.num_waits)

    def __str__(self) -> str:
        """Return in words where the rank waits, and for which ranks."""
        ranks = "" if self.waits_for is None else f" for {name_ranks(self.waits_for)}"
        oldest = [f": {text}, {seconds:.0f} s old" for text, seconds in self.unfinished[:1]]
        return "".join([self.doing, ranks, *oldest])


class Watch:
    """A detector of silent ranks and of standstills, from the beats that one rank sees.

    Times are in seconds of a monotonic clock.
    """

    def __init__(self, rank: int, *, timeout_seconds: float, silence_seconds: float | None = None) -> None:
        self._rank = rank
        self._timeout = timeout_seconds
        self._silence = min(timeout_seconds, silence_seconds or timeout_seconds)
        self._last: dict[int, Beat] = {}
        self._alive_at: dict[int, float] = {}
        self._moved_at: dict[int, float] = {}

    def find_fault(self, beats: Mapping[int, Beat | None], *, now: float) -> str:
        """Record the newest beat of each rank (None if the rank has finished) and look for a fault.

        Returns why the run cannot continue, or an empty string. Only rank 0, which sees all ranks, detects
        standstills.
        """
        for rank, beat in beats.items():
            self._note(rank, beat, now)
        for rank, beat in self._last.items():
            silence = now - self._alive_at[rank]
            if rank != self._rank and silence > self._silence:
                heard = time.strftime("%H:%M:%S", time.localtime(time.time() - silence))
                is_own = self._silence == self._timeout
                limit = "--timeout" if is_own else f"--timeout {self._timeout:g} allows {self._silence:g} s"
                silent = f"has given no sign of life for {silence:.0f} s ({limit})"
                return f"rank {rank} {silent}; the last was of {beat.doing}, at {heard}"
        if self._rank == 0 and all(now - self._moved_at[rank] > self._timeout for rank in self._last):
            return self._describe_standstill()
        return ""

    def _note(self, rank: int, beat: Beat | None, now: float) -> None:
        before = self._last.pop(rank, None)
        if beat is None:
            return
        self._last[rank] = beat
        if before is None or beat.number != before.number:
            self._alive_at[rank] = now
        if before is None or beat.has_moved(before):
            self._moved_at[rank] = now

    def _describe_standstill(self) -> str:
        waits = [f"rank {rank} in {beat}" for rank, beat in sorted(self._last.items())]
        others = f"; and {len(waits) - _MAX_NAMED} more" if len(waits) > _MAX_NAMED else ""
        what = f"all ranks have waited for one another for {self._timeout:g} s (--timeout)"
        return f"{what}: {'; '.join(waits[:_MAX_NAMED])}{others}"


class Heartbeat:
    """A thread that tells the other ranks that this process lives, and ends it when the run cannot continue.

    Rank 0 watches all ranks, and the others watch rank 0. A rank that gives no sign for `timeout_seconds` is
    dead; a rank that computes or waits for a reward still gives signs. A run is stuck if every rank has
    waited for others for that long. (Over NCCL, a rank also waits while operations that it has posted stay
    unfinished.) A rank that sees either fault posts it on the failure board, which all ranks read. In a run
    over NCCL, each rank then aborts its communicators, so that its main thread can say why it ends.
    """

    def __init__(
        self, store: dist.Store, board: FailureBoard, process: WatchedProcess,
        *, rank: int, size: int, timeout_seconds: float, silence_seconds: float | None = None,
        grace_seconds: float | None = None,
    ) -> None:
        """`store` and `board` must have connections of their own, as the main thread may block on its own.

        A rank is dead after `silence_seconds` (None: after the timeout). After a failure elsewhere, the main
        thread has `grace_seconds` to end this process itself.
        """
        self._store = dist.PrefixStore("realhf/heartbeat", store)
        self._rescues = dist.PrefixStore(f"realhf/{RESCUE}/", store)
        self._board = board
        self._process = process
        self._rank = rank
        self._timeout = timeout_seconds
        self._watched = range(size) if rank == 0 else range(1)
        self._silence = min(timeout_seconds, silence_seconds or timeout_seconds)
        self._grace = grace_seconds
        self._watch = Watch(rank, timeout_seconds=timeout_seconds, silence_seconds=silence_seconds)
        self._operations = OperationWatch(store, process.operations, rank=rank, size=size)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._number = 0
        self._interval = min(_MAX_INTERVAL_SECONDS, self._silence / 8)
        self._next_sign = 0.0
        self._errors: set[str] = set()
        """Errors of this thread that have been printed."""
        self._asks_for_stacks = threading.Event()
        self._num_stacks = 0
        """How often ranks have asked for stacks, as far as this one has answered."""

    def start(self) -> None:
        self._give_sign()
        self._process.is_watched = True
        self._thread.start()

    def stop(self) -> None:
        """Stop, and tell the others that this rank has finished."""
        self._ended.set()
        self._thread.join()
        with suppress(RuntimeError):  # The store may have ended with the process that kept it.
            self._store.set(str(self._rank), json.dumps(None))

    def _run(self) -> None:
        """Do the rounds of the heartbeat until `stop`. No error but the loss of the store ends them: a rank
        without a heartbeat would count as dead."""
        while not self._ended.wait(min(self._interval, _OPERATIONS_SECONDS)):
            try:
                self._round()
            except Exception as error:
                reason = f"{type(error).__name__}: {error}".partition("\n")[0]
                if self._has_lost_store():
                    self._leave_without_store(reason)
                elif reason not in self._errors:
                    self._errors.add(reason)
                    goes_on = f"rank {self._rank}'s heartbeat met an error and goes on"
                    print(f"realhf: {goes_on} ({reason})", file=sys.stderr, flush=True)

    def _round(self) -> None:
        if difference := self._operations.exchange():
            self._end_for(difference, code=_USER_ERROR)
        self._rescue_if_asked()
        self._show_stacks_if_asked()
        if time.monotonic() < self._next_sign:
            return
        self._next_sign = time.monotonic() + self._interval
        self._give_sign()
        failures = self._board.failures()
        if failures:
            self._process.leave_record(self._rank, failures[0].sentence)
            self._leave(failures[0].sentence)
        elif fault := self._failed_work() or self._watch.find_fault(
            self._newest_beats(), now=time.monotonic()
        ):
            self._end_for(fault, code=_FAILED)

    def _end_for(self, fault: str, *, code: int) -> None:
        """End this process because of a fault that it has found, and tell all ranks."""
        try:
            self._process.leave_record(self._rank, fault)
        finally:
            self._board.report(fault, code=code, names_rank=True)
            self._leave(fault)

    def _has_lost_store(self) -> bool:
        try:
            self._store.check([str(self._rank)])
        except RuntimeError:
            return True
        return False

    def _leave_without_store(self, reason: str) -> None:
        lost = f"rank {self._rank} stops: it lost the store that all ranks of the run share"
        if self._process.communicators:
            self._process.communicators.abort(lost)
        if not self._ended.wait(_GRACE_SECONDS):
            print(f"realhf: {lost} ({reason})", file=sys.stderr, flush=True)
            os._exit(_FAILED)

    def _rescue_if_asked(self) -> None:
        """Let a thread save this rank's part of the state after a step, if a failing rank asks for it."""
        rescue = self._process.rescue
        if rescue is not None and self._rescues.check([RESCUE]):
            self._process.rescue = None
            step = int(self._rescues.get(RESCUE))
            threading.Thread(target=rescue, args=(step,), name="rescue", daemon=True).start()

    def ask_for_stacks(self) -> None:
        """Let every rank write its stacks, soon; any thread may call this."""
        self._asks_for_stacks.set()

    def _show_stacks_if_asked(self) -> None:
        """Pass this rank's wish for stacks on to all, and write those of this rank if any rank has one."""
        asked = self._store.add("stacks", int(self._asks_for_stacks.is_set()))
        self._asks_for_stacks.clear()
        if asked > self._num_stacks:
            self._num_stacks = asked
            self._process.show_stacks(self._rank)

    def _give_sign(self) -> None:
        self._number += 1
        process = self._process
        beat = Beat(
            self._number, process.place, process.waits_for, process.num_waits, process.unfinished())
        self._store.set(str(self._rank), json.dumps(asdict(beat)))

    def _newest_beats(self) -> dict[int, Beat | None]:
        beats: dict[int, Beat | None] = {}
        for rank in self._watched:
            if self._store.check([str(rank)]):
                beat = json.loads(self._store.get(str(rank)))
                beats[rank] = None if beat is None else Beat(**beat)
        return beats

    def _failed_work(self) -> str:
        """Return a sentence about an operation of this rank that has failed, or an empty string."""
        reason = self._process.communicators.failure()
        return f"rank {self._rank} lost its peers in {self._process.place}: {reason}" if reason else ""

    def _leave(self, fault: str) -> None:
        """End this process because of a fault, unless the main thread ends it first.

        First abort operations of NCCL, because the main thread may wait in one for a rank that has stopped.
        """
        grace = _GRACE_SECONDS
        if communicators := self._process.communicators:
            communicators.abort(fault)
            grace = _ABORT_GRACE_SECONDS
        if not self._ended.wait(grace if self._grace is None else self._grace):
            code = self._board.repeat()
            os._exit(_FAILED if code is None else code)


# Operations that differ between ranks


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
