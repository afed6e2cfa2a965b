"""Moves a model's parameters between two layouts.

Between hosts and between devices, parameters travel as messages: in place where they are contiguous,
otherwise through preallocated staging memory. CPU processes on one host copy from each other's memory.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from realhf.distributed.group import PeerError, Pending
from realhf.distributed.pieces import Shards, detached, pairs, pieces_of
from realhf.distributed.world import World
from realhf.models.region import region_size
from realhf.realloc.bind import Binder, Binding, Copies, Staging
from realhf.realloc.host_memory_reads import HostMemoryReads, Side
from realhf.realloc.links import Links
from realhf.realloc.schedule import Schedule

_AVERAGED = 1 << 18
"""Number of elements of a moving average that are computed at a time."""


@dataclass(frozen=True)
class ReallocStats:
    """The traffic of one rank in one run.

    `senders` are the ranks that it receives from. `over_bound` is not measured: it is the time that the
    schedule should take divided by its lower bound, both computed for the schedule's links.
    """

    bytes_sent: int
    bytes_received: int
    over_bound: float
    senders: tuple[int, ...] = ()


def agreed_links(world: World, links: Links | None) -> Links:
    """Return the links that all ranks schedule for: those of rank 0, or assumed ones if rank 0 has None.

    Every rank must call this.
    """
    fields = world.control.all_gather_json(links and asdict(links))[0]
    if fields is None:
        return assumed_links(world)
    return replace(Links(**fields), devices_per_host=world.ranks_per_host)


def assumed_links(world: World) -> Links:
    """Return the links of usual hosts, as many ranks to a host as this world has."""
    return Links.of_hosts(world.ranks_per_host, cuda=world.device.type == "cuda")


class Reallocator:
    """Moves a model as a schedule says, any number of times.

    Every rank of either layout must construct it and call `run`, in the same order relative to its other
    group requests and messages. A run sets the target to follow_rate * source + (1 - follow_rate) * target.
    The source may be on another device. Parameters travel in `dtype`, the dtype of the target's tensors.
    `role` names the model in errors. With `posts`, ranks may call `wait_until_ready`.
    """

    def __init__(
        self, schedule: Schedule, world: World, *, dtype: torch.dtype, follow_rate: float = 1.0,
        staging: Staging | None = None, role: str = "a model", posts: bool = False,
    ) -> None:
        source = schedule.source
        target = schedule.target
        self.schedule = schedule
        self.follow_rate = follow_rate
        self._rank = world.rank
        self._device = world.device
        self.messages = schedule.messages(self._rank)
        ranks = dict.fromkeys((*source.ranks, *target.ranks)) if schedule.bundles else {}
        self._group = world.group(tuple(ranks) if self._rank in ranks else (self._rank,), purpose="realloc")
        self._ready = world.group(self._group.ranks, purpose="ready") if posts else None
        self._host_memory = HostMemoryReads(self.messages, self._group, world)
        # Ranks must forward the source's values, not the average, so these first arrive in separate memory.
        arrives_apart = follow_rate != 1 and schedule.num_waves > schedule.num_slices
        self._in_place = follow_rate == 1 or arrives_apart
        self._binder = Binder(
            schedule, self.messages, group=self._group, host_memory=self._host_memory, dtype=dtype,
            device=world.device, in_place=self._in_place)
        boxes = schedule.spec.boxes_held_by(target, self._rank) if arrives_apart else {}
        numel = sum(region_size(box) for regions in boxes.values() for box in regions)
        self._apart = pieces_of(world.zeros(numel, dtype), boxes)
        self.staging = staging or Staging(world.device)
        self._binding: Binding | None = None
        self._what = f"reallocation of {role} from {source} to {target}"
        sent, received = (ports[self._rank] for ports in schedule.port_bytes)
        senders = {m.peer for messages in self.messages for m in messages if not m.sending}
        self._stats = ReallocStats(sent, received, schedule.over_bound, tuple(sorted(senders)))

    def run(self, source: Shards | None, target: Shards | None) -> ReallocStats:
        """Move the parameters and return this rank's traffic; see `post`. The host waits for the device."""
        stats = self.post(source, target)
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return stats

    def wait_until_ready(self) -> None:
        """Wait, on the host, until all ranks of the reallocation have called this.

        On CUDA this comes before `post`, because a device that waits for a busy peer could do nothing else.
        """
        if self._ready is not None and self._ready.size > 1:
            with self._explained("start"):
                self._ready.barrier()

    @torch.no_grad()
    def post(self, source: Shards | None, target: Shards | None) -> ReallocStats:
        """Move the parameters and return this rank's traffic.

        On CUDA, all copies and messages are enqueued on the current stream, and the host does not wait.
        Messages alternate between two halves of the staging memory, in the order of the stream.
        Each rank passes its shards; passing the same mappings again saves time. Where a target is a view of
        the same elements of its source, nothing is copied. Raises PeerError when another rank fails.
        """
        self._move(source, self._apart or target)
        if target and self._apart:
            written = detached(target)
            self._mix([
                pair for name, pieces in self._apart.items() for box, _ in pieces
                for pair in pairs(written[name], pieces, box)
            ])
        return self._stats

    def _move(self, source: Shards | None, target: Shards | None) -> None:
        with self._explained("start"):
            binding = self._bind(source, target)
        write = self._copy if self._in_place else self._mix
        pending = self._post(binding, 0)
        write(binding.local)
        for number, wave in enumerate(binding.waves):
            following = self._post(binding, number + 1)
            with self._explained(f"wave {number + 1} of {len(binding.waves)}"):
                pending.wait()
            write(wave.unpack)
            pending = following
        with self._explained("end"):
            self._host_memory.finish()

    def _bind(self, source: Shards | None, target: Shards | None) -> Binding:
        """Return the binding to these tensors; make a new one only if they or other ranks' have changed."""
        binding = self._binding
        are_new = binding is None or binding.source is not source or binding.target is not target
        shards: Mapping[Side, Shards] = {"source": source or {}, "target": target or {}}
        others_are_new = self._host_memory.start(shards if are_new else None)
        if binding is None or are_new or others_are_new or binding.staging is not self.staging.bytes:
            binding = self._binding = self._binder.bind(source, target, self.staging)
        return binding

    def _post(self, binding: Binding, number: int) -> Pending:
        """Pack wave `number` and post its messages; do nothing if there is no such wave."""
        if number >= len(binding.waves):
            return Pending()
        wave = binding.waves[number]
        self._copy(wave.pack)
        with self._explained(f"wave {number + 1} of {len(binding.waves)}"):
            return self._group.post(wave.sends, wave.recvs)

    def _copy(self, copies: Copies) -> None:
        if copies:
            targets, sources = zip(*copies, strict=True)
            torch._foreach_copy_(targets, sources)

    def _mix(self, copies: Copies) -> None:
        """Average sources into targets, in chunks of rows, to bound the memory for the products."""
        for pair in copies:
            rows = max(1, _AVERAGED * len(pair[0]) // max(1, pair[0].numel()))
            for target, source in zip(*(part.split(rows) for part in pair), strict=True):
                # Rounding product and sum separately yields equal bits for local and received elements.
                source = source.to(device=target.device, dtype=target.dtype)
                target.mul_(1 - self.follow_rate).add_(source * self.follow_rate)

    @contextmanager
    def _explained(self, when: str) -> Iterator[None]:
        try:
            yield
        except PeerError as error:
            raise PeerError(f"{self._what}, {when}: {error}") from error

