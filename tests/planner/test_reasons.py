"""Reasons: runners-up, the causes of their longer steps, what would make them better, and changes."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from realhf.cli.planning_problem import problem_of
from realhf.cluster import Cluster
from realhf.execution_plan import ExecutionPlan
from realhf.planner.comparisons import SearchLimits, what_if
from realhf.planner.lengths import observed
from realhf.planner.make import make_plan
from realhf.planner.profile import Profile
from realhf.planner.profiled_rates import ProfiledRates
from realhf.planner.rates import Rates
from realhf.planner.reasons import (
    WIDEST,
    Sensitivity,
    change,
    current_values,
    explain_difference,
    find_reasons,
)
from realhf.planner.search import search
from realhf.planner.search_space import SearchSpace
from realhf.planner.step_time import predict
from tests.cli.test_plan_lag import ppo
from tests.planner.problems import quantile, random_problem
from tests.samples import marked

HERE = __file__.rpartition("/")[0]


def solved(rng, **how):
    """Return the space of a random problem and its best plan."""
    while True:
        problem = random_problem(rng, num_calls=rng.choice([2, 3, 4]), **how)
        if not problem.model_calls:
            continue
        space = SearchSpace(problem, Rates(problem.cluster))
        if all(group.candidates for group in space.groups):
            found = search(space, time_limit=60)
            if found is not None:
                return space, np.array(found.chosen)


@pytest.fixture(scope="module")
def planned():
    cluster = replace(Cluster.load("h100-2x8"), device_memory_bytes=48e9)
    problem = problem_of(ppo(batch_size=256), cluster)
    return make_plan(problem, Rates(problem.cluster), time_limit=60, gap=0.05)


def all_of(group):
    return range(len(group.candidates))


@pytest.mark.parametrize("seed", marked(range(6), quick=range(2)))
def test_runners_up_are_the_best_other_layouts(seed):
    """Compare with every plan in which one group has another layout, one after the other."""
    space, chosen = solved(random.Random(seed))
    best_seconds = space.exact_periods(chosen[None])[0]
    reasons = find_reasons(space, chosen)
    for u, group in enumerate(space.groups):
        fitting, lacking = [], []
        for index in all_of(group):
            plan = chosen.copy()
            plan[u] = index
            if group.candidates[index].layout != group.candidates[chosen[u]].layout:
                fits = space.memory.excess(plan[None])[0] <= 0
                (fitting if fits else lacking).append(space.exact_periods(plan[None])[0])
        for i in group.calls:
            reason = reasons[space.calls[i].name]
            if fitting:
                assert reason.runner_up.step_seconds == pytest.approx(min(fitting))
                more = reason.runner_up.step_seconds - best_seconds
                assert sum(reason.runner_up.causes.values()) == pytest.approx(more, abs=1e-12)
            else:
                assert reason.runner_up is None and reason.status
            if reason.too_large is not None:
                assert (1 - reason.too_large.shorter) * best_seconds == pytest.approx(min(lacking))


@pytest.mark.slow
def test_a_layout_that_lacks_memory_fits_with_what_is_said(planned):
    """Plan with this layout and all other layouts pinned, with as much memory as is said and without."""
    name, large = next((n, r.too_large) for n, r in planned.reasons.items() if r.too_large is not None)
    layouts = {call.name: planned.plan[call.name].layout for call in planned.problem.model_calls}

    def seconds(memory):
        """Return infinity if nothing fits."""
        cluster = replace(planned.problem.cluster, device_memory_bytes=memory)
        problem = replace(planned.problem, cluster=cluster, pins=layouts | {name: large.layout})
        try:
            return make_plan(problem, Rates(cluster), time_limit=60, explain=False).result.step_seconds
        except ValueError as error:
            assert "no plan fits" in str(error)
            return np.inf

    promised = planned.result.step_seconds * (1 - large.shorter)
    assert seconds(large.device_memory_bytes * 1.001) <= promised * (1 + 1e-9)
    assert seconds(planned.problem.cluster.device_memory_bytes) > promised * (1 + 1e-9)


@pytest.mark.slow
def test_causes_are_shapley_values():
    """Add up the differences that each cause makes, over all orders, with step times of mixed plans."""
    for seed in range(8):
        rng = random.Random(seed)
        space, chosen = solved(rng)
        other = np.array([rng.randrange(len(group.candidates)) for group in space.groups])
        causes = explain_difference(space, chosen, other)
        whole = np.diff(space.exact_periods(np.stack([chosen, other])))[0]
        assert sum(causes.values()) == pytest.approx(whole, abs=1e-12)
    assert set(explain_difference(space, chosen, chosen).values()) == {0.0}


@pytest.mark.slow
def test_only_what_differs_is_a_cause(planned):
    """A plan whose only difference is that one call takes longer on the same ranks has one cause."""
    space = planned.space
    chosen = np.array(planned.result.chosen)
    seen = 0
    for u, group in enumerate(space.groups):
        layout = group.candidates[chosen[u]].layout
        for index, candidate in enumerate(group.candidates):
            if candidate.layout == layout and index != chosen[u] and seen < 20:
                plan = chosen.copy()
                plan[u] = index
                causes = explain_difference(space, chosen, plan)
                assert causes["reallocation"] == causes["waiting"] == 0
                seen += 1
    assert seen


def test_seconds_under_a_change_are_those_of_the_changed_problem(planned):
    """Predict the plan anew in the changed problem, with another part of the planner."""
    space = planned.space
    sensitivity = Sensitivity(space)
    assert sensitivity.keys == ("response_tokens", "intra_host.bandwidth", "inter_host.bandwidth")
    chosen = np.array(planned.result.chosen)
    for key, factor in itertools.product(sensitivity.keys, (1 / WIDEST, 1.0, 2.0)):
        values = {key: current_values(space.problem)[key] * factor}
        changed = change(space.problem, space.rates, values)
        expected = predict(*changed, planned.plan).step_seconds
        assert sensitivity.seconds(chosen, key, factor) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_tipping_points_lie_where_the_other_plan_becomes_better(planned):
    space = planned.space
    sensitivity = Sensitivity(space)
    chosen = np.array(planned.result.chosen)
    seen = 0
    for u, group in enumerate(space.groups):
        for index in range(min(8, len(group.candidates))):  # The fastest ones.
            other = chosen.copy()
            other[u] = index
            before = sensitivity.seconds(other, "response_tokens", 1.0)
            if before <= sensitivity.seconds(chosen, "response_tokens", 1.0):
                continue
            for point in sensitivity.tipping_points(chosen, other):
                seen += 1
                assert 1 / WIDEST <= point.factor <= WIDEST and point.factor != 1
                assert point.value == current_values(space.problem)[point.key] * point.factor
                a, b = (sensitivity.seconds(plan, point.key, point.factor) for plan in (chosen, other))
                assert b < a
                # The last bisection found the plan no worse at the other end of its interval. Nearer to 1 it
                # may be worse again, as steps jump where lengths are rounded to whole tokens or blocks.
                width = np.log(WIDEST) / 2 / 2**5
                nearer = point.factor * np.exp(-np.sign(np.log(point.factor)) * width)
                a, b = (sensitivity.seconds(plan, point.key, nearer) for plan in (chosen, other))
                assert a <= b
    assert seen >= 3


def test_changes_reach_every_workload_and_the_cluster(planned):
    problem, rates = planned.problem, planned.space.rates
    values = {"response_tokens": 45, "prompt_tokens": "200", "batch_size": "128", "num_hosts": "4",
              "inter_host.bandwidth": "200 Gbit/s", "device_memory": "60 GB"}
    changed, other_rates = change(problem, rates, values)
    for name, work in changed.workloads.items():
        before = problem.workloads[name]
        assert (work.prompt_tokens, work.response_tokens, work.prompts) == (200, 45, 128)
        assert work.max_new_tokens == before.max_new_tokens // 2
    cluster = changed.cluster
    assert other_rates.cluster == cluster and cluster.num_devices == 32
    assert cluster.inter_host.bandwidth_bytes_per_second == 25e9 and cluster.device_memory_bytes == 60e9
    now = current_values(changed)
    assert {key: now[key] for key in values} == {
        "response_tokens": 45, "prompt_tokens": 200, "batch_size": 128, "num_hosts": 4,
        "inter_host.bandwidth": 25e9, "device_memory": 60e9}
    assert change(problem, rates, current_values(problem))[0] == problem


@pytest.mark.parametrize("factor", [0.25, 1.7, 3.0])
def test_observed_lengths_keep_their_shape_when_they_are_scaled(planned, factor):
    """The moments are those of lengths that are all multiplied, up to rounding to whole tokens."""
    lengths = np.array([12, 40, 40, 90, 270])
    prompts, responses = (observed((lengths + more).tolist()) for more in (0, 7))
    given = {"prompt_tokens": prompts.mean, "prompt_lengths": prompts, "response_tokens": responses.mean,
             "response_lengths": responses, "max_new_tokens": responses.limit}
    workloads = {name: replace(work, **given) for name, work in planned.problem.workloads.items()}
    problem = replace(planned.problem, workloads=workloads)
    wanted = {key: current_values(problem)[key] * factor for key in ("prompt_tokens", "response_tokens")}
    for work in change(problem, planned.space.rates, wanted)[0].workloads.values():
        for found, before in ((work.prompt_lengths, lengths), (work.response_lengths, lengths + 7)):
            assert found.mean == pytest.approx((before * factor).mean())
            assert found.squared_mean == pytest.approx(np.square(before * factor).mean(), rel=0.01)
            assert abs(quantile(found, 0.5) - 1.5 - np.median(before) * factor) <= 1.5


REFUSED = {
    ("respons_tokens", "8"): "unknown 'respons_tokens' (did you mean response_tokens?): legal are",
    ("response_tokens", "many"): "response_tokens is 'many': it must be a number of at least 1",
    ("batch_size", "1.5"): "batch_size is '1.5': it must be a whole number",
    ("num_hosts", "1.5"): "num_hosts is '1.5'",
    ("device_memory", "80 furlongs"): "device_memory_bytes is '80 furlongs'",
    ("inter_host.bandwidth", "0"): "inter_host.bandwidth_bytes_per_second is 0: it must be a number above 0",
}


@pytest.mark.parametrize("case", REFUSED)
def test_changes_that_are_refused(case, planned):
    with pytest.raises(ValueError) as error:
        change(planned.problem, planned.space.rates, dict([case]))
    assert str(error.value).startswith(REFUSED[case])


def test_what_a_profile_has_measured_cannot_be_changed():
    profile = Profile.load(f"{HERE}/sample_profile.yaml")
    cpus = replace(Cluster.load("cpu-laptop"), num_hosts=2, cores_per_host=None)
    problem = problem_of(ppo(), cpus)
    rates = ProfiledRates(profile, problem.cluster)
    for key in ("intra_host.bandwidth", "memory_bandwidth", "peak_flops.bfloat16"):
        with pytest.raises(ValueError, match=f"{key}: the profile has measured times"):
            change(problem, rates, {key: 1e9})
    changed = change(problem, rates, {"inter_host.bandwidth": 1e9})[1]
    assert isinstance(changed, ProfiledRates) and changed.cluster.inter_host.bandwidth_bytes_per_second == 1e9


@pytest.mark.slow
def test_what_if_is_a_plan_for_the_changed_problem(planned):
    limits = SearchLimits(60.0, 0.1)
    found = what_if(planned, {"inter_host.bandwidth": "20 Gbit/s"}, limits)
    problem, rates = change(planned.problem, planned.space.rates, found.values)
    best = make_plan(problem, rates, time_limit=60, gap=0.1, explain=False)
    assert found.best_step_seconds == pytest.approx(min(best.result.step_seconds, found.step_seconds))
    assert found.best_lower_bound_seconds <= found.best_step_seconds <= found.step_seconds
    seconds = predict(problem, rates, planned.plan).step_seconds
    assert found.step_seconds <= seconds * 1.01  # The same layouts, with options chosen anew.
    for name, layout in found.best_layouts.items():
        assert str(planned.plan[name].layout) != layout


@pytest.mark.slow
def test_layouts_that_do_not_go_with_a_change(planned):
    limits = SearchLimits(60.0, 0.2)
    fewer = what_if(planned, {"num_hosts": "1"}, limits)
    assert fewer.obstacle == "the layouts need 16 devices of 8" and fewer.step_seconds is None
    assert fewer.best_step_seconds > planned.result.step_seconds
    assert max(ExecutionPlan.from_dict({"calls": {n: {"layout": x} for n, x in fewer.best_layouts.items()}}
               )[n].layout.ranks[-1] for n in fewer.best_layouts) < 8
    tiny = what_if(planned, {"device_memory": "3 GB"}, limits)
    assert tiny.best_step_seconds is None and "device" in tiny.best_obstacle and tiny.obstacle
