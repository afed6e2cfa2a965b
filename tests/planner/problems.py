"""Random planning problems on small clusters."""

from realhf.cluster import Cluster, Link
from realhf.graph import DataflowGraph, FunctionCall
from realhf.model_config import ModelConfig
from realhf.planner.problem import ModelRole, Problem, Workload

SHAPES = ((1, 2), (2, 1), (1, 4), (2, 2), (1, 3), (1, 6), (4, 1), (1, 8), (2, 4), (4, 2), (8, 1))


def random_cluster(rng, *, memory):
    hosts, per_host = rng.choice(SHAPES)
    fast, slow = Link(1e-6, 10 ** rng.uniform(9, 11)), Link(1e-5, 10 ** rng.uniform(8, 10))
    return Cluster(
        hosts, per_host, memory, 1e12, 1e11, {"float32": 10 ** rng.uniform(11, 13)}, fast, slow,
        host_memory=rng.choice([None, Link(1e-5, 1e9)]),
    )  # fmt: skip


def random_model(rng):
    layers, heads = rng.choice([1, 2, 3]), rng.choice([2, 4])
    hidden = 64 * heads
    return ModelConfig("llama", 1000, hidden, 3 * hidden, layers, heads, 2, 64, 1e-6, 1e4, False, False)


def random_problem(rng, *, num_calls, memory=1e12):
    """Calls that read what earlier ones write; roles with one to three calls, some of which train."""
    roles, calls, work, keys = {}, [], {}, ["prompts"]
    trained = {name: rng.random() < 0.5 for name in "abc"}
    for number in range(num_calls):
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
        )  # fmt: skip
    training = {call.role for call in calls if call.kind == "train_step"}
    roles = {name: ModelRole(role.config, role.dtype, name in training) for name, role in roles.items()}
    graph = DataflowGraph(tuple(calls), ("prompts",))
    return Problem(graph, roles, work, random_cluster(rng, memory=memory))
