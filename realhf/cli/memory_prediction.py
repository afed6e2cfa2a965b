"""Predicts the memory of a run's calls, which the run records beside what it measures. Free of torch."""

from realhf.cli.plan import cluster_at_hand, this_machine
from realhf.cli.planning_problem import problem_of
from realhf.errors import UserError
from realhf.experiment import Experiment
from realhf.planner.memory.memory_account import MemoryAccount
from realhf.runtime.compile.program import PredictedMemory, Program


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
