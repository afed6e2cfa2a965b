"""`realhf run`: trains on local workers, or as one worker under torchrun. Free of torch."""

import importlib
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from realhf.cli.experiment_file import add_plan_option, compile_experiment
from realhf.cli.job import Job, is_worker
from realhf.errors import UserError
from realhf.experiment import Experiment
from realhf.runtime.run_directory import (
    check_run_directory,
    find_restarted,
    find_resumption,
    new_run_directory,
)

HELP = "train on local workers, or as one worker under torchrun"
EXAMPLES = (
    "realhf run examples/grpo.py --plan grpo-4 --actor.optimizer.lr 1e-4",
    "torchrun --nproc-per-node 4 -m realhf run examples/grpo.py --plan grpo-4",
)
_MAX_TIMEOUT_SECONDS = 1e6


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of `realhf run`."""
    add_plan_option(parser)
    add = parser.add_argument
    add("--nproc", type=int, help="local workers; default: as many as the plan uses, else 1")
    add("--out", help="run directory; default: a new one below runs/")
    text = "continue a run from its last checkpoint: that in --out, else the newest, or the one at PATH"
    add("--resume", nargs="?", const="", metavar="PATH", help=text)
    text = "plan file for fewer ranks, when hosts are lost and torchrun goes on with the others; repeatable"
    add("--fallback-plan", action="append", metavar="FILE", help=text)
    text = "start local workers again up to N times if one fails, from the last checkpoint; default: 0"
    add("--restarts", type=int, default=0, metavar="N", help=text)
    add("--profile", help="with --plan auto: what `realhf profile` measured on this machine")
    text = "cluster file or shipped name: what --plan auto plans for, and the links of reallocations"
    add("--cluster", help=text)
    text = "seconds without a sign of life from a worker after which the run ends; default: 600"
    add("--timeout", type=float, default=600.0, metavar="S", help=text)


def run(options: Namespace, experiment: Experiment, argv: Sequence[str]) -> int:
    """Train and return the exit code."""
    in_worker = is_worker()
    if in_worker and options.nproc is not None and options.nproc != int(os.environ["LOCAL_WORLD_SIZE"]):
        why = "under torchrun the number of workers comes from torchrun, leave it out"
        raise UserError(f"--nproc {options.nproc}: {why}")
    program, num_ranks = compile_experiment(experiment, options)
    if not 0 < options.timeout <= _MAX_TIMEOUT_SECONDS:
        legal = f"it must be above 0 and at most {_MAX_TIMEOUT_SECONDS:g} seconds"
        raise UserError(f"--timeout {options.timeout:g}: {legal}")
    if options.restarts < 0:
        raise UserError(f"--restarts {options.restarts}: it must not be negative")
    name = Path(options.experiment).stem
    out = None if options.out is None else Path(options.out)
    if options.resume is not None:
        if not in_worker:
            out = find_resumption(name, resume=options.resume, out=out).out
    elif out is not None and find_restarted(out) is None and (not in_worker or os.environ["RANK"] == "0"):
        check_run_directory(out)
    if in_worker or num_ranks == 1:
        job = Job(program, name, out, options.timeout, options.resume, options.traceback)
        return importlib.import_module("realhf.cli.worker").work(job)
    launch = importlib.import_module("realhf.cli.launch").launch
    return launch([*argv, "--out", str(out or new_run_directory(name))], num_ranks, restarts=options.restarts)
