"""GRPO of a pretrained model with an environment: SmolLM2-135M-Instruct learns to use a calculator.

    realhf run examples/real_model_tool.py         # needs what examples/real_model.py needs
"""

import random
import re
from pathlib import Path

from smollm2 import convert
from tiny_chat import write_rows

import realhf

QUESTIONS = {
    "+": "Ida has {a} cards and finds {b} more. How many does she have now?",
    "-": "Ida has {a} cards and loses {b} of them. How many does she have now?",
    "*": "Ida has {a} boxes of {b} cards each. How many cards does she have?"}
SHOWN = ("Kim has 38 cards and finds 57 more. How many does he have?", "calc: 38 + 57", "95", "95 cards.")


class Calculator:
    """A question, after one with its answer, and a calculator for lines such as `calc: 38 + 57`."""

    def start(self, row: dict, seed: int) -> realhf.Start:
        self.answer = row["answer"]
        roles = ("system", "user", "assistant", "user", "assistant", "user")
        texts = zip(roles, ("Use the calculator.", *SHOWN, row["prompt"]), strict=True)
        return realhf.Start([{"role": role, "content": text} for role, text in texts])

    def step(self, message: dict) -> realhf.Turn:
        said = message["content"].strip()
        if re.fullmatch(r"calc: [1-9]\d? [-+*] [1-9]\d?", said):
            return realhf.Turn(str(eval(said.removeprefix("calc: "))), metrics={"calls": 1.0})
        numbers = re.findall(r"-?\d+", said)
        return realhf.Turn(reward=float(numbers[-1:] == [self.answer]), done=True, metrics={"calls": 0.0})


def write_task(directory: Path) -> None:
    """Write questions."""
    rng, rows = random.Random(0), {}
    for _ in range(1000):
        a, b, sign = rng.randint(50, 99), rng.randint(11, 49), rng.choice("+-*")
        rows[QUESTIONS[sign].format(a=a, b=b)] = str(eval(f"{a} {sign} {b}"))
    made = [{"prompt": question, "answer": answer} for question, answer in rows.items()]
    write_rows(directory / "held_out.jsonl", made[:48])
    write_rows(directory / "prompts.jsonl", made[48:])


task = realhf.prepare_once("runs/real_model_tool/task", write_task)
experiment = realhf.GRPO(
    actor=realhf.Role(
        str(realhf.prepare_once("runs/real_model/model", convert)),
        optimizer=realhf.OptimizerConfig(lr=3e-5, warmup_steps=2, weight_decay=0.0)),
    dataset=realhf.DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=realhf.DatasetConfig(str(task / "held_out.jsonl")),
    environment=realhf.Environment(Calculator, max_turns=3, max_tokens=64),
    sampling=realhf.SamplingConfig(max_new_tokens=24),
    steps=16, batch_size=4, group_size=8, eval_every=8)
