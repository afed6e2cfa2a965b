"""`realhf profile`: measures this machine for the models of an experiment. Free of torch."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from realhf.cli.experiment_file import add_experiment_arguments, read_experiment
from realhf.cli.launch import ProfileJob, is_worker, launch
from realhf.cli.plan import this_machine
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.errors import UserError
from realhf.user_input.files import require_output

HELP = "measure this machine for the models of an experiment, for the planner"
EXAMPLES = ("realhf profile examples/sft.py -o profile.yaml",)
_TIMEOUT_SECONDS = 600.0
_ANY_CLUSTER = "cpu-laptop"
"""A cluster for the problem; measurements do not depend on it."""


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf profile`."""
    add_experiment_arguments(parser)
    parser.add_argument("--nproc", type=int, help="processes that measure; default: one for each device")
    parser.add_argument("-o", "--out", default="profile.yaml", help="file to write; default: profile.yaml")


def main(options: Namespace, words: list[str]) -> int:
    """Measure the machine, write the profile and return the exit code.

    Like a plan, this needs neither weights nor data if the experiment says how long its sequences are.
    """
    experiment = read_experiment(options, words)
    out = Path(options.out)
    if other := [name for name, role in experiment.roles().items() if role.engine != "native"]:
        engine = experiment.roles()[other[0]].engine
        raise UserError(f"{options.experiment}: {other[0]}.engine is {engine}: only native ones are measured")
    try:
        problem = problem_of(experiment, Cluster.load(_ANY_CLUSTER))
    except ValueError as error:
        raise UserError(f"{options.experiment}: {error}") from error
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc is {options.nproc}: it must be at least 1")
    require_output(out, "--out", first="date:", what="profile")
    num_ranks = 1 if is_worker() else options.nproc or this_machine().num_devices
    if num_ranks == 1:
        from realhf.cli.worker import profile

        return profile(ProfileJob(problem, out, _TIMEOUT_SECONDS, options.traceback))
    return launch(options.argv, num_ranks, directory=options.started_in)
