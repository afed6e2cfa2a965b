"""Workloads that all sides of a benchmark share: a Hugging Face directory with random weights, and prompts.

The model decides how long answers are. One dim of its residual stream is constant, and the end token's output
weight there makes that token come with a given probability after every token, or never. So every library
samples lengths from the same, nearly geometric distribution, with one plain end token.
"""

import json
import math
import random
import string
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from realhf.user_input.shipped import shipped_dir

SIZES = ("tiny", "100m")
PAD, END = 0, 1
LETTERS = string.ascii_letters + string.digits
_FIRST_WORD = 2
_LARGE = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 4,
    "intermediate_size": 2048, "vocab_size": 32000, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
_LARGEST = _LARGE | {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "intermediate_size": 8192, "max_position_embeddings": 16384,
}
_SHIPPED = {"tiny": "tiny.json", "1.5b": "qwen2.5-1.5b.json"}
_NEVER = -30.0  # The end token's logit if it must never come.


class Scene(NamedTuple):
    """One measurement: model size, dtype and workload."""

    size: str
    dtype: str
    workload: str
    directory: Path

    @property
    def name(self) -> str:
        return f"{self.size} {self.dtype} {self.workload}"


def config_of(size: str) -> Qwen2Config:
    """Return the config of a size.

    `tiny` is the shipped model of that name, as large as the demo's. `100m` has 100M parameters and Qwen2's
    shape. `1b`, for a GPU, has ten times as many and the shape of Llama 3.2; `1.5b` is Qwen2.5's.
    """
    fields: dict[str, Any] = _LARGEST if size == "1b" else _LARGE
    if size in _SHIPPED:
        fields = json.loads((shipped_dir("models") / _SHIPPED[size]).read_text())
        fields = {name: fields[name] for name in _LARGE}
    return Qwen2Config(**fields, pad_token_id=PAD, eos_token_id=END, bos_token_id=None)


def write_model(
    directory: Path, size: str, *, end_probability: float, seed: int = 0, dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Write a model of a size, see `write_random_model`."""
    write_random_model(
        directory, config_of(size), end_probability=end_probability, seed=seed, dtype=dtype, device=device)


def write_random_model(
    directory: Path, config: Qwen2Config, *, end_probability: float, seed: int = 0, dtype: str = "float32",
    device: str = "cpu",
) -> None:
    """Write config, weights (drawn on `device`), and a tokenizer that turns every letter into a token."""
    torch.manual_seed(seed)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    _set_end(model, end_probability)
    model.to(getattr(torch, dtype))
    model.generation_config.update(eos_token_id=END, pad_token_id=PAD)
    model.save_pretrained(directory)
    words = ["<pad>", "<eos>", *LETTERS, *(f"word{i}" for i in range(config.vocab_size))][: config.vocab_size]
    Qwen2Tokenizer(
        {word: i for i, word in enumerate(words)}, merges=[], pad_token="<pad>", eos_token="<eos>",
        unk_token="<pad>", padding_side="left",
    ).save_pretrained(directory)


@torch.no_grad()
def _set_end(model: Qwen2ForCausalLM, probability: float) -> None:
    """Make the end token come with this mean probability after random tokens; 0: never."""
    weight = model.get_input_embeddings().weight
    inner = model.model
    weight[:, 0] = weight.std()
    for layer in inner.layers:
        layer.self_attn.o_proj.weight[0] = 0
        layer.mlp.down_proj.weight[0] = 0
    tokens = torch.randint(_FIRST_WORD, len(weight), (8, 64), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(weight.device)
    inner.norm.weight[0] /= inner(tokens).last_hidden_state[..., 0].mean()
    hidden = inner(tokens).last_hidden_state.flatten(0, 1)
    logits = hidden @ weight.T
    others = logits.clone()
    others[:, END] = -torch.inf
    odds = others.logsumexp(-1)
    state = hidden[:, 0]
    remainder = logits[:, END] - state * weight[END, 0]
    low, high = _NEVER, 30.0
    for _ in range(60 if probability > 0 else 0):
        middle = (low + high) / 2
        mean = float((remainder + state * middle - odds).sigmoid().mean())
        low, high = (middle, high) if mean < probability else (low, middle)
    weight[END, 0] = low


def geometric_lengths(count: int, *, mean: float, most: int, seed: int = 0) -> list[int]:
    """Return lengths from 1 to `most`, geometric except that they are truncated there."""
    rng = random.Random(seed)
    return [min(most, 1 + int(math.log(1 - rng.random()) / math.log(1 - 1 / mean))) for _ in range(count)]


def texts(lengths: list[int], *, seed: int = 0) -> list[str]:
    """Return texts of random letters with these numbers of tokens."""
    rng = random.Random(seed)
    return ["".join(rng.choices(LETTERS, k=length)) for length in lengths]


def sequences(lengths: list[int], *, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return sequences of random tokens."""
    rng = random.Random(seed)
    return [[rng.randrange(_FIRST_WORD, vocab_size) for _ in range(length)] for length in lengths]
