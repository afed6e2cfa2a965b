"""GRPO of a 32B actor with a verifiable reward, to plan without weights or data.

    realhf plan examples/grpo_32b.py --cluster h100-8x8
"""

from realhf import GRPO, Expected, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig


def right(prompts, completions, completion_ids, answer):
    """Return 1 for completions that end in the answer, else 0."""
    return [float(text.rstrip().endswith(str(a))) for text, a in zip(completions, answer, strict=True)]


experiment = GRPO(
    actor=Role("qwen2.5-32b", dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-6)),
    reward_function=right,
    loss=PolicyLossConfig(kl_coef=0.001),
    sampling=SamplingConfig(max_new_tokens=8192),
    expected=Expected(prompt_tokens=512, response_tokens=3000),
    batch_size=64,
    group_size=16,
)
