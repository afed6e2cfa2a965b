"""The rivals of control.py, in an environment of their own: Sample Factory, and PPO with EnvPool.

    .venv-control-bench/bin/python benchmarks/compare/control_theirs.py KIND '{"settings": "as JSON"}'

KIND is `sample_factory`, `envpool`, or `evaluate`. Each prints lines of JSON on standard output. A training
prints one after every update, `{"frames": 2048, "return": -310.2}`, with the mean return of the episodes that
have ended since the last line, or null. At its end it writes its policy: the mean and deviation that
observations are normalised with, and the layers. `evaluate` plays such a policy, without noise.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

Tell = Callable[..., None]


def make(name: str, config: Any, env_config: Any, render_mode: str | None = None) -> Any:
    """Make an environment as Sample Factory asks for it, in its processes."""
    import gymnasium

    return gymnasium.make(name, render_mode=render_mode)


def sample_factory(settings: Mapping[str, Any], tell: Tell) -> None:
    """Train with Sample Factory's own runner, in the processes that it starts."""
    from sample_factory.algo.runners.runner import AlgoObserver
    from sample_factory.algo.utils.misc import EPISODIC
    from sample_factory.cfg.arguments import parse_full_cfg, parse_sf_args
    from sample_factory.envs.env_utils import register_env
    from sample_factory.train import make_runner

    register_env(settings["task"], make)
    out = Path(settings["out"])
    workers = settings["workers"]
    words = {
        "env": settings["task"], "experiment": "run", "train_dir": out, "device": "cpu",
        "seed": settings["seed"], "num_workers": workers,
        "num_envs_per_worker": settings["num_envs"] // workers, "worker_num_splits": 2,
        "async_rl": settings["asynchronous"], "serial_mode": False,
        "rollout": settings["horizon"], "num_epochs": settings["epochs"],
        "batch_size": settings["num_envs"] * settings["horizon"] // settings["minibatches"],
        "num_batches_per_epoch": settings["minibatches"], "shuffle_minibatches": True,
        "train_for_env_steps": settings["frames"], "learning_rate": settings["lr"],
        "gamma": settings["gamma"], "gae_lambda": settings["lam"],
        "ppo_clip_ratio": settings["clip"], "ppo_clip_value": 1e9, "value_loss_coeff": settings["value_coef"],
        "exploration_loss_coeff": 0.0, "max_grad_norm": settings["max_grad_norm"], "adam_eps": 1e-5,
        "reward_scale": settings["reward_scale"], "normalize_input": True, "normalize_returns": False,
        "use_rnn": False, "recurrence": 1, "nonlinearity": "tanh", "adaptive_stddev": False,
        "actor_critic_share_weights": False, "policy_initialization": "orthogonal",
        "save_every_sec": 10**6, "save_best_every_sec": 10**6, "experiment_summaries_interval": 10**6,
    }
    argv = [f"--{key}={value}" for key, value in words.items()] + ["--encoder_mlp_layers", "64", "64"]
    parser, _ = parse_sf_args(argv=argv)
    parser.set_defaults(lr_schedule="linear_decay")  # As in its own examples.
    config, runner = make_runner(parse_full_cfg(parser, argv))
    returns: list[float] = []

    class Teller(AlgoObserver):
        def on_training_step(self, runner: Any, training_iteration_since_resume: int) -> None:
            tell(sum(runner.env_steps.values()), returns)

    runner.register_observer(Teller())
    assert runner.init() == 0
    runner.register_episodic_stats_handler(
        lambda runner, message, policy: returns.extend(np.atleast_1d(message[EPISODIC]["reward"]).tolist()))
    assert runner.run() == 0
    (*_, last) = sorted((out / "run" / "checkpoint_p0").glob("checkpoint_*.pth"))
    model = torch.load(last, weights_only=False)["model"]
    normal = "obs_normalizer.running_mean_std.running_mean_std.obs.running_"
    names = ("actor_encoder.encoders.obs.mlp_head.0", "actor_encoder.encoders.obs.mlp_head.2",
             "action_parameterization.distribution_linear")
    layers = [model[f"{name}.{part}"] for name in names for part in ("weight", "bias")]
    save_policy(out, model[f"{normal}mean"], model[f"{normal}var"], 5.0, layers)


def mlp(inputs: int, outputs: int, *, last_gain: float) -> nn.Sequential:
    """Return two layers of 64 units with tanh and a linear one, initialised as is usual for PPO."""
    layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def envpool(settings: Mapping[str, Any], tell: Tell) -> None:
    """Train with one loop in one process, as CleanRL's scripts do, on environments of EnvPool.

    This is PPO (Schulman et al. 2017) with the settings that CleanRL documents for continuous actions; what
    differs is given by the settings.
    """
    import envpool as pool

    torch.manual_seed(settings["seed"])
    rng = np.random.default_rng(settings["seed"])
    num_envs, horizon, frames = settings["num_envs"], settings["horizon"], settings["frames"]
    envs = pool.make(
        settings["task"], env_type="gymnasium", num_envs=num_envs, seed=settings["seed"],
        num_threads=settings["workers"])
    num_inputs, num_actions = envs.observation_space.shape[0], envs.action_space.shape[0]
    actor, critic = mlp(num_inputs, num_actions, last_gain=0.01), mlp(num_inputs, 1, last_gain=1.0)
    log_std = nn.Parameter(torch.zeros(num_actions))
    weights = [*actor.parameters(), *critic.parameters(), log_std]
    adam = torch.optim.Adam(weights, lr=settings["lr"], eps=1e-5)
    count, mean, square = 1e-4, np.zeros(num_inputs), np.full(num_inputs, 1e-4)

    def normalized(now: np.ndarray) -> torch.Tensor:
        """Return observations normalised with the statistics so far, which they are added to."""
        nonlocal count, mean, square
        total, delta = count + len(now), now.mean(0) - mean
        square = square + now.var(0) * len(now) + delta**2 * count * len(now) / total
        mean = mean + delta * len(now) / total
        count = total
        return torch.from_numpy(((now - mean) / np.sqrt(square / count + 1e-8)).clip(-10, 10)).float()

    def logprob(observation: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(actor(observation), log_std.exp()).log_prob(action).sum(-1)

    shape = (horizon, num_envs)
    observation, action = torch.zeros(*shape, num_inputs), torch.zeros(*shape, num_actions)
    old_logprob, reward, going_on, advantage = (torch.zeros(shape) for _ in range(4))
    value = torch.zeros(horizon + 1, num_envs)
    now = normalized(envs.reset()[0])
    episode, returns = np.zeros(num_envs), list[float]()
    num_updates = frames // (num_envs * horizon)
    for update in range(num_updates):
        adam.param_groups[0]["lr"] = settings["lr"] * (1 - update / num_updates)
        with torch.no_grad():
            for t in range(horizon):
                observation[t] = now
                normal = torch.distributions.Normal(actor(now), log_std.exp())
                action[t] = normal.sample()
                old_logprob[t] = normal.log_prob(action[t]).sum(-1)
                value[t] = critic(now).squeeze(-1)
                following, got, terminated, truncated, _ = envs.step(action[t].numpy().clip(-1, 1))
                done = terminated | truncated
                episode += got
                returns += episode[done].tolist()
                episode[done] = 0
                reward[t] = torch.from_numpy(settings["reward_scale"] * got)
                going_on[t] = torch.from_numpy(1.0 - done)
                now = normalized(following)
            value[horizon] = critic(now).squeeze(-1)
            estimate = torch.zeros(num_envs)
            for t in reversed(range(horizon)):
                delta = reward[t] + settings["gamma"] * value[t + 1] * going_on[t] - value[t]
                estimate = delta + settings["gamma"] * settings["lam"] * going_on[t] * estimate
                advantage[t] = estimate
            target = (advantage + value[:-1]).flatten()
        rows = {
            "observation": observation.flatten(0, 1), "action": action.flatten(0, 1), "target": target,
            "logprob": old_logprob.flatten(), "advantage": advantage.flatten()}
        size = num_envs * horizon // settings["minibatches"]
        for _ in range(settings["epochs"]):
            for chosen in np.split(rng.permutation(num_envs * horizon), settings["minibatches"]):
                index = torch.from_numpy(chosen)
                batch = {key: column[index] for key, column in rows.items()}
                assert len(index) == size
                gain = batch["advantage"]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                ratio = (logprob(batch["observation"], batch["action"]) - batch["logprob"]).exp()
                clipped = ratio.clamp(1 - settings["clip"], 1 + settings["clip"])
                error = critic(batch["observation"]).squeeze(-1) - batch["target"]
                loss = -torch.minimum(ratio * gain, clipped * gain).mean()
                loss = loss + settings["value_coef"] * error.square().mean()
                adam.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(weights, settings["max_grad_norm"])
                adam.step()
        tell((update + 1) * num_envs * horizon, returns)
    layers = [parameter.detach() for parameter in actor.parameters()]
    save_policy(Path(settings["out"]), torch.from_numpy(mean), torch.from_numpy(square / count), 10.0, layers)


def save_policy(
    out: Path, mean: torch.Tensor, var: torch.Tensor, clip: float, layers: list[torch.Tensor]
) -> None:
    """Write a policy; the layers are weights and biases in turn."""
    np.savez(
        out / "policy.npz", mean=mean.numpy(), std=var.add(1e-8).sqrt().numpy(), clip=np.array(clip),
        **{f"layer{i}": layer.numpy() for i, layer in enumerate(layers)})


def evaluate(settings: Mapping[str, Any], tell: Tell) -> None:
    """Play an episode in each of `num_envs` environments of EnvPool, with the mean of the policy."""
    import envpool as pool

    policy = np.load(settings["policy"])
    layers = [policy[f"layer{i}"] for i in range(6)]
    num_envs = settings["num_envs"]
    envs = pool.make(
        settings["task"], env_type="gymnasium", num_envs=num_envs, seed=settings["seed"],
        num_threads=settings["workers"])
    now = envs.reset()[0]
    total, running, frames = np.zeros(num_envs), np.ones(num_envs, bool), 0
    while running.any():
        x = ((now - policy["mean"]) / policy["std"]).clip(-policy["clip"], policy["clip"])
        for i, (weight, bias) in enumerate(zip(layers[::2], layers[1::2], strict=True)):
            x = x @ weight.T + bias
            x = np.tanh(x) if i < 2 else x
        now, reward, terminated, truncated, _ = envs.step(x.clip(-1, 1).astype(np.float32))
        total += reward * running
        running &= ~(terminated | truncated)
        frames += num_envs
    tell(frames, total.tolist())


def main() -> None:
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Libraries print to standard error.

    def tell(frames: int, returns: list[float]) -> None:
        mean = float(np.mean(returns)) if returns else None
        returns.clear()
        lines.write(json.dumps({"frames": frames, "return": mean}) + "\n")
        lines.flush()

    kinds = {"sample_factory": sample_factory, "envpool": envpool, "evaluate": evaluate}
    settings = json.loads(sys.argv[2])
    torch.set_num_threads(settings.get("threads", 1))
    kinds[sys.argv[1]](settings, tell)


if __name__ == "__main__":
    main()
