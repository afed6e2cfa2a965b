"""Small runs of the programs of examples/control in float64, on ranks of the pool or as commands."""

import math
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from realhf import Experiment
from realhf.distributed.world import World
from realhf.execution_plan import ExecutionPlan
from realhf.inference.sampling import stream_seed, uniform
from realhf.models.modules import module_of
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from realhf.user_input.files import execute_file
from tests.cli_tools import TIMED

EXAMPLES = Path(__file__).parents[2] / "examples/control"
if str(EXAMPLES) not in sys.path:
    sys.path.append(str(EXAMPLES))  # The examples import what they share from their directory.

ROWS = 100
STATES = 4
ACTIONS = 3
SMALL: dict[str, dict[str, Any]] = {
    "srl_ppo": {
        "task": "CartPole-v1", "num_envs": 4, "ring": 2, "processes": False, "horizon": 16, "segment": 8,
        "minibatches": 2, "epochs": 2},
    "hil_serl": {
        "width": 16, "rows": 16, "batch_size": 16, "demonstrations": 40, "updates": 4, "first_update": 2,
        "test_every": 3, "test_episodes": 4, "seed": 3},
    "ss_orl": {
        "task": "hopper_small", "updates": 4, "inverse_steps": 2, "play_every": 100, "width": 8, "rate": 3e-4,
        "batch_size": 8},
    "pasta": {
        "task": "hopper_small", "updates": 2, "adapt_steps": 2, "width": 16, "layers": 1, "batch_size": 8}}


def write_rows(directory: Path) -> None:
    """Write rows of noise where `ss_orl` and `pasta` look for them; every fourth is labelled, or best."""
    from offline_rows import PER_ROW, STEPS

    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(ROWS, *shape, generator=generator, dtype=torch.float64)

    fourth = (torch.arange(ROWS) % 4 == 0).double()
    rows = {key: drawn(PER_ROW, STATES) for key in ("previous", "state", "following")}
    rows |= {key: drawn(PER_ROW, ACTIONS).tanh() for key in ("oracle", "shuffled")}
    rows |= {"reward": drawn(PER_ROW), "ended": (drawn(PER_ROW) > 1).double()}
    rows["labelled"] = fourth[:, None].expand(-1, PER_ROW).contiguous()
    windows = {"window": drawn(STEPS, STATES + ACTIONS), "best": fourth}
    where = directory / "runs/control"
    where.mkdir(parents=True)
    save_file(rows, where / "ss_orl-hopper_small-lower-0.safetensors")
    for part in ("train", "test"):
        save_file(windows, where / f"pasta-hopper_small-{part}.safetensors")


def make(name: str, **settings: Any) -> Experiment:
    """Return a program's small experiment, which takes its rows in the order of the file.

    That file is below the current directory.
    """
    example = execute_file(EXAMPLES / f"{name}.py", name=f"{name}_example")
    base = {"dtype": "float64", "checkpoint_every": 0}
    experiment = replace(example.experiment, **base | SMALL[name] | settings)
    experiment.dataset = replace(experiment.dataset, shuffle=False)
    return experiment


def run(
    world: World, name: str, directory: Path, layouts: dict[str, str], settings: dict[str, Any],
    out: Path | None = None,
) -> list[dict[str, float]]:
    """Run a program in `directory`, and return the metrics; calls that `layouts` leaves out run on rank 0."""
    with chdir(directory):
        experiment = make(name, **settings)
        calls = {call.name: {"layout": layouts.get(call.name, "d1@0")} for call in experiment.graph().calls}
        evals = None if experiment.eval_dataset is None else experiment.eval_graph()
        calls |= {} if evals is None else {call.name: {"layout": "d1@0"} for call in evals.calls}
        program = compile_program(
            experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=world.size)
        return Trainer(program, world, out=out, quiet=True).run().metrics


def differences(ours: list[dict], expected: list[dict], *, rel: float = 1e-9) -> list[tuple[int, str]]:
    """Return the steps and metrics in which a run is not as expected, apart from seconds and bytes."""
    assert any(metric.endswith("/loss") for step in expected for metric in step)
    return [
        (number, metric)
        for number, (here, there) in enumerate(zip(ours, expected, strict=True))
        for metric in there if not metric.startswith((*TIMED, "realloc"))
        and not math.isclose(here[metric], there[metric], rel_tol=rel, abs_tol=1e-12)]


def initial(experiment: Experiment) -> dict[str, torch.nn.Module]:
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
