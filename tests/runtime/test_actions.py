"""Compiled actions of random graphs and plans in an independent simulator; the average of a follower."""

import math
import random
from collections import defaultdict, deque

import pytest
import torch
from safetensors.torch import load_file

from realhf.calls import OptimizerConfig
from realhf.data.loader import Loader
from realhf.distributed.tags import RECORD
from realhf.execution_plan import CallPlan, ExecutionPlan, home_layouts
from realhf.experiment import Role
from realhf.graph import DataflowGraph, FunctionCall
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import is_sharded, model_spec
from realhf.runtime.compile.actions import (
    RANK_0,
    Reallocate,
    Receive,
    Run,
    Send,
    compile_actions,
)
from realhf.runtime.compile.program import compile_program
from realhf.runtime.execute.executor import Executor, PartsProgram, RankState
from realhf.runtime.execute.host_call import HostContext
from realhf.runtime.weights.model_store import ModelStore
from tests.runtime.tiny import make_experiment, write_task

WORLD_SIZE = 6
ROLES = {
    "actor": Role("", dtype="float32", optimizer=OptimizerConfig()),
    "critic": Role("", dtype="float32", optimizer=OptimizerConfig()),
    "ref": Role("", dtype="float32"),
    "average": Role("", dtype="float32", follows="actor"),
}
SPECS = dict.fromkeys(ROLES, model_spec(ModelConfig("llama", 8, 4, 6, 2, 2, 2, 2)))


def _random_layout(rng, *, host=False):
    sizes = [1 if host else rng.choice([1, 1, 2]), rng.choice([1, 2, 3]), 1 if host else rng.choice([1, 2])]
    while sizes[0] * sizes[1] * sizes[2] > WORLD_SIZE:
        sizes[rng.randrange(3)] = 1
    strategy = ParallelStrategy(pp=sizes[0], dp=sizes[1], tp=sizes[2])
    return Layout(strategy, DeviceMesh(tuple(rng.sample(range(WORLD_SIZE), strategy.num_ranks))))


def _random_case(rng):
    """Return a graph of 3 to 9 calls on all four roles, and a layout for each call."""
    keys, calls, plans, homes = ["prompt_ids", "prompt"], [], {}, {}
    extra = [rng.choice([*ROLES, "host"]) for _ in range(rng.randint(0, 5))]
    for number, role in enumerate(rng.sample([*ROLES, *extra], len(ROLES) + len(extra))):
        trains = role != "host" and ROLES[role].optimizer is not None and rng.random() < 0.4
        kind = "host" if role == "host" else "train_step" if trains else rng.choice(["generate", "forward"])
        inputs = rng.sample(keys, rng.randint(1, min(4, len(keys))))
        outputs = () if trains else tuple(f"key{number}.{i}" for i in range(rng.randint(1, 2)))
        name = f"call{number}"
        calls.append(FunctionCall(name, kind, tuple(inputs), outputs, None if role == "host" else role))
        layout = _random_layout(rng, host=role == "host")
        if trains:
            layout = homes.setdefault(role, layout)
        elif rng.random() < 0.2 and role in homes:
            layout = homes[role]
        plans[name] = CallPlan(layout)
        keys += outputs
    return DataflowGraph(tuple(calls), ("prompt_ids", "prompt")), ExecutionPlan(plans)


def _compile(rng):
    graph, plan = _random_case(rng)
    homes = home_layouts(graph, plan, ROLES)
    return graph, plan, homes, compile_actions(graph, plan, ROLES, homes, SPECS)


def _operations(rank, numbered_actions):
    """What one rank does: ("send", peer, tag, message), which waits for nobody; ("receive", peer, tag,
    message); ("meet", ranks, number); and ("settle", number) until all that it has sent has been taken.

    An action None begins a step. Rank i among the heads of a producer gives its samples to rank i of the
    target, unless it is there itself; then whoever got any tells all of the target, and sends them data.
    """
    for number, action in numbered_actions:
        if action is None:
            yield "settle", number
        elif isinstance(action, Run):
            if rank in action.layout:
                yield "meet", frozenset(action.layout.ranks), number
        elif isinstance(action, Reallocate):
            ranks = {*action.source.ranks, *action.target.ranks}
            if rank in ranks:
                yield "meet", frozenset(ranks), number
        elif isinstance(action, Send):
            for head, depot in _deposits(action):
                if head == rank != depot:
                    yield "send", depot, action.tag, ("deposit", action.call.name, action.producer)
        elif rank in action.target:
            holders = set()
            for send in action.sends:
                for head, depot in _deposits(send):
                    holders.add(depot)
                    if depot == rank != head:
                        yield "receive", head, send.tag, ("deposit", action.call.name, send.producer)
            for part in ("header", "data"):
                message = action.tag, (part, action.call.name)
                if rank in holders:
                    yield from (("send", peer, *message) for peer in action.target.ranks if peer != rank)
                yield from (("receive", peer, *message) for peer in sorted(holders - {rank}))
    yield "settle", math.inf


def _deposits(send):
    """Return pairs of a head and the rank of the target that receives its samples."""
    ranks = send.target.ranks
    return [(h, h if h in ranks else ranks[i % len(ranks)]) for i, h in enumerate(send.source.result_ranks)]


def _execute(actions_of):
    """Run all ranks until none can continue; return the ranks that are stuck, with their actions.

    Receivers take a peer's messages of one tag in the order in which they were sent.
    """
    programs = {rank: _operations(rank, actions) for rank, actions in actions_of.items()}
    current = {rank: next(program, None) for rank, program in programs.items()}
    wires = defaultdict(deque)
    progress = True
    while progress:
        progress = False
        for rank, operation in list(current.items()):
            if operation is None:
                continue
            ready = [rank]
            if operation[0] == "send":
                _, peer, tag, message = operation
                wires[rank, peer, tag].append(message)
            elif operation[0] == "receive":
                _, peer, tag, message = operation
                if not wires[peer, rank, tag]:
                    continue
                taken = wires[peer, rank, tag].popleft()
                assert taken == message, "a message meant for another action was received"
            elif operation[0] == "settle":
                # Only the actions before this step; a real run leaves more in flight, and so waits for less.
                if any(wire for (sender, *_), wire in wires.items() if sender == rank):
                    continue
            elif all(current[peer] == operation for peer in operation[1]):
                ready = list(operation[1])
            else:
                continue
            for peer in ready:
                current[peer] = next(programs[peer], None)
            progress = True
    return {rank: operation for rank, operation in current.items() if operation is not None}


def test_the_simulator_finds_deadlocks():
    call, other = (FunctionCall(name, "host", ("x",)) for name in "ab")
    runs = [Run(c, Layout.parse("d2@0-1")) for c in (call, other)]
    orders = {0: [(0, runs[0]), (1, runs[1])], 1: [(1, runs[1]), (0, runs[0])]}
    assert _execute(orders).keys() == {0, 1}
    assert not _execute(dict.fromkeys(range(2), orders[0]))
    here, there = Layout.parse("d1@0"), Layout.parse("d2@1-2")
    send = Send(call, None, here, ("x",), there, tag=5)
    receive = Receive(call, (send,), there, tag=6)
    both = [(0, send), (1, receive)]
    assert not _execute(dict.fromkeys(range(3), both))
    assert _execute({0: [(0, send)], 1: [], 2: []}).keys() == {0}
    assert _execute({0: [], 1: both, 2: both}).keys() == {1, 2}
    assert _execute({0: both, 1: both, 2: []}).keys() == {1}
    # Two messages under the same tag, received in another order than they were sent:
    same_tag = Send(other, None, here, ("x",), there, tag=5)
    swapped = [(0, same_tag), (1, send), (2, receive), (3, Receive(other, (same_tag,), there, tag=7))]
    with pytest.raises(AssertionError, match="meant for another"):
        _execute(dict.fromkeys(range(3), swapped))
    # One rank begins the next step with what it has not been sent yet, as it is sent only after that step:
    late = {0: [(0, receive_from(1)), (1, send)], 1: [(0, receive), (1, receive_from(1))], 2: [(0, receive)]}
    assert _execute(late).keys() == {0, 1, 2}


def receive_from(rank):
    call = FunctionCall("c", "host", ("x",))
    target = Layout.parse("d1@0")
    send = Send(call, None, Layout.parse(f"d1@{rank}"), ("x",), target, tag=8)
    return Receive(call, (send,), target, tag=9)


def test_no_random_program_deadlocks():
    rng = random.Random(1)
    for _ in range(150):
        *_, actions = _compile(rng)
        # No step may depend on a barrier at its end.
        steps = list(enumerate([None, *actions] * 3))
        assert _execute(dict.fromkeys(range(WORLD_SIZE), steps)) == {}


def test_every_call_gets_its_inputs_once_from_where_they_were_made():
    rng = random.Random(2)
    for _ in range(150):
        graph, plan, _, actions = _compile(rng)
        first = next(call for call in graph.order if {*call.inputs} & {"prompt_ids", "prompt"})
        reader = plan[first.name].layout.result_ranks[0]
        made = {key: (None, Layout.parse(f"d1@{reader}")) for key in graph.inputs}
        sent, received, ran, tags = [], None, [], []
        for action in actions:
            if isinstance(action, Send):
                assert action.target == plan[action.call.name].layout
                assert all(made[key] == (action.producer, action.source) for key in action.keys)
                sent.append(action)
                tags.append(action.tag)
            elif isinstance(action, Receive):
                assert received is None and action.target == plan[action.call.name].layout
                assert set(action.sends) == {send for send in sent if send.call == action.call}
                assert sorted(key for send in action.sends for key in send.keys) == sorted(action.call.inputs)
                received = action.call
                tags.append(action.tag)
            elif isinstance(action, Run):
                assert received == action.call  # Directly before it: the rank may run other calls till then.
                assert action.layout == plan[action.call.name].layout
                made |= dict.fromkeys(action.call.outputs, (action.call.name, action.layout))
                ran.append(action.call.name)
                received = None
            else:
                assert received is None
        assert sorted(ran) == sorted(call.name for call in graph.calls)
        assert len(set(tags)) == len(tags) and not {0, RECORD} & set(tags)


def _versions_seen(actions, homes, num_steps=3):
    """Per step and call, the history of updates in the parameters that the call works with.

    A copy is brought up to date when it is older than its source, as ModelStore does. A train step on
    several dp replicas changes the optimizer's copy, which goes by (role, None).
    """
    copies = {(role, home): () for role, home in homes.items()}
    copies |= {(role, None): () for role in homes}
    seen = []
    for _ in range(num_steps):
        for action in actions:
            if isinstance(action, Reallocate):
                source = copies[action.source_set, None if action.sharded else action.source]
                target = copies.get((action.target_set, action.target))
                if action.follow_rate is not None:
                    copies[action.target_set, action.target] = (*(target or ()), source)
                elif target != source:
                    copies[action.target_set, action.target] = source
            elif isinstance(action, Run) and action.call.role is not None:
                at = action.call.role, action.layout
                seen.append((action.call.name, copies[at]))
                if action.call.kind == "train_step":
                    assert action.layout == homes[action.call.role]
                    changed = (action.call.role, None) if is_sharded(action.layout) else at
                    copies[changed] = (*copies[changed], action.call.name)
    return seen


def test_every_call_sees_the_parameters_that_it_would_see_in_one_process():
    """Check invariant 1 also for graphs that use a role after training it."""
    rng = random.Random(3)
    for _ in range(150):
        graph, _, homes, actions = _compile(rng)
        alone = ExecutionPlan({call.name: CallPlan(RANK_0) for call in graph.calls})
        one = home_layouts(graph, alone, ROLES)
        expected = _versions_seen(compile_actions(graph, alone, ROLES, one, SPECS), one)
        assert _versions_seen(actions, homes) == expected


def test_a_role_with_two_homes_or_without_a_call_is_refused():
    train = [FunctionCall(n, "train_step", ("x",), role="actor") for n in ("first", "second")]
    graph = DataflowGraph(tuple(train), ("x",))
    layouts = {"first": CallPlan(Layout.parse("d2@0-1")), "second": CallPlan(Layout.parse("t2@0-1"))}
    with pytest.raises(ValueError, match="'actor' has two homes: first at d2@0-1 and second at t2@0-1"):
        home_layouts(graph, ExecutionPlan(layouts), {"actor": ROLES["actor"]})
    with pytest.raises(ValueError, match="role 'critic' has no call"):
        home_layouts(graph, ExecutionPlan(layouts), {"critic": ROLES["critic"]})


RATE = 0.3


def _follow(world, task, out):
    """Run two steps of GRPO whose reference follows the actor, in different layouts; export both roles."""
    experiment = make_experiment("grpo", task)
    actor = experiment.actor
    experiment.ref = Role(actor.model, dtype="float64", random_init=True, follows="actor", follow_rate=RATE)
    calls = {"actor_generate": "d4@0-3", "ref_forward": "p2@2-3", "actor_train": "d2t2@0-3"}
    plan = ExecutionPlan({name: CallPlan(Layout.parse(layout)) for name, layout in calls.items()})
    program = compile_program(experiment, plan, world_size=4)
    context = HostContext(str(task))
    loader = Loader(
        experiment.dataset,
        keys=program.graph.inputs,
        tokenizer=context.tokenizer,
        group_size=experiment.group_size,
        seed=0,
    )
    store = ModelStore(world, program)
    executor = Executor(
        RankState(world, store, context),
        PartsProgram(program.parts, program.plan, loader.batch, experiment.group_size))
    for step in range(3):
        for role in ("actor", "ref"):
            store.export(role, out / f"{role}_{step}")
        if step < 2:
            executor.begin_step()
            executor.run("step", range(step * 6, step * 6 + 6))
    world.control.barrier()


def test_a_follower_is_the_moving_average_of_its_leader(pool, tmp_path):
    pool.run(_follow, write_task(tmp_path), tmp_path)
    weights = {p.name: load_file(p / "model.safetensors") for p in tmp_path.glob("*_[0-9]")}
    for name, average in weights["actor_0"].items():
        assert torch.equal(weights["ref_0"][name], average), name
        for step in (1, 2):
            assert not torch.equal(weights[f"actor_{step}"][name], weights[f"actor_{step - 1}"][name]), name
            average = RATE * weights[f"actor_{step}"][name] + (1 - RATE) * average
            torch.testing.assert_close(
                weights[f"ref_{step}"][name], average, rtol=1e-12, atol=1e-14, msg=name
            )
