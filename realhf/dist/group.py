"""Group: a set of ranks with the collectives that realhf uses. World: all processes of a run.

On NCCL, reductions and gathers are NCCL's own. On gloo they are built from point-to-point messages, which are
faster than gloo's collectives; sums run in rank order, so that all members get the same bits.
"""

import json
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from realhf.dist.activity import Activity
from realhf.dist.message_size import checked_length
from realhf.dist.shared_memory import Mapped, SharedMemory
from realhf.errors import UserError

Messages = Sequence[tuple[int, torch.Tensor]]
"""Peers, and the contiguous tensors to send to them or to receive from them."""
_OPEN_ROUNDS = 4  # It bounds what an Outbox keeps; a pipeline of calls needs fewer.
_ANY_TIME = timedelta(days=365)
_SMALL_BYTES = 1 << 16
"""Largest tensor that an all-reduce sends whole to every peer; of larger ones each peer sums a chunk."""


class PeerError(RuntimeError):
    """The error that a peer has died or stopped answering during a communication."""


@contextmanager
def _naming_peers(ranks: Sequence[int]) -> Iterator[None]:
    """Turn the transport's errors into a PeerError that names the ranks."""
    try:
        yield
    except RuntimeError as error:
        reason = _reason(error)
        peers = ", ".join(map(str, ranks))
        if "imed out" in reason:
            reason += f" (rank {peers} may itself be waiting for another)"
        who = f"rank{'s' * (len(ranks) > 1)} {peers}"
        raise PeerError(f"communication with {who} broke off: {reason}") from error


@contextmanager
def naming_store() -> Iterator[None]:
    """Turn the store's errors into a PeerError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"communication with the store broke off: {_reason(error)}") from error


@contextmanager
def _batch_threads() -> Iterator[None]:
    """Start threads under a policy by which they never interrupt a running thread on waking up (on Linux).

    Gloo's thread polls while another thread holds the lock of a connection. If it interrupted that thread, as
    happens with more ranks than cores, it would poll for a whole time slice in vain.
    """
    before = None
    with suppress(OSError, AttributeError):  # Some containers and other systems do not support it.
        before = os.sched_getscheduler(0)
        if before == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):
                os.sched_setscheduler(0, before, os.sched_param(0))


def _reason(error: RuntimeError) -> str:
    return re.sub(r"^\[.*?\] ", "", str(error).partition("\n")[0])


@dataclass
class Pending:
    """Posted messages, with the ranks at the other end of each; keeps their tensors alive."""

    works: Sequence[tuple[Any, tuple[int, ...]]] = ()
    tensors: Messages = ()
    activity: Activity | None = None

    def wait(self) -> None:
        for work, ranks in self.works:
            marked = nullcontext() if self.activity is None else self.activity.waiting(ranks)
            with marked, _naming_peers(ranks):
                work.wait()
        self.works = self.tensors = ()


class Outbox:
    """A container of posted messages, so that a sender continues while the receivers are busy.

    It waits for the messages of all but the last rounds, as gloo reports a message only to one who waits for
    it. A round is a pass over all actions of a step.
    """

    def __init__(self) -> None:
        self._rounds: deque[list[Pending]] = deque([[]])

    def add(self, message: Pending) -> None:
        self._rounds[-1].append(message)

    def next_round(self) -> None:
        self._rounds.append([])
        if len(self._rounds) > _OPEN_ROUNDS:
            self._wait_for_oldest()

    def wait(self) -> None:
        """Wait until all messages have been received."""
        while self._rounds:
            self._wait_for_oldest()
        self._rounds.append([])

    def _wait_for_oldest(self) -> None:
        for message in self._rounds.popleft():
            message.wait()


class Group:
    """An ordered set of global ranks. This process has index `index`, and peers are named by their index.

    Over gloo, messages between two ranks match in order among those with the same tag. On NCCL (`native`),
    tensors are on this rank's device, and a wait delays its current stream, not the host.
    """

    def __init__(
        self, ranks: Sequence[int], index: int, backend: Any,
        *, native: bool, activity: Activity | None = None,
    ) -> None:  # fmt: skip
        self.ranks = tuple(ranks)
        self.index = index
        self.size = len(ranks)
        self._activity = activity
        self._backend = backend
        self._native = native and backend is not None

    def exchange(self, sends: Messages, recvs: Messages, *, tag: int = 0) -> None:
        """Send and receive at the same time; messages between two ranks match in the order of the lists."""
        self.post(sends, recvs, tag=tag).wait()

    def post(self, sends: Messages, recvs: Messages, *, tag: int = 0) -> Pending:
        """Start an `exchange`; the tensors must stay untouched until `Pending.wait`.

        Tensors without elements are not sent. On gloo, posts never wait for one another. On NCCL, posts of
        one group run one after another, so two ranks that send to each other must do so in one post each.
        """
        sends, recvs = ([(i, t) for i, t in side if t.numel()] for side in (sends, recvs))
        if not sends and not recvs:
            return Pending()
        assert self._backend is not None, "a group of one has nobody to talk to"
        if self._native:
            self._backend._start_coalescing()
        works: list[tuple[Any, tuple[int, ...]]] = []
        for post, messages in ((self._backend.recv, recvs), (self._backend.send, sends)):
            for peer, tensor in messages:
                ranks = (self.ranks[peer],)
                with _naming_peers(ranks):  # Gloo raises at once if the connection is closed.
                    works.append((post([tensor], peer, tag), ranks))
        if self._native:
            with _naming_peers(self.ranks):
                works = [(self._backend._end_coalescing(), self.ranks)]
        return Pending(works, [*sends, *recvs], self._activity)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` (contiguous) over the group in place and return it."""
        if self._native:
            self._backend.allreduce([tensor]).wait()
        elif self.size == 2 or tensor.nbytes <= _SMALL_BYTES:
            tensor.copy_(reduce(torch.Tensor.add_, self.all_gather(tensor).unbind()))
        else:
            chunks = list(tensor.view(-1).tensor_split(self.size))
            self.reduce_scatter_chunks(chunks)
            self.all_gather_chunks(chunks)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the members' tensors, which have equal shapes, to shape (size, *tensor.shape)."""
        if self.size == 1:
            return tensor[None]
        out = tensor.new_empty((self.size, *tensor.shape))
        if self._native:
            self._backend._allgather_base(out, tensor.contiguous()).wait()
        else:
            out[self.index] = tensor
            self.all_gather_chunks(list(out.unbind()))
        return out

    def reduce_scatter_chunks(self, chunks: list[torch.Tensor]) -> torch.Tensor:
        """Sum chunk `index` of all members into this member's chunk, in place; chunks may differ in size."""
        self.post_reduce_scatter(chunks)()
        return chunks[self.index]

    def post_reduce_scatter(self, chunks: list[torch.Tensor]) -> Callable[[], None]:
        """Start `reduce_scatter_chunks`; chunks must stay untouched until the returned function is called."""
        if self._native:
            pending = Pending([(self._backend.reduce(c, i), self.ranks) for i, c in enumerate(chunks)], [])
            return pending.wait
        if self.size == 1:
            return Pending().wait
        mine = chunks[self.index]
        peers = self._peers()
        parts = [mine if i == self.index else torch.empty_like(mine) for i in range(self.size)]
        pending = self.post([(p, chunks[p]) for p in peers], [(p, parts[p]) for p in peers])

        def finish() -> None:
            pending.wait()
            mine.copy_(reduce(torch.Tensor.add_, parts))

        return finish

    def all_gather_chunks(self, chunks: list[torch.Tensor]) -> None:
        """Fill every chunk, in place, from the member with its index; chunks may differ in size."""
        if self._native:
            for index, chunk in enumerate(chunks):
                self._backend.broadcast(chunk, index).wait()
            return
        sends = [(peer, chunks[self.index]) for peer in self._peers()]
        self.exchange(sends, [(peer, chunks[peer]) for peer, _ in sends])

    def send_bytes(self, data: torch.Tensor, peers: Sequence[int], *, tag: int = 0) -> Pending:
        """Post any number of bytes (uint8) to some members; like the methods below, for gloo only."""
        parts = (torch.tensor([len(data)]), data)
        return self.post([(peer, part) for peer in peers for part in parts], [], tag=tag)

    def recv_bytes(self, peer: int, *, tag: int = 0) -> torch.Tensor:
        length = torch.empty(1, dtype=torch.int64)
        self.exchange([], [(peer, length)], tag=tag)
        data = torch.empty(checked_length(int(length), rank=self.ranks[peer]), dtype=torch.uint8)
        self.exchange([], [(peer, data)], tag=tag)
        return data

    def send_json(self, document: Any, peers: Sequence[int], *, tag: int = 0) -> Pending:
        return self.send_bytes(_from_json(document), peers, tag=tag)

    def recv_json(self, peer: int, *, tag: int = 0) -> Any:
        return _to_json(self.recv_bytes(peer, tag=tag))

    def all_gather_bytes(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of every member, in member order."""
        pending = self.send_bytes(data, self._peers())
        parts = {peer: self.recv_bytes(peer) for peer in self._peers()} | {self.index: data}
        pending.wait()
        return [parts[i] for i in range(self.size)]

    def all_gather_json(self, document: Any) -> list[Any]:
        """Return the JSON document of every member, in member order."""
        return [_to_json(data) for data in self.all_gather_bytes(_from_json(document))]

    def barrier(self) -> None:
        """Wait until every member has called this; on NCCL, too, the host waits."""
        self.all_reduce(torch.zeros(1, device="cuda" if self._native else "cpu")).item()

    def _peers(self) -> list[int]:
        """Return the other members, from the next one on, so that not all members send to one port first."""
        return [(self.index + i) % self.size for i in range(1, self.size)]


def _from_json(document: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)


def _to_json(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def open_store(*, rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Connect to the store of torchrun's environment. It lives through restarts, so each has its own keys."""
    timeout = timedelta(seconds=timeout_seconds)
    store, *_ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


class World:
    """All processes of the run, and their Groups, which all members must request in the same order."""

    def __init__(
        self, *, rank: int = 0, size: int = 1, device: torch.device | str = "cpu",
        store: dist.Store | None = None, timeout_seconds: float = 600.0, ranks_per_host: int | None = None,
        shared_memory: bool = True, activity: Activity | None = None,
    ) -> None:
        """Connect to all ranks. With the `activity` of a Heartbeat, messages over gloo may take any time."""
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.activity = activity or Activity()
        self.ranks_per_host = ranks_per_host or size
        self._has_heartbeat = activity is not None
        self._store = store
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}
        self._num_stores = Counter[str]()
        self.control = self.group(tuple(range(size)), purpose="control")
        if len(sizes := set(self.control.all_gather_json(self.ranks_per_host))) > 1:
            counts = " and ".join(map(str, sorted(sizes)))
            raise UserError(f"hosts run {counts} workers: start the same --nproc-per-node on each")
        self.memory = self._share_memory() if shared_memory and self.device.type == "cpu" else None
        """Memory in which the processes of one host see each other's tensors."""

    def _share_memory(self) -> SharedMemory | None:
        """Return shared memory if every rank can read that of all others on its host, else None."""
        if self.ranks_per_host == 1 or self.size == 1:
            return None
        memory = SharedMemory()
        trial = memory.zeros(1, torch.int64).fill_(self.rank)
        described = self.control.all_gather_json(memory.describe(trial))
        failed = ""
        for rank in self.ranks_on_host(self.rank):
            try:
                assert described[rank] is not None and int(Mapped().tensor(described[rank])) == rank
            except (OSError, AssertionError) as error:
                failed = f"rank {self.rank} cannot read the memory of rank {rank} ({error!r})"
        if faults := [fault for fault in self.control.all_gather_json(failed) if fault]:
            if self.rank == 0:
                print(f"realhf: {faults[0]}: parameters travel as messages", file=sys.stderr)
            return None
        return memory

    @classmethod
    def from_torchrun(
        cls, *, rank: int, size: int, local_rank: int, ranks_per_host: int | None = None,
        timeout_seconds: float, store: dist.Store | None = None, activity: Activity | None = None,
    ) -> "World":  # fmt: skip
        """Connect to the processes that torchrun's environment names, on CUDA if it is available."""
        device = torch.device("cpu")
        if torch.cuda.is_available():
            if local_rank >= (count := torch.cuda.device_count()):
                mend = "start one worker per GPU, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU"
                lacks = f"worker {local_rank} of this host has no GPU of its own, there are {count}"
                raise UserError(f"{lacks}: {mend}")
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        if size > 1 and store is None:
            store = open_store(rank=rank, size=size, timeout_seconds=timeout_seconds)
        return cls(
            rank=rank, size=size, device=device, store=store, timeout_seconds=timeout_seconds,
            ranks_per_host=ranks_per_host, activity=activity,
        )  # fmt: skip

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor on this rank's device, which other ranks of its host can read if possible."""
        if self.memory is not None:
            return self.memory.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def ranks_on_host(self, rank: int) -> range:
        """Return the ranks on the same host as a rank, including it."""
        first = rank - rank % self.ranks_per_host
        return range(first, min(first + self.ranks_per_host, self.size))

    def group(self, ranks: Sequence[int], *, purpose: str = "data") -> Group:
        """Return the group of these ranks, which include this one; the first request waits for all members.

        Groups with different purposes never mix their messages. Those for `control` and `export` use gloo.
        """
        key = (tuple(ranks), purpose)
        if key not in self._groups:
            native = self.device.type == "cuda" and purpose not in ("control", "export")
            index = key[0].index(self.rank)
            backend = self._connect(key, index, native=native) if len(ranks) > 1 else None
            self._groups[key] = Group(key[0], index, backend, native=native, activity=self.activity)
        return self._groups[key]

    def store(self, name: str) -> dist.Store:
        """Return the store that all ranks share under a name. Keys remain: use a name once or delete them."""
        assert self._store is not None, "a world of several ranks needs a store"
        return dist.PrefixStore(f"realhf/{name}/", self._store)

    def unused_store(self, name: str) -> dist.Store:
        """Return an empty store; all ranks that share it must call this equally often."""
        self._num_stores[name] += 1
        return self.store(f"{name}/{self._num_stores[name]}")

    def _connect(self, key: tuple[tuple[int, ...], str], index: int, *, native: bool) -> Any:
        """Return a new communicator, whose members find each other in the store by ranks and purpose.

        `dist.new_group` would name it by the number of groups made, which differs between ranks.
        """
        store = self.store(str(key))
        if not native:
            timeout = _ANY_TIME if self._has_heartbeat else self._timeout
            with _batch_threads(), _naming_peers([rank for rank in key[0] if rank != self.rank]):
                return dist.ProcessGroupGloo(store, index, len(key[0]), timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        backend = dist.ProcessGroupNCCL(store, index, len(key[0]), options)
        # This makes one communicator for the whole group, also for coalesced messages among some members.
        backend.eager_connect_single_device(self.device)
        return backend
