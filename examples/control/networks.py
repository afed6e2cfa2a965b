"""Small networks of continuous control, and their optimizer."""

import math
from bisect import bisect_right
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from realhf import OptimizerConfig


def mlp(inputs: int, width: int, outputs: int, *, norm: bool = False) -> nn.Sequential:
    """Return a network with two hidden layers, perhaps normalised."""
    layers: list[nn.Module] = []
    for size in (inputs, width):
        layers += [nn.Linear(size, width), nn.LayerNorm(width) if norm else nn.Identity(), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


class Actor(nn.Module):
    """A deterministic policy with actions in [-1, 1]."""

    def __init__(self, states: int, actions: int, width: int) -> None:
        super().__init__()
        self.net = mlp(states, width, actions)

    def forward(self, state: Tensor) -> Tensor:
        return self.net(state).tanh()


class Critic(nn.Module):
    """Two values of a state and an action.

    Layer norms keep them from growing where there are no data (Ball et al. 2023).
    """

    def __init__(self, states: int, actions: int, width: int) -> None:
        super().__init__()
        self.first = mlp(states + actions, width, 1, norm=True)
        self.second = mlp(states + actions, width, 1, norm=True)

    def forward(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([state, action], dim=-1)
        return self.first(both).squeeze(-1), self.second(both).squeeze(-1)


class InverseDynamics(nn.Module):
    """A Gaussian of the inverse hyperbolic tangent of an action, given two states before it and one after."""

    def __init__(self, states: int, actions: int, width: int) -> None:
        super().__init__()
        self.net = mlp(3 * states, width, 2 * actions)

    def forward(self, previous: Tensor, state: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        states = torch.cat([previous, state, following], dim=-1)
        mean, log_deviation = self.net(states).chunk(2, dim=-1)
        return mean, log_deviation.clamp(-5, 2)


def per_row(values: Tensor) -> Tensor:
    """Return the mean of each row."""
    return values.flatten(1).mean(dim=1)


def adam(rate: float) -> OptimizerConfig:
    return OptimizerConfig(lr=rate, betas=(0.9, 0.999), weight_decay=0.0, max_grad_norm=float("inf"))


class Block(nn.Module):
    """A layer of a transformer, with rotary positions."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor, angles: Tensor, *, causal: bool) -> Tensor:
        """`angles` has shape (tokens, width of a head / 2)."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(
            rotated(q, angles), rotated(k, angles), v, is_causal=causal)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the two halves of each head against each other (Su et al. 2021)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def num_parameters(make: Callable[[], nn.Module]) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in make().parameters())


def widest(make: Callable[[int], nn.Module], most: int) -> int:
    """Return the largest width with which a module has at most so many parameters."""
    return bisect_right(range(1, 100_000), most, key=lambda width: num_parameters(lambda: make(width)))


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    made = nn.Linear(inputs, outputs)
    torch.nn.init.zeros_(made.bias)
    torch.nn.init.orthogonal_(made.weight, gain)
    return made


def tanh_mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    return nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, outputs, gain))


class Agent(nn.Module):
    """A policy, normal or over a few actions, and a value; pixels pass through convolutions first.

    Other observations are normalised by their mean and deviation over all mini-batches of training so far.
    """

    def __init__(self, shape: list[int], actions: int, discrete: bool) -> None:
        super().__init__()
        self.discrete = discrete
        pixels = len(shape) == 3
        self.body = nn.Sequential(
            nn.Conv2d(4, 16, 6, 3), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(),
            layer(800, 256), nn.ReLU(),
        ) if pixels else nn.Sequential()
        self.policy = layer(256, actions, 0.01) if pixels else tanh_mlp(shape[0], actions, 0.01)
        self.value = layer(256, 1, 1.0) if pixels else tanh_mlp(shape[0], 1, 1.0)
        self.log_std = nn.Parameter(torch.zeros(1 if discrete else actions))
        size = 1 if pixels else shape[0]
        self.register_buffer("moments", torch.stack([torch.zeros(size), torch.ones(size)]))
        self.register_buffer("count", torch.zeros(()))

    def observed(self, x):
        """Let the means of observations and of their squares include a mini-batch of training."""
        self.count.add_(1)
        self.moments.lerp_(torch.stack([x.mean(0), (x * x).mean(0)]), 1 / self.count)

    def forward(self, x):
        if x.dim() == 4:
            x = self.body(functional.layer_norm(x / 255, x.shape[1:]))  # Most of a screen is of one colour.
        else:
            mean, square = self.moments
            x = ((x - mean) / (square - mean * mean).clamp_min(1e-8).sqrt()).clamp(-10, 10)
        outputs = self.policy(x)
        logits_or_std = outputs.log_softmax(-1) if self.discrete else self.log_std.exp().expand_as(outputs)
        return outputs, logits_or_std, self.value(x).squeeze(-1)

    def logprob(self, outputs, logits_or_std, action):
        """Return the log-probs of actions, and the entropies."""
        if self.discrete:
            entropy = -(logits_or_std.exp() * logits_or_std).sum(-1)
            return logits_or_std.gather(-1, action.long()).squeeze(-1), entropy
        constant = self.log_std + 0.5 * math.log(2 * math.pi)
        logprob = -(0.5 * ((action - outputs) / logits_or_std).square() + constant).sum(-1)
        return logprob, (0.5 + constant).sum().expand_as(logprob)
