"""GRPO with unit tests: a tiny model, drawn at random, learns to repair functions in up to three tries.

    realhf run examples/code_repair.py
"""

import itertools
import random
from functools import cache
from pathlib import Path
from threading import Lock

from tiny_chat import write_model, write_rows

import realhf

HEAD = "def f(a, b): return "
BODIES = ("a + b", "a - b", "b - a", "a * b", "max(a, b)", "min(a, b)")
run = cache(realhf.Sandbox().run)  # The same code comes again and again, and takes 50 ms each time.
one_at_a_time = Lock()  # Each object has a thread of its own.


class Repair:
    """A function that fails its tests. The model says what it must return, and reads which test fails."""

    def start(self, row: dict, seed: int) -> None:  # The row's prompt is what the model reads first.
        self.tests = tuple(row["tests"])

    def step(self, message: dict) -> realhf.Turn:
        with one_at_a_time:
            results = run(HEAD + message["content"], self.tests).tests
        failing = [test for test, result in zip(self.tests, results, strict=True) if result != "passed"]
        return realhf.Turn(f"{failing[0]}\n", reward=-0.1) if failing else realhf.Turn(reward=1.0, done=True)


def write_task(directory: Path) -> None:
    """Write the model, some of whose tokens are functions' bodies, and functions with three tests each."""
    words = (HEAD, *BODIES, "assert f(", ") == ")
    write_model(directory / "model", "0123456789-,\n ", words=words)
    rng = random.Random(0)
    inputs = [[(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(3)] for _ in range(24)]
    rows: list[dict] = []
    for triple, right, wrong in itertools.product(inputs, BODIES, BODIES):
        function = eval(f"lambda a, b: {right}")
        tests = [f"assert f({a}, {b}) == {function(a, b)}" for a, b in triple]
        if right != wrong:
            rows.append({"prompt": f"{HEAD}{wrong}\n{tests[0]}\n", "tests": tests})
    write_rows(directory / "held_out.jsonl", rng.sample(rows[:120], 60))  # Their inputs are in no other row.
    write_rows(directory / "prompts.jsonl", rows[120:])


task = realhf.prepare_once("runs/code_repair/task", write_task)
experiment = realhf.GRPO(
    actor=realhf.Role(str(task / "model"), random_init=True, optimizer=realhf.OptimizerConfig(lr=3e-3)),
    dataset=realhf.DatasetConfig(str(task / "prompts.jsonl")),
    eval_dataset=realhf.DatasetConfig(str(task / "held_out.jsonl")),
    environment=realhf.Environment(Repair, max_turns=3, max_tokens=64),
    sampling=realhf.SamplingConfig(max_new_tokens=1),
    loss=realhf.PolicyLossConfig(entropy_coef=0.03),
    steps=100, batch_size=8, group_size=16, eval_every=20)
