"""Soft actor-critic with demonstrations and a simulated person who steps in (HIL-SERL, Luo et al. 2024).

    realhf run examples/control/hil_serl.py
    realhf run examples/control/hil_serl.py --no-helps                       # Demonstrations only.
    realhf run examples/control/hil_serl.py --no-helps --demonstrations 0    # Neither.

Each step plays some steps of the environment and then updates the critic and the actor on batches of which a
half comes from the pool of all transitions and a half from that of demonstrations. A step of the person
replaces the policy's and goes to both pools.
"""

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from insertion import ACTION_DIM, MAX_STEPS, OBSERVATION_DIM, Person, Scene, Station
from networks import adam
from soft_actor_critic import Actor, Critic, actor_loss, critic_loss

import realhf as r
from realhf.steps.sample_pool import Samples

TRANSITION = ("observation", "action", "reward", "next_observation", "done")


def act(actor, batch):
    return {"action": actor(batch["observation"], batch["noise"])[0]}


def play(batch, context, *, seed, helps, dtype):
    """Play as many steps as a half of the rows, and return each transition twice: once for either pool.

    Those of the second half are kept if the person has acted, who always does while showing the task.
    """
    shows = context.run_state["shows"]
    scene = Scene.new(Person(), seed, shows=shows)
    if "scene" in context.state and not shows:
        scene = Scene.from_json(context.state["scene"])
    rows, helped, ends = [], [], []
    for _ in range(len(batch) // 2):
        station, random = scene.station, scene.random()
        observation = station.observation()
        by_hand = scene.person.watch(station) and helps or shows
        if by_hand:
            action = scene.person.act(random)
        else:
            noise = random.standard_normal((1, ACTION_DIM))
            asked = {"observation": as_rows([observation], dtype), "noise": as_rows(noise, dtype)}
            action = context.ask("act", asked)["action"][0].tolist()
        done = station.move(action)
        rows.append((observation, action, float(done), station.observation(), float(done)))
        helped.append(by_hand)
        if scene.advance(done):
            ends.append(done)
    if not shows:
        context.state["scene"] = scene.to_json()
    twice = [as_rows(2 * column, dtype) for column in zip(*rows, strict=True)]
    columns = dict(zip(TRANSITION, twice, strict=True))
    metrics = {"human/share": float(np.mean(helped)), "episodes/ended": len(ends), "episodes/won": sum(ends)}
    return columns | {"keep": [True] * len(rows) + helped}, metrics


def as_rows(values, dtype):
    return torch.from_numpy(np.array(values, dtype))


def play_alone(batch, context, *, episodes, dtype):
    """Play episodes without noise and without help, the same in every test; log the share of successes."""
    random = np.random.default_rng(0)
    playing = [Station.at_random(random, behind=number % 2 == 1) for number in range(episodes)]
    lengths = []
    while playing:
        seen = as_rows([station.observation() for station in playing], dtype)
        asked = {"observation": seen, "noise": as_rows(np.zeros((len(playing), ACTION_DIM)), dtype)}
        actions = context.ask("act_alone", asked)["action"].tolist()
        done = [station.move(action) for station, action in zip(playing, actions, strict=True)]
        lengths += [station.num_steps for station, is_in in zip(playing, done, strict=True) if is_in]
        playing = [
            station for station, is_in in zip(playing, done, strict=True)
            if not is_in and station.num_steps < MAX_STEPS]
    mean_steps = float(np.mean(lengths or [MAX_STEPS]))
    return {}, {"alone/success": len(lengths) / episodes, "alone/steps": mean_steps}


@dataclass
class HilSerl(r.Experiment):
    """A person shows the task, watches the policy, and steps in when it makes no progress."""

    dataset: r.ArrayDataset = field(default_factory=lambda: r.ArrayDataset(num_rows=1 << 20, shuffle=False))
    batch_size: int = 32  # Steps of the environment in each step.
    demonstrations: int = 320  # Steps of the environment that the person shows at first.
    helps: bool = True  # Whether the person intervenes.
    updates: int = 16  # Updates of the critic in each step; the actor has half as many.
    rows: int = 256  # Transitions of an update.
    width: int = 128
    discount: float = 0.97
    first_update: int = 8  # Steps before learning begins.
    dtype: str = "float32"
    test_every: int = 10
    test_episodes: int = 100

    def roles(self):
        sizes = {"observation_dim": OBSERVATION_DIM, "action_dim": ACTION_DIM, "width": self.width}
        settings = {"arguments": sizes, "dtype": self.dtype}
        return {
            "actor": r.ModuleRole(module=Actor, optimizer=adam(1e-3), **settings),
            "critic": r.ModuleRole(module=Critic, optimizer=adam(1e-3), **settings),
            "target": r.ModuleRole(module=Critic, follows="critic", follow_rate=0.005, **settings)}

    def graph(self):
        noise = {"noise": (ACTION_DIM,)}
        played = partial(play, seed=self.seed, helps=self.helps, dtype=self.dtype)
        alone = partial(play_alone, episodes=self.test_episodes, dtype=self.dtype)
        learn = r.TrainFunction(partial(critic_loss, discount=self.discount), noise=noise)
        row = ("dataset_row",)
        return r.DataflowGraph((
            r.FunctionCall(
                "play", inputs=row, outputs=TRANSITION,
                work=r.HostFunction(played, filters=True, asks=("act",))),
            r.FunctionCall("act", role="actor", inputs=row, work=r.ForwardFunction(act)),
            r.FunctionCall("play_alone", inputs=row, work=r.HostFunction(alone, asks=("act_alone",))),
            r.FunctionCall("act_alone", role="actor", inputs=row, work=r.ForwardFunction(act)),
            r.FunctionCall(
                "critic_train", role="critic", reads=("actor", "target"), inputs=TRANSITION, work=learn),
            r.FunctionCall(
                "actor_train", role="actor", reads=("critic",), inputs=("observation",),
                work=r.TrainFunction(actor_loss, noise=noise))), inputs=row)

    def parts(self, graph):
        return {
            "play": ("play", "act"), "test": ("play_alone", "act_alone"),
            "critic": ("critic_train",), "actor": ("actor_train",)}

    def step(self, run):
        online = run.pool("online", keeps=True)
        shown = run.pool("demonstrations", keeps=True)
        run.state["shows"] = run.number == 0 and self.demonstrations > 0
        num_steps = self.demonstrations if run.state["shows"] else self.batch_size
        new = run.prompts(2 * num_steps)
        run("play", new)
        if not run.state["shows"]:
            online.add(Samples(new.prompts[:num_steps]))
        shown.add(Samples(new.prompts[num_steps:]), where="play")
        for number in range(self.updates if run.number >= self.first_update else 0):
            half = self.rows // 2 if len(shown) else self.rows
            batch = online.take(half, order="random").prompts
            if len(shown):
                batch += shown.take(half, order="random").prompts
            run("critic", Samples(batch))
            if number % 2:
                run("actor", Samples(batch))
        if run.number % self.test_every == self.test_every - 1:
            run("test", Samples(new.prompts[:1]))


experiment = HilSerl(steps=200)
