"""Host calls that ask forward calls while they run: on their own rank, or by messages to another one.

The plan decides which it is: inline inference if both calls are on one rank, remote inference otherwise. Each
question is answered by itself and never joined with others: which of them wait together is a matter of time,
and a product of more rows may differ in its last bits.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from threading import Condition, Lock, Thread, current_thread, main_thread
from typing import Any

import torch
from torch import Tensor

from realhf.data.batch import Batch
from realhf.distributed.group import Pending, checked_length
from realhf.distributed.tags import ANSWERS
from realhf.distributed.world import World
from realhf.engine.module import ModuleEngine
from realhf.errors import UserError
from realhf.runtime.compile.actions import Ask
from realhf.runtime.weights.engine_store import EngineStore

Answer = Mapping[str, Any]
_TRIED_ROWS = (1, 4, 16, 64)
"""Numbers of rows for which a rank measures, once in a run, how long an answer takes."""
_TRIES = 4
"""Answers to each number of rows, of which the fastest counts."""
_WARM = 16
"""Questions of a call before that."""
_OPEN_MESSAGES = 64
"""Most messages that a rank has sent and not waited for; only a wait frees the memory of one."""
_ENVELOPE_BYTES = 4096
"""Size of the first message of a question or an answer, in which most of them fit."""


class Later:
    """An answer that may be under way, or what `then` makes of one."""

    def __init__(
        self, waiting: Callable[[], Any] | None = None, unseen: list[BaseException] | None = None
    ) -> None:
        """`waiting` returns a context in which `result` waits; `unseen` gets the errors of functions that
        `then` has called, until `result` raises them."""
        self._waiting = waiting
        self._unseen = [] if unseen is None else unseen
        self._changed = Condition()
        self._is_here = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._then: list[Callable[[], None]] = []

    def result(self) -> Any:
        """Return the answer; wait until it is there."""
        if not self._is_here:
            assert self._waiting is not None, "an answer without a wait is there"
            with self._waiting(), self._changed:
                self._changed.wait_for(lambda: self._is_here)
        if self._error is not None:
            if self._error in self._unseen:
                self._unseen.remove(self._error)
            raise self._error
        return self._value

    def then(self, do: Callable[[Any], Any]) -> "Later":
        """Call a function with the answer as soon as it is there; the result is what the function returns.

        That happens at once if the answer is there, and else in the thread that receives answers.
        """
        after = Later(self._waiting, self._unseen)

        def go_on() -> None:
            after.complete(lambda: do(self.result()))
            if after._error is not None:
                self._unseen.append(after._error)

        with self._changed:
            if not self._is_here:
                self._then.append(go_on)
                return after
        go_on()
        return after

    def complete(self, value: Callable[[], Any]) -> None:
        """Set the answer to what a function returns, or to the exception that it raises."""
        try:
            self._value = value()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._is_here = True
            self._changed.notify_all()
        for do in self._then:
            do()


class Answers:
    """The answers of this rank to forward calls, with the seconds that they take by their number of rows."""

    def __init__(self, engines: EngineStore, *, tries: bool = True) -> None:
        """With `tries`, measure once in a run how long answers to other numbers of rows take."""
        self._engines = engines
        self._tries = tries
        self._taken: dict[str, dict[int, list[float]]] = {}
        """Call -> rows of a question -> how many there were, and seconds, since `take`."""
        self._counts: dict[str, int] = {}
        """Call -> answers since the run has begun or was resumed."""
        self._tried: dict[str, list[tuple[int, float]]] = {}
        """Call -> seconds of an answer to each number of `_TRIED_ROWS`; none if the function fails."""

    def answer(self, ask: Ask, rows: Batch, *, is_alone: bool = True) -> Answer:
        """Return the answer of a call on this rank. Measure others only if no other thread runs user code."""
        name = ask.call.name
        start = time.perf_counter()
        answer = self._answer(ask, rows)
        seconds = time.perf_counter() - start
        taken = self._taken.setdefault(name, {}).setdefault(len(rows), [0.0, 0.0])
        taken[0] += 1
        taken[1] += seconds
        self._counts[name] = self._counts.get(name, 0) + 1
        # Other threads might draw random numbers meanwhile.
        can_try = self._tries and is_alone and current_thread() is main_thread()
        if can_try and rows.ids and name not in self._tried and self._counts[name] >= _WARM:
            self._tried[name] = self._try(ask, rows)
        return answer

    def _try(self, ask: Ask, rows: Batch) -> list[tuple[int, float]]:
        """Return the seconds of an answer to each number of `_TRIED_ROWS`, and leave no trace in the modules.

        Return nothing if the function fails, as one may that takes only as many rows as it is asked.
        """
        beside = self._engines.beside(ask.call, ask.layout)
        try:
            with self._engine(ask).unchanged(beside):
                tries = [[self._seconds(ask, rows, number) for number in _TRIED_ROWS] for _ in range(_TRIES)]
        except Exception:
            return []
        return list(zip(_TRIED_ROWS, map(min, *tries), strict=True))

    def _seconds(self, ask: Ask, rows: Batch, number: int) -> float:
        """Return the seconds of an answer to so many rows, copies of the given ones."""
        copies = rows.select([i % len(rows) for i in range(number)])
        copies.ids = list(range(number))
        start = time.perf_counter()
        self._answer(ask, copies)
        return time.perf_counter() - start

    def take(self) -> dict[str, Any]:
        """Return, as JSON, what was measured since the last call of this method; nothing if nothing was.

        `answers` has for each call (rows, how many questions, their seconds in all), and `tried` has for
        each call (rows, seconds), measured once in a run, or nothing if its function does not take so many.
        """
        taken = {
            name: [[rows, *figures] for rows, figures in sorted(by_rows.items())]
            for name, by_rows in self._taken.items()}
        self._taken = {}
        return {"answers": taken, "tried": {name: self._tried.get(name, []) for name in taken}}

    def _engine(self, ask: Ask) -> ModuleEngine:
        role = ask.call.role
        assert role is not None, "forward calls have roles"
        engine = self._engines[role, ask.layout]
        assert isinstance(engine, ModuleEngine), "a role that is asked is a module"
        return engine

    def _answer(self, ask: Ask, rows: Batch) -> Answer:
        beside = self._engines.beside(ask.call, ask.layout)
        answer = self._engine(ask).answer(ask.call, rows, beside=beside)
        for key, column in answer.items():
            if not isinstance(column, Tensor) or len(column) != len(rows):
                has = f"{len(column)} entries" if isinstance(column, Tensor) else type(column).__name__
                raise UserError(
                    f"call {ask.call.name!r} answers {has} of {key!r}: it must be a tensor with one entry "
                    f"for each of the {len(rows)} rows")
        return {key: column.cpu() for key, column in answer.items()}


class Asker:
    """Asks forward calls on behalf of one run of a host call on this rank.

    Answers of other ranks are received in a thread, so that they are there while the host function waits for
    something else, such as an environment.
    """

    def __init__(self, world: World, answers: Answers, asks: Sequence[Ask]) -> None:
        self._world = world
        self._answers = answers
        self.cpu_seconds = dict.fromkeys(("calling", "answering", "sending", "receiving", "acting"), 0.0)
        """CPU seconds of the thread that asks, in all, for this rank's answers to itself, and to send
        questions; and of the thread that receives, to do that, and then to unpack answers and call the
        functions of `Later.then`."""
        self._cpu_start = time.thread_time()
        self._answering: AbstractContextManager[Any] = Lock()
        """Held while this rank answers a question, as its own and those of others come in two threads."""
        self._all_asks = asks
        self._asks = {ask.call.name: ask for ask in asks}
        self._numbers = {ask.call.name: number for number, ask in enumerate(asks)}
        self._awaited: SimpleQueue[bool] = SimpleQueue()
        """An entry for each answer that the thread has to receive; False at the end."""
        self._receiver: Thread | None = None
        self._fault: BaseException | None = None
        """What has ended one of the threads."""
        self._unseen: list[BaseException] = []
        """Errors of functions that `Later.then` has called, which nobody has asked for."""
        ranks = sorted({ask.answering(world.rank) for ask in asks} - {world.rank})
        self._open: dict[int, deque[Later]] = {rank: deque() for rank in ranks}
        """Rank -> its answers that have not been received, in the order of the questions."""
        tag = asks[0].tag if asks else 0
        self._mail = _Mail(world, ranks, sends=tag, receives=tag + ANSWERS)

    def role(self, call: str) -> str:
        """Return the role of a call that may be asked."""
        role = self._ask(call).call.role
        assert role is not None, "forward calls have roles"
        return role

    def _ask(self, call: str) -> Ask:
        if call not in self._asks:
            legal = ", ".join(self._asks) or "none"
            raise UserError(f"context.ask({call!r}): HostFunction.asks must name it; it names {legal}")
        return self._asks[call]

    def ask(self, call: str, rows: Mapping[str, Any]) -> Later:
        """Ask a call about some rows, columns by key."""
        ask = self._ask(call)
        if current_thread() is self._receiver:
            raise UserError(
                f"context.ask({call!r}) in a function that `then` calls: ask where the host function runs")
        self._raise_fault()
        sizes = {key: len(column) for key, column in rows.items()}
        if len(set(sizes.values())) != 1:
            raise UserError(f"context.ask({call!r}): columns must have the same number of rows: {sizes}")
        batch = Batch(list(range(next(iter(sizes.values())))), dict(rows))
        rank = ask.answering(self._world.rank)
        if rank == self._world.rank:
            with self._answering:
                start = time.thread_time()
                answer = self._answers.answer(ask, batch, is_alone=self._receiver is None)
                self.cpu_seconds["answering"] += time.thread_time() - start
            (later := Later(unseen=self._unseen)).complete(lambda: answer)
            return later
        start = time.thread_time()
        later = Later(lambda: self._world.process.waiting([rank]), self._unseen)
        self._open[rank].append(later)
        self._raise_fault()  # The thread sets the fault before it looks at what is open.
        self._mail.send(rank, _question(self._numbers[call], batch))
        if self._receiver is None:
            self._receiver = Thread(target=self._receive_all, name="answers", daemon=True)
            self._receiver.start()
        self._awaited.put(True)
        self.cpu_seconds["sending"] += time.thread_time() - start
        return later

    def _receive_all(self) -> None:
        """Receive an answer for each question, from whichever rank it comes."""
        _use_device(self._world)
        start = time.thread_time()
        while self._awaited.get():
            try:
                rank, data = self._mail.receive()
            except BaseException as error:
                self._fault = error
                for waiting in self._open.values():
                    for later in list(waiting):
                        later.complete(self._raise_fault)
                return
            received = time.thread_time()
            self._open[rank].popleft().complete(partial(_fields, data))
            acted = time.thread_time()
            self.cpu_seconds["receiving"] += received - start
            self.cpu_seconds["acting"] += acted - received
            start = acted

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault

    def close(self) -> None:
        """Receive the answers that nobody has waited for, and tell other ranks that no questions follow."""
        if self._receiver is not None:
            self._awaited.put(False)
            with self._world.process.waiting(list(self._open)):
                self._receiver.join()
        self._raise_fault()
        for error in self._unseen:
            raise error
        for rank in self._mail.ranks:
            self._mail.send(rank, _question(0, Batch([])))
        self._mail.close()
        self.cpu_seconds["calling"] = time.thread_time() - self._cpu_start

    @contextmanager
    def answering_others(self) -> Iterator[None]:
        """Answer other ranks that ask this one in a thread, until they have ended, too."""
        others = asked_by(self._world, self._all_asks)

        def answer() -> None:
            try:
                _use_device(self._world)
                answer_all(self._world, self._answers, self._all_asks, answering=self._answering)
            except BaseException as error:
                self._fault = error

        thread = Thread(target=answer, name="questions", daemon=True)
        if others:
            thread.start()
        yield
        if others:
            with self._world.process.waiting(others):
                thread.join()
        self._raise_fault()


def _use_device(world: World) -> None:
    """Let this thread use the rank's GPU: a new thread has the first one."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)


def _fields(data: Tensor) -> Answer:
    return Batch.unpack(data).fields


class _Mail:
    """Sends bytes to ranks under one tag, and receives them from whichever has sent first under another."""

    def __init__(self, world: World, ranks: Sequence[int], *, sends: int, receives: int) -> None:
        self.ranks = tuple(ranks)
        """The ranks from which bytes may come."""
        self._control = world.control
        self._send_tag = sends
        self._receive_tag = receives
        self._sent: deque[Pending] = deque()

    def send(self, rank: int, data: Tensor) -> None:
        """Post bytes: an envelope with their number and the first of them, and the others by themselves."""
        room = _ENVELOPE_BYTES - 8
        envelope = torch.zeros(_ENVELOPE_BYTES, dtype=torch.uint8)
        envelope[:8] = torch.tensor([len(data)]).view(torch.uint8)
        envelope[8 : 8 + len(data[:room])] = data[:room]
        messages = [(rank, envelope), (rank, data[room:])]
        self._sent.append(self._control.post(messages, [], tag=self._send_tag))
        if len(self._sent) > _OPEN_MESSAGES:
            self._sent.popleft().wait()

    def receive(self) -> tuple[int, Tensor]:
        """Return the rank whose bytes have come first, and the bytes."""
        envelope = torch.empty(_ENVELOPE_BYTES, dtype=torch.uint8)
        rank = self._control.recv_any(envelope, self.ranks, tag=self._receive_tag)
        length = checked_length(int(envelope[:8].view(torch.int64)), rank=rank)
        data = envelope[8 : 8 + length]
        if (rest := length - len(data)) > 0:
            data = torch.cat([data, torch.empty(rest, dtype=torch.uint8)])
            self._control.exchange([], [(rank, data[-rest:])], tag=self._receive_tag)
        return rank, data

    def close(self) -> None:
        """Wait until all that was sent has been received."""
        while self._sent:
            self._sent.popleft().wait()


def _question(number: int, rows: Batch) -> Tensor:
    """Return a message: the number of a call among those that the asker asks, and rows; none at the end."""
    return torch.cat([torch.tensor([number], dtype=torch.uint8), rows.pack()])


def asked_by(world: World, asks: Sequence[Ask]) -> list[int]:
    """Return the other ranks whose questions this one answers."""
    return sorted({rank for ask in asks for rank in ask.far(world.rank)})


def answer_all(
    world: World, answers: Answers, asks: Sequence[Ask], *,
    answering: AbstractContextManager[Any] | None = None,
) -> None:
    """Answer the ranks of a host call that ask this one, as their questions come, until all have ended.

    `asks` are all of the host call's. `answering` is held while a question is answered.
    """
    answering = answering or nullcontext()
    mail = _Mail(world, asked_by(world, asks), sends=asks[0].tag + ANSWERS, receives=asks[0].tag)
    while mail.ranks:
        with world.process.waiting(mail.ranks):
            rank, question = mail.receive()
        rows = Batch.unpack(question[1:])
        if not rows.fields:
            mail.ranks = tuple(one for one in mail.ranks if one != rank)
            continue
        with answering:
            answer = answers.answer(asks[int(question[0])], rows)
        mail.send(rank, Batch(rows.ids, dict(answer)).pack())
    mail.close()
