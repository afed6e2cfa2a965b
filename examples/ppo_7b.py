"""PPO of a 7B actor with a 7B critic, to plan without weights or data.

    realhf plan examples/ppo_7b.py --cluster h100-2x8
"""

from realhf import PPO, Expected, OptimizerConfig, Role, SamplingConfig

ACTOR, CRITIC = "llama-7b", "llama-7b"  # Shipped names; to train, give Hugging Face model directories.
experiment = PPO(
    actor=Role(ACTOR, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-6)),
    critic=Role(CRITIC, head="score", dtype="bfloat16", optimizer=OptimizerConfig(lr=5e-6)),
    reward=Role(CRITIC, head="score", dtype="bfloat16"),
    sampling=SamplingConfig(max_new_tokens=1024),
    expected=Expected(prompt_tokens=1024),
    batch_size=512,
)
