"""Reallocations: starts and finishes this rank's reallocations, which run beside its calls."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from realhf.distributed.world import World
from realhf.engine.protocol import DTYPES
from realhf.layout import Layout
from realhf.realloc.bind import Staging
from realhf.realloc.execute import Reallocator
from realhf.realloc.links import Links
from realhf.realloc.pieces import Shards
from realhf.realloc.schedule import Schedule, make_schedule
from realhf.runtime.compile.actions import Reallocate
from realhf.runtime.compile.equal_programs import require_equal_schedules
from realhf.runtime.weights.copy_versions import Copy
from realhf.runtime.weights.engine_store import EngineStore
from realhf.runtime.weights.parameter_catalog import ParameterCatalog
from realhf.runtime.weights.reallocation_runners import FinishedReallocation, InFlight, Runner


class Arrivals:
    """Reallocations whose end has not been recorded yet.

    A call waits for the weights that it needs, runs and ends; then the times of their reallocations are read
    and recorded. On CUDA the host itself does not wait, and the times are known only then.
    """

    def __init__(self) -> None:
        self._unrecorded: list[FinishedReallocation] = []
        self._new: list[FinishedReallocation] = []

    def add(self, finished: Sequence[FinishedReallocation]) -> None:
        """Add reallocations for which the next call waits."""
        self._unrecorded += finished
        self._new += finished

    def delay(self, event: dict[str, Any]) -> None:
        """Let the event of a call that has ended begin when the device had the weights."""
        arrived = max((reallocation.arrived() for reallocation in self._new), default=0.0)
        seconds = max(0.0, arrived - event["start"])
        self._new = []
        event["start"] += seconds
        event["waited"] += seconds

    def take_events(self, rank: int) -> list[dict[str, Any]]:
        """Return the events of what has been added since the last call of this method."""
        events = [reallocation.event(rank) for reallocation in self._unrecorded]
        self._unrecorded = []
        return events


class Reallocations:
    """The reallocations in which this rank takes part. All ranks start theirs in the same order."""

    def __init__(
        self, world: World, catalog: ParameterCatalog, engines: EngineStore, runner: Runner,
        actions: Iterable[Reallocate], *, links: Links,
    ) -> None:  # fmt: skip
        """Make the schedules of all `actions` that `start` may be given."""
        self._rank = world.rank
        self._catalog = catalog
        self._engines = engines
        self._runner = runner
        self._in_flight: dict[Copy, InFlight[FinishedReallocation]] = {}
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
                staging=staging, role=self._role(action), posts=runner.waits_for_ranks)

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
            assert target not in self._in_flight, "a copy is updated twice at once"
            self._in_flight[target] = self._runner.reallocate(
                action, self._reallocators[_without_ahead(action)], lambda: self._load(action))

    @contextmanager
    def _load(self, action: Reallocate) -> Iterator[tuple[Shards | None, Shards | None]]:
        """Keep this rank's shards of an action's source and target on the device, and yield them."""
        source = (action.source_set, action.source)
        target = (action.target_set, action.target)
        with self._engines.in_use(source, target, written=target):
            yield self._engines.shards(*source, sharded=action.sharded), self._engines.shards(*target)

    @property
    def in_flight(self) -> list[list[str]]:
        """The copies whose reallocations this rank has started and not yet finished, as JSON."""
        return [[name, str(layout)] for name, layout in self._in_flight]

    def finish(self, name: str, layout: Layout | None = None) -> list[FinishedReallocation]:
        """Wait for the running reallocations of a parameter set to one layout, or to all; return them.

        The name of a role includes its adapters.
        """
        finished = []
        for set_name, target in list(self._in_flight):
            if name in (set_name, self._catalog.sets[set_name].role) and layout in (None, target):
                finished.append(self._in_flight.pop((set_name, target)).result())
        return finished

    def finish_all_but(self, in_flight: Collection[Sequence[str]]) -> None:
        """Wait for all running reallocations but these (see `in_flight`)."""
        copies = [tuple(copy) for copy in in_flight]
        for name, layout in list(self._in_flight):
            if (name, str(layout)) not in copies:
                self._in_flight.pop((name, layout)).result()

    def wait_for_followers(self) -> None:
        """Wait until the moving averages at home are complete, without finishing their reallocations."""
        for (name, _), reallocation in self._in_flight.items():
            if self._catalog.sets[name].follows is not None:
                reallocation.result()


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
