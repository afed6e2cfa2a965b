"""The task of examples/long_chain.py: to find the two numbers of a list that have a given sum, by trials.

The answer to `04,15,09,16,11:27=` tries pairs, compares their sums with the wanted one and ends with a pair:
`15+09=24<04+16=20<16+11=27!<answer>16+11</answer>`. The supervised data come from an impatient teacher, who
tries pairs in random order. After each wrong one, he gives up with a probability of 20 % and answers with it.
"""

import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

from realhf import prepare_once

DIRECTORY = Path("runs/pair_search")
NUM_SFT = 20000
NUM_PROMPTS = 6400
NUM_TERMS = 5
LARGEST_TERM = 16
GIVE_UP_SHARE = 0.2
LIMIT = 42  # Tokens of the longest answer: six trials and the answer.

_CHARACTERS = ["<pad>", "<eos>", *"+=,:<>!"]
_WORDS = ["<answer>", "</answer>", *(f"{number:02d}" for number in range(1, 2 * LARGEST_TERM))]
_MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": len(_CHARACTERS) + len(_WORDS),
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.08,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def right_pair(
    prompts: list, completions: list[str], completion_ids: list, answer: list[str]
) -> list[float]:
    """Return the rewards: 1 if the completion ends in the right pair, else 0."""
    matches = [re.search(r"<answer>(.*)</answer>$", completion) for completion in completions]
    return [
        float(match is not None and match[1] == right) for match, right in zip(matches, answer, strict=True)
    ]


def prepare(directory: Path = DIRECTORY, *, seed: int = 0) -> Path:
    """Write model config, tokenizer and data into `directory`, unless it exists; return it."""

    def make(path: Path) -> None:
        _write_model(path / "model")
        _write_data(path, seed=seed)

    return prepare_once(directory, make)


def _write_model(directory: Path) -> None:
    from transformers import AddedToken, Qwen2Tokenizer

    vocabulary = {token: i for i, token in enumerate(_CHARACTERS)}
    tokenizer = Qwen2Tokenizer(vocabulary, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    tokenizer.add_tokens([AddedToken(word) for word in _WORDS])
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(_MODEL, indent=2))


def _write_data(directory: Path, *, seed: int) -> None:
    rng = random.Random(seed)
    problems = _problems(rng)
    for name, number in (("sft", NUM_SFT), ("prompts", NUM_PROMPTS)):
        with (directory / f"{name}.jsonl").open("w") as file:
            for terms, pair in itertools.islice(problems, number):
                listed = ",".join(f"{term:02d}" for term in terms)
                row = {"prompt": f"{listed}:{sum(pair):02d}=", "answer": _sum_of(pair)}
                if name == "sft":
                    row["completion"] = _search(terms, pair, rng)
                file.write(json.dumps(row) + "\n")


def _problems(rng: random.Random) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Yield lists of different terms and a pair of them whose sum no other pair has, in the list's order.

    No problem appears twice, in any order of the list.
    """
    seen: set[tuple[int, ...]] = set()
    while True:
        terms = rng.sample(range(1, LARGEST_TERM + 1), NUM_TERMS)
        pairs = list(itertools.combinations(terms, 2))
        pair = rng.choice(pairs)
        problem = (*sorted(terms), sum(pair))
        if problem not in seen and [sum(other) for other in pairs].count(sum(pair)) == 1:
            seen.add(problem)
            yield terms, pair


def _search(terms: list[int], pair: tuple[int, int], rng: random.Random) -> str:
    """Return the teacher's answer to a problem."""
    pairs = list(itertools.combinations(terms, 2))
    trials = []
    for trial in rng.sample(pairs, len(pairs)):
        trials.append(trial)
        if trial == pair or rng.random() < GIVE_UP_SHARE:
            break
    written = "".join(f"{_sum_of(trial)}={sum(trial):02d}{_verdict(trial, pair)}" for trial in trials)
    return f"{written}<answer>{_sum_of(trials[-1])}</answer>"


def _verdict(trial: tuple[int, int], pair: tuple[int, int]) -> str:
    return "!" if sum(trial) == sum(pair) else "<" if sum(trial) < sum(pair) else ">"


def _sum_of(pair: tuple[int, int]) -> str:
    return f"{pair[0]:02d}+{pair[1]:02d}"
