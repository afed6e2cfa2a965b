"""WeightExporter: writes a role's weights, or its adapters, as a Hugging Face directory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from realhf.checkpoint.write import Beside, CheckpointWriter
from realhf.distributed.world import World
from realhf.engine.hf_factory import file_spec
from realhf.engine.protocol import DTYPES
from realhf.errors import UserError
from realhf.runtime.compile.actions import adapters_of
from realhf.runtime.weights.engine_store import EngineStore
from realhf.runtime.weights.parameter_catalog import ParameterCatalog


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
