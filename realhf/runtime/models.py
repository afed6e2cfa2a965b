"""ModelStore: this rank's shards of every role, one per layout in use, and their reallocation."""

import dataclasses
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from realhf.calls import OptimizerConfig
from realhf.checkpoint.hf import adapter_writer
from realhf.checkpoint.write import Beside, CheckpointWriter
from realhf.dist.group import PeerError, World
from realhf.engine.hf_factory import file_spec
from realhf.engine.native import NativeEngine
from realhf.engine.protocol import DTYPES, Engine
from realhf.engine.transformers import TransformersEngine
from realhf.errors import UserError
from realhf.experiment import Role
from realhf.layout import Layout
from realhf.param_spec import is_sharded
from realhf.realloc.bind import Staging
from realhf.realloc.execute import Reallocator, ReallocStats, agreed_links
from realhf.realloc.links import Links
from realhf.region import Region, region_size
from realhf.runtime.actions import (
    Action,
    Reallocate,
    Run,
    adapters_of,
    parameter_sets,
    parameter_specs,
    role_of,
)
from realhf.runtime.export import base_name
from realhf.runtime.offload import OffloadedWeights

ENGINES: Mapping[str, Callable[..., Engine]] = {"native": NativeEngine, "transformers": TransformersEngine}
"""By `Role.engine`."""


@dataclass(frozen=True)
class Moved:
    """A reallocation in which this rank took part; times are Unix seconds."""

    action: Reallocate
    stats: ReallocStats
    start: float
    end: float


class ModelStore:
    """Versions count the updates of a parameter set: a role's weights, or apart from them its adapters. Every
    rank counts, so that all agree on which copies are old.

    Frozen weights that are read from the same place, as those of a reference and those under adapters, are
    one memory on every rank where both have the same part of them.
    Reallocations run one after the other in a thread of their own, in the same order on all ranks.
    The weights of `offloaded` roles, which are frozen, are on the device only while they are in use.
    """

    def __init__(
        self, world: World, roles: Mapping[str, Role], homes: Mapping[str, Layout], actions: Sequence[Action],
        *, seed: int, offloaded: Collection[str] = (), links: Links | None = None,
    ) -> None:
        self._world, self._roles, self.homes = world, roles, homes
        self._sets, self._specs = parameter_sets(roles), parameter_specs(roles)
        # (Read once: while a run goes on, the directory that adapters came from may change.)
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
        self._updates = dict.fromkeys(self._sets, 0)
        self._versions = {
            (name, homes[role_of(other)]): 0
            for name in self._sets for other in self._sets if self._are_equal(name, other)
        }
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
        settings = self._roles[role]
        offload, memory = role in self._to_offload, None
        equal, adapters = self._equal_home(role, layout), self._equal_home(adapters_of(role), layout)
        if equal is not None:
            memory = self._engines[equal].flat
        elif offload:  # Not where other ranks of the host could read it: it comes and goes.
            held, dtype = self._held(role, layout), DTYPES[settings.dtype]
            memory = torch.zeros(sum(map(region_size, held.values())), dtype=dtype, device=self._world.device)
        with self._in_use(*filter(None, [equal])):
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
        """A role's home on this rank in which the same part of equal parameters lies; one's own comes first.

        Then the copy is the same memory: within a step nobody uses a copy while its role trains, and before
        it is used again it would be made equal anyway.
        """
        for other in (name, *self._sets) if name in self._sets else ():
            if self._are_equal(name, other):
                home = (role_of(other), self.homes[role_of(other)])
                if home in self._engines and self._is_same_part(name, layout, home[1], self._world.rank):
                    return home
        return None

    def _are_equal(self, name: str, other: str) -> bool:
        """Whether two parameter sets have the same values all the time, and may be one memory."""
        if name == other:
            return True
        pair = [self._sets[name], self._sets[other]]
        if {name, other} & {adapters_of(role) for role in self._roles}:
            return False
        frozen = all(s.optimizer is None and s.follows is None for s in pair)
        alike = pair[0].weights_source == pair[1].weights_source
        return frozen and alike and (other in self._to_offload) <= (name in self._to_offload)

    def _is_same_part(self, name: str, layout: Layout, home: Layout, rank: int) -> bool:
        ends = (self._specs[name].held_by(x, rank) for x in (layout, home))
        return list(next(ends).items()) == list(next(ends).items())

    def _held(self, name: str, layout: Layout) -> dict[str, Region]:
        return self._specs[name].held_by(layout, self._world.rank)

    def _load(self, role: str, *, seed: int) -> str:
        """Reads a role's home, unless all of its ranks have the weights of another role that are equal.

        Gives what is wrong with the files, if anything is.
        """
        settings, home = self._roles[role], self.homes[role]
        earlier = list(self._roles)[: list(self._roles).index(role)]
        there = any(
            self._are_equal(role, other)
            and all(rank in self.homes[other] and self._is_same_part(role, home, self.homes[other], rank)
                    for rank in home.ranks)
            for other in earlier
        )  # fmt: skip
        with self._in_use((role, home), written=None if there else (role, home)):
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
        """The one that carries out an action; None on ranks without a part."""
        key = dataclasses.replace(action, ahead=False)
        if self._world.rank not in action.source and self._world.rank not in action.target:
            return None
        if key not in self._reallocators:
            spec, role = self._specs[action.source_role], role_of(action.target_role)
            self._reallocators[key] = Reallocator(
                spec, source=action.source, target=action.target, world=self._world, role=role,
                dtype=DTYPES[self._roles[role].dtype], sharded=action.sharded, staging=self._staging,
                eta=1.0 if action.rate is None else action.rate, links=self.links,
            )  # fmt: skip
        return self._reallocators[key]

    def _is_sharded(self, name: str) -> bool:
        return self._sets[name].optimizer is not None and is_sharded(self.homes[role_of(name)])

    def _gathering(self, name: str) -> Reallocate:
        home = self.homes[role_of(name)]
        return Reallocate(name, home, name, home, sharded=True)

    def _trained(self, role: str) -> str:
        """The parameter set that a role's train steps change."""
        return role if self._roles[role].lora is None else adapters_of(role)

    def engine(self, role: str, layout: Layout) -> Engine:
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
        try:
            yield
        finally:
            for copy, one in weights.items():
                one.release(written=copy == written)

    def updated(self, role: str) -> None:
        """Notes that a train step has changed the role. Every rank calls this after every train step."""
        name = self._trained(role)
        self._updates[name] += 1
        if not self._is_sharded(name):
            self._versions[name, self.homes[role]] += 1

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
        began = time.time()
        old, new = self._shards(*ends[0], sharded=action.sharded), self._shards(*ends[1])
        try:
            with self._in_use(*ends, written=ends[1]):
                stats = reallocator.run(old, new)
        except Exception as error:
            self._failure = error
            raise
        return Moved(action, stats, began, time.time())

    def _shards(self, name: str, layout: Layout, *, sharded: bool = False) -> dict[str, torch.Tensor] | None:
        """This rank's part of a parameter set in a layout; None if it has none."""
        engine = self._engines.get((role_of(name), layout))
        if engine is None:
            return None
        if sharded:
            return engine.optimizer_shards()
        return engine.shards() if name == role_of(name) else engine.adapter_shards()

    def finish(self, name: str, layout: Layout | None = None) -> list[Moved]:
        """Waits for the reallocations under way of a role, adapters included, or of its adapters alone: to
        one layout, or all of them."""
        moved = []
        for target in list(self._running):
            if name in (target[0], role_of(target[0])) and layout in (None, target[1]):
                moved.append(self._running.pop(target).result())
        return moved

    def export(
        self, role: str, directory: Path, *, beside: Mapping[str, Beside] | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        """Writes the role's home copy as a Hugging Face directory on rank 0's host, with files `beside` and
        `fields` added to a model's config.json, which rank 0 gives. Every rank calls this; those that are
        neither rank 0 nor in the home do nothing."""
        if self._is_sharded(name := self._trained(role)):
            self.start(self._gathering(name))
        home = (role, self.homes[role])
        if home in self._engines or self._world.rank == 0:
            # It moves parameters too, so it takes its turn among the reallocations.
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
        with self._in_use(copy):
            shards = self._engines[copy].export_shards() if copy in self._engines else {}
            try:
                writer.write(directory, shards, beside=beside)
            except OSError as error:
                what = f"{error.filename or directory} cannot be written: {error.strerror}"
                raise UserError(what) from error

    def _writer(self, role: str, layout: Layout, fields: Mapping[str, object]) -> CheckpointWriter:
        """What writes the role's directories: of a model, or of adapters."""
        settings = self._roles[role]
        how: dict[str, Any] = {"dtype": DTYPES[settings.dtype], "leader": 0}
        lora = self._loras[role]
        if lora is None or lora.export_merged:
            spec = self._specs[role]
            spec = file_spec(spec) if settings.engine == "transformers" else spec
            return CheckpointWriter(spec, layout, self._world, fields=fields, **how)
        spec = self._specs[adapters_of(role)]
        return adapter_writer(spec, lora, layout, self._world, base=base_name(settings), **how)
