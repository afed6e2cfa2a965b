"""A reward model that learns from pairs of a careful and a careless answer, trained from runs/sft.

    realhf run examples/pairwise_reward_model.py --out runs/pairwise_reward_model
"""

from arithmetic import prepare

from realhf import BradleyTerry, DatasetConfig, OptimizerConfig, PairwiseRewardModel, Role

task = prepare()
experiment = PairwiseRewardModel(
    reward=Role(
        model="runs/sft/hf/step_700",
        head="score",
        optimizer=OptimizerConfig(
            lr=1e-3, warmup_steps=20, schedule="cosine", total_steps=300, min_lr_ratio=0.1
        ),
    ),
    loss=BradleyTerry(center_coef=0.01),
    dataset=DatasetConfig(str(task / "pairs.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out_pairs.jsonl"), shuffle=False),
    steps=300,
    batch_size=64,
    eval_every=100,
    log_every=20,
)
