"""The control flow of a step, which every rank executes alike: parts of the graph, lag, pools, agreements.

`Experiment.step(run)` says which part runs on which samples; `run` is a StepRunner. It sees no data, so that
all ranks run the same parts on the same samples. Free of torch.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import networkx as nx

from realhf.calls import HostFunction, longest_response
from realhf.data.memory_rows import json_state
from realhf.errors import UserError, described, is_users_own
from realhf.graph import DataflowGraph
from realhf.steps.sample_pool import Json, PartExecutor, Pool, SampleLedger, Samples, named
from realhf.user_input.field_types import require_own_name

_MAX_SHOWN = 500
"""The text of an operation shows at most this many characters of `state`."""


class _UnfinishedBatch(NamedTuple):
    """A batch with unfinished responses, and the number of rounds in which they have been continued."""

    prompts: tuple[int, ...]
    rounds: int


class _PartRun(NamedTuple):
    """The operation in which a part has run, and the prompts on which it ran."""

    operation: int
    prompts: tuple[int, ...]


class _SentInputs(NamedTuple):
    """Inputs of a part that were sent ahead: outputs of `producers` (None: the dataset) for `prompts`."""

    prompts: tuple[int, ...] = ()
    producers: frozenset[str | None] = frozenset()


class StepRunner:
    """The argument of `Experiment.step`: runs parts, hands out prompts, keeps pools, and agrees on values.

    Each rank has one, and all execute the same operations. So `step` may depend on the experiment's fields,
    `number`, `state`, `updates`, `agree`, and sizes of pools, and on nothing else: not on the rank, the time,
    files, environment variables or random numbers that are not in `state`.
    """

    def __init__(
        self, graph: DataflowGraph, parts: Mapping[str, Sequence[str]], executor: PartExecutor,
        *, num_rounds: int = 1, max_lag: int = 0, steps: int, seed: int = 0,
    ) -> None:
        self.number = 0
        """Calls of `step` before this one."""
        self.state: dict[str, Json] = {}
        """JSON values that the experiment keeps from step to step; checkpoints hold them."""
        self._graph = graph
        self._parts = parts
        self._part_of = {call: part for part, calls in parts.items() for call in calls}
        self._later_parts = {part: self._parts_after(part) for part in parts}
        self._executor = executor
        self._num_rounds = num_rounds
        self._max_lag = max_lag
        self._steps = steps
        self._seed = seed
        self._operation = 0
        self._digest = ""
        self._num_prompts = 0
        self._num_batches = 0
        self._batches: dict[int, tuple[int, ...]] = {}
        """What `prompts` has returned, by the number of its call, while it is kept."""
        self._unfinished: list[_UnfinishedBatch] = []
        self._last_runs: dict[str, _PartRun] = {}
        """Part -> its last run in this step."""
        self._sent: dict[str, _SentInputs] = {}
        """Part -> its inputs that have been sent ahead."""
        self._ledger = SampleLedger(parts)
        asking = (call.work for call in graph.calls if isinstance(call.work, HostFunction) and call.work.asks)
        asked = (graph[work.asks[0]] for work in asking)
        self._generator = next(iter(graph.of_kind("generate")), next(asked, None))
        """The (first) generating call, or else the first that a host call asks."""
        self._updates = {call.role: 0 for call in graph.calls if call.role is not None}
        self._pools: dict[str, Pool] = {}

    def prompts(self, n: int) -> Samples | None:
        """Return the next `n` prompts of the dataset, with `group_size` samples each.

        In the last `max_lag` calls of `step` it returns None, as the run ends before it could train on more.
        """
        if not isinstance(n, int) or n < 1:
            raise UserError(f"run.prompts({n!r}): it must be a whole number of at least 1")
        if self._max_lag and self.number >= self._steps:
            return None
        first = self._num_prompts
        self._num_prompts += n
        prompts = tuple(range(first, first + n))
        self._batches[self._num_batches] = prompts
        self._num_batches += 1
        self._ledger.begin(prompts, until=self.number + self._max_lag)
        self.count_operation(f"take {named(prompts)}")
        return Samples(prompts)

    def batch(self, i: int) -> Samples | None:
        """Return the samples that call number `i` of `prompts` returned (from 0); None if `i` is negative.

        Samples are kept for `max_lag` further steps.
        """
        if i < 0:
            return None
        if i >= self._num_batches:
            raise UserError(f"run.batch({i}): run.prompts() has been called {self._num_batches} times")
        if i not in self._batches:
            raise UserError(f"run.batch({i}): its samples were forgotten after max_lag steps")
        return Samples(self._batches[i])

    def send(self, part: str, samples: Samples | None) -> None:
        """Start to send a part's inputs, as far as they exist, to the ranks that run it.

        Without this call they are sent only when the part itself runs, after all parts that run before it.
        Later in the same step, the part must run on the same samples. Until then, no part whose outputs have
        been sent may run again.
        """
        self._require_part(part)
        if not samples:
            return
        self._ledger.require(samples.prompts, step=self.number)
        if part in self._sent:
            raise UserError(f"run.send({part!r}): what was sent before has to be run first")
        inputs = {key for name in self._parts[part] for key in self._graph[name].inputs}
        outside = {self._producer(key) for key in inputs}.difference(self._parts[part])
        ready = frozenset(
            name for name in outside
            if name is None or not self._ledger.lacking(self._part_of[name], samples.prompts))
        self._sent[part] = _SentInputs(samples.prompts, ready)
        self.count_operation(f"send part {part} of {named(samples.prompts)}")
        self._executor.send(part, samples.prompts, ready)

    def __call__(self, part: str, samples: Samples | None) -> Samples | None:
        """Run a part on samples, and return those that it has completed.

        A part that generates in several rounds begins these samples (with None, no new ones), continues all
        unfinished ones, and returns the batch that is complete after this round, or None. Other parts return
        `samples`.
        """
        self._require_part(part)
        prompts = samples.prompts if samples else ()
        sent = self._take_sent(part, prompts)
        self._ledger.require(prompts, step=self.number)
        self._require_inputs(part, prompts)
        in_rounds = self._num_rounds > 1 and self._generates(part)  # (Calls that are asked have one round.)
        if in_rounds and prompts:
            self._begin_rounds(part, prompts)
        self.count_operation(f"run part {part} on {named(prompts)}")
        if not prompts and not (in_rounds and self._unfinished):
            return None
        if self._generates(part):
            self._ledger.start(prompts, updates=self.generator_updates)
        self._last_runs[part] = _PartRun(self._operation, prompts)
        self._executor.run(
            part, prompts, operation=self._operation, sent=sent, updates=self._updates.copy(),
            state=self.state)
        for name in self._parts[part]:
            call = self._graph[name]
            if call.kind == "train_step" and call.role is not None:
                self._updates[call.role] += 1
        for later in self._later_parts[part]:  # They ran on outputs that this run has replaced.
            self._ledger.repeat(later, prompts)
        completed = self._finish_round() if in_rounds else prompts
        self._ledger.complete(part, completed)
        return Samples(completed) if completed else None

    def agree(self, call: str) -> Json:
        """Return what a host call (HostFunction with `decides`) decided when its part last ran in this step.

        All ranks wait here for the decision, which is the same on all of them.
        """
        decision = self._executor.decision(call, self._last_run_of(call, "decides").operation)
        self.count_operation(f"agree {call} {json.dumps(decision, sort_keys=True)}")
        return decision

    def updates(self, role: str) -> int:
        """Return how often a train step of the role has run."""
        if role not in self._updates:
            raise UserError(f"run.updates({role!r}): the roles are {', '.join(self._updates)}")
        return self._updates[role]

    def log(self, metric: str, value: float) -> None:
        """Add a metric to the record of this step, which has the mean if this is called several times."""
        self._executor.log(require_own_name(metric, who="run.log"), float(value))

    def pool(self, name: str, *, keeps: bool = False) -> "Pool":
        """Return the pool of this name. With `keeps` it is a replay buffer: `take` leaves its samples in."""
        if name not in self._pools:
            self._pools[name] = Pool(self, name, keeps=keeps)
        if self._pools[name].keeps != keeps:
            raise UserError(f"run.pool({name!r}): `keeps` must always be the same")
        return self._pools[name]

    def pool_sizes(self) -> dict[str, int]:
        """Return how many prompts wait in each pool whose samples leave it when they are taken."""
        return {name: len(pool) for name, pool in self._pools.items() if not pool.keeps}

    @contextmanager
    def one_step(self) -> Iterator[None]:
        """Hold one call of `Experiment.step`, and then forget samples that no later step uses.

        Only the runtime calls this. Raises UserError for an exception of the user's own code.
        """
        try:
            yield
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            if not is_users_own(error, calls=("step_runner.py", "sample_pool.py")):
                raise
            raise UserError(f"step() raised {described(error)}") from error
        self._end_step()

    def _end_step(self) -> None:
        if self._sent:
            part = next(iter(self._sent))
            raise UserError(f"step() has called run.send({part!r}) and then not run({part!r})")
        self._executor.forget(self._ledger.forget(step=self.number))
        self._batches = {
            i: batch for i, batch in self._batches.items() if self._ledger.outlive(batch, step=self.number)}
        self._last_runs.clear()
        state = self._state_as_json()
        shown = state if len(state) <= _MAX_SHOWN else f"{state[:_MAX_SHOWN]}... {_digest(state)}"
        self.count_operation(f"end of step {self.number} {shown}")
        self.state = json.loads(state)
        self.number += 1

    def _state_as_json(self) -> str:
        return json.dumps(json_state(self.state, "run.state"), sort_keys=True)

    def to_json(self) -> dict[str, Json]:
        """Return the state between two steps, for a checkpoint."""
        return {
            "number": self.number, "state": self.state, "operation": self._operation,
            "digest": self._digest, "num_prompts": self._num_prompts, "num_batches": self._num_batches,
            "batches": [[i, list(batch)] for i, batch in self._batches.items()],
            "unfinished": [[list(batch.prompts), batch.rounds] for batch in self._unfinished],
            "ledger": self._ledger.to_json(), "updates": self._updates, "program": self._program,
            "steps": self._steps,
            "pools": {name: [pool.keeps, list(pool.prompts)] for name, pool in self._pools.items()},
        }

    @property
    def _program(self) -> dict[str, Json]:
        """The settings that a run must share with the checkpoint whose samples it takes over, as JSON."""
        return {
            "max_lag": self._max_lag, "rounds": self._num_rounds,
            "sampling.max_new_tokens": longest_response(self._graph),
            "parts": {part: sorted(calls) for part, calls in self._parts.items()},
        }

    def require_continuable(self, saved: Mapping[str, Json]) -> None:
        """Raise UserError if this program cannot go on with the samples of a checkpoint."""
        for name, now in self._program.items():
            before = saved["program"][name]
            if before != now and (name != "sampling.max_new_tokens" or saved["unfinished"]):
                raise UserError(f"{name} is {before} in the checkpoint and {now} now: use {before}")
        if self._steps > saved["steps"] and saved["number"] > saved["steps"]:
            raise UserError(
                f"steps is {self._steps} now, and the checkpoint is of the end of a run of {saved['steps']}: "
                f"with max_lag {self._max_lag} its last steps began no new samples, "
                "so it cannot go on further; resume from an earlier checkpoint")

    @property
    def digest(self) -> str:
        """The digest of all operations so far, which is equal on all ranks between two steps."""
        return self._digest

    def restore(self, saved: Mapping[str, Json]) -> None:
        self.number = saved["number"]
        self.state = dict(saved["state"])
        self._operation = saved["operation"]
        self._digest = saved["digest"]
        self._num_prompts = saved["num_prompts"]
        self._num_batches = saved["num_batches"]
        self._batches = {i: tuple(batch) for i, batch in saved["batches"]}
        self._unfinished = [_UnfinishedBatch(tuple(prompts), n) for prompts, n in saved["unfinished"]]
        self._ledger.restore(saved["ledger"])
        self._updates |= saved["updates"]
        for name, (keeps, prompts) in saved["pools"].items():
            self.pool(name, keeps=keeps).hold(prompts)
        for unfinished in self._unfinished:
            self._ledger.hold(unfinished.prompts)

    def count_operation(self, text: str) -> None:
        """Count an operation, and extend the digest by it. Only pools and this class call this."""
        self._operation += 1
        self._digest = _digest(f"{self._digest} {text}")
        self._executor.note(self._operation, text, self._digest)

    def _begin_rounds(self, part: str, prompts: tuple[int, ...]) -> None:
        """Add a batch to the unfinished ones; until its last round the part counts as not run on it."""
        if again := {prompt for batch in self._unfinished for prompt in batch.prompts}.intersection(prompts):
            raise UserError(f"step() runs part {part!r} on prompt {min(again)}, which is unfinished")
        self._ledger.repeat(part, prompts)
        self._unfinished.append(_UnfinishedBatch(prompts, 0))
        self._ledger.hold(prompts)

    def _finish_round(self) -> tuple[int, ...]:
        """Count a round of all unfinished batches; return the one that is complete."""
        self._unfinished = [_UnfinishedBatch(prompts, rounds + 1) for prompts, rounds in self._unfinished]
        if self._unfinished[0].rounds < self._num_rounds:
            return ()
        complete = self._unfinished.pop(0).prompts
        self._ledger.release(complete)
        return complete

    def _parts_after(self, part: str) -> set[str]:
        """Return the parts that need outputs of a part, directly or through others."""
        later = set().union(*(nx.descendants(self._graph.nx_graph, name) for name in self._parts[part]))
        return {self._part_of[name] for name in later} - {part}

    def _generates(self, part: str) -> bool:
        """Return whether a part has the (first) generating call."""
        return self._generator is not None and self._part_of[self._generator.name] == part

    @property
    def generator_updates(self) -> int:
        """Updates so far of the role that generates; with several, of the first."""
        return 0 if self._generator is None else self.updates(self._generator.role or "")

    @property
    def ledger(self) -> SampleLedger:
        """The samples that exist."""
        return self._ledger

    @property
    def operation_seed(self) -> str:
        """A seed for random choices: the experiment's seed and the operation's number, as on all ranks."""
        return f"{self._seed}/{self._operation}"

    def passed_by(self, call: str, prompts: Sequence[int], pool: str) -> list[int]:
        """Return those prompts whose samples all passed a filtering host call."""
        run = self._last_run_of(call, "filters")
        if others := set(prompts).difference(run.prompts):
            raise UserError(
                f"run.pool({pool!r}).add: call {call!r} has not run on prompt {min(others)} when it last ran")
        passed = set(self._executor.passed(call, run.operation))
        return [prompt for prompt in prompts if prompt in passed]

    def _producer(self, key: str) -> str | None:
        producer = self._graph.producer(key)
        return None if producer is None else producer.name

    def _require_part(self, part: str) -> None:
        if part not in self._parts:
            raise UserError(f"step() runs the part {part!r}: there are {', '.join(self._parts)}")

    def _require_inputs(self, part: str, prompts: Sequence[int]) -> None:
        """Raise UserError unless every part on whose outputs this one depends has run on the samples."""
        for call in (self._graph[name] for name in self._parts[part]):
            for key in call.inputs:
                producer = self._producer(key)
                needed = part if producer is None else self._part_of[producer]
                if needed != part and (lacking := self._ledger.lacking(needed, prompts)):
                    raise UserError(
                        f"step() runs part {part!r} in step {self.number}: "
                        f"call {call.name!r} needs the key {key!r} of part {needed!r}, "
                        f"which has not run on prompt {min(lacking)} or whose samples are forgotten")

    def _take_sent(self, part: str, prompts: tuple[int, ...]) -> frozenset[str | None]:
        """Return the calls whose outputs for this part have been sent ahead."""
        sent = self._sent.pop(part, _SentInputs(prompts))
        if sent.prompts != prompts:
            raise UserError(f"step() runs part {part!r} on other samples than run.send({part!r}) was given")
        for other, under_way in self._sent.items():
            is_made_again = not under_way.producers.isdisjoint(self._parts[part])
            if is_made_again and not set(under_way.prompts).isdisjoint(prompts):
                raise UserError(f"step() runs part {part!r} after run.send({other!r}) has sent what it made")
        return sent.producers

    def _last_run_of(self, call: str, field: Literal["filters", "decides"]) -> _PartRun:
        """Return the step's last run of the part of a call, whose work must have set `field`."""
        hosts = [c for c in self._graph.calls if isinstance(c.work, HostFunction)]
        have = [c.name for c in hosts if getattr(c.work, field)]
        if call not in self._part_of or call not in have:
            legal = f"there are {', '.join(have)}" if have else "there is none"
            raise UserError(f"{call!r} is not the name of a HostFunction with {field}=True: {legal}")
        if self._part_of[call] not in self._last_runs:
            raise UserError(f"the part {self._part_of[call]!r} of call {call!r} has not run in this step yet")
        return self._last_runs[self._part_of[call]]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
