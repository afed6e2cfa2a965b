"""A transformer of states and actions whose tokens are components, or whole states and actions."""

import math
from collections.abc import Callable

import torch
from networks import Block
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

BINS = 64
RANGE, MU = 4.0, 10.0
"""Values beyond 4 standard deviations are cut. Bins are narrower near the mean (mu-law)."""

RANK = 4  # Of the adapters.
CANDIDATES = 16  # Actions that C-GPT weighs for an inverse prediction.


def encode(values: Tensor) -> Tensor:
    """Return normalised values in [-1, 1]."""
    return values.sign() * (1 + MU * values.abs().clamp(max=RANGE) / RANGE).log() / math.log(1 + MU)


def bins_of(values: Tensor) -> Tensor:
    return ((encode(values) + 1) / 2 * BINS).long().clamp(0, BINS - 1)


def bin_codes(like: Tensor) -> Tensor:
    """Return the codes in the middle of the bins."""
    return (torch.arange(BINS, device=like.device, dtype=like.dtype) + 0.5) / BINS * 2 - 1


def centres(like: Tensor) -> Tensor:
    """Return the values in the middle of the bins."""
    codes = bin_codes(like)
    return codes.sign() * RANGE * ((1 + MU) ** codes.abs() - 1) / MU


class Pasta(nn.Module):
    """Returns logits of the bins of all components, (rows, steps, components, bins), given what is hidden.

    Each has a free part, and a bell around the component's value one step before (if it is hidden: the mean);
    the model moves and narrows the bell. `hidden` is the width of feed-forward layers. `gpt` is causal.
    """

    def __init__(
        self, states: int, actions: int, tokens: str, objective: str, hidden: int, width: int, layers: int
    ) -> None:
        super().__init__()
        self.states, self.causal = states, objective == "gpt"
        self.sizes = [1] * (states + actions) if tokens == "component" else [states, actions]
        sizes = [1] if tokens == "component" else self.sizes  # All components share their layers.
        self.values = nn.ModuleList(nn.Linear(5 * size, width) for size in sizes)
        self.head = nn.ModuleList(nn.Linear(width, size * (BINS + 2)) for size in sizes)
        self.kind = nn.Embedding(len(self.sizes), width)
        self.following = nn.Embedding(len(self.sizes), width)
        self.hidden = nn.Parameter(torch.zeros(width))
        self.start = nn.Parameter(torch.zeros(width))
        self.blocks = nn.ModuleList(Block(width, 4, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.half = width // 4 // 2

    def forward(self, values: Tensor, hidden: Tensor) -> Tensor:
        steps, kinds = values.shape[1], len(self.sizes)
        codes = encode(values).masked_fill(hidden, 0)
        before_hidden = functional.pad(hidden[:, :-1], (0, 0, 1, 0), value=True)[..., None]
        waves = [function(k * math.pi * codes) for k in (1, 2) for function in (torch.sin, torch.cos)]
        features = torch.stack([codes, *waves], dim=-1)
        if len(self.values) == 1:
            x = self.values[0](features)
        else:
            parts = zip(self.values, features.split(self.sizes, dim=2), strict=True)
            x = torch.stack([linear(part.flatten(2)) for linear, part in parts], dim=2)
            hidden = torch.stack([part.all(dim=-1) for part in hidden.split(self.sizes, dim=-1)], dim=2)
        x = (torch.where(hidden[..., None], self.hidden, x) + self.kind.weight).flatten(1, 2)
        if self.causal:  # Each place has the token before it, and the kind of its own.
            before = torch.cat([self.start.expand(len(x), 1, -1), x[:, :-1]], dim=1)
            x = before + self.following.weight.repeat(steps, 1)
        time = torch.arange(steps, dtype=x.dtype, device=x.device).repeat_interleave(kinds)
        rates = 100.0 ** -(torch.arange(self.half, dtype=x.dtype, device=x.device) / self.half)
        for block in self.blocks:
            x = block(x, time[:, None] * rates, causal=self.causal)
        x = self.norm(x).unflatten(1, (steps, kinds))
        if len(self.head) == 1:
            outputs = self.head[0](x)
        else:
            heads = enumerate(self.head)
            outputs = torch.cat([h(x[:, :, k]).unflatten(-1, (-1, BINS + 2)) for k, h in heads], dim=2)
        free, shift, narrow = outputs.split((BINS, 1, 1), dim=-1)
        centre = functional.pad(codes[:, :-1], (0, 0, 1, 0))[..., None] + shift
        precision = (narrow + torch.where(before_hidden, 1.0, 5.0).to(x)).exp()
        return free - precision * (bin_codes(x) - centre) ** 2


def masked_error(logits: Tensor, values: Tensor, chosen: Tensor) -> Tensor:
    """Return each row's mean cross-entropy of the chosen components."""
    loss = functional.cross_entropy(logits.movedim(-1, 1), bins_of(values), reduction="none")
    return (loss * chosen).flatten(1).sum(dim=1) / chosen.flatten(1).sum(dim=1).clamp(min=1)


def drawn_mask(noise: Tensor, values: Tensor, states: int) -> Tensor:
    """Return what C-BERT does not see: components in half of the windows, else whole states and actions."""
    uniform = torch.special.ndtr(noise)
    rate = (0.1 + 0.8 * uniform[:, 0])[:, None, None]
    single = uniform[:, 2:].view(values.shape) < rate
    state, action = single[..., :states], single[..., states:]
    whole = torch.cat([state[..., :1].expand_as(state), action[..., :1].expand_as(action)], dim=-1)
    return torch.where((uniform[:, 1] < 0.5)[:, None, None], single, whole)


Logits = Callable[[Tensor, Tensor], Tensor]


class Adapter(nn.Module):
    """Low-rank changes of the attention layers' weights (Hu et al. 2021)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        sizes = {"qkv": 3 * width, "out": width}
        rows = {f"blocks.{i}.{name}.weight": size for i in range(layers) for name, size in sizes.items()}
        self.names = list(rows)
        self.down = nn.ParameterList(torch.randn(RANK, width) / width**0.5 for _ in rows)
        self.up = nn.ParameterList(torch.zeros(size, RANK) for size in rows.values())

    def forward(self, model: Pasta) -> Logits:
        """Return the model with these changes."""
        weights = dict(model.named_parameters())
        changed = {
            name: weights[name] + up @ down
            for name, up, down in zip(self.names, self.up, self.down, strict=True)}
        return lambda values, hidden: functional_call(model, changed, (values, hidden))


def asked_of(question: str, values: Tensor, states: int) -> Tensor:
    """Return which components of a window a question asks for: at its end, or one step before."""
    asked = torch.zeros_like(values, dtype=torch.bool)
    if question == "forward":
        asked[:, -1, :states] = True
    else:
        asked[:, -1 if question == "action" else -2, states:] = True
    return asked



def predict(
    model: Pasta, logits: Logits, values: Tensor, question: str, *, failed: Tensor | None = None
) -> Tensor:
    """Return the windows with a question's components predicted, where those that have failed are not seen.

    `logits` is the model, perhaps with adapters.
    """
    asked = asked_of(question, values, model.states)
    if failed is not None:
        values = values.masked_fill(failed, 0.0)
    if not model.causal:
        unseen = asked.clone() if failed is None else asked | failed
        unseen[:, -1, model.states:] = True
        return torch.where(asked, logits(values, unseen).softmax(dim=-1) @ centres(values), values)
    if question == "inverse":
        return weighed(model, logits, values, asked)
    return in_turn(model, logits, values, asked)


def in_turn(
    model: Pasta, logits: Logits, values: Tensor, asked: Tensor, uniform: Tensor | None = None
) -> Tensor:
    """Predict one token after the other from those before it: its mean, or what uniform numbers draw."""
    values = values.masked_fill(asked, 0.0)
    hidden = torch.zeros_like(asked)
    places = asked[0].nonzero()
    step, first, end = int(places[0, 0]), int(places[0, 1]), int(places[-1, 1]) + 1
    width = 1 if len(model.sizes) > 2 else end - first
    for place in range(first, end, width):
        here = slice(place, place + width)
        shares = logits(values, hidden)[:, step, here].softmax(dim=-1)
        if uniform is None:
            values[:, step, here] = shares @ centres(values)
        else:
            wanted = uniform[:, here.start - first : here.stop - first, None].contiguous()
            drawn = torch.searchsorted(shares.cumsum(dim=-1), wanted).squeeze(-1)
            values[:, step, here] = centres(values)[drawn.clamp(max=BINS - 1)]
    return values


def weighed(model: Pasta, logits: Logits, values: Tensor, asked: Tensor) -> Tensor:
    """Draw actions, and return their mean, weighed by how probable the next state is after each."""
    states = slice(0, model.states)
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(CANDIDATES, values.shape[2] - model.states, generator=generator)
    fits, candidates = [], []
    for candidate in uniform.to(values):
        tried = in_turn(model, logits, values, asked, candidate.expand(len(values), -1))
        following = logits(tried, torch.zeros_like(asked))[:, -1, states].log_softmax(dim=-1)
        chances = following.gather(-1, bins_of(values[:, -1, states])[..., None])
        fits.append(chances.flatten(1).sum(dim=1))
        candidates.append(tried)
    return (torch.stack(fits).softmax(dim=0)[..., None, None] * torch.stack(candidates)).sum(dim=0)


def squared(values: Tensor, predicted: Tensor, asked: Tensor) -> Tensor:
    """Return each row's mean squared error of the asked components, in variances."""
    return ((predicted - values) ** 2 * asked).flatten(1).sum(dim=1) / asked.flatten(1).sum(dim=1)
