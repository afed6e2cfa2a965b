"""Host calls that ask forward calls while they run: on their own rank, or by messages to another one.

The plan decides which it is: inline inference if both calls are on one rank, remote inference otherwise.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from realhf.data.batch import Batch
from realhf.distributed.group import Pending
from realhf.distributed.world import World
from realhf.engine.module import ModuleEngine
from realhf.errors import UserError
from realhf.runtime.compile.actions import Ask
from realhf.runtime.weights.engine_store import EngineStore

Answer = Mapping[str, Any]
_UNDER_WAY = 64
"""Most questions of an asker without answers: before another one, it waits for the oldest answer. (Otherwise
both sides might wait for each other to receive.)"""


class Later:
    """An answer that may be under way."""

    def __init__(self, receive: Callable[[], Answer], *, answer: Answer | None = None) -> None:
        self._receive = receive
        self._answer = answer

    @property
    def is_here(self) -> bool:
        """Whether `result` need not wait."""
        return self._answer is not None

    def result(self) -> Answer:
        """Return the answer; wait until it is there."""
        if self._answer is None:
            self._answer = self._receive()
        return self._answer


class Asker:
    """Asks forward calls on behalf of one run of a host call on this rank."""

    def __init__(self, world: World, engines: EngineStore, asks: Sequence[Ask]) -> None:
        self._world = world
        self._engines = engines
        self._asks = {ask.call.name: ask for ask in asks}
        self._numbers = {ask.call.name: number for number, ask in enumerate(asks)}
        self._open: dict[int, deque[Later]] = {}
        """Rank -> its answers that have not been received, in the order of the questions."""
        self._sent: deque[Pending] = deque()

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
        sizes = {key: len(column) for key, column in rows.items()}
        if len(set(sizes.values())) != 1:
            raise UserError(f"context.ask({call!r}): columns must have the same number of rows: {sizes}")
        batch = Batch(list(range(next(iter(sizes.values())))), dict(rows))
        if (rank := ask.answering(self._world.rank)) == self._world.rank:
            return Later(dict, answer=_answer(self._engines, ask, batch))
        waiting = self._open.setdefault(rank, deque())
        if len(waiting) == _UNDER_WAY:
            waiting[0].result()
        self._send(rank, _question(self._numbers[call], batch), ask.tag)
        waiting.append(later := Later(lambda: self._receive(later, ask, rank)))
        return later

    def _receive(self, later: Later, ask: Ask, rank: int) -> Answer:
        """Receive an answer, after those to earlier questions."""
        waiting = self._open[rank]
        while waiting[0] is not later:
            waiting[0].result()
        waiting.popleft()
        with self._world.process.waiting([rank]):
            return Batch.unpack(self._world.control.recv_bytes(rank, tag=ask.tag)).fields

    def _send(self, rank: int, question: Tensor, tag: int) -> None:
        self._sent.append(self._world.control.send_bytes(question, [rank], tag=tag))
        if len(self._sent) > _UNDER_WAY:
            self._sent.popleft().wait()

    def close(self) -> None:
        """Receive the answers that nobody has waited for, and tell other ranks that no questions follow."""
        for waiting in self._open.values():
            while waiting:
                waiting[0].result()
        tags = {ask.answering(self._world.rank): ask.tag for ask in self._asks.values()}
        for rank, tag in tags.items():
            if rank != self._world.rank:
                self._send(rank, _question(0, Batch([])), tag)
        for message in self._sent:
            message.wait()


def _question(number: int, rows: Batch) -> Tensor:
    """Return a message: the number of a call among those that the asker asks, and rows; none at the end."""
    return torch.cat([torch.tensor([number], dtype=torch.uint8), rows.pack()])


def answer_all(world: World, engines: EngineStore, asks: Sequence[Ask]) -> None:
    """Answer the ranks of a host call that ask this one, in turns, until all of them have ended.

    `asks` are all of the host call's.
    """
    asking = sorted({rank for ask in asks for rank in ask.far(world.rank)})
    tag = asks[0].tag
    sent: deque[Pending] = deque()
    while asking:
        for rank in list(asking):
            with world.process.waiting([rank]):
                question = world.control.recv_bytes(rank, tag=tag)
            rows = Batch.unpack(question[1:])
            if not rows.fields:
                asking.remove(rank)
                continue
            answer = Batch(rows.ids, dict(_answer(engines, asks[int(question[0])], rows)))
            sent.append(world.control.send_bytes(answer.pack(), [rank], tag=tag))
            if len(sent) > _UNDER_WAY:
                sent.popleft().wait()
    for message in sent:
        message.wait()


def _answer(engines: EngineStore, ask: Ask, rows: Batch) -> Answer:
    role = ask.call.role
    assert role is not None, "forward calls have roles"
    engine = engines[role, ask.layout]
    assert isinstance(engine, ModuleEngine), "a role that is asked is a module"
    answer = engine.answer(ask.call, rows, beside=engines.beside(ask.call, ask.layout))
    for key, column in answer.items():
        if not isinstance(column, Tensor) or len(column) != len(rows):
            has = f"{len(column)} entries" if isinstance(column, Tensor) else type(column).__name__
            raise UserError(
                f"call {ask.call.name!r} answers {has} of {key!r}: it must be a tensor with one entry for "
                f"each of the {len(rows)} rows")
    return {key: column.cpu() for key, column in answer.items()}
