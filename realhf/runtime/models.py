"""ModelStore: this rank's shards of every role, one per layout in use, and their reallocation."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from realhf.dist.group import World
from realhf.engine.native import DTYPES, NativeEngine
from realhf.engine.work import OptimizerConfig
from realhf.experiment import Role
from realhf.layout import Layout
from realhf.param_spec import model_spec
from realhf.realloc.execute import Reallocator, ReallocStats, Staging
from realhf.runtime.actions import Action, Reallocate, Run


class ModelStore:
    """Versions count the updates of a role. Every rank counts, so that all agree on which copies are old."""

    def __init__(
        self, world: World, roles: Mapping[str, Role], homes: Mapping[str, Layout], actions: Sequence[Action],
        *, seed: int,
    ) -> None:
        self._world, self._roles, self.homes = world, roles, homes
        self._specs = {name: model_spec(role.config()) for name, role in roles.items()}
        self._engines: dict[tuple[str, Layout], NativeEngine] = {}
        self._reallocators: dict[Reallocate, Reallocator] = {}
        self._versions = {(role, home): 0 for role, home in homes.items()}
        for name, role in roles.items():
            self._create(name, homes[name], optimizer=role.optimizer)
            if world.rank in homes[name]:
                self.engine(name, homes[name]).load(None if role.random_init else Path(role.model), seed=seed)
        for action in actions:
            if isinstance(action, Run) and action.call.role is not None:
                self._create(action.call.role, action.layout, optimizer=None)
        staging = Staging(world.device)
        for action in actions:
            if isinstance(action, Reallocate) and action not in self._reallocators and self._involves(action):
                spec, dtype = self._specs[action.source_role], DTYPES[roles[action.target_role].dtype]
                source, target = action.source, action.target
                self._reallocators[action] = Reallocator(
                    spec, source=source, target=target, world=world, dtype=dtype, staging=staging
                )

    def _create(self, role: str, layout: Layout, *, optimizer: OptimizerConfig | None) -> None:
        if self._world.rank in layout and (role, layout) not in self._engines:
            spec, dtype = self._specs[role], self._roles[role].dtype
            engine = NativeEngine(spec, layout, self._world, dtype=dtype, optimizer=optimizer)
            self._engines[role, layout] = engine

    def _involves(self, action: Reallocate) -> bool:
        return self._world.rank in action.source or self._world.rank in action.target

    def engine(self, role: str, layout: Layout) -> NativeEngine:
        return self._engines[role, layout]

    def updated(self, role: str) -> None:
        """Notes that the role's home copy has changed. Every rank calls this after every train step."""
        self._versions[role, self.homes[role]] += 1

    def is_due(self, action: Reallocate) -> bool:
        """Whether the target is older than the source; a follower always takes its part."""
        source = self._versions[action.source_role, action.source]
        return action.rate is not None or self._versions.get((action.target_role, action.target), -1) < source

    def reallocate(self, action: Reallocate) -> ReallocStats | None:
        """Carries out a reallocation that is due; None on ranks without a part. Every rank calls this."""
        stats = None
        if self._involves(action):
            ends = ((action.source_role, action.source), (action.target_role, action.target))
            engines = [self._engines.get(end) for end in ends]
            shards = [None if engine is None else engine.shards() for engine in engines]
            stats = self._reallocators[action].run(*shards, eta=1.0 if action.rate is None else action.rate)
        if action.rate is not None:
            self.updated(action.target_role)
        else:
            version = self._versions[action.source_role, action.source]
            self._versions[action.target_role, action.target] = version
        return stats

    def export(self, role: str, directory: Path) -> None:
        """Writes the role's home copy as a Hugging Face directory. Ranks outside its home do nothing."""
        if self._world.rank in self.homes[role]:
            self.engine(role, self.homes[role]).save(directory)
