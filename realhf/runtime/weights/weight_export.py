"""WeightExporter: writes a role's weights, or its adapters, as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from realhf.checkpoint.hf import Beside, CheckpointWriter
from realhf.distributed.world import World
from realhf.engine.base import DTYPES
from realhf.engine.hf_factory import file_spec
from realhf.errors import UserError
from realhf.experiment import Experiment
from realhf.models.model_config import ModelConfig
from realhf.runtime.compile.actions import adapters_of
from realhf.runtime.compile.checks import unknown_turn_end
from realhf.runtime.weights.engine_store import EngineStore
from realhf.runtime.weights.parameter_catalog import ParameterCatalog
from realhf.user_input.hub import TERMS_FILES, TOKENIZER_FILES

if TYPE_CHECKING:
    from realhf.checkpoint.hf import Beside


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
        if lora is None or lora.export_merged:
            spec = self.catalog.specs[role]
            spec = file_spec(spec) if settings.engine == "transformers" else spec
            return CheckpointWriter(spec, home, self.world, fields=fields, dtype=dtype, leader=0)
        spec = self.catalog.specs[adapters_of(role)]
        return CheckpointWriter(
            spec, home, self.world, lora=lora, base=settings.base_name(), dtype=dtype, leader=0)


_GENERATION = "generation_config.json"


def files_beside(experiment: Experiment, name: str, *, step: int) -> dict[str, Beside]:
    """Return files or texts by name for the export of a role after step `step`."""
    role = experiment.roles()[name]
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


def _card(name: str, head: str, *, method: str, base: str | None, step: int, library: str) -> str:
    """Return a model card: metadata for the hub and one sentence."""
    task = "text-generation" if head == "lm" else "text-classification"
    fields = [f"base_model: {json.dumps(base)}"] if base else []
    fields += [f"library_name: {library}", f"pipeline_tag: {task}", f"tags: [realhf, {method.lower()}]"]
    origin = f"`{base}`" if base else "random weights"
    text = f"The {name} of a {method} run of realhf, trained from {origin} for {step} step{'s' * (step > 1)}."
    return "\n".join(["---", *fields, "---", "", f"# {name}", "", text, ""])
