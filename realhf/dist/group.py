"""Group: the ranks that communicate together, and the collectives that realhf uses.

On NCCL these are NCCL's own. On gloo they are built from point-to-point messages, which are several times faster there
than gloo's collectives; sums run in rank order, so every rank of a group gets bit-identical results.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_SMALL_BYTES = 1 << 16
"""Up to this size an all-reduce sends whole tensors to every peer; above it, it works on one chunk per rank."""


class PeerError(RuntimeError):
    """A peer died or stopped answering in the middle of a communication."""


class Group:
    """An ordered set of global ranks of which this process is member number `index`. Peers are named by index."""

    def __init__(self, ranks: Sequence[int], index: int, pg: dist.ProcessGroup | None, *, native: bool) -> None:
        self.ranks = tuple(ranks)
        self.index = index
        self.size = len(self.ranks)
        self._pg = pg
        self._native = native

    def exchange(self, sends: Sequence[tuple[int, torch.Tensor]], recvs: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Sends and receives contiguous tensors, all at once, and returns when all of them are through.

        Messages between two ranks match in the order in which they are listed.
        """
        self.post(sends, recvs).wait()

    def post(self, sends: Sequence[tuple[int, torch.Tensor]], recvs: Sequence[tuple[int, torch.Tensor]]) -> "Pending":
        """Like `exchange`, but returns at once; the tensors must stay untouched until `Pending.wait`."""
        if not sends and not recvs:
            return Pending([], [])
        assert self._pg is not None, "a group of one has nobody to talk to"
        if self._native:
            ops = [dist.P2POp(dist.irecv, t, self.ranks[peer], self._pg) for peer, t in recvs]
            ops += [dist.P2POp(dist.isend, t, self.ranks[peer], self._pg) for peer, t in sends]
            return Pending(dist.batch_isend_irecv(ops), [*sends, *recvs])
        with _naming_peers(self.ranks):
            works = [self._pg.recv([t], peer, 0) for peer, t in recvs]
            works += [self._pg.send([t], peer, 0) for peer, t in sends]
        return Pending(works, [*sends, *recvs], self.ranks)

    def all_reduce(self, tensor: torch.Tensor, *, op: str = "sum") -> torch.Tensor:
        """Reduces `tensor` (contiguous) in place over the group, op `sum` or `max`, and returns it."""
        if self.size == 1:
            return tensor
        if self._native:
            dist.all_reduce(tensor, dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX, group=self._pg)
            return tensor
        flat = tensor.view(-1)
        if flat.numel() * flat.element_size() <= _SMALL_BYTES or self.size == 2:
            _reduce_in_order(self._gather_parts(flat), op, out=flat)
            return tensor
        chunks = list(flat.tensor_split(self.size))
        self._reduce_chunks(chunks, op)
        self._spread_chunks(chunks)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stacks every member's `tensor` (same shape everywhere): shape (size, *tensor.shape)."""
        if self.size == 1:
            return tensor[None]
        if self._native:
            out = tensor.new_empty((self.size, *tensor.shape))
            dist.all_gather_into_tensor(out, tensor.contiguous(), group=self._pg)
            return out
        return torch.stack(self._gather_parts(tensor.contiguous()))

    def reduce_scatter_chunks(self, chunks: list[torch.Tensor]) -> torch.Tensor:
        """Sums chunk `index` of every member into this member's chunk, in place; sizes may differ between chunks."""
        if self.size > 1:
            if self._native:
                for index, chunk in enumerate(chunks):
                    dist.reduce(chunk, self.ranks[index], group=self._pg)
            else:
                self._reduce_chunks(chunks, "sum")
        return chunks[self.index]

    def all_gather_chunks(self, chunks: list[torch.Tensor]) -> None:
        """Fills every chunk from the member of its index, in place; sizes may differ between chunks."""
        if self.size > 1:
            if self._native:
                for index, chunk in enumerate(chunks):
                    dist.broadcast(chunk, self.ranks[index], group=self._pg)
            else:
                self._spread_chunks(chunks)

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Copies the contiguous `tensor` of member `source` to all, in place."""
        if self.size > 1:
            if self._native:
                dist.broadcast(tensor, self.ranks[source], group=self._pg)
            elif self.index == source:
                self.exchange([(peer, tensor) for peer in range(self.size) if peer != source], [])
            else:
                self.exchange([], [(source, tensor)])
        return tensor

    def send_json(self, document: Any, peers: Sequence[int]) -> "Pending":
        """Posts a JSON document to some members."""
        data = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
        length = torch.tensor([data.numel()])
        return self.post([(peer, t) for peer in peers for t in (length, data)], [])

    def recv_json(self, peer: int) -> Any:
        length = torch.empty(1, dtype=torch.int64)
        self.exchange([], [(peer, length)])
        data = torch.empty(int(length), dtype=torch.uint8)
        self.exchange([], [(peer, data)])
        return json.loads(data.numpy().tobytes())

    def all_gather_json(self, document: Any) -> list[Any]:
        """Every member's JSON document, in member order."""
        pending = self.send_json(document, [p for p in range(self.size) if p != self.index]) if self.size > 1 else None
        documents = [json.loads(json.dumps(document)) if p == self.index else self.recv_json(p) for p in range(self.size)]
        if pending is not None:
            pending.wait()
        return documents

    def barrier(self) -> None:
        """Returns when every member has come here. On NCCL it waits on the host, like every reader of the result does."""
        if self.size > 1:
            device = "cuda" if self._native else "cpu"
            self.all_reduce(torch.zeros(1, device=device)).item()

    def _peers(self) -> list[int]:
        """The other members, each member starting behind itself, so that no port is everybody's first."""
        return [(self.index + i) % self.size for i in range(1, self.size)]

    def _gather_parts(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [tensor if i == self.index else torch.empty_like(tensor) for i in range(self.size)]
        peers = self._peers()
        self.exchange([(p, tensor) for p in peers], [(p, parts[p]) for p in peers])
        return parts

    def _reduce_chunks(self, chunks: list[torch.Tensor], op: str) -> None:
        mine = chunks[self.index]
        parts = [mine if i == self.index else torch.empty_like(mine) for i in range(self.size)]
        peers = self._peers()
        self.exchange([(p, chunks[p]) for p in peers], [(p, parts[p]) for p in peers])
        _reduce_in_order(parts, op, out=mine)

    def _spread_chunks(self, chunks: list[torch.Tensor]) -> None:
        peers = self._peers()
        self.exchange([(p, chunks[self.index]) for p in peers], [(p, chunks[p]) for p in peers])


class Pending:
    """Posted messages; keeps their tensors alive."""

    def __init__(self, works: Sequence[dist.Work], tensors: Sequence[Any], ranks: Sequence[int] = ()) -> None:
        self._works = works
        self._tensors = tensors
        self._ranks = ranks

    def wait(self) -> None:
        with _naming_peers(self._ranks):
            for work in self._works:
                work.wait()
        self._works, self._tensors = [], []


class _naming_peers:
    """Turns the transport's errors into a PeerError that names the ranks involved."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = ranks

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError):
            reason = str(error).splitlines()[0]
            raise PeerError(f"communication among ranks {list(self._ranks)} broke off: {reason}") from error


def _reduce_in_order(parts: list[torch.Tensor], op: str, *, out: torch.Tensor) -> None:
    total = parts[0].clone() if parts[0] is out else parts[0]
    for part in parts[1:]:
        if op == "sum":
            total.add_(part)
        else:
            torch.maximum(total, part, out=total)
    out.copy_(total)


class World:
    """All processes of the run. Hands out Groups; everybody must ask for the same groups in the same order."""

    def __init__(
        self, *, rank: int = 0, size: int = 1, device: torch.device | str = "cpu", timeout_seconds: float = 600.0
    ) -> None:
        self.rank = rank
        self.size = size
        self._timeout = timedelta(seconds=timeout_seconds)
        self.device = torch.device(device)
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}
        self.control = self.group(tuple(range(size)), purpose="control")
        """All ranks over gloo, for small metadata."""

    @classmethod
    def from_torchrun(cls, *, rank: int, size: int, local_rank: int, timeout_seconds: float) -> "World":
        """Joins the process group that torchrun's environment describes: NCCL when CUDA is there, else gloo."""
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", local_rank)
            torch.cuda.set_device(device)
        if size > 1:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
        return cls(rank=rank, size=size, device=device, timeout_seconds=timeout_seconds)

    def group(self, ranks: Sequence[int], *, purpose: str = "data") -> Group:
        """The group of these ranks, of which this process must be one; made on first use and kept.

        All members must call this in the same relative order. Groups of different purpose never mix their messages;
        those for `control` always run over gloo.
        """
        key = (tuple(ranks), purpose)
        if key not in self._groups:
            native = self.device.type == "cuda" and purpose != "control"
            index = key[0].index(self.rank)
            pg: Any = None
            if len(key[0]) > 1 and native:
                pg = dist.new_group(
                    list(key[0]), self._timeout, "nccl", use_local_synchronization=True, sort_ranks=False
                )
            elif len(key[0]) > 1:
                # new_group would name it by how many groups this rank has made, which differs between ranks.
                store = dist.PrefixStore(f"realhf/{key}/", dist.distributed_c10d._get_default_store())
                pg = dist.ProcessGroupGloo(store, index, len(key[0]), self._timeout)
            self._groups[key] = Group(key[0], index, pg, native=native)
        return self._groups[key]
