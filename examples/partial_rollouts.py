"""GRPO with partial rollouts: no step waits for its longest answers, which go on in the next step.

    realhf run examples/partial_rollouts.py

Each step gives every answer a third of its tokens, so answers are trained when they are two steps old; the
weights change between the thirds, and the metric staleness/mean says how much. All calls share all devices.
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
    loss=PolicyLossConfig(average="token", proximal="recomputed", importance_cap=2.0),
    steps=60,
    max_lag=2,
    rounds=3,
    work_stealing=False,
    batch_size=64,
    group_size=8,
    eval_every=5,
)
