"""Group: the ranks that communicate together, and the collectives that realhf uses.

On NCCL reductions and gathers are NCCL's own. On gloo they are built from point-to-point messages, several
times faster there than gloo's collectives; sums run in rank order, so all members get the same bits.
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
from realhf.dist.shared_memory import Mapped, SharedMemory
from realhf.errors import UserError

Messages = Sequence[tuple[int, torch.Tensor]]  # Peer and contiguous tensor to send or to receive into.
_OPEN_ROUNDS = 4  # More than any pipeline of calls needs; it only bounds what an Outbox keeps.
_ANY_TIME = timedelta(days=365)
_SMALL_BYTES = 1 << 16  # Up to here an all-reduce sends whole tensors to every peer, above it one chunk each.


class PeerError(RuntimeError):
    """A peer died or stopped answering in the middle of a communication."""


@contextmanager
def _naming_peers(ranks: Sequence[int]) -> Iterator[None]:
    """Turns the transport's errors into a PeerError that names the ranks involved."""
    try:
        yield
    except RuntimeError as error:
        reason, peers = _reason(error), ", ".join(map(str, ranks))
        if "imed out" in reason:
            reason += f" (rank {peers} may itself be waiting for another)"
        who = f"rank{'s' * (len(ranks) > 1)} {peers}"
        raise PeerError(f"communication with {who} broke off: {reason}") from error


@contextmanager
def naming_store() -> Iterator[None]:
    """Turns the store's errors into a PeerError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerError(f"communication with the store broke off: {_reason(error)}") from error


@contextmanager
def _batch_threads() -> Iterator[None]:
    """Threads that start inside never interrupt a running one when they wake up (on Linux).

    Gloo's thread polls without pause while another thread holds the lock of a connection. If it had
    interrupted that thread, as happens with more ranks than cores, it would poll in vain for a whole time
    slice.
    """
    before = None
    with suppress(OSError, AttributeError):  # Some containers, and other systems, know no such thing.
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
    """Posted messages, each with the ranks at its other end; keeps their tensors alive."""

    works: Sequence[tuple[Any, tuple[int, ...]]] = ()
    tensors: Messages = ()
    activity: Activity | None = None

    def wait(self) -> None:
        for work, ranks in self.works:
            marked = nullcontext() if self.activity is None else self.activity.waiting(ranks)
            with marked, _naming_peers(ranks):
                work.wait()
        self.works, self.tensors = (), ()


class Outbox:
    """Keeps posted messages alive, so that their sender goes on while the receivers are busy.

    Messages of the last rounds stay open; older ones are waited for, as gloo tells of a message only to those
    who wait for it. A round is a pass over all actions of a step.
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
        """Returns when all messages have been taken."""
        while self._rounds:
            self._wait_for_oldest()
        self._rounds.append([])

    def _wait_for_oldest(self) -> None:
        for message in self._rounds.popleft():
            message.wait()


class Group:
    """An ordered set of global ranks, of which this process is number `index`. Peers go by their index.

    Over gloo messages carry a tag: those between two ranks match in order among those of the same tag.

    On NCCL (`native`) tensors are on this rank's device and waiting delays its current stream, not the host.
    """

    def __init__(
        self, ranks: Sequence[int], index: int, backend: Any,
        *, native: bool, activity: Activity | None = None,
    ) -> None:  # fmt: skip
        self.ranks, self.index, self.size = tuple(ranks), index, len(ranks)
        self._activity = activity
        self._backend, self._native = backend, native and backend is not None

    def exchange(self, sends: Messages, recvs: Messages, *, tag: int = 0) -> None:
        """Sends and receives all at once; messages between two ranks match in the order of the lists."""
        self.post(sends, recvs, tag=tag).wait()

    def post(self, sends: Messages, recvs: Messages, *, tag: int = 0) -> Pending:
        """Like `exchange`, but returns at once; the tensors must stay untouched until `Pending.wait`.

        Tensors without elements are not sent.

        On gloo posts never wait for one another. On NCCL the messages of one post move together, but posts of
        one group run one after the other: two ranks that send to each other must do it in one post each.
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
                with _naming_peers(ranks):  # Of a connection that is closed gloo tells at once.
                    works.append((post([tensor], peer, tag), ranks))
        if self._native:
            with _naming_peers(self.ranks):
                works = [(self._backend._end_coalescing(), self.ranks)]
        return Pending(works, [*sends, *recvs], self._activity)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sums `tensor` (contiguous) in place over the group and returns it."""
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
        """Stacks every member's `tensor` (same shape everywhere): shape (size, *tensor.shape)."""
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
        """Sums chunk `index` of all members into this member's chunk, in place; chunks may differ in size."""
        self.post_reduce_scatter(chunks)()
        return chunks[self.index]

    def post_reduce_scatter(self, chunks: list[torch.Tensor]) -> Callable[[], None]:
        """Like `reduce_scatter_chunks`, but returns at once: what it gives must be called before the sums are
        used, and the chunks stay untouched until then."""
        if self._native:
            pending = Pending([(self._backend.reduce(c, i), self.ranks) for i, c in enumerate(chunks)], [])
            return pending.wait
        if self.size == 1:
            return _nothing
        mine, peers = chunks[self.index], self._peers()
        parts = [mine if i == self.index else torch.empty_like(mine) for i in range(self.size)]
        pending = self.post([(p, chunks[p]) for p in peers], [(p, parts[p]) for p in peers])

        def finish() -> None:
            pending.wait()
            mine.copy_(reduce(torch.Tensor.add_, parts))

        return finish

    def all_gather_chunks(self, chunks: list[torch.Tensor]) -> None:
        """Fills every chunk from the member of its index, in place; sizes of chunks may differ."""
        if self._native:
            for index, chunk in enumerate(chunks):
                self._backend.broadcast(chunk, index).wait()
            return
        peers, mine = self._peers(), chunks[self.index]
        self.exchange([(peer, mine) for peer in peers], [(peer, chunks[peer]) for peer in peers])

    def send_bytes(self, data: torch.Tensor, peers: Sequence[int], *, tag: int = 0) -> Pending:
        """Posts any number of bytes (uint8) to some members; for groups over gloo, like what follows."""
        parts = (torch.tensor([len(data)]), data)
        return self.post([(peer, part) for peer in peers for part in parts], [], tag=tag)

    def recv_bytes(self, peer: int, *, tag: int = 0) -> torch.Tensor:
        length = torch.empty(1, dtype=torch.int64)
        self.exchange([], [(peer, length)], tag=tag)
        data = torch.empty(int(length), dtype=torch.uint8)
        self.exchange([], [(peer, data)], tag=tag)
        return data

    def send_json(self, document: Any, peers: Sequence[int], *, tag: int = 0) -> Pending:
        return self.send_bytes(_from_json(document), peers, tag=tag)

    def recv_json(self, peer: int, *, tag: int = 0) -> Any:
        return _to_json(self.recv_bytes(peer, tag=tag))

    def all_gather_bytes(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Every member's bytes, in member order."""
        pending = self.send_bytes(data, self._peers())
        parts = {peer: self.recv_bytes(peer) for peer in self._peers()} | {self.index: data}
        pending.wait()
        return [parts[i] for i in range(self.size)]

    def all_gather_json(self, document: Any) -> list[Any]:
        """Every member's JSON document, in member order."""
        return [_to_json(data) for data in self.all_gather_bytes(_from_json(document))]

    def barrier(self) -> None:
        """Returns when every member has come here; on NCCL, too, the host waits."""
        self.all_reduce(torch.zeros(1, device="cuda" if self._native else "cpu")).item()

    def _peers(self) -> list[int]:
        """The other members, each member starting behind itself, so that no port is everybody's first."""
        return [(self.index + i) % self.size for i in range(1, self.size)]


def _nothing() -> None:
    """What is left to do for a group of one."""


def _from_json(document: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)


def _to_json(data: torch.Tensor) -> Any:
    return json.loads(data.numpy().tobytes())


def open_store(*, rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Connect to the store that torchrun's environment names (MASTER_ADDR, MASTER_PORT)."""
    timeout = timedelta(seconds=timeout_seconds)
    store, *_ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    return store


class World:
    """All processes of the run. Hands out Groups, for which all members must ask in the same order."""

    def __init__(
        self, *, rank: int = 0, size: int = 1, device: torch.device | str = "cpu",
        store: dist.Store | None = None, timeout_seconds: float = 600.0, ranks_per_host: int | None = None,
        shared_memory: bool = True, watched: bool = False,
    ) -> None:
        """`watched`: a Heartbeat finds dead peers, so that messages over gloo may take any time."""
        self.rank, self.size, self.device = rank, size, torch.device(device)
        self.activity, self._watched = Activity(), watched
        self.ranks_per_host = ranks_per_host or size
        self._store, self._timeout = store, timedelta(seconds=timeout_seconds)
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}
        self._num_stores = Counter[str]()
        self.control = self.group(tuple(range(size)), purpose="control")  # All ranks over gloo.
        if len(sizes := set(self.control.all_gather_json(self.ranks_per_host))) > 1:
            counts = " and ".join(map(str, sorted(sizes)))
            raise UserError(f"hosts run {counts} workers: start the same --nproc-per-node on each")
        self.memory = self._meet_in_memory() if shared_memory and self.device.type == "cpu" else None
        """Where the processes of one host see each other's tensors."""

    def _meet_in_memory(self) -> SharedMemory | None:
        """Shared memory, if every rank can read that of all others on its host."""
        if self.ranks_per_host == 1 or self.size == 1:
            return None
        memory, trial = SharedMemory(), torch.tensor(self.rank)
        mine = memory.zeros(1, trial.dtype).copy_(trial)
        shown = self.control.all_gather_json(memory.describe(mine))
        failed = ""
        for rank in self.ranks_on_host(self.rank):
            try:
                assert shown[rank] is not None and int(Mapped().tensor(shown[rank])) == rank
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
        timeout_seconds: float, store: dist.Store | None = None, watched: bool = False,
    ) -> "World":  # fmt: skip
        """Meet the processes that torchrun's environment names, on CUDA where it is available."""
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
            ranks_per_host=ranks_per_host, watched=watched,
        )  # fmt: skip

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor on this rank's device; other ranks of its host can read it where possible."""
        if self.memory is not None:
            return self.memory.zeros(numel, dtype)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def ranks_on_host(self, rank: int) -> range:
        """The ranks on the same host as a rank."""
        first = rank - rank % self.ranks_per_host
        return range(first, min(first + self.ranks_per_host, self.size))

    def group(self, ranks: Sequence[int], *, purpose: str = "data") -> Group:
        """The group of these ranks, this one among them; made on first use, which waits for all members.

        Groups of different purpose never mix their messages; those for `control` and `export` are over gloo.
        """
        key = (tuple(ranks), purpose)
        if key not in self._groups:
            native = self.device.type == "cuda" and purpose not in ("control", "export")
            index = key[0].index(self.rank)
            backend = self._connect(key, index, native=native) if len(ranks) > 1 else None
            self._groups[key] = Group(key[0], index, backend, native=native, activity=self.activity)
        return self._groups[key]

    def store(self, name: str) -> dist.Store:
        """Counters and other values by key, the same under this name for all ranks that ask. Keys outlive
        their users: a name is used once, or its keys are deleted."""
        assert self._store is not None, "a world of several ranks needs a store"
        return dist.PrefixStore(f"realhf/{name}/", self._store)

    def unused_store(self, name: str) -> dist.Store:
        """One that is empty whatever others have left behind; its users ask for it equally often."""
        self._num_stores[name] += 1
        return self.store(f"{name}/{self._num_stores[name]}")

    def _connect(self, key: tuple[tuple[int, ...], str], index: int, *, native: bool) -> Any:
        """A communicator of its own, whose members meet in the store under ranks and purpose.

        (`dist.new_group` would name it by how many groups this rank has made, which differs between ranks.)
        """
        store = self.store(str(key))
        if not native:
            with _batch_threads():
                timeout = _ANY_TIME if self._watched else self._timeout
                return dist.ProcessGroupGloo(store, index, len(key[0]), timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        backend = dist.ProcessGroupNCCL(store, index, len(key[0]), options)
        # One communicator of the whole group, also for coalesced messages among some of its members.
        backend.eager_connect_single_device(self.device)
        return backend
