"""Turns: generation with environments, which answer what samples have said while other samples decode.

A sample whose turn has ended parks until its environment has answered; the answer and what the model says
next are a row of their own in the buffer. Nothing waits for an environment as long as some row can run.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from realhf.calls import Beginning, EnvironmentReplies, Observation, SampleId, TurnSource
from realhf.data.batch import Packed
from realhf.distributed.group import Group
from realhf.distributed.process import Report
from realhf.inference.cohort import Cohort
from realhf.inference.response_buffer import ResponseBuffer, Size
from realhf.layout import even_split

_WAIT_SECONDS = 1.0
"""Longest wait for environments after which progress is reported again."""
_SHARED_WAIT_SECONDS = 0.02
"""Longest wait for environments while other ranks of an ep group may have rows to run."""
_GATHERING_SECONDS = 0.02
"""Starts that follow one another within this time begin together, in the same passes."""
_MOST_STEPS = 16
_SHARE = 0.05
"""Ranks of a replica tell one another about answers so often that these wait at most this share of the time
that environments take, and at least once in `_MOST_STEPS` steps."""


class SharedTurnSource(TurnSource):
    """A turn source as all ranks of a replica see it. They call its methods alike.

    One rank has the source itself. In some calls of `poll` it tells the others what has arrived, so
    that all ranks take the same rows up in the same step: whenever nothing runs, and else once in several
    steps, as a message in each would cost time for nothing.
    """

    def __init__(self, group: Group, turn_source: TurnSource | None) -> None:
        """`group` has the ranks of the replica, over gloo."""
        self._group = group
        self._own = turn_source
        own = turn_source
        told: Any = None
        if own is not None:
            told = [own.num_samples, sorted(own.end_token_ids)]
        self._num_samples, self.end_token_ids = self._from_leader(told)
        self._num_waiting = self._num_samples
        self._num_until_next = 0
        """Steps from one message to the next."""
        self._num_steps = 0
        self._told_at = time.monotonic()
        self.num_messages = 0

    def _from_leader(self, document: Any) -> Any:
        return next(told for told in self._group.all_gather_json(document) if told is not None)

    def turn_ended(self, sample: SampleId, tokens: list[int], *, finished: bool) -> None:
        self._num_waiting += 1
        if self._own is not None:
            self._own.turn_ended(sample, tokens, finished=finished)

    def poll(self, timeout: float) -> EnvironmentReplies:
        if not self._num_waiting:
            return EnvironmentReplies()
        self._num_steps += 1
        if timeout == 0.0 and self._num_steps < self._num_until_next:
            return EnvironmentReplies()
        told = None
        if self._own is not None:
            own = self._own.poll(timeout)
            told = [own.beginnings, own.observations, self._steps_between()]
        beginnings, observations, self._num_until_next = self._from_leader(told)
        self._num_steps = 0
        self.num_messages += 1
        arrived = EnvironmentReplies(
            tuple(Beginning(*values) for values in beginnings),
            tuple(Observation(*values) for values in observations))
        self._num_waiting -= len(arrived.samples)
        return arrived

    def _steps_between(self) -> int:
        """Return in how many steps the others are told again, after as long steps as the last ones."""
        now = time.monotonic()
        step_seconds = max(1e-6, (now - self._told_at) / self._num_steps)
        self._told_at = now
        seconds, count = self.method_seconds
        return max(1, min(_MOST_STEPS, int(_SHARE * seconds / max(1, count) / step_seconds)))

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_samples(self) -> int:
        return self._num_samples

    @property
    def method_seconds(self) -> tuple[float, int]:
        return (0.0, 0) if self._own is None else self._own.method_seconds

    def results(self, samples: Sequence[SampleId]) -> tuple[list[dict[str, Any]], list[bool]]:
        assert self._own is not None, "another rank speaks with the environments"
        return self._own.results(samples)


@dataclass
class EnvironmentTime:
    """The time that environments took in a generation of this rank."""

    seconds: float = 0.0
    """The sum over all of their methods, many of which run at once."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """Unix times between which nothing ran, because all rows waited."""

    def waited(self, start: float, stop: float) -> None:
        """Note a wait, which may continue the last one."""
        if self.waits and start - self.waits[-1][1] < 1e-3:
            start, _ = self.waits.pop()
        self.waits.append((start, stop))


Sample = TypeVar("Sample")


class CohortShares:
    """Deals samples to cohorts in the order in which they begin, equally many to each."""

    def __init__(self, num_samples: int, num_cohorts: int) -> None:
        pairs = [even_split(num_samples, num_cohorts, i) for i in range(num_cohorts)]
        self._free = [stop - start for start, stop in pairs]

    def deal(self, samples: Sequence[Sample]) -> list[tuple[int, list[Sample]]]:
        """Return cohorts, by their numbers, and the samples that each gets of a group."""
        dealt = []
        left = list(samples)
        while left:
            number = self._free.index(max(self._free))
            count = min(len(left), self._free[number])
            assert count > 0, "more samples begin than were to be expected"
            dealt.append((number, left[:count]))
            self._free[number] -= count
            left = left[count:]
        return dealt


def first_arrivals(turn_source: TurnSource, report: Report, *, waits_for_all: bool) -> EnvironmentReplies:
    """Wait for the first samples that can begin, and for those that follow at once; or for all."""
    arrived = EnvironmentReplies()
    while turn_source.num_waiting and (waits_for_all or not arrived.beginnings):
        report(f"{turn_source.num_waiting} samples of this rank wait for their environments to start")
        arrived = arrived.and_then(turn_source.poll(_WAIT_SECONDS))
    while turn_source.num_waiting and (more := turn_source.poll(_GATHERING_SECONDS)).samples:
        arrived = arrived.and_then(more)
    return arrived.in_order() if waits_for_all else arrived


def expected_sizes(beginnings: Sequence[Beginning], num_samples: int) -> list[Size]:
    """Return the sizes of all groups of a turn source. Those that have not begun yet are as large as any."""
    sizes = [Size(group.num_start, len(group.samples)) for group in beginnings]
    missing = num_samples - sum(size.num_samples for size in sizes)
    if missing > 0:
        longest = max((size.num_tokens for size in sizes), default=1)
        most = max((size.num_samples for size in sizes), default=1)
        sizes += [Size(longest, most)] * (missing // most)
        sizes += [Size(longest, missing % most)] * (missing % most > 0)
    return sizes


def deal_sizes(sizes: Sequence[Size], num_cohorts: int) -> list[list[Size]]:
    """Return the sizes that each cohort gets if samples of these sizes begin in this order."""
    shares = CohortShares(sum(size.num_samples for size in sizes), num_cohorts)
    dealt: list[list[Size]] = [[] for _ in range(num_cohorts)]
    for size in sizes:
        for number, samples in shares.deal(range(size.num_samples)):
            dealt[number].append(size._replace(num_samples=len(samples)))
    return dealt


def run_turns(
    turn_source: TurnSource, cohorts: Sequence[Cohort], first: EnvironmentReplies, report: Report,
    *, waits_for_all: bool,
) -> EnvironmentTime:
    """Run cohorts until no sample gets more tokens, with what their environments answer meanwhile.

    If it `waits_for_all`, answers are taken up when no row can run and all of them are here:
    then it depends on no timing which rows run together.
    """
    shares = CohortShares(turn_source.num_samples, len(cohorts))
    cohort_of: dict[SampleId, Cohort] = {}
    spent = EnvironmentTime()
    num_turns = 0
    arrived = first
    while True:
        for group in arrived.beginnings:
            for number, samples in shares.deal(group.samples):
                cohorts[number].begin(group._replace(samples=samples))
                cohort_of |= dict.fromkeys(samples, cohorts[number])
        for observation in arrived.observations:
            cohort_of[observation.sample].follow(observation)
        is_running = any([cohort.advance(waits=turn_source.num_waiting > 0) for cohort in cohorts])
        for turn in (turn for cohort in cohorts for turn in cohort.ended_turns()):
            turn_source.turn_ended(turn.sample, turn.tokens, finished=turn.finished)
            num_turns += 1
        report(f"{num_turns} turns, {turn_source.num_waiting} samples wait for their environments")
        if is_running:
            arrived = EnvironmentReplies() if waits_for_all else turn_source.poll(0.0)
        elif turn_source.num_waiting or any(cohort.peers_wait for cohort in cohorts):
            shares_experts = cohorts[0].shares_experts
            arrived = _wait(turn_source, spent, shares_experts=shares_experts, for_all=waits_for_all)
        else:
            break
    for cohort in cohorts:
        cohort.finish()
    spent.seconds, _ = turn_source.method_seconds
    return spent


def _wait(
    turn_source: TurnSource, spent: EnvironmentTime, *, shares_experts: bool, for_all: bool
) -> EnvironmentReplies:
    """Return what has arrived after a while in which no row could run, or all that will arrive."""
    start = time.time()
    timeout = _SHARED_WAIT_SECONDS if shares_experts and not for_all else _WAIT_SECONDS
    arrived = turn_source.poll(timeout)
    while for_all and turn_source.num_waiting:
        arrived = arrived.and_then(turn_source.poll(timeout))
    spent.waited(start, time.time())
    return arrived.in_order() if for_all else arrived


def turn_columns(parts: Sequence[ResponseBuffer], *, wide: torch.dtype) -> tuple[list[SampleId], list]:
    """Return the ids of samples that were answered in turns, their sequences, response masks and log-probs.

    A buffer has each turn as a row of its own, in order. The mask is 1 on tokens that this round has drawn.
    """
    ids: list[SampleId] = []
    sequences, masks, logprobs = [], [], []
    lengths: list[int] = []
    for part in parts:
        count = len(part.prompts)
        tokens_RC, logprobs_RC, inserted_RC = (
            x[:count].cpu() for x in (part.tokens, part.logprobs, part.inserted))
        rows_of: dict[SampleId, list[int]] = {}
        for row, sample in enumerate(part.ids[:count].tolist()):
            rows_of.setdefault(sample, []).append(row)
        for sample, rows in rows_of.items():
            last = rows[-1]
            stop = 1 + int(part.lengths[last])
            tokens_T = torch.cat([torch.tensor(part.prompts[last]), tokens_RC[last, 1:stop]])
            mask_T = torch.zeros(len(tokens_T), dtype=wide)
            logprobs_T = torch.zeros(len(tokens_T), dtype=wide)
            for row in rows:
                start, length = len(part.prompts[row]), int(part.lengths[row])
                mask_T[start : start + length] = (~inserted_RC[row, 1 : 1 + length]).to(wide)
                logprobs_T[start : start + length] = logprobs_RC[row, 1 : 1 + length].to(wide)
            ids.append(sample)
            sequences.append(tokens_T)
            masks.append(mask_T)
            logprobs.append(logprobs_T)
            lengths.append(len(tokens_T))
    nothing = torch.zeros(0, dtype=wide)
    columns = ([nothing.long(), *sequences], [nothing, *masks], [nothing, *logprobs])
    return ids, [Packed(torch.cat(column), lengths) for column in columns]
