"""Why a call has its layout: what limits it, what the runner-up costs, and what would make that one better.

The runner-up of a call group is its best other layout while all other groups keep theirs. Where its step is
longer, three things may have changed: the seconds of the group's calls, reallocations, and which calls share
ranks and so wait for each other. Each gets its share of the difference, averaged over the orders in which
the three can change (Shapley 1953), so that the shares add up to it. Both plans are then priced in problems
with other lengths and links, to find where the runner-up becomes the better one.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np

from realhf.cluster import Cluster
from realhf.execution_plan import ExecutionPlan
from realhf.layout import Layout
from realhf.planner.call_group import Candidate
from realhf.planner.candidates import Variant
from realhf.planner.deadline import OutOfTime
from realhf.planner.memory_account import MemoryAccount
from realhf.planner.problem import Problem, Workload
from realhf.planner.profiled_rates import ProfiledRates
from realhf.planner.rates import Rates
from realhf.planner.search_space import SearchSpace
from realhf.planner.step_time import cost_of, dependencies, have_common_ranks, moving_seconds, step_periods
from realhf.user_input.suggest import did_you_mean
from realhf.user_input.units import format_bytes, format_seconds

_SAME = 1e-3  # Relative difference below which two steps count as equally long.
_PROMISING = 16  # The most plans of a group that are evaluated with reallocations.
_CAUSES = ("calls", "reallocation", "waiting")
WIDEST = 4.0  # Changes are tried from this fraction of a quantity to this multiple.
_FACTORS = (math.sqrt(WIDEST), WIDEST)
_BISECTIONS = 5
WORKLOAD_KEYS = ("prompt_tokens", "response_tokens", "batch_size")
_MEASURED = ("intra_host.", "memory_bandwidth", "peak_flops.")
"""Beginnings of the keys whose effect is part of what a profile has measured."""
_UNITS = ("_bytes_per_second", "_bytes", "_seconds")
_Path = tuple[str | int, ...]


# Reasons


@dataclass(frozen=True)
class TippingPoint:
    """The least change of one quantity with which the runner-up is the better plan, as far as tried."""

    key: str
    value: float
    factor: float

    def __str__(self) -> str:
        side = "at most" if self.factor < 1 else "at least"
        return f"{self.key} {side} {format_value(self.key, self.value)} (x {self.factor:.2g})"


@dataclass(frozen=True)
class RunnerUp:
    """The best other layout of a call group, and the seconds that each cause adds to the step with it."""

    layout: Layout
    step_seconds: float
    longer: float
    causes: Mapping[str, float]
    because: str
    tipping_points: tuple[TippingPoint, ...]
    tried: tuple[str, ...]

    @property
    def text(self) -> str:
        if self.longer < _SAME:
            return f"{self.layout} would do as well, with more device time"
        return f"{self.layout} would make the step {self.longer:.1%} longer ({self.because})"

    @property
    def outlook(self) -> str | None:
        """Return what would have to change for this layout to be better; None if nothing was tried."""
        if self.tipping_points:
            return f"it would be better with {', or with '.join(map(str, self.tipping_points))}"
        if not self.tried:
            return None
        *names, last = self.tried
        tried = f"{', '.join(names)} or {last}" if names else last
        return f"it would be no better with {tried} from x 1/{WIDEST:g} to x {WIDEST:g}"


@dataclass(frozen=True)
class TooLarge:
    """A layout with which the step would be shorter, if devices had more memory."""

    layout: Layout
    options: str
    shorter: float
    lacking_bytes: float
    device_memory_bytes: float | None
    """That of all devices, if they are of one kind."""

    @property
    def text(self) -> str:
        with_more = f"with {format_bytes(self.lacking_bytes)} more per device"
        if self.device_memory_bytes is not None:
            with_more += f" (device_memory {format_bytes(self.device_memory_bytes)})"
        shorter = f"would make the step {self.shorter:.1%} shorter"
        return f"{self.layout}{self.options} {shorter} {with_more}"


@dataclass(frozen=True)
class Reason:
    """Why a call has its layout. `share` is the part of its seconds that `limit` takes."""

    limit: str
    share: float
    status: str | None
    runner_up: RunnerUp | None = None
    too_large: TooLarge | None = None

    @property
    def lines(self) -> list[str]:
        """Return the sentences for people, at most three."""
        parts = [f"{self.share:.0%} {self.limit}", self.status]
        others = []
        if self.runner_up is not None:
            parts.append(self.runner_up.text)
            others.append(self.runner_up.outlook)
        if self.too_large is not None:
            others.append(self.too_large.text)
        return ["; ".join(filter(None, parts)), *filter(None, others)]

    def document(self) -> dict[str, Any]:
        """Return the reason as JSON."""

        def plain(value: RunnerUp | TooLarge | None) -> dict[str, Any] | None:
            return None if value is None else asdict(value) | {"layout": str(value.layout)}

        return {
            "limit": self.limit, "share": self.share, "status": self.status,
            "runner_up": plain(self.runner_up), "too_large": plain(self.too_large)}


def find_reasons(space: SearchSpace, chosen: np.ndarray) -> dict[str, Reason]:
    """Return for each call on a model why it has its layout in a plan (one candidate per call group).

    When the space's deadline passes, other layouts are no longer looked for.
    """
    with space.deadline.lifted():
        step_seconds = float(space.exact_periods(chosen[None])[0])
    sensitivity = Sensitivity(space)
    settled = space.settled(chosen.tolist())
    reasons = {}
    for group_index, group in enumerate(space.groups):
        others: tuple[str | None, RunnerUp | None, TooLarge | None]
        try:
            alternatives = _Alternatives(sensitivity, space, chosen, step_seconds, group_index)
            others = (alternatives.status, alternatives.runner_up, alternatives.too_large)
        except OutOfTime:
            others = ("the time limit left no time to look for the best other layout", None, None)
        for i in group.calls:
            cost = settled[i].cost
            share = cost.seconds_by_cause[cost.limit] / cost.seconds if cost.seconds else 1.0
            reasons[space.calls[i].name] = Reason(cost.limit, share, *others)
    return reasons


class _Alternatives:
    """The plans in which one call group has another layout, with and without enough memory."""

    def __init__(
        self, sensitivity: "Sensitivity", space: SearchSpace, chosen: np.ndarray, step_seconds: float,
        group_index: int,
    ) -> None:
        self._space = space
        self._sensitivity = sensitivity
        self._chosen = chosen
        self._step_seconds = step_seconds
        self._group_index = group_index
        candidates = space.groups[group_index].candidates
        layout = candidates[chosen[group_index]].layout
        others = np.array([i for i, c in enumerate(candidates) if c.layout != layout], dtype=int)
        plans = np.repeat(chosen[None], len(others), axis=0)
        plans[:, group_index] = others
        bounds = space.periods(plans, exact=False) if len(others) else np.zeros(0)
        order = np.argsort(bounds, kind="stable")
        self._plans, self._bounds = plans[order], bounds[order]

    @property
    def status(self) -> str | None:
        """Return in words why there is no runner-up; None if there is one."""
        names = [self._space.calls[i].name for i in self._space.groups[self._group_index].calls]
        if any(name in self._space.problem.pins for name in names):
            return "pinned"
        if self.runner_up is not None:
            return None
        return "no other layout fits beside the rest of this plan" if len(self._plans) else "the only layout"

    @cached_property
    def runner_up(self) -> RunnerUp | None:
        if (best := self._best(fits=True)) is None:
            return None
        plan, seconds = best
        longer = seconds / self._step_seconds - 1
        causes = explain_difference(self._space, self._chosen, plan)
        is_longer = longer >= _SAME
        tried = self._sensitivity.keys if is_longer else ()
        points = self._sensitivity.tipping_points(self._chosen, plan) if is_longer else ()
        possible = [name for name in _CAUSES if name != "reallocation" or self._space.needs.weights]
        because = self._because(plan, max(possible, key=lambda name: causes[name]))
        return RunnerUp(self._layout(plan), seconds, longer, causes, because, points, tried)

    @cached_property
    def too_large(self) -> TooLarge | None:
        """The fastest layout that lacks memory, if the step would be shorter with it."""
        best = self._best(fits=False, limit=self._step_seconds * (1 - _SAME))
        if best is None:
            return None
        plan, seconds = best
        account = MemoryAccount(self._space.problem, self._space.deadline)
        counted = account.of_plan(ExecutionPlan(self._space.call_plans(plan.tolist())))
        lacking = counted.excess(account.available)
        if lacking <= 0:  # A host lacks memory.
            return None
        needed = _device_memory(self._space, plan)
        changed = _changed_options(*(self._candidate(p).variants for p in (self._chosen, plan)))
        return TooLarge(self._layout(plan), changed, 1 - seconds / self._step_seconds, lacking, needed)

    def _best(self, *, fits: bool, limit: float = math.inf) -> tuple[np.ndarray, float] | None:
        """Return the best plan that fits, or does not, with its seconds per step if they are below the limit.

        Memory is counted only where the lower bound of the step leaves it a chance.
        """
        best, num_left = None, _PROMISING
        for plan, bound in zip(self._plans, self._bounds, strict=True):
            if bound >= limit or not num_left:
                break
            if (self._space.memory.excess(plan[None])[0] <= 0) == fits:
                num_left -= 1
                seconds = float(self._space.exact_periods(plan[None])[0])
                if seconds < limit:
                    best, limit = (plan, seconds), seconds
        return best

    def _candidate(self, plan: np.ndarray) -> Candidate:
        return self._space.groups[self._group_index].candidates[plan[self._group_index]]

    def _layout(self, plan: np.ndarray) -> Layout:
        return self._candidate(plan).layout.as_layout

    def _because(self, plan: np.ndarray, cause: str) -> str:
        """Return the sentence about the largest cause of the difference between two plans."""
        space = self._space
        both = np.stack([self._chosen, plan])
        seconds, first, stop = space.exact_times(both)
        own = space.groups[self._group_index].calls
        if cause == "calls":
            before, after = (format_seconds(float(row[own].sum())) for row in seconds)
            subject = "its calls take" if len(own) > 1 else "it takes"
            return f"{subject} {after} instead of {before}"
        if cause == "reallocation":
            moving = space.moving(both)
            column = int(np.argmax(moving[1] - moving[0]))
            copy = space.needs.weights[column]
            before, after = (format_seconds(float(value)) for value in moving[:, column])
            what = f"reallocation of {copy.role} for {space.calls[copy.user].name}"
            return f"{what} takes {after} instead of {before}"
        shares = have_common_ranks(first, stop)
        new = (shares[1] & ~shares[0])[own].any(axis=0)
        new[own] = False
        names = [space.calls[i].name for i in np.flatnonzero(new)]
        others = " and ".join(names) or "other calls"
        return f"it would take turns with {others}"


def explain_difference(space: SearchSpace, before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Return the seconds per step that calls, reallocations and waiting add from one plan to another."""
    both = np.stack([before, after])
    seconds, first, stop = space.exact_times(both)
    moving = space.moving(both)
    mixes = list(itertools.product((0, 1), repeat=len(_CAUSES)))
    a, b, c = (np.array(column) for column in zip(*mixes, strict=True))
    of_mixes = step_periods(
        space.problem.cluster, space.needs, seconds[a], first[c], stop[c], moving=moving[b])
    of_mix = dict(zip(mixes, of_mixes.tolist(), strict=True))
    causes = dict.fromkeys(_CAUSES, 0.0)
    orders = list(itertools.permutations(range(len(_CAUSES))))
    for order in orders:
        mix = [0] * len(_CAUSES)
        for cause in order:
            earlier = of_mix[tuple(mix)]
            mix[cause] = 1
            causes[_CAUSES[cause]] += (of_mix[tuple(mix)] - earlier) / len(orders)
    return causes


def _changed_options(before: Sequence[Variant], after: Sequence[Variant]) -> str:
    """Return the options that are switched on or off, as words that follow a layout."""
    old, new = ({name for v in variants for name in v.call_plan.options} for variants in (before, after))
    words = [f" with {name}" for name in sorted(new - old)]
    return "".join(words + [f" without {name}" for name in sorted(old - new)])


def _device_memory(space: SearchSpace, plan: np.ndarray) -> float | None:
    """Return the least memory of a device with which a plan fits, to three digits; None if devices are of
    several kinds.

    The need of a plan may grow with the memory, as a cache leaves a share of it free.
    """
    layouts = ExecutionPlan(space.call_plans(plan.tolist()))
    problem = space.problem
    if len(problem.cluster.kinds) > 1:
        return None

    def fits(memory: float) -> bool:
        cluster = replace(problem.cluster, device_memory_bytes=memory)
        account = MemoryAccount(replace(problem, cluster=cluster), space.deadline)
        return account.of_plan(layouts).excess(account.available) <= 0

    low = problem.cluster.device_memory_bytes
    high = 2 * low
    while not fits(high):
        high *= 2
    while high / low > 1 + 1e-3:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


# Plans in changed problems


class Sensitivity:
    """Seconds per step of given plans if one quantity is multiplied by a factor; options stay as they are."""

    def __init__(self, space: SearchSpace) -> None:
        self._space = space
        self._values = current_values(space.problem)
        self._changed: dict[tuple[str, float], _ChangedSpace] = {}

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The quantities that are tried: lengths, and the bandwidths of the links that there are."""
        cluster = self._space.problem.cluster
        keys = ["response_tokens"]
        links = ["intra_host.bandwidth"] * (cluster.devices_per_host > 1)
        links += ["inter_host.bandwidth"] * (cluster.num_hosts > 1)
        keys += [key for link in links for key in self._values if key.endswith(link)]
        return tuple(k for k in keys if self._values[k] and not is_measured(self._space.rates, k))

    def seconds(self, plan: np.ndarray, key: str, factor: float) -> float:
        """Return the seconds per step of a plan under one change."""
        if (key, factor) not in self._changed:
            values = {key: self._values[key] * factor}
            changed = change(self._space.problem, self._space.rates, values)
            self._changed[key, factor] = _ChangedSpace(self._space, *changed)
        return self._changed[key, factor].step_seconds(plan)

    def tipping_points(self, plan: np.ndarray, other: np.ndarray) -> tuple[TippingPoint, ...]:
        """Return, for each quantity, the least change tried with which the other plan has the shorter step.

        The nearest change comes first. Between two factors of which only the further one makes the other
        plan better, the point is found by bisection.
        """
        points = []
        for key in self.keys:
            both_ways = (self._tipping_factor(plan, other, key, way) for way in (-1, 1))
            factors = [factor for factor in both_ways if factor is not None]
            if factors:
                factor = min(factors, key=lambda factor: abs(math.log(factor)))
                points.append(TippingPoint(key, self._values[key] * factor, factor))
        return tuple(sorted(points, key=lambda point: abs(math.log(point.factor))))

    def _tipping_factor(self, plan: np.ndarray, other: np.ndarray, key: str, way: int) -> float | None:
        """Return the factor, below (way -1) or above 1, from which on the other plan is better, if any."""
        stays = 1.0
        for factor in (f**way for f in _FACTORS):
            if key in WORKLOAD_KEYS and self._values[key] * factor < 1:
                return None  # A sequence has at least a token.
            if self._is_better(other, plan, key, factor):
                break
            stays = factor
        else:
            return None
        for _ in range(_BISECTIONS):
            middle = math.sqrt(stays * factor)
            is_better = self._is_better(other, plan, key, middle)
            stays, factor = (stays, middle) if is_better else (middle, factor)
        return factor

    def _is_better(self, plan: np.ndarray, other: np.ndarray, key: str, factor: float) -> bool:
        return self.seconds(plan, key, factor) < self.seconds(other, key, factor)


class _ChangedSpace:
    """The times of a space's plans in a changed problem; costs and reallocations are remembered."""

    def __init__(self, space: SearchSpace, problem: Problem, rates: Rates) -> None:
        self._space = space
        self._problem = problem
        self._rates = rates
        self._needs = dependencies(problem, rates)
        self._seconds: dict[tuple[object, ...], float] = {}
        self._moving: dict[tuple[int, ...], np.ndarray] = {}

    def step_seconds(self, plan: np.ndarray) -> float:
        space = self._space
        space.deadline.check()
        seconds, first, stop = space.call_times(plan[None])
        settled = space.settled(plan.tolist())
        for group, index in zip(space.groups, plan.tolist(), strict=True):
            candidate = group.candidates[index]
            for i in group.calls:
                call_plan = settled[i].call_plan
                key = (i, index, call_plan.max_rows, call_plan.kv_cache_gib)
                if key not in self._seconds:
                    self._seconds[key] = cost_of(
                        self._problem, self._rates, space.calls[i], call_plan, candidate.layout.ranks).seconds
                seconds[0, i] = self._seconds[key]
        return float(step_periods(
            self._problem.cluster, self._needs, seconds, first, stop, moving=self._arrivals(plan))[0])

    def _arrivals(self, plan: np.ndarray) -> np.ndarray:
        """Return the seconds until copies of weights are complete, which only another cluster changes."""
        space = self._space
        if self._problem.cluster == space.problem.cluster:
            return space.moving(plan[None])
        if (key := tuple(plan.tolist())) not in self._moving:
            layouts = {i: group.candidates[index].layout
                       for group, index in zip(space.groups, plan, strict=True) for i in group.calls}
            self._moving[key] = moving_seconds(self._rates, self._problem, self._needs, layouts)
        return self._moving[key]


def format_value(key: str, value: float) -> str:
    """Return a quantity with its unit."""
    if key.endswith("bandwidth"):
        return f"{format_bytes(value)}/s"
    return format_bytes(value) if key.endswith("memory") else f"{value:,.0f}"


# Changes of a problem by name


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
        turns=None if work.turns is None else work.turns.scaled(response),
        prompt_tokens=work.prompt_tokens * prompt if prompts is None else prompts.mean,
        longest_prompt_tokens=work.longest_prompt_tokens * prompt,
        common_prompt_tokens=work.common_prompt_tokens * prompt,
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
