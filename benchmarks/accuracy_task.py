"""The experiments of plan_accuracy.py: PPO with four roles, or GRPO, on a model of a given size."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@dataclass(frozen=True)
class Size:
    """The size of a model and of a step."""

    hidden: int
    mlp: int
    layers: int
    heads: int
    vocabulary: int
    prompts: int
    group: int
    prompt_tokens: tuple[int, int]
    new_tokens: int


SIZES = {
    "small": Size(256, 768, 4, 4, 128, prompts=8, group=4, prompt_tokens=(16, 32), new_tokens=64),
    "demo": Size(64, 256, 2, 4, 64, prompts=64, group=8, prompt_tokens=(6, 10), new_tokens=15),
}


def write_experiment(directory: Path, *, algorithm: str, size: Size, steps: int) -> Path:
    """Write model config, tokenizer, prompts and the experiment, and return the experiment's path.

    The learning rate is zero, so that all steps do the same work.
    """
    from transformers import Qwen2Tokenizer

    specials = ["<pad>", "<eos>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *_LETTERS])}
    Qwen2Tokenizer(
        vocabulary, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    ).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(_config(size)))
    rng = random.Random(0)
    with (directory / "prompts.jsonl").open("w") as file:
        for _ in range(size.prompts * 16):
            prompt = "".join(rng.choices(_LETTERS, k=rng.randint(*size.prompt_tokens)))
            file.write(json.dumps({"prompt": prompt, "answer": "a"}) + "\n")
    path = directory / f"{algorithm}.py"
    path.write_text(_EXPERIMENT[algorithm].format(task=str(directory), steps=steps, size=size))
    return path


def _config(size: Size) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": size.vocabulary,
        "hidden_size": size.hidden, "intermediate_size": size.mlp, "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads, "num_key_value_heads": max(1, size.heads // 2),
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "initializer_range": 0.02,
        "tie_word_embeddings": True, "pad_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


_COMMON = """
import realhf

task = {task!r}
optimizer = realhf.OptimizerConfig(lr=0.0)
lm = dict(model=task, random_init=True)
common = dict(
    dataset=realhf.DatasetConfig(task + "/prompts.jsonl"), tokenizer=task,
    sampling=realhf.SamplingConfig(max_new_tokens={size.new_tokens}),
    steps={steps}, batch_size={size.prompts}, group_size={size.group},
)
"""
_EXPERIMENT = {
    "ppo": _COMMON + """
experiment = realhf.PPO(
    actor=realhf.Role(**lm, optimizer=optimizer), ref=realhf.Role(**lm),
    critic=realhf.Role(**lm, head="score", optimizer=optimizer), reward=realhf.Role(**lm, head="score"),
    minibatches=2, **common,
)
""",
    "grpo": _COMMON + """

def reward(prompts, completions, completion_ids):
    return [float(len(ids)) for ids in completion_ids]


experiment = realhf.GRPO(
    actor=realhf.Role(**lm, optimizer=optimizer), ref=realhf.Role(**lm), reward_function=reward,
    loss=realhf.PolicyLossConfig(kl_coef=0.01), **common,
)
""",
}
