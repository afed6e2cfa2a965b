"""HIL-SERL: its task, its losses, and runs against a plain loop, under other plans, and after a kill."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from realhf.cli.main import main
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.data.batch import Batch
from realhf.engine.hf_factory import named_tensors
from realhf.experiment import Expected
from realhf.inference.sampling import stream_seed, uniform
from realhf.models.modules import module_of
from tests.cli_tools import read_jsonl, write_plan

CONTROL = Path(__file__).parents[2] / "examples" / "control"
sys.path.insert(0, str(CONTROL))

import hil_serl  # noqa: E402
import insertion  # noqa: E402
import soft_actor_critic as sac  # noqa: E402

SMALL = {
    "dtype": "float64", "width": 16, "rows": 16, "batch_size": 16, "demonstrations": 40, "updates": 4,
    "first_update": 2, "test_every": 3, "test_episodes": 4, "steps": 6, "checkpoint_every": 1, "seed": 3,
}


def words(**changes):
    """Return the command line of a small run."""
    settings = {**SMALL, **changes}
    return ["run", str(CONTROL / "hil_serl.py")] + [
        word for name, value in settings.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    """The directory of a small run in this process."""
    out = tmp_path_factory.mktemp("hil") / "run"
    assert main([*words(), "--out", str(out)]) == 0
    return out


def weights_of(out):
    """Return the weights that a run has exported, by role and name."""
    last = out / "hf" / f"step_{SMALL['steps']}"
    return {
        f"{role}/{name}": tensor for role, directory in (("actor", last), ("critic", last / "critic"))
        for name, tensor in load_file(directory / "model.safetensors").items()}


# The task and the person


def episodes(act, number, *, shows=False):
    """Return whether each episode succeeds, and its steps; `act(scene, by_hand)` returns actions."""
    scene = insertion.Scene.new(insertion.Person(), 5, shows=shows)
    results = []
    while len(results) < number:
        steps = scene.station.num_steps + 1
        done = scene.station.move(act(scene, scene.person.watch(scene.station)))
        if scene.advance(done):
            results.append((done, steps))
    return results


def test_the_person_can_do_the_task_and_chance_cannot():
    by_hand = episodes(lambda scene, _: scene.person.act(scene.random()), 100)
    assert np.mean([won for won, _ in by_hand]) > 0.95
    by_chance = episodes(lambda scene, _: scene.random().uniform(-1, 1, 4).tolist(), 300)
    assert sum(won for won, _ in by_chance) <= 3


def test_the_person_steps_in_when_nothing_moves_and_not_while_the_task_gets_on():
    person = insertion.Person()
    helped = []

    def still(scene, by_hand):
        helped.append(by_hand)
        return [0.0] * 4

    episodes(still, 1)
    first = person.patience + person.reaction
    assert helped[: first] == [False] * first and helped[first : first + person.hold] == [True] * person.hold
    helped.clear()

    def skilled(scene, by_hand):
        helped.append(by_hand)
        return scene.person.act(scene.random())

    episodes(skilled, 20, shows=True)
    assert np.mean(helped) < 0.2


def test_a_wall_a_shelf_and_the_table_hold_the_peg():
    station = insertion.Station([0.5, 0.0, 0.2, 0.0])
    for _ in range(20):
        station.move([-1.0, 0.0, 1.0, 0.0])
    assert station.position[0] > insertion.WALL and station.position[2] < insertion.SHELF
    station = insertion.Station([0.2, 0.0, 0.2, 0.0])
    for _ in range(20):
        station.move([0.0, 0.0, -1.0, 0.0])
    assert station.position == [0.2, 0.0, 0.0, 0.0]
    station = insertion.Station([0.02, 0.0, 0.2, 0.0])
    assert any(station.move([0.0, 0.0, -1.0, 0.0]) for _ in range(20))
    station = insertion.Station([0.02, 0.0, 0.2, 1.0])  # Turned too far.
    assert not any(station.move([0.0, 0.0, -1.0, 0.0]) for _ in range(20))


def test_a_scene_goes_on_from_json_exactly():
    scene = insertion.Scene.new(insertion.Person(), 1)
    for _ in range(70):
        scene.person.watch(scene.station)
        scene.advance(scene.station.move(scene.person.act(scene.random())))
    other = insertion.Scene.from_json(json.loads(json.dumps(scene.to_json())))
    for _ in range(70):
        actions = [each.person.act(each.random()) for each in (scene, other)]
        assert actions[0] == actions[1]
        for each, action in zip((scene, other), actions, strict=True):
            each.person.watch(each.station)
            each.advance(each.station.move(action))
    assert scene == other


# The losses


def batch_of(num_rows, seed=0):
    rng = np.random.default_rng(seed)

    def column(*shape):
        return torch.from_numpy(rng.standard_normal((num_rows, *shape)))

    done = torch.from_numpy(rng.integers(0, 2, num_rows)).double()
    return Batch(list(range(num_rows)), {
        "observation": column(insertion.OBSERVATION_DIM),
        "next_observation": column(insertion.OBSERVATION_DIM), "action": column(4).tanh(),
        "reward": done, "done": done, "noise": column(4)})


@pytest.fixture
def models():
    torch.manual_seed(1)
    kinds = {"actor": sac.Actor, "critic": sac.Critic, "target": sac.Critic}
    return SimpleNamespace(
        **{name: kind(insertion.OBSERVATION_DIM, 4, 16).double() for name, kind in kinds.items()})


def test_log_probs_are_those_of_a_gaussian_after_tanh(models):
    batch = batch_of(20)
    action, log_prob = models.actor(batch["observation"], batch["noise"])
    mean, log_std = models.actor.layers(batch["observation"][None])[0].chunk(2, -1)
    law = TransformedDistribution(Normal(mean, log_std.clamp(-5, 1.6).exp()), TanhTransform(cache_size=1))
    torch.testing.assert_close(action, (mean + log_std.clamp(-5, 1.6).exp() * batch["noise"]).tanh())
    torch.testing.assert_close(log_prob, law.log_prob(action).sum(-1), rtol=1e-6, atol=1e-6)


def test_losses_equal_their_formulas_row_by_row(models):
    batch = batch_of(12)
    losses, metrics = sac.critic_loss(models.critic, batch, models.actor, models.target, 0.97)
    policy_losses, _ = sac.actor_loss(models.actor, batch, models.critic)
    alpha = math.exp(models.actor.log_temperature.item())
    for i in range(12):
        row = {key: column[i : i + 1] for key, column in batch.fields.items()}
        action, _ = models.actor(row["next_observation"], row["noise"])
        least = min(models.target(row["next_observation"], action).flatten().tolist())
        goal = min(1.0, max(0.0, row["reward"].item() + 0.97 * (1 - row["done"].item()) * least))
        values = models.critic(row["observation"], row["action"]).flatten().tolist()
        assert losses[i].item() == pytest.approx(sum((value - goal) ** 2 for value in values) / 2)
        assert metrics["value"][i].item() == pytest.approx(sum(values) / 2)
        action, log_prob = models.actor(row["observation"], row["noise"])
        mean_value = models.critic(row["observation"], action).mean().item()
        expected = alpha * log_prob.item() - mean_value + alpha * (2 - log_prob.item())
        assert policy_losses[i].item() == pytest.approx(expected)


def test_the_temperature_rises_if_there_is_too_little_entropy(models):
    batch = batch_of(12)
    losses, metrics = sac.actor_loss(models.actor, batch, models.critic)
    losses.mean().backward()
    alpha = math.exp(models.actor.log_temperature.item())
    entropy = metrics["entropy"].mean().item()
    assert models.actor.log_temperature.grad.item() == pytest.approx(alpha * (entropy + 2))
    assert all(parameter.grad is not None for parameter in models.actor.parameters())


# Runs


class PlainLoop:
    """A part executor with plain torch in the place of engines, for the same step program."""

    def __init__(self, experiment):
        self.experiment = experiment
        self.rows, self.kept, self.state, self.metrics = {}, {}, {}, []
        self.models, self.optimizers, self.num_steps = {}, {}, {"actor": 0, "critic": 0}

    def load(self, weights):
        for role, kind in (("actor", sac.Actor), ("critic", sac.Critic), ("target", sac.Critic)):
            self.models[role] = kind(insertion.OBSERVATION_DIM, 4, self.experiment.width).double()
            self.models[role].load_state_dict(weights[role])
        for role in ("actor", "critic"):
            self.optimizers[role] = torch.optim.Adam(self.models[role].parameters(), lr=1e-3)

    def ask(self, name, columns):
        with torch.no_grad():
            return hil_serl.act(self.models["actor"], columns)

    def run(self, part, prompts, *, operation, sent, updates, state):
        context = SimpleNamespace(ask=self.ask, state=self.state.setdefault(part, {}), run_state=state)
        if part == "test":
            settings = {"episodes": self.experiment.test_episodes, "dtype": "float64"}
            self.metrics.append(hil_serl.play_alone(prompts, context, **settings)[1])
        elif part == "play":
            settings = {"seed": self.experiment.seed, "helps": self.experiment.helps, "dtype": "float64"}
            columns, _ = hil_serl.play(prompts, context, **settings)
            keep = columns.pop("keep")
            self.kept[operation] = [p for p, is_kept in zip(prompts, keep, strict=True) if is_kept]
            for i, prompt in enumerate(prompts):
                self.rows[prompt] = {key: column[i] for key, column in columns.items()}
        else:
            self.train(part, sorted(prompts))

    def train(self, role, prompts):
        step = self.num_steps[role]
        fields = {key: torch.stack([self.rows[p][key] for p in prompts]) for key in hil_serl.TRANSITION}
        ids = np.repeat(np.array(prompts, np.int64), 4)
        places = np.tile(4 * step + np.arange(4), len(prompts))
        seed = stream_seed(self.experiment.seed, f"{role}_train/noise")
        drawn = torch.from_numpy(uniform(seed, sample_ids=ids, positions=places)).view(-1, 4)
        batch = Batch(prompts, fields | {"noise": torch.special.ndtri(drawn + 2.0**-54)})
        if role == "critic":
            losses, _ = sac.critic_loss(
                self.models["critic"], batch, self.models["actor"], self.models["target"], 0.97)
        else:
            losses, _ = sac.actor_loss(self.models["actor"], batch, self.models["critic"])
        self.optimizers[role].zero_grad()
        losses.mean().backward()
        self.optimizers[role].step()
        self.num_steps[role] += 1
        if role == "critic":
            pairs = zip(self.models["target"].parameters(), self.models["critic"].parameters(), strict=True)
            with torch.no_grad():
                for average, weight in pairs:
                    average.lerp_(weight, 0.005)

    def passed(self, call, operation):
        return self.kept[operation]

    def forget(self, prompts):
        for prompt in prompts:
            del self.rows[prompt]

    def send(self, *_):
        pass

    note = log = decision = send


def small_experiment(**changes):
    return hil_serl.HilSerl(**{**SMALL, **changes})


def test_a_run_equals_a_plain_loop(one_rank):
    experiment = small_experiment()
    plain = PlainLoop(experiment)
    drawn = {
        name: named_tensors(module_of(role.config(), seed=experiment.seed))
        for name, role in experiment.roles().items()}
    plain.load({role: {names[0]: tensor for names, tensor in tensors} for role, tensors in drawn.items()})
    runner = experiment.step_runner(experiment.graph(), plain)
    for _ in range(experiment.steps):
        with runner.one_step():
            experiment.step(runner)
    assert plain.num_steps == {"actor": 8, "critic": 16}
    found = weights_of(one_rank)
    for role in ("actor", "critic"):
        for name, expected in plain.models[role].state_dict().items():
            ours = found[f"{role}/{name}"].view(expected.shape)
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-12)
    tested = [step for step in read_jsonl(one_rank / "metrics.jsonl") if "alone/steps" in step]
    assert [step["alone/steps"] for step in tested] == [each["alone/steps"] for each in plain.metrics]


def test_a_half_of_every_update_is_from_either_pool():
    experiment = small_experiment(steps=12)
    plain = PlainLoop(experiment)
    taken = []
    plain.train = lambda role, prompts: taken.append((role, prompts))
    plain.ask = lambda name, columns: {"action": columns["noise"].tanh()}
    runner = experiment.step_runner(experiment.graph(), plain)
    for _ in range(experiment.steps):
        with runner.one_step():
            experiment.step(runner)
    online = set(runner.pool("online", keeps=True).prompts)
    shown = set(runner.pool("demonstrations", keeps=True).prompts)
    assert not online & shown
    assert {(len(online & set(batch)), len(shown & set(batch))) for _, batch in taken} == {(8, 8)}
    assert [role for role, _ in taken] == ["critic", "critic", "actor"] * (2 * 10)
    # Every transition that the person has made is in both pools, and no other one is.
    steps = ("observation", "action", "next_observation")
    number = {tuple(float(x) for key in steps for x in plain.rows[p][key]): p for p in online}
    by_hand = [p for p in shown if p >= 2 * experiment.demonstrations]
    assert by_hand and len(shown) == experiment.demonstrations + len(by_hand)
    for prompt in by_hand:
        twin = number[tuple(float(x) for key in steps for x in plain.rows[prompt][key])]
        assert prompt - twin == experiment.batch_size


@pytest.mark.parametrize("demonstrations", [40, 0])
def test_without_help_only_what_was_shown_at_first_is_a_demonstration(demonstrations):
    experiment = small_experiment(helps=False, demonstrations=demonstrations)
    plain = PlainLoop(experiment)
    taken = []
    plain.train = lambda role, prompts: taken.append(len(prompts))
    plain.ask = lambda name, columns: {"action": columns["noise"].tanh()}
    runner = experiment.step_runner(experiment.graph(), plain)
    for _ in range(experiment.steps):
        with runner.one_step():
            experiment.step(runner)
    assert len(runner.pool("demonstrations", keeps=True)) == demonstrations
    assert set(taken) == {experiment.rows}


# Its plan


def a_run(directory, layouts, seconds):
    """Write what the planner reads of a run: its plan, and the seconds of calls by step."""
    directory.mkdir()
    write_plan(directory, layouts)
    rows = [
        {"step": i + 1, **{f"timing_s/{call}": values[i] for call, values in seconds.items() if values[i]}}
        for i in range(len(next(iter(seconds.values()))))]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(directory)


def test_the_planner_takes_seconds_and_their_spread_from_a_run(tmp_path):
    measured = {
        "play": [9.0, 1.0, 2.0, 3.0], "play_alone": [0.0, 0.0, 6.0, 0.0],
        "critic_train": [9.0, 4.0, 4.0, 4.0]}
    run = a_run(tmp_path / "run", dict.fromkeys(measured, "d1@0"), measured)
    expected = Expected(seconds_from=run, call_seconds={"actor_train": 0.5})
    problem = problem_of(small_experiment(expected=expected), Cluster.load("cpu-laptop"))
    found = {name: (work.seconds, work.seconds_deviation) for name, work in problem.workloads.items()}
    assert found["play"] == pytest.approx((2.0, math.sqrt(2 / 3)))
    assert found["play_alone"] == pytest.approx((2.0, math.sqrt(8)))
    assert found["critic_train"] == (4.0, 0.0) and found["actor_train"] == (0.5, 0.0)
    shares = np.random.default_rng(0).normal(2.0 / 4, math.sqrt(2 / 3) / 2, (200_000, 4))
    assert problem.workloads["play"].seconds_on(4) == pytest.approx(shares.max(1).mean(), rel=0.005)
    assert problem.workloads["play"].seconds_on(1) == pytest.approx(2.0)


@pytest.mark.parametrize(("layouts", "steps", "sentence"), [
    ({"play": "d1@0"}, [1.0], "must have two steps or more"),
    ({"play": "d1@0", "critic_train": "d2@0-1"}, [1.0, 1.0], "has run critic_train at d2@0-1"),
])
def test_a_run_that_does_not_tell_the_seconds_is_refused(layouts, steps, sentence, tmp_path):
    run = a_run(tmp_path / "run", layouts, {"play": steps})
    with pytest.raises(ValueError, match=rf"expected.seconds_from is .*{sentence}"):
        problem_of(small_experiment(expected=Expected(seconds_from=run)), Cluster.load("cpu-laptop"))
