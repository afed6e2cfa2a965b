"""Sources of environments, and PPO on them: inline and remote inference are equal, and resume is exact."""

from functools import cache, partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from realhf.distributed.world import World
from realhf.environments.vector import VectorSource
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.checkpointer import newest_checkpoint
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer
from realhf.user_input.files import execute_file
from tests.cli_tools import TIMED

EXAMPLE = "examples/control/srl_ppo.py"
SMALL = {
    "num_envs": 4, "ring": 2, "processes": False, "horizon": 16, "segment": 8, "minibatches": 2, "epochs": 2,
    "dtype": "float64"}
PLANS = [
    {"play": "d1@0", "act": "d1@1", "agent_train": "d1@1"},
    {"play": "d1@1", "act": "d2@0,2", "agent_train": "d3@1-3"}]


@cache
def example():
    return execute_file(Path(EXAMPLE), name="srl_ppo_example")


def small(task: str, **settings):
    return example().PPO(**(SMALL | {"task": task, "steps": 4} | settings))


def trained(world, task: str, layouts: dict[str, str] | None, settings: dict) -> list[dict]:
    plan = None if layouts is None else ExecutionPlan.from_dict(
        {"calls": {name: {"layout": layout} for name, layout in layouts.items()}})
    program = compile_program(small(task, **settings), plan, world_size=world.size)
    return Trainer(program, world, quiet=True).run().metrics


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_inline_and_remote_inference_are_equal(pool, task, lag):
    """The curves are equal under three plans: inline, remote, and remote with two answering replicas."""
    expected = trained(World(), task, None, {"max_lag": lag})
    assert len({m["agent/loss"] for m in expected}) == 4
    for layouts in PLANS:
        metrics = pool.run(trained, task, layouts, {"max_lag": lag})[0]
        for ours, theirs in zip(metrics, expected, strict=True):
            for name in (name for name in theirs if not name.startswith((*TIMED, "realloc"))):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12), name


def test_resume_is_exact(tmp_path):
    """A run that goes on from a checkpoint in the middle of episodes ends with the same bits."""
    def run(name: str, steps: int):
        program = compile_program(small("CartPole-v1", steps=6, checkpoint_every=2), None, world_size=1)
        program.experiment.steps = steps
        out = tmp_path / name
        start = newest_checkpoint(World(), [*(out / "checkpoints").glob("step_*")])
        Trainer(program, World(), out=out, checkpoint=start, quiet=True).run()
        return load_file(out / f"hf/step_{steps}/model.safetensors")

    expected = run("whole", 6)
    run("cut", 4)
    resumed = run("cut", 6)
    assert all(torch.equal(resumed[name], expected[name]) for name in expected)


def test_learns_to_balance():
    """The mean length of episodes doubles in a few thousand steps."""
    settings = {
        "steps": 12, "num_envs": 8, "horizon": 128, "minibatches": 4, "epochs": 8, "lr": 2e-3,
        "dtype": "float32"}
    metrics = trained(World(), "CartPole-v1", None, settings)
    returns = [of_step["return/mean"] for of_step in metrics if "return/mean" in of_step]
    assert returns[-1] > 2 * returns[0]


def test_pixels_are_played():
    """Pong runs: four small frames are an observation, and stay bytes until the network reads them."""
    pytest.importorskip("ale_py")
    assert example().make("ALE/Pong-v5").observation_space.shape == (4, 80, 80)
    settings = {"num_envs": 2, "horizon": 8, "steps": 1, "dtype": "float32", "minibatches": 1, "epochs": 1}
    (metrics,) = trained(World(), "ALE/Pong-v5", None, settings)
    assert metrics["frames"] == 16 and 0 < metrics["agent/entropy"] <= np.log(6) + 1e-6


def rolled(source: VectorSource, steps: int) -> list[np.ndarray]:
    """Step all slices with actions that follow from the observations; return what they show."""
    shown = []
    for _ in range(steps):
        for k in range(source.ring):
            source.send(k, (source.now(k)[:, 2] > 0).astype(np.int64))
        shown += [source.recv(k).observation for k in range(source.ring)]
    return shown


@pytest.mark.parametrize("processes", [False, True])
def test_a_source_goes_on_where_it_was(processes):
    make = partial(gymnasium.make, "CartPole-v1")
    source = VectorSource(make, 4, ring=2, seed=3, processes=processes)
    rolled(source, 70)
    state = source.state()
    expected = rolled(source, 20)
    source.close()
    other = VectorSource(make, 4, ring=2, seed=3, processes=False, state=state)
    assert max(state["episodes"]) > 0 and max(state["lengths"]) > 0
    np.testing.assert_array_equal(rolled(other, 20), expected)


def test_slices_do_not_change_episodes():
    """An environment's episodes depend on its index and its actions, and not on the ring."""
    make = partial(gymnasium.make, "CartPole-v1")
    whole, ring = (VectorSource(make, 4, ring=ring, seed=3, processes=False) for ring in (1, 2))
    for both in zip(rolled(whole, 40), np.array(rolled(ring, 40)).reshape(40, 4, 4), strict=True):
        np.testing.assert_array_equal(*both)


def test_the_ring_must_divide_the_environments():
    with pytest.raises(UserError, match="num_envs is 4: it must be a multiple of ring, 3"):
        VectorSource(partial(gymnasium.make, "CartPole-v1"), 4, ring=3)
