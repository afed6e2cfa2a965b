"""Moves a model's parameters between two layouts.

Between hosts and between devices, parameters travel as messages: in place where they are contiguous,
otherwise through preallocated staging memory. CPU processes on one host copy from each other's memory.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace

import torch

from realhf.dist.group import PeerError, Pending
from realhf.dist.world import World
from realhf.layout import Layout
from realhf.models.param_spec import ModelSpec
from realhf.models.region import region_size
from realhf.realloc.bind import Binder, Binding, Copies, Staging
from realhf.realloc.host_memory_reads import HostMemoryReads, Side
from realhf.realloc.links import Links
from realhf.realloc.pieces import Shards, detached, pairs, pieces_of
from realhf.realloc.schedule import STAGING_BYTES, Schedule, make_schedule

_AVERAGED = 1 << 18
"""Number of elements of a moving average computed at a time, which bounds the memory for the products."""


@dataclass(frozen=True)
class ReallocStats:
    """The traffic of one rank in one run.

    `senders` are the ranks that it receives from. `over_bound` is computed from the schedule, not measured:
    its time divided by the lower bound, both for the links that it was made for.
    """

    bytes_sent: int
    bytes_received: int
    over_bound: float
    senders: tuple[int, ...] = ()


def agreed_links(world: World, known: Links | None) -> Links:
    """Return the links that all ranks schedule for: those that rank 0 knows, or assumed ones.

    Every rank must call this.
    """
    fields = world.control.all_gather_json(known and asdict(known))[0]
    if fields is None:
        return _assumed_links(world)
    return replace(Links(**fields), devices_per_host=world.ranks_per_host)


def _assumed_links(world: World) -> Links:
    return Links.of_hosts(world.ranks_per_host, cuda=world.device.type == "cuda")


def schedule_of(
    spec: ModelSpec, *, source: Layout, target: Layout, dtype: torch.dtype, links: Links,
    sharded: bool = False, follow_rate: float = 1.0, staging_bytes: int = STAGING_BYTES,
) -> Schedule:  # fmt: skip
    """Return the schedule of a Reallocator with the same arguments."""
    return make_schedule(
        spec, source=source, target=target, sharded=sharded, itemsize=dtype.itemsize, links=links,
        forward=follow_rate == 1, staging_bytes=staging_bytes,
    )  # fmt: skip


class Reallocator:
    """A mover of one model from layout `source` to layout `target`, which may run any number of times.

    Every rank of either layout must construct it and call `run`, in the same order relative to its other
    group requests and messages. A run sets the target to follow_rate * source + (1 - follow_rate) * target.
    The source may be on another device. With `sharded` it is the optimizer's copy,
    `spec.boxes_held_by(..., sharded=True)`. Parameters travel in `dtype`, the dtype of the target's tensors.
    `staging_bytes` caps the memory for messages in flight. `role` names the model in errors. `links`,
    which must be the same on all ranks, are the links that the schedule is made for; by default they are
    assumed. A `schedule` made from the same arguments is taken as it is. With `posts`, ranks may call
    `wait_until_ready`.
    """

    def __init__(
        self, spec: ModelSpec, *, source: Layout, target: Layout, world: World, dtype: torch.dtype,
        sharded: bool = False, follow_rate: float = 1.0, staging_bytes: int = STAGING_BYTES,
        staging: Staging | None = None, role: str = "a model", links: Links | None = None,
        schedule: Schedule | None = None, posts: bool = False,
    ) -> None:  # fmt: skip
        self.schedule = schedule or schedule_of(
            spec, source=source, target=target, dtype=dtype, sharded=sharded, follow_rate=follow_rate,
            links=links or _assumed_links(world), staging_bytes=staging_bytes,
        )  # fmt: skip
        self.follow_rate = follow_rate
        self._rank = world.rank
        self._device = world.device
        self.messages = self.schedule.messages(self._rank)
        ranks = dict.fromkeys((*source.ranks, *target.ranks)) if self.schedule.bundles else {}
        self._group = world.group(tuple(ranks) if self._rank in ranks else (self._rank,), purpose="realloc")
        self._ready = world.group(self._group.ranks, purpose="ready") if posts else None
        self._host_memory = HostMemoryReads(self.messages, self._group, world)
        # Ranks must forward the source's values, not the average, so these first arrive in separate memory.
        arrives_apart = follow_rate != 1 and self.schedule.num_waves > self.schedule.num_slices
        self._in_place = follow_rate == 1 or arrives_apart
        self._binder = Binder(
            self.schedule, self.messages, group=self._group, host_memory=self._host_memory, dtype=dtype,
            device=world.device, in_place=self._in_place,
        )  # fmt: skip
        boxes = spec.boxes_held_by(target, self._rank) if arrives_apart else {}
        numel = sum(region_size(box) for some in boxes.values() for box in some)
        self._apart = pieces_of(world.zeros(numel, dtype), boxes)
        self.staging = staging or Staging(world.device)
        self._binding: Binding | None = None
        self._what = f"reallocation of {role} from {source} to {target}"
        sent, received = (ports[self._rank] for ports in self.schedule.port_bytes)
        senders = {m.peer for messages in self.messages for m in messages if not m.sending}
        self._stats = ReallocStats(sent, received, self.schedule.over_bound, tuple(sorted(senders)))

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
        Each rank passes its shards; passing the same mappings again saves time. A target may be a view of its
        source's memory where both are the same elements, which then stay as they are. Raises PeerError when
        another rank fails.
        """
        self._move(source, self._apart or target)
        if target and self._apart:
            written = detached(target)
            self._mix([
                pair for name, pieces in self._apart.items() for box, _ in pieces
                for pair in pairs(written[name], pieces, box)
            ])  # fmt: skip
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
        """Average sources into targets, some rows at a time."""
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

