"""DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476): prompts are sampled until the batch is full of
groups whose answers differ in reward, of the model that examples/sft.py has trained (runs/sft).

    realhf run examples/dapo.py
"""

from dataclasses import dataclass

from arithmetic import exact_answer, prepare

from realhf import GRPO, DatasetConfig, OptimizerConfig, PolicyLossConfig, Role, SamplingConfig


@dataclass
class DAPO(GRPO):
    """GRPO whose batches have informative groups only, as far as `max_rounds` of sampling find them."""

    filter_groups: bool = True
    max_rounds: int = 4

    def parts(self, graph):
        sample = ("actor_generate", "reward_forward", "group_advantages")
        return {"sample": sample, "train": [call.name for call in graph.order if call.name not in sample]}

    def step(self, run):
        informative = run.pool("informative")
        informative.drop(max_age=0)  # What the last step has left over would be off-policy.
        for _ in range(self.max_rounds):
            if len(informative) >= self.batch_size:
                break
            samples = run.prompts(self.batch_size)
            run("sample", samples)
            informative.add(samples, where="group_advantages")
        run("train", informative.take(self.batch_size))


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
    loss=PolicyLossConfig(clip_low=0.2, clip_high=0.28, average="token"),
    steps=40,
    batch_size=64,
    group_size=8,
    eval_every=5,
)
