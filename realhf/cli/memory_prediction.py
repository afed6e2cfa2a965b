"""Predicts the memory of a run's calls, which the run records beside what it measures; and proves that it is
there. Free of torch."""

from realhf.cli.plan import cluster_at_hand, this_machine
from realhf.cli.planning_problem import problem_of
from realhf.errors import UserError
from realhf.experiment import Experiment
from realhf.planner.memory_account import MemoryAccount, MemoryCheck, require_fit
from realhf.runtime.compile.program import PredictedMemory, Program

_FEW_RANKS = 8
"""So many processes may well be meant for this machine, even if it has fewer cores."""


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


def predict_memory(
    experiment: Experiment, program: Program, *, nproc: int | None, cluster: str | None, profile: str | None
) -> PredictedMemory:
    """Return the memory of the calls of a step on every rank.

    It is empty if the devices are unknown, of another kind or fewer than the ranks, or if the experiment
    cannot be planned.
    """
    try:
        devices = cluster_at_hand(nproc=nproc, cluster=cluster, profile=profile)
        is_here = devices.device_type == this_machine(nproc).device_type
        if not is_here or devices.num_devices < program.num_ranks:
            return {}
        problem = problem_of(experiment, devices)
        memory = MemoryAccount(problem).of_plan(program.plan)
    except (UserError, ValueError):
        return {}
    names = [call.name for call in problem.model_calls]
    ranks_of = {name: program.plan[name].layout.ranks for name in names}
    return {name: {rank: memory.bytes_by_use(rank, name) for rank in ranks_of[name]} for name in names}
