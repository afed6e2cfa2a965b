"""`realhf profile`: measures this machine for the models of an experiment. Free of torch."""

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from realhf.cli.experiment_file import compile_experiment
from realhf.cli.job import Job, is_worker
from realhf.cli.plan import this_machine
from realhf.errors import require_output
from realhf.experiment import Experiment

HELP = "measure this machine for the models of an experiment, for the planner"
EXAMPLES = ("realhf profile examples/grpo.py -o profile.yaml",)
_TIMEOUT_SECONDS = 600.0


def add_options(parser: ArgumentParser) -> None:
    """Declare the options of `realhf profile`."""
    parser.set_defaults(plan=None)
    parser.add_argument("--nproc", type=int, help="local workers that measure at once; default: all devices")
    parser.add_argument("-o", "--out", default="profile.yaml", help="file to write; default: profile.yaml")


def run(options: Namespace, experiment: Experiment, argv: Sequence[str]) -> int:
    """Measure the machine, write the profile and return the exit code."""
    in_worker = is_worker()
    out = Path(options.out)
    if not in_worker and options.nproc is None:
        options.nproc = this_machine().num_devices
    program, num_ranks = compile_experiment(experiment, options)
    require_output(out, "--out", first="date:", what="profile")
    if in_worker or num_ranks == 1:
        job = Job(program, Path(options.experiment).stem, out, _TIMEOUT_SECONDS, options.traceback)
        return importlib.import_module("realhf.cli.worker").profile(job)
    return importlib.import_module("realhf.cli.launch").launch(argv, num_ranks)
