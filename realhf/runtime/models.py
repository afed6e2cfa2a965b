"""ModelStore: holds this rank's shards of every role in every layout, and reallocates them."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from realhf.calls import OptimizerConfig
from realhf.checkpoint.write import Beside, CheckpointWriter
from realhf.dist.group import PeerError
from realhf.dist.world import World
from realhf.engine.base import Engine
from realhf.engine.hf_factory import file_spec
from realhf.engine.native import NativeEngine
from realhf.engine.protocol import DTYPES
from realhf.engine.transformers import TransformersEngine
from realhf.errors import UserError
from realhf.experiment import Role
from realhf.layout import Layout
from realhf.param_spec import is_sharded
from realhf.realloc.bind import Staging
from realhf.realloc.execute import Reallocator, ReallocStats, agreed_links
from realhf.realloc.links import Links
from realhf.region import region_size
from realhf.runtime.actions import (
    Action,
    Reallocate,
    Run,
    adapters_of,
    parameter_sets,
    parameter_specs,
)
from realhf.runtime.copy_versions import CopyVersions
from realhf.runtime.export import base_name
from realhf.runtime.home_state import HomeState
from realhf.runtime.offload import OffloadedWeights

ENGINES: Mapping[str, Callable[..., Engine]] = {"native": NativeEngine, "transformers": TransformersEngine}
"""Engines by the value of `Role.engine`."""


@dataclass(frozen=True)
class Moved:
    """A reallocation in which this rank took part; times are Unix seconds."""

    action: Reallocate
    stats: ReallocStats
    start: float
    end: float


class ModelStore:
    """This rank's shards of every role; `versions` tell which copies of parameter sets are outdated.

    Two frozen sets read from the same source, such as a reference and the weights under adapters, share
    memory on every rank that holds the same part of both. Reallocations run one after the other in a thread
    of their own, in the same order on all ranks. The weights of `offloaded` roles, which are frozen, are on
    the device only while they are in use.
    """

    def __init__(
        self, world: World, roles: Mapping[str, Role], homes: Mapping[str, Layout], actions: Sequence[Action],
        *, seed: int, offloaded: Collection[str] = (), links: Links | None = None,
    ) -> None:
        self._world = world
        self._roles = roles
        self.homes = homes
        self._sets = parameter_sets(roles)
        self._specs = parameter_specs(roles)
        # Read only once, as the directory of the adapters may change during a run.
        self._loras = {name: role.resolved_lora() for name, role in roles.items()}
        self._engines: dict[tuple[str, Layout], Engine] = {}
        self._to_offload = frozenset(offloaded)
        self._offloaded: dict[tuple[str, Layout], OffloadedWeights] = {}
        self._reallocators: dict[Reallocate, Reallocator] = {}
        self._staging = Staging(world.device)
        self.links = agreed_links(world, links)
        self._on_cuda = world.device.type == "cuda"
        self._thread = ThreadPoolExecutor(1, "realloc", initializer=self._start_thread)
        self._running: dict[tuple[str, Layout], Future[Moved]] = {}
        self._failure: Exception | None = None
        equal = [(name, other) for name in self._sets for other in self._sets if self._are_equal(name, other)]
        self.versions = CopyVersions(
            [(name, self._home(other)) for name, other in equal], self._sets,
            sharded=[(name, self._home(name)) for name in self._sets if self._is_sharded(name)],
        )  # fmt: skip
        fault = ""
        for name, role in roles.items():
            self._create(name, homes[name], optimizer=role.optimizer)
            if world.rank in homes[name]:
                fault = fault or self._load(name, seed=seed)
        self._agree(fault)
        for action in actions:
            if isinstance(action, Run) and action.call.role is not None:
                self._create(action.call.role, action.layout, optimizer=None)
        for action in actions:
            if isinstance(action, Reallocate):
                self._reallocator(action)
        for name in self._sets:
            if self._is_sharded(name):
                self._reallocator(self._gathering(name))

    def _agree(self, fault: str) -> None:
        """End the run on every rank if one has a fault; the first such rank raises it as UserError."""
        faults = self._world.control.all_gather_json(fault)
        if any(faults):
            first = next(rank for rank, fault in enumerate(faults) if fault)
            if self._world.rank == first:
                raise UserError(fault)
            raise PeerError(f"rank {first} cannot read its weights")

    def _start_thread(self) -> None:
        if self._on_cuda:
            torch.cuda.set_device(self._world.device)
            torch.cuda.set_stream(torch.cuda.Stream())  # A separate stream, for which calls need not wait.

    def _create(self, role: str, layout: Layout, *, optimizer: OptimizerConfig | None) -> None:
        if self._world.rank not in layout or (role, layout) in self._engines:
            return
        settings = self._roles[role]
        memory = None
        equal = self._equal_home(role, layout)
        adapters = self._equal_home(adapters_of(role), layout)
        if equal is not None:
            memory = self._engines[equal].flat
        elif role in self._to_offload:  # Not shared with other ranks: it is freed between uses.
            held = self._specs[role].held_by(layout, self._world.rank)
            size = sum(map(region_size, held.values()))
            memory = torch.zeros(size, dtype=DTYPES[settings.dtype], device=self._world.device)
        with self.in_use(*filter(None, [equal])):
            self._engines[role, layout] = ENGINES[settings.engine](
                self._specs[role], layout, self._world, dtype=settings.dtype, optimizer=optimizer,
                memory=memory, lora=self._loras[role],
                adapter_memory=None if adapters is None else self._engines[adapters].adapter_flat,
            )  # fmt: skip
        if equal is not None and equal in self._offloaded:
            self._offloaded[role, layout] = self._offloaded[equal]
        elif equal is None and memory is not None:
            self._offloaded[role, layout] = OffloadedWeights(memory)

    def _equal_home(self, name: str, layout: Layout) -> tuple[str, Layout] | None:
        """Return a home on this rank that holds the same part of equal parameters; the set's own comes first.

        The copy can then share its memory: within a step no call uses a copy while its role trains, and the
        copy would be updated before its next use anyway.
        """
        for other in (name, *self._sets) if name in self._sets else ():
            if self._are_equal(name, other):
                home = (self._sets[other].role, self._home(other))
                if home in self._engines and self._is_same_part(name, layout, home[1], self._world.rank):
                    return home
        return None

    def _are_equal(self, name: str, other: str) -> bool:
        """Return whether two parameter sets always have the same values, and may share memory."""
        if name == other:
            return True
        pair = [self._sets[name], self._sets[other]]
        if any(one.is_adapters or one.trained or one.follows is not None for one in pair):
            return False
        # Memory that is freed between uses cannot be that of a set which stays on the device.
        may_share = name in self._to_offload or other not in self._to_offload
        return may_share and pair[0].weights_source == pair[1].weights_source

    def _is_same_part(self, name: str, layout: Layout, home: Layout, rank: int) -> bool:
        ends = (self._specs[name].held_by(x, rank) for x in (layout, home))
        return list(next(ends).items()) == list(next(ends).items())

    def _load(self, role: str, *, seed: int) -> str:
        """Load a role's home, unless all of its ranks hold equal weights of an earlier role.

        Return a sentence if something is wrong with the files, else an empty string.
        """
        settings = self._roles[role]
        home = self.homes[role]
        earlier = list(self._roles)[: list(self._roles).index(role)]
        there = any(
            self._are_equal(role, other)
            and all(rank in self.homes[other] and self._is_same_part(role, home, self.homes[other], rank)
                    for rank in home.ranks)
            for other in earlier
        )  # fmt: skip
        with self.in_use((role, home), written=None if there else (role, home)):
            engine = self.engine(role, home)
            try:
                if not there:
                    engine.load_base(None if settings.random_init else Path(settings.model), seed=seed)
            except ValueError as error:
                return f"{role}.model: {error}"
            try:
                engine.load_adapters(seed=seed)
            except ValueError as error:
                return f"{role}.lora.adapter: {error}"
        return ""

    def _reallocator(self, action: Reallocate) -> Reallocator | None:
        """Return the Reallocator of an action; None on ranks that take no part in it."""
        key = dataclasses.replace(action, ahead=False)
        if self._world.rank not in action.source and self._world.rank not in action.target:
            return None
        if key not in self._reallocators:
            role = self._sets[action.target_set].role
            self._reallocators[key] = Reallocator(
                self._specs[action.source_set], source=action.source, target=action.target,
                world=self._world, role=role, dtype=DTYPES[self._roles[role].dtype],
                sharded=action.sharded, staging=self._staging,
                eta=1.0 if action.rate is None else action.rate, links=self.links,
            )  # fmt: skip
        return self._reallocators[key]

    def _is_sharded(self, name: str) -> bool:
        return self._sets[name].trained and is_sharded(self._home(name))

    def _home(self, name: str) -> Layout:
        """Return the home of a parameter set: that of its role."""
        return self.homes[self._sets[name].role]

    def _gathering(self, name: str) -> Reallocate:
        return Reallocate(name, self._home(name), name, self._home(name), sharded=True)

    def _trained(self, role: str) -> str:
        """Return the name of the parameter set that a role's train steps change."""
        return role if self._roles[role].lora is None else adapters_of(role)

    def engine(self, role: str, layout: Layout) -> Engine:
        """Return the engine that holds this rank's shards of a role in a layout."""
        return self._engines[role, layout]

    def offloaded(self, role: str, layout: Layout) -> OffloadedWeights | None:
        """Return the weights to load before `engine` is used and to release after; None if not offloaded."""
        return self._offloaded.get((role, layout))

    @contextmanager
    def in_use(
        self, *copies: tuple[str, Layout], written: tuple[str, Layout] | None = None
    ) -> Iterator[None]:
        """Keep the offloaded ones of these copies on the device for as long as the context lasts."""
        weights = {copy: self._offloaded[copy] for copy in copies if copy in self._offloaded}
        for one in weights.values():
            one.load()
        try:
            yield
        finally:
            for copy, one in weights.items():
                one.release(written=copy == written)

    def updated(self, role: str) -> None:
        """Count an update of the role. Every rank calls this after every train step."""
        self.versions.count_update((self._trained(role), self.homes[role]))

    def start(self, action: Reallocate) -> bool:
        """Start a reallocation and return True, or False if the target is up to date or in flight already.

        One that updates a follower always starts. Every rank calls this, and all get the same answer.
        """
        if not self.versions.begin(action):
            return False
        target = (action.target_set, action.target)
        reallocator = self._reallocator(action)
        if reallocator is not None:
            assert target not in self._running, "a copy is updated twice at once"
            ready = torch.cuda.current_stream().record_event() if self._on_cuda else None
            self._running[target] = self._thread.submit(self._carry_out, action, reallocator, ready)
        return True

    def _carry_out(
        self, action: Reallocate, reallocator: Reallocator, ready: torch.cuda.Event | None
    ) -> Moved:
        if self._failure is not None:  # The ranks are out of step, so later messages would be mixed up.
            raise self._failure
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        source = (action.source_set, action.source)
        target = (action.target_set, action.target)
        began = time.time()
        old = self._shards(*source, sharded=action.sharded)
        new = self._shards(*target)
        try:
            with self.in_use(source, target, written=target):
                stats = reallocator.run(old, new)
        except Exception as error:
            self._failure = error
            raise
        return Moved(action, stats, began, time.time())

    def _shards(self, name: str, layout: Layout, *, sharded: bool = False) -> dict[str, torch.Tensor] | None:
        """Return this rank's part of a parameter set in a layout; None if it has none."""
        params = self._sets[name]
        engine = self._engines.get((params.role, layout))
        if engine is None:
            return None
        if sharded:
            return engine.optimizer_shards()
        return engine.adapter_shards() if params.is_adapters else engine.shards()

    @property
    def in_flight(self) -> list[list[str]]:
        """The copies whose reallocations this rank has started and not yet finished, as JSON."""
        return [[name, str(layout)] for name, layout in self._running]

    def finish_all_but(self, in_flight: Collection[Sequence[str]]) -> None:
        """Wait for all running reallocations but these (see `in_flight`)."""
        kept = [tuple(copy) for copy in in_flight]
        for name, layout in list(self._running):
            if (name, str(layout)) not in kept:
                self._running.pop((name, layout)).result()

    def wait_for_followers(self) -> None:
        """Wait until the moving averages at home are complete, without finishing their reallocations."""
        for (name, _), running in self._running.items():
            if self._sets[name].follows is not None:
                running.result()

    def home_states(self) -> list[HomeState]:
        """Return what a checkpoint holds of every parameter set that the run changes; equal on all ranks
        but for the tensors."""
        states = []
        for name, params in self._sets.items():
            home = self._home(name)
            spec = self._specs[name]
            engine = self._engines.get((params.role, home))
            if params.trained:
                optimizer = None if engine is None else engine.optimizer
                tensors = {} if optimizer is None else optimizer.state
                states.append(HomeState(name, spec, home, True, tensors, optimizer))
            elif params.follows is not None:
                tensors = {"weights": self._shards(name, home) or {}}
                states.append(HomeState(name, spec, home, False, tensors))
        return states

    def finish(self, name: str, layout: Layout | None = None) -> list[Moved]:
        """Wait for the running reallocations of a parameter set to one layout, or to all; return them.

        The name of a role includes its adapters.
        """
        moved = []
        for set_name, target in list(self._running):
            if name in (set_name, self._sets[set_name].role) and layout in (None, target):
                moved.append(self._running.pop((set_name, target)).result())
        return moved

    def export(
        self, role: str, directory: Path, *, beside: Mapping[str, Beside] | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        """Write the role's home copy as a Hugging Face directory on rank 0's host.

        Rank 0 gives the files `beside` and the `fields` to add to a model's config.json. Every rank calls
        this; those that are neither rank 0 nor in the home do nothing.
        """
        if self._is_sharded(name := self._trained(role)):
            self.start(self._gathering(name))
        home = (role, self.homes[role])
        if home in self._engines or self._world.rank == 0:
            # An export moves parameters too, so it runs in the thread of the reallocations.
            ready = torch.cuda.current_stream().record_event() if self._on_cuda else None
            self._thread.submit(self._save, home, directory, beside or {}, fields or {}, ready).result()

    def _save(
        self, copy: tuple[str, Layout], directory: Path, beside: Mapping[str, Beside],
        fields: Mapping[str, object], ready: torch.cuda.Event | None,
    ) -> None:  # fmt: skip
        if ready is not None:
            torch.cuda.current_stream().wait_event(ready)
        role, layout = copy
        writer = self._writer(role, layout, fields)
        with self.in_use(copy):
            shards = self._engines[copy].export_shards() if copy in self._engines else {}
            try:
                writer.write(directory, shards, beside=beside)
            except OSError as error:
                what = f"{error.filename or directory} cannot be written: {error.strerror}"
                raise UserError(what) from error

    def _writer(self, role: str, layout: Layout, fields: Mapping[str, object]) -> CheckpointWriter:
        """Return the writer of the role's exports: of a model, or of adapters."""
        settings = self._roles[role]
        dtype = DTYPES[settings.dtype]
        lora = self._loras[role]
        if lora is None or lora.export_merged:
            spec = self._specs[role]
            spec = file_spec(spec) if settings.engine == "transformers" else spec
            return CheckpointWriter(spec, layout, self._world, fields=fields, dtype=dtype, leader=0)
        spec = self._specs[adapters_of(role)]
        return CheckpointWriter(
            spec, layout, self._world, lora=lora, base=base_name(settings), dtype=dtype, leader=0)
