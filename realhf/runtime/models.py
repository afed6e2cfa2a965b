"""ModelStore: the shards of every role on this rank, one per layout in which the role is used, and their
reallocation.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from realhf.dist.group import World
from realhf.engine.native import DTYPES, NativeEngine
from realhf.experiment import Role
from realhf.layout import Layout
from realhf.param_spec import model_spec
from realhf.realloc.execute import Reallocator, ReallocStats, Staging
from realhf.runtime.actions import Action, Reallocate, Run


class ModelStore:
    """Versions count the updates of a role; they run the same on every rank, whether it holds the role or
    not, so that all agree on which copies are out of date.
    """

    def __init__(
        self,
        world: World,
        roles: Mapping[str, Role],
        homes: Mapping[str, Layout],
        actions: Sequence[Action],
        *,
        seed: int,
    ) -> None:
        self._world = world
        self._roles = roles
        self.homes = homes
        self._engines: dict[tuple[str, Layout], NativeEngine] = {}
        self._reallocators: dict[Reallocate, Reallocator] = {}
        self._versions: dict[tuple[str, Layout], int] = {(role, home): 0 for role, home in homes.items()}
        specs = {name: model_spec(role.config()) for name, role in roles.items()}
        for name, role in roles.items():
            self._create(name, role, homes[name], specs, optimizer=True)
            if world.rank in homes[name]:
                directory = None if role.random_init else Path(role.model)
                self._engines[name, homes[name]].load(directory, seed=seed)
        for action in actions:
            if isinstance(action, Run) and action.call.role is not None:
                self._create(action.call.role, roles[action.call.role], action.layout, specs, optimizer=False)
        staging = Staging(world.device)
        for action in dict.fromkeys(a for a in actions if isinstance(a, Reallocate)):
            if self._involves(action):
                self._reallocators[action] = Reallocator(
                    specs[action.source_role],
                    source=action.source,
                    target=action.target,
                    world=world,
                    dtype=DTYPES[roles[action.target_role].dtype],
                    staging=staging,
                )

    def _create(self, name: str, role: Role, layout: Layout, specs: Mapping, *, optimizer: bool) -> None:
        if self._world.rank in layout and (name, layout) not in self._engines:
            config = role.optimizer if optimizer else None
            self._engines[name, layout] = NativeEngine(
                specs[name], layout, self._world, dtype=role.dtype, optimizer=config
            )

    def _involves(self, action: Reallocate) -> bool:
        return self._world.rank in action.source or self._world.rank in action.target

    def engine(self, role: str, layout: Layout) -> NativeEngine:
        return self._engines[role, layout]

    def updated(self, role: str) -> None:
        """Notes that the role's home copy has changed. Every rank calls this after every train step."""
        self._versions[role, self.homes[role]] += 1

    def is_due(self, action: Reallocate) -> bool:
        """Whether the target is older than the source; a follower always takes its part."""
        if action.rate is not None:
            return True
        source = self._versions[action.source_role, action.source]
        return self._versions.get((action.target_role, action.target), -1) < source

    def reallocate(self, action: Reallocate) -> ReallocStats | None:
        """Carries out a reallocation that is due; None on ranks that hold neither side. Every rank calls
        this.
        """
        stats = None
        if self._involves(action):
            source = self._engines.get((action.source_role, action.source))
            target = self._engines.get((action.target_role, action.target))
            stats = self._reallocators[action].run(
                None if source is None else source.shards(),
                None if target is None else target.shards(),
                eta=1.0 if action.rate is None else action.rate,
            )
        if action.rate is not None:
            self.updated(action.target_role)
        else:
            self._versions[action.target_role, action.target] = self._versions[
                action.source_role, action.source
            ]
        return stats

    def export(self, role: str, directory: Path) -> None:
        """Writes the role's home copy as a Hugging Face directory. Ranks outside its home do nothing."""
        if self._world.rank in self.homes[role]:
            self.engine(role, self.homes[role]).save(directory)
