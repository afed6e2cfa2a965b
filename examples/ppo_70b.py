"""PPO of a 70B actor with a 7B critic, to plan without weights or data.

    realhf plan examples/ppo_70b.py --cluster h100-8x8
"""

from realhf import PPO, Expected, OptimizerConfig, Role, SamplingConfig

ACTOR, CRITIC = "llama-70b", "llama-7b"  # Shipped names; to train, give Hugging Face model directories.
experiment = PPO(
    actor=Role(ACTOR, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-6)),
    critic=Role(CRITIC, head="score", dtype="bfloat16", optimizer=OptimizerConfig(lr=5e-6)),
    reward=Role(CRITIC, head="score", dtype="bfloat16"),
    sampling=SamplingConfig(max_new_tokens=1024),
    expected=Expected(prompt_tokens=1024),
    batch_size=512,
)
