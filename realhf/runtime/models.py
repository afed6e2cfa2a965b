"""ModelStore: this rank's shards of every role, one per layout in use, and their reallocation."""

import dataclasses
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from realhf.dist.group import PeerError, World
from realhf.engine.native import DTYPES, NativeEngine
from realhf.engine.work import OptimizerConfig
from realhf.errors import UserError
from realhf.experiment import Role
from realhf.layout import Layout
from realhf.nn.checkpoint_write import Beside, CheckpointWriter
from realhf.param_spec import is_sharded, model_spec, region_size
from realhf.realloc.bind import Staging
from realhf.realloc.execute import Reallocator, ReallocStats
from realhf.runtime.actions import Action, Reallocate, Run
from realhf.runtime.offload import OffloadedWeights


@dataclass(frozen=True)
class Moved:
    """A reallocation in which this rank took part; times are Unix seconds."""

    action: Reallocate
    stats: ReallocStats
    start: float
    end: float


class ModelStore:
    """Versions count the updates of a role. Every rank counts, so that all agree on which copies are old.

    Reallocations run one after the other in a thread of their own, in the same order on all ranks.
    The weights of `offloaded` roles, which are frozen, are on the device only while they are in use.
    """

    def __init__(
        self, world: World, roles: Mapping[str, Role], homes: Mapping[str, Layout], actions: Sequence[Action],
        *, seed: int, offloaded: Collection[str] = (),
    ) -> None:
        self._world, self._roles, self.homes = world, roles, homes
        self._specs = {name: model_spec(role.config()) for name, role in roles.items()}
        self._engines: dict[tuple[str, Layout], NativeEngine] = {}
        self._to_offload = frozenset(offloaded)
        self._offloaded: dict[tuple[str, Layout], OffloadedWeights] = {}
        self._reallocators: dict[Reallocate, Reallocator] = {}
        self._staging = Staging(world.device)
        self._on_cuda = world.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "realloc", initializer=self._start_thread)
        self._running: dict[tuple[str, Layout], Future[Moved]] = {}
        self._failure: Exception | None = None
        self._updates = dict.fromkeys(roles, 0)
        self._versions = {(role, home): 0 for role, home in homes.items()}
        fault = ""
        for name, role in roles.items():
            self._create(name, homes[name], optimizer=role.optimizer)
            if world.rank in homes[name]:
                directory, home = None if role.random_init else Path(role.model), (name, homes[name])
                with self._in_use(home, written=home):
                    try:
                        self.engine(*home).load(directory, seed=seed)
                    except ValueError as error:
                        fault = fault or f"{name}.model: {error}"
        self._agree(fault)
        for action in actions:
            if isinstance(action, Run) and action.call.role is not None:
                self._create(action.call.role, action.layout, optimizer=None)
        for action in actions:
            if isinstance(action, Reallocate):
                self._reallocator(action)
        for name in roles:
            if self._is_sharded(name):
                self._reallocator(self._gathering(name))

    def _agree(self, fault: str) -> None:
        """Ends the run on every rank where one has a fault; the first that has one says it."""
        faults = self._world.control.all_gather_json(fault)
        if any(faults):
            first = next(rank for rank, fault in enumerate(faults) if fault)
            if self._world.rank == first:
                raise UserError(fault)
            raise PeerError(f"rank {first} cannot read its weights")

    def _start_thread(self) -> None:
        if self._on_cuda:
            torch.cuda.set_device(self._world.device)
            torch.cuda.set_stream(torch.cuda.Stream())  # Its own: calls need not wait for it.

    def _create(self, role: str, layout: Layout, *, optimizer: OptimizerConfig | None) -> None:
        if self._world.rank not in layout or (role, layout) in self._engines:
            return
        home, offload, memory = (role, self.homes[role]), role in self._to_offload, None
        shared = home in self._engines and self._holds_the_same(role, layout)
        if shared:
            memory = self._engines[home].model.flat
        elif offload:  # Not where other ranks of the host could read it: it comes and goes.
            held, dtype = self._specs[role].held_by(layout, self._world.rank), DTYPES[self._roles[role].dtype]
            memory = torch.zeros(sum(map(region_size, held.values())), dtype=dtype, device=self._world.device)
        with self._in_use(home):
            self._engines[role, layout] = NativeEngine(
                self._specs[role], layout, self._world, dtype=self._roles[role].dtype, optimizer=optimizer,
                memory=memory,
            )  # fmt: skip
        if offload and memory is not None:
            self._offloaded[role, layout] = self._offloaded[home] if shared else OffloadedWeights(memory)

    def _holds_the_same(self, role: str, layout: Layout) -> bool:
        """Whether this rank's shard is its home shard. Then the copy is the same memory: within a step nobody
        uses a copy while its role trains, and before it is used again it would be made equal anyway."""
        ends = (self._specs[role].held_by(x, self._world.rank) for x in (layout, self.homes[role]))
        return list(next(ends).items()) == list(next(ends).items())

    def _reallocator(self, action: Reallocate) -> Reallocator | None:
        """The one that carries out an action; None on ranks without a part."""
        key = dataclasses.replace(action, ahead=False)
        if self._world.rank not in action.source and self._world.rank not in action.target:
            return None
        if key not in self._reallocators:
            spec, role = self._specs[action.source_role], action.target_role
            self._reallocators[key] = Reallocator(
                spec, source=action.source, target=action.target, world=self._world, role=role,
                dtype=DTYPES[self._roles[role].dtype], sharded=action.sharded, staging=self._staging,
                eta=1.0 if action.rate is None else action.rate,
            )  # fmt: skip
        return self._reallocators[key]

    def _is_sharded(self, role: str) -> bool:
        return self._roles[role].optimizer is not None and is_sharded(self.homes[role])

    def _gathering(self, role: str) -> Reallocate:
        return Reallocate(role, self.homes[role], role, self.homes[role], sharded=True)

    def engine(self, role: str, layout: Layout) -> NativeEngine:
        return self._engines[role, layout]

    def offloaded(self, role: str, layout: Layout) -> OffloadedWeights | None:
        """What must be loaded before `engine` is used, and released behind it; None: nothing."""
        return self._offloaded.get((role, layout))

    @contextmanager
    def _in_use(
        self, *copies: tuple[str, Layout], written: tuple[str, Layout] | None = None
    ) -> Iterator[None]:
        """Keeps those of the copies on the device that would otherwise be in host memory."""
        weights = {copy: self._offloaded[copy] for copy in copies if copy in self._offloaded}
        for one in weights.values():
            one.load()
        yield
        for copy, one in weights.items():
            one.release(written=copy == written)

    def updated(self, role: str) -> None:
        """Notes that a train step has changed the role. Every rank calls this after every train step."""
        self._updates[role] += 1
        if not self._is_sharded(role):
            self._versions[role, self.homes[role]] += 1

    def start(self, action: Reallocate) -> bool:
        """Sets a reallocation going, unless the target is as new as the source, or on its way to be so; a
        follower always takes its part. Every rank calls this, and all get the same answer: whether it did.
        """
        source, target = (action.source_role, action.source), (action.target_role, action.target)
        version = self._updates[action.source_role] if action.sharded else self._versions[source]
        if action.rate is not None:
            self._updates[action.target_role] += 1
            self._versions[target] += 1
        elif self._versions.get(target, -1) >= version:
            return False
        else:
            self._versions[target] = version
        reallocator = self._reallocator(action)
        if reallocator is not None:
            assert target not in self._running, "a copy is renewed twice at once"
            ready = torch.cuda.current_stream().record_event() if self._on_cuda else None
            self._running[target] = self._thread.submit(self._carry_out, action, reallocator, ready)
        return True

    def _carry_out(
        self, action: Reallocate, reallocator: Reallocator, ready: torch.cuda.Event | None
    ) -> Moved:
        if self._failure is not None:  # The ranks are out of step: nothing that follows can be understood.
            raise self._failure
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        ends = ((action.source_role, action.source), (action.target_role, action.target))
        source, target = (self._engines.get(end) for end in ends)
        began = time.time()
        old = None
        if source is not None:
            old = source.optimizer_shards() if action.sharded else source.shards()
        try:
            with self._in_use(*ends, written=ends[1]):
                stats = reallocator.run(old, None if target is None else target.shards())
        except Exception as error:
            self._failure = error
            raise
        return Moved(action, stats, began, time.time())

    def finish(self, role: str, layout: Layout | None = None) -> list[Moved]:
        """Waits for the reallocations under way of a role's copies: to one layout, or all of them."""
        moved = []
        for target in list(self._running):
            if target[0] == role and layout in (None, target[1]):
                moved.append(self._running.pop(target).result())
        return moved

    def export(
        self, role: str, directory: Path, *, beside: Mapping[str, Beside] | None = None
    ) -> None:
        """Writes the role's home copy as a Hugging Face directory on rank 0's host, and files `beside`, which
        rank 0 gives. Every rank calls this; those that are neither rank 0 nor in the home do nothing."""
        if self._is_sharded(role):
            self.start(self._gathering(role))
        home = (role, self.homes[role])
        if home in self._engines or self._world.rank == 0:
            # It moves parameters too, so it takes its turn among the reallocations.
            ready = torch.cuda.current_stream().record_event() if self._on_cuda else None
            self._thread.submit(self._save, home, directory, beside or {}, ready).result()

    def _save(
        self, copy: tuple[str, Layout], directory: Path, beside: Mapping[str, Beside],
        ready: torch.cuda.Event | None,
    ) -> None:  # fmt: skip
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        role, layout = copy
        writer = CheckpointWriter(
            self._specs[role], layout, self._world, dtype=DTYPES[self._roles[role].dtype], leader=0)
        with self._in_use(copy):
            shards = self._engines[copy].shards() if copy in self._engines else {}
            try:
                writer.write(directory, shards, beside=beside)
            except OSError as error:
                what = f"{error.filename or directory} cannot be written: {error.strerror}"
                raise UserError(what) from error
