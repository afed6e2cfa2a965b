"""EngineStore: loads this rank's engines, one for each layout of each role, and offloads frozen weights.

The ParameterCatalog lists the parameter sets of a run, their homes, and which of them may share memory.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from realhf.calls import OptimizerConfig
from realhf.distributed.group import PeerError
from realhf.distributed.pieces import Shards
from realhf.distributed.world import World
from realhf.engine.base import DTYPES, Engine, GeneratingEngine
from realhf.engine.module import ModuleEngine
from realhf.engine.native import NativeEngine
from realhf.engine.transformers import TransformersEngine
from realhf.errors import UserError
from realhf.experiment import Role
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.param_spec import region_size
from realhf.runtime.compile.actions import (
    Action,
    Reallocate,
    Run,
    adapters_of,
    parameter_sets,
    parameter_specs,
)

EngineKey = tuple[str, Layout]
"""The role and the layout of an engine."""
_BLOCK_BYTES = 1 << 28
"""Bytes of an allocation of the host copy: a power of two, to which torch rounds pinned memory up."""


class ParameterCatalog:
    """The parameter sets of all roles; every rank has the same catalog.

    Two frozen sets read from the same source, such as a reference and the weights under adapters, are always
    equal. The weights of `offloaded` roles, which are frozen, are on the device only while they are in use.
    """

    def __init__(
        self, roles: Mapping[str, Role], homes: Mapping[str, Layout], *, offloaded: Collection[str] = ()
    ) -> None:
        self.roles = roles
        self.offloaded = frozenset(offloaded)
        self.sets = parameter_sets(roles)
        self.specs = parameter_specs(roles)
        # Read only once, as the directory of the adapters may change during a run.
        self.loras = {name: role.resolved_lora(weights=True) for name, role in roles.items()}
        self._homes = homes

    def home(self, name: str) -> Layout:
        return self._homes[self.sets[name].role]

    def trained_set(self, role: str) -> str:
        """Return the name of the parameter set that a role's train steps change."""
        return role if self.roles[role].lora is None else adapters_of(role)

    def is_sharded(self, name: str) -> bool:
        """Return whether train steps update only the optimizer's copy, of which each replica has a part."""
        return self.sets[name].is_sharded(self.home(name))

    def gathering(self, name: str) -> Reallocate:
        """Return the reallocation that updates the home of a sharded set from the optimizer's copy."""
        return Reallocate(name, self.home(name), name, self.home(name), sharded=True)

    def may_share(self, name: str, other: str) -> bool:
        """Return whether copies of `name` may use the memory of `other`, as both always have equal values."""
        if name == other:
            return True
        pair = [self.sets[name], self.sets[other]]
        if any(params.is_adapters or params.trained or params.follows is not None for params in pair):
            return False
        if any(params.engine == "megatron" for params in pair):
            return False  # Megatron-Core allocates its own memory.
        # A set that stays on the device cannot use memory that is freed between uses.
        stays_usable = name in self.offloaded or other not in self.offloaded
        return stays_usable and pair[0].weights_source == pair[1].weights_source

    def is_same_part(self, name: str, layout: Layout, other: Layout, *, rank: int) -> bool:
        """Return whether a rank holds the same regions, in the same order, of a set in both layouts."""
        if layout.form != other.form:
            return False
        spec = self.specs[name]
        return list(spec.held_by(layout, rank).items()) == list(spec.held_by(other, rank).items())

    def is_loaded_earlier(self, role: str) -> bool:
        """Return whether all ranks of a role's home hold equal weights, loaded for an earlier role."""
        home = self.home(role)
        earlier = list(self.roles)[: list(self.roles).index(role)]
        equal_homes = [self.home(other) for other in earlier if self.may_share(role, other)]
        return any(
            all(rank in other and self.is_same_part(role, home, other, rank=rank) for rank in home.ranks)
            for other in equal_homes
        )


class OffloadedWeights:
    """A flat tensor of weights whose device memory exists only while it is in use.

    Views of the tensor stay valid, but new ones can be made only while it is in use. Until they are first
    written, the weights are undefined.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        self._storage = flat.untyped_storage()
        self.num_bytes = self._storage.nbytes()
        self._host_copy: list[torch.Tensor] = []
        """The weights block by block, once they have been written."""
        self._num_users = 0
        self._storage.resize_(0)

    def load(self) -> None:
        """Copy the weights to the device, unless they are there; every `load` needs a `release`.

        On CUDA the host does not wait: later work on the current stream sees the weights.
        """
        self._num_users += 1
        if self._num_users == 1:
            self._storage.resize_(self.num_bytes)
            for block, copy in zip(self._blocks(), self._host_copy, strict=False):
                block.copy_(copy, non_blocking=True)

    def release(self, *, written: bool = False) -> None:
        """Free the device memory if this was the last user; `written` saves changed weights first."""
        if written:
            pins = self._flat.is_cuda
            blocks = self._blocks()
            self._host_copy = self._host_copy or [
                torch.empty_like(block, device="cpu", pin_memory=pins) for block in blocks]
            for block, copy in zip(blocks, self._host_copy, strict=True):
                copy.copy_(block)
        self._num_users -= 1
        if self._num_users == 0:
            self._storage.resize_(0)

    def _blocks(self) -> tuple[torch.Tensor, ...]:
        """Return the weights on the device in blocks, which share no allocation on the host."""
        return self._flat.split(_BLOCK_BYTES // self._flat.itemsize)


def engine_class(name: str) -> Callable[..., Engine]:
    """Return the engine of this name, a value of `Role.engine`; Megatron-Core is imported only on demand."""
    if name == "megatron":
        from realhf.engine.megatron.engine import MegatronEngine

        return MegatronEngine
    return {"native": NativeEngine, "transformers": TransformersEngine, "module": ModuleEngine}[name]


class EngineStore:
    """This rank's engines. Two engines that hold the same part of equal parameter sets share its memory."""

    def __init__(self, world: World, catalog: ParameterCatalog) -> None:
        self._world = world
        self._catalog = catalog
        self._engines: dict[EngineKey, Engine] = {}
        self._offloaded: dict[EngineKey, OffloadedWeights] = {}

    def create_homes(self, *, seed: int) -> None:
        """Construct and load the engines at home. If a rank cannot read its weights, every rank raises."""
        fault = ""
        for role, settings in self._catalog.roles.items():
            home = self._catalog.home(role)
            self._create(role, home, optimizer=settings.optimizer)
            if self._world.rank in home:
                fault = fault or self._load(role, seed=seed)
        self._raise_on_every_rank(fault)

    def create_copies(self, actions: Sequence[Action]) -> None:
        """Construct the other engines that run these actions; reallocations will fill in their weights."""
        for action in actions:
            if isinstance(action, Run):
                for role in action.call.roles:
                    self._create(role, action.layout, optimizer=None)

    def _create(self, role: str, layout: Layout, *, optimizer: OptimizerConfig | None) -> None:
        key = (role, layout)
        if self._world.rank not in layout or key in self._engines:
            return
        catalog = self._catalog
        settings = catalog.roles[role]
        memory = None  # The engine allocates its own.
        is_int8 = layout.form == "int8"
        equal = None if is_int8 else self._equal_home(role, layout)
        if equal is not None:
            memory = self._engines[equal].flat
            if equal in self._offloaded:
                self._offloaded[key] = self._offloaded[equal]
        elif role in catalog.offloaded and not is_int8:
            memory = self._unshared_memory(role, layout)
            self._offloaded[key] = OffloadedWeights(memory)
        adapters = self._equal_home(adapters_of(role), layout)
        with self.in_use(key):
            self._engines[key] = engine_class("native" if layout.form else settings.engine)(
                catalog.specs[role], layout, self._world, dtype=settings.weights_dtype, optimizer=optimizer,
                memory=memory, lora=catalog.loras[role],
                adapter_memory=None if adapters is None else self._engines[adapters].adapter_flat,
                float32_head=settings.float32_head)

    def _unshared_memory(self, role: str, layout: Layout) -> torch.Tensor:
        """Return a flat tensor for weights that other ranks cannot read, so that it may be freed."""
        regions = self._catalog.specs[role].held_by(layout, self._world.rank)
        dtype = DTYPES[self._catalog.roles[role].weights_dtype]
        return torch.zeros(sum(map(region_size, regions.values())), dtype=dtype, device=self._world.device)

    def _equal_home(self, name: str, layout: Layout) -> EngineKey | None:
        """Return a home on this rank that holds the same part of equal parameters, preferably the set's own.

        The copy can then share its memory: within a step no call uses a copy while its role trains, and the
        copy would be updated before its next use anyway.
        """
        catalog = self._catalog
        if name not in catalog.sets:  # The role has no adapters.
            return None
        if not layout.form and catalog.sets[name].engine == "megatron":
            return None  # Megatron-Core allocates its own memory.
        for other in (name, *catalog.sets):
            home = (catalog.sets[other].role, catalog.home(other))
            if not catalog.may_share(name, other) or home not in self._engines:
                continue
            if catalog.is_same_part(name, layout, home[1], rank=self._world.rank):
                return home
        return None

    def _load(self, role: str, *, seed: int) -> str:
        """Load a role's home, unless all of its ranks hold equal weights of an earlier role.

        Return a sentence if something is wrong with the files, else an empty string.
        """
        settings = self._catalog.roles[role]
        home = (role, self._catalog.home(role))
        is_loaded = self._catalog.is_loaded_earlier(role)
        with self.in_use(home, written=None if is_loaded else home):
            engine = self._engines[home]
            try:
                if not is_loaded:
                    source = None if settings.random_init else settings.model_path(weights=True)
                    engine.load_base(source, seed=seed)
            except ValueError as error:
                return f"{role}.model: {error}"
            try:
                engine.load_adapters(seed=seed)
            except ValueError as error:
                return f"{role}.lora.adapter: {error}"
        return ""

    def _raise_on_every_rank(self, fault: str) -> None:
        """Raise if any rank has a fault: UserError on the first such rank, PeerError on the others."""
        faults = self._world.control.all_gather_json(fault)
        if any(faults):
            first = next(rank for rank, fault in enumerate(faults) if fault)
            if self._world.rank == first:
                raise UserError(fault)
            raise PeerError(f"rank {first} cannot read its weights")

    def __getitem__(self, key: EngineKey) -> Engine:
        """Return the engine that holds this rank's shards of a role in a layout."""
        return self._engines[key]

    def beside(self, call: FunctionCall, layout: Layout) -> dict[str, Engine]:
        """Return the engines of the roles that a call reads, by role."""
        return {role: self._engines[role, layout] for role in call.reads}

    def generating(self, key: EngineKey) -> GeneratingEngine:
        engine = self._engines[key]
        assert isinstance(engine, GeneratingEngine), f"the engine of {key[0]} does not generate"
        return engine

    def get(self, key: EngineKey) -> Engine | None:
        """Return the engine, or None if this rank is not in the layout."""
        return self._engines.get(key)

    def offloaded(self, key: EngineKey) -> OffloadedWeights | None:
        """Return the weights to load before an engine is used and to release after; None if not offloaded."""
        return self._offloaded.get(key)

    @contextmanager
    def in_use(self, *keys: EngineKey, written: EngineKey | None = None) -> Iterator[None]:
        """Keep the offloaded weights of these engines on the device for as long as the context lasts."""
        weights_of = {key: self._offloaded[key] for key in keys if key in self._offloaded}
        for weights in weights_of.values():
            weights.load()
        try:
            yield
        finally:
            for key, weights in weights_of.items():
                weights.release(written=key == written)

    def release(self, what: Literal["gradients", "cache", "graphs"], *, besides: EngineKey | None) -> None:
        """Free a part of the memory of all engines but one (see `Engine.release`)."""
        for key, engine in self._engines.items():
            if key != besides:
                engine.release(what)

    def cached_bytes(self, *, besides: EngineKey | None) -> dict[str, int]:
        """Return the bytes that all engines but one hold for their next generation, by part."""
        parts: dict[str, int] = {}
        for key, engine in self._engines.items():
            for part, size in engine.caches.items() if key != besides else ():
                parts[part] = parts.get(part, 0) + size
        return parts

    @property
    def mapped_bytes(self) -> int:
        """The bytes of the device that engines hold apart from torch's allocator."""
        return sum(engine.mapped_bytes for engine in self._engines.values())

    def memory(self) -> dict[str, int]:
        """Return the bytes of each part on this rank, as the planner names the parts.

        Memory that engines share counts for the first of them.
        """
        parts: dict[str, int] = {}
        seen: set[int] = set()
        for (role, layout), engine in self._engines.items():
            is_home = layout == self._catalog.home(role)
            for part, size in engine.memory().items():
                name = f"{role} {part}" if part != "cache" else part
                if part in ("weights", "adapters"):
                    flat = engine.flat if part == "weights" else engine.adapter_flat
                    if flat.data_ptr() in seen:
                        continue
                    seen.add(flat.data_ptr())
                    name = f"{role} weights" if is_home else f"{role} copy"
                parts[name] = parts.get(name, 0) + size
        return parts

    def cache_limits(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the agreed limits of caches as JSON, by role, layout and call."""
        limits: dict[str, dict[str, dict[str, int]]] = {}
        for (role, layout), engine in self._engines.items():
            if isinstance(engine, GeneratingEngine) and engine.cache_limits.agreed:
                limits.setdefault(role, {})[str(layout)] = engine.cache_limits.agreed
        return limits

    def settle_cache_limits(self) -> None:
        """Agree anew on the limits that ranks agreed on before all calls of a step had run: by now, training
        and communicators have what they keep. All ranks call this at the end of the first step."""
        for what in ("gradients", "cache"):
            self.release(what, besides=None)
        for engine in self._engines.values():
            if isinstance(engine, GeneratingEngine):
                engine.settle_cache_limits()

    def restore_cache_limits(self, limits: Mapping[str, Mapping[str, Mapping[str, int]]]) -> None:
        """Take over the limits of a checkpoint under the same plan."""
        for (role, layout), engine in self._engines.items():
            if isinstance(engine, GeneratingEngine):
                engine.cache_limits.restore(limits.get(role, {}).get(str(layout), {}))

    def shards(self, name: str, layout: Layout, *, sharded: bool = False) -> Shards | None:
        """Return this rank's part of a parameter set in a layout, or of the optimizer's copy if `sharded`."""
        params = self._catalog.sets[name]
        engine = self.get((params.role, layout))
        if engine is None:
            return None
        if sharded:
            return engine.optimizer_shards()
        return engine.adapter_shards() if params.is_adapters else engine.shards()
