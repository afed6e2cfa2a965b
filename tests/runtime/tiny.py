"""A tiny task for runtime tests: model config, character tokenizer and prompts in a directory, and
experiments on them.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from realhf import (
    GRPO,
    PPO,
    SFT,
    DatasetConfig,
    FunctionCall,
    HostFunction,
    OptimizerConfig,
    PolicyLossConfig,
    Role,
    SamplingConfig,
)

CHARACTERS = "0123456789+= abc"
HF_CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 2 + len(CHARACTERS),
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def write_task(directory: Path) -> Path:
    """Write config.json, a tokenizer, data.jsonl and held_out.jsonl into `directory`."""
    from transformers import (
        Qwen2Tokenizer,
    )  # Here, as the experiments below do not need it and it takes a second.

    # AutoTokenizer reads every tokenizer of a qwen2 model as Qwen2Tokenizer: byte-level, with "Ġ" for a
    # space.
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *CHARACTERS.replace(" ", "Ġ")])}
    tokenizer = Qwen2Tokenizer(vocabulary, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    rng = random.Random(0)
    numbers = [(rng.randrange(200), rng.randrange(20)) for _ in range(40)]
    held_out = [(a, b + 20) for a, b in numbers[:5]]
    for name, pairs in (("data.jsonl", numbers), ("held_out.jsonl", held_out)):
        rows = [{"prompt": f"{a}+{b}=", "completion": str(a + b), "answer": str(a + b)} for a, b in pairs]
        (directory / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def some_reward(
    prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str]
) -> list[float]:
    """Return rewards that differ between samples of an untrained model."""
    return [sum(ids) % 7 / 7 + 0.1 * len(text) for ids, text in zip(completion_ids, completions, strict=True)]


@dataclass
class Recorder:
    """A host function that keeps the tokens of every step."""

    steps: list = field(default_factory=list)

    def __call__(self, batch: Any, context: Any) -> dict:
        self.steps.append([tokens.tolist() for tokens in batch["sequence_ids"].split()])
        return {}


def common(directory: Path) -> dict[str, Any]:
    return {
        "dataset": DatasetConfig(str(directory / "data.jsonl")),
        "eval_dataset": DatasetConfig(str(directory / "held_out.jsonl"), shuffle=False),
        "steps": 3,
        "batch_size": 6,
        "sampling": SamplingConfig(max_new_tokens=7),
    }


def role(directory: Path, *, head: str = "lm", trainable: bool = True) -> Role:
    optimizer = OptimizerConfig(lr=3e-3, max_grad_norm=0.5, warmup_steps=2) if trainable else None
    return Role(str(directory), head=head, dtype="float64", optimizer=optimizer, random_init=True)


def make_experiment(kind: str, directory: Path, **changes: Any) -> Any:
    """Return a `grpo`, `ppo` or `sft` experiment in float64 on the task in `directory`."""
    settings = common(directory) | changes
    actor = settings.pop("actor", None) or role(directory)
    if kind == "sft":
        return SFT(actor=actor, reward_function=some_reward, **settings)
    settings["group_size"] = settings.get("group_size", 4)
    if kind == "grpo":
        loss = settings.pop("loss", PolicyLossConfig(kl_coef=0.05))
        function = settings.pop("reward_function", some_reward)
        return GRPO(actor=actor, reward_function=function, loss=loss, minibatches=2, **settings)
    return PPO(
        actor=actor,
        critic=role(directory, head="score"),
        reward=role(directory, head="score", trainable=False),
        minibatches=2,
        **settings,
    )


def recording(experiment: Any, recorder: Recorder) -> Any:
    """Return the experiment with one more call, which gives `recorder` the generated tokens."""
    call = FunctionCall("record", "host", ("sequence_ids",), work=HostFunction(recorder))
    graph = experiment.graph().add(call)
    experiment.graph = lambda: graph
    return experiment
