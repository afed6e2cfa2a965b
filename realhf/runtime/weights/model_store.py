"""ModelStore: the copies of all roles on this rank, how they are kept up to date, checkpointed and exported.

A HomeState is a parameter set as a checkpoint holds it. A WeightExporter writes a role's weights, or its
adapters, as a Hugging Face directory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from realhf.calls import OPTIMIZER_STATE
from realhf.checkpoint.hf import Beside, CheckpointWriter
from realhf.checkpoint.run_state import Saved, SavedTensors
from realhf.distributed.pieces import Shards
from realhf.distributed.world import World
from realhf.engine.base import DTYPES
from realhf.engine.hf_factory import file_spec
from realhf.engine.optimizer import ShardedAdamW
from realhf.errors import UserError
from realhf.experiment import Experiment, Role
from realhf.layout import Layout
from realhf.models.model_config import ModelConfig, ModuleConfig
from realhf.models.modules import complete_state
from realhf.models.param_spec import ModelSpec, Placement, Region
from realhf.realloc.execute import agreed_links
from realhf.realloc.routes import disjoint
from realhf.runtime.compile.actions import Action, Reallocate, adapters_of
from realhf.runtime.compile.checks import unknown_turn_end
from realhf.runtime.compile.program import Program
from realhf.runtime.weights.engine_store import EngineStore, ParameterCatalog
from realhf.runtime.weights.reallocations import CopyVersions, Reallocations, make_runner
from realhf.user_input.hub import TERMS_FILES, TOKENIZER_FILES

_KINDS = {True: OPTIMIZER_STATE, False: ("weights",)}
"""Whether the set is trained -> names of the tensors that a checkpoint holds of every parameter."""
_GENERATION = "generation_config.json"


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
        holders: dict[str, dict[Region, list[int]]] = {}
        for rank, theirs in enumerate(world.control.all_gather_json(boxes)):
            for param, regions in theirs.items():
                for region in regions:
                    box = tuple((start, stop) for start, stop in region)
                    holders.setdefault(param, {}).setdefault(box, []).append(rank)
        names = (param.name for param in self._catalog.specs[name].params)
        return [tuple((box, tuple(ranks)) for box, ranks in holders[param].items()) for param in names]

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


@dataclass(frozen=True)
class HomeState:
    """A parameter set at home: trained (with an optimizer on the ranks of the layout) or a moving average.

    `tensors` are this rank's, by kind and parameter; ranks outside the layout have none.
    """

    name: str
    spec: ModelSpec
    layout: Layout
    trained: bool
    tensors: Mapping[str, Shards]
    optimizer: ShardedAdamW | None = None
    placements: Sequence[Placement] | None = None
    """Which ranks hold which boxes of each parameter; None if the spec says it."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return _KINDS[self.trained]

    @property
    def counts(self) -> tuple[int, int]:
        """The optimizer's steps, and those that it has skipped in a row."""
        optimizer = self.optimizer
        return (0, 0) if optimizer is None else (optimizer.num_steps, optimizer.num_skipped)

    def pieces(self) -> Iterator[tuple[str, Region, int]]:
        """Yield boxes that make up every parameter, each with the rank that writes it; equal on all ranks.

        If several ranks hold a box, they take turns from parameter to parameter.
        """
        placements = self.placements or self.spec.placements(self.layout, sharded=self.trained)
        for number, (param, placement) in enumerate(zip(self.spec.params, placements, strict=True)):
            for region, holders in disjoint(placement):
                yield param.name, region, holders[number % len(holders)]

    def describe(self, files: Sequence[str], counts: Sequence[int]) -> Saved:
        """Return the manifest's entry, given the file of each rank and the optimizer's `counts`."""
        pieces: dict[str, list[tuple[str, Region]]] = {}
        for param, region, rank in self.pieces():
            pieces.setdefault(param, []).append((files[rank], region))
        num_steps, num_skipped = counts
        return Saved(self.kinds, pieces, num_steps, num_skipped, self.spec.config.to_hf())

    def read(self, saved: SavedTensors) -> None:
        """Fill this rank's tensors from a checkpoint."""
        for kind, shards in self.tensors.items():
            for param, pieces in shards.items():
                for region, tensor in pieces:
                    saved.read(kind, param, region, tensor)

    def difference(self, saved: Saved) -> str:
        """Return the difference between the saved model and this one in words; empty if there is none."""
        ours = {param.name: param.shape for param in self.spec.params}
        theirs = {
            name: tuple(max(stop for _, stop in bounds) for bounds in _columns(parts))
            for name, parts in saved.pieces.items()
        }
        if ours == theirs and saved.kinds == self.kinds:
            return ""
        config = self.spec.config.to_hf()
        for field in sorted(config.keys() | saved.model.keys()):
            if config.get(field) != saved.model.get(field):
                both = f"{saved.model.get(field)!r} in the checkpoint and {config.get(field)!r} now"
                return f"the config of {self.name} has {field} {both}"
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                both = f"{theirs.get(name, 'absent')} in the checkpoint and {ours.get(name, 'absent')} now"
                return f"{self.name}'s parameter {name} is {both}"
        return f"{self.name} was {'not ' * self.trained}trained"


def _columns(parts: list[tuple[str, Region]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield for each dim the bounds of all parts."""
    return iter(zip(*(region for _, region in parts), strict=True))


@dataclass(frozen=True)
class WeightExporter:
    """A writer of the roles' home copies. Ranks of the home and rank 0 take part, and rank 0 writes."""

    world: World
    catalog: ParameterCatalog
    engines: EngineStore

    def write(
        self, role: str, directory: Path, *, beside: Mapping[str, Beside], fields: Mapping[str, object]
    ) -> None:
        """Write the home copy, the files `beside` it, and `fields` added to a model's config.json."""
        home = (role, self.catalog.home(role))
        engine = self.engines.get(home)
        writer = self._writer(role, fields)
        with self.engines.in_use(home):
            shards = {} if engine is None else engine.export_shards()
            try:
                writer.write(directory, shards, beside=beside)
            except OSError as error:
                problem = f"{error.filename or directory} cannot be written: {error.strerror}"
                raise UserError(problem) from error

    def _writer(self, role: str, fields: Mapping[str, object]) -> CheckpointWriter:
        """Return the writer of the role's exports: of a model, or of adapters."""
        settings = self.catalog.roles[role]
        home = self.catalog.home(role)
        dtype = DTYPES[settings.weights_dtype]
        lora = self.catalog.loras[role]
        if isinstance(config := settings.config(), ModuleConfig):
            return CheckpointWriter(
                self.catalog.specs[role], home, self.world, fields=fields, dtype=dtype, leader=0,
                max_shard_bytes=sys.maxsize, complete=partial(complete_state, config))
        if lora is None or lora.export_merged:
            spec = self.catalog.specs[role]
            spec = file_spec(spec) if settings.engine == "transformers" else spec
            return CheckpointWriter(spec, home, self.world, fields=fields, dtype=dtype, leader=0)
        spec = self.catalog.specs[adapters_of(role)]
        return CheckpointWriter(
            spec, home, self.world, lora=lora, base=settings.base_name(), dtype=dtype, leader=0)


def files_beside(experiment: Experiment, name: str, *, step: int) -> dict[str, Beside]:
    """Return files or texts by name for the export of a role after step `step`."""
    role = experiment.roles()[name]
    if not role.is_language_model:
        return {"README.md": _module_card(name, role, method=type(experiment).__name__, step=step)}
    files: dict[str, Beside] = dict(_matching(Path(experiment.tokenizer_dir()), TOKENIZER_FILES))
    source = role.model_path()
    source = source.parent if source.name == "config.json" else source
    if source.is_dir():
        files |= _matching(source, TERMS_FILES + (_GENERATION,) * (role.head == "lm"))
    end = unknown_turn_end(role, experiment.tokenizer_dir()) if role.head == "lm" else None
    if end is not None:
        files[_GENERATION] = _generation(role.config(), end[0])
    method = type(experiment).__name__
    base = None if role.random_init else role.base_name()
    library = "transformers" if role.lora is None or role.lora.export_merged else "peft"
    card = _card(name, role.head, method=method, base=base, step=step, library=library)
    return files | {"README.md": card}


def _matching(directory: Path, patterns: tuple[str, ...]) -> dict[str, Path]:
    paths = (path for pattern in patterns for path in sorted(directory.glob(pattern)) if path.is_file())
    return {str(path.relative_to(directory)): path for path in paths}


def _generation(config: ModelConfig, turn_end: int) -> str:
    """Return a generation_config.json by which answers also end where the chat template ends turns."""
    fields: dict[str, object] = {
        name: config.hf[name] for name in ("bos_token_id", "pad_token_id") if config.hf.get(name) is not None}
    ends = [*config.eos_token_ids, turn_end]
    return json.dumps({**fields, **config.generation, "eos_token_id": ends}, indent=2) + "\n"


def config_fields(config: ModelConfig, *, pad_token_id: int | None) -> dict[str, object]:
    """Return fields to add to the config.json of an exported model; `pad_token_id` is the tokenizer's.

    transformers scores several sequences at once only if it knows the padding token, as it reads the score at
    the last token before the padding. A token that also ends responses cannot serve: it would be skipped.
    """
    is_set = config.hf.get("pad_token_id") is not None or pad_token_id in (None, *config.eos_token_ids)
    return {"pad_token_id": pad_token_id} if config.head == "score" and not is_set else {}


def _module_card(name: str, role: Role, *, method: str, step: int) -> str:
    """Return a sentence about an exported module."""
    made = role.config().to_hf()
    how = f"`{made['module']}` with the arguments {json.dumps(made['arguments'])}"
    origin = f"`{role.model}`" if role.model else "random weights"
    steps = f"{step} step{'s' * (step > 1)}"
    return (
        f"# {name}\n\nThe {name} of a {method} run of realhf after {steps}, from {origin}. It is {how}; "
        "`load_state_dict` takes the tensors of model.safetensors.\n")


def _card(name: str, head: str, *, method: str, base: str | None, step: int, library: str) -> str:
    """Return a model card: metadata for the hub and one sentence."""
    task = "text-generation" if head == "lm" else "text-classification"
    fields = [f"base_model: {json.dumps(base)}"] if base else []
    fields += [f"library_name: {library}", f"pipeline_tag: {task}", f"tags: [realhf, {method.lower()}]"]
    origin = f"`{base}`" if base else "random weights"
    text = f"The {name} of a {method} run of realhf, trained from {origin} for {step} step{'s' * (step > 1)}."
    return "\n".join(["---", *fields, "---", "", f"# {name}", "", text, ""])
