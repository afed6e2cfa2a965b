"""Runs of the examples that learn from data alone, on ranks of the pool."""

import math
import sys
from pathlib import Path

import numpy as np
import torch

from realhf.execution_plan import ExecutionPlan
from realhf.inference.sampling import stream_seed, uniform
from realhf.models.modules import module_of
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from tests.cli_tools import TIMED

EXAMPLES = str(Path(__file__).parents[2] / "examples/control")
if EXAMPLES not in sys.path:
    sys.path.append(EXAMPLES)  # The examples import what they share, as they are run from their directory.


def run(
    world, make, settings: dict, layouts: dict[str, str], out: Path | None = None, start: Path | None = None
):
    """Run `make(**settings)` and return rank 0's metrics; calls that `layouts` leaves out run on rank 0."""
    experiment = make(**settings)
    calls = {call.name: {"layout": layouts.get(call.name, "d1@0")} for call in experiment.graph().calls}
    evals = experiment.eval_graph()
    calls |= {} if evals is None else {call.name: {"layout": "d1@0"} for call in evals.calls}
    checkpoint = None if start is None else newest_checkpoint(world, [start])
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=world.size)
    result = Trainer(program, world, out=out, checkpoint=checkpoint, quiet=True).run()
    return result.metrics if world.rank == 0 else None


def differences(ours: list[dict], expected: list[dict], *, rel: float = 1e-9) -> list[tuple[int, str]]:
    """Return the steps and metrics in which a run is not as expected, apart from seconds and bytes."""
    found = []
    for step, (here, there) in enumerate(zip(ours, expected, strict=True)):
        names = [name for name in there if not name.startswith((*TIMED, "realloc"))]
        assert any(name.endswith("/loss") for name in names)
        found += [(step, name) for name in names
                  if not math.isclose(here[name], there[name], rel_tol=rel, abs_tol=1e-12)]
    return found


def initial(experiment) -> dict[str, torch.nn.Module]:
    """Return the modules of the roles as a run begins with them."""
    return {
        name: module_of(role.config(), seed=experiment.seed, dtype=experiment.dtype)
        for name, role in experiment.roles().items()}


def normal_noise(seed: int, call: str, step: int, ids: list[int], shape: tuple[int, ...]) -> torch.Tensor:
    """Return the noise of an optimizer step: inverse normal distribution of the run's uniform numbers."""
    size = math.prod(shape)
    drawn = [
        uniform(stream_seed(seed, f"{call}/noise"), sample_ids=np.full(size, i),
                positions=np.arange(step * size, (step + 1) * size)) for i in ids]
    return torch.special.ndtri(torch.tensor(np.array(drawn)) + 2.0**-54).view(len(ids), *shape)
