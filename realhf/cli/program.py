"""The program of a command: its plan, its ranks, and the memory that it needs. Free of torch."""

import dataclasses
import json
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from realhf.cli.experiment_file import line_of
from realhf.cli.launch import LAUNCHER_PLAN, is_worker
from realhf.cli.plan import TIME_LIMIT, auto_plan, cluster_at_hand, this_machine
from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.errors import UserError, described, user_line
from realhf.execution_plan import ExecutionPlan
from realhf.experiment import Experiment
from realhf.planner.make import PricedPlan, price
from realhf.planner.memory_account import MemoryAccount, MemoryCheck, require_fit
from realhf.planner.problem import Problem
from realhf.planner.profile import Profile
from realhf.planner.profiled_rates import ProfiledRates
from realhf.planner.rates import Rates
from realhf.planner.report import priced_document
from realhf.realloc.links import Links
from realhf.runtime.compile.program import PredictedMemory, Program, compile_evaluation, compile_program

_FEW_RANKS = 8
"""So many processes may well be meant for this machine, even if it has fewer cores."""


def add_plan_argument(parser: ArgumentParser) -> None:
    """Declare --plan, which `compile_experiment` reads."""
    text = "plan file or shipped name, or `auto`; default: calls split over all ranks by dp"
    parser.add_argument("--plan", help=text)


def compile_experiment(
    experiment: Experiment, options: Namespace, num_ranks: int | None = None, *, evaluates: bool = False
) -> tuple[Program, int]:
    """Return the program, which trains or only evaluates, and its number of ranks.

    The number is that of torchrun's workers, else `num_ranks`, else --nproc, else as many as the plan uses.
    Raises UserError if experiment, plan and options do not fit each other.
    """
    if options.nproc is not None and options.nproc < 1:
        raise UserError(f"--nproc is {options.nproc}: it must be at least 1")
    if is_worker():
        num_ranks = int(os.environ["WORLD_SIZE"])
    plan = None
    named = getattr(options, "cluster", None)
    profile = getattr(options, "profile", None)
    cluster = Cluster.load(named) if named is not None else None
    if options.plan == "auto" and not evaluates:
        cluster = cluster_at_hand(nproc=options.nproc, cluster=named, profile=profile)
        plan = _auto_plan(experiment, options, cluster)
        num_ranks = num_ranks or options.nproc or cluster.num_devices
    elif options.plan is not None:
        plan = ExecutionPlan.load(options.plan)
        if num_ranks is not None and plan.num_ranks > num_ranks and not evaluates:
            plan = _smaller_plan(experiment, options, plan, num_ranks)
    num_ranks = num_ranks or options.nproc or (plan.num_ranks if plan else 1)
    make = compile_evaluation if evaluates else compile_program
    try:
        program = make(experiment, plan, world_size=num_ranks)
        if cluster is not None and (origin := named or profile) is not None:
            links = Links.of_cluster(cluster, origin=f"{origin}'s")
            peaks = cluster.peak_flops if len(cluster.kinds) == 1 else {}  # A call's depend on its ranks.
            program = dataclasses.replace(program, links=links, peak_flops=peaks)
        return program, num_ranks
    except ValueError as error:
        about_plan = options.plan is not None and str(error).startswith("calls.")
        raise UserError(f"{f'plan {options.plan}' if about_plan else options.experiment}: {error}") from error
    except (Exception, SystemExit) as error:
        if user_line(error) is None:
            raise
        raise UserError(
            f"experiment {options.experiment}{line_of(error, Path(options.experiment))}: "
            f"{type(error).__name__}: {error}") from error


def _smaller_plan(
    experiment: Experiment, options: Namespace, plan: ExecutionPlan, num_ranks: int
) -> ExecutionPlan:
    """Return a plan for the ranks that are left of a run: a fallback plan, else one made after a restart.

    If there is neither, return `plan`, although it does not fit.
    """
    said = f"realhf: plan {options.plan} needs {plan.num_ranks} ranks, and there are {num_ranks}"
    is_main = os.environ.get("RANK") == "0"
    for name in getattr(options, "fallback_plan", None) or ():
        other = ExecutionPlan.load(name)
        if other.num_ranks <= num_ranks:
            if is_main:
                print(f"{said}: the run uses {name}", file=sys.stderr, flush=True)
            return other
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return plan
    if is_main:
        print(f"{said}: the run has a new plan", file=sys.stderr, flush=True)

    def make() -> ExecutionPlan:
        cluster = cluster_at_hand(nproc=None, cluster=options.cluster, profile=options.profile)
        if len(cluster.kinds) > 1:
            raise UserError(
                f"{said}: cluster {options.cluster} has several kinds of hosts, and which are left is not "
                "known: give the plan for fewer ranks (--fallback-plan)")
        per_host = min(cluster.devices_per_host, num_ranks)
        left = dataclasses.replace(
            cluster, devices_per_host=per_host, num_hosts=max(1, num_ranks // per_host))
        return auto_plan(experiment, options.experiment, cluster=left, profile=options.profile)

    return _made_once(make, options)


def _made_once(make: Callable[[], ExecutionPlan], options: Namespace) -> ExecutionPlan:
    """Return the plan that rank 0 makes, or make it here if there are no other workers."""
    if not is_worker() or os.environ["WORLD_SIZE"] == "1":
        return make()
    from realhf.cli.worker import share_plan

    return share_plan(make, search_seconds=TIME_LIMIT, timeout_seconds=options.timeout)


def _auto_plan(experiment: Experiment, options: Namespace, cluster: Cluster) -> ExecutionPlan:
    """Return the plan of --plan auto: that of our launcher, else the one that rank 0 makes."""
    if is_worker() and (made := os.environ.get(LAUNCHER_PLAN)) is not None:
        return ExecutionPlan.from_dict(json.loads(made))
    profile = getattr(options, "profile", None)
    return _made_once(
        lambda: auto_plan(experiment, options.experiment, cluster=cluster, profile=profile), options)


def prove_here(experiment: Experiment, program: Program) -> tuple[MemoryCheck | None, str]:
    """Return the proof that this machine has the memory for a run; or None, and why there is no proof.

    Raises ValueError if it lacks memory; the message names the call, the rank and the nearest remedy.
    """
    try:
        has = this_machine()
        few = has.num_devices if has.device_type == "cuda" else max(_FEW_RANKS, has.num_devices)
        if program.num_ranks > few:
            devices = f"{program.num_ranks} ranks are more than this machine's {has.num_devices} devices"
            return None, f"{devices}; --cluster names the machines"
        problem = problem_of(experiment, this_machine(program.num_ranks))
    except ValueError as error:
        return None, str(error)
    try:
        return require_fit(problem, program.plan, allow_tight=True), ""
    except ValueError as error:
        raise ValueError(
            f"this machine has too little memory: {error}; --cluster checks for others") from error


def with_predictions(
    experiment: Experiment, program: Program, *, nproc: int | None, cluster: str | None, profile: str | None
) -> Program:
    """Return the program with the memory of its calls on every rank, and on rank 0 with what a step takes.

    The memory is empty if the devices are unknown, of another kind or fewer than the ranks, or if the
    experiment cannot be planned. Then, or if a layout has no price, `predicted` says why.
    """
    try:
        devices = cluster_at_hand(nproc=nproc, cluster=cluster, profile=profile)
        if devices.device_type != this_machine(nproc).device_type:
            raise UserError("the cluster file describes devices of another kind than this run has")
        if devices.num_devices < program.num_ranks:
            raise UserError(f"the run has {program.num_ranks} ranks on {devices.num_devices} devices")
        problem = problem_of(experiment, devices)
        memory = _memory_of(problem, program)
    except (UserError, ValueError) as error:
        return dataclasses.replace(program, predicted={"missing": str(error)})
    predicted: dict[str, Any] = {}
    if os.environ.get("RANK", "0") == "0":
        try:
            rates = Rates(devices) if profile is None else ProfiledRates(Profile.load(profile), devices)
            origin = profile or cluster or "the shipped description of this kind of machine"
            predicted = _step_of(price(problem, rates, program.plan)) | {
                "origin": origin, "is_measured": profile is not None}
        except Exception as error:  # The run needs no prediction.
            predicted = {"missing": described(error)}
    return dataclasses.replace(program, predicted_memory=memory, predicted=predicted)


def _memory_of(problem: Problem, program: Program) -> PredictedMemory:
    memory = MemoryAccount(problem).of_plan(program.plan)
    names = [call.name for call in problem.model_calls]
    ranks_of = {name: program.plan[name].layout.ranks for name in names}
    return {name: {rank: memory.bytes_by_use(rank, name) for rank in ranks_of[name]} for name in names}


def _step_of(priced: PricedPlan) -> dict[str, Any]:
    """Return the predicted step as JSON: the seconds of calls, and what runs when on which ranks."""
    document = priced_document(priced)
    calls = {name: {"seconds": call["seconds"], "limit": call["limit"]}
             for name, call in document["calls"].items() if "seconds" in call}
    activities = [{key: value if isinstance(value, str) else float(value) for key, value in entry.items()}
                  for entry in document["timeline"]["activities"]]
    return {
        "step_seconds": float(document["step_seconds"]), "calls": calls, "activities": activities,
        "idle": [round(float(share), 6) for share in document["timeline"]["idle"]]}
