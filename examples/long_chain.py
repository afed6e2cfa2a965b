"""RL of answers that grow long: the model that examples/long_chain_sft.py has trained searches for pairs.

    realhf run examples/long_chain.py
"""

from pair_search import LIMIT, prepare, right_pair

from realhf import GRPO, CosineReward, DatasetConfig, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig

task = prepare()
experiment = GRPO(
    actor=Role(
        model="runs/long_chain_sft/hf/step_700",
        optimizer=OptimizerConfig(lr=3e-4, warmup_steps=10, betas=(0.9, 0.99), weight_decay=0.0),
    ),
    dataset=DatasetConfig(str(task / "prompts.jsonl")),
    reward_function=right_pair,
    score_shaping=CosineReward(LIMIT),
    sampling=SamplingConfig(max_new_tokens=LIMIT),
    loss=PolicyLossConfig(average="token"),
    steps=120,
    batch_size=32,
    group_size=8,
)
