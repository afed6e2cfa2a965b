"""The task of the examples: three-digit additions, a tiny Qwen2-style model and a character tokenizer.

An answer consists of the column sums from right to left and the result: the answer to `727+166=` is
`13,09,08<answer>893</answer>`. The supervised data come from a careless teacher, who forgets to carry in 80 %
of the exercises (`13,08,08<answer>883</answer>`).
"""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from realhf import prepare_once

DIRECTORY = Path("runs/arithmetic")
NUM_HELD_OUT = 256
NUM_SFT = 20000
"""Rows of the supervised data; those whose sum carries are also preference pairs."""
NUM_PROMPTS = 2000
CARELESS_SHARE = 0.8

_CHARACTERS = ["<pad>", "<eos>", *"+=,0123456789"]
_TAGS = ["<answer>", "</answer>"]
_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": len(_CHARACTERS) + len(_TAGS),
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.08,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def exact_answer(
    prompts: list, completions: list[str], completion_ids: list, answer: list[str]
) -> list[float]:
    """Return the rewards: 1 if the completion ends in the right answer, else 0."""
    matches = [re.search(r"<answer>(\d+)</answer>$", completion) for completion in completions]
    return [
        float(match is not None and match[1] == right) for match, right in zip(matches, answer, strict=True)
    ]


def prepare(directory: Path = DIRECTORY, *, seed: int = 0) -> Path:
    """Write model config, tokenizer and data into `directory`, unless it exists; return it."""

    def make(path: Path) -> None:
        _write_model(path / "model")
        _write_data(path, seed=seed)

    task = prepare_once(directory, make)
    if not (task / "held_out_verifier.jsonl").exists():
        raise SystemExit(f"{task} was made by an older version of this file: delete it")
    return task


def solve(prompt: str, *, careless: bool) -> str:
    """Return the answer to `a+b=` with its column sums; a careless one never carries."""
    first, second = (number[::-1] for number in re.findall(r"\d+", prompt))
    carry = 0
    columns = []
    digits = ""
    for a, b in zip(first, second, strict=True):
        total = int(a) + int(b) + carry
        columns.append(f"{total:02d}")
        digits = str(total % 10) + digits
        carry = 0 if careless else total // 10
    return f"{','.join(columns)}<answer>{'1' if total > 9 else ''}{digits}</answer>"


def _write_model(directory: Path) -> None:
    from transformers import AddedToken, Qwen2Tokenizer

    vocabulary = {token: i for i, token in enumerate(_CHARACTERS)}
    tokenizer = Qwen2Tokenizer(vocabulary, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    tokenizer.add_tokens([AddedToken(tag) for tag in _TAGS])
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(_MODEL, indent=2))


def _write_data(directory: Path, *, seed: int) -> None:
    items = _additions(seed)
    rng = random.Random(seed)

    def rows(number: int) -> list[dict[str, str]]:
        return [next(items) for _ in range(number)]

    held_out = rows(NUM_HELD_OUT)
    sft = rows(NUM_SFT)
    prompts = rows(NUM_PROMPTS)
    for row in sft:
        row["completion"] = solve(row["prompt"], careless=rng.random() < CARELESS_SHARE)
    parts = {"held_out": held_out, "sft": sft, "prompts": prompts}
    parts |= {"verifier": _labelled(sft, rng), "held_out_verifier": _labelled(held_out, rng)}
    parts |= {"pairs": _pairs(sft), "held_out_pairs": _pairs(held_out)}
    for name, part in parts.items():
        with (directory / f"{name}.jsonl").open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in part)


def _labelled(rows: list[dict[str, str]], rng: random.Random) -> list[dict[str, str | float]]:
    """Return careful and careless answers for a reward model, labelled by whether they are right."""
    labelled: list[dict[str, str | float]] = []
    for row in rows:
        completion = solve(row["prompt"], careless=rng.random() < 0.5)
        label = exact_answer([], [completion], [], [row["answer"]])[0]
        labelled.append({"prompt": row["prompt"], "completion": completion, "label": label})
    return labelled


def _pairs(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return preference pairs of a careful and a careless answer, where these differ."""
    pairs = []
    for row in rows:
        chosen, rejected = (solve(row["prompt"], careless=careless) for careless in (False, True))
        if chosen != rejected:
            columns = {"prompt": row["prompt"], "answer": row["answer"]}
            pairs.append(columns | {"chosen": chosen, "rejected": rejected})
    return pairs


def _additions(seed: int) -> Iterator[dict[str, str]]:
    """Yield additions of two three-digit numbers; no pair of numbers appears twice, in either order."""
    import reasoning_gym

    seen: set[tuple[str, ...]] = set()
    items = reasoning_gym.create_dataset(
        "chain_sum", min_terms=2, max_terms=2, min_digits=3, max_digits=3, size=200_000, seed=200_000 * seed
    )
    for item in items:
        expression = item["metadata"]["expression"]
        pair = tuple(sorted(re.findall(r"\d+", expression)))
        if "-" not in expression and pair not in seen:
            seen.add(pair)
            yield {"prompt": f"{expression}=".replace(" ", ""), "answer": item["answer"]}
