"""Turns: generation with environments, which answer what samples have said while other samples decode."""

from collections.abc import Sequence
from typing import Any

import torch

from realhf.calls import Conversation, NextTurn
from realhf.data.batch import Packed
from realhf.distributed.group import Group
from realhf.distributed.process import Report
from realhf.inference.cohort import Cohort
from realhf.inference.response_buffer import ResponseBuffer

_WAIT_SECONDS = 1.0
"""Longest wait for environments after which progress is reported again."""


class SharedConversation(Conversation):
    """A conversation as all ranks of a replica see it. They call its methods alike.

    One rank has the conversation itself. In `poll` it tells the others what has arrived, so that all ranks
    take the same rows up in the same step.
    """

    def __init__(self, group: Group, conversation: Conversation | None) -> None:
        """`group` has the ranks of the replica, over gloo."""
        self._group = group
        self._own = conversation
        self._num_waiting = 0
        own = conversation
        told: Any = None
        if own is not None:
            own_starts = [(i, tokens, own.first_limit(i)) for i, tokens in own.starts().items()]
            told = [own_starts, own.most_response_tokens(), sorted(own.end_token_ids)]
        starts, self._most, self.end_token_ids = self._from_leader(told)
        self._starts = {sample: tokens for sample, tokens, _ in starts}
        self._limits = {sample: limit for sample, _, limit in starts}

    def _from_leader(self, document: Any) -> Any:
        return next(told for told in self._group.all_gather_json(document) if told is not None)

    def starts(self) -> dict[int, list[int]]:
        return self._starts

    def first_limit(self, sample: int) -> int:
        return int(self._limits[sample])

    def most_response_tokens(self) -> int:
        return int(self._most)

    def said(self, sample: int, tokens: list[int]) -> None:
        self._num_waiting += 1
        if self._own is not None:
            self._own.said(sample, tokens)

    def poll(self, timeout: float) -> list[NextTurn]:
        if not self._num_waiting:
            return []
        arrived = self._from_leader(None if self._own is None else self._own.poll(timeout))
        self._num_waiting -= len(arrived)
        return [NextTurn(*turn) for turn in arrived]

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    def results(self, samples: Any) -> tuple[list[dict[str, Any]], list[bool]]:
        assert self._own is not None, "another rank speaks with the environments"
        return self._own.results(samples)


def converse(conversation: Conversation, cohorts: Sequence[Cohort], report: Report) -> None:
    """Run cohorts until all samples have ended, with what their environments answer meanwhile."""
    is_running = True
    num_ended = num_turns = 0
    while is_running or conversation.num_waiting:
        for following in conversation.poll(0.0 if is_running else _WAIT_SECONDS):
            is_here = any(cohort.go_on(following) for cohort in cohorts)
            assert is_here, f"sample {following.sample} does not wait here"
            num_turns += 1
            num_ended += not following.tokens
        is_running = any([cohort.advance() for cohort in cohorts])
        for cohort in cohorts:
            for sample, tokens in cohort.ended_turns():
                conversation.said(sample, tokens)
        waiting = f"{conversation.num_waiting} wait for their environments"
        report(f"{num_ended} samples of this rank have ended after {num_turns} turns, {waiting}")
    for cohort in cohorts:
        cohort.finish()


def turn_columns(parts: Sequence[ResponseBuffer], *, wide: torch.dtype) -> tuple[list[int], list]:
    """Return the ids of samples that were answered in turns, and their sequences, response masks and
    log-probs. A buffer has each turn as a sample of its own, in order; the mask is 1 on drawn tokens only."""
    ids: list[int] = []
    sequences, masks, logprobs = [], [], []
    lengths: list[int] = []
    for part in parts:
        count = len(part.prompts)
        drawn_RC, logprobs_RC = part.tokens[:count].cpu(), part.logprobs[:count].cpu()
        turns: dict[int, list[int]] = {}
        for number, i in enumerate(part.ids[:count].tolist()):
            turns.setdefault(i, []).append(number)
        for i, numbers in turns.items():
            last = numbers[-1]
            stop = 1 + int(part.lengths[last])
            tokens_T = torch.cat([torch.tensor(part.prompts[last]), drawn_RC[last, 1:stop]])
            mask_T = torch.zeros(len(tokens_T), dtype=wide)
            logprobs_T = torch.zeros(len(tokens_T), dtype=wide)
            for number in numbers:
                start, length = len(part.prompts[number]), int(part.lengths[number])
                mask_T[start : start + length] = 1
                logprobs_T[start : start + length] = logprobs_RC[number, 1 : 1 + length].to(wide)
            ids.append(i)
            sequences.append(tokens_T)
            masks.append(mask_T)
            logprobs.append(logprobs_T)
            lengths.append(len(tokens_T))
    nothing = torch.zeros(0, dtype=wide)
    columns = ([nothing.long(), *sequences], [nothing, *masks], [nothing, *logprobs])
    return ids, [Packed(torch.cat(column), lengths) for column in columns]
