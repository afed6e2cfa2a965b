"""Runs of the examples that learn from trajectories alone: tables and pictures of docs/control.md.

    python benchmarks/measure/control_offline.py ss_orl --out runs/control_offline      # or pasta; runs go on
    python benchmarks/measure/control_offline.py report --out runs/control_offline

Each run is one process's run of realhf in this process. Its result is a line of a file; a run that has one is
left out. Returns are means over ten episodes that all runs share.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

import torch

from realhf.distributed.world import World
from realhf.runtime.compile.program import compile_program
from realhf.runtime.trainer import Trainer

sys.path.append(str(Path(__file__).parents[2] / "examples/control"))
import pasta  # noqa: E402
import ss_orl  # noqa: E402
from trajectories import TASKS  # noqa: E402

IDLE = {"pendulum": 22.6, "double_pendulum": 85.6, "reacher": -13.6, "hopper": 144.8}
"""Mean returns without any action, over the ten episodes of the runs."""
SOURCES = ("oracle", "proxy", "shuffled", "labelled")
SS_ORL = list(product(IDLE, (0, 1, 2), SOURCES))
SS_ORL += [("hopper", seed, "proxy_all") for seed in (0, 1, 2)]  # The labelled tenth is drawn from all.
TOKENS = ("component", "modality")
PASTA = list(product(("swimmer", "hopper"), (0, 1, 2), TOKENS, ("bert", "gpt")))
PASTA += list(product(["hopper"], (0, 1, 2), TOKENS, ["gpt_long"]))  # Four times the updates.
STEPS = 60  # Steps of TD3+BC.


def run_ss_orl(out: Path, task: str, seed: int, source: str) -> dict:
    source, _, labelled = source.partition("_")
    experiment = replace(
        ss_orl.experiment, task=task, seed=seed, source=source, labelled=labelled or "lower",
        checkpoint_every=0)
    before = experiment.inverse_steps if source == "proxy" else 0
    experiment = replace(experiment, steps=STEPS + before)
    result = Trainer(compile_program(experiment, None, world_size=1), World(), out=out, quiet=True).run()
    found = {i + 1 - before: step["return"] for i, step in enumerate(result.metrics) if "return" in step}
    errors = [step["idm/error"] for step in result.metrics if "idm/error" in step]
    return {"returns": found, "idm_error": errors[-1:]}


def run_pasta(out: Path, task: str, seed: int, tokens: str, objective: str) -> dict:
    objective, _, long = objective.partition("_")
    experiment = replace(
        pasta.experiment, task=task, seed=seed, tokens=tokens, objective=objective, checkpoint_every=0,
        eval_at_start=False)
    if long:
        experiment = replace(
            experiment, steps=4 * (experiment.steps - experiment.adapt_steps) + experiment.adapt_steps)
    result = Trainer(compile_program(experiment, None, world_size=1), World(), out=out, quiet=True).run()
    losses = [step["model/loss"] for step in result.metrics if "model/loss" in step]
    lines = (json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines())
    evals = {key: value for line in lines for key, value in line.items() if key.startswith("eval/")}
    sizes = {name: sum(p.numel() for p in role.module(**role.arguments).parameters())
             for name, role in experiment.roles().items()}
    return {"losses": losses, "sizes": sizes} | evals


def read(out: Path, what: str) -> list[dict]:
    """Return the results of all runs, in whichever directories below `out` they are."""
    files = sorted(out.rglob(f"{what}.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def tables(out: Path) -> None:
    """Print the tables of the page: means over seeds, and ranges."""
    for task, idle in IDLE.items():
        last = {}
        for line in read(out, "ss_orl"):
            if line["case"][0] == task:
                last.setdefault(line["case"][2], {})[line["case"][1]] = [*line["returns"].values()][-1]
        for name, v in last.items():
            low, high = min(v.values()), max(v.values())
            print(f"{task} | {name} | {mean(v.values()):.1f} ({low:.1f} to {high:.1f})")
        gains = {name: mean(v.values()) - idle for name, v in last.items()}
        if "oracle" in gains:
            shares = (f"{name} / oracle {gain / gains['oracle']:.2f}" for name, gain in gains.items())
            print(task, *shares, sep=" | ")
    found: dict = {}
    for line in read(out, "pasta"):
        task, _, tokens, objective = line["case"]
        for key, value in line.items():
            if key.startswith("eval/"):
                found.setdefault((task, objective, tokens), {}).setdefault(key[5:], []).append(value)
    for case, errors in sorted(found.items()):
        cells = (f"{key} {mean(values):.3f} ({len(values)})" for key, values in errors.items())
        print(*case, *cells, sep=" | ")


def picture(out: Path, path: Path) -> None:
    """Draw the curves of returns, and the errors of answers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 6.5), layout="constrained")
    above, below = figure.subfigures(2, 1)
    for axis, task in zip(above.subplots(1, len(IDLE)), IDLE, strict=True):
        for source in (*SOURCES, "proxy_all"):
            curves = [line["returns"] for line in read(out, "ss_orl") if line["case"][::2] == [task, source]]
            if not curves:
                continue
            updates = [20 * int(step) for step in curves[0]]
            values = [[*curve.values()] for curve in curves]
            points = [(mean(at), min(at), max(at)) for at in zip(*values, strict=True)]
            middle, low, high = zip(*points, strict=True)
            (line,) = axis.plot(updates, middle, label=source)
            axis.fill_between(updates, low, high, color=line.get_color(), alpha=0.15)
        axis.axhline(IDLE[task], color="0.5", linestyle=":", label="no action")
        axis.set(title=TASKS[task].name, xlabel="updates of the critic", ylabel="return")
    above.suptitle("SS-ORL: returns, mean and range of three seeds")
    above.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    for axis, task in zip(below.subplots(1, 2), ("swimmer", "hopper"), strict=True):
        for k, (tokens, objective) in enumerate(product(TOKENS, ("bert", "gpt"))):
            like = [task, tokens, objective]
            runs = [run for run in read(out, "pasta") if [run["case"][i] for i in (0, 2, 3)] == like]
            if runs:
                heights = [mean(run[f"eval/{q}"] for run in runs) for q in pasta.QUESTIONS]
                places = [i + k * 0.14 for i in range(3)]
                axis.bar(places, heights, 0.13, label=f"C-{objective.upper()}, {tokens}")
        runs = [line for line in read(out, "pasta") if line["case"][0] == task]
        for k, against in enumerate(("copy", "mean")):
            if runs:
                heights = [runs[0][f"eval/{q}_{against}"] for q in pasta.QUESTIONS]
                places = [i + (4 + k) * 0.14 for i in range(3)]
                axis.bar(places, heights, 0.13, color=("0.75", "0.6")[k], label=against)
        axis.set(title=TASKS[task].name, ylabel="error, in variances", yscale="log")
        axis.set_xticks([i + 0.35 for i in range(3)], pasta.QUESTIONS)
    below.suptitle("PASTA: mean squared errors of answers without further training, mean of three seeds")
    below.legend(*axis.get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("ss_orl", "pasta", "report"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="words that a run must have, such as hopper,0")
    options = parser.parse_args()
    if options.what == "report":
        tables(options.out)
        picture(options.out, Path("docs/control-offline.png"))
        return
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / f"{options.what}.jsonl"
    cases, run = {"ss_orl": (SS_ORL, run_ss_orl), "pasta": (PASTA, run_pasta)}[options.what]
    for case in cases:
        words = [str(word) for word in case]
        lines = results.read_text().splitlines() if results.exists() else []
        done = [json.loads(line)["case"] for line in lines]
        if words in done or not set(filter(None, options.only.split(","))) <= set(words):
            continue
        start = time.process_time()
        found = run(options.out / "-".join((options.what, *words)), *case)
        line = {"case": words, "cpu_seconds": round(time.process_time() - start, 1)} | found
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
