"""Refusals: why there is no plan, in one sentence that helps."""

import math

from realhf.plan import ExecutionPlan
from realhf.planner.evaluate import Space
from realhf.planner.memory_check import require_fit
from realhf.planner.problem import Problem
from realhf.planner.rates import Rates, wide_bytes
from realhf.planner.search import leanest
from realhf.units import format_bytes


def require_known(problem: Problem, rates: Rates) -> None:
    """Raises ValueError about a dtype that the cluster does not know, or a batch that cannot be cut as a call
    says."""
    for role in problem.roles.values():
        rates.peak(role)
    for call in problem.model_calls:
        work = problem.workloads[call.name]
        if work.minibatches > work.prompts:
            cut = f"cuts a batch of {work.prompts} prompts into {work.minibatches} mini-batches"
            hint = "give at least one prompt to each (minibatches, batch_size)"
            raise ValueError(f"call {call.name} {cut}: {hint}")


def require_candidates(space: Space) -> None:
    """Raises ValueError about the first calls that can be run nowhere, even alone on all devices."""
    problem = space.problem
    for unit in space.units:
        if unit.candidates:
            continue
        calls = [space.calls[i].name for i in unit.calls]
        names = " and ".join(calls)
        for name in calls:
            if (layout := problem.pins.get(name)) is not None:
                has = f"a device has {format_bytes(space.capacity)} available"
                why = f"{has}: pin it to more ranks, or leave the pin out"
                raise ValueError(f"--pin {name}={layout}: call {names} does not fit there, {why}")
        raise ValueError(f"call {names} does not fit in any layout, even alone: {_devices(space)}")


def nothing_fits(space: Space) -> str:
    """The plan that needs least on its fullest rank, and what it lacks there."""
    plan = ExecutionPlan(space.call_plans(leanest(space).tolist()))
    try:
        require_fit(space.problem, plan)
    except ValueError as error:
        return f"no plan fits: {_devices(space)}; in the leanest one {error}"
    return f"no plan that fits was found in the time limit: {_devices(space)}"


def _devices(space: Space) -> str:
    """What there is, against the weights, gradients and optimizers of all roles."""
    problem, total = space.problem, 0.0
    num_devices = problem.cluster.num_devices
    for role in problem.roles.values():
        total += role.spec.numel * role.itemsize
        total += 4 * wide_bytes(role) * role.trained_spec.numel if role.trainable else 0
    has, per_host = format_bytes(space.capacity), problem.cluster.devices_per_host
    there_are = f"the cluster has {num_devices} device{'s' * (num_devices > 1)} with {has} available on each"
    if space.capacity <= 0:
        whole = format_bytes(problem.cluster.device_memory_bytes)
        return f"{there_are} (of {whole}, less what is set aside): is a unit missing in device_memory_bytes?"
    takes = f"parameters, gradients and optimizers of all roles take {format_bytes(total)}"
    need = math.ceil(total / space.capacity)
    if need > num_devices:
        need = need if need <= per_host else math.ceil(need / per_host) * per_host
        return f"{there_are}; {takes}: use at least {need} devices"
    what = "activations and KV cache do not fit beside"
    return f"{there_are}; {takes}, {what}: use more devices, smaller models or shorter sequences"
