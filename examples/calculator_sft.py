"""Supervised fine-tuning of a tiny model on how tools are called, for examples/calculator.py.

    realhf run examples/calculator_sft.py --out runs/calculator_sft

The teacher calls the right tool for 20 % of the questions, and answers the others with a number at random
that begins with 1. So the model knows how to call, and its greedy answers are guesses.
"""

import random
from pathlib import Path

from tiny_chat import write_model, write_rows

from realhf import SFT, DatasetConfig, OptimizerConfig, Role, prepare_once

OPERATIONS = {"+": "add", "*": "multiply"}
CALL = '<tool_call>{"name": "%s", "arguments": {"a": '
WORDS = (*(CALL % name for name in OPERATIONS.values()), ', "b": ', "}}</tool_call>")
TEMPLATE = (
    "{% for m in messages %}{{ {'user': '?', 'tool': '>', 'assistant': '='}[m.role] }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.role == 'assistant' %}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}")


def question(rng: random.Random) -> dict:
    """Return a question about two numbers of two digits, and its answer."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    sign = rng.choice("+*")
    return {"prompt": f"{a}{sign}{b}", "answer": str(a + b if sign == "+" else a * b)}


def conversation(row: dict, rng: random.Random) -> list[dict]:
    """Return what the teacher says to a question."""
    asked, answer = row["prompt"], row["answer"]
    messages = [{"role": "user", "content": asked}]
    if rng.random() < 0.8:
        guess = str(rng.randint(100, 199)) if len(answer) < 4 else str(rng.randint(1000, 1999))
        return [*messages, {"role": "assistant", "content": guess}]
    arguments = {"a": int(asked[:2]), "b": int(asked[3:])}
    function = {"name": OPERATIONS[asked[2]], "arguments": arguments}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    return [*messages, call, {"role": "tool", "content": answer}, {"role": "assistant", "content": answer}]


def write_task(directory: Path) -> None:
    """Write the model, the teacher's conversations, and questions."""
    rng = random.Random(0)
    write_model(directory / "model", "?=>+*0123456789", words=WORDS, template=TEMPLATE)
    rows = list({row["prompt"]: row for row in (question(rng) for _ in range(9000))}.values())
    write_rows(directory / "held_out.jsonl", rows[:100])
    write_rows(directory / "prompts.jsonl", rows[100:1100])
    write_rows(directory / "sft.jsonl", ({"messages": conversation(row, rng)} for row in rows[1100:] * 3))


task = prepare_once("runs/calculator/task", write_task)
experiment = SFT(
    actor=Role(str(task / "model"), random_init=True, optimizer=OptimizerConfig(lr=5e-3, warmup_steps=20)),
    dataset=DatasetConfig(str(task / "sft.jsonl")), steps=800, batch_size=64, log_every=100)
