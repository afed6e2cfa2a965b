"""DPO of the model of examples/sft.py on careful against careless answers: it learns to carry.

    realhf run examples/dpo.py --out runs/dpo
"""

from arithmetic import exact_answer, prepare

from realhf import DPO, DatasetConfig, DPOLoss, OptimizerConfig, Role, SamplingConfig

task = prepare()
experiment = DPO(
    actor=Role(
        model="runs/sft/hf/step_700",
        optimizer=OptimizerConfig(
            lr=1e-4, warmup_steps=20, schedule="cosine", total_steps=60, weight_decay=0.0
        ),
    ),
    loss=DPOLoss(beta=1.0, label_smoothing=0.02),
    dataset=DatasetConfig(str(task / "pairs.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out_pairs.jsonl"), shuffle=False),
    reward_function=exact_answer,
    sampling=SamplingConfig(max_new_tokens=15),
    steps=60,
    batch_size=64,
    eval_every=20,
    log_every=10,
)
