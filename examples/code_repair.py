"""GRPO with unit tests: a tiny model, drawn at random, learns to repair functions in up to three tries.

    realhf run examples/code_repair.py
"""

import random
from functools import cache
from pathlib import Path
from threading import Lock

from tiny_chat import write_model, write_rows

import realhf

HEAD = "def f(a, b): return "
BODIES = ("a + b", "a - b", "a * b", "max(a, b)")
rng = random.Random(0)
INPUTS = [tuple((rng.randint(1, 9), rng.randint(1, 9)) for _ in range(3)) for _ in range(24)]
TESTS = {
    (pairs, body): [f"assert f({a}, {b}) == {eval(body, {'a': a, 'b': b})}" for a, b in pairs]
    for pairs in INPUTS for body in BODIES}
ALL = sorted({test for tests in TESTS.values() for test in tests})
one_at_a_time = Lock()  # Each object has a thread of its own, and they share what has run.


@cache
def passed(code: str) -> set[str]:
    """Return the tests that code passes. It runs once, with the tests of all rows, as that takes a while."""
    return {t for t, end in zip(ALL, realhf.Sandbox().run(code, ALL).tests, strict=True) if end == "passed"}


class Repair:
    """A function that fails its tests. The model says what it must return, and reads which test fails."""

    def start(self, row: dict, seed: int) -> None:  # The row's prompt is what the model reads first.
        self.tests = row["tests"]

    def step(self, message: dict) -> realhf.Turn:
        with one_at_a_time:
            failing = [test for test in self.tests if test not in passed(HEAD + message["content"])]
        return realhf.Turn(f"{failing[0]}\n", -0.1) if failing else realhf.Turn(reward=1.0, done=True)


def write_task(directory: Path) -> None:
    """Write the model, some of whose tokens are functions' bodies, and functions with three tests each."""
    write_model(directory / "model", "0123456789-,\n ", words=(HEAD, *BODIES, "assert f(", ") == "))
    rows = [{"prompt": f"{HEAD}{wrong}\n{tests[0]}\n", "tests": tests}
            for (_, right), tests in TESTS.items() for wrong in BODIES if wrong != right]
    write_rows(directory / "held_out.jsonl", rows[:60])  # Their inputs are in no other row.
    write_rows(directory / "prompts.jsonl", rows[60:])


task = realhf.prepare_once("runs/code_repair/task", write_task)
experiment = realhf.GRPO(
    actor=realhf.Role(str(task / "model"), random_init=True, optimizer=realhf.OptimizerConfig(lr=3e-3)),
    dataset=realhf.DatasetConfig(str(task / "prompts.jsonl")), batch_size=8, group_size=16, steps=80,
    eval_dataset=realhf.DatasetConfig(str(task / "held_out.jsonl")), eval_every=20,
    environment=realhf.Environment(Repair, max_turns=3, max_tokens=64),
    sampling=realhf.SamplingConfig(max_new_tokens=1), loss=realhf.PolicyLossConfig(entropy_coef=0.02))
