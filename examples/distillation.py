"""On-policy distillation: the model that examples/grpo.py has trained teaches the one that it started from.

    realhf run examples/sft.py --out runs/sft
    realhf run examples/grpo.py --plan grpo-4 --out runs/grpo
    realhf run examples/distillation.py --nproc 2 --out runs/distillation
"""

from arithmetic import exact_answer, prepare

from realhf import DatasetConfig, Distillation, OptimizerConfig, Role, SamplingConfig

task = prepare()
experiment = Distillation(
    actor=Role(
        model="runs/sft/hf/step_700",
        optimizer=OptimizerConfig(lr=1e-3, warmup_steps=5, betas=(0.9, 0.99), weight_decay=0.0),
    ),
    teachers=(Role(model="runs/grpo/hf/step_60"),),
    variant="top_k",
    top_k=4,
    dataset=DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl"), shuffle=False),
    eval_function=exact_answer,
    sampling=SamplingConfig(max_new_tokens=15),
    steps=40,
    batch_size=128,
    eval_every=10,
)
