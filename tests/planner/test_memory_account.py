"""One account of memory: the search and the check agree, and the reserve is that of the runtime's groups."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from realhf.calls import OptimizerConfig, Output
from realhf.cluster import Cluster
from realhf.engine.native import NativeEngine
from realhf.execution_plan import CallPlan, ExecutionPlan
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import region_size
from realhf.planner.call_group import OPEN
from realhf.planner.communicator_memory import CommunicatorMemory, Use, groups_of, use_of
from realhf.planner.make import make_plan
from realhf.planner.memory_account import check_memory, require_fit
from realhf.planner.problem import ModelRole, PlannedCall, Problem, Workload
from realhf.planner.rates import Rates
from realhf.planner.search_space import SearchSpace
from realhf.planner.shard import available_bytes, fixed_reserve, weights_bytes
from tests.planner.problems import random_problem
from tests.planner.test_memory import HF
from tests.samples import marked


def varied_problem(rng, **fields):
    """Return a random problem with adapters, experts, equal frozen weights, tied embeddings, evaluations,
    kept caches and limits of caches."""
    problem = random_problem(rng, **fields)
    moe = ModelConfig.from_hf(
        HF["qwen3-moe"] | {"vocab_size": 96, "hidden_size": 128, "num_hidden_layers": 3, "num_experts": 4})
    common = rng.choice(list(problem.roles.values())).config
    roles = {}
    for name, role in problem.roles.items():
        if rng.random() < 0.3:
            role = replace(role, config=moe)
        elif rng.random() < 0.5:
            role = replace(role, config=replace(common, tie_word_embeddings=rng.random() < 0.5))
        if role.follows is None and rng.random() < 0.6 and role.config.moe is None:
            role = replace(role, config=common, source="base")
            if role.trainable:
                role = replace(role, lora=LoraConfig(rank=2))
        roles[name] = role
    workloads = dict(problem.workloads)
    for call in problem.model_calls:
        work = workloads[call.name]
        workloads[call.name] = replace(work, longest_prompt_tokens=work.prompt_tokens * rng.choice([0, 1, 2]))
        if call.kind == "generate":
            workloads[call.name] = replace(
                workloads[call.name], kv_cache_gib=rng.choice([None, None, 0.001]),
                keeps_cache=rng.random() < 0.2, weights=rng.choice(["full", "int8"]))
    evaluations = [
        PlannedCall(f"eval/{call.name}", "generate", call.role, Workload(64, 50, 60, 80),
                    (f"eval/{call.name}", rng.choice([call.name, "another"])), is_evaluation=True)
        for call in problem.model_calls if rng.random() < 0.3
    ]
    cluster = replace(problem.cluster, device_type=rng.choice(["cuda", "cpu"]))
    return replace(
        problem, roles=roles, workloads=workloads, cluster=cluster, evaluations=tuple(evaluations))


def unfinished(rng, space, chosen):
    """Return the plan with some groups open, and some with a mesh only."""
    choices = list(chosen)
    for u, group in enumerate(space.groups):
        mesh = next(i for i, on_mesh in enumerate(group.by_mesh) if chosen[u] in on_mesh)
        choices[u] = rng.choice([chosen[u], OPEN, group.mesh_choices[mesh]])
    return choices


@pytest.mark.parametrize(("seeds", "least"), marked([(range(6), 10), (range(80), 200)], quick=[0]))
def test_the_search_and_the_check_count_the_same(seeds, least):
    fitting = []
    for seed in seeds:
        rng = random.Random(seed)
        memory = 1.56e9 + 10 ** rng.uniform(6.5, 9)
        problem = varied_problem(rng, num_calls=rng.randint(1, 5), memory=memory)
        space = SearchSpace(problem, Rates(problem.cluster))
        if not all(group.candidates for group in space.groups):
            continue
        for _ in range(5):
            chosen = [rng.randrange(len(group.candidates)) for group in space.groups]
            check = check_memory(problem, space.memory.least_plan(chosen))
            (excess,) = space.memory.excess(np.array([chosen]))
            assert (excess <= 0) == check.fits, seed
            exact = check.fullest.excess_bytes
            assert excess <= exact + 1 and (excess > 0 or excess == pytest.approx(exact, abs=1)), seed
            begun = np.array([unfinished(rng, space, chosen) for _ in range(4)])
            assert (space.memory.excess(begun) <= exact + 1).all(), seed
            fitting.append(check.fits)
    assert 0.1 < np.mean(fitting) < 0.9 and len(fitting) > least


# The reserve


def count_groups(world, layout, trains):
    """Return how many communicators with NCCL this rank would have for an engine in a layout."""
    layout = Layout.parse(layout)
    if world.rank not in layout:
        return None
    spec = ModelRole(_config()).spec
    optimizer = OptimizerConfig() if trains else None
    engine = NativeEngine(spec, layout, world, dtype="float32", optimizer=optimizer)
    groups = engine.model.groups
    made = [groups.tp, groups.cp, groups.pp, groups.ep, groups.all, groups.ends]
    made += [group for group, _ in engine.model._partial]
    made += [section.group for section in engine.optimizer.sums._sections] if trains else []
    return len({id(group) for group in made if group is not None and group.size > 1})


def _config():
    return ModelConfig("llama", 96, 64, 96, 4, 4, 2, 16, True)


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("layout", ["d4@0-3", "t4@0-3", "t2p2@0-3", "d2t2@0-3", "c2t2@0-3", "d2@0-1"])
def test_the_communicators_are_those_of_the_runtime(pool, layout, trains):
    place = Layout.parse(layout)
    real = pool.run(count_groups, layout, trains, num_ranks=len(place.ranks))
    communicators = CommunicatorMemory(Cluster.load("h100-1x8"), 8)
    groups = groups_of(place, use_of(ModelRole(_config()), trains=trains))
    keys = np.sort([communicators.keys_and_bytes(*group)[0] for group in groups], axis=0)
    counted = (keys[0] != 0) + (keys[1:] != keys[:-1]).sum(axis=0)
    assert real == counted[: len(real)].tolist() and not counted[len(real) :].any()


@pytest.mark.parametrize("num_kv_heads", [2, 4, 64])
def test_the_least_communicators_of_layouts_count_their_heads(num_kv_heads):
    communicators = CommunicatorMemory(Cluster.load("h100-8x8"), 64)
    for text in ("t8d8@0-63", "t2d4@0-7", "t4p2d8@0-63", "t16d4@0-63"):
        place = Layout.parse(text)
        for trains in (False, True, False):
            whole = sum(communicators.least(place, Use(trains, num_kv_heads=num_kv_heads))[:2])
            groups = CommunicatorMemory(Cluster.load("h100-8x8"), 64).of_layout(
                place, Use(trains, num_kv_heads=num_kv_heads))
            assert whole == groups[list(place.ranks)].min()


def test_communicators_take_what_was_measured():
    """544 MB for two A100s, 688 MB for more (NVIDIA/nccl issue 964); 3.3 GB for messages among eight H100s
    (issue 1685), of which the buffers by their sizes are 2.8 GB."""
    a100 = CommunicatorMemory(Cluster.load("a100-8x8"), 64)
    for text, mib in (("t2@0-1", 544), ("t4@0-3", 688)):
        place = Layout.parse(text)
        assert a100.of_layout(place, Use())[0] / 2**20 == mib
    h100 = CommunicatorMemory(Cluster.load("h100-8x8"), 64)
    assert h100.of_moves([tuple(range(8))])[:8] == pytest.approx(16 * 2**20 + 7 * 32 * 12 * 2**20)
    assert not h100.of_moves([tuple(range(8))])[8:].any()
    cpu = CommunicatorMemory(replace(Cluster.load("h100-8x8"), device_type="cpu"), 64)
    assert not cpu.of_layout(Layout.parse("d8t8@0-63"), Use(trains=True)).any()


def _generation(memory, *, evaluations=(), **changes):
    call = FunctionCall("gen", "generate", ("prompts",), ("tokens",), role="actor")
    graph = DataflowGraph((call,), ("prompts",))
    cluster = replace(Cluster.load("h100-1x8"), device_memory_bytes=memory)
    work = replace(Workload(64, 24, 1000.0, max_new_tokens=1000), **changes)
    role = ModelRole(ModelConfig.load("llama-7b"))
    return Problem(graph, {"actor": role}, {"gen": work}, cluster, evaluations=evaluations)


def _plan(**options):
    return ExecutionPlan({"gen": CallPlan(Layout.parse("d1@0"), **options)})


def test_rows_that_a_plan_promises_take_their_whole_cache():
    """A run then takes all memory that its passes leave, not a share (see Generate.takes_free_memory)."""
    row = 1024 * 2**19
    peak = check_memory(_generation(80e9), _plan(max_rows=64)).fullest
    assert peak.bytes_by_use["kv_cache"] == 64 * row
    assert check_memory(_generation(80e9), _plan(max_rows=64)).fits
    assert not check_memory(_generation(50e9), _plan(max_rows=64)).fits
    assert check_memory(_generation(50e9), _plan()).fits  # Here rows wait.


def test_a_plan_that_uses_the_memory_for_fragmentation_is_tight():
    need = check_memory(_generation(80e9), _plan(max_rows=32)).fullest.num_bytes
    fixed = sum(fixed_reserve(Cluster.load("h100-1x8")).values()) - 0.05 * 79.1 * 2**30
    for share, fits, tight in ((0.94, True, False), (0.97, False, True), (1.01, False, False)):
        problem = _generation((need + fixed) / share)
        check = check_memory(problem, _plan(max_rows=32))
        assert (check.fits, check.is_tight) == (fits, tight)
        assert check.share(check.fullest) == pytest.approx(share)
        if fits or tight:
            assert require_fit(problem, _plan(max_rows=32), allow_tight=True) == check
    with pytest.raises(ValueError, match="calls.gen needs .* it fits with calls.gen.max_rows: 16"):
        require_fit(_generation((need + fixed) / 0.97), _plan(max_rows=32))


def test_evaluations_are_counted_in_their_own_layouts():
    beside = PlannedCall(
        "eval/gen", "generate", "actor", Workload(64, 24, 2000.0, max_new_tokens=4000, kv_cache_gib=20.0),
        ("eval/gen", "gen"), is_evaluation=True)
    problem = _generation(80e9, evaluations=(beside,))
    alone = check_memory(_generation(80e9), _plan(max_rows=16))
    check = check_memory(problem, _plan(max_rows=16))
    assert check.fullest.call == "eval/gen" and check.fullest.bytes_by_use["kv_cache"] == 20 * 2**30
    assert check.by_call["gen"].num_bytes == alone.by_call["gen"].num_bytes
    apart = ExecutionPlan({**_plan(max_rows=16).calls, "eval/gen": CallPlan(Layout.parse("t2@2-3"))})
    peak = check_memory(problem, apart).peaks[2]
    role = problem.roles["actor"]
    assert peak.bytes_by_use["actor copy"] == weights_bytes(role, Layout.parse("t2@2-3").strategy, 0)
    assert peak.bytes_by_use["communicators"] > 0


def test_caches_of_calls_that_take_turns_need_no_room_together():
    """A run gives the pages of one call back before the next one (see `MemoryMeter`)."""
    other = PlannedCall(
        "eval/gen", "generate", "actor", Workload(64, 24, 2000.0, max_new_tokens=4000, kv_cache_gib=20.0),
        ("eval/gen", "gen"), is_evaluation=True)
    plan = _plan(max_rows=40)
    check = check_memory(_generation(80e9, evaluations=(other,)), plan)
    fixed = sum(fixed_reserve(Cluster.load("h100-1x8")).values()) - 0.05 * 79.1 * 2**30
    smaller = _generation((check.fullest.num_bytes + fixed) / 0.94, evaluations=(other,))
    caches = {name: peak.bytes_by_use["kv_cache"] for name, peak in check.by_call.items()}
    assert caches == {"gen": 40 * 1024 * 2**19, "eval/gen": 20 * 2**30}
    fullest = check_memory(smaller, plan).fullest
    assert check_memory(smaller, plan).fits and fullest.num_bytes + min(caches.values()) > fullest.available


def test_a_kept_cache_rests_while_other_calls_run():
    problem = _generation(80e9, keeps_cache=True, rounds=2)
    score = FunctionCall("score", "forward", ("tokens",), ("scores",), role="actor")
    graph = DataflowGraph((*problem.graph.calls, score), ("prompts",))
    work = {**problem.workloads, "score": Workload(64, 24, 1000.0, 1000, output=Output.VALUES)}
    plan = ExecutionPlan({**_plan(max_rows=4).calls, "score": CallPlan(Layout.parse("d1@0"))})
    check = check_memory(replace(problem, graph=graph, workloads=work), plan)
    kept = {name: peak.bytes_by_use["actor kept cache"] for name, peak in check.by_call.items()}
    assert kept["gen"] == kept["score"] > 64 * 1000 * 2**19


def _training_beside_frozen_roles(*, host_memory, offloads_optimizer):
    """Return a problem in which an actor trains, and two frozen models can wait in host memory."""
    config = ModelConfig.load("llama-7b")
    roles = {"actor": ModelRole(config, trainable=True, offloads_optimizer=offloads_optimizer)}
    roles |= {name: ModelRole(config) for name in ("ref", "judge")}
    calls = [FunctionCall(f"{name}_forward", "forward", ("prompts",), (name,), role=name)
             for name in ("ref", "judge")]
    calls.append(FunctionCall("actor_train", "train_step", ("ref", "judge"), (), role="actor"))
    work = {call.name: Workload(64, 512, 512, output=Output.VALUES) for call in calls}
    cluster = replace(Cluster.load("h100-1x8"), host_memory_bytes=host_memory)
    return Problem(DataflowGraph(tuple(calls), ("prompts",)), roles, work, cluster)


def test_what_is_offloaded_to_a_host_is_counted_together():
    """A host of 180 GB has room for 144: the optimizer (81 GB), and two times all weights for eight replicas
    (108 GB) are too much together, though neither is alone."""
    numel = 6_738_415_616
    layouts = {"ref_forward": "d8@0-7", "judge_forward": "d1@0", "actor_train": "d8@0-7"}

    def plan(*offloaded):
        return ExecutionPlan({
            name: CallPlan(Layout.parse(text), offload=name in offloaded) for name, text in layouts.items()})

    problem = _training_beside_frozen_roles(host_memory=180e9, offloads_optimizer=True)
    check = check_memory(problem, plan("ref_forward", "judge_forward"))
    assert check.host_bytes == pytest.approx(12 * numel + 9 * 2 * numel, rel=1e-3)
    assert check.on_host == {
        "actor optimizer": pytest.approx(12 * numel / 8, rel=1e-3), "ref weights": 2 * numel,
        "judge weights": 2 * numel}
    assert not check.fits and not check.is_tight and check.host_available == 0.8 * 180e9
    with pytest.raises(ValueError, match="ref weights and judge weights and actor optimizer, 202 GB"):
        require_fit(problem, plan("ref_forward", "judge_forward"))
    assert check_memory(problem, plan("judge_forward")).fits_on_hosts
    plain = replace(problem, roles={**problem.roles, "actor": replace(
        problem.roles["actor"], offloads_optimizer=False)})
    assert check_memory(plain, plan("ref_forward", "judge_forward")).fits_on_hosts
    assert "judge's weights are in host memory while other calls run: 13.5 GB for a rank" in (
        check.host_sentences())


def test_the_search_offloads_no_more_than_hosts_have():
    """In given layouts, frozen weights rest on devices or wait in host memory, beside the optimizer."""
    layouts = {"ref_forward": "d8@0-7", "judge_forward": "t8@0-7", "actor_train": "t8@0-7"}
    all_fit = {}
    for memory in (1e12, 180e9, 120e9):
        problem = _training_beside_frozen_roles(host_memory=memory, offloads_optimizer=True)
        problem = replace(problem, pins={name: Layout.parse(text) for name, text in layouts.items()})
        space = SearchSpace(problem, Rates(problem.cluster))
        plans = np.array(list(itertools.product(*(range(len(group.candidates)) for group in space.groups))))
        plans = plans[:: max(1, len(plans) // 60)]
        fits = space.memory.excess(plans) <= 0
        checks = [check_memory(problem, ExecutionPlan(space.call_plans(plan.tolist()))) for plan in plans]
        assert fits.tolist() == [check.fits for check in checks]
        all_fit[memory] = bool(fits.all())
        assert fits.any()
        planned = make_plan(problem, Rates(problem.cluster), time_limit=60, max_iterations=1, explain=False)
        assert planned.memory.fits and planned.memory.host_bytes <= 0.8 * memory
    assert all_fit[1e12] and not all_fit[180e9]


def test_the_table_adds_up():
    check = check_memory(_generation(80e9), _plan(max_rows=16))
    sizes = check.columns(check.fullest)
    assert sum(sizes.values()) == pytest.approx(check.share(check.fullest) * 80e9)
    assert sizes["reserve"] == 2**30 + 2**27 + 2**28 and sizes["cache"] == 16 * 1024 * 2**19
    assert available_bytes(Cluster.load("h100-1x8")) == pytest.approx(
        0.95 * 79.1 * 2**30 - sizes["reserve"])
    assert "context 1.07 GB, workspaces 134 MB, staging 268 MB" in check.reserve_sentence()
    assert "4 GB (5%) stay free for fragmentation" in check.reserve_sentence()


@pytest.mark.parametrize("layout", ["d1@0", "t2p2@0-3", "p3t4@0-11", "d4e2t2@0-7"])
@pytest.mark.parametrize("name", ["qwen2.5-7b", "qwen3-30b-a3b"])
def test_a_copy_in_int8_has_the_bytes_that_the_table_says(name, layout):
    config = ModelConfig.load(name)
    layout = Layout.parse(layout)
    if layout.ep > 1 and config.moe is None:
        return
    role = ModelRole(config).in_int8
    params = {param.name: param for param in role.spec.params}
    most = dict.fromkeys(range(layout.pp), 0)
    for rank in layout.ranks:
        held = role.spec.held_by(layout, rank).items()
        num_bytes = sum(
            region_size(box) + 2 * (box[0][1] - box[0][0]) if params[key].takes_int8 else 2 * region_size(box)
            for key, box in held)
        stage = layout.coordinate(rank).pp
        most[stage] = max(most[stage], num_bytes)
    assert {stage: weights_bytes(role, layout.strategy, stage) for stage in most} == most
