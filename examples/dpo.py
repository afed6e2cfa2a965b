"""DPO of the model of examples/sft.py on careful against careless answers: it learns to carry.

    realhf run examples/dpo.py --out runs/dpo
"""

from arithmetic import exact_answer, prepare

from realhf import DPO, DatasetConfig, DPOLoss, OptimizerConfig, Role, SamplingConfig

task = prepare()
experiment = DPO(
    actor=Role(
        model="runs/sft/hf/step_700",
        optimizer=OptimizerConfig(lr=3e-4, warmup_steps=10, weight_decay=0.0),
    ),
    loss=DPOLoss(beta=0.1),
    dataset=DatasetConfig(str(task / "pairs.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out_pairs.jsonl"), shuffle=False),
    reward_function=exact_answer,
    sampling=SamplingConfig(max_new_tokens=15),
    steps=200,
    batch_size=64,
    eval_every=50,
    log_every=20,
)
