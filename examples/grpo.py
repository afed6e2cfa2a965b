"""GRPO of the model that examples/sft.py has trained (runs/sft).

    realhf run examples/grpo.py --plan grpo-4
"""

from arithmetic import exact_answer, prepare

from realhf import GRPO, DatasetConfig, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig

task = prepare()
experiment = GRPO(
    actor=Role(
        model="runs/sft/hf/step_700",
        optimizer=OptimizerConfig(lr=4e-4, warmup_steps=20, betas=(0.9, 0.99), weight_decay=0.0),
    ),
    dataset=DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl"), shuffle=False),
    reward_function=exact_answer,
    sampling=SamplingConfig(max_new_tokens=15),
    loss=PolicyLossConfig(kl_coef=0.005, average="token"),
    steps=60,
    batch_size=64,
    group_size=8,
    eval_every=5,
)
