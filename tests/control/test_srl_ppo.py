"""Sources of environments, and PPO on them: inline and remote inference are equal, and resume is exact."""

import os
import pickle
import threading
import time
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from realhf.distributed.world import World
from realhf.environments.vector import StepTimes, VectorSource
from realhf.errors import UserError
from realhf.execution_plan import ExecutionPlan
from realhf.runtime.checkpointer import newest_checkpoint, state_of_share
from realhf.runtime.compile.program import compile_program
from realhf.runtime.execute.asking import Asker, Later
from realhf.runtime.trainer import Trainer
from realhf.user_input.files import execute_file
from tests.cli_tools import TIMED

EXAMPLE = "examples/control/srl_ppo.py"
SMALL = {
    "num_envs": 4, "ring": 2, "processes": False, "horizon": 16, "segment": 8, "minibatches": 2, "epochs": 2,
    "dtype": "float64"}
REMOTE = {"play": "d1@0", "act": "d1@1", "agent_train": "d1@1"}
PLANS = [
    REMOTE,
    {"play": "d1@1", "act": "d2@0,2", "agent_train": "d3@1-3"},
    {"play": "d2@0-1", "act": "d1@1", "agent_train": "d2@1-2", "ring": 1}]
"""The last one plays on two ranks, of which one answers the other, and has another ring."""


@cache
def example():
    return execute_file(Path(EXAMPLE), name="srl_ppo_example")


def small(task: str, **settings):
    return example().PPO(**(SMALL | {"task": task, "steps": 4} | settings))


def trained(world, task: str, layouts: dict | None, settings: dict, out: Path | None = None) -> list[dict]:
    plan = None
    if layouts is not None:
        calls = {name: {"layout": layout} for name, layout in layouts.items() if name != "ring"}
        calls["play"]["ring"] = layouts.get("ring")
        plan = ExecutionPlan.from_dict({"calls": calls})
    program = compile_program(small(task, **settings), plan, world_size=world.size)
    return Trainer(program, world, out=out, quiet=True).run().metrics


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_inline_and_remote_inference_are_equal(pool, task, lag):
    """The curves are equal inline, remote, with two answering replicas, and with two ranks that play."""
    expected = trained(World(), task, None, {"max_lag": lag})
    assert len({m["agent/loss"] for m in expected}) == 4
    for layouts in PLANS:
        metrics = pool.run(trained, task, layouts, {"max_lag": lag})[0]
        for ours, theirs in zip(metrics, expected, strict=True):
            for name in (name for name in theirs if not name.startswith((*TIMED, "realloc"))):
                if layouts["play"] != "d2@0-1" or name != "return/mean":  # A mean of means has other weights.
                    assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-12), (layouts, name)


def test_remote_answers_have_the_bits_of_inline_ones(pool, tmp_path):
    """With play, act and train on one rank each, where they run changes no bit of the weights."""
    weights = []
    for name, layouts, run in (
        ("inline", {"play": "d1@0", "act": "d1@0", "agent_train": "d1@0"}, partial(trained, World())),
        ("remote", REMOTE, partial(pool.run, trained)),
    ):
        run("Pendulum-v1", layouts, {"dtype": "float32", "max_lag": 1}, tmp_path / name)
        weights.append(load_file(tmp_path / name / "hf/step_4/model.safetensors"))
    assert all(torch.equal(*both) for both in zip(*(w.values() for w in weights), strict=True))
    assert weights[0]["count"].item() == 4 * 2 * 2  # Mini-batches in epochs of four steps.


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


def continued(world, out: Path, layouts: dict, steps: int) -> None:
    """Train to a step, from the newest checkpoint if there is one; each question has one row.

    Weights are those of one rank, so that products have the same rows under every plan.
    """
    num_playing = ExecutionPlan.from_dict({"calls": {"play": {"layout": layouts["play"]}}})["play"].layout.dp
    calls = {name: {"layout": layout} for name, layout in layouts.items()}
    calls["play"]["ring"] = SMALL["num_envs"] // num_playing
    experiment = small("CartPole-v1", steps=5, checkpoint_every=1, eval_at_start=False)
    program = compile_program(experiment, ExecutionPlan.from_dict({"calls": calls}), world_size=world.size)
    program.experiment.steps = steps
    start = newest_checkpoint(world, [*(out / "checkpoints").glob("step_*")])
    Trainer(program, world, out=out, checkpoint=start, quiet=True).run()


def playing_on(layout: str) -> dict[str, str]:
    return {"play": layout, "act": layout, "scale": "d1@0", "agent_train": "d1@0"}


def test_resume_on_other_ranks_is_exact(pool, tmp_path):
    """Environments go on in the middle of episodes on 2, then on 4 ranks, and then on one again."""
    pool.run(continued, tmp_path / "whole", playing_on("d1@0"), 5)
    for steps, layout in enumerate(("d1@0", "d2@0-1", "d4@0-3", "d2@2-3", "d1@1"), start=1):
        pool.run(continued, tmp_path / "cut", playing_on(layout), steps)
    whole, cut = (load_file(tmp_path / name / "hf/step_5/model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(cut[name], whole[name]) for name in whole)


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
    assert example().make("ALE/Pong-v5").observation_space.shape == (4, 40, 40)
    frame = np.random.default_rng(0).integers(0, 256, (210, 160), np.uint8)
    small = example().shrunk(frame)
    assert all(small[y, x] == frame[34 + 4 * y : 38 + 4 * y : 2, 4 * x : 4 * x + 4 : 2].max()
               for y in range(40) for x in range(40))
    settings = {"num_envs": 2, "horizon": 8, "steps": 1, "dtype": "float32", "minibatches": 1, "epochs": 1}
    (metrics,) = trained(World(), "ALE/Pong-v5", None, settings)
    assert metrics["frames"] == 16 and 0 < metrics["agent/entropy"] <= np.log(6) + 1e-6


def test_only_the_task_that_is_played_is_made(monkeypatch):
    """Without MuJoCo, the example is read and trains on other tasks."""
    made = gymnasium.make
    monkeypatch.setattr(
        gymnasium, "make", lambda task, **how: made(task, **how) if task == "CartPole-v1" else 1 / 0)
    module = execute_file(Path(EXAMPLE), name="srl_ppo_without_mujoco")
    assert module.PPO(task="CartPole-v1").roles()["agent"].arguments["shape"] == [4]


class Counting(gymnasium.Env):
    """Shows how many steps it has made; ends by itself at an action above 1, and by time after four steps."""

    observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float64)
    action_space = gymnasium.spaces.Box(-10, 10, (1,), np.float64)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, float(self.steps)), 1.0, bool(action[0] > 1), self.steps == 4, {}


def ask_counting(observation, step, environments):
    """Environment 0 ends its episodes itself, in their third step. An answer's value is the observation."""
    action = np.where((environments == 0) & (observation[:, 0] == 2), 2.0, 0.0)
    (later := Later()).complete(lambda: {"action": action[:, None], "value": observation[:, 0]})
    return {"observation": observation}, later


@pytest.mark.parametrize(("ring", "processes"), [(1, False), (2, False), (1, True)])
def test_truncated_episodes_are_followed_by_their_last_observation(ring, processes):
    source = VectorSource(Counting, 2, ring=ring, processes=processes)
    columns, following, returns = source.roll(9, ask_counting)
    source.close()
    ends = {key: np.flatnonzero(columns["terminated"][:, i]).tolist() for i, key in enumerate("ab")}
    assert ends == {"a": [2, 5, 8], "b": []}
    assert [np.flatnonzero(column).tolist() for column in columns["truncated"].T] == [[], [3, 7]]
    assert following["value"][:, 1].tolist() == [1, 2, 3, 4, 1, 2, 3, 4, 1]
    assert following["value"][:, 0].tolist() == [1, 2, 0] * 3
    assert sorted(returns) == [3, 3, 3, 4, 4]
    assert columns["observation"][:, 1, 0].tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_advantages_bootstrap_where_episodes_are_truncated():
    """They are sums over the rest of each episode, whose end is worth nothing or its last value."""
    rng = np.random.default_rng(0)
    ppo = small("CartPole-v1", horizon=8)
    value, after, reward = rng.standard_normal((3, 8, 1))
    terminated, truncated = np.zeros((2, 8, 1), bool)
    terminated[2], truncated[5] = True, True
    columns = {"value": value, "reward": reward, "terminated": terminated, "truncated": truncated}
    made = example().Rollout(ppo).advantages(columns, after)
    for t in range(8):
        end = next(last for last in (2, 5, 7) if last >= t)
        expected = sum(
            (ppo.gamma * ppo.lam) ** (s - t) * (
                ppo.reward_scale * reward[s] + ppo.gamma * (0 if s == 2 else after[s]) - value[s])
            for s in range(t, end + 1))
        np.testing.assert_allclose(made[t], expected, rtol=1e-12)


class Waits(Counting):
    """At an action of 0 its step waits until another environment has got an action of 1."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def step(self, action):
        if action[0] == 1:
            self.file.touch()
        end = time.monotonic() + 20
        while not self.file.exists():
            assert time.monotonic() < end, "the other environment got no action"
            time.sleep(0.01)
        return super().step([0.0])


def test_answers_become_actions_while_another_slice_is_awaited(tmp_path):
    """The second slice's answer comes when the source already waits for the step of the first."""
    source = VectorSource(partial(Waits, tmp_path / "file"), 2, ring=2)

    def ask(observation, step, environments):
        later = Later(nullcontext)
        action = {"action": environments[:, None].astype(float)}
        threading.Timer(0.3 * environments[0], later.complete, [lambda: action]).start()
        return {}, later

    columns, _, _ = source.roll(2, ask)
    source.close()
    assert columns["action"][..., 0].tolist() == [[0, 1], [0, 1]]


def test_errors_of_answers_are_those_of_the_roll():
    source = VectorSource(Counting, 2, ring=2, processes=False)

    def ask(observation, step, environments):
        later = Later(nullcontext)
        threading.Timer(0.05, later.complete, [dict]).start()
        return {}, later.then(lambda answer: {"action": {}["nothing"]})

    with pytest.raises(KeyError, match="nothing"):
        source.roll(2, ask)


def test_errors_of_functions_of_answers_end_the_call_though_nobody_asks_for_them():
    asker = Asker(World(), {}, ())
    answer = Later(nullcontext, asker._unseen)
    seen, unseen = (answer.then(lambda answer: {}["nothing"]) for _ in range(2))
    answer.complete(dict)
    with pytest.raises(KeyError, match="nothing"):
        seen.result()
    with pytest.raises(KeyError, match="nothing"):
        asker.close()
    with pytest.raises(KeyError, match="nothing"):
        unseen.result()
    asker.close()


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
    parts = state["parts"].values()
    assert max(part["episode"] for part in parts) > 0 and max(part["length"] for part in parts) > 0
    np.testing.assert_array_equal(rolled(other, 20), expected)


def test_a_state_of_other_environments_is_refused():
    make = partial(gymnasium.make, "CartPole-v1")
    state = VectorSource(make, 4, processes=False).state()
    with pytest.raises(UserError, match=r"have the numbers \[1, 5\], and the state is of 0, 1, 2, 3: resume"):
        VectorSource(make, 2, numbers=[1, 5], processes=False, state=state)


def test_a_state_is_split_and_joined():
    """Two sources go on with the environments of one, each with its own, and one with those of both."""
    make = partial(gymnasium.make, "CartPole-v1")

    def source(numbers, state=None):
        return VectorSource(make, len(numbers), numbers=numbers, seed=3, processes=False, state=state)

    whole = source([0, 1, 2, 3])
    rolled(whole, 35)
    state = whole.state()
    expected = np.array(rolled(whole, 30))
    halves = [source(numbers, state) for numbers in ([0, 2], [1, 3])]
    shown = [np.array(rolled(half, 15)) for half in halves]
    np.testing.assert_array_equal(shown[0], expected[:15, [0, 2]])
    np.testing.assert_array_equal(shown[1], expected[:15, [1, 3]])
    states = [{"source": half.state()} for half in halves]
    joined = state_of_share(states, 0, 1, call="play")["source"]
    np.testing.assert_array_equal(rolled(source([0, 1, 2, 3], joined), 15), expected[15:])


def test_states_that_are_not_in_parts_need_as_many_ranks():
    saved = [{"count": 3, "own": i, "of_rows": {"parts": {str(i): i}}} for i in range(2)]
    assert state_of_share(saved, 1, 2, call="play") == {
        "count": 3, "own": 1, "of_rows": {"parts": {"0": 0, "1": 1}}}
    alike = [{**state, "own": 0} for state in saved]
    assert state_of_share(alike, 2, 3, call="play")["own"] == 0
    with pytest.raises(UserError, match="'play' ran on 2 ranks, whose states differ in 'own': resume with"):
        state_of_share(saved, 0, 1, call="play")


def test_what_one_rank_has_alone_stays_with_its_place():
    saved = [{}, {"a": 1}]
    assert [state_of_share(saved, place, 2, call="play") for place in (0, 1)] == saved
    with pytest.raises(UserError, match="'play' ran on 2 ranks, whose states differ in 'a': resume with"):
        state_of_share(saved, 0, 1, call="play")
    both = [{"best": float("nan")}, {"best": float("nan")}]
    assert np.isnan(state_of_share(both, 0, 1, call="play")["best"])


def test_parts_that_two_ranks_have_saved_must_be_equal():
    saved = [{"of_rows": {"parts": {"0": 5, "1": 1}}}, {"of_rows": {"parts": {"1": 7}}}]
    for num_ranks in (1, 2):
        with pytest.raises(UserError, match="'of_rows' has the part '1' from two ranks, with different"):
            state_of_share(saved, 0, num_ranks, call="play")
    saved[1] = saved[0]
    assert state_of_share(saved, 0, 1, call="play") == saved[0]


def test_times_of_steps_take_no_more_memory_with_more_steps():
    times = StepTimes()
    start = time.perf_counter()
    for _ in range(2000):
        with times:
            pass
    most = time.perf_counter() - start
    num, seconds, squares, _ = times.figures()
    assert num == 2000 and 0 < seconds < most and seconds**2 / num <= squares < seconds**2
    assert len(pickle.dumps(times)) < 500


def test_cores_are_counted_where_a_process_has_no_set_of_them(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    source = VectorSource(Counting, 1)
    source.send(0, np.zeros((1, 1)))
    source.recv(0)
    assert source.taken()["cores"] == os.cpu_count()
    source.close()


def test_slices_do_not_change_episodes():
    """An environment's episodes depend on its index and its actions, and not on the ring or the source."""
    make = partial(gymnasium.make, "CartPole-v1")
    whole, ring, half = (
        VectorSource(make, n, ring=ring, seed=3, numbers=numbers, processes=False)
        for n, ring, numbers in ((4, 1, None), (4, 2, None), (2, 1, [1, 3])))
    shown = np.array(rolled(whole, 40))
    np.testing.assert_array_equal(np.array(rolled(ring, 40)).reshape(40, 4, 4), shown)
    np.testing.assert_array_equal(rolled(half, 40), shown[:, [1, 3]])


def test_the_ring_must_divide_the_environments():
    with pytest.raises(UserError, match="num_envs is 4: it must be a multiple of ring, 3"):
        VectorSource(partial(gymnasium.make, "CartPole-v1"), 4, ring=3)
