"""Soft actor-critic (Haarnoja et al. 2018) as RLPD and HIL-SERL have it: modules and losses.

Two critics, of which the lesser gives the target; LayerNorm and tanh; a temperature that is learned; and no
entropy in the target. Suffixes of shapes: M members of an ensemble, B rows, I inputs.
"""

import math

import torch
from torch import Tensor, nn


class EnsembleLinear(nn.Module):
    """Linear layers side by side, one for each member of an ensemble."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))
        for weight in self.weight:
            nn.init.xavier_uniform_(weight)

    def forward(self, x_MBI: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, x_MBI, self.weight)


def layers(members: int, inputs: int, width: int, outputs: int) -> nn.Sequential:
    """Return two hidden layers with LayerNorm and tanh, and a linear one."""
    return nn.Sequential(
        EnsembleLinear(members, inputs, width), nn.LayerNorm(width), nn.Tanh(),
        EnsembleLinear(members, width, width), nn.LayerNorm(width), nn.Tanh(),
        EnsembleLinear(members, width, outputs))


class Critic(nn.Module):
    """An ensemble of two estimates of the discounted reward."""

    def __init__(self, observation_dim: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.layers = layers(2, observation_dim + action_dim, width, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Return the estimates, shape (2, rows)."""
        x = torch.cat([observation, action], -1)
        return self.layers(x.expand(2, *x.shape)).squeeze(-1)


class Actor(nn.Module):
    """A Gaussian policy whose actions go through tanh, and the temperature of its entropy."""

    def __init__(self, observation_dim: int, action_dim: int, width: int) -> None:
        super().__init__()
        self.layers = layers(1, observation_dim, width, 2 * action_dim)
        self.log_temperature = nn.Parameter(torch.tensor(math.log(0.01)))

    def forward(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions for standard normal noise, and their log-probs."""
        mean, log_std = self.layers(observation[None])[0].chunk(2, -1)
        log_std = log_std.clamp(-5, 1.6)
        x = mean + log_std.exp() * noise
        log_gauss = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
        log_slope = 2 * (math.log(2) - x - nn.functional.softplus(-2 * x))  # log(1 - tanh(x)^2)
        return x.tanh(), (log_gauss - log_slope).sum(-1)


def critic_loss(critic, batch, actor, target, discount):
    """Return the squared errors to reward + discount * lesser target, which is cut to what rewards allow."""
    with torch.no_grad():
        action, _ = actor(batch["next_observation"], batch["noise"])
        following = target(batch["next_observation"], action).min(0).values
        goal = (batch["reward"] + discount * (1 - batch["done"]) * following).clamp(0, 1)
    value = critic(batch["observation"], batch["action"])
    return (value - goal).square().mean(0), {"value": value.mean(0)}


def actor_loss(actor, batch, critic):
    """Return minus the value plus the entropy's part, and the loss of the temperature."""
    action, log_prob = actor(batch["observation"], batch["noise"])
    value = critic(batch["observation"], action).mean(0)
    temperature = actor.log_temperature.exp()
    policy_loss = temperature.detach() * log_prob - value
    temperature_loss = temperature * (action.shape[1] / 2 - log_prob.detach())
    return policy_loss + temperature_loss, {"entropy": -log_prob, "temperature": temperature.expand_as(value)}
