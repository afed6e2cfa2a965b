"""The demo, in which a tiny model learns to carry by reinforcement learning: `make demo [SEED=2]`."""

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

TASK = """
1. A task: three-digit additions from reasoning-gym. An answer writes the column sums and then the result:
   727+166=  ->  13,09,08<answer>893</answer>
"""
WARM_UP = """
2. Supervised warm-up: a tiny Qwen2-style model (124,000 parameters, random at first) imitates a careless
   teacher who forgets to carry in 80 % of the exercises. One process.
"""
WARM = """   The model now solves {score:.0%} of the 256 held-out problems: mostly those without a carry.
"""
GRPO = """
3. GRPO: eight answers to each of 64 problems per step; only right results are rewarded, nobody shows how.
   Four processes. Generation runs in layout {actor_generate} (four replicas), training in {actor_train}
   (two replicas, each split in two), the reference on a mesh of its own, {ref_forward}. The weights move
   between these layouts in every step.
"""
LORA = """   With LoRA: the model itself stays as it is; adapters are trained, and they are all that moves.
   The reference is the same model without them.
"""
RESULT = """
Done in {seconds:.0f} seconds.
   held-out score      {eval_first:.3f} before, {eval_last:.3f} after (greedy, 256 problems never trained on)
   reallocated         {megabytes:.2f} MB of parameters per step; measured: {gbytes:.2g} GB/s into the busiest
                       rank; computed: the schedule takes {over_bound:.2f} x its lower bound
   reward curve        {directory}/reward.png
   timeline of a step  {directory}/timeline.png
   answers             {directory}/eval.jsonl
   {exported:<18}  {hf_dir}
"""


@dataclass
class Options:
    """Settings of the demo."""

    seed: int = 0
    """Seed of the data, the initial weights and every random draw."""
    steps: int = 80
    """Number of GRPO steps."""
    lora: bool = False
    """Train LoRA adapters of the model instead of the model itself."""


def main(options: Options) -> None:
    started = time.time()
    directory = new_directory(Path("runs"), f"demo{'-lora' if options.lora else ''}-seed{options.seed}")
    say(TASK)
    task = prepare(directory / "task", seed=options.seed)
    common = {"seed": options.seed, "eval-dataset.path": task / "held_out.jsonl"}
    say(WARM_UP)
    files = {"dataset.path": task / "sft.jsonl", "actor.model": task / "model"}
    warm = run("examples/sft.py", directory / "sft", {"nproc": 1} | common | files)
    say(WARM, score=warm["eval_last"])
    say(GRPO, **{name: call.layout for name, call in ExecutionPlan.load(PLAN).calls.items()})
    if options.lora:
        say(LORA)
    files = {"dataset.path": task / "prompts.jsonl", "actor.model": warm["hf_dir"]}
    settings = {"plan": PLAN, "steps": options.steps} | common | files
    experiment = "examples/grpo_lora.py" if options.lora else "examples/grpo.py"
    done = run(experiment, directory / "grpo", settings)
    realloc = done.pop("realloc")["actor"]
    done |= {"seconds": time.time() - started, "megabytes": realloc["bytes_per_step"] / 1e6}
    done["gbytes"] = realloc["gbytes_per_s"]
    done["exported"] = "PEFT adapters" if options.lora else "Hugging Face model"
    say(RESULT, directory=directory / "grpo", over_bound=realloc["over_bound"], **done)


def run(experiment: str, out: Path, options: dict) -> dict:
    """Execute `realhf run` and return its summary; end the demo with its exit code if it fails."""
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "realhf", "run", experiment, "--out", str(out), *words]
    if code := subprocess.run(command).returncode:
        sys.exit(code)
    return json.loads((out / "summary.json").read_text())


def say(text: str, **values: object) -> None:
    text = text.format(**values)
    print(f"\033[1m{text}\033[0m" if sys.stderr.isatty() else text, file=sys.stderr, end="", flush=True)


def new_directory(parent: Path, name: str) -> Path:
    """Return the path of a directory that does not exist yet, so that no earlier run is lost."""
    number = 1
    while (directory := parent / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return directory


if __name__ == "__main__":
    main(tyro.cli(Options))
