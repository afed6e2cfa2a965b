"""A custom graph: GRPO with a reference that follows the actor, and with a call that inspects the answers.

    realhf run examples/custom_graph.py --plan custom-4
"""

from dataclasses import dataclass

from arithmetic import exact_answer, prepare

from realhf import (
    GRPO,
    DataflowGraph,
    DatasetConfig,
    FunctionCall,
    HostFunction,
    OptimizerConfig,
    PolicyLossConfig,
    Role,
    SamplingConfig,
)


def carries_written(batch, context):
    """Return no columns, and as a metric the share of answers with a carry in any column sum."""
    texts = [context.tokenizer.decode(tokens) for tokens in batch["sequence_ids"].split()]
    with_carry = 0
    for text in texts:
        exercise, answer = text.split("=")[:2]
        first, second = exercise.split("+")
        columns = answer.split("<")[0].split(",")
        plain = [int(a) + int(b) for a, b in zip(first[::-1], second[::-1], strict=True)]
        with_carry += any(column == f"{total + 1:02d}" for column, total in zip(columns, plain, strict=False))
    return {}, {"custom/answers_with_carry": with_carry / max(1, len(texts))}


@dataclass
class MovingReference(GRPO):
    """GRPO with a moving reference: after every train step, ref = 5 % actor + 95 % ref."""

    follow_rate: float = 0.05

    def roles(self) -> dict[str, Role]:
        ref = Role(model=self.actor.model, follows="actor", follow_rate=self.follow_rate)
        return super().roles() | {"ref": ref}

    def graph(self) -> DataflowGraph:
        watch = HostFunction(carries_written, splittable=True)
        return super().graph().add(FunctionCall("watch", inputs=("sequence_ids",), work=watch))


task = prepare()
experiment = MovingReference(
    actor=Role("runs/sft/hf/step_700", optimizer=OptimizerConfig(lr=4e-4, warmup_steps=20)),
    dataset=DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=DatasetConfig(str(task / "held_out.jsonl"), shuffle=False),
    reward_function=exact_answer,
    sampling=SamplingConfig(max_new_tokens=15),
    loss=PolicyLossConfig(kl_coef=0.01, average="token"),
    steps=60,
)
