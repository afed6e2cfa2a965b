"""A reward model for examples/ppo.py, trained from runs/sft in 2 to 4 minutes on two cores.

    realhf run examples/reward_model.py --out runs/reward_model
"""

from arithmetic import prepare

from realhf import DatasetConfig, OptimizerConfig, RewardModel, Role

task = prepare()
experiment = RewardModel(
    reward=Role(
        model="runs/sft/hf/step_700",
        head="score",
        optimizer=OptimizerConfig(
            lr=1e-3, warmup_steps=20, schedule="cosine", total_steps=1500, min_lr_ratio=0.1
        ),
    ),
    dataset=DatasetConfig(str(task / "verifier.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out_verifier.jsonl"), shuffle=False),
    steps=1500,
    batch_size=128,
    log_every=50,
)
