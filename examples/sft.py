"""Supervised fine-tuning of the tiny model on the careless teacher's answers.

    realhf run examples/sft.py --out runs/sft
"""

from arithmetic import exact_answer, prepare

from realhf import SFT, DatasetConfig, OptimizerConfig, Role, SamplingConfig

task = prepare()
experiment = SFT(
    actor=Role(
        model=str(task / "model"),
        random_init=True,
        optimizer=OptimizerConfig(
            lr=5e-3, warmup_steps=20, schedule="cosine", total_steps=700, min_lr_ratio=0.1
        ),
    ),
    dataset=DatasetConfig(str(task / "sft.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl"), shuffle=False),
    reward_function=exact_answer,
    sampling=SamplingConfig(max_new_tokens=15),
    steps=700,
    batch_size=64,
    log_every=50,
)
