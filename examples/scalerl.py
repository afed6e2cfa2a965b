"""The ScaleRL recipe (arXiv:2510.13786) on the additions, with the model that examples/sft.py has trained.

    realhf run examples/scalerl.py --plan scalerl-2

One process generates while the other trains. An answer that has not begun its result after nine tokens gets
the tag inserted, and additions that are answered right nine times in ten are not drawn again.
"""

from arithmetic import exact_answer, prepare

from realhf import DatasetConfig, Interruption, OptimizerConfig, SamplingConfig, ScaleRL, scalerl_actor

task = prepare()
experiment = ScaleRL(
    actor=scalerl_actor(
        "runs/sft/hf/step_700",
        dtype="float32",
        optimizer=OptimizerConfig(
            lr=1.5e-4, warmup_steps=20, betas=(0.9, 0.99), weight_decay=0.01, eps=1e-15
        ),
    ),
    dataset=DatasetConfig(str(task / "prompts.jsonl"), max_rows=1024),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl"), shuffle=False),
    reward_function=exact_answer,
    sampling=SamplingConfig(max_new_tokens=15),
    interruption=Interruption(9, phrase="<answer>", end="<answer>"),
    steps=100,
    batch_size=64,
    group_size=8,
    eval_every=10,
    checkpoint_every=30,
)
