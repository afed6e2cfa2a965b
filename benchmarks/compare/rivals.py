"""Six ways to move a model's weights from one layout to another, behind one interface.

Each is built once per move, which makes plans, views and memory and is not timed. Then it `run`s any number
of times. All except `raw` leave correct shards at the target. Each baseline is made as fast as its idea
allows.
"""

import functools
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.compare.move import DTYPE, Copies, Move, shape_of
from realhf.models.param_spec import Region, overlap, region_size, region_slices
from realhf.realloc.execute import Reallocator

BROADCAST_BYTES, GATHER_BYTES = 256 << 20, 16 << 20  # Bucket sizes: the fastest on gloo from 4 to 256 MiB.


class Rival:
    """A way to carry out a move."""

    def __init__(self, move: Move) -> None:
        self.move = move

    def run(self) -> None:
        raise NotImplementedError


class Ours(Rival):
    """realhf's Reallocator."""

    def run(self) -> None:
        self.move.reallocator.run(self.move.held.pieces, self.move.wanted.pieces)


class Messages(Rival):
    """realhf's Reallocator without shared memory, as between hosts."""

    def run(self) -> None:
        self.move.messenger.run(self.move.held.pieces, self.move.wanted.pieces)


class Broadcast(Rival):
    """Weight synchronisation as in most frameworks: a rank collects whole parameters and broadcasts them.

    Parameters share flat buckets, each holder sends its part of a bucket in one message, and only the ranks
    that want something take part in the broadcast.
    """

    def __init__(self, move: Move) -> None:
        self.root = root = move.source.ranks[0]
        self.group = _group(tuple(sorted({root, *move.target.ranks})))
        self.listening = move.rank == root or move.rank in move.target
        buckets = _buckets([(p.name, p.numel) for p in move.spec.params])
        self.buffer = torch.zeros(max(sum(n for _, n in b) for b in buckets) if self.listening else 0)
        pieces = [_collected(move, root, names=[name for name, _ in bucket]) for bucket in buckets]
        lacking = [Counter({holder: _total(regions) for holder, regions in p.items()}) for p in pieces]
        self.staging = torch.zeros(max(c.total() if move.rank == root else c[move.rank] for c in lacking))
        self.waves = [self._plan(move, *both) for both in zip(buckets, pieces, strict=True)]

    def _plan(self, move: Move, bucket: list[tuple[str, int]], pieces: "dict[int, list[_Box]]") -> tuple:
        """Return copies before sending, messages, copies on arrival, the bucket, copies into the target."""
        shapes = {param.name: param.shape for param in move.spec.params}
        sizes = [size if self.listening else 0 for _, size in bucket]
        flat = self.buffer[: sum(sizes)]
        whole = {name: part for (name, _), part in zip(bucket, flat.split(sizes), strict=True)}
        pack: Copies = []
        collect: Copies = []
        ops = []
        stop = 0
        for holder, regions in pieces.items():
            if move.rank not in (holder, self.root):
                continue
            start = stop
            for name, region in regions:
                part = self.staging[stop : (stop := stop + region_size(region))].view(shape_of(region))
                if move.rank == self.root:
                    collect.append((whole[name].view(shapes[name])[region_slices(region)], part))
                else:
                    pack.append((part, move.held.view(name, region)))
            receiving = move.rank == self.root
            op, peer = (dist.irecv, holder) if receiving else (dist.isend, self.root)
            ops.append(dist.P2POp(op, self.staging[start:stop], peer))
        if move.rank == self.root:
            held_regions = [(n, move.held.regions[n]) for n, _ in bucket if n in move.held.regions]
            collect += [
                (whole[n].view(shapes[n])[region_slices(r)], move.held.view(n, r)) for n, r in held_regions]
        values = whole.items() if self.listening else ()
        wanted = [copy for n, value in values for copy in move.into_target(n, _full(shapes[n]), value)]
        return pack, ops, collect, flat, wanted

    def run(self) -> None:
        for pack, ops, collect, flat, wanted in self.waves:
            _copy(pack)
            _exchange(ops)
            _copy(collect)
            if self.listening:
                dist.broadcast(flat, self.root, group=self.group)
            _copy(wanted)


class AllGather(Rival):
    """All-gathers that bring every whole parameter to every rank, which keeps its part.

    Each source rank sends an equal share of what it and its replicas hold, so that there is little padding.
    Received boxes are copied directly into the target's shards.
    """

    def __init__(self, move: Move) -> None:
        members = tuple(sorted({*move.source.ranks, *move.target.ranks}))
        self.group = _group(members)
        self.taking_part = move.rank in members
        chunk = GATHER_BYTES // DTYPE.itemsize // len(members)
        streams = {rank: _waves(boxes, chunk) for rank, boxes in _shares(move, chunk).items()}
        num_waves = max(map(len, streams.values()))
        lengths = [max(_total(s[i]) for s in streams.values() if i < len(s)) for i in range(num_waves)]
        self.mine = torch.zeros(max(lengths))
        self.all = torch.zeros(max(lengths) * len(members))
        self.waves: list[tuple[Copies, torch.Tensor, list[torch.Tensor], Copies]] = []
        for number, length in enumerate(lengths if self.taking_part else []):
            mine = self.mine[:length]
            everyones = list(self.all[: length * len(members)].split(length))
            pack, unpack = [], []
            for rank, part in zip(members, everyones, strict=True):
                boxes = streams[rank][number] if number < len(streams.get(rank, [])) else []
                stop = 0
                for name, box in boxes:
                    elements = slice(stop, stop := stop + region_size(box))
                    unpack += move.into_target(name, box, part[elements])
                    if rank == move.rank:
                        pack.append((mine[elements].view(shape_of(box)), move.held.view(name, box)))
            self.waves.append((pack, mine, everyones, unpack))

    def run(self) -> None:
        for pack, mine, everyones, unpack in self.waves:
            _copy(pack)
            dist.all_gather(everyones, mine, group=self.group)
            _copy(unpack)


class Unpacked(Rival):
    """A message per parameter and pair of ranks, as in Megatron-Core's resharding of 2025 and 2026.

    Replicas take turns sending. Contiguous data are sent and received in place; the rest is copied one by one
    through separate memory.
    """

    OPS_AT_ONCE = 4096  # Of all ranks together, which split alike, so that none waits for a later wave.

    def __init__(self, move: Move) -> None:
        self.local: Copies = []
        self.waves: list[tuple[Copies, list[dist.P2POp], Copies]] = []
        transfers = []
        turn = 0
        for target in move.target.ranks:
            for name, wanted in move.spec.held_by(move.target, target).items():
                for region, ranks in move.holders[name].items():
                    common = overlap(region, wanted)
                    if common and target not in ranks:
                        transfers.append((ranks[turn % len(ranks)], target, name, common))
                        turn += 1
                    elif common and target == move.rank:
                        self.local.append((move.wanted.view(name, common), move.held.view(name, common)))
        transfers.sort(key=lambda transfer: transfer[2])  # By name: all ranks take part in each wave.
        for start in range(0, len(transfers), self.OPS_AT_ONCE):
            self.waves.append(self._plan(move, transfers[start : start + self.OPS_AT_ONCE]))

    def _plan(self, move: Move, transfers: Sequence[tuple[int, int, str, Region]]) -> tuple:
        pack, ops, unpack = [], [], []
        for source, target, name, region in transfers:
            if move.rank not in (source, target):
                continue
            shards = move.held if move.rank == source else move.wanted
            part = shards.view(name, region)
            wire = part if part.is_contiguous() else torch.zeros(part.shape)
            if move.rank == source:
                pack += [(wire, part)] if wire is not part else []
                ops.append(dist.P2POp(dist.isend, wire, target))
            else:
                unpack += [(part, wire)] if wire is not part else []
                ops.append(dist.P2POp(dist.irecv, wire, source))
        return pack, ops, unpack

    def run(self) -> None:
        _copy(self.local)
        for pack, ops, unpack in self.waves:
            _copy(pack)
            _exchange(ops)
            _copy(unpack)


class Checkpoint(Rival):
    """torch.distributed.checkpoint in tmpfs, saved in the source's layout and loaded in the target's.

    Every region that some rank holds is an entry, which one of its holders writes in turn. A target reads the
    entries that overlap its shards, directly into the shard if the entry is inside it.
    """

    def __init__(self, move: Move) -> None:
        self.path = move.scratch
        self.saved = {}
        self.loaded = {}
        self.copies = []
        turn = 0
        for name, regions in move.holders.items():
            for region, ranks in regions.items():
                key = f"{name}@{region}"
                wanted = move.wanted.regions.get(name)
                if ranks[(turn := turn + 1) % len(ranks)] == move.rank:
                    self.saved[key] = move.held.view(name, region)
                common = wanted and overlap(region, wanted)
                if common == region:
                    self.loaded[key] = move.wanted.view(name, region)
                elif common:
                    self.loaded[key] = torch.zeros(shape_of(region))
                    self.copies += move.into_target(name, region, self.loaded[key])

    def run(self) -> None:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # It warns that an old checkpoint is overwritten.
            writer = dcp.FileSystemWriter(self.path, sync_files=False)
            dcp.save(self.saved, storage_writer=writer)
            dcp.load(self.loaded, storage_reader=dcp.FileSystemReader(self.path))
        _copy(self.copies)


class Raw(Rival):
    """Bare messages: as many bytes as ours between each pair of ranks, in one contiguous message per pair.

    It uses the shards' buffers if they are long enough; the data that arrive have no meaning.
    """

    def __init__(self, move: Move) -> None:
        elements = message_elements(move.messenger)
        sends = {target: n for (source, target), n in elements.items() if source == move.rank}
        recvs = {source: n for (source, target), n in elements.items() if target == move.rank}
        outgoing = _buffer_of(max(sends.values(), default=0), move.held.flat)
        incoming = _buffer_of(sum(recvs.values()), move.wanted.flat).split(list(recvs.values()))
        self.ops = [dist.P2POp(dist.irecv, part, peer) for peer, part in zip(recvs, incoming, strict=True)]
        self.ops += [dist.P2POp(dist.isend, outgoing[:n], peer) for peer, n in sends.items()]

    def run(self) -> None:
        _exchange(self.ops)


RIVALS: dict[str, type[Rival]] = {
    "ours": Ours, "messages": Messages, "broadcast": Broadcast, "all_gather": AllGather, "unpacked": Unpacked,
    "checkpoint": Checkpoint, "raw": Raw,
}


def message_elements(reallocator: Reallocator) -> Counter[tuple[int, int]]:
    """Return (source, target) -> elements that our schedule sends."""
    elements = Counter[tuple[int, int]]()
    for _, transfer in reallocator.schedule.transfers():
        elements[transfer.source, transfer.target] += region_size(transfer.region)
    return elements


_Box = tuple[str, Region]  # A region of the named parameter.


@functools.cache
def _group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """Return the process group of these ranks; all ranks make it together, once."""
    return dist.new_group(ranks)


def _buffer_of(num_elements: int, buffer: torch.Tensor) -> torch.Tensor:
    """Return the start of a buffer, or new memory if the buffer is too short."""
    return buffer[:num_elements] if len(buffer) >= num_elements else torch.zeros(num_elements)


def _full(shape: Sequence[int]) -> Region:
    return tuple((0, size) for size in shape)


def _total(boxes: Sequence[_Box]) -> int:
    return sum(region_size(region) for _, region in boxes)


def _copy(copies: Copies) -> None:
    for destination, source in copies:
        destination.copy_(source)


def _exchange(ops: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(ops) if ops else []:
        work.wait()


def _buckets(sizes: Sequence[tuple[str, int]]) -> list[list[tuple[str, int]]]:
    """Group neighbouring parameters (name, elements) in buckets of BROADCAST_BYTES, larger ones alone."""
    buckets: list[list[tuple[str, int]]] = [[]]
    for name, size in sizes:
        if buckets[-1] and sum(n for _, n in buckets[-1]) + size > BROADCAST_BYTES // DTYPE.itemsize:
            buckets.append([])
        buckets[-1].append((name, size))
    return buckets


def _collected(move: Move, root: int, *, names: Sequence[str]) -> dict[int, list[_Box]]:
    """Return holder -> the boxes that `root` lacks of some parameters, by the first holder of each region."""
    pieces: dict[int, list[_Box]] = {}
    for name in names:
        for region, ranks in move.holders[name].items():
            if root not in ranks:
                pieces.setdefault(ranks[0], []).append((name, region))
    return pieces


def _shares(move: Move, max_elements: int) -> dict[int, list[_Box]]:
    """Return, for each source rank, its share of the rows of every region, in boxes of limited size."""
    shares: dict[int, list[_Box]] = defaultdict(list)
    for name, regions in move.holders.items():
        for region, ranks in regions.items():
            first, last = region[0]
            for index, rank in enumerate(ranks):
                low, high = (first + (last - first) * i // len(ranks) for i in (index, index + 1))
                shares[rank] += [(name, box) for box in _rows(((low, high), *region[1:]), max_elements)]
    return shares


def _rows(region: Region, max_elements: int) -> Iterator[Region]:
    """Split a region into boxes of whole rows."""
    (low, high), *columns = region
    step = max(1, max_elements // max(1, region_size(tuple(columns))))
    for start in range(low, high, step):
        yield ((start, min(start + step, high)), *columns)


def _waves(boxes: Sequence[_Box], max_elements: int) -> list[list[_Box]]:
    """Group boxes into waves of up to `max_elements`, in their order."""
    waves: list[list[_Box]] = [[]]
    size = 0
    for box in boxes:
        size += region_size(box[1])
        if waves[-1] and size > max_elements:
            waves.append([])
            size = region_size(box[1])
        waves[-1].append(box)
    return waves
