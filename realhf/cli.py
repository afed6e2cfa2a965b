"""The command line. Free of torch; commands that need it are loaded when they are called."""

import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from realhf import plan_command
from realhf.cluster import Cluster
from realhf.dry_run import try_out
from realhf.errors import UserError
from realhf.experiment import Experiment
from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.overrides import override, print_fields
from realhf.param_spec import model_spec
from realhf.plan import ExecutionPlan
from realhf.planner import report
from realhf.planner.problem import ITEMSIZE
from realhf.planner.proof import require_fit
from realhf.planning import problem_of
from realhf.realloc import explain
from realhf.realloc.schedule import make_schedule
from realhf.realloc.wires import Wires
from realhf.runtime.check import Program, compile_program
from realhf.runtime.run_directory import check_run_directory, new_run_directory
from realhf.units import format_bytes

EXIT_DONE, EXIT_FAILED, EXIT_USER = 0, 1, 2
_MAX_TIMEOUT, _PROFILE_TIMEOUT = 1e6, 600.0


@dataclass(frozen=True)
class Job:
    """What a worker is to do; `out` is a run directory, or the file of a profile."""

    program: Program
    name: str
    """Of the experiment file, without its suffix: run directories are named after it."""
    out: Path | None
    timeout_seconds: float
    traceback: bool = False
    """Whether errors are shown with the Python lines that led to them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Exit code 0: done, 2: wrong input (one sentence on stderr), 1: anything else."""
    if "OMP_WAIT_POLICY" not in os.environ:
        # Threads wait for each other awake, but not for long: they may have to share their cores.
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    # (What torch warns of sockets says less than our own sentences.)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    argv = sys.argv[1:] if argv is None else argv
    try:
        _check_environment()
        options, overrides = _parser().parse_known_args(argv)
        if options.command is _realloc:
            return _realloc(options, overrides)
        experiment = _experiment(options, overrides)
        return EXIT_DONE if experiment is None else options.command(options, experiment, argv)
    except UserError as error:
        text = f"{traceback.format_exc()}realhf: {error}" if "--traceback" in argv else None
        if _is_worker():
            importlib.import_module("realhf.worker").report(str(error), code=EXIT_USER, text=text)
        else:
            print(text or f"realhf: {error}", file=sys.stderr)
        return EXIT_USER
    except BrokenPipeError:  # Whoever read the answer has seen enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _is_worker() -> bool:
    """Whether torchrun, or our own launcher, has started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _check_environment() -> None:
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    if not threads.isdecimal() or int(threads) < 1:
        raise UserError(f"OMP_NUM_THREADS is {threads!r}: it must be a whole number of at least 1")


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _parser() -> ArgumentParser:
    description = importlib.import_module("realhf").__doc__
    parser = _Parser(prog="realhf", description=description, allow_abbrev=False)
    commands = parser.add_subparsers(title="commands", required=True)
    text = "train: run an experiment on local workers, or as one worker under torchrun"
    run = _add_command(commands, "run", _run, text)
    run.add_argument("--nproc", type=int, help="local workers; default: as many as the plan uses, else 1")
    run.add_argument("--out", help="run directory; default: a new one below runs/")
    run.add_argument("--profile", help="with --plan auto: what `realhf profile` measured on this machine")
    text = "cluster file or shipped name: what --plan auto plans for, and the links of reallocations"
    run.add_argument("--cluster", help=text)
    text = "seconds without a sign of life from a worker after which the run ends; default: 600"
    run.add_argument("--timeout", type=float, default=600.0, metavar="S", help=text)
    text = "find what is wrong with an experiment and a plan, without running it"
    check = _add_command(commands, "check", _check, text)
    check.add_argument("--nproc", type=int, help="ranks to check against; default: as many as the plan uses")
    check.add_argument("--cluster", help="cluster file or shipped name: its devices are the ranks")
    check.add_argument("--json", action="store_true", help="print one JSON document")
    text = "measure this machine for the models of an experiment, for the planner"
    profile = _add_command(commands, "profile", _profile, text, plan=False)
    profile.set_defaults(plan=None)
    profile.add_argument("--nproc", type=int, help="local workers that measure at once; default: all devices")
    profile.add_argument("-o", "--out", default="profile.yaml", help="file to write; default: profile.yaml")
    text = "search a plan for a cluster, with a lower bound over the plans enumerated"
    plan = _add_command(commands, "plan", _plan, text, plan=False)
    plan_command.add_options(plan)
    _add_realloc(commands)
    return parser


def _add_realloc(commands: Any) -> None:
    text = "explain one reallocation: what moves, how long it takes, what limits it"
    realloc = commands.add_parser("realloc", help=text, description=text, allow_abbrev=False)
    realloc.set_defaults(command=_realloc)
    add = realloc.add_argument
    add("--model", required=True, help="config.json, model directory or shipped name")
    add("--src", required=True, metavar="LAYOUT", help="where the parameters are, such as d2t4@0-7")
    add("--dst", required=True, metavar="LAYOUT", help="where they are to go")
    add("--cluster", help="cluster file or shipped name; default: one host with NVLink between all ranks")
    add("--dtype", choices=ITEMSIZE, help="of what travels; default: the config's, else bfloat16")
    add("--json", action="store_true", help="print one JSON document")
    add("--transfers", action="store_true", help="with --json: every transfer, and who holds what")


def _add_command(
    commands: Any, name: str, function: Any, text: str, *, plan: bool = True
) -> ArgumentParser:
    command = commands.add_parser(name, help=text, description=text, add_help=False, allow_abbrev=False)
    command.set_defaults(command=function, parser=command)
    add = command.add_argument
    add("experiment", nargs="?", metavar="EXP.py", help="Python file that defines `experiment`")
    if plan:
        add("--plan", help="plan file or shipped name, or `auto`; default: calls split over all ranks by dp")
    add("--traceback", action="store_true", help="show the Python traceback of an error, too")
    add("-h", "--help", action="store_true", help="this help; with EXP.py also every field to override")
    return command


def _run(options: Namespace, experiment: Experiment, argv: Sequence[str]) -> int:
    is_worker = _is_worker()
    if is_worker and options.nproc is not None and options.nproc != int(os.environ["LOCAL_WORLD_SIZE"]):
        why = "under torchrun the number of workers comes from torchrun, leave it out"
        raise UserError(f"--nproc {options.nproc}: {why}")
    program, num_ranks = _compile(experiment, options, int(os.environ["WORLD_SIZE"]) if is_worker else None)
    if not 0 < options.timeout <= _MAX_TIMEOUT:
        legal = f"it must be above 0 and at most {_MAX_TIMEOUT:g} seconds"
        raise UserError(f"--timeout {options.timeout:g}: {legal}")
    name, out = Path(options.experiment).stem, None if options.out is None else Path(options.out)
    if out is not None and (not is_worker or os.environ["RANK"] == "0"):
        check_run_directory(out)
    if is_worker or num_ranks == 1:
        job = Job(program, name, out, options.timeout, options.traceback)
        return importlib.import_module("realhf.worker").work(job)
    launch = importlib.import_module("realhf.launch").launch
    return launch([*argv, "--out", str(out or new_run_directory(name))], num_ranks)


def _profile(options: Namespace, experiment: Experiment, argv: Sequence[str]) -> int:
    is_worker, out = _is_worker(), Path(options.out)
    if not is_worker and options.nproc is None:
        options.nproc = plan_command.this_machine().num_devices
    program, num_ranks = _compile(experiment, options, int(os.environ["WORLD_SIZE"]) if is_worker else None)
    if out.is_dir() or not out.parent.is_dir():
        raise UserError(f"--out {out}: it must be a file in a directory that exists")
    if is_worker or num_ranks == 1:
        job = Job(program, Path(options.experiment).stem, out, _PROFILE_TIMEOUT, options.traceback)
        return importlib.import_module("realhf.worker").profile(job)
    return importlib.import_module("realhf.launch").launch(argv, num_ranks)


def _check(options: Namespace, experiment: Experiment, argv: Sequence[str]) -> int:
    cluster = Cluster.load(options.cluster) if options.cluster is not None else None
    num_devices = cluster.num_devices if cluster is not None and options.nproc is None else None
    program, num_ranks = _compile(experiment, options, num_devices)
    with _naming(options.experiment):
        for what in try_out(program):
            print(f"realhf: warning: {what}", file=sys.stderr)
    proof = None
    if cluster is not None:
        with _naming(f"plan {options.plan}" if options.plan else options.experiment):
            proof = require_fit(problem_of(experiment, cluster), program.plan)
    if options.json:
        homes = {role: str(layout) for role, layout in program.homes.items()}
        answer = {"ranks": num_ranks, "calls": program.plan.to_dict()["calls"], "homes": homes}
        print(json.dumps(answer | ({"memory": report.memory(proof)} if proof is not None else {})))
        return EXIT_DONE
    print(f"{options.experiment} is sound on {num_ranks} rank{'s' * (num_ranks != 1)}:")
    for call in program.graph.order:
        where = program.plan[call.name]
        columns = f"{call.name:<18} {call.kind:<10} {call.role or '-':<8} {where.layout}"
        print("  ".join(("", columns, *where.options)))
    if proof is not None:
        peak = proof.fullest
        has = f"{format_bytes(peak.num_bytes)} of {format_bytes(proof.available)} available"
        print(f"it fits: the fullest device, rank {peak.rank}, needs {has} while {peak.call} runs")
    return EXIT_DONE


def _plan(options: Namespace, experiment: Experiment, argv: Sequence[str]) -> int:
    return plan_command.plan(options, experiment)


def _realloc(options: Namespace, unknown: Sequence[str]) -> int:
    if unknown:
        legal = ", ".join(f"--{name.replace('_', '-')}" for name in vars(options) if name != "command")
        raise UserError(f"realhf realloc has no option {unknown[0]}: legal are {legal}")
    if options.transfers and not options.json:
        raise UserError("--transfers needs --json: the list is for programs")
    with _naming("--model"):
        config = ModelConfig.load(options.model)
        dtype = options.dtype or config.hf.get("dtype") or config.hf.get("torch_dtype") or "bfloat16"
        if dtype not in ITEMSIZE:
            raise ValueError(f"{options.model} has dtype {dtype!r}: legal are {', '.join(ITEMSIZE)}")
    with _naming("--cluster"):
        cluster = Cluster.load(options.cluster) if options.cluster else None
    source, target = (_layout(options, name, config, cluster) for name in ("src", "dst"))
    schedule = make_schedule(
        model_spec(config).without_limbs(), source=source, target=target, itemsize=ITEMSIZE[dtype],
        wires=Wires.of_cluster(cluster) if cluster else None,
    )  # fmt: skip
    if options.json:
        transfers = options.transfers
        print(json.dumps(explain.document(schedule, source=source, target=target, transfers=transfers)))
    else:
        title = f"{options.model} in {dtype}"
        Console().print(explain.table(schedule, source=source, target=target, title=title))
    return EXIT_DONE


@contextlib.contextmanager
def _naming(option: str) -> Iterator[None]:
    """What is wrong inside is wrong with this option."""
    try:
        yield
    except (ValueError, UserError) as error:
        raise UserError(f"{option}: {error}") from error


def _layout(options: Namespace, name: str, config: ModelConfig, cluster: Cluster | None) -> Layout:
    """The layout that an option names, if model and cluster allow it."""
    with _naming(f"--{name} {getattr(options, name)}"):
        layout = Layout.parse(getattr(options, name))
        config.check_layout(layout)
        if cluster is not None and max(layout.ranks) >= cluster.num_devices:
            devices = f"which has {cluster.num_devices} devices"
            raise ValueError(f"rank {max(layout.ranks)} is not in cluster {options.cluster}, {devices}")
    return layout


def _experiment(options: Namespace, overrides: list[str]) -> Experiment | None:
    """The experiment with its overrides; None when help was asked for and given."""
    if options.help:
        print(options.parser.format_help())
        if options.experiment is not None:
            print_fields(load_experiment(options.experiment))
        return None
    if options.experiment is None:
        raise UserError(f"{options.parser.prog} needs an experiment file: {options.parser.prog} EXP.py")
    return override(load_experiment(options.experiment), overrides)


def load_experiment(name: str) -> Experiment:
    """Executes the user's file, as a module whose name hides no other, and returns its `experiment`."""
    path = Path(name)
    if not path.is_file():
        raise UserError(f"experiment {name!r}: there is no such file")
    spec = importlib.util.spec_from_file_location(f"realhf_experiment_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"experiment {name}: it must be a Python file, whose name ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.append(str(path.parent.resolve()))  # Its neighbours may be imported, but hide no other module.
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Standard output is for the command's own answer.
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == path]
        line = f" line {frames[-1].lineno}" if frames else ""
        raise UserError(f"experiment {name}{line}: {type(error).__name__}: {error}") from error
    experiment = getattr(module, "experiment", None)
    if not isinstance(experiment, Experiment):
        must = "it must define `experiment`, an Experiment such as realhf.GRPO(...)"
        raise UserError(f"experiment {name}: {must}")
    return experiment


def _compile(experiment: Experiment, options: Namespace, num_ranks: int | None) -> tuple[Program, int]:
    """The program and its number of ranks: as given, else what --nproc says, else what the plan uses."""
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc is {options.nproc}: it must be at least 1")
    plan, named, profile = None, getattr(options, "cluster", None), getattr(options, "profile", None)
    cluster = Cluster.load(named) if named is not None else None
    if options.plan == "auto":
        cluster = plan_command.cluster_at_hand(nproc=options.nproc, cluster=named, profile=profile)
        planned = plan_command.auto_plan(experiment, options.experiment, cluster=cluster, profile=profile)
        plan, num_ranks = planned.plan, num_ranks or options.nproc or cluster.num_devices
        if not _is_worker():
            print(f"realhf: {plan_command.describe(planned)}", file=sys.stderr)
    elif options.plan is not None:
        plan = ExecutionPlan.load(options.plan)
    num_ranks = num_ranks or options.nproc or (plan.num_ranks if plan else 1)
    try:
        program = compile_program(experiment, plan, world_size=num_ranks)
        if cluster is not None and (origin := named or profile) is not None:
            program = dataclasses.replace(program, wires=Wires.of_cluster(cluster, origin=f"{origin}'s"))
        return program, num_ranks
    except ValueError as error:
        about_plan = options.plan is not None and str(error).startswith("calls.")
        raise UserError(f"{f'plan {options.plan}' if about_plan else options.experiment}: {error}") from error


