"""GRPO of a pretrained model with an environment: SmolLM2-135M-Instruct has three tries for a one-step sum.

    realhf run examples/real_model_tries.py --plan auto --out runs/real_model_tries

It needs what examples/real_model.py needs.
"""

from one_step_sums import brief, right, write_rows
from smollm2 import convert

from realhf import (
    GRPO,
    DatasetConfig,
    Environment,
    OptimizerConfig,
    Role,
    SamplingConfig,
    Turn,
    prepare_once,
)


class Tries:
    """The question of a row. A wrong answer gets another try, and costs 0.2 if it is no short line, too."""

    def start(self, row: dict, seed: int) -> None:  # The row's prompt is what the model reads first.
        self.answer = row["answer"]

    def step(self, message: dict) -> Turn:
        (is_right,) = right([[message]], answer=[self.answer])
        (is_brief,) = brief([[message]])
        rewards = {"right": is_right, "long": 0.2 * is_brief - 0.2}
        return Turn(reward=rewards, done=True) if is_right else Turn("Wrong. Try again.", rewards)


task = prepare_once("runs/real_model/task", write_rows)
experiment = GRPO(
    actor=Role(
        model=str(prepare_once("runs/real_model/model", convert)),
        optimizer=OptimizerConfig(lr=2e-5, warmup_steps=3, betas=(0.9, 0.99), weight_decay=0.0)),
    dataset=DatasetConfig(str(task / "train.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl")),
    environment=Environment(Tries, max_turns=3, max_tokens=96),
    sampling=SamplingConfig(max_new_tokens=24),
    steps=12, batch_size=8, group_size=8, eval_every=4)
