"""Rollouts: the turns of a generating call with environments. Imports no torch.

A turn of the model goes as a message to the sample's environment, and what this answers comes back as the
tokens that the chat template writes for it. What a rollout has become is a JSON object in the column
`rollout`: `turns` (start and stop of each turn's tokens in the sequence, rewards by name, seconds of the
environment), `stop` (why it has ended; None: it goes on in the next round), `messages`, `metrics`, `seconds`,
`dropped` and, if its environment has failed, a `sentence`.

| state of a rollout | it waits for | what ends it |
|---|---|---|
| starting | its environment's start, then those of its group | `_started`, `_set_start` |
| told again | its new environment, which hears the `record` | `_tell_next` at its end, or `_differs` |
| speaking | the model, which has a row in the generation (`has_row`) | `turn_ended` |
| answered | its environment, which has the model's turn | `_observe`, or `_end` if it is done |
| stopping | its environment's last rewards; it has reached a limit (`stop`) | `_end` |
| resting | the next round, in the middle of a turn (`open_turn`) | `resume` |
| ended | nothing | |
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from realhf.calls import (
    Beginning,
    EnvironmentReplies,
    Observation,
    SampleId,
    TurnSettings,
    TurnSource,
    TurnSourceFactory,
)
from realhf.data.dataset import column_of
from realhf.data.light_tokenizer import LightTokenizer
from realhf.data.order import prompt_of
from realhf.data.rows import json_form
from realhf.environments.protocol import (
    FAILURES,
    ChatMessage,
    Environment,
    Start,
    StopReason,
    Turn,
    prompt_messages,
    rollout_seed,
)
from realhf.environments.tool_calls import AnswerParser
from realhf.environments.turn_tokens import TemplateProof, TurnTokens, call_end, prove_append_only
from realhf.environments.workers import EnvironmentKey, EnvironmentWorkers, Reply, source_of
from realhf.errors import UserError, shown, warn


class WorkerPool:
    """The workers of a process, which are started when the first rollouts begin, and its chat template."""

    def __init__(self) -> None:
        self._workers: EnvironmentWorkers | None = None
        self.template: Template | None = None
        self.unfinished: dict[SampleId, _Rollout] = {}
        """Sample -> its rollout, if this process has its environment and a round has left it unfinished."""
        self._num_keys = 0

    def get(self, environment: Environment) -> EnvironmentWorkers:
        """Return the workers, all of the same environment."""
        if self._workers is None:
            self._workers = EnvironmentWorkers(environment, source_of(environment))
        return self._workers

    def new_key(self) -> EnvironmentKey:
        """Return a key for another environment of this process."""
        self._num_keys += 1
        return EnvironmentKey(self._num_keys)

    def close_left(self) -> None:
        """Close the environments of unfinished rollouts, which go on elsewhere."""
        assert self._workers is not None or not self.unfinished
        for rollout in self.unfinished.values():
            assert self._workers is not None
            self._workers.close(rollout.key)
        self.unfinished = {}


@dataclass(frozen=True)
class EnvironmentTurnSourceFactory(TurnSourceFactory):
    """The setting of a generating call whose samples are answered in turns with an Environment."""

    environment: Environment
    tokenizer: str  # Directory of the tokenizer, whose chat template writes the messages.
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    group_size: int = 1  # Samples of each prompt, which start alike.
    pool: WorkerPool = field(default_factory=WorkerPool, compare=False, repr=False)

    def most_tokens(self, max_new_tokens: int) -> int:
        return self.environment.max_tokens or max_new_tokens

    def most_drawn(self, max_new_tokens: int) -> int:
        environment = self.environment
        return min(environment.max_turns * max_new_tokens, environment.max_tokens or sys.maxsize)

    def start(
        self, rows: Mapping[SampleId, Mapping[str, Any]], settings: TurnSettings,
        *, unfinished: Mapping[SampleId, tuple[list[int], dict[str, Any]]] | None = None,
    ) -> EnvironmentTurnSource:
        environment = self.environment
        if environment.max_tokens is None and settings.num_positions is None:
            raise UserError(
                "environment.max_tokens must be a number, as the model's config has no "
                "max_position_embeddings")
        self._check_workers(rows, settings)
        template = self.pool.template = self.pool.template or Template(
            LightTokenizer(self.tokenizer), self.template_arguments, settings.eos_token_ids,
            keeps_thinking=environment.keep_thinking, ends_at_call=environment.ends_at_call)
        source = EnvironmentTurnSource(environment, self.pool, template, settings)
        for sample, (tokens, document) in (unfinished or {}).items():
            source.resume(sample, tokens, document, self._seed(sample, settings.seed))
        for sample, row in rows.items():
            columns = {column_of(key): value for key, value in row.items()}
            if columns.get("prompt") == "":  # That of a row that has none.
                del columns["prompt"]
            source.start(
                sample, columns, self._seed(sample, settings.seed),
                group=sample if environment.own_start else prompt_of(sample, self.group_size))
        if settings.budget is not None:  # Others are evaluations, or of runs without rounds.
            self.pool.close_left()
        return source

    def _seed(self, sample: SampleId, run_seed: int) -> int:
        return rollout_seed(
            run_seed, step=0, prompt=prompt_of(sample, self.group_size), sample=sample % self.group_size,
            own_start=self.environment.own_start)

    def _check_workers(self, rows: Mapping[SampleId, Any], settings: TurnSettings) -> None:
        """Raise UserError if samples that begin together, and stay, need more processes than there are."""
        workers = self.environment.workers
        if not self.environment.isolated or workers is None:
            return
        groups = Counter(prompt_of(sample, self.group_size) for sample in rows)
        if settings.budget is not None or settings.waits_for_all:
            needed = len(rows)
            which = "the samples of a rank, all of which are at work together in rounds or if deterministic"
        else:
            needed = 1 if self.environment.own_start else max(groups.values(), default=1)
            which = "the samples of a prompt, which start together"
        if workers < needed:
            rule = f"with isolated, it must be None or at least {needed}, {which}"
            raise UserError(f"environment.workers is {workers}: {rule}")


class Template:
    """A chat template, with the tokens and the parser of each set of tools."""

    def __init__(
        self, tokenizer: LightTokenizer, arguments: Mapping[str, Any], eos_token_ids: Collection[int],
        *, keeps_thinking: bool, ends_at_call: bool = False,
    ) -> None:
        self._keeps_thinking = keeps_thinking
        self._ends_at_call = ends_at_call
        self._proofs: dict[bool, TemplateProof] = {}
        self._tokenizer = tokenizer
        self._arguments = arguments
        self._eos_token_ids = eos_token_ids
        self._by_tools: dict[str, tuple[TurnTokens, AnswerParser]] = {}

    def with_tools(self, tools: Sequence[Any]) -> tuple[TurnTokens, AnswerParser]:
        """Return what writes and what reads the turns of rollouts with these tools.

        Raises UserError if the template is not append-only.
        """
        key = json.dumps(tools, sort_keys=True)
        if key not in self._by_tools:
            self.proof(uses_tools=bool(tools))
            if self._ends_at_call and tools and call_end(self._tokenizer, self._arguments) is None:
                raise UserError(
                    "environment.ends_at_call is True: the chat template must write a tag such as "
                    "</tool_call> after each call, and does not; leave it out")
            turns = TurnTokens(
                self._tokenizer, arguments=self._arguments, tools=tools, eos_token_ids=self._eos_token_ids)
            self._by_tools[key] = turns, AnswerParser(self._tokenizer, tools)
        return self._by_tools[key]


    def proof(self, *, uses_tools: bool) -> TemplateProof:
        """Return what trying the template has shown. Raises UserError if it is not append-only."""
        if uses_tools not in self._proofs:
            proof = prove_append_only(
                self._tokenizer, arguments=self._arguments, uses_tools=uses_tools,
                eos_token_ids=self._eos_token_ids)
            for fault in proof.faults(keep_thinking=self._keeps_thinking):
                raise UserError(fault)
            self._proofs[uses_tools] = proof
        return self._proofs[uses_tools]


@dataclass
class _Record:
    """The record of a rollout from an earlier round, which its environment is now told again."""

    tokens: list[int]
    turns: list[dict[str, Any]]
    open_turn: int | None
    seconds: float


@dataclass
class _Rollout:
    """The messages of a sample and its environment, and its tokens so far."""

    sample: SampleId
    key: EnvironmentKey
    row: Mapping[str, Any]
    turns: TurnTokens
    parse: AnswerParser
    group: int | None = None
    """Samples of one group begin together."""
    messages: list[ChatMessage] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_start: int = 0
    """Tokens before the first turn."""
    prefix: list[int] = field(default_factory=list)
    """The tokens of the start, or of the last observation."""
    limit: int = 0
    """Most tokens after the start."""
    open_turn: int | None = None
    """Where a turn begins that goes on in the next round."""
    num_left_in_round: int | None = None
    """Tokens that the model may still draw in this round; None: as many as it likes."""
    num_calls: int = 0
    spans: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    stop: StopReason | None = None
    sentence: str = ""
    dropped: bool = False
    has_row: bool = False
    """Whether the generation of this round has its tokens."""
    record: _Record | None = None
    """What is still to be told again; None: nothing."""

    @property
    def num_left(self) -> int:
        return self.limit - (len(self.tokens) - self.num_start)

    @property
    def turn_start(self) -> int:
        """The place where the turn begins that the model is in, or that comes next."""
        return len(self.tokens) if self.open_turn is None else self.open_turn

    def note(self, turn: Turn, seconds: float) -> None:
        """Add what an environment has answered to the last turn."""
        last = self.spans[-1]
        named = turn.rewards if isinstance(turn.reward, dict) or turn.reward else {}
        for name, reward in named.items():
            last["rewards"][name] = last["rewards"].get(name, 0.0) + reward
        last["seconds"] += seconds
        for name, value in turn.metrics.items():
            self.metrics.setdefault(name, []).append(value)

    def give_up_replay(self) -> None:
        """Take what has been recorded as all that there is."""
        assert self.record is not None
        self.tokens = self.record.tokens
        self.spans = self.record.turns
        self.seconds = self.record.seconds
        if self.record.open_turn is not None:
            self.spans.append(_span(self.record.open_turn, len(self.tokens)))
        self.record = None
        self.open_turn = None

    def as_document(self) -> dict[str, Any]:
        """Return what the column of rollouts has."""
        document = {
            "turns": self.spans, "stop": self.stop, "messages": self.messages,
            "metrics": {name: fmean(values) for name, values in self.metrics.items()},
            "seconds": self.seconds, "dropped": self.dropped, "sentence": self.sentence}
        if self.stop is None:  # It goes on in the next round.
            document |= {
                "row": json_form(self.row, as_text=True), "num_start": self.num_start,
                "open_turn": self.open_turn}
        return document


def _span(start: int, stop: int) -> dict[str, Any]:
    return {"start": start, "stop": stop, "rewards": {}, "seconds": 0.0}


class EnvironmentTurnSource(TurnSource):
    """The rollouts of one replica in one generation, or in one round of it.

    A rollout that a round leaves unfinished goes on in the next one. If this process has its environment, as
    it usually has, nothing more is needed. Otherwise the run has been resumed, or the sample is on another
    rank now: then a new environment is started, and told again what the model has said so far. If it answers
    otherwise than is recorded, the rollout ends with `replay_differs`.
    """

    def __init__(
        self, environment: Environment, pool: WorkerPool, template: Template, settings: TurnSettings
    ) -> None:
        self._environment = environment
        self._pool = pool
        self._workers = pool.get(environment)
        self._template = template
        self._settings = settings
        self._rollouts: dict[SampleId, _Rollout] = {}
        self._by_key: dict[EnvironmentKey, _Rollout] = {}
        self._not_started: dict[int, set[SampleId]] = {}
        """Group -> its samples whose environments have not started."""
        self._waiting: set[SampleId] = set()
        self._beginnings: list[Beginning] = []
        self._observations: list[Observation] = []
        self._to_tell: deque[tuple[_Rollout, list[int]]] = deque()
        """Turns that are told again."""
        self.is_silent = False
        """Whether nothing is printed of rollouts that fail, as the first one is otherwise."""
        self._num_answers = 0
        self._seconds = 0.0
        self.end_token_ids = template.with_tools(())[0].end_token_ids

    @property
    def num_samples(self) -> int:
        return len(self._rollouts)

    def start(self, sample: SampleId, row: Mapping[str, Any], seed: int, *, group: int) -> None:
        """Start the environment of a sample."""
        self._not_started.setdefault(group, set()).add(sample)
        self._start_anew(sample, row, seed).group = group

    def resume(self, sample: SampleId, tokens: list[int], document: dict[str, Any], seed: int) -> None:
        """Continue a rollout of an earlier round, of which these are the tokens and what is recorded."""
        live = self._pool.unfinished.pop(sample, None)
        if live is not None and live.tokens == tokens:
            self._add(live)
            live.has_row = False
            live.num_left_in_round = self._settings.budget
            self._begin_row(live)
            return
        if live is not None:
            self._workers.close(live.key)
        rollout = self._start_anew(sample, document["row"], seed)
        rollout.record = _Record(tokens, document["turns"], document["open_turn"], document["seconds"])
        rollout.num_start = document["num_start"]

    def _start_anew(self, sample: SampleId, row: Mapping[str, Any], seed: int) -> _Rollout:
        rollout = _Rollout(
            sample, self._pool.new_key(), row, *self._template.with_tools(()),
            num_left_in_round=self._settings.budget)
        self._add(rollout)
        self._workers.start(rollout.key, row, seed)
        return rollout

    def _add(self, rollout: _Rollout) -> None:
        self._rollouts[rollout.sample] = rollout
        self._by_key[rollout.key] = rollout
        self._waiting.add(rollout.sample)

    def tokens(self, sample: SampleId) -> list[int]:
        """Return the tokens of a sample so far."""
        return self._rollouts[sample].tokens

    def calls(self, sample: SampleId) -> dict[str, list[int]]:
        """Return for each tool of a sample the tokens of a call with made-up arguments.

        A tool is left out if the chat template does not show how it is called.
        """
        rollout = self._rollouts[sample]
        found = {}
        for call in rollout.parse.made_up_calls():
            text = rollout.turns.call_text(call)
            if text is not None and rollout.parse(text).message.get("tool_calls"):
                found[call["function"]["name"]] = rollout.turns.encode(text)
        return found

    def notes(self) -> tuple[str, ...]:
        """Return sentences about what may surprise in the chat template."""
        return self._template.proof(uses_tools=False).notes

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def method_seconds(self) -> tuple[float, int]:
        return self._seconds, self._num_answers

    def poll(self, timeout: float) -> EnvironmentReplies:
        if not self._waiting:
            return EnvironmentReplies()
        deadline = time.monotonic() + timeout
        while True:
            has_arrived = bool(self._beginnings or self._observations)
            left = 0.0 if has_arrived else max(0.0, deadline - time.monotonic())
            for reply in self._workers.poll(left):
                if (rollout := self._by_key.get(reply.key)) is not None:
                    self._take(rollout, reply)
            while self._to_tell:
                self._pass_on(*self._to_tell.popleft())
            if self._beginnings or self._observations or time.monotonic() >= deadline:
                break
        arrived = EnvironmentReplies(tuple(self._beginnings), tuple(self._observations))
        self._beginnings = []
        self._observations = []
        self._waiting.difference_update(arrived.samples)
        return arrived

    def _take(self, rollout: _Rollout, reply: Reply) -> None:
        """Take what an environment has answered."""
        rollout.seconds += reply.seconds
        self._seconds += reply.seconds
        self._num_answers += 1
        if reply.kind == "start":
            assert reply.start is not None
            self._started(rollout, reply.start)
        elif reply.kind == "turn":
            assert reply.turn is not None
            rollout.note(reply.turn, reply.seconds)
            if rollout.record is not None and self._differs(rollout, [], is_done=reply.turn.done):
                return
            if rollout.stop is not None or reply.turn.done:  # `finish` has answered, or it is done.
                rollout.stop = rollout.stop or "done"
                self._end(rollout)
            else:
                assert isinstance(reply.turn.messages, list)
                self._observe(rollout, reply.turn.messages)
        elif reply.kind == "end":
            self._fail(rollout, reply)

    def _started(self, rollout: _Rollout, start: Start) -> None:
        rollout.turns, rollout.parse = self._template.with_tools(list(start.tools))
        assert isinstance(start.messages, list)
        rollout.messages = list(start.messages)
        tokens = rollout.turns.start(rollout.messages)
        limits = [self._environment.max_tokens]
        if self._settings.num_positions is not None:
            limits.append(self._settings.num_positions - len(tokens))
        rollout.limit = min(limit for limit in limits if limit is not None)
        if rollout.record is not None:
            self._tell_next(rollout, tokens)
            return
        if rollout.limit < 1:
            self._workers.close(rollout.key)
            rollout.stop = "context_full"
            rollout.dropped = True
            self._give_up(rollout)
            return
        self._set_start(rollout, tokens)

    def _give_up(self, rollout: _Rollout) -> None:
        """Let a sample without a start draw a single token, which nothing is learned from."""
        try:
            messages = prompt_messages(rollout.row)
        except UserError:
            messages = [{"role": "user", "content": "-"}]
        tokens = rollout.turns.start(messages)
        if self._settings.num_positions is not None:
            tokens = tokens[: self._settings.num_positions - 1]
        rollout.limit = 1
        self._set_start(rollout, tokens)

    def _set_start(self, rollout: _Rollout, tokens: list[int]) -> None:
        """Let a group begin when all of its environments have started. Equal starts share their pages."""
        rollout.num_start = len(tokens)
        rollout.tokens = list(tokens)
        rollout.prefix = tokens
        assert rollout.group is not None
        missing = self._not_started[rollout.group]
        missing.discard(rollout.sample)
        if missing:
            return
        ready = sorted(
            (r for r in self._rollouts.values() if r.group == rollout.group and not r.has_row),
            key=lambda r: r.sample)
        together: dict[tuple[int, ...], list[_Rollout]] = {}
        for member in ready:
            together.setdefault((member.limit, *member.tokens), []).append(member)
        for members in together.values():
            self._begin_row(members[0], [member.sample for member in members])
            for member in members:
                member.has_row = True

    def _begin_row(self, rollout: _Rollout, samples: Sequence[SampleId] = ()) -> None:
        """Let the model go on with a row that is new to the generation, for this sample or for several."""
        rollout.has_row = True
        self._beginnings.append(Beginning(
            list(samples) or [rollout.sample], [*rollout.tokens], self._limit(rollout), rollout.limit,
            num_before=rollout.turn_start - rollout.num_start,
            num_drawn=len(rollout.tokens) - rollout.turn_start))

    def _turn_limit(self, rollout: _Rollout) -> int:
        """Return the most tokens of the turn in which the model is, or of the next one."""
        after_start = rollout.turn_start - rollout.num_start
        return min(self._settings.max_new_tokens, rollout.limit - after_start)

    def _limit(self, rollout: _Rollout) -> int:
        """Return the most tokens that the model draws now; 0: it goes on in the next round, or not at all."""
        if rollout.stop is not None and rollout.spans:
            return 0
        left = self._turn_limit(rollout) - (len(rollout.tokens) - rollout.turn_start)
        in_round = rollout.num_left_in_round
        return left if in_round is None else min(left, in_round)

    def turn_ended(self, sample: SampleId, tokens: list[int], *, finished: bool) -> None:
        rollout = self._rollouts[sample]
        self._waiting.add(sample)
        if rollout.num_left_in_round is not None:
            rollout.num_left_in_round -= len(tokens)
        whole = [*rollout.tokens[rollout.turn_start :], *tokens]
        if finished or len(whole) == self._turn_limit(rollout):
            del rollout.tokens[rollout.turn_start :]
            self._pass_on(rollout, whole)
            return
        rollout.open_turn = rollout.turn_start  # The round ends before the turn does.
        rollout.tokens += tokens
        self._observations.append(Observation(sample, []))

    def _pass_on(self, rollout: _Rollout, tokens: list[int]) -> None:
        """Pass a turn of the model on to its environment."""
        rollout.open_turn = None
        start = len(rollout.tokens)
        rollout.tokens += tokens
        rollout.spans.append(_span(start, len(rollout.tokens)))
        if rollout.stop is not None:  # It has failed at its start.
            self._observations.append(Observation(rollout.sample, []))
            return
        text = rollout.turns.answer_text(tokens)
        answer = rollout.parse(text, prefix=rollout.turns.text(rollout.prefix), first_call=rollout.num_calls)
        rollout.num_calls += len(answer.message.get("tool_calls", ()))
        rollout.messages.append(answer.message)
        if answer.is_sound:
            self._workers.step(rollout.key, answer.message)
        elif self._environment.on_parse_error == "end":
            self._stop(rollout, "parse_error")
        else:
            self._observe(rollout, answer.replies())

    def _observe(self, rollout: _Rollout, messages: list[ChatMessage]) -> None:
        """Continue a rollout with messages of its environment, or stop it if it has reached a limit."""
        if len(rollout.spans) >= self._environment.max_turns:
            self._stop(rollout, "max_turns")
            return
        tokens = rollout.turns.observation(
            messages, answer=rollout.messages[-1], last_token=rollout.tokens[-1])
        if rollout.num_left <= len(tokens):
            own_limit = self._environment.max_tokens
            self._stop(rollout, "max_tokens" if rollout.limit == own_limit else "context_full")
            return
        rollout.messages += messages
        if rollout.record is not None:
            self._tell_next(rollout, tokens)
            return
        rollout.tokens += tokens
        rollout.prefix = tokens
        self._observations.append(Observation(rollout.sample, tokens, self._limit(rollout)))

    def _tell_next(self, rollout: _Rollout, tokens: list[int]) -> None:
        """Go on telling again: after these tokens comes a recorded turn, or the end of the record."""
        record = rollout.record
        assert record is not None
        if self._differs(rollout, tokens):
            return
        rollout.tokens += tokens
        rollout.prefix = tokens
        number = len(rollout.spans)
        if number < len(record.turns):
            turn = record.turns[number]
            self._to_tell.append((rollout, record.tokens[turn["start"] : turn["stop"]]))
            return
        rollout.seconds = record.seconds
        rollout.tokens = list(record.tokens)
        rollout.spans = record.turns
        rollout.open_turn = record.open_turn
        rollout.record = None
        self._begin_row(rollout)

    def _differs(self, rollout: _Rollout, tokens: list[int], *, is_done: bool = False) -> bool:
        """Return whether an environment has answered otherwise than is recorded, and end its rollout then."""
        record = rollout.record
        assert record is not None
        number = len(rollout.spans)
        start = len(rollout.tokens)
        stop = record.turns[number]["start"] if number < len(record.turns) else record.open_turn
        recorded = record.tokens[start : len(record.tokens) if stop is None else stop]
        what = ""
        if is_done:
            what = "is done, and was not"
        elif tokens and tokens != recorded:
            now, before = (shown(rollout.turns.text(answer)) for answer in (tokens, recorded))
            what = f"has answered {now}, and before {before}"
        elif number and rollout.spans[-1]["rewards"] != record.turns[number - 1]["rewards"]:
            now, before = rollout.spans[-1]["rewards"], record.turns[number - 1]["rewards"]
            what = f"has given the rewards {now}, and before {before}"
        if not what:
            return False
        self._workers.close(rollout.key)
        self._end_badly(rollout, "replay_differs", (
            f"it was started again and told what the model had said, and {what} (turn {number}): "
            "its steps must follow from the row, the seed and the messages"))
        return True

    def _stop(self, rollout: _Rollout, reason: StopReason) -> None:
        """Stop a rollout before its environment is done, which may still give a reward."""
        if rollout.record is not None:
            self._differs(rollout, [], is_done=True)
            return
        rollout.stop = reason
        self._workers.finish(rollout.key, reason)

    def _fail(self, rollout: _Rollout, reply: Reply) -> None:
        """Note that an environment has failed."""
        assert reply.stop is not None
        self._end_badly(rollout, reply.stop, reply.sentence)

    def _end_badly(self, rollout: _Rollout, stop: StopReason, sentence: str) -> None:
        """End a rollout whose environment has failed. Raises UserError if that ends the run."""
        rollout.stop = stop
        rollout.sentence = sentence
        what = f"the environment of sample {rollout.sample} has ended with {stop}: {sentence}"
        on_failure = self._environment.on_failure
        if on_failure == "stop":
            raise UserError(f"{what} (environment.on_failure is 'stop')")
        rollout.dropped = stop in FAILURES and on_failure == "drop"
        if not self.is_silent:
            self.is_silent = True
            then = "it is dropped with its group" if rollout.dropped else "it has the rewards so far"
            warn(f"{what}; {then}")
        if rollout.record is not None:
            rollout.give_up_replay()
        if not rollout.tokens:
            self._give_up(rollout)
        else:
            self._end(rollout)

    def _end(self, rollout: _Rollout) -> None:
        if rollout.has_row:
            self._observations.append(Observation(rollout.sample, []))
        else:
            self._begin_row(rollout)

    def results(self, samples: Sequence[SampleId]) -> tuple[list[dict[str, Any]], list[bool]]:
        rollouts = [self._rollouts[sample] for sample in samples]
        unfinished = {rollout.sample: rollout for rollout in rollouts if rollout.stop is None}
        assert self._settings.budget is not None or not unfinished, "all rollouts have ended"
        self._pool.unfinished |= unfinished
        documents = [rollout.as_document() for rollout in rollouts]
        return documents, [rollout.stop in ("done", "max_turns") for rollout in rollouts]


def play(
    factory: EnvironmentTurnSourceFactory, row: Mapping[str, Any], said: str, settings: TurnSettings,
    *, tool: str = "",
) -> dict[str, Any]:
    """Return a rollout in which a stub always says the same text; with `tool`, it calls this tool first.

    It also has its `tokens`, the `start` of them, which the model reads first, `notes` about the chat
    template, and `calls`: for each tool the tokens of a call with made-up arguments.
    """
    sample = SampleId(0)
    source = factory.start({sample: row}, settings)
    source.is_silent = True
    start: list[int] = []
    calls: dict[str, list[int]] = {}
    (end,) = sorted(source.end_token_ids)[:1]
    answer = [*LightTokenizer(factory.tokenizer).encode(said, add_special_tokens=False), end]
    while source.num_waiting:
        arrived = source.poll(1.0)
        for group in arrived.beginnings:
            start = list(group.tokens)
            calls = source.calls(sample)
        limits = [group.limit for group in arrived.beginnings] + [turn.limit for turn in arrived.observations]
        for limit in filter(None, limits):
            tokens = [*calls[tool], end] if tool and arrived.beginnings else answer
            source.turn_ended(sample, tokens[:limit], finished=len(tokens) <= limit)
    (rollout,), _ = source.results([sample])
    return rollout | {
        "notes": source.notes(), "start": start, "tokens": source.tokens(sample), "calls": calls}
