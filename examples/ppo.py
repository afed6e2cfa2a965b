"""PPO with four roles, from the results of examples/sft.py and examples/reward_model.py.

    realhf run examples/ppo.py --plan ppo-4
"""

from arithmetic import exact_answer, prepare

from realhf import PPO, AdvantageConfig, DatasetConfig, OptimizerConfig, Role, SamplingConfig, Scores

task = prepare()
optimizer = OptimizerConfig(lr=4e-4, warmup_steps=20, betas=(0.9, 0.99), weight_decay=0.0)
experiment = PPO(
    actor=Role(model="runs/sft/hf/step_700", optimizer=optimizer),
    critic=Role(model="runs/reward_model/hf/step_1500", head="score", optimizer=optimizer),
    reward=Role(model="runs/reward_model/hf/step_1500", head="score"),
    reward_scores=Scores(probability=True),
    dataset=DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl"), shuffle=False),
    eval_function=exact_answer,
    sampling=SamplingConfig(max_new_tokens=15),
    advantage=AdvantageConfig(kl_coef=0.1),
    minibatches=2,
    steps=60,
    batch_size=64,
    group_size=8,
    eval_every=10,
)
