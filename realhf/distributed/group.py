"""Group: a set of ranks with the collectives that realhf uses, and those that autograd differentiates.

On NCCL, reductions and gathers are NCCL's own. On gloo they are built from point-to-point messages, which are
faster than gloo's collectives; sums run in rank order, so that all members get the same bits.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from realhf.distributed.communicators import Chain, Operation
from realhf.distributed.process import WatchedProcess
from realhf.models.param_spec import chunk_body, chunk_edges

Messages = Sequence[tuple[int, torch.Tensor]]
"""Peers, and the contiguous tensors to send to them or to receive from them."""
Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MAX_MESSAGE_BYTES = 1 << 34
"""Largest size that a sender may announce. (Parameters travel in messages whose sizes all ranks know.)"""
_OPEN_STEPS = 4  # An Outbox keeps the messages of this many steps; a pipeline of calls needs fewer.
_SMALL_BYTES = 1 << 16
"""An all-reduce sends tensors up to this size whole to every peer; of larger ones, each peer sums a chunk."""


class PeerError(RuntimeError):
    """The error that a peer has died or stopped answering during a communication."""


def name_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 1 and 3"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


@contextmanager
def peer_errors(ranks: Sequence[int] = ()) -> Iterator[None]:
    """Turn the transport's errors into a PeerError that names the ranks, or without any the store."""
    try:
        yield
    except RuntimeError as error:
        reason = re.sub(r"^\[.*?\] ", "", str(error).partition("\n")[0])
        who = name_ranks(ranks) if ranks else "the store"
        if ranks and "imed out" in reason:
            reason += f" ({who} may itself be waiting for another)"
        raise PeerError(f"communication with {who} broke off: {reason}") from error


def checked_length(num_bytes: int, *, rank: int) -> int:
    """Return the size that a rank announces. Raises RuntimeError if no message can have it."""
    if not 0 <= num_bytes <= MAX_MESSAGE_BYTES:
        what = f"rank {rank} announces a message of {num_bytes} bytes, legal are 0 to {MAX_MESSAGE_BYTES}"
        raise RuntimeError(f"{what}: is it a rank of this run, and of the same version of realhf?")
    return num_bytes


@dataclass
class Pending:
    """Posted messages that can be waited for, each with the ranks at its other end; keeps tensors alive."""

    works: Sequence[tuple[Any, tuple[int, ...]]] = ()
    tensors: Messages = ()
    process: WatchedProcess = field(default_factory=WatchedProcess)
    operation: Operation | None = None

    def wait(self) -> None:
        for work, ranks in self.works:
            with self.process.waiting(ranks, self.operation), peer_errors(ranks):
                work.wait()
        self.works = self.tensors = ()


class Outbox:
    """A container of posted messages, so that a sender continues while the receivers are busy.

    It waits for the messages of all but the last few steps, because gloo completes a message only when the
    sender waits for it.
    """

    def __init__(self) -> None:
        self._steps: deque[list[Pending]] = deque([[]])

    def add(self, message: Pending) -> None:
        self._steps[-1].append(message)

    def next_step(self) -> None:
        self._steps.append([])
        if len(self._steps) > _OPEN_STEPS:
            self._wait_for_oldest()

    def wait(self) -> None:
        """Wait until all messages have been received."""
        while self._steps:
            self._wait_for_oldest()
        self._steps.append([])

    def _wait_for_oldest(self) -> None:
        for message in self._steps.popleft():
            message.wait()


class Group:
    """An ordered set of global ranks. This process has index `index`, and peers are named by their index.

    Over gloo, messages between two ranks match in order among those with the same tag. On NCCL (`native`),
    tensors are on this rank's device, and a wait delays its current stream, not the host.
    """

    def __init__(
        self, ranks: Sequence[int], index: int, backend: Any, *, native: bool, process: WatchedProcess,
        purpose: str = "data",
    ) -> None:
        self.ranks = tuple(ranks)
        self.index = index
        self.size = len(ranks)
        self._process = process
        self._backend = backend
        self._native = native and backend is not None
        self._purpose = purpose
        self._num_operations = 0

    @property
    def backend(self) -> Any:
        """The communicator of torch.distributed; None in a group of one."""
        return self._backend

    def exchange(self, sends: Messages, recvs: Messages, *, tag: int = 0, name: str = "messages") -> None:
        """Send and receive at the same time; messages between two ranks match in the order of the lists."""
        self.post(sends, recvs, tag=tag, name=name).wait()

    def post(self, sends: Messages, recvs: Messages, *, tag: int = 0, name: str = "messages") -> Pending:
        """Start an `exchange`; the tensors must stay untouched until `Pending.wait`.

        Tensors without elements are not sent. On gloo, posts never wait for one another. On NCCL, posts of
        one group run one after another, so two ranks that send to each other must do so in one post each.
        `name` stands for the post in messages about stalled runs.
        """
        sends, recvs = ([(i, t) for i, t in side if t.numel()] for side in (sends, recvs))
        if not sends and not recvs:
            return Pending()
        assert self._backend is not None, "a group of one has nobody to talk to"
        if self._native:
            work, operation = self._launch(name, lambda: self._coalesced(sends, recvs, tag))
            return Pending([(work, self.ranks)], [*sends, *recvs], self._process, operation)
        operation = self.new_operation(name)
        works: list[tuple[Any, tuple[int, ...]]] = []
        for post, messages in ((self._backend.recv, recvs), (self._backend.send, sends)):
            for peer, tensor in messages:
                ranks = (self.ranks[peer],)
                with peer_errors(ranks):  # Gloo raises at once if the connection is closed.
                    works.append((post([tensor], peer, tag), ranks))
        return Pending(works, [*sends, *recvs], self._process, operation)

    def post_both(self, sends: Messages, recvs: Messages) -> tuple[Pending, Pending]:
        """Start an `exchange`; return one Pending for the messages to send and one for those to receive.

        On NCCL both are the same, as messages that are posted together complete together.
        """
        if self._native:
            both = self.post(sends, recvs)
            return both, both
        return self.post(sends, []), self.post([], recvs)

    def all_reduce(self, tensor: torch.Tensor, *, largest: bool = False) -> torch.Tensor:
        """Sum `tensor` (contiguous) over the group in place, or take the `largest` of each element, and
        return it."""
        name = "all_reduce"
        combine = torch.maximum if largest else torch.Tensor.add_
        if self._native:
            options = [_largest()] if largest else []
            self._run(name, "allreduce", [tensor], *options).wait()
        elif self.size == 2 or tensor.nbytes <= _SMALL_BYTES:
            tensor.copy_(reduce(combine, self._gather(tensor, name).unbind()))
        else:
            chunks = list(tensor.view(-1).tensor_split(self.size))
            self._post_reduce_scatter(chunks, name, combine)()
            self._all_gather_chunks(chunks, name)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the members' tensors, which have equal shapes, to shape (size, *tensor.shape)."""
        return self._gather(tensor, "all_gather")

    def _gather(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if self.size == 1:
            return tensor[None]
        out = tensor.new_empty((self.size, *tensor.shape))
        if self._native:
            self._run(name, "_allgather_base", out, tensor.contiguous()).wait()
        else:
            out[self.index] = tensor
            self._all_gather_chunks(list(out.unbind()), name)
        return out

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor`, of `size` rows, over the group; return row `index`. Other rows become undefined."""
        mine = tensor[self.index]
        if self._native:
            self._run("reduce_scatter", "_reduce_scatter_base", mine, tensor).wait()
        elif self.size > 1:
            self._post_reduce_scatter(list(tensor.unbind()), "reduce_scatter")()
        return mine

    def post_reduce_scatter(self, flat: torch.Tensor) -> Callable[[], None]:
        """Start to sum a flat tensor over the group, in place; it must stay untouched until the returned
        function is called.

        Every member gets the sum of its own chunk (see `chunk_edges`). On NCCL this is one collective of
        equal chunks, which leaves out the elements that the last chunk has beyond them: see `sum_rests`.
        Other collectives go on beside it.
        """
        if self.size == 1:
            return lambda: None
        if not self._native:
            return self._post_reduce_scatter(self._chunks(flat), "reduce_scatter")
        body = chunk_body(len(flat), self.size)
        if not body:
            return lambda: None
        my_chunk = flat[body * self.index :][:body]
        whole = flat[: body * self.size]
        return self._run("reduce_scatter", "_reduce_scatter_base", my_chunk, whole, chain="background").wait

    @property
    def sums_in_place(self) -> bool:
        """Whether `post_reduce_scatter` takes no memory besides its tensor, as on NCCL."""
        return self._native

    def sum_rests(self, flats: Sequence[torch.Tensor]) -> None:
        """Sum what `post_reduce_scatter` has left out of these tensors, in one collective."""
        if self._native and (rests := self._rests(flats)):
            total = self.all_reduce(torch.cat(rests))
            _copy_to(rests, total)

    def all_gather_flat(self, flat: torch.Tensor) -> None:
        """Fill every chunk of a flat tensor (see `chunk_edges`), in place, from the member with its index.

        On NCCL this is one collective of equal chunks, which leaves out the elements that the last chunk has
        beyond them: see `spread_rests`.
        """
        if self.size == 1:
            return
        if not self._native:
            self._all_gather_chunks(self._chunks(flat), "all_gather")
        elif body := chunk_body(len(flat), self.size):
            my_chunk = flat[body * self.index :][:body]
            self._run("all_gather", "_allgather_base", flat[: body * self.size], my_chunk).wait()

    def spread_rests(self, flats: Sequence[torch.Tensor]) -> None:
        """Fill what `all_gather_flat` has left out of these tensors, in one collective."""
        if self._native and (rests := self._rests(flats)):
            joined = torch.cat(rests)
            self._run("broadcast", "broadcast", joined, self.size - 1).wait()
            _copy_to(rests, joined)

    def _run(self, name: str, method: str, *arguments: Any, chain: Chain | None = None) -> Pending:
        """Post a collective on NCCL."""
        work, operation = self._launch(name, lambda: getattr(self._backend, method)(*arguments), chain)
        return Pending([(work, self.ranks)], process=self._process, operation=operation)

    def _launch(
        self, name: str, post: Callable[[], Any], chain: Chain | None = None
    ) -> tuple[Any, Operation]:
        """Post a work on NCCL, in order with those of other groups; return it with its Operation."""
        self.require_working()
        operation = self.new_operation(name)
        if chain is None:
            chain = "background" if self._purpose == "realloc" else "calls"
        with peer_errors(self.ranks), self._process.communicators.in_order(chain) as is_chained:
            work = post()
            if is_chained:
                work.wait()
            self.note(operation, work)
        return work, operation

    def require_working(self) -> None:
        """Raise PeerError if the communicators have been aborted."""
        if fault := self._process.communicators.fault:
            raise PeerError(fault)

    def new_operation(self, name: str) -> Operation:
        self._num_operations += 1
        return Operation(name, self.ranks, self._purpose, self._num_operations, self._process.place)

    def note(self, operation: Operation, work: Any = None) -> None:
        """Tell the watcher of an operation on NCCL for which the current stream waits."""
        if self._native:
            self._process.communicators.note(operation, work)

    def _coalesced(self, sends: Messages, recvs: Messages, tag: int) -> Any:
        """Post messages over NCCL that complete together; return their work."""
        self._backend._start_coalescing()
        for post, messages in ((self._backend.recv, recvs), (self._backend.send, sends)):
            for peer, tensor in messages:
                post([tensor], peer, tag)
        return self._backend._end_coalescing()

    def _chunks(self, flat: torch.Tensor) -> list[torch.Tensor]:
        edges = chunk_edges(len(flat), self.size)
        return [flat[first:last] for first, last in pairwise(edges)]

    def _rests(self, flats: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return, for each tensor, the elements that the last chunk has beyond `chunk_body`, if any."""
        tails = (flat[chunk_body(len(flat), self.size) * self.size :] for flat in flats)
        return [tail for tail in tails if len(tail)]

    def _post_reduce_scatter(
        self, chunks: list[torch.Tensor], name: str, combine: Combine = torch.Tensor.add_
    ) -> Callable[[], None]:
        """Start to sum chunk `index` of all members into this member's chunk, in place, over gloo.

        Chunks may differ in size, and must stay untouched until the returned function is called.
        """
        mine = chunks[self.index]
        peers = self._peers()
        terms = [mine if i == self.index else torch.empty_like(mine) for i in range(self.size)]
        sends = [(p, chunks[p]) for p in peers]
        pending = self.post(sends, [(p, terms[p]) for p in peers], name=name)

        def finish() -> None:
            pending.wait()
            mine.copy_(reduce(combine, terms))

        return finish

    def _all_gather_chunks(self, chunks: list[torch.Tensor], name: str) -> None:
        """Fill all chunks, in place, each from the member with its index, over gloo; sizes may differ."""
        sends = [(peer, chunks[self.index]) for peer in self._peers()]
        self.exchange(sends, [(peer, chunks[peer]) for peer, _ in sends], name=name)

    def send_bytes(self, data: torch.Tensor, peers: Sequence[int], *, tag: int = 0) -> Pending:
        """Post any number of bytes (uint8) to some members; like the methods below, for gloo only."""
        messages = (torch.tensor([len(data)]), data)
        return self.post([(peer, message) for peer in peers for message in messages], [], tag=tag)

    def recv_bytes(self, peer: int, *, tag: int = 0) -> torch.Tensor:
        length = torch.empty(1, dtype=torch.int64)
        self.exchange([], [(peer, length)], tag=tag)
        data = torch.empty(checked_length(int(length), rank=self.ranks[peer]), dtype=torch.uint8)
        self.exchange([], [(peer, data)], tag=tag)
        return data

    def recv_any(self, tensor: torch.Tensor, peers: Sequence[int], *, tag: int = 0) -> int:
        """Receive the first message that comes from one of these members; return the member."""
        if len(peers) == 1:  # Its sender need not ask first whether it is wanted.
            self.exchange([], [(peers[0], tensor)], tag=tag)
            return peers[0]
        ranks = tuple(self.ranks[peer] for peer in peers)
        work = self._backend.recv_anysource([tensor], tag)
        Pending([(work, ranks)], process=self._process, operation=self.new_operation("messages")).wait()
        return int(work._source_rank())

    def send_json(self, document: Any, peers: Sequence[int], *, tag: int = 0) -> Pending:
        return self.send_bytes(_encode_json(document), peers, tag=tag)

    def recv_json(self, peer: int, *, tag: int = 0) -> Any:
        return _decode_json(self.recv_bytes(peer, tag=tag))

    def all_gather_bytes(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of every member, in member order."""
        pending = self.send_bytes(data, self._peers())
        data_of = {peer: self.recv_bytes(peer) for peer in self._peers()} | {self.index: data}
        pending.wait()
        return [data_of[i] for i in range(self.size)]

    def all_gather_json(self, document: Any) -> list[Any]:
        """Return the JSON document of every member, in member order."""
        return [_decode_json(data) for data in self.all_gather_bytes(_encode_json(document))]

    def barrier(self) -> None:
        """Wait until every member has called this; on NCCL, too, the host waits."""
        total = self.all_reduce(torch.zeros(1, device="cuda" if self._native else "cpu"))
        with self._process.waiting(self.ranks):
            total.item()

    def _peers(self) -> list[int]:
        """Return the other members, from the next one on, so that not all members send to one port first."""
        return [(self.index + i) % self.size for i in range(1, self.size)]


def _largest() -> Any:
    """Return the options by which NCCL's all-reduce takes the largest values."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return options


def _copy_to(tensors: Sequence[torch.Tensor], joined: torch.Tensor) -> None:
    """Copy a flat tensor, which holds the values of these tensors end to end, back to them."""
    for tensor, values in zip(tensors, joined.split([len(tensor) for tensor in tensors]), strict=True):
        tensor.copy_(values)


def _encode_json(document: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)


def _decode_json(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


# Differentiable collectives (Megatron-LM's f and g, arXiv:1909.08053 section 3)


class _GroupSum(torch.autograd.Function):
    """A sum over the group in one direction, forward or backward, and the identity in the other."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, is_forward: bool) -> torch.Tensor:
        ctx.group = None if is_forward else group
        return group.all_reduce(x.contiguous().clone()) if is_forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad if ctx.group is None else ctx.group.all_reduce(grad.contiguous().clone()), None, None


def copy_to_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return `x`, with its gradient summed over the group; used before a computation that is split."""
    return x if group.size == 1 else _GroupSum.apply(x, group, False)


def sum_over_group(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the sum over the group, whose gradient passes unchanged; used after a split computation."""
    return x if group.size == 1 else _GroupSum.apply(x, group, True)


class _ExchangeRows(torch.autograd.Function):
    """An all-to-all of rows, whose gradient takes the reverse way."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: Group, sends: list[int], recvs: list[int]
    ) -> torch.Tensor:
        ctx.group = group
        ctx.sends = sends
        ctx.recvs = recvs
        return _exchange_rows(rows, group, sends, recvs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange_rows(grad, ctx.group, ctx.recvs, ctx.sends), None, None, None


def _exchange_rows(rows: torch.Tensor, group: Group, sends: list[int], recvs: list[int]) -> torch.Tensor:
    out = rows.new_empty(sum(recvs), *rows.shape[1:])
    outgoing = rows.contiguous().split(sends)
    incoming = out.split(recvs)
    incoming[group.index].copy_(outgoing[group.index])
    peers = [i for i in range(group.size) if i != group.index]
    group.exchange([(i, outgoing[i]) for i in peers], [(i, incoming[i]) for i in peers])
    return out


def exchange_rows(rows: torch.Tensor, group: Group, sends: list[int], recvs: list[int]) -> torch.Tensor:
    """Exchange rows all-to-all: send the next sends[i] rows to member i and receive recvs[i] rows from it.

    Rows are sent and returned in the order of the members.
    """
    return _ExchangeRows.apply(rows, group, sends, recvs)
