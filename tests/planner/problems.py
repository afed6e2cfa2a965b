"""Random planning problems on small clusters, and random pins."""

from dataclasses import replace

from realhf.calls import HostFunction
from realhf.cluster import Cluster, Link
from realhf.experiment import lagged_parts
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig, MoeConfig
from realhf.planner.call_memory import CallPeaks, CallPieces
from realhf.planner.candidates import find_meshes
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.step_time import host_anchor

SHAPES = ((1, 2), (2, 1), (1, 4), (2, 2), (1, 3), (1, 6), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1), (9, 1))


def random_cluster(rng, *, memory):
    hosts, per_host = rng.choice(SHAPES)
    fast, slow = Link(1e-6, 10 ** rng.uniform(9, 11)), Link(1e-5, 10 ** rng.uniform(8, 10))
    return Cluster(
        hosts, per_host, memory, 1e12, 1e11, {"float32": 10 ** rng.uniform(11, 13)}, fast, slow,
        # Some hosts have a port that is narrower than the links of their devices.
        host_bandwidth_bytes_per_second=slow.bandwidth_bytes_per_second if hosts % 2 else None,
        host_memory=rng.choice([None, Link(1e-5, 1e9)]),
    )


def random_model(rng):
    """Return a small dense model or one with experts; heads allow tp * cp of up to 4."""
    layers, heads = rng.choice([1, 2, 3]), rng.choice([2, 4])
    hidden = 64 * heads
    dense = ModelConfig("llama", 1000, hidden, 3 * hidden, layers, heads, 2, 64)
    return replace(dense, family="mixtral", moe=MoeConfig(4, 2, hidden)) if rng.random() < 0.3 else dense


def with_shared_weights(rng, roles):
    """Return the roles, in which trained ones may have adapters on frozen weights that other roles share."""
    trained = [name for name, role in roles.items() if role.trainable]
    if not trained or rng.random() < 0.6:
        return roles
    base = roles[trained[0]]
    roles = {**roles, trained[0]: replace(base, lora=LoraConfig(rank=4), source="weights")}
    frozen = [name for name, role in roles.items() if role.is_frozen]
    shared = {name: replace(roles[name], config=base.config, source="weights") for name in frozen}
    return {**roles, **shared}


def random_layout(rng, problem, call):
    """Return a legal layout of a call on contiguous ranks, drawn from all of them."""
    devices = problem.cluster.num_devices
    while True:
        first, stop = sorted(rng.sample(range(devices + 1), 2))
        sizes = {}
        left = stop - first
        for axis in rng.sample(["pp", "dp", "cp", "tp"], 4):
            sizes[axis] = rng.choice([n for n in range(1, left + 1) if left % n == 0])
            left //= sizes[axis]
        ep = rng.choice([n for n in range(1, sizes["dp"] + 1) if sizes["dp"] % n == 0])
        if left > 1 or sizes["dp"] > problem.workloads[call.name].most_replicas(call.kind):
            continue
        layout = Layout(ParallelStrategy(ep=ep, **sizes), DeviceMesh(tuple(range(first, stop))))
        try:
            problem.model_role(call).config.check_layout(layout)
        except ValueError:
            continue
        return layout


def random_pins(rng, problem):
    """Return layouts for one to three calls."""
    pins = {}
    for call in rng.sample(problem.model_calls, rng.randint(1, min(3, len(problem.model_calls)))):
        pins[call.name] = random_layout(rng, problem, call)
    return pins


def random_problem(rng, *, num_calls, memory=1e12, pinned=False):
    """Return a random problem whose calls read what earlier ones write.

    Some calls are plain Python; roles have one to three calls, and some roles train or follow another. With
    `pinned` either a layout is fixed or two calls share one.
    """
    roles, calls, work, keys = {}, [], {}, ["prompts"]
    trained = {name: rng.random() < 0.5 for name in "abc"}
    for number in range(num_calls):
        if number and rng.random() < 0.2:
            host = HostFunction(None, splittable=rng.random() < 0.5)
            inputs = tuple(rng.sample(keys, min(2, len(keys))))
            calls.append(FunctionCall(f"call{number}", "host", inputs, (f"key{number}",), work=host))
            work[f"call{number}"] = Workload(seconds=rng.choice([0.0, 1e-3, 3e-2]))
            keys.append(f"key{number}")
            continue
        role = rng.choice("abc")
        kind = "train_step" if trained[role] and rng.random() < 0.5 else rng.choice(["generate", "forward"])
        outputs = () if kind == "train_step" else (f"key{number}",)
        inputs = tuple(rng.sample(keys, rng.randint(1, min(2, len(keys)))))
        calls.append(FunctionCall(f"call{number}", kind, inputs, outputs, role))
        keys += outputs
        roles.setdefault(role, ModelRole(random_model(rng), "float32"))
        work[f"call{number}"] = Workload(
            rng.choice([2, 8]), rng.choice([16, 200]), rng.choice([16, 100]), 100,
            minibatches=rng.choice([1, 2]) if kind == "train_step" else 1,
            samples_per_prompt=rng.choice([1, 2]),
        )
        if kind == "train_step":
            work[f"call{number}"] = replace(work[f"call{number}"], samples_per_prompt=1)
    training = {call.role for call in calls if call.kind == "train_step"}
    leader = next(iter(sorted(training)), None)
    roles = {
        name: ModelRole(
            role.config, role.dtype, name in training,
            leader if leader is not None and name not in training and rng.random() < 0.3 else None,
        )
        for name, role in roles.items()
    }
    roles = with_shared_weights(rng, roles)
    graph = DataflowGraph(tuple(calls), ("prompts",))
    cluster, pins, together = random_cluster(rng, memory=memory), {}, ()
    named = [call.name for call in calls if call.role is not None]
    if pinned and rng.random() < 0.5 and len(named) > 1:
        together = (tuple(rng.sample(named, 2)),)
    elif pinned:
        name = rng.choice(named)
        mesh = rng.choice([mesh for mesh in find_meshes(cluster) if len(mesh) <= 2])
        mesh = DeviceMesh(tuple(mesh))
        pins[name] = Layout.parse(f"t{len(mesh.ranks)}@{mesh}")
    return Problem(graph, roles, work, cluster, pins, together)


def random_lagged_problem(rng, *, num_calls, lag, rounds, memory=1e12):
    """Return a random problem whose calls are run in the parts of a lagged step."""
    while True:
        problem = random_problem(rng, num_calls=num_calls, memory=memory)
        try:
            parts = lagged_parts(problem.graph)
        except ValueError:  # It does not both generate and train.
            continue
        workloads = {
            call.name: replace(problem.workloads[call.name], rounds=rounds if call.kind == "generate" else 1)
            for call in problem.graph.calls
        }
        order = ("score", "rollout", "train") if rounds == lag else ("rollout", "score", "train")
        return replace(
            problem, workloads=workloads, run_order=tuple(name for part in order for name in parts[part]),
            ahead=frozenset(parts["rollout"]) if rounds == lag else frozenset())


def ranks_and_seconds(space, chosen):
    """Return the ranks and the seconds of every call of a plan, by its position."""
    found, plans = {}, space.call_plans(chosen)
    for group, index in zip(space.groups, chosen, strict=True):
        for i in group.calls:
            found[i] = (group.candidates[index].layout.ranks, space.settled(chosen)[i].cost.seconds)
    for i, call in enumerate(space.calls):
        layout = plans[call.name].layout
        name, split = host_anchor(space.problem, call) if call.role is None else (None, False)
        if call.role is None and not split:
            found[i] = (layout.ranks, space.problem.workloads[call.name].seconds)
        elif call.role is None:  # It is assumed to occupy the whole last stage.
            seconds = space.problem.workloads[call.name].seconds / len(layout.ranks)
            found[i] = (plans[name].layout.grid[-1].ravel().tolist(), seconds)
    return found


def peak_memory(role, kind, workload, strategy, stage, *, micro_batch_tokens, recompute=False, fused=False):
    """Return the memory that a call adds at its peak on the fullest rank of a stage."""
    pieces = CallPieces(role, workload, strategy, micro_batch_tokens, recompute, fused)
    return CallPeaks(kind, pieces).on(stage)


def quantile(lengths, share):
    """Return the least length that this share of the sequences does not exceed."""
    return int((lengths.survival > 1 - share).sum())
