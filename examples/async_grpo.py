"""Asynchronous GRPO: one process generates the next answers while the other trains on the last ones.

    realhf run examples/async_grpo.py --plan async-2

The log-probs of the answers are computed again before each update (decoupled PPO, arXiv:2505.24298), as the
weights that sampled them are up to `max_lag` updates old. Two runs give the same numbers.
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
    max_lag=1,
    work_stealing=False,
    batch_size=64,
    group_size=8,
    eval_every=5,
)
