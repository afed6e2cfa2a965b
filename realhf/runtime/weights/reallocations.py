"""Reallocations: starts and finishes this rank's reallocations, which run beside its calls."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from realhf.dist.world import World
from realhf.engine.protocol import DTYPES
from realhf.layout import Layout
from realhf.realloc.bind import Staging
from realhf.realloc.execute import Reallocator, ReallocStats
from realhf.realloc.links import Links
from realhf.realloc.schedule import Schedule, make_schedule
from realhf.runtime.compile.actions import Reallocate, role_of
from realhf.runtime.compile.equal_programs import require_equal_schedules
from realhf.runtime.weights.copy_versions import Copy
from realhf.runtime.weights.engine_store import EngineStore
from realhf.runtime.weights.parameter_catalog import ParameterCatalog
from realhf.runtime.weights.transfers import Posted, Running, Transfers


@dataclass(frozen=True)
class Moved:
    """A reallocation in which this rank took part; `start` is in Unix seconds."""

    action: Reallocate
    stats: ReallocStats
    start: float
    ended: Callable[[], float]
    """Returns the time of its end; on CUDA the host waits for it."""
    arrived: Callable[[], float] = lambda: 0.0
    """Returns the Unix time from which the call that needs the weights had them; 0 if the host waited."""

    def event(self, rank: int) -> dict[str, Any]:
        """Return the event of a StepRecord."""
        return {
            "rank": rank, "name": role_of(self.action.target_set), "kind": "realloc", "start": self.start,
            "transfer": f"{self.action.source}->{self.action.target}", "sent_bytes": self.stats.bytes_sent,
            "received_bytes": self.stats.bytes_received, "senders": list(self.stats.senders),
            "over_bound": self.stats.over_bound, "end": self.ended(),
        }  # fmt: skip


class Arrivals:
    """Reallocations whose end has not been recorded yet.

    A call waits for the weights that it needs, runs and ends; then the times of their reallocations are read
    and recorded. On CUDA the host itself does not wait, and the times are known only then.
    """

    def __init__(self) -> None:
        self._unrecorded: list[Moved] = []
        self._new: list[Moved] = []

    def add(self, moved: Sequence[Moved]) -> None:
        """Add reallocations for which the next call waits."""
        self._unrecorded += moved
        self._new += moved

    def delay(self, event: dict[str, Any]) -> None:
        """Let the event of a call that has ended begin when the device had the weights."""
        arrived = max((moved.arrived() for moved in self._new), default=0.0)
        seconds = max(0.0, arrived - event["start"])
        self._new = []
        event["start"] += seconds
        event["waited"] += seconds

    def take_events(self, rank: int) -> list[dict[str, Any]]:
        """Return the events of what has been added since the last call of this method."""
        events = [moved.event(rank) for moved in self._unrecorded]
        self._unrecorded = []
        return events


@dataclass
class _Posted:
    """A reallocation that has been posted, with the weights that stay on the device until it has ended."""

    action: Reallocate
    start: float
    work: Posted[ReallocStats]
    weights: ExitStack
    moved: Moved | None = field(default=None)

    def result(self) -> Moved:
        if self.moved is None:
            stats = self.work.result()
            self.moved = Moved(self.action, stats, self.start, self.work.ended, self.work.arrived)
            self.weights.close()
        return self.moved


class Reallocations:
    """The reallocations in which this rank takes part. All ranks start theirs in the same order."""

    def __init__(
        self, world: World, catalog: ParameterCatalog, engines: EngineStore, transfers: Transfers,
        actions: Iterable[Reallocate], *, links: Links,
    ) -> None:  # fmt: skip
        """Make the schedules of all `actions` that `start` may be given."""
        self._rank = world.rank
        self._catalog = catalog
        self._engines = engines
        self._transfers = transfers
        self._running: dict[Copy, Running[Moved]] = {}
        self._failure: Exception | None = None
        self._reallocators: dict[Reallocate, Reallocator] = {}
        staging = Staging(world.device)
        mine = dict.fromkeys(_without_ahead(action) for action in actions if self._takes_part(action))
        schedules = {action: self._schedule(action, links) for action in mine}
        # Before ranks meet for their groups, where they would wait for each other forever.
        require_equal_schedules(
            world, {_named(action): schedule.digest for action, schedule in schedules.items()})
        for action, schedule in schedules.items():
            self._reallocators[action] = Reallocator(
                schedule, world, dtype=self._dtype(action), follow_rate=_follow_rate(action),
                staging=staging, role=self._role(action), posts=transfers.posts)

    def _role(self, action: Reallocate) -> str:
        return self._catalog.sets[action.target_set].role

    def _dtype(self, action: Reallocate) -> torch.dtype:
        return DTYPES[self._catalog.roles[self._role(action)].weights_dtype]

    def _schedule(self, action: Reallocate, links: Links) -> Schedule:
        return make_schedule(
            self._catalog.specs[action.source_set], source=action.source, target=action.target,
            itemsize=self._dtype(action).itemsize, sharded=action.sharded, links=links,
            forward=_follow_rate(action) == 1)

    def _takes_part(self, action: Reallocate) -> bool:
        return self._rank in action.source or self._rank in action.target

    def start(self, action: Reallocate) -> None:
        """Start a reallocation, if this rank takes part in it."""
        if self._takes_part(action):
            target = (action.target_set, action.target)
            assert target not in self._running, "a copy is updated twice at once"
            if self._transfers.posts:
                self._running[target] = self._post(action)
            else:
                self._running[target] = self._transfers.submit(lambda: self._carry_out(action))

    def _carry_out(self, action: Reallocate) -> Moved:
        if self._failure is not None:  # The ranks are out of step, so later messages would be mixed up.
            raise self._failure
        source = (action.source_set, action.source)
        target = (action.target_set, action.target)
        began = time.time()
        source_shards = self._engines.shards(*source, sharded=action.sharded)
        target_shards = self._engines.shards(*target)
        try:
            with self._engines.in_use(source, target, written=target):
                stats = self._reallocators[_without_ahead(action)].run(source_shards, target_shards)
        except Exception as error:
            self._failure = error
            raise
        ended = time.time()
        return Moved(action, stats, began, lambda: ended)

    def _post(self, action: Reallocate) -> _Posted:
        """Post a reallocation from this thread, once all its ranks have come to it.

        Nothing waits on the device for a rank that is still busy. Weights that are not always on the device
        are allocated and freed on the stream of the calls.
        """
        source = (action.source_set, action.source)
        target = (action.target_set, action.target)
        began = time.time()
        reallocator = self._reallocators[_without_ahead(action)]
        with ExitStack() as stack:
            stack.enter_context(self._engines.in_use(source, target, written=target))
            shards = (self._engines.shards(*source, sharded=action.sharded), self._engines.shards(*target))
            reallocator.wait_until_ready()
            work = self._transfers.submit(lambda: reallocator.post(*shards))
            assert isinstance(work, Posted)
            return _Posted(action, began, work, stack.pop_all())

    @property
    def in_flight(self) -> list[list[str]]:
        """The copies whose reallocations this rank has started and not yet finished, as JSON."""
        return [[name, str(layout)] for name, layout in self._running]

    def finish(self, name: str, layout: Layout | None = None) -> list[Moved]:
        """Wait for the running reallocations of a parameter set to one layout, or to all; return them.

        The name of a role includes its adapters.
        """
        moved = []
        for set_name, target in list(self._running):
            if name in (set_name, self._catalog.sets[set_name].role) and layout in (None, target):
                moved.append(self._running.pop((set_name, target)).result())
        return moved

    def finish_all_but(self, in_flight: Collection[Sequence[str]]) -> None:
        """Wait for all running reallocations but these (see `in_flight`)."""
        kept = [tuple(copy) for copy in in_flight]
        for name, layout in list(self._running):
            if (name, str(layout)) not in kept:
                self._running.pop((name, layout)).result()

    def wait_for_followers(self) -> None:
        """Wait until the moving averages at home are complete, without finishing their reallocations."""
        for (name, _), running in self._running.items():
            if self._catalog.sets[name].follows is not None:
                running.result()


def _follow_rate(action: Reallocate) -> float:
    return 1.0 if action.follow_rate is None else action.follow_rate


def _without_ahead(action: Reallocate) -> Reallocate:
    """Return the action that has the same schedule and does not run ahead."""
    return replace(action, ahead=False)


def _named(action: Reallocate) -> str:
    """Return a reallocation in words, the same on all ranks and different from all others."""
    target = f" for {action.target_set}" if action.target_set != action.source_set else ""
    sharded = " (optimizer's copy)" if action.sharded else ""
    return f"{action.source_set} from {action.source}{sharded} to {action.target}{target}"
