"""The experiments of plan_accuracy.py: eight with dense models and four with experts, on random text.

Long-tailed lengths are drawn anew for every step, as the planner expects. The draws of the measured steps are
chosen among many so that their means are near the expectations, which saves steps. Responses end at a limit
that each prompt has for itself, since random models end nowhere in particular.
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Any, Literal

from realhf import Expected
from realhf.runtime.records.rollout_file import ROLLOUTS

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_SPREAD = 1.0  # Standard deviation of the logarithms of long-tailed lengths.
_CUT = 1.5  # Lengths that are so many standard deviations above the median, or more, are cut.
_TRIES = 2000  # Among so many draws of lengths, the one that is nearest to the expectations is taken.
LIMIT = "most_tokens"
"""The column of the dataset with the limit of each prompt's responses."""

SHAPES: dict[str, dict[str, Any]] = {
    "wide": {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 512},
    "vocabulary": {"hidden_size": 128, "intermediate_size": 384, "vocab_size": 8192},
    "widest": {"hidden_size": 384, "intermediate_size": 1024, "vocab_size": 128},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 128,
        "intermediate_size": 256, "moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2,
        "norm_topk_prob": True, "vocab_size": 256, "head_dim": 32,
    },
    "shared experts": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 192,
        "intermediate_size": 384, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 192,
        "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": False, "vocab_size": 256,
    },
}
"""Fields of config.json by the name of a model shape."""


@dataclass(frozen=True)
class Case:
    """An experiment: `prompts` per step, each answered `group` times. Token counts are per sequence.

    For an algorithm that does not generate, `new_tokens` are those of the longest completion.
    """

    algorithm: Literal["ppo", "grpo", "rloo", "sft", "dpo"]
    shape: str
    layers: int
    prompts: int
    group: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    lengths: Literal["equal", "long-tailed"]

    @property
    def generates(self) -> bool:
        return self.algorithm in ("ppo", "grpo", "rloo")

    @property
    def response_lengths(self) -> list[int]:
        """Equally likely numbers of tokens of a response, from the shortest to the longest."""
        return [self.new_tokens] if self.lengths == "equal" else _long_tailed(self.new_tokens)


CASES: dict[str, Case] = {
    "ppo": Case("ppo", "wide", 4, 8, 4, (16, 32), 64, "equal"),
    "ppo, long tail": Case("ppo", "wide", 3, 16, 2, (16, 32), 160, "long-tailed"),
    "grpo": Case("grpo", "vocabulary", 4, 16, 4, (12, 24), 48, "equal"),
    "grpo, long tail": Case("grpo", "wide", 6, 8, 8, (16, 32), 128, "long-tailed"),
    "rloo, long prompts": Case("rloo", "widest", 3, 8, 4, (120, 180), 24, "equal"),
    "sft": Case("sft", "widest", 4, 32, 1, (16, 32), 96, "equal"),
    "sft, long tail": Case("sft", "vocabulary", 6, 64, 1, (12, 24), 128, "long-tailed"),
    "dpo, long tail": Case("dpo", "wide", 4, 24, 1, (16, 32), 128, "long-tailed"),
    "experts, grpo": Case("grpo", "experts", 4, 8, 4, (16, 32), 64, "equal"),
    "experts, ppo, long tail": Case("ppo", "experts", 3, 16, 2, (16, 32), 96, "long-tailed"),
    "shared experts, grpo, long tail": Case("grpo", "shared experts", 4, 16, 4, (16, 32), 96, "long-tailed"),
    "shared experts, sft": Case("sft", "shared experts", 4, 48, 1, (16, 32), 64, "equal"),
}


def expected_of(case: Case, directory: Path) -> Expected:
    """Return what the planner is told about the lengths of an experiment.

    Prompts, and completions that are not generated, are measured on the dataset. How long responses get is
    in a file of rollouts, as if the experiment had already run.
    """
    if not case.generates:
        return Expected()
    with (directory / ROLLOUTS).open("w") as file:
        for number, length in enumerate(case.response_lengths):
            line = json.dumps({"step": 1, "prompt_number": number, "length": length})
            file.write((line + "\n") * case.group)
    return Expected(lengths_from=str(directory))


def profiled_case(shape: str) -> Case:
    """Return the experiment for which a shape is profiled: PPO of the largest sizes of its experiments."""
    cases = [case for case in CASES.values() if case.shape == shape]
    samples = max(case.prompts * case.group for case in cases)
    group = max(case.group for case in cases)
    prompt_tokens = max((case.prompt_tokens for case in cases), key=max)
    new_tokens = max(case.new_tokens for case in cases)
    return Case("ppo", shape, 2, samples // group, group, prompt_tokens, new_tokens, "equal")


def write_experiment(directory: Path, case: Case, *, warm_up: int = 0, steps: int) -> Path:
    """Write model config, tokenizer, rows and the experiment, and return the experiment's path.

    The experiment has `warm_up` steps, and then `steps` whose lengths are near the expectations. The learning
    rate is zero, so that all steps do the same work.
    """
    from transformers import Qwen2Tokenizer

    directory.mkdir(exist_ok=True, parents=True)
    specials = ["<pad>", "<eos>"]
    vocabulary = {token: i for i, token in enumerate([*specials, *_LETTERS])}
    Qwen2Tokenizer(
        vocabulary, merges=[], pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    ).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(_config(case)))
    rng = random.Random(0)
    with (directory / "rows.jsonl").open("w") as file:
        for responses in [*_draws(case, warm_up, rng), *_balanced_draws(case, steps, rng)]:
            for row in _rows(case, responses, rng):
                file.write(json.dumps(row) + "\n")
    path = directory / "experiment.py"
    text = _COMMON + (_SAMPLED if case.generates else "") + _EXPERIMENT[case.algorithm]
    path.write_text(text.format(task=str(directory), steps=warm_up + steps, case=case, limit=LIMIT))
    return path


def _rows(case: Case, responses: Sequence[int], rng: random.Random) -> list[dict[str, Any]]:
    """Return the rows of one step, whose responses have these numbers of tokens."""
    def text(length: int) -> str:
        return "".join(rng.choices(_LETTERS, k=length))

    low, high = case.prompt_tokens
    prompts = [round(low + (high - low) * (i + 0.5) / case.prompts) for i in range(case.prompts)]
    rows: list[dict[str, Any]] = []
    for prompt, response in zip(_shuffled(prompts, rng), responses, strict=True):
        row = {"prompt": text(prompt)}
        if case.generates:
            rows.append(row | {"answer": "a", LIMIT: response})
        elif case.algorithm == "sft":
            rows.append(row | {"completion": text(response - 1)})  # The end of the sequence is one more.
        else:
            rows.append(row | {"chosen": text(response - 1), "rejected": text(response - 1)})
    return rows


def _long_tailed(longest: int) -> list[int]:
    """Return 64 quantiles of a log-normal distribution that is cut at `longest`."""
    normal = NormalDist()
    scores = [normal.inv_cdf((i + 0.5) / 64) for i in range(64)]
    return [max(2, round(longest * math.exp(_SPREAD * min(0.0, score - _CUT)))) for score in scores]


def _draws(case: Case, steps: int, rng: random.Random) -> list[list[int]]:
    """Return the numbers of tokens of the responses to the prompts of each step."""
    return [rng.choices(case.response_lengths, k=case.prompts) for _ in range(steps)]


def _balanced_draws(case: Case, steps: int, rng: random.Random) -> list[list[int]]:
    """Return the draws, among many, whose means per step are nearest to the means of all of them.

    The means are of the number of tokens, and of the longest response in a step, its halves and its quarters.
    """
    tries = [_draws(case, steps, rng) for _ in range(_TRIES)]
    means = [[fmean(values) for values in zip(*map(_statistics, drawn), strict=True)] for drawn in tries]
    expected = [fmean(values) for values in zip(*means, strict=True)]

    def distance(number: int) -> float:
        return sum(abs(mean / usual - 1) for mean, usual in zip(means[number], expected, strict=True))

    return tries[min(range(_TRIES), key=distance)]


def _statistics(responses: Sequence[int]) -> list[float]:
    """Return the number of tokens of a step, and the mean of the longest responses of its parts."""
    count = len(responses)
    longest = [
        fmean(max(responses[i * count // parts : (i + 1) * count // parts]) for i in range(parts))
        for parts in (1, 2, 4)
    ]
    return [sum(responses), *longest]


def _shuffled(values: Sequence[int], rng: random.Random) -> list[int]:
    return rng.sample(list(values), k=len(values))


def _config(case: Case) -> Mapping[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": case.layers,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": True, "pad_token_id": 0,
        "eos_token_id": 1,
    } | SHAPES[case.shape]


_COMMON = """
import realhf

task = {task!r}
optimizer = realhf.OptimizerConfig(lr=0.0)
lm = dict(model=task, random_init=True)
common = dict(
    dataset=realhf.DatasetConfig(task + "/rows.jsonl", shuffle=False), tokenizer=task,
    steps={steps}, batch_size={case.prompts}, group_size={case.group}, checkpoint_every=0,
)
"""
_SAMPLED = """
common |= dict(
    sampling=realhf.SamplingConfig(max_new_tokens={case.new_tokens}, ignore_eos=True),
    max_new_tokens_key={limit!r},
)


def reward(prompts, completions, completion_ids):
    return [float(len(ids)) for ids in completion_ids]

"""
_EXPERIMENT = {
    "ppo": """
experiment = realhf.PPO(
    actor=realhf.Role(**lm, optimizer=optimizer), ref=realhf.Role(**lm),
    critic=realhf.Role(**lm, head="score", optimizer=optimizer), reward=realhf.Role(**lm, head="score"),
    minibatches=2, **common,
)
""",
    "grpo": """
experiment = realhf.GRPO(
    actor=realhf.Role(**lm, optimizer=optimizer), ref=realhf.Role(**lm), reward_function=reward,
    loss=realhf.PolicyLossConfig(kl_coef=0.01), **common,
)
""",
    "rloo": """
experiment = realhf.RLOO(
    actor=realhf.Role(**lm, optimizer=optimizer), ref=realhf.Role(**lm), reward_function=reward, **common,
)
""",
    "sft": """
del common["group_size"]
experiment = realhf.SFT(actor=realhf.Role(**lm, optimizer=optimizer), **common)
""",
    "dpo": """
del common["group_size"]
experiment = realhf.DPO(actor=realhf.Role(**lm, optimizer=optimizer), ref=realhf.Role(**lm), **common)
""",
}
