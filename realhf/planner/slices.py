"""Seconds of calls in plain Python whose environments take turns: those of some slices step while others wait
for answers to their questions.

A round is a step of every environment. In it the process of the call handles each slice in turn: it receives
what the environments have shown, asks, and sends them their actions. So a slice waits for its environments,
then for this process, and for the rank that answers, which is the same process or another one. A round takes
as long as the busiest of these three, or as a slice takes by itself; with one slice, it takes the sum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

_ROUNDS = 40  # Rounds that are played through, of which the first ones are left out.
_FIRST = 8
_USED = 0.8
"""Share of the cores' time that work gets where two processes of a host wait for each other's messages, as 16
slices on two cores had it."""
BUSY = 0.9
"""Share of the cores' time from which the seconds of an environment's step may be a wait for a core."""


class QuestionSeconds(NamedTuple):
    """Seconds of a question to another rank: for its process, for that which answers, and on the way both
    ways."""

    asking: float
    answering: float
    latency: float


class AnswerPlace(NamedTuple):
    """The place of the answers to one rank of a call that asks."""

    messages: QuestionSeconds | None
    """None: this rank answers itself."""
    num_sharing: int = 1
    """The ranks that ask the same one."""
    answers_others: int = 0
    """The other ranks that this one answers."""
    on_host: bool = True
    """Whether the rank that answers uses the cores of this one."""


@dataclass(frozen=True)
class SliceTimes:
    """The measurements of a call with environments in slices, on one rank of a run. Seconds are means."""

    num: int  # Environments.
    num_slices: int  # Their slices in the run.
    rounds: float  # Steps of each environment in a step of the run.
    rest_seconds: float  # Seconds of a step of the run in which no environment steps.
    step_seconds: float  # A step of an environment.
    step_deviation: float  # Its standard deviation.
    step_cpu_seconds: float  # CPU seconds of an environment's process in a step.
    question_seconds: float  # The call's process, for each question, without messages and answers.
    handling_seconds: float  # The same for each environment in a question.
    answers: tuple[tuple[int, float], ...]  # Rows of a question and the seconds of its answer, rising.
    cores: int  # Cores of the host.
    messages: QuestionSeconds | None = None
    """Where another rank answered, what messages took of the two processes."""

    def ring_sizes(self, num_ranks: int = 1) -> list[int]:
        """Return the numbers of slices into which the environments of each of some ranks can be cut."""
        num = max(1, self.num // num_ranks)
        return [n for n in range(1, num + 1) if num % n == 0]

    def best(self, *, cores: int | None = None) -> tuple[int, float]:
        """Return the number of slices with which a call on one rank that answers itself takes least, and its
        seconds. Of numbers within 1 % the smallest is best."""
        by_number = {n: self.seconds(n, [AnswerPlace(None)], cores=cores) for n in self.ring_sizes()}
        least = min(by_number.values())
        return next((n, seconds) for n, seconds in by_number.items() if seconds <= 1.01 * least)

    def answer_seconds(self, rows: float) -> float:
        """Return the seconds of an answer, between the numbers of rows that were measured and beyond."""
        numbers, seconds = zip(*self.answers, strict=True)
        if rows > numbers[-1] and len(numbers) > 1:
            slope = (seconds[-1] - seconds[-2]) / (numbers[-1] - numbers[-2])
            return float(seconds[-1] + max(0.0, slope) * (rows - numbers[-1]))
        return float(np.interp(rows, numbers, seconds))

    def seconds(self, num_slices: int, places: Sequence[AnswerPlace], *, cores: int | None = None) -> float:
        """Return the seconds in a step of the run, if the environments are split over ranks with these
        places and each cuts its own into so many slices. The slowest rank counts."""
        cores = self.cores if cores is None else cores
        rounds = max(self._round(num_slices, place, len(places), cores) for place in places)
        return self.rest_seconds / len(places) + self.rounds * rounds

    def _round(self, num_slices: int, place: AnswerPlace, num_ranks: int, cores: int) -> float:
        num = max(1, self.num // num_ranks)
        size = num / num_slices
        asking = self.question_seconds + self.handling_seconds * size
        answering = self.answer_seconds(size)
        busy = num_slices * (asking + answering) + num * self.step_cpu_seconds
        messages = place.messages or QuestionSeconds(0.0, 0.0, 0.0)
        of_others = place.answers_others * (answering + messages.answering)
        if place.messages is None:
            asking += answering + of_others
            answering = 0.0
        else:
            asking += messages.asking + of_others
            answering = place.num_sharing * (answering + messages.answering)
            busy += num_slices * (messages.asking + (messages.answering if place.on_host else 0.0))
        stepping = max(self.step_seconds, size * self.step_cpu_seconds / cores)
        taken = round_seconds(
            num_slices, size=max(1, round(size)), asking=asking, answering=answering,
            latency=messages.latency, stepping=stepping, deviation=self.step_deviation)
        return max(taken, busy / cores / (_USED if place.messages and place.on_host else 1.0))


@lru_cache(maxsize=1 << 12)
def round_seconds(
    num_slices: int, *, size: int, asking: float, answering: float = 0.0, latency: float = 0.0,
    stepping: float, deviation: float = 0.0,
) -> float:
    """Return the mean seconds of a round of `num_slices` slices with `size` environments each.

    Slices are handled in turn, for `asking` seconds each. Another process then answers each question in
    `answering` seconds, in the order in which they come, and `latency` passes on the way there and back.
    The steps of environments have normal times, and a slice waits for its slowest. Without a deviation this
    is the largest of the sum of all for a slice, and `num_slices` times what either process does.
    """
    normal = np.random.default_rng(0).standard_normal((_ROUNDS, num_slices, size)).max(axis=2)
    steps = np.maximum(stepping + deviation * normal, 0.0)
    is_free = answers_at = 0.0
    ready = [0.0] * num_slices
    begun = 0.0
    for number, of_round in enumerate(steps.tolist()):
        if number == _FIRST:
            begun = is_free
        for k, taken in enumerate(of_round):
            is_free = max(is_free, ready[k]) + asking
            answers_at = max(answers_at, is_free + latency / 2) + answering
            ready[k] = answers_at + latency / 2 + taken
    return (is_free - begun) / (_ROUNDS - _FIRST)
