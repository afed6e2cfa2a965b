"""GRPO with an environment: a tiny model, drawn at random, learns to guess a number from hints.

    realhf run examples/guess_number.py
"""

import json
import random
from pathlib import Path

from realhf import (
    GRPO,
    DatasetConfig,
    Environment,
    OptimizerConfig,
    PolicyLossConfig,
    Role,
    SamplingConfig,
    Start,
    Turn,
    prepare_once,
)

LARGEST = 6
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}"
MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 12, "hidden_size": 48,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "rms_norm_eps": 1e-6, "initializer_range": 0.1, "pad_token_id": 0, "eos_token_id": 1}


class GuessNumber:
    """A number from 1 to LARGEST, which the model must guess. A wrong guess gets `+` or `-` as a hint."""

    def start(self, row: dict, seed: int) -> Start:
        self.number = random.Random(seed).randint(1, LARGEST)
        return Start("?")

    def step(self, message: dict) -> Turn:
        guess = message["content"]
        if guess == str(self.number):
            return Turn(reward=1.0, done=True)
        if not guess.isdigit():
            return Turn("!", reward=-0.1)
        return Turn("+" if int(guess) < self.number else "-")


def write_task(directory: Path) -> None:
    """Write the model's config, its tokenizer of characters, and rows."""
    from transformers import Qwen2Tokenizer

    characters = ["<pad>", "<end>", *"?+-!", *map(str, range(1, LARGEST + 1))]
    vocabulary = {token: i for i, token in enumerate(characters)}
    tokenizer = Qwen2Tokenizer(vocabulary, merges=[], pad_token="<pad>", eos_token="<end>", unk_token="<pad>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory / "model")
    (directory / "model" / "config.json").write_text(json.dumps(MODEL))
    for name, count in {"prompts": 256, "held_out": 64}.items():
        rows = [{"prompt": [{"role": "user", "content": "?"}], "number": i} for i in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


task = prepare_once(Path("runs/guess_number/task"), write_task)
experiment = GRPO(
    actor=Role(str(task / "model"), random_init=True, optimizer=OptimizerConfig(lr=3e-3)),
    dataset=DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl")),
    environment=Environment(GuessNumber, max_turns=3, max_tokens=40),
    sampling=SamplingConfig(max_new_tokens=3),
    loss=PolicyLossConfig(entropy_coef=0.06),
    steps=100, batch_size=16, group_size=16, eval_every=25)
