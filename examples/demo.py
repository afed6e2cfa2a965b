"""The demo: a tiny model learns to carry by reinforcement learning, on four processes. `make demo`, or with a seed `make demo SEED=2`."""

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import tyro
from arithmetic import prepare

from realhf import ExecutionPlan

PLAN = "grpo-4"
SAY = "\033[1m{}\033[0m" if sys.stderr.isatty() else "{}"


@dataclass
class Options:
    """Settings of the demo."""

    seed: int = 0
    """Changes the data, the initial weights and every random draw."""
    steps: int = 60
    """Steps of reinforcement learning."""


def main(options: Options) -> int:
    started = time.time()
    directory = _new_directory(Path("runs"), f"demo-seed{options.seed}")
    say(
        "1. A task: three-digit additions from reasoning-gym. The answer writes the column sums, then the result:\n"
        "   727+166=  ->  13,09,08<answer>893</answer>"
    )
    task = prepare(directory / "task", seed=options.seed)
    common = [
        *("--seed", str(options.seed)),
        *("--eval-dataset.path", str(task / "held_out.jsonl")),
    ]
    say(
        "\n2. Supervised warm-up: a tiny Qwen2-style model (124,000 parameters, random weights) imitates a careless teacher,\n"
        "   who forgets to carry in 80 % of the exercises. One process."
    )
    files = ["--dataset.path", str(task / "sft.jsonl"), "--actor.model", str(task / "model")]
    run("examples/sft.py", directory / "sft", ["--nproc", "1", *common, *files])
    warm = json.loads((directory / "sft" / "summary.json").read_text())
    say(f"   It now solves {warm['eval_last']:.0%} of the 256 held-out problems: mostly those without a carry.")
    layouts = ExecutionPlan.load(PLAN).calls
    say(
        "\n3. GRPO: eight answers to each of 64 problems per step; only right results are rewarded. Nobody shows it how.\n"
        f"   Four processes, plan {PLAN}: generation in layout {layouts['actor_generate'].layout} (four replicas), training in "
        f"{layouts['actor_train'].layout}\n   (two replicas, each split in two), the reference on its own mesh "
        f"{layouts['ref_forward'].layout}. The weights move between\n   the layouts in the middle of every step."
    )
    files = ["--dataset.path", str(task / "prompts.jsonl"), "--actor.model", warm["hf_dir"], "--steps", str(options.steps)]
    run("examples/grpo.py", directory / "grpo", ["--plan", PLAN, *common, *files])
    tell_result(directory / "grpo", seconds=time.time() - started)
    return 0


def tell_result(directory: Path, *, seconds: float) -> None:
    summary = json.loads((directory / "summary.json").read_text())
    realloc = summary["realloc"]["actor"]
    say(
        f"\nDone in {seconds:.0f} seconds.\n"
        f"   held-out score    {summary['eval_first']:.3f} before, {summary['eval_last']:.3f} after (greedy, 256 problems never seen)\n"
        f"   reallocated       {realloc['bytes_per_step'] / 1e6:.2f} MB of parameters per step; busiest wire at "
        f"{realloc['over_bound']:.2f} x its lower bound\n"
        f"   pictures          {directory / 'reward.png'}, {directory / 'timeline.png'}\n"
        f"   answers           {directory / 'eval.jsonl'}\n"
        f"   Hugging Face model {summary['hf_dir']}"
    )


def run(experiment: str, out: Path, arguments: list[str]) -> None:
    """One `realhf run`; the demo ends with its exit code if it fails."""
    command = [sys.executable, "-m", "realhf", "run", experiment, "--out", str(out), *arguments]
    code = subprocess.run(command).returncode
    if code:
        sys.exit(code)


def say(text: str) -> None:
    print(SAY.format(text), file=sys.stderr, flush=True)


def _new_directory(parent: Path, name: str) -> Path:
    """A directory that does not exist yet, so that no earlier run is lost."""
    number = 1
    while (directory := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return directory


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
