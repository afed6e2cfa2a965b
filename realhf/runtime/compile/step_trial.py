"""Tries a step program without data or models, as `realhf check` and every run do first. Free of torch."""

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import networkx as nx

from realhf.calls import HostFunction
from realhf.errors import UserError
from realhf.experiment import Experiment
from realhf.graph import DataflowGraph
from realhf.signals import time_limit

_MAX_OPERATIONS = 10_000
"""Most operations of a step; a program with more is taken to loop for ever."""
_MAX_SECONDS = 20.0
"""Longest trial of a step, which only counts."""


def checked_parts(experiment: Experiment, graph: DataflowGraph) -> Mapping[str, Sequence[str]]:
    """Return the experiment's parts.

    Raises ValueError unless each call is in exactly one, and the parts can run one after the other.
    """
    parts = experiment.parts(graph)
    if not isinstance(parts, Mapping) or any(isinstance(names, str) for names in parts.values()):
        raise ValueError("parts() must return a dict: part name -> a list of the names of its calls")
    listed = [name for names in parts.values() for name in names]
    names = [call.name for call in graph.calls]
    if unknown := [name for name in listed if name not in names]:
        raise ValueError(f"parts() lists the call {unknown[0]!r}: there are {', '.join(names)}")
    for name in names:
        if name not in listed:
            raise ValueError(f"parts() leaves out the call {name!r}: each belongs to one part")
        if (count := listed.count(name)) > 1:
            raise ValueError(f"parts() lists the call {name!r} {count} times: each belongs to one part")
    part_of = {name: part for part, members in parts.items() for name in members}
    edges = {(part_of[a], part_of[b]) for a, b in graph.nx_graph.edges}
    between = nx.DiGraph(edge for edge in edges if edge[0] != edge[1])
    if not nx.is_directed_acyclic_graph(between):
        cycle = [edge[0] for edge in nx.find_cycle(between)]
        raise ValueError(f"parts() has parts that need one another: {' -> '.join([*cycle, cycle[0]])}")
    generating = [call.name for call in graph.of_kind("generate")]
    if experiment.num_rounds > 1 and len(generating) > 1:
        raise ValueError(
            f"rounds is {experiment.num_rounds}: more than one need a single generating call, "
            f"and there are {' and '.join(generating)}")
    for name in generating if experiment.num_rounds > 1 else ():
        if near := [reader for reader in graph.nx_graph.successors(name) if part_of[reader] == part_of[name]]:
            raise ValueError(
                f"rounds is {experiment.num_rounds}: call {near[0]!r} would get unfinished samples of "
                f"{name!r}, so parts() must put it elsewhere")
    return parts


def try_step_program(experiment: Experiment, graph: DataflowGraph) -> list[str]:
    """Run a few steps of the step program without data, up to the end of a short run; return its operations.

    It runs twice: filters let all pass the first time, and nothing the second time. `agree` returns the
    examples of HostFunctions. Raises ValueError if the program fails, or never ends.
    """
    _check_signature(experiment)
    fields = vars(experiment).copy()
    operations: list[str] = []
    steps = min(experiment.steps, experiment.max_lag + 3)
    for passes in (True, False):
        executor = _DryExecutor(graph, passes=passes)
        runner = experiment.step_runner(graph, executor, steps=steps)
        for _ in range(steps + experiment.max_lag):
            executor.num_left = _MAX_OPERATIONS
            with time_limit(_MAX_SECONDS, _endless), runner.one_step():
                experiment.step(runner)
        operations = operations or executor.operations
    for name, value in vars(experiment).items():
        if value is not fields.get(name):
            raise UserError(
                f"step() changes {name} of the experiment, which no checkpoint holds: "
                f"keep it in run.state[{name!r}]")
    return operations


@dataclass(frozen=True)
class PartCount:
    """The number of runs of a part on new prompts in a whole run, and of these prompts."""

    runs: int
    fewest_prompts: int
    most_prompts: int
    is_exact: bool = True
    """False if the program is too long to be tried to its end, so that the rest is as its last steps are."""
    state: Mapping[str, Any] = field(default_factory=dict)  # `run.state` when the part first runs.


def count_parts(experiment: Experiment, graph: DataflowGraph) -> dict[str, PartCount]:
    """Return the counts of each part, if filters let all samples pass, and if `agree` returns examples.

    Raises ValueError if the step program fails.
    """
    steps = experiment.steps + experiment.max_lag
    if not experiment.has_own_program:
        size = experiment.batch_size
        return {part: PartCount(experiment.steps, size, size) for part in experiment.parts(graph)}
    _check_signature(experiment)
    checked_parts(experiment, graph)
    executor = _DryExecutor(graph, passes=True)
    runner = experiment.step_runner(graph, executor)
    left = _MAX_COUNTED
    tried: list[Mapping[str, Sequence[int]]] = []
    """The numbers of prompts of each part's runs, step by step."""
    while len(tried) < steps and left > 0:
        executor.num_left = _MAX_OPERATIONS
        executor.sizes.clear()
        with time_limit(_MAX_SECONDS, _endless), runner.one_step():
            experiment.step(runner)
        left -= _MAX_OPERATIONS - executor.num_left
        tried.append({part: tuple(sizes) for part, sizes in executor.sizes.items()})
    rest = steps - len(tried)
    last = tried[-max(1, len(tried) // 4) :]
    counts = {}
    for part in experiment.parts(graph):
        sizes = [size for of_step in tried for size in of_step.get(part, ())]
        more = sum(len(of_step.get(part, ())) for of_step in last) * rest / len(last)
        counts[part] = PartCount(
            len(sizes) + round(more), min(sizes, default=0), max(sizes, default=0), is_exact=not rest,
            state=executor.states.get(part, {}))
    return counts


_MAX_COUNTED = 20_000
"""Operations after which the rest of a step program is no longer tried, but counted like its last steps."""


def growing_pools(experiment: Experiment, graph: DataflowGraph) -> Iterator[str]:
    """Yield a sentence for each pool that gets more samples in every step than are taken out of it.

    Pools behind filters are left out, as less would come through, and so are pools that keep their samples.
    """
    steps = _STEPS_OF_POOLS + experiment.max_lag
    executor = _DryExecutor(graph, passes=True)
    runner = experiment.step_runner(graph, executor, steps=steps)
    sizes: dict[str, list[int]] = {}
    for _ in range(steps):
        executor.num_left = _MAX_OPERATIONS
        before = len(executor.operations)
        with time_limit(_MAX_SECONDS, _endless), runner.one_step():
            experiment.step(runner)
        given = [text for text in executor.operations[before:] if " gives " in text and "(none)" not in text]
        for name, size in runner.pool_sizes().items():
            is_used = any(text.startswith(f"pool {name} gives ") for text in given)
            sizes.setdefault(name, []).append(size if is_used else 0)
    for name, counts in sizes.items():
        last = counts[-_STEPS_OF_POOLS // 2 :]
        growth = [b - a for a, b in pairwise(last)]
        is_steady = min(last) > 0 and len(set(growth)) == 1 and growth[0] > 0
        if is_steady and not executor.has_filtered:
            yield (
                f"step() puts {growth[0]} prompts more into pool {name!r} in each step than it takes out: "
                "the pool grows for ever, and its samples get older; take as many as are added, or drop old "
                "ones with pool.drop(max_age=...)")


_STEPS_OF_POOLS = 8
"""Steps after which a pool that still grows, in each step by the same number, is taken to grow for ever."""


def _check_signature(experiment: Experiment) -> None:
    try:
        inspect.signature(experiment.step).bind(None)
    except TypeError as error:
        raise ValueError(f"step() must take one argument, the step runner ({error})") from error


def _endless() -> UserError:
    return UserError(f"step() has not ended after {_MAX_SECONDS:g} s in a trial: does it loop for ever?")


class _DryExecutor:
    """A PartExecutor that executes nothing."""

    def __init__(self, graph: DataflowGraph, *, passes: bool) -> None:
        self.operations: list[str] = []
        self.sizes: dict[str, list[int]] = {}
        """Part -> the number of prompts of each of its runs that has new ones."""
        self.states: dict[str, Mapping[str, Any]] = {}
        """Part -> the state of the step program when it first ran."""
        self.num_left = 0
        self.has_filtered = False
        self._graph = graph
        self._passes = passes
        self._prompts: dict[int, Sequence[int]] = {}

    def run(
        self, part: str, prompts: Sequence[int], *, operation: int, sent: Collection[str | None],
        updates: Mapping[str, int], state: Mapping[str, Any],
    ) -> None:
        self._prompts[operation] = prompts
        if prompts:
            self.sizes.setdefault(part, []).append(len(prompts))
            if part not in self.states:
                self.states[part] = deepcopy(dict(state))

    def send(self, part: str, prompts: Sequence[int], producers: Collection[str | None]) -> None:
        """Send nothing, as there are no samples."""

    def passed(self, call: str, operation: int) -> list[int]:
        self.has_filtered = True
        return list(self._prompts[operation]) if self._passes else []

    def decision(self, call: str, operation: int) -> Any:
        return self._graph[call].work_as(HostFunction).example

    def forget(self, prompts: Sequence[int]) -> None:
        """Free nothing, as there are no samples."""

    def note(self, number: int, text: str, digest: str) -> None:
        self.operations.append(text)
        self.num_left -= 1
        if self.num_left < 0:
            raise UserError(f"step() has not ended after {_MAX_OPERATIONS} operations, the last: {text}")

    def log(self, metric: str, value: float) -> None:
        """Drop the metric, as a trial has no record."""
