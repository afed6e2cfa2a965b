"""PPO of a 7B actor with a 7B critic, to plan without weights or data.

    realhf plan examples/ppo_7b.py --cluster h100-2x8
"""

from realhf import PPO, Expected, OptimizerConfig, Role, SamplingConfig

MODEL = "llama-7b"  # A shipped name; to train, give a Hugging Face model directory.
experiment = PPO(
    actor=Role(MODEL, dtype="bfloat16", optimizer=OptimizerConfig(lr=1e-6)),
    critic=Role(MODEL, head="score", dtype="bfloat16", optimizer=OptimizerConfig(lr=5e-6)),
    reward=Role(MODEL, head="score", dtype="bfloat16"),
    sampling=SamplingConfig(max_new_tokens=1024),
    expected=Expected(prompt_tokens=1024),
    batch_size=512,
)
