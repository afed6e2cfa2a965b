"""Changes of a planning problem by name: other lengths, another batch, another cluster."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from numbers import Real
from typing import Any

from realhf.cluster import Cluster
from realhf.planner.cost.profiled_rates import ProfiledRates
from realhf.planner.cost.rates import Rates
from realhf.planner.workload.problem import Problem, Workload
from realhf.user_input.suggest import did_you_mean

WORKLOAD_KEYS = ("prompt_tokens", "response_tokens", "batch_size")
_MEASURED = ("intra_host.", "memory_bandwidth", "peak_flops.")
"""Beginnings of the keys whose effect is part of what a profile has measured."""
_UNITS = ("_bytes_per_second", "_bytes", "_seconds")


def current_values(problem: Problem) -> dict[str, float]:
    """Return the quantities that a change can name, with their values.

    Those of the cluster have the names of its fields without their units, such as `inter_host.bandwidth`, or
    `hosts.0.inter_host.bandwidth` where there are several kinds of hosts.
    """
    work = _any_workload(problem)
    values = {
        "prompt_tokens": work.prompt_tokens, "response_tokens": work.response_tokens,
        "batch_size": work.prompts}
    fields = _cluster_fields(problem.cluster)
    document = problem.cluster.to_dict()
    return values | {key: _at(document, path) for key, path in fields.items()}


def change(problem: Problem, rates: Rates, values: Mapping[str, float | str]) -> tuple[Problem, Rates]:
    """Return the problem with other values of some quantities, and the rates of its cluster.

    Values may have units (`200 Gbit/s`). Lengths are scaled with their limits, so that their distribution
    keeps its shape. Raises ValueError about a value or a key that is not legal; the message names it.
    """
    legal = current_values(problem)
    for key in values:
        if key not in legal:
            raise ValueError(f"unknown {key!r}{did_you_mean(key, [*legal])}: legal are {', '.join(legal)}")
        if is_measured(rates, key):
            why = "the profile has measured times, which do not say how they depend on it"
            raise ValueError(f"{key}: {why}; leave --profile out")
    cluster = _changed_cluster(problem.cluster, {k: v for k, v in values.items() if k not in WORKLOAD_KEYS})
    of_work = {key: _amount(key, value) for key, value in values.items() if key in WORKLOAD_KEYS}
    old = _any_workload(problem)
    prompt = of_work.get("prompt_tokens", old.prompt_tokens) / (old.prompt_tokens or 1.0)
    response = of_work.get("response_tokens", old.response_tokens) / (old.response_tokens or 1.0)
    workloads = {
        name: _scaled(work, prompt=prompt, response=response) for name, work in problem.workloads.items()}
    if "batch_size" in of_work:
        prompts = int(of_work["batch_size"])
        workloads = {
            name: replace(work, num_samples=prompts * work.samples_per_prompt)
            for name, work in workloads.items()}
    evaluations = tuple(
        planned._replace(workload=_scaled(planned.workload, prompt=prompt, response=response))
        for planned in problem.evaluations)
    changed = replace(problem, cluster=cluster, workloads=workloads, evaluations=evaluations)
    return changed, rates if cluster == problem.cluster else rates.on(cluster)


def is_measured(rates: Rates, key: str) -> bool:
    """Return whether the effect of a quantity is part of what a profile has measured."""
    return isinstance(rates, ProfiledRates) and key.startswith(_MEASURED)


def _any_workload(problem: Problem) -> Workload:
    """Return the workload of a call on a model; all such calls work on the same sequences."""
    return problem.workloads[problem.model_calls[0].name]


def _scaled(work: Workload, *, prompt: float, response: float) -> Workload:
    """Return a workload whose prompts and responses, and their limits, are multiplied by these factors."""
    prompts = None if work.prompt_lengths is None else work.prompt_lengths.scaled(prompt)
    responses = None if work.response_lengths is None else work.response_lengths.scaled(response)
    return replace(
        work, prompt_lengths=prompts, response_lengths=responses,
        prompt_tokens=work.prompt_tokens * prompt if prompts is None else prompts.mean,
        longest_prompt_tokens=work.longest_prompt_tokens * prompt,
        response_tokens=work.response_tokens * response if responses is None else responses.mean,
        max_new_tokens=round(work.max_new_tokens * response) if responses is None else responses.limit)


def _amount(key: str, value: float | str) -> float:
    try:
        amount = float(value)
    except ValueError:
        amount = math.nan
    if not 1 <= amount < math.inf:
        raise ValueError(f"{key} is {value!r}: it must be a number of at least 1")
    if key == "batch_size" and amount != int(amount):
        raise ValueError(f"{key} is {value!r}: it must be a whole number")
    return amount


_Path = tuple[str | int, ...]


def _cluster_fields(cluster: Cluster) -> dict[str, _Path]:
    """Return the name of every number that describes a cluster, with its place in the document."""
    paths = _number_paths(cluster.to_dict())
    return {_without_unit(".".join(map(str, path))): path for path in paths}


def _number_paths(value: Any) -> Iterator[_Path]:
    """Yield the place of every number of a document."""
    if isinstance(value, Real) and not isinstance(value, bool):
        yield ()
    entries: Any = value.items() if isinstance(value, Mapping) else ()
    for name, entry in enumerate(value) if isinstance(value, list) else entries:
        yield from ((name, *path) for path in _number_paths(entry))


def _without_unit(name: str) -> str:
    return next((name.removesuffix(unit) for unit in _UNITS if name.endswith(unit)), name)


def _at(document: Any, path: _Path) -> Any:
    for name in path:
        document = document[name]
    return document


def _changed_cluster(cluster: Cluster, values: Mapping[str, float | str]) -> Cluster:
    if not values:
        return cluster
    document = cluster.to_dict()
    for key, value in values.items():
        *parents, name = _cluster_fields(cluster)[key]
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        _at(document, tuple(parents))[name] = number
    return Cluster.from_dict(document)
