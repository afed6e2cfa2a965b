"""Step programs over random parts in an independent simulator: order of messages, deadlocks, versions.

Each rank has a main thread and a thread for reallocations, and the simulator runs them in random order. It
knows how the runtime waits, and nothing of tensors: a parameter set is the list of its updates, and a sample
is the number of the operation that has made it.
"""

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
import pytest

from realhf.calls import HostFunction
from realhf.execution_plan import CallPlan, ExecutionPlan, home_layouts
from realhf.experiment import Experiment, lagged_parts
from realhf.graph import DataflowGraph, FunctionCall
from realhf.models.param_spec import is_sharded
from realhf.runtime.compile.actions import (
    Reallocate,
    Receive,
    Redistribute,
    Send,
    compile_parts,
    outside_producers,
)
from realhf.runtime.compile.step_trial import checked_parts
from realhf.runtime.weights.reallocations import CopyVersions
from realhf.steps.sample_pool import Samples
from tests.runtime.test_actions import ROLES, SPECS, WORLD_SIZE, _deposits, _random_case, _random_layout


@dataclass
class Toy(Experiment):
    """An experiment without models. Its step is `program`, if there is one."""

    given_parts: Any = None
    program: Any = None

    def parts(self, graph):
        return self.given_parts

    def step(self, run):
        (self.program or super().step)(run)


@dataclass
class Case:
    """A graph in parts under a plan, and the operations of a run, as all ranks execute them."""

    graph: DataflowGraph
    plan: ExecutionPlan
    experiment: Toy
    operations: list[tuple] = field(default_factory=list)

    def __post_init__(self):
        self.homes = home_layouts(self.graph, self.plan, self.roles)
        self.parts = compile_parts(
            self.graph, self.plan, self.roles, self.homes, SPECS, self.experiment.given_parts,
            in_rounds=self.experiment.num_rounds > 1)
        checked_parts(self.experiment, self.graph)
        self._record()

    @property
    def roles(self):
        used = {call.role for call in self.graph.calls}
        return {name: role for name, role in ROLES.items() if name in used}

    def _record(self):
        experiment = self.experiment
        runner = experiment.step_runner(self.graph, _Recorder(self.operations))
        for step in range(1, experiment.steps + 1):
            self.operations.append(("begin", step, step == experiment.steps))
            for _ in range(1 + (experiment.max_lag if step == 1 else 0)):
                with runner.one_step():
                    experiment.step(runner)

    def seen_by_one_process(self):
        """Return for each run of a call its operation, its updates so far, and what has made its inputs."""
        updates = {role: () for role in self.roles}
        made: dict[tuple, int] = {}
        live: list[list] = []
        seen = []
        for kind, part, *rest in self.operations:
            if kind != "run":
                continue
            prompts, operation, _ = rest
            for call in (call for call in self.graph.order if call.name in self.experiment.given_parts[part]):
                producers = {self._producer(key) for key in call.inputs}
                inputs = {name: tuple(made.get((name, p), 0) for p in prompts) for name in producers}
                seen.append((operation, call.name, updates.get(call.role), inputs))
                complete = prompts
                if call.kind == "generate" and self.experiment.num_rounds > 1:
                    live += [[prompts, 0]] if prompts else []
                    for batch in live:
                        batch[1] += 1
                    ended = [batch for batch in live if batch[1] == self.experiment.num_rounds]
                    live = [batch for batch in live if batch not in ended]
                    complete = tuple(p for batch, _ in ended for p in batch)
                made |= {(call.name, p): operation for p in complete}
                if call.kind == "train_step":
                    updates[call.role] = (*updates[call.role], call.name)
                    for name, role in self.roles.items():
                        if role.follows == call.role:
                            updates[name] = (*updates[name], updates[call.role])
        return seen

    def _producer(self, key):
        producer = self.graph.producer(key)
        return None if producer is None else producer.name


class _Recorder:
    """A PartExecutor that keeps the operations."""

    def __init__(self, operations):
        self.operations = operations

    def run(self, part, prompts, *, operation, sent, updates, state):
        for i, (kind, *what) in enumerate(self.operations):
            if kind == "send" and what[-1] is None and what[0] == part:
                self.operations[i] = (kind, *what[:-1], operation)  # It is received by this operation.
        self.operations.append(("run", part, tuple(prompts), operation, frozenset(sent)))

    def send(self, part, prompts, producers):
        self.operations.append(("send", part, tuple(prompts), frozenset(producers), None))

    def passed(self, call, operation):
        self.operations.append(("read", call, operation))
        return [prompt for prompt in range(1000) if prompt % 3]

    def decision(self, call, operation):
        self.operations.append(("read", call, operation))
        return True

    def forget(self, prompts):
        pass

    def note(self, number, text, digest):
        pass

    def log(self, metric, value):
        pass


class Stuck(Exception):
    """The error that no thread of any rank can go on."""


class Simulator:
    """Compiles a Case into a list of instructions for each rank, and executes those of all ranks."""

    def __init__(self, case: Case, rng: random.Random, *, open_steps: int = 4) -> None:
        self.case = case
        self.rng = rng
        self.open_steps = open_steps
        self.main: list[list[tuple]] = [[] for _ in range(WORLD_SIZE)]
        trained = {name for name, role in case.roles.items() if role.optimizer is not None}
        sharded = [(name, case.homes[name]) for name in trained if is_sharded(case.homes[name])]
        self.versions = CopyVersions(list(case.homes.items()), list(case.homes), sharded=sharded)
        actions = [action for part in case.parts.values() for action in part]
        self.trains = any(isinstance(action, Reallocate) and action.ahead for action in actions)
        self.is_last = False
        self.meetings = 0
        self._generate()
        self._reset()

    # What each rank does.

    def _generate(self):
        self.index = 0
        for kind, *what in self.case.operations:
            if kind == "begin":
                self.is_last = what[1]
                self._all(("begin", what[0]))
            elif kind == "send":
                part, prompts, producers, operation = what
                for action in outside_producers(self.case.parts[part]):
                    if action.producer in producers:
                        self._send(action, prompts, operation)
            elif kind == "read":
                self._all(("read", tuple(what), self.case.plan[what[0]].layout.result_ranks))
            else:
                self._run_part(*what)

    def _all(self, instruction, ranks=range(WORLD_SIZE)):
        for rank in ranks:
            self.main[rank].append(instruction)

    def _run_part(self, part, prompts, operation, sent):
        for action in self.case.parts[part]:
            if isinstance(action, Reallocate):
                self._reallocate(action)
            elif isinstance(action, Send):
                if action.producer not in sent:
                    self._send(action, prompts, operation)
            elif isinstance(action, Receive):
                sources = [(send.producer, _deposits(send), send.tag) for send in action.sends]
                self._receive(action.call.name, sources, action.target, action.tag, prompts, operation)
            elif isinstance(action, Redistribute):
                sources = [("unfinished", [(head, head) for head in action.layout.result_ranks], None)]
                self._receive(action.call.name, sources, action.layout, action.tag, (), operation)
            else:
                self._run(action, prompts, operation)

    def _send(self, action, prompts, operation):
        for head, depot in _deposits(action):
            if head != depot:
                what = (operation, action.call.name, action.producer)
                self.main[head].append(("send", depot, action.tag, ("deposit", *what), prompts))

    def _receive(self, call, sources, target, tag, prompts, operation):
        """Every holder of samples tells the ids to all ranks of the target, and then sends them samples."""
        holders = [{depot for _, depot in deposits} for _, deposits, _ in sources]
        for rank in target.ranks:
            peers = [peer for peer in target.ranks if peer != rank]
            program = self.main[rank]
            for producer, deposits, source_tag in sources:
                what = (operation, call, producer)
                for head, depot in deposits:
                    if depot == rank:
                        program.append(("own", what, prompts) if head == rank else
                                       ("receive", head, source_tag, ("deposit", *what)))
            everyone = set().union(*holders)
            if rank in everyone:
                program += [("send", peer, tag, ("header", operation, call), None) for peer in peers]
            tellers = sorted(everyone - {rank})
            program += [("receive", peer, tag, ("header", operation, call)) for peer in tellers]
            for (producer, *_), those in zip(sources, holders, strict=True):
                message = ("data", operation, call, producer)
                if rank in those:
                    program += [("send", peer, tag, message, "inputs") for peer in peers]
            for (producer, *_), those in zip(sources, holders, strict=True):
                message = ("data", operation, call, producer)
                program += [("receive", peer, tag, message) for peer in those if peer != rank]

    def _run(self, action, prompts, operation):
        call, layout = action.call, action.layout
        if call.kind == "train_step":
            self._all(("finish", call.role, None))
        elif call.role is not None:
            self._all(("finish", call.role, layout), layout.ranks)
        self.meetings += 1
        what = (action, prompts, operation)
        self._all(("meet", frozenset(layout.ranks), self.meetings, what), layout.ranks)
        if call.kind == "host" and call.work is not None:
            self._all(("post", (call.name, operation)), layout.result_ranks)
        if call.kind == "train_step":
            self.versions.count_update((call.role, self.case.homes[call.role]))

    def _reallocate(self, action):
        if action.ahead and self.is_last:
            return
        if action.follow_rate is not None:
            self._all(("finish", action.target_set, None))
        is_new = self.versions.begin(action)
        ranks = {*action.source.ranks, *action.target.ranks}
        if is_new:
            self.meetings += 1
            self._all(("start", frozenset(ranks), self.meetings, action), ranks)
        if not action.ahead and (is_new or not self.trains):
            self._all(("finish", action.target_set, action.target))

    # How it is executed.

    def _reset(self):
        self.position = [0] * WORLD_SIZE
        self.queues: list[deque] = [deque() for _ in range(WORLD_SIZE)]
        self.running: list[dict] = [{} for _ in range(WORLD_SIZE)]
        self.wires: dict[tuple, deque] = defaultdict(deque)
        self.step = [0] * WORLD_SIZE
        self.arrived: dict[int, set] = defaultdict(set)
        self.met: set[int] = set()
        self.posted: set[tuple] = set()
        self.inputs: list[dict] = [{} for _ in range(WORLD_SIZE)]
        self.made: list[dict] = [{} for _ in range(WORLD_SIZE)]
        self.live: list[list] = []
        self.seen: list[tuple] = []
        self.contents: list[dict] = [{} for _ in range(WORLD_SIZE)]
        for role, home in self.case.homes.items():
            for rank in home.ranks:
                self.contents[rank] |= {(role, home): (), (role, None): ()}

    def execute(self) -> list[tuple]:
        """Execute everything and return what the calls have seen; raise Stuck or AssertionError on faults."""
        kinds = (self._step_main, self._step_thread)
        threads = [(step, rank) for rank in range(WORLD_SIZE) for step in kinds]
        moved = True
        while moved:
            moved = False
            self.rng.shuffle(threads)
            for step, rank in threads:
                for _ in range(self.rng.choice([1, 3, 30])):
                    if not step(rank):
                        break
                    moved = True
        at = {rank: self.main[rank][i] for rank, i in enumerate(self.position) if i < len(self.main[rank])}
        if at or any(self.queues):
            raise Stuck(at)
        assert not any(self.wires.values()), "messages that nobody takes"
        assert not any(self.inputs)
        return sorted(self.seen, key=lambda entry: entry[0])

    def _step_thread(self, rank):
        if not self.queues[rank]:
            return False
        ranks, number, action = self.queues[rank][0]
        if not self._meet(rank, ranks, number, lambda: self._copy(action)):
            return False
        self.queues[rank].popleft()
        return True

    def _step_main(self, rank):
        program = self.main[rank]
        if self.position[rank] == len(program):
            return False
        kind, *what = program[self.position[rank]]
        if getattr(self, f"_do_{kind}")(rank, *what):
            self.position[rank] += 1
            return True
        return False

    def _do_begin(self, rank, step):
        old = (sent for (sender, *_), wire in self.wires.items() if sender == rank for sent, *_ in wire)
        if any(sent <= step - self.open_steps for sent in old):
            return False
        self.step[rank] = step
        return True

    def _do_send(self, rank, peer, tag, message, what):
        content = what
        if message[0] == "deposit":
            content = self._samples(rank, message[3], what)
        elif message[0] == "data":
            content = self.inputs[rank][message[1:]]
        self.wires[rank, peer, tag].append((self.step[rank], message, content))
        return True

    def _do_receive(self, rank, peer, tag, message):
        if not self.wires[peer, rank, tag]:
            return False
        _, taken, content = self.wires[peer, rank, tag].popleft()
        assert taken == message, "a message meant for another action was received"
        if message[0] != "header":
            self._take(rank, message[1:], content)
        return True

    def _do_own(self, rank, what, prompts):
        self._take(rank, what, self._samples(rank, what[2], prompts))
        return True

    def _take(self, rank, what, content):
        assert self.inputs[rank].setdefault(what, content) == content, "two holders have different samples"

    def _samples(self, rank, producer, prompts):
        return tuple(self.made[rank].get((producer, prompt), 0) for prompt in prompts)

    def _do_start(self, rank, ranks, number, action):
        target = (action.target_set, action.target)
        assert target not in self.running[rank], "a copy is updated twice at once"
        self.running[rank][target] = number
        self.queues[rank].append((ranks, number, action))
        return True

    def _do_finish(self, rank, name, layout):
        waited = [copy for copy in self.running[rank] if copy[0] == name and layout in (None, copy[1])]
        if not all(self.running[rank][copy] in self.met for copy in waited):
            return False
        for copy in waited:
            del self.running[rank][copy]
        return True

    def _do_post(self, rank, what):
        self.posted.add((rank, what))
        return True

    def _do_read(self, rank, what, heads):
        return all((head, what) in self.posted for head in heads)

    def _do_meet(self, rank, ranks, number, what):
        return self._meet(rank, ranks, number, lambda: self._call(*what))

    def _meet(self, rank, ranks, number, effect):
        self.arrived[number].add(rank)
        if self.arrived[number] == ranks and number not in self.met:
            self.met.add(number)
            effect()
        return number in self.met

    def _call(self, action, prompts, operation):
        """Let all ranks of a layout run a call at once."""
        call, layout = action.call, action.layout
        given = []
        for rank in layout.ranks:
            keys = [key for key in self.inputs[rank] if key[:2] == (operation, call.name)]
            taken = {key[2]: self.inputs[rank].pop(key) for key in keys}
            taken.pop("unfinished", None)
            given.append((self.contents[rank].get((call.role, layout)) if call.role else None, taken))
        assert all(one == given[0] for one in given), "ranks of one call have different weights or samples"
        self.seen.append((operation, call.name, *given[0]))
        for rank in layout.result_ranks:
            self.made[rank] |= {(call.name, prompt): operation for prompt in self._completed(call, prompts)}
        self._count_round(call, prompts)
        if call.kind == "train_step":
            assert layout == self.case.homes[call.role]
            key = (call.role, None if is_sharded(layout) else layout)
            for rank in layout.ranks:
                self.contents[rank][key] = (*self.contents[rank][key], call.name)

    def _completed(self, call, prompts):
        if call.kind != "generate" or self.case.experiment.num_rounds == 1:
            return prompts
        last = self.case.experiment.num_rounds - 1
        return [prompt for batch, rounds in self.live if rounds == last for prompt in batch]

    def _count_round(self, call, prompts):
        if call.kind == "generate" and self.case.experiment.num_rounds > 1:
            batches = [*self.live, *([(prompts, 0)] if prompts else [])]
            aged = [(batch, rounds + 1) for batch, rounds in batches]
            self.live = [one for one in aged if one[1] < self.case.experiment.num_rounds]

    def _copy(self, action):
        key = (action.source_set, None if action.sharded else action.source)
        sources = [self.contents[rank].get(key) for rank in action.source.ranks]
        assert None not in sources and len(set(sources)) == 1, "the source of a copy changes while it is read"
        for rank in action.target.ranks:
            held = self.contents[rank]
            target = (action.target_set, action.target)
            held[target] = sources[0] if action.follow_rate is None else (*held[target], sources[0])


def _cut(rng, graph):
    """Return the calls of a graph in a random number of parts, none of which needs a later one."""
    priority = {call.name: rng.random() for call in graph.calls}
    order = list(nx.lexicographical_topological_sort(graph.nx_graph, key=priority.get))
    cuts = sorted(rng.sample(range(1, len(order)), rng.randint(0, min(3, len(order) - 1))))
    pieces = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    return {f"part{i}": tuple(piece) for i, piece in enumerate(pieces)}


class RandomProgram:
    """A step program that runs parts on random samples whose inputs exist, again and again."""

    def __init__(self, rng, graph, parts, *, lag):
        self.rng = rng
        self.graph = graph
        self.lag = lag
        self.parts = parts
        part_of = {name: part for part, names in parts.items() for name in names}
        edges = ((part_of[a], part_of[b]) for a, b in graph.nx_graph.edges)
        self.needs = {part: set() for part in parts}
        for a, b in edges:
            if a != b:
                self.needs[b].add(a)
        self.born: dict[int, int] = {}
        self.begun: set[int] = set()
        self.done: dict[str, set[int]] = {part: set() for part in parts}

    def __call__(self, run):
        rng = self.rng
        for _ in range(rng.randint(0, 2)):
            new = run.prompts(rng.randint(1, 3))
            self.born |= dict.fromkeys(new.prompts if new else (), run.number)
        for _ in range(rng.randint(2, 6)):
            part = rng.choice(list(self.parts))
            samples = self._choose(run, part, ())
            if samples and rng.random() < 0.4:
                run.send(part, samples)
                between = rng.choice(list(self.parts))
                if between != part:
                    self._run(run, between, self._choose(run, between, samples.prompts))
            self._run(run, part, samples)

    def _choose(self, run, part, without):
        """Return samples on which the part can run."""
        ready = [
            prompt for prompt, born in self.born.items()
            if run.number - born <= self.lag and prompt not in without
            and all(prompt in self.done[other] for other in self.needs[part])]
        if any(self.graph[name].kind == "generate" for name in self.parts[part]):
            ready = [prompt for prompt in ready if prompt not in self.begun]
        if not ready:
            return None
        return Samples(tuple(sorted(self.rng.sample(ready, self.rng.randint(1, len(ready))))))

    def _outdate(self, part, prompts):
        """Forget that parts which need this one, directly or not, have run on the prompts."""
        for later in (other for other, needed in self.needs.items() if part in needed):
            self.done[later] -= prompts
            self._outdate(later, prompts)

    def _run(self, run, part, samples):
        if any(self.graph[name].kind == "generate" for name in self.parts[part]):
            self.begun |= set(samples.prompts if samples else ())
        done = run(part, samples)
        self._outdate(part, set(samples.prompts if samples else ()))
        self.done[part] |= set(done.prompts if done else ())
        for name in self.parts[part]:
            work = self.graph[name].work
            if done and samples and work is not None and self.rng.random() < 0.5:
                if work.decides:
                    assert run.agree(name)
                else:
                    run.pool("p").add(samples, where=name)
                    run.pool("p").drop(max_age=-1)


def random_case(rng):
    """Return a random program on random parts of a random graph."""
    graph, plan = _random_case(rng)
    works = [HostFunction(print, filters=True), HostFunction(print, decides=True), None]
    graph = graph.replace(*(
        FunctionCall(c.name, c.kind, c.inputs, c.outputs, c.role, rng.choice(works))
        for c in graph.of_kind("host")))
    parts = _cut(rng, graph)
    lag = rng.randint(0, 4)
    generating = [call.name for call in graph.of_kind("generate")]
    together = [names for names in parts.values() if not set(generating).isdisjoint(names)]
    has_rounds = len(generating) == 1 and not {*graph.nx_graph.successors(*generating)} & set(together[0])
    rounds = rng.choice([max(1, lag), lag + 1]) if has_rounds else 1
    program = RandomProgram(rng, graph, parts, lag=lag)
    return Case(graph, plan, Toy(
        steps=rng.randint(2, 7), max_lag=lag, rounds=rounds, given_parts=parts, program=program))


LEARNING = DataflowGraph(
    (
        FunctionCall("generate", "generate", ("prompt",), ("ids",), "actor"),
        FunctionCall("ref", "forward", ("ids",), ("ref_logp",), "ref"),
        FunctionCall("old", "forward", ("ids",), ("old_logp",), "average"),
        FunctionCall("values", "forward", ("ids",), ("values",), "critic"),
        FunctionCall("proximal", "forward", ("ids",), ("logp",), "actor"),
        FunctionCall("judge", "host", ("ids", "answer"), ("score",), work=HostFunction(print, filters=True)),
        FunctionCall("mix", "host", ("score", "ref_logp", "values"), ("advantage",)),
        FunctionCall("actor_train", "train_step", ("ids", "advantage", "logp", "old_logp"), (), "actor"),
        FunctionCall("critic_train", "train_step", ("ids", "score"), (), "critic"),
    ),
    ("prompt", "answer"),
)


def lagged_case(rng, lag, rounds):
    """Return a run of the usual program of a lag, under a random plan."""
    homes = {role: _random_layout(rng) for role in ("actor", "critic")}
    plans = {}
    for call in LEARNING.calls:
        layout = _random_layout(rng, host=call.kind == "host")
        if call.kind == "train_step" or rng.random() < 0.2:
            layout = homes.get(call.role, layout)
        plans[call.name] = CallPlan(layout)
    parts = lagged_parts(LEARNING) if lag else {"step": tuple(call.name for call in LEARNING.order)}
    return Case(LEARNING, ExecutionPlan(plans), Toy(
        steps=rng.randint(1, 7), batch_size=2, max_lag=lag, rounds=rounds, given_parts=parts))


def check(case, rng):
    """Execute a case, and compare what its calls see with one process."""
    seen = Simulator(case, rng, open_steps=rng.randint(1, 4)).execute()
    expected = case.seen_by_one_process()
    assert sorted(seen, key=repr) == sorted(expected, key=repr)


def test_random_programs_of_random_parts():
    rng = random.Random(1)
    num_runs = num_sends = num_reads = num_rounds = 0
    for _ in range(70):
        case = random_case(rng)
        kinds = [kind for kind, *_ in case.operations]
        num_runs += kinds.count("run")
        num_sends += kinds.count("send")
        num_reads += kinds.count("read")
        num_rounds += case.experiment.num_rounds > 1
        check(case, rng)
    assert num_runs > 500 and num_sends > 100 and num_reads > 30 and num_rounds > 2


@pytest.mark.parametrize("lag", range(9))
def test_lagged_programs(lag):
    rng = random.Random(lag)
    for rounds in sorted({max(1, lag), lag + 1}):
        for _ in range(2):
            check(lagged_case(rng, lag, rounds), rng)


def test_tags_tell_all_actions_of_all_parts_apart():
    rng = random.Random(5)
    for _ in range(50):
        case = random_case(rng)
        actions = [action for part in case.parts.values() for action in part]
        tags = [action.tag for action in actions if isinstance(action, Send | Receive | Redistribute)]
        assert len(set(tags)) == len(tags)
        for call in case.graph.calls:
            (receive,) = (a for a in actions if isinstance(a, Receive) and a.call == call)
            keys = [key for send in receive.sends for key in send.keys]
            assert sorted(keys) == sorted(call.inputs)
            assert set(receive.sends) == {a for a in actions if isinstance(a, Send) and a.call == call}
            assert receive.filtered == any(
                case.graph[name].work is not None and case.graph[name].work.filters
                for name in nx.ancestors(case.graph.nx_graph, call.name))


def _instructions(simulator, kind):
    """Return (rank, index, instruction) for each instruction of a kind, in random order."""
    found = [
        (rank, i, instruction) for rank, program in enumerate(simulator.main)
        for i, instruction in enumerate(program) if instruction[0] == kind
    ]
    simulator.rng.shuffle(found)
    return found


def test_a_missing_send_is_found():
    rng = random.Random(2)
    for _ in range(25):
        simulator = Simulator(lagged_case(rng, 2, 2), rng)
        rank, i, _ = _instructions(simulator, "send")[0]
        del simulator.main[rank][i]
        with pytest.raises((Stuck, AssertionError)):
            simulator.execute()


@pytest.mark.parametrize("kind", ["meet", "start"])
def test_swapped_operations_of_one_rank_are_found(kind):
    """Swap two calls, or two reallocations, in which two ranks take part."""
    rng = random.Random(3)
    found = 0
    for _ in range(40):
        simulator = Simulator(lagged_case(rng, 1, 1), rng)
        steps = _instructions(simulator, kind)
        pairs = [
            (rank, i, j) for rank, i, (_, ranks, *_) in steps for other, j, (_, others, *_) in steps
            if rank == other and i < j and len(ranks & others) > 1
        ]
        if not pairs:
            continue
        found += 1
        rank, i, j = rng.choice(pairs)
        program = simulator.main[rank]
        program[i], program[j] = program[j], program[i]
        with pytest.raises((Stuck, AssertionError)):
            simulator.execute()
    assert found > 10


def test_swapped_parts_of_one_rank_are_found():
    """Run the parts `score` and `rollout` of one step in another order on one rank."""
    rng = random.Random(4)
    found = 0
    for _ in range(20):
        case = lagged_case(rng, 1, 1)
        simulator = Simulator(case, rng)
        runs = [i for i, (kind, part, *_) in enumerate(case.operations) if kind == "run" and part != "train"]
        i, j = runs[-2:]
        case.operations[i], case.operations[j] = case.operations[j], case.operations[i]
        other = Simulator(case, rng)
        rank = rng.randrange(WORLD_SIZE)
        simulator.main[rank] = other.main[rank]
        try:
            assert sorted(simulator.execute(), key=repr) == sorted(case.seen_by_one_process(), key=repr)
        except (Stuck, AssertionError):
            found += 1
    assert found > 10


def test_a_train_step_that_does_not_wait_for_copies_in_flight_is_found():
    rng = random.Random(6)
    found = 0
    for _ in range(30):
        simulator = Simulator(lagged_case(rng, 2, 2), rng)
        for program in simulator.main:
            program[:] = [step for step in program if step[0] != "finish" or step[2] is not None]
        try:
            simulator.execute()
        except (Stuck, AssertionError):
            found += 1
    assert found > 5
