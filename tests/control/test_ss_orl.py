"""SS-ORL: its run equals a plain loop, and its policy plays while it learns."""

import copy
from contextlib import chdir
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.control import programs
from tests.control.programs import ACTIONS, ROWS


def plain_loop(source: str) -> list[dict[str, float]]:
    """Return the losses of each step, as a loop in one process computes them."""
    import ss_orl

    experiment = programs.make("ss_orl", steps=4, source=source)
    rows = load_file(experiment.dataset.path)
    modules = programs.initial(experiment)
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
            programs.normal_noise(
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


@pytest.mark.parametrize("source", ["proxy", "labelled"])
def test_a_run_equals_a_plain_loop(pool, tmp_path, monkeypatch, source):
    programs.write_rows(tmp_path)
    monkeypatch.chdir(tmp_path)
    ours = pool.run(programs.run, "ss_orl", tmp_path, {}, {"steps": 4, "source": source})[0]
    assert not programs.differences(ours, plain_loop(source))


def test_a_policy_plays_while_it_learns(pool, tmp_path):
    """Questions to the actor are answered inline and remotely; returns are those of the exported policy."""
    pytest.importorskip("mujoco")
    from networks import Actor
    from offline_rows import normal
    from trajectories import TASKS, returns

    settings = {
        "source": "oracle", "steps": 2, "play_every": 1, "play_episodes": 2, "checkpoint_every": 1,
        "dtype": "float32"}
    inline = pool.run(programs.run, "ss_orl", tmp_path, {}, settings, tmp_path / "run")[0]
    layouts = {"act": "d1@1", "critic_train": "d2@0-1"}
    remote = pool.run(programs.run, "ss_orl", tmp_path, layouts, settings)[0]
    assert not programs.differences(remote, inline, rel=1e-5)
    assert [step["return"] for step in remote] == pytest.approx([step["return"] for step in inline], rel=1e-4)
    actor = Actor(11, 3, programs.SMALL["ss_orl"]["width"])
    actor.load_state_dict(load_file(tmp_path / "run/hf/step_2/model.safetensors"))
    with chdir(tmp_path):
        mean, deviation = normal(TASKS["hopper_small"])

    @torch.no_grad()
    def policy(observations):
        return actor(torch.as_tensor((observations - mean) / deviation, dtype=torch.float32)).numpy()

    expected = returns(TASKS["hopper_small"], policy, episodes=2, seed=1000).mean()
    assert inline[-1]["return"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("labelled", ["lower", "all"])
def test_rows_are_labelled_in_the_lower_half_or_in_all(tmp_path, monkeypatch, labelled):
    """Shuffled actions are true where they are labelled, and elsewhere the others in another order."""
    pytest.importorskip("mujoco")
    from offline_rows import PER_ROW, labelled_rows
    from trajectories import TASKS, load

    monkeypatch.chdir(tmp_path)
    rows = {k: v.flatten(0, 1) for k, v in load_file(labelled_rows("hopper_small", 1, labelled)).items()}
    trajectories = load(TASKS["hopper_small"])
    owner = {
        tuple(action.tolist()): number
        for number, t in enumerate(trajectories) for action in t["actions"].astype("float32")}
    known = rows["labelled"] > 0
    owners = [{owner[tuple(action)] for action in rows["oracle"][part].tolist()} for part in (known, ~known)]
    assert not owners[0] & owners[1] and 0 < len(owners[0]) <= len(trajectories) // 10
    assert (max(owners[0]) < len(trajectories) // 2) == (labelled == "lower")
    assert torch.equal(rows["shuffled"][known], rows["oracle"][known])
    hidden = rows["shuffled"][~known].tolist()
    assert all(tuple(action) in owner for action in hidden)
    assert hidden != rows["oracle"][~known].tolist()
    assert len(known) % PER_ROW == 0
