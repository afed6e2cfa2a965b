"""World: all processes of a run with their Groups, those of a layout, and the memory that a host's share."""

import os
import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from realhf.distributed.communicators import gloo_backend
from realhf.distributed.group import Group, peer_errors
from realhf.distributed.process import WatchedProcess
from realhf.errors import UserError
from realhf.layout import Coordinate, Layout

_ANY_TIME = timedelta(days=365)
OVER_GLOO = ("control", "export", "ready", "tokens")
"""Purposes of groups that use gloo and host memory, on any device."""
_REALLOC_CTAS = 8
"""The most multiprocessors (one thread block each) that a reallocation takes from computation beside it."""
_ENABLED = hasattr(os, "memfd_create")


def open_store(*, rank: int, size: int, timeout_seconds: float) -> dist.Store:
    """Connect to the store of torchrun's environment. It lives through restarts, so each has its own keys."""
    timeout = timedelta(seconds=timeout_seconds)
    store, *_ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
    return dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def own_device(local_rank: int) -> torch.device:
    """Return the device of a worker with this number on its host: a GPU of its own if CUDA is available."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= (count := torch.cuda.device_count()):
        mend = "start one worker per GPU, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to run on the CPU"
        lacks = f"worker {local_rank} of this host has no GPU of its own, there are {count}"
        raise UserError(f"{lacks}: {mend}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


class World:
    """All processes of the run, and their Groups, which all members must request in the same order."""

    def __init__(
        self, *, rank: int = 0, size: int = 1, device: torch.device | str = "cpu",
        store: dist.Store | None = None, timeout_seconds: float = 600.0, ranks_per_host: int | None = None,
        shared_memory: bool = True, process: WatchedProcess | None = None,
    ) -> None:
        """Connect to all ranks. With the `process` of a Heartbeat, messages over gloo may take any time."""
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.process = process or WatchedProcess()
        self.ranks_per_host = ranks_per_host or size
        self._has_heartbeat = process is not None
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

    def _share_memory(self) -> "SharedMemory | None":
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
            except (RuntimeError, AssertionError) as error:
                failed = f"rank {self.rank} cannot read the memory of rank {rank} ({error!r})"
        if faults := [fault for fault in self.control.all_gather_json(failed) if fault]:
            if self.rank == 0:
                print(f"realhf: {faults[0]}: parameters travel as messages", file=sys.stderr)
            return None
        return memory

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

        Groups with different purposes never mix their messages. Those in OVER_GLOO use gloo on any device.
        """
        key = (tuple(ranks), purpose)
        if key not in self._groups:
            native = self.device.type == "cuda" and purpose not in OVER_GLOO
            index = key[0].index(self.rank)
            backend = self._connect(key, index, native=native) if len(ranks) > 1 else None
            self._groups[key] = Group(
                key[0], index, backend, native=native, process=self.process, purpose=purpose)
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
            with peer_errors([rank for rank in key[0] if rank != self.rank]):
                timeout = _ANY_TIME if self._has_heartbeat else self._timeout
                return gloo_backend(store, index, len(key[0]), timeout)
        options = dist.ProcessGroupNCCL.Options()
        # A living peer may take any time; the watcher of the heartbeat finds dead ones.
        options._timeout = _ANY_TIME if self._has_heartbeat else self._timeout
        if key[1] == "realloc":
            options.config.max_ctas = _REALLOC_CTAS
        backend = dist.ProcessGroupNCCL(store, index, len(key[0]), options)
        self.process.communicators.add(backend)
        # This makes one communicator for the whole group, which messages among some members then use, too.
        backend.eager_connect_single_device(self.device)
        return backend


# The groups of one layout


@dataclass(frozen=True)
class ParallelGroups:
    """The coordinate of a rank in a layout, and its groups.

    `all` has every rank of the layout. `ends` joins the first and the last pipeline stage; it is None on the
    stages between them and without pipelining. `ep` has the consecutive dp ranks that share one set of
    experts. `pp_back` has the ranks of `pp`, and sends sampled tokens back to the first stage. It uses gloo
    on any device, as all groups named `..._control` do; `replicas_control` has the ranks over dp and cp.
    """

    layout: Layout
    rank: int
    at: Coordinate
    tp: Group
    cp: Group
    pp: Group
    pp_back: Group
    dp_control: Group
    replicas_control: Group
    ep: Group
    ep_control: Group
    passes_control: Group
    """The ranks that pass through layers together: those of the tp groups of an ep group."""
    all: Group
    ends: Group | None
    world: World

    @classmethod
    def create(cls, world: World, layout: Layout) -> "ParallelGroups":
        """Create the groups of this rank.

        Every rank of the layout must call this, in the same order relative to its other group requests.
        """
        rank = world.rank
        coordinate = layout.coordinate(rank)
        line = {axis: next(g for g in layout.groups(axis) if rank in g) for axis in ("tp", "cp", "dp", "pp")}
        first = coordinate.dp - coordinate.dp % layout.ep
        line["ep"] = line["dp"][first : first + layout.ep]
        together = layout.grid[coordinate.pp, first : first + layout.ep, coordinate.cp].ravel().tolist()
        is_end = layout.pp > 1 and coordinate.pp in (0, layout.pp - 1)
        ends = world.group((line["pp"][0], line["pp"][-1])) if is_end else None
        return cls(
            layout=layout, rank=rank, at=coordinate, world=world, ends=ends,
            **{axis: world.group(line[axis]) for axis in ("tp", "cp", "pp", "ep")},
            pp_back=world.group(line["pp"], purpose="tokens"),
            dp_control=world.group(line["dp"], purpose="control"),
            replicas_control=world.group(layout.replicas(rank), purpose="control"),
            ep_control=world.group(line["ep"], purpose="control"),
            passes_control=world.group(together, purpose="control"),
            all=world.group(layout.ranks),
        )

    def tp_subgroup(self, indices: Sequence[int]) -> Group:
        """Return the group of some members of the tp group, which must include this rank."""
        return self.world.group(tuple(self.tp.ranks[i] for i in indices))

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pp == self.layout.pp - 1


# Tensors in memory that other processes of this host map and read without messages


class SharedMemory:
    """An allocator of shared tensors, which describes them so that other processes can map them."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[int, str]] = {}  # Length in bytes and path, by address.

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor of zeros; its memory is freed when no process uses it any more."""
        if not numel or not _ENABLED:
            return torch.zeros(numel, dtype=dtype)
        file = os.memfd_create("realhf")
        path = f"/proc/{os.getpid()}/fd/{file}"
        # The system fills its pages with zeros on first access.
        tensor = torch.from_file(path, shared=True, size=numel, dtype=dtype)
        address = tensor.data_ptr()
        self._blocks[address] = tensor.nbytes, path
        weakref.finalize(tensor.untyped_storage(), self._release, address, file)
        return tensor

    def _release(self, address: int, file: int) -> None:
        del self._blocks[address]
        os.close(file)

    def describe(self, tensor: torch.Tensor) -> dict[str, Any] | None:
        """Return a JSON description by which others map the tensor, or None if it is not in this memory."""
        starts = sorted(self._blocks)
        number = bisect_right(starts, tensor.data_ptr()) - 1
        if tensor.device.type != "cpu" or number < 0:
            return None
        length, path = self._blocks[starts[number]]
        offset = tensor.data_ptr() - starts[number]
        if offset >= length:
            return None
        return {
            "path": path, "length": length, "offset": offset,
            "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
        }


class Mapped:
    """The shared tensors of other processes, mapped from their descriptions."""

    def __init__(self) -> None:
        self._blocks: dict[str, torch.Tensor] = {}

    def tensor(self, description: Mapping[str, Any]) -> torch.Tensor:
        """Return the tensor itself, not a copy. Raises RuntimeError if this process may not read it."""
        path = description["path"]
        if path not in self._blocks:
            length = description["length"]
            self._blocks[path] = torch.from_file(path, shared=True, size=length, dtype=torch.uint8)
        dtype = getattr(torch, description["dtype"])
        storage = self._blocks[path].untyped_storage()
        offset = description["offset"] // dtype.itemsize
        return torch.empty(0, dtype=dtype).set_(storage, offset, description["shape"], description["stride"])
