"""ModelStore: the copies of all roles on this rank, and how they are kept up to date."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from realhf.checkpoint.hf import Beside
from realhf.distributed.world import World
from realhf.models.param_spec import Placement
from realhf.models.region import Region
from realhf.realloc.execute import agreed_links
from realhf.runtime.compile.actions import Action, Reallocate
from realhf.runtime.compile.program import Program
from realhf.runtime.weights.copy_versions import CopyVersions
from realhf.runtime.weights.engine_store import EngineStore
from realhf.runtime.weights.home_state import HomeState
from realhf.runtime.weights.parameter_catalog import ParameterCatalog
from realhf.runtime.weights.reallocations import Reallocations, make_runner
from realhf.runtime.weights.weight_export import WeightExporter


class ModelStore:
    """The copies of all roles: `engines` hold them, `reallocations` update them, `versions` tell their age.

    The weights of offloaded roles, which are frozen, are on the device only while they are in use. All ranks
    construct the store alike.
    """

    def __init__(self, world: World, program: Program) -> None:
        catalog = ParameterCatalog(program.roles, program.homes, offloaded=program.offloaded)
        actions = program.actions
        self._rank = world.rank
        self._catalog = catalog
        self.links = agreed_links(world, program.links)
        self.versions = _versions_at_start(catalog)
        self.engines = EngineStore(world, catalog)
        self.engines.create_homes(seed=program.experiment.seed)
        self.engines.create_copies(actions)
        self._runner = make_runner(world.device)
        self.reallocations = Reallocations(
            world, catalog, self.engines, self._runner, _reallocations_of(actions, catalog),
            links=self.links)
        self._exporter = WeightExporter(world, catalog, self.engines)
        megatron = [name for name, p in catalog.sets.items() if p.trained and p.engine == "megatron"]
        self._placements = {name: self._exchanged_placements(world, name) for name in megatron}
        """Parameter set -> the ranks that own each of its boxes in Megatron-Core's optimizer."""

    def _exchanged_placements(self, world: World, name: str) -> list[Placement]:
        """Return which ranks own each box of a set in its optimizer. Every rank must call this."""
        engine = self.engines.get((self._catalog.sets[name].role, self._catalog.home(name)))
        mine = {} if engine is None else engine.optimizer.state["master"]
        boxes = {param: [box for box, _ in pieces] for param, pieces in mine.items()}
        held: dict[str, dict[Region, list[int]]] = {}
        for rank, theirs in enumerate(world.control.all_gather_json(boxes)):
            for param, regions in theirs.items():
                for region in regions:
                    box = tuple((start, stop) for start, stop in region)
                    held.setdefault(param, {}).setdefault(box, []).append(rank)
        names = (param.name for param in self._catalog.specs[name].params)
        return [tuple((box, tuple(ranks)) for box, ranks in held[param].items()) for param in names]

    def updated(self, role: str) -> None:
        """Count an update of the role. Every rank calls this after every train step."""
        self.versions.count_update((self._catalog.trained_set(role), self._catalog.home(role)))

    def start(self, action: Reallocate) -> bool:
        """Start a reallocation and return True, or False if the target is up to date or in flight already.

        The update of a follower always starts. Every rank calls this, and all get the same answer.
        """
        if not self.versions.begin(action):
            return False
        self.reallocations.start(action)
        return True

    def home_states(self) -> list[HomeState]:
        """Return the state of every parameter set that the run changes, for a checkpoint.

        Except for the tensors, which are this rank's, it is equal on all ranks.
        """
        states = []
        for name, params in self._catalog.sets.items():
            home = self._catalog.home(name)
            spec = self._catalog.specs[name]
            if params.trained:
                engine = self.engines.get((params.role, home))
                optimizer = None if engine is None else engine.optimizer
                tensors = {} if optimizer is None else optimizer.state
                states.append(HomeState(
                    name, spec, home, trained=True, tensors=tensors, optimizer=optimizer,
                    placements=self._placements.get(name)))
            elif params.follows is not None:
                tensors = {"weights": self.engines.shards(name, home) or {}}
                states.append(HomeState(name, spec, home, trained=False, tensors=tensors))
        return states

    def export(
        self, role: str, directory: Path, *, beside: Mapping[str, Beside] | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> None:
        """Write the role's home copy as a Hugging Face directory on rank 0's host.

        Rank 0 passes the files to write `beside` the weights, and the `fields` to add to config.json. Every
        rank calls this; those that are neither rank 0 nor in the home do nothing.
        """
        trained = self._catalog.trained_set(role)
        if self._catalog.is_sharded(trained):
            self.start(self._catalog.gathering(trained))
        if self._rank == 0 or self._rank in self._catalog.home(role):
            # An export moves parameters too, so it takes its turn among the reallocations.
            self._runner.submit(lambda: self._exporter.write(
                role, directory, beside=beside or {}, fields=fields or {})).result()


def _versions_at_start(catalog: ParameterCatalog) -> CopyVersions:
    """Return the versions after loading: a home also has the current version of the sets equal to its own."""
    names = list(catalog.sets)
    complete = [
        (name, catalog.home(other)) for name in names for other in names if catalog.may_share(name, other)
    ]
    sharded = [(name, catalog.home(name)) for name in names if catalog.is_sharded(name)]
    return CopyVersions(complete, names, sharded=sharded)


def _reallocations_of(actions: Sequence[Action], catalog: ParameterCatalog) -> Iterator[Reallocate]:
    """Yield the reallocations of the actions, then those before exports, in the same order on all ranks."""
    yield from (action for action in actions if isinstance(action, Reallocate))
    yield from (catalog.gathering(name) for name in catalog.sets if catalog.is_sharded(name))
