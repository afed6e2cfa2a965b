"""`realhf run`: trains on local workers, or as one worker under torchrun. Free of torch."""

import json
import os
import sys
import uuid
from argparse import ArgumentParser, Namespace
from pathlib import Path

from realhf.calls import Generate
from realhf.cli.experiment_file import add_experiment_arguments, read_experiment
from realhf.cli.launch import LAUNCHER_PLAN, Job, how_to_continue, is_worker, launch
from realhf.cli.overrides import step_numbers
from realhf.cli.program import add_plan_argument, compile_experiment, prove_here, with_predictions
from realhf.data.light_tokenizer import LightTokenizer
from realhf.environments.rollouts import EnvironmentTurnSourceFactory
from realhf.environments.tool_calls import AnswerParser, schema_of
from realhf.errors import UserError, warn
from realhf.execution_plan import ExecutionPlan
from realhf.experiment import Experiment
from realhf.graph import DataflowGraph
from realhf.runtime.compile.program import Program
from realhf.runtime.records.run_directory import (
    LOCK,
    check_run_directory,
    find_restarted,
    find_resumption,
    has_begun,
    new_run_directory,
)
from realhf.runtime.records.trackers import tracker_names

HELP = "train on local workers, or as one worker under torchrun"
EXAMPLES = (
    "realhf run examples/grpo.py --plan grpo-4 --actor.optimizer.lr 1e-4",
    "torchrun --nproc-per-node 4 -m realhf run examples/grpo.py --plan grpo-4",
)
_MAX_TIMEOUT_SECONDS = 1e6


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the arguments of `realhf run`."""
    add_experiment_arguments(parser)
    add_plan_argument(parser)
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
    text = "also send the metrics to wandb, mlflow or trackio; several joined by commas"
    add("--track", action="append", default=[], metavar="NAME", help=text)
    text = "steps to record with torch's profiler, on every rank: 5-7; `realhf report --trace` joins them"
    add("--profile-steps", metavar="STEPS", help=text)
    text = "seconds without a sign of life from a worker after which the run ends; default: 600"
    add("--timeout", type=float, default=600.0, metavar="S", help=text)


def main(options: Namespace, words: list[str]) -> int:
    """Train and return the exit code."""
    experiment = read_experiment(options, words, weights=True)
    track = tracker_names(options.track)
    profiled = step_numbers(options.profile_steps, option="--profile-steps")
    in_worker = is_worker()
    if in_worker and options.nproc is not None and options.nproc != int(os.environ["LOCAL_WORLD_SIZE"]):
        raise UserError(
            f"--nproc {options.nproc}: under torchrun the number of workers comes from torchrun, "
            "leave it out")
    name = Path(options.experiment).stem
    out = None if options.out is None else Path(options.out)
    if options.resume == "" and out is None and (Path(options.experiment).parent / LOCK).is_file():
        out = Path(options.experiment).parent  # Python has saved the experiment in the directory of its run.
    if options.resume is not None:
        out, plan = _resumed(options, name, out, experiment)
        options = Namespace(**vars(options) | {"plan": plan})
    program, num_ranks = compile_experiment(experiment, options)
    if not 0 < options.timeout <= _MAX_TIMEOUT_SECONDS:
        raise UserError(
            f"--timeout {options.timeout:g}: it must be above 0 and at most {_MAX_TIMEOUT_SECONDS:g} seconds")
    if options.restarts < 0:
        raise UserError(f"--restarts {options.restarts}: it must not be negative")
    is_new = options.resume is None and out is not None and find_restarted(out) is None
    if is_new and (not in_worker or os.environ["RANK"] == "0"):
        check_run_directory(Path(options.out))
    if not in_worker:
        _check_tools(program.graph)
    if in_worker or num_ranks == 1:
        program = with_predictions(
            experiment, program, nproc=num_ranks, cluster=options.cluster, profile=options.profile)
        if os.environ.get("RANK", "0") == "0" and options.cluster is None and options.profile is None:
            _warn_of_memory(experiment, program)
        job = Job(program, name, out, options.timeout, options.resume, options.traceback, track,
                  profiled, options.started_in)
        from realhf.cli.worker import train

        return train(job)
    out = out or new_run_directory(name, below=options.started_in)
    if options.plan == "auto":
        os.environ[LAUNCHER_PLAN] = json.dumps(program.plan.to_dict())
    run_id = uuid.uuid4().hex
    code = launch(
        [*options.argv, "--out", str(out)], num_ranks, restarts=options.restarts, run_id=run_id,
        directory=options.started_in)
    if code and has_begun(out, run_id) and (text := how_to_continue(out)) is not None:
        print(f"realhf: {text}", file=sys.stderr, flush=True)
    return code


def _require_calls(experiment: Experiment, plan: ExecutionPlan, run: Path) -> None:
    """Raise UserError if the plan of a run has other calls than the experiment that is to continue it."""
    try:
        ours = {call.name for call in experiment.graph().calls}
    except Exception:  # Compiling the experiment says it better.
        return
    theirs = set(plan.to_dict()["calls"])
    if not ours <= theirs:
        more = ", ".join(sorted(ours - theirs))
        raise UserError(
            f"--resume: {run} is the run of another experiment or of other settings: it has no call {more}, "
            f"which this experiment ({type(experiment).__name__}) needs; resume it with its own "
            "experiment file, or begin a new run with another --out")


def _check_tools(graph: DataflowGraph) -> None:
    """Raise UserError if a model's chat template cannot call the tools of its environment.

    Tools that an environment returns in its start are known only when it has started.
    """
    for work in graph.works(Generate):
        factory = work.environment
        if isinstance(factory, EnvironmentTurnSourceFactory) and factory.environment.tools:
            AnswerParser(
                LightTokenizer(factory.tokenizer), [schema_of(tool) for tool in factory.environment.tools])


def _warn_of_memory(experiment: Experiment, program: Program) -> None:
    """Print a warning if the planner counts more memory than this machine has."""
    try:
        prove_here(experiment, program)
    except ValueError as error:
        warn(str(error))


def _resumed(
    options: Namespace, name: str, out: Path | None, experiment: Experiment
) -> tuple[Path | None, str | None]:
    """Return the directory of the run to continue, and its plan unless the user names another.

    The plan is taken only for as many ranks as it was made for.
    """
    if is_worker() and out is None and not options.resume:
        return None, options.plan  # Rank 0 looks for the newest run.
    source = "" if find_restarted(out, below=options.started_in) is not None else options.resume
    resumption = find_resumption(name, resume=source, out=out, below=options.started_in)
    plan = resumption.run / "plan.yaml"
    num_ranks = int(os.environ["WORLD_SIZE"]) if is_worker() else options.nproc
    if options.plan is not None or not plan.is_file():
        return resumption.out, options.plan
    saved = ExecutionPlan.load(str(plan))
    _require_calls(experiment, saved, resumption.run)
    return resumption.out, str(plan) if num_ranks in (None, saved.num_ranks) else None
