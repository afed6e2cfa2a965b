"""Rollouts: the conversations of a generating call with environments, and their rewards. Imports no torch.

A turn of the model goes as a message to the sample's environment, and what this answers comes back as the
tokens that the chat template writes for it. What a rollout has become is a JSON object in the column
`rollout`: `turns` (start and stop of each turn's tokens in the sequence, rewards by name, seconds of the
environment), `stop` (why it has ended), `messages`, `metrics`, `seconds`, `dropped` and, if its environment
has failed, a `sentence`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from types import ModuleType
from typing import TYPE_CHECKING, Any

from realhf.calls import Conversation, Conversations, NextTurn
from realhf.data.dataset import column_of
from realhf.data.light_tokenizer import LightTokenizer
from realhf.data.order import prompt_of
from realhf.environments.protocol import (
    FAILURES,
    STOP_REASONS,
    ChatMessage,
    Environment,
    Start,
    StopReason,
    Turn,
    prompt_messages,
    rollout_seed,
)
from realhf.environments.tool_calls import AnswerParser
from realhf.environments.turn_tokens import TemplateProof, TurnTokens, prove_append_only
from realhf.environments.workers import EnvironmentSource, EnvironmentWorkers, Reply
from realhf.errors import UserError, warn
from realhf.rewards.scoring import RewardCall

if TYPE_CHECKING:
    from realhf.data.batch import Batch

ROLLOUT = "rollout"
"""The key of the column with rollouts."""
_EXPERIMENT = "realhf_experiment_"
"""Beginning of the names of the modules that experiment files are executed as."""


class WorkerPool:
    """The workers of a process, which are started when the first rollouts begin, and its chat template."""

    def __init__(self) -> None:
        self._workers: EnvironmentWorkers | None = None
        self.template: Template | None = None

    def get(self, environment: Environment) -> EnvironmentWorkers:
        """Return the workers, all of the same environment."""
        if self._workers is None:
            self._workers = EnvironmentWorkers(environment, source_of(environment))
        return self._workers


def source_of(environment: Environment) -> EnvironmentSource:
    """Return where worker processes find an environment. Raises UserError if they cannot."""
    make = environment.make
    module_name = getattr(make, "__module__", None) or ""
    name = getattr(make, "__qualname__", "<")
    files = {n: m for n, m in list(sys.modules.items()) if n == "__main__" or n.startswith(_EXPERIMENT)}
    if make is not None and "<" not in name and module_name not in files:
        return EnvironmentSource.of(make)
    if "<" not in name:
        return EnvironmentSource(name, file=files[module_name].__file__)
    own = {tool.__module__: sys.modules[tool.__module__] for tool in environment.tools}
    for name, module in (files | own).items():
        if (attribute := _attribute_of(environment, module)) is not None:
            if name in files:
                return EnvironmentSource(attribute, file=module.__file__)
            return EnvironmentSource(attribute, module=name)
    raise UserError(
        "worker processes must find environment in the experiment's file: give a class of a module, or let "
        "the file have it as `experiment.environment` or as a variable of its own")


def _attribute_of(environment: Environment, module: ModuleType) -> str | None:
    """Return the path of the attribute under which a module has an environment, or its tools alone."""
    for name, value in list(vars(module).items()):
        for path, found in ((name, value), (f"{name}.environment", getattr(value, "environment", None))):
            if isinstance(found, Environment) and (found.make, found.tools) == (
                environment.make, environment.tools):
                return path
        tools = getattr(value, "tools", None)
        if environment.tools and isinstance(tools, list | tuple) and tuple(tools) == environment.tools:
            return f"{name}.tools"
    return None


@dataclass(frozen=True)
class EnvironmentCalls(Conversations):
    """The setting of a generating call whose samples are answered in turns with an Environment."""

    environment: Environment
    tokenizer: str  # Directory of the tokenizer, whose chat template writes the messages.
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    group_size: int = 1  # Samples of each prompt, which start alike.
    pool: WorkerPool = field(default_factory=WorkerPool, compare=False, repr=False)

    def most_tokens(self, max_new_tokens: int) -> int:
        return self.environment.max_tokens or max_new_tokens

    def begin(
        self, rows: Mapping[int, Mapping[str, Any]], *, seed: int, max_new_tokens: int,
        num_positions: int | None, eos_token_ids: Collection[int],
    ) -> Rollouts:
        most = self.environment.max_tokens
        if most is None and num_positions is None:
            raise UserError(
                "environment.max_tokens must be a number, as the model's config has no "
                "max_position_embeddings")
        workers = self.environment.workers
        if self.environment.isolated and workers is not None and workers < len(rows):
            raise UserError(
                f"environment.workers is {workers}: with isolated, it must be None or at least {len(rows)}, "
                "the samples of a rank, as all of them start together")
        template = self.pool.template = self.pool.template or Template(
            LightTokenizer(self.tokenizer), self.template_arguments, eos_token_ids,
            keeps_thinking=self.environment.keep_thinking)
        rollouts = Rollouts(
            self.environment, self.pool.get(self.environment), template, max_new_tokens=max_new_tokens,
            num_positions=num_positions)
        for sample, row in rows.items():
            start_seed = rollout_seed(
                seed, step=0, prompt=prompt_of(sample, self.group_size), sample=sample % self.group_size,
                own_start=self.environment.own_start)
            rollouts.begin(sample, {column_of(key): value for key, value in row.items()}, start_seed)
        return rollouts


class Template:
    """A chat template, with the tokens and the parser of each set of tools."""

    def __init__(
        self, tokenizer: LightTokenizer, arguments: Mapping[str, Any], eos_token_ids: Collection[int],
        *, keeps_thinking: bool,
    ) -> None:
        self._keeps_thinking = keeps_thinking
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
class _Rollout:
    """A conversation and its tokens so far."""

    row: Mapping[str, Any]
    turns: TurnTokens
    parse: AnswerParser
    messages: list[ChatMessage] = field(default_factory=list)
    num_start: int = 0
    """Tokens before the first turn."""
    num_tokens: int = 0
    """All tokens so far."""
    prefix: list[int] = field(default_factory=list)
    """The tokens of the start, or of the last observation."""
    limit: int = 0
    """Most tokens after the start."""
    last_token: int = 0
    num_calls: int = 0
    spans: list[dict[str, Any]] = field(default_factory=list)
    metrics: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    stop: StopReason | None = None
    sentence: str = ""
    dropped: bool = False

    @property
    def num_left(self) -> int:
        return self.limit - (self.num_tokens - self.num_start)

    def note(self, turn: Turn, seconds: float) -> None:
        """Add what an environment has answered to the last turn."""
        last = self.spans[-1]
        named = turn.rewards if isinstance(turn.reward, dict) or turn.reward else {}
        for name, reward in named.items():
            last["rewards"][name] = last["rewards"].get(name, 0.0) + reward
        last["seconds"] += seconds
        for name, value in turn.metrics.items():
            self.metrics.setdefault(name, []).append(value)


class Rollouts(Conversation):
    """The rollouts of one replica in one generation."""

    def __init__(
        self, environment: Environment, workers: EnvironmentWorkers, template: Template,
        *, max_new_tokens: int, num_positions: int | None,
    ) -> None:
        self._environment = environment
        self._workers = workers
        self._template = template
        self._max_new_tokens = max_new_tokens
        self._num_positions = num_positions
        self._rollouts: dict[int, _Rollout] = {}
        self._starting: set[int] = set()
        self._starts: dict[int, list[int]] = {}
        self._waiting: set[int] = set()
        self._ready: list[NextTurn] = []
        """What needs no environment, such as what is said about a wrong tool call."""
        self._has_warned = False
        self.end_token_ids = template.with_tools(())[0].end_token_ids

    def begin(self, sample: int, row: Mapping[str, Any], seed: int) -> None:
        """Start the environment of a sample."""
        self._rollouts[sample] = _Rollout(row, *self._template.with_tools(()))
        self._starting.add(sample)
        self._workers.start(sample, row, seed)

    def notes(self) -> tuple[str, ...]:
        """Return sentences about what may surprise in the chat template."""
        return self._template.proof(uses_tools=False).notes

    def starts(self) -> dict[int, list[int]]:
        while self._starting:
            for reply in self._workers.poll(None):
                if reply.kind == "start":
                    assert reply.start is not None
                    self._start(reply.sample, reply.start, reply.seconds)
                elif reply.kind == "end":
                    self._fail(reply)
                    self._give_up(reply.sample)
        return {sample: self._starts[sample] for sample in self._rollouts}

    def _start(self, sample: int, start: Start, seconds: float) -> None:
        rollout = self._rollouts[sample]
        rollout.turns, rollout.parse = self._template.with_tools(list(start.tools))
        assert isinstance(start.messages, list)
        rollout.messages = list(start.messages)
        rollout.seconds += seconds
        tokens = rollout.turns.start(rollout.messages)
        if self._limit_after(tokens) < 1:
            self._workers.close(sample)
            rollout.stop = "context_full"
            rollout.dropped = True
            self._give_up(sample)
            return
        self._set_start(sample, tokens, self._limit_after(tokens))

    def _give_up(self, sample: int) -> None:
        """Let a sample without a start draw a single token, which nothing is learned from."""
        rollout = self._rollouts[sample]
        try:
            messages = prompt_messages(rollout.row)
        except UserError:
            messages = [{"role": "user", "content": "-"}]
        tokens = rollout.turns.start(messages)
        if self._num_positions is not None:
            tokens = tokens[: self._num_positions - 1]
        self._set_start(sample, tokens, 1)

    def _set_start(self, sample: int, tokens: list[int], limit: int) -> None:
        rollout = self._rollouts[sample]
        rollout.num_start = rollout.num_tokens = len(tokens)
        rollout.prefix = tokens
        rollout.limit = limit
        self._starts[sample] = tokens
        self._starting.discard(sample)

    def _limit_after(self, start: Sequence[int]) -> int:
        """Return the most tokens that may follow a start."""
        limits = [self._environment.max_tokens]
        if self._num_positions is not None:
            limits.append(self._num_positions - len(start))
        return min(limit for limit in limits if limit is not None)

    def first_limit(self, sample: int) -> int:
        return min(self._max_new_tokens, self._rollouts[sample].limit)

    def most_response_tokens(self) -> int:
        return max((rollout.limit for rollout in self._rollouts.values()), default=1)

    def said(self, sample: int, tokens: list[int]) -> None:
        rollout = self._rollouts[sample]
        self._waiting.add(sample)
        start = rollout.num_tokens
        rollout.num_tokens += len(tokens)
        rollout.last_token = tokens[-1]
        rollout.spans.append({"start": start, "stop": rollout.num_tokens, "rewards": {}, "seconds": 0.0})
        if rollout.stop is not None:  # It has failed at its start.
            self._ready.append(NextTurn(sample, []))
            return
        text = rollout.turns.answer_text(tokens)
        answer = rollout.parse(text, prefix=rollout.turns.text(rollout.prefix), first_call=rollout.num_calls)
        rollout.num_calls += len(answer.message.get("tool_calls", ()))
        rollout.messages.append(answer.message)
        if answer.is_sound:
            self._workers.step(sample, answer.message)
        elif self._environment.on_parse_error == "end":
            self._stop(sample, "parse_error")
        else:
            self._observe(sample, answer.replies())

    def poll(self, timeout: float) -> list[NextTurn]:
        if not self._waiting:
            return []
        for reply in self._workers.poll(0.0 if self._ready else timeout):
            rollout = self._rollouts.get(reply.sample)
            if rollout is None:
                continue
            rollout.seconds += reply.seconds
            if reply.kind == "turn":
                assert reply.turn is not None
                rollout.note(reply.turn, reply.seconds)
                if rollout.stop is not None or reply.turn.done:  # `finish` has answered, or it is done.
                    rollout.stop = rollout.stop or "done"
                    self._end(reply.sample)
                else:
                    assert isinstance(reply.turn.messages, list)
                    self._observe(reply.sample, reply.turn.messages)
            elif reply.kind == "end":
                self._fail(reply)
                self._end(reply.sample)
        arrived = self._ready
        self._ready = []
        self._waiting -= {turn.sample for turn in arrived}
        return arrived

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def _observe(self, sample: int, messages: list[ChatMessage]) -> None:
        """Continue a rollout with messages of its environment, or stop it if it has reached a limit."""
        rollout = self._rollouts[sample]
        if len(rollout.spans) >= self._environment.max_turns:
            self._stop(sample, "max_turns")
            return
        tokens = rollout.turns.observation(
            messages, answer=rollout.messages[-1], last_token=rollout.last_token)
        if rollout.num_left <= len(tokens):
            own_limit = self._environment.max_tokens
            self._stop(sample, "max_tokens" if rollout.limit == own_limit else "context_full")
            return
        rollout.messages += messages
        rollout.num_tokens += len(tokens)
        rollout.prefix = tokens
        self._ready.append(NextTurn(sample, tokens, min(self._max_new_tokens, rollout.num_left)))

    def _stop(self, sample: int, reason: StopReason) -> None:
        """Stop a rollout before its environment is done, which may still give a reward."""
        self._rollouts[sample].stop = reason
        self._workers.finish(sample, reason)

    def _fail(self, reply: Reply) -> None:
        """Note that an environment has failed. Raises UserError if that ends the run."""
        assert reply.stop is not None
        rollout = self._rollouts[reply.sample]
        rollout.stop = reply.stop
        rollout.sentence = reply.sentence
        what = f"the environment of sample {reply.sample} has ended with {reply.stop}: {reply.sentence}"
        on_failure = self._environment.on_failure
        if on_failure == "stop":
            raise UserError(f"{what} (environment.on_failure is 'stop')")
        rollout.dropped = reply.stop in FAILURES and on_failure == "drop"
        if not self._has_warned:
            self._has_warned = True
            then = "it is dropped with its group" if rollout.dropped else "it has the rewards so far"
            warn(f"{what}; {then}")

    def _end(self, sample: int) -> None:
        self._ready.append(NextTurn(sample, []))

    def results(self, samples: Sequence[int]) -> tuple[list[dict[str, Any]], list[bool]]:
        rollouts = [self._rollouts[sample] for sample in samples]
        documents = []
        for rollout in rollouts:
            assert rollout.stop is not None, "all rollouts have ended"
            documents.append({
                "turns": rollout.spans, "stop": rollout.stop, "messages": rollout.messages,
                "metrics": {name: fmean(values) for name, values in rollout.metrics.items()},
                "seconds": rollout.seconds, "dropped": rollout.dropped, "sentence": rollout.sentence})
        return documents, [rollout.stop in ("done", "max_turns") for rollout in rollouts]


def play(calls: EnvironmentCalls, row: Mapping[str, Any], said: str, **settings: Any) -> dict[str, Any]:
    """Return a rollout in which a stub always says the same text; `settings` are those of `begin`."""
    rollouts = calls.begin({0: row}, **settings)
    (end,) = sorted(rollouts.end_token_ids)[:1]
    tokens = [*LightTokenizer(calls.tokenizer).encode(said, add_special_tokens=False), end]
    limit = rollouts.starts()[0] and rollouts.first_limit(0)
    while limit:
        rollouts.said(0, tokens[:limit])
        while rollouts.num_waiting:
            limit = next((turn.limit for turn in rollouts.poll(1.0)), limit)
    (rollout,), _ = rollouts.results([0])
    return rollout | {"notes": rollouts.notes()}


class RolloutRewards(RewardCall):
    """A host function that scores rollouts by the rewards of their environments, and by reward functions.

    The score is the sum of all turns' rewards, and of the weighted values of the functions, if there are any.
    """

    @property
    def outputs(self) -> tuple[str, ...]:
        logs = {"reward_metrics"}.union(super().outputs)
        return ("score", "completion", "reward_scores", *sorted(key for key in logs if key in _LOGGED))

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*super().inputs, ROLLOUT)

    def __call__(self, batch: Batch, context: Any) -> dict[str, Any]:
        rollouts = batch[ROLLOUT]
        nothing: list[dict[str, Any]] = [{} for _ in rollouts]
        columns = super().__call__(batch, context)
        by_name = [rewards_by_name(rollout) for rollout in rollouts]
        totals = [math.fsum(rewards.values()) for rewards in by_name]
        totals = [math.nan if r["dropped"] else total for r, total in zip(rollouts, totals, strict=True)]
        columns["score"] = columns["score"] + columns["score"].new_tensor(totals)
        columns["reward_scores"] = [
            {name: None if rollout["dropped"] else value for name, value in own.items()} | others
            for rollout, own, others in zip(rollouts, by_name, columns["reward_scores"], strict=True)]
        logged = columns.get("reward_metrics", nothing)
        columns["reward_metrics"] = [
            rollout_metrics(rollout) | more for rollout, more in zip(rollouts, logged, strict=True)]
        columns.setdefault("reward_extra", nothing)
        return {key: columns[key] for key in self.outputs}


_LOGGED = ("reward_metrics", "reward_extra")


def rewards_by_name(rollout: Mapping[str, Any]) -> dict[str, float]:
    """Return the sums of a rollout's rewards over its turns."""
    sums: dict[str, list[float]] = {}
    for turn in rollout["turns"]:
        for name, reward in turn["rewards"].items():
            sums.setdefault(name, []).append(reward)
    return {name: math.fsum(values) for name, values in sums.items()} or {"environment": 0.0}


def turn_rewards(rollout: Mapping[str, Any], score: float) -> list[float]:
    """Return the reward of each turn of a rollout. What its score has beside these is added to the last."""
    rewards = [math.fsum(turn["rewards"].values()) for turn in rollout["turns"]]
    rewards[-1] += score - math.fsum(rewards)
    return rewards


def rollout_metrics(rollout: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a rollout whose means are logged."""
    stops = {f"environment/stop/{reason}": float(rollout["stop"] == reason) for reason in STOP_REASONS}
    own = {f"environment/{name}": value for name, value in rollout["metrics"].items()}
    return {"environment/turns": float(len(rollout["turns"])), "environment/seconds": rollout["seconds"],
            **own, **stops}
