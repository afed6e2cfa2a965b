"""DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476): prompts are sampled until the batch is full of
groups whose answers differ in reward, of the model that examples/sft.py has trained (runs/sft).

    realhf run examples/dapo.py
"""

from arithmetic import exact_answer, prepare

from realhf import DAPO, DatasetConfig, OptimizerConfig, Role, SamplingConfig

task = prepare()
experiment = DAPO(
    actor=Role(
        model="runs/sft/hf/step_700",
        optimizer=OptimizerConfig(lr=4e-4, warmup_steps=20, betas=(0.9, 0.99), weight_decay=0.0),
    ),
    dataset=DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl"), shuffle=False),
    reward_function=exact_answer,
    sampling=SamplingConfig(max_new_tokens=15),
    steps=40,
    batch_size=64,
    group_size=8,
    eval_every=5,
)
