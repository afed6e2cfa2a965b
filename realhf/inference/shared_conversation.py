"""SharedConversation: the environments of a replica with several ranks, one of which speaks with them."""

from __future__ import annotations

from typing import Any

from realhf.calls import Conversation, NextTurn
from realhf.distributed.group import Group


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
