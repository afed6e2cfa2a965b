"""SS-ORL: its run equals a plain loop, under every plan, and goes on exactly."""

import copy
from contextlib import chdir
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from realhf import ArrayDataset
from tests.cli_tools import untimed
from tests.control import offline

ROWS, STATES, ACTIONS = 100, 3, 2
SETTINGS = {
    "task": "hopper_small", "updates": 4, "inverse_steps": 2, "play_every": 100, "width": 8, "rate": 3e-4,
    "dtype": "float64", "batch_size": 8, "steps": 4, "checkpoint_every": 1, "keep_checkpoints": 9}


def make(directory, **settings):
    from ss_orl import SSORL

    experiment = SSORL(**SETTINGS | settings)
    experiment.dataset = ArrayDataset(str(directory / "rows.safetensors"), shuffle=False)
    return experiment


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Write rows of noise, of which every fourth is labelled."""
    from ss_orl import PER_ROW

    path = tmp_path_factory.mktemp("rows")
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(ROWS, PER_ROW, *shape, generator=generator, dtype=torch.float64)

    rows = {key: drawn(STATES) for key in ("previous", "state", "following")}
    rows |= {key: drawn(ACTIONS).tanh() for key in ("oracle", "shuffled")} | {"reward": drawn()}
    rows["ended"] = (drawn() > 1).double()
    rows["labelled"] = (torch.arange(ROWS) % 4 == 0).double()[:, None].expand(-1, PER_ROW).contiguous()
    save_file(rows, path / "rows.safetensors")
    return path


def plain_loop(directory, source: str) -> list[dict[str, float]]:
    """Return the losses of each step, as a loop in one process computes them."""
    import ss_orl

    experiment = make(directory, source=source)
    rows = load_file(directory / "rows.safetensors")
    modules = offline.initial(experiment)
    optimizers = {
        name: torch.optim.Adam(modules[name].parameters(), lr=role.optimizer.lr, betas=(0.9, 0.999))
        for name, role in experiment.roles().items() if role.optimizer}
    action = {"labelled": "label"}.get(source, source)
    place, critic_steps, metrics = 0, 0, []

    def update(role, function, batch, number, **beside):
        losses = []
        size = len(batch["ids"]) // number
        for part in range(number):
            some = {key: column[part * size : (part + 1) * size] for key, column in batch.items()}
            returned = function(modules[role], some, **beside)
            loss = (returned[0] if isinstance(returned, tuple) else returned).mean()
            optimizers[role].zero_grad()
            loss.backward()
            optimizers[role].step()
            losses.append(loss.item())
        return sum(losses) / number

    for step in range(experiment.steps):
        inverse = source == "proxy" and step < experiment.inverse_steps
        count = 8 * (10 if inverse or source == "labelled" else 1)
        ids = torch.arange(place, place + count)
        batch = {key: column[ids % ROWS] for key, column in rows.items()} | {"ids": ids}
        place += count
        if inverse or source == "labelled":
            batch = {key: column[batch["labelled"][:, 0] > 0] for key, column in batch.items()}
            batch["label"] = batch["oracle"]
        if inverse:
            metrics.append({"idm/loss": update("idm", ss_orl.inverse_loss, batch, 4)})
            continue
        if source == "proxy":
            with torch.no_grad():
                batch |= ss_orl.proxy(modules["idm"], batch)
        with torch.no_grad():
            sizes = ss_orl.values(modules["critic"], batch, modules["actor"])["size"]
        batch["scale"] = sizes.mean().expand(len(sizes))
        size = len(batch["ids"]) // 4
        shape = (ss_orl.PER_ROW, ACTIONS)
        batch["noise"] = torch.cat([
            offline.normal_noise(
                0, "critic_train", critic_steps + i, batch["ids"][i * size : (i + 1) * size].tolist(), shape)
            for i in range(4)])
        critic_steps += 4
        targets = {key: copy.deepcopy(modules[key]) for key in ("next_actor", "next_critic")}
        loss = partial(ss_orl.critic_loss, action=action)
        found = {"critic/loss": update("critic", loss, batch, 4, **targets)}
        follow(modules, "critic", experiment)
        critic = copy.deepcopy(modules["critic"]).requires_grad_(False)
        loss = partial(ss_orl.actor_loss, action=action)
        found["actor/loss"] = update("actor", loss, batch, 2, critic=critic)
        follow(modules, "actor", experiment)
        metrics.append(found)
    return metrics


def follow(modules, role: str, experiment) -> None:
    """Move the target network towards its role."""
    rate = experiment.roles()[f"next_{role}"].follow_rate
    with torch.no_grad():
        pairs = zip(modules[f"next_{role}"].parameters(), modules[role].parameters(), strict=True)
        for average, now in pairs:
            average.lerp_(now, rate)


PLANS = {
    "one": {},
    "replicas": dict.fromkeys(("idm_train", "label", "critic_train", "values", "actor_train"), "d2@0-1"),
    "apart": {
        "idm_train": "d2@0-1", "label": "d1@2", "critic_train": "d2@2-3", "values": "d1@1",
        "actor_train": "d2@0-1"},
}


@pytest.fixture(scope="module")
def reference(pool, directory):
    return pool.run(offline.run, make, {"directory": directory}, PLANS["one"])[0]


@pytest.mark.parametrize("source", ["proxy", "labelled"])
def test_a_run_equals_a_plain_loop(pool, directory, source):
    ours = pool.run(offline.run, make, {"directory": directory, "source": source}, PLANS["one"])[0]
    expected = plain_loop(directory, source)
    assert not offline.differences(ours, expected)
    assert any("critic/loss" in step for step in expected)


@pytest.mark.parametrize("plan", ["replicas", "apart"])
def test_a_plan_changes_no_number(pool, directory, reference, plan):
    ours = pool.run(offline.run, make, {"directory": directory}, PLANS[plan])[0]
    assert not offline.differences(ours, reference)


def test_a_run_goes_on_bit_for_bit(pool, directory, tmp_path):
    """From a checkpoint amid the inverse dynamics, and from one after it."""
    settings = {"directory": directory}
    pool.run(offline.run, make, settings, PLANS["apart"], tmp_path / "whole")
    for step in (1, 3):
        out = tmp_path / f"from_{step}"
        start = tmp_path / f"whole/checkpoints/step_{step}"
        pool.run(offline.run, make, settings, PLANS["apart"], out, start)
        assert untimed(out / "metrics.jsonl") == untimed(tmp_path / "whole/metrics.jsonl")


def played(world, directory, layouts, out):
    """Make the data of the small task in `directory`, and learn and play on it."""
    from ss_orl import SSORL

    settings = {"source": "oracle", "steps": 2, "play_every": 1, "play_episodes": 2, "dtype": "float32"}
    with chdir(directory):
        return offline.run(world, SSORL, SETTINGS | settings, layouts, out)


def test_a_policy_plays_while_it_learns(pool, tmp_path):
    """Questions to the actor are answered inline and remotely; returns are those of the exported policy."""
    pytest.importorskip("mujoco")
    from networks import Actor
    from offline_rows import normal
    from trajectories import TASKS, returns

    inline = pool.run(played, tmp_path, {}, tmp_path / "run")[0]
    remote = pool.run(played, tmp_path, {"act": "d1@1", "critic_train": "d2@0-1"}, None)[0]
    assert not offline.differences(remote, inline, rel=1e-5)
    assert [step["return"] for step in remote] == pytest.approx([step["return"] for step in inline], rel=1e-4)
    actor = Actor(11, 3, SETTINGS["width"])
    actor.load_state_dict(load_file(tmp_path / "run/hf/step_2/model.safetensors"))
    with chdir(tmp_path):
        mean, deviation = normal(TASKS["hopper_small"])

    @torch.no_grad()
    def policy(observations):
        return actor(torch.as_tensor((observations - mean) / deviation, dtype=torch.float32)).numpy()

    expected = returns(TASKS["hopper_small"], policy, episodes=2, seed=1000).mean()
    assert inline[-1]["return"] == pytest.approx(expected, rel=1e-6)
