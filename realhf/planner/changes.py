"""Changes of a planning problem by name: other lengths, another batch, another cluster."""

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from numbers import Real
from typing import Any

from realhf.cluster import Cluster
from realhf.planner.problem import Problem, Workload
from realhf.planner.profiled_rates import ProfiledRates
from realhf.planner.rates import Rates
from realhf.suggest import did_you_mean

WORKLOAD_KEYS = ("prompt_tokens", "response_tokens", "batch_size")
_MEASURED = ("intra_host.", "memory_bandwidth", "peak_flops.")
"""Beginnings of the keys whose effect is part of what a profile has measured."""
_UNITS = ("_bytes_per_second", "_bytes", "_seconds")


def current_values(problem: Problem) -> dict[str, float]:
    """Return the quantities that a change can name, with their values.

    Those of the cluster have the names of its fields without their units, such as `inter_host.bandwidth`.
    """
    work = _any_workload(problem)
    values = {
        "prompt_tokens": work.prompt_tokens, "response_tokens": work.response_tokens,
        "batch_size": work.prompts,
    }  # fmt: skip
    fields = _cluster_fields(problem.cluster)
    return values | {key: _at(asdict(problem.cluster), path) for key, path in fields.items()}


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
    workloads = {name: _changed_workload(work, of_work) for name, work in problem.workloads.items()}
    changed = replace(problem, cluster=cluster, workloads=workloads)
    return changed, rates if cluster == problem.cluster else rates.on(cluster)


def is_measured(rates: Rates, key: str) -> bool:
    """Return whether the effect of a quantity is part of what a profile has measured."""
    return isinstance(rates, ProfiledRates) and key.startswith(_MEASURED)


def _any_workload(problem: Problem) -> Workload:
    """Return the workload of a call on a model; all such calls work on the same sequences."""
    return problem.workloads[problem.model_calls[0].name]


def _changed_workload(work: Workload, values: Mapping[str, float]) -> Workload:
    prompt = values.get("prompt_tokens", work.prompt_tokens) / (work.prompt_tokens or 1.0)
    response = values.get("response_tokens", work.response_tokens) / (work.response_tokens or 1.0)
    samples = work.num_samples
    if "batch_size" in values:
        samples = int(values["batch_size"]) * work.samples_per_prompt
    changes: dict[str, Any] = {
        "prompt_tokens": work.prompt_tokens * prompt, "response_tokens": work.response_tokens * response,
        "longest_prompt_tokens": work.longest_prompt_tokens * prompt,
        "max_new_tokens": round(work.max_new_tokens * response),
    }  # fmt: skip
    if work.prompt_lengths is not None:
        prompts = work.prompt_lengths.scaled(prompt)
        changes |= {"prompt_lengths": prompts, "prompt_tokens": prompts.mean}
    if work.response_lengths is not None:
        responses = work.response_lengths.scaled(response)
        changes |= {
            "response_lengths": responses, "response_tokens": responses.mean,
            "max_new_tokens": responses.limit}
    return replace(work, num_samples=samples, **changes)


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


def _cluster_fields(cluster: Cluster) -> dict[str, tuple[str, ...]]:
    """Return the name of every number that describes a cluster, with its place in the document."""
    paths: list[tuple[str, ...]] = []
    for name, value in asdict(cluster).items():
        parts = value if isinstance(value, Mapping) else {}
        paths += [(name, part) for part, number in parts.items() if isinstance(number, Real)]
        if isinstance(value, Real) and not isinstance(value, bool):
            paths.append((name,))
    return {_without_unit(".".join(path)): path for path in paths}


def _without_unit(name: str) -> str:
    return next((name.removesuffix(unit) for unit in _UNITS if name.endswith(unit)), name)


def _at(document: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    for name in path:
        document = document[name]
    return document


def _changed_cluster(cluster: Cluster, values: Mapping[str, float | str]) -> Cluster:
    if not values:
        return cluster
    document = asdict(cluster)
    for key, value in values.items():
        *parents, name = _cluster_fields(cluster)[key]
        number = int(value) if isinstance(value, str) and value.isdecimal() else value
        _at(document, tuple(parents))[name] = number
    return Cluster.from_dict(document)
