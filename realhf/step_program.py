"""The control flow of a step, which every rank executes alike: parts of the graph, lag, pools, agreements.

`Experiment.step(run)` says which part runs on which samples; `run` is a StepRunner. It sees no data, so all
ranks take the same way. Free of torch.
"""

import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from realhf.errors import UserError, described, user_line
from realhf.graph import DataflowGraph
from realhf.part_executor import Json, PartExecutor, Samples


class StepRunner:
    """The argument of `Experiment.step`: runs parts, hands out prompts, keeps pools, and agrees on values.

    Each rank has one, and all execute the same operations. So `step` may depend on the experiment's fields,
    `number`, `state`, `updates`, `agree`, and sizes of pools, and on nothing else: not on the rank, the time,
    files, environment variables or random numbers that are not in `state`.
    """

    def __init__(
        self, graph: DataflowGraph, parts: Mapping[str, Sequence[str]], executor: PartExecutor,
        *, num_rounds: int = 1, max_lag: int = 0, steps: int, seed: int = 0,
    ) -> None:  # fmt: skip
        self.number = 0
        """Calls of `step` before this one."""
        self.state: dict[str, Json] = {}
        """JSON values that the experiment keeps from step to step; checkpoints hold them."""
        self._graph = graph
        self._parts = parts
        self._part_of = {call: part for part, calls in parts.items() for call in calls}
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
        self._live: list[tuple[tuple[int, ...], int]] = []
        """Batches whose answers are unfinished, each with the rounds that it has had."""
        self._done: dict[str, set[int]] = {part: set() for part in parts}
        """The prompts on which each part has run to its end."""
        self._last_run: dict[str, tuple[int, tuple[int, ...]]] = {}
        """Part -> its last operation in this step, and the prompts on which it ran."""
        self._sent: dict[str, tuple[tuple[int, ...], frozenset[str | None]]] = {}
        self._expires: dict[int, int] = {}
        """Prompt -> the last step that may use its samples, unless a pool has them."""
        self._started: dict[int, int] = {}
        """Prompt -> updates of the (first) generating role before its generation."""
        self._generator = next(iter(graph.of_kind("generate")), None)
        self._updates = {call.role: 0 for call in graph.calls if call.role is not None}
        self._pools: dict[str, Pool] = {}

    def prompts(self, n: int) -> Samples | None:
        """Return the next `n` prompts of the dataset, with `group_size` samples each.

        In the last `max_lag` calls of `step` it is None: nothing would train on what begins there.
        """
        if n < 1:
            raise UserError(f"run.prompts({n}): the number must be at least 1")
        if self._max_lag and self.number >= self._steps:
            return None
        first = self._num_prompts
        self._num_prompts += n
        prompts = tuple(range(first, first + n))
        self._batches[self._num_batches] = prompts
        self._num_batches += 1
        self._expires |= dict.fromkeys(prompts, self.number + self._max_lag)
        self._next(f"take {_named(prompts)}")
        return Samples(prompts)

    def batch(self, i: int) -> Samples | None:
        """Return what the i-th call of `prompts` has returned, counted from 0; None if `i` is negative.

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

        Else they are sent where the part runs, that is after anything that this rank runs before. The part
        must run on the same samples in the same step, and before it no part whose outputs were sent.
        """
        self._require_part(part)
        if not samples:
            return
        self._require_kept(samples.prompts)
        if part in self._sent:
            raise UserError(f"run.send({part!r}): what was sent before has to be run first")
        inputs = {key for name in self._parts[part] for key in self._graph[name].inputs}
        outside = {self._producer(key) for key in inputs}.difference(self._parts[part])
        ready = frozenset(
            name for name in outside
            if name is None or self._done[self._part_of[name]].issuperset(samples.prompts)
        )
        self._sent[part] = (samples.prompts, ready)
        self._next(f"send part {part} of {_named(samples.prompts)}")
        self._executor.send(part, samples.prompts, ready)

    def __call__(self, part: str, samples: Samples | None) -> Samples | None:
        """Run a part on samples, and return those that it has completed.

        A part that generates in several rounds begins these samples and continues all unfinished ones; it
        returns the batch that is complete after this round, or None. Other parts return `samples`. With None,
        nothing new begins.
        """
        self._require_part(part)
        prompts = samples.prompts if samples else ()
        sent = self._take_sent(part, prompts)
        self._require_kept(prompts)
        self._require_inputs(part, prompts)
        in_rounds = self._num_rounds > 1 and self._generates(part)
        if in_rounds and prompts:
            self._begin_rounds(part, prompts)
        self._next(f"run part {part} on {_named(prompts)}")
        if not prompts and not (in_rounds and self._live):
            return None
        if self._generates(part):
            self._started |= dict.fromkeys(prompts, self._generator_updates)
        self._last_run[part] = self._operation, prompts
        self._executor.run(
            part, prompts, operation=self._operation, sent=sent, updates=self._updates.copy())
        for name in self._parts[part]:
            call = self._graph[name]
            if call.kind == "train_step" and call.role is not None:
                self._updates[call.role] += 1
        completed = self._finish_round() if in_rounds else prompts
        self._done[part].update(completed)
        return Samples(completed) if completed else None

    def agree(self, call: str) -> Json:
        """Return the decision of a host call (HostFunction with `decides`), whose part has run in this step.

        It is the same on all ranks, which wait for it here. The last run of the part counts.
        """
        operation, _ = self._last_run_of(call, "decides")
        answer = self._executor.decision(call, operation)
        self._next(f"agree {call} {json.dumps(answer, sort_keys=True)}")
        return answer

    def updates(self, role: str) -> int:
        """Return how often a train step of the role has run."""
        if role not in self._updates:
            raise UserError(f"run.updates({role!r}): the roles are {', '.join(self._updates)}")
        return self._updates[role]

    def log(self, metric: str, value: float) -> None:
        """Add a metric to the record of this step; if it is logged several times, the mean counts."""
        self._executor.log(metric, float(value))

    def pool(self, name: str, *, keeps: bool = False) -> "Pool":
        """Return the pool of this name. With `keeps` it is a replay buffer: `take` leaves its samples in."""
        if name not in self._pools:
            self._pools[name] = Pool(self, name, keeps=keeps)
        if self._pools[name].keeps != keeps:
            raise UserError(f"run.pool({name!r}): `keeps` must always be the same")
        return self._pools[name]

    def execute(self, step: Callable[["StepRunner"], None]) -> None:
        """Call `step`, and then forget samples that no later step uses. Only the runtime calls this."""
        try:
            step(self)
        except UserError:
            raise
        except Exception as error:
            if user_line(error) is None:
                raise
            raise UserError(f"step() raised {described(error)}") from error
        self._end_step()

    def _end_step(self) -> None:
        if self._sent:
            part = next(iter(self._sent))
            raise UserError(f"step() has called run.send({part!r}) and then not run({part!r})")
        kept = {prompt for pool in self._pools.values() for prompt in pool.prompts}
        kept.update(*(prompts for prompts, _ in self._live))
        gone = [p for p, last in self._expires.items() if last <= self.number and p not in kept]
        for prompt in gone:
            del self._expires[prompt]
            self._started.pop(prompt, None)
            for done in self._done.values():
                done.discard(prompt)
        self._batches = {i: b for i, b in self._batches.items() if self._expires.keys() >= set(b)}
        self._last_run.clear()
        self._executor.forget(gone)
        state = self._state_as_json()
        self._next(f"end of step {self.number} {state}")
        self.state = json.loads(state)
        self.number += 1

    def _state_as_json(self) -> str:
        """Return `state` as JSON, which turns tuples into lists and keys into text, as a checkpoint does."""
        if not isinstance(self.state, dict):
            raise UserError(f"run.state must be a dict: it is {type(self.state).__name__}")
        try:
            return json.dumps(json.loads(json.dumps(self.state)), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise UserError(f"run.state must hold JSON values only: {error}") from error

    def to_json(self) -> dict[str, Json]:
        """Return the state between two steps, for a checkpoint."""
        return {
            "number": self.number, "state": self.state, "operation": self._operation,
            "digest": self._digest, "num_prompts": self._num_prompts,
            "num_batches": self._num_batches,
            "batches": [[i, list(batch)] for i, batch in self._batches.items()],
            "live": [[list(prompts), rounds] for prompts, rounds in self._live],
            "done": {part: sorted(done) for part, done in self._done.items()},
            "expires": list(self._expires.items()), "started": list(self._started.items()),
            "updates": self._updates,
            "pools": {name: [pool.keeps, list(pool.prompts)] for name, pool in self._pools.items()},
        }  # fmt: skip

    def restore(self, saved: Mapping[str, Json]) -> None:
        """Continue after the step of a checkpoint."""
        self.number = saved["number"]
        self.state = dict(saved["state"])
        self._operation = saved["operation"]
        self._digest = saved["digest"]
        self._num_prompts = saved["num_prompts"]
        self._num_batches = saved["num_batches"]
        self._batches = {i: tuple(batch) for i, batch in saved["batches"]}
        self._live = [(tuple(prompts), rounds) for prompts, rounds in saved["live"]]
        self._done = {part: set(saved["done"].get(part, ())) for part in self._parts}
        self._expires = {prompt: last for prompt, last in saved["expires"]}
        self._started = {prompt: updates for prompt, updates in saved["started"]}
        self._updates |= saved["updates"]
        for name, (keeps, prompts) in saved["pools"].items():
            self.pool(name, keeps=keeps).prompts[:] = prompts

    def _next(self, text: str) -> None:
        """Count an operation, and extend the digest by it."""
        self._operation += 1
        self._digest = hashlib.sha256(f"{self._digest} {text}".encode()).hexdigest()
        self._executor.note(self._operation, text, self._digest)

    def _begin_rounds(self, part: str, prompts: tuple[int, ...]) -> None:
        """Add a batch to the unfinished ones; it has no complete answers from now on."""
        if again := {prompt for batch, _ in self._live for prompt in batch}.intersection(prompts):
            raise UserError(f"step() runs part {part!r} on prompt {min(again)}, which is unfinished")
        self._done[part].difference_update(prompts)
        self._live.append((prompts, 0))

    def _finish_round(self) -> tuple[int, ...]:
        """Count a round of all unfinished batches; return the one that is complete."""
        self._live = [(prompts, rounds + 1) for prompts, rounds in self._live]
        if self._live[0][1] < self._num_rounds:
            return ()
        return self._live.pop(0)[0]

    def _generates(self, part: str) -> bool:
        """Return whether a part has the (first) generating call."""
        return self._generator is not None and self._part_of[self._generator.name] == part

    @property
    def _generator_updates(self) -> int:
        return 0 if self._generator is None else self.updates(self._generator.role or "")

    def _producer(self, key: str) -> str | None:
        producer = self._graph.producer(key)
        return None if producer is None else producer.name

    def _require_part(self, part: str) -> None:
        if part not in self._parts:
            raise UserError(f"step() runs the part {part!r}: there are {', '.join(self._parts)}")

    def _require_kept(self, prompts: Sequence[int]) -> None:
        if gone := [prompt for prompt in prompts if prompt not in self._expires]:
            why = "was not handed out, or its samples were forgotten"
            raise UserError(f"step() uses prompt {gone[0]} in step {self.number}, which {why}")

    def _require_inputs(self, part: str, prompts: Sequence[int]) -> None:
        """Raise UserError unless every part on whose outputs this one depends has run on the samples."""
        for call in (self._graph[name] for name in self._parts[part]):
            for key in call.inputs:
                producer = self._producer(key)
                needed = part if producer is None else self._part_of[producer]
                if needed != part and (lacking := set(prompts) - self._done[needed]):
                    what = f"call {call.name!r} needs the key {key!r} of part {needed!r}"
                    why = f"which has not run on prompt {min(lacking)} or whose samples are forgotten"
                    raise UserError(f"step() runs part {part!r} in step {self.number}: {what}, {why}")

    def _take_sent(self, part: str, prompts: tuple[int, ...]) -> frozenset[str | None]:
        """Return the calls whose outputs for this part have been sent ahead."""
        sent_prompts, producers = self._sent.pop(part, (prompts, frozenset[str | None]()))
        if sent_prompts != prompts:
            raise UserError(f"step() runs part {part!r} on other samples than run.send({part!r}) was given")
        for other, (others, made) in self._sent.items():
            if not made.isdisjoint(self._parts[part]) and not set(others).isdisjoint(prompts):
                raise UserError(f"step() runs part {part!r} after run.send({other!r}) has sent what it made")
        return producers

    def _last_run_of(self, call: str, field: str) -> tuple[int, tuple[int, ...]]:
        """Return the step's last operation that has run a call, whose work must have set `field`, and the
        prompts on which it ran."""
        if call not in self._part_of or not getattr(self._graph[call].work, field, False):
            raise UserError(f"{call!r} is not the name of a HostFunction with {field}=True")
        if self._part_of[call] not in self._last_run:
            raise UserError(f"the part {self._part_of[call]!r} of call {call!r} has not run in this step yet")
        return self._last_run[self._part_of[call]]


def _named(prompts: Sequence[int]) -> str:
    """Return prompts in words, such as "prompts 0 to 31"."""
    if len(prompts) > 2 and list(prompts) == list(range(prompts[0], prompts[-1] + 1)):
        return f"prompts {prompts[0]} to {prompts[-1]}"
    return f"prompts {', '.join(map(str, prompts))}" if prompts else "no new prompts"


class Pool:
    """Samples that wait for use, across steps, in the order in which they came; `len` counts prompts."""

    def __init__(self, run: StepRunner, name: str, *, keeps: bool) -> None:
        self.keeps = keeps
        self.prompts: list[int] = []
        self._run = run
        self._name = name

    def __len__(self) -> int:
        return len(self.prompts)

    def add(self, samples: Samples | None, *, where: str | None = None) -> None:
        """Add samples; with `where`, those prompts of which a filtering host call has kept every sample.

        `where` names a call with `HostFunction(..., filters=True)`; all ranks wait for its answer.
        """
        added = list(samples.prompts if samples else ())
        self._run._require_kept(added)
        if where is not None and added:
            operation, prompts = self._run._last_run_of(where, "filters")
            if others := set(added).difference(prompts):
                what = f"call {where!r} has not run on prompt {min(others)} when it last ran"
                raise UserError(f"run.pool({self._name!r}).add: {what}")
            kept = set(self._run._executor.kept(where, operation))
            added = [prompt for prompt in added if prompt in kept]
        known = set(self.prompts)
        self.prompts += [prompt for prompt in added if prompt not in known]
        self._run._next(f"pool {self._name} adds {_named(added)}")

    def take(self, n: int, *, order: Literal["oldest", "random"] = "oldest") -> Samples | None:
        """Return `n` prompts with their samples, or all if there are fewer; None if there are none.

        A batch that is short is counted in the metric `pool/<name>/missing`. Random choices depend on the
        experiment's seed and on the operation only.
        """
        if n < 1:
            raise UserError(f"run.pool({self._name!r}).take({n}): the number must be at least 1")
        if order not in ("oldest", "random"):
            raise UserError(f"run.pool({self._name!r}).take: order {order!r} is none of oldest, random")
        chosen = self.prompts[:n]
        if order == "random":
            rng = random.Random(f"{self._run._seed}/{self._run._operation}/{self._name}")
            chosen = rng.sample(self.prompts, min(n, len(self.prompts)))
        self._run._next(f"pool {self._name} gives {_named(chosen)}")
        self._run.log(f"pool/{self._name}/missing", n - len(chosen))
        if not self.keeps:
            self._remove(set(chosen))
        return Samples(tuple(sorted(chosen))) if chosen else None

    def drop(self, *, max_age: int) -> int:
        """Remove samples whose generation began more than `max_age` updates ago; return how many prompts."""
        old = {prompt for prompt in self.prompts if self._age(prompt) > max_age}
        self._remove(old)
        self._run._next(f"pool {self._name} drops {_named(sorted(old))}")
        return len(old)

    def _age(self, prompt: int) -> int:
        now = self._run._generator_updates
        return now - self._run._started.get(prompt, now)

    def _remove(self, prompts: set[int]) -> None:
        self.prompts = [prompt for prompt in self.prompts if prompt not in prompts]
        for prompt in prompts:
            self._run._expires[prompt] = max(self._run._expires.get(prompt, 0), self._run.number)
