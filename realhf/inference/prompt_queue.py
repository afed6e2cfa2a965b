"""PromptQueue: prompts that wait for a free slot, each of which goes to the first replica that has one.

Each replica has a line of waiting prompts. It takes prompts from the front of its own line and, when that is
empty, steals from the back of other lines. The store counts how many have been taken from each end, so that
each prompt goes to exactly one replica, and no replica waits for another.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from realhf.data.batch import Batch
from realhf.distributed import tags
from realhf.distributed.group import Pending, peer_errors
from realhf.distributed.world import ParallelGroups
from realhf.inference.response_buffer import PromptGroup


class Lines:
    """The lines of all replicas as replica `index` sees them: `counts` items, taken by number."""

    def __init__(self, counts: Sequence[int], index: int, store: dist.Store) -> None:
        self._counts = counts
        self._index = index
        self._store = store
        order = [*range(index, len(counts)), *range(index)]  # Each replica steals from another line first.
        self._left = [line for line in order if counts[line] > 0]
        self._num_own = self._num_reserved = 0
        self._num_waiting = counts[index]  # Items in its own line when this replica last looked.

    def take(self) -> tuple[int, int] | None:
        """Take an item and return its line and number, or None when there are no more items."""
        while self._left:
            line = self._left[0]
            if line == self._index and (self._num_reserved or self._reserve()):
                self._num_reserved -= 1
                self._num_own += 1
                return line, self._num_own - 1
            if line != self._index and self._add(f"{line}/taken", 1) <= self._counts[line]:
                # `taken` counts items from both ends and stays within the line, so the ends never meet.
                return line, self._counts[line] - self._add(f"{line}/from_back", 1)
            self._left.pop(0)
        return None

    def _reserve(self) -> bool:
        """Reserve several items of this replica's line at once, as each access to the store takes time.
        Return whether there were any.

        It takes at most half of an equal share of the items left (guided self-scheduling, Polychronopoulos &
        Kuck 1987).
        """
        count = self._counts[self._index]
        wanted = max(1, self._num_waiting // (2 * len(self._counts)))
        num_taken = self._add(f"{self._index}/taken", wanted)
        self._num_waiting = max(0, count - num_taken)
        self._num_reserved = max(0, min(wanted, wanted + count - num_taken))
        return self._num_reserved > 0

    def _add(self, key: str, number: int) -> int:
        """Add to a counter and return its new value."""
        with peer_errors():
            return self._store.add(key, number)

    def forget(self) -> None:
        """Delete the counters of this replica's line, when no replica takes items any more."""
        with peer_errors():
            for name in ("taken", "from_back"):
                self._store.delete_key(f"{self._index}/{name}")


class PromptQueue:
    """The waiting prompts of one generation. Its replicas are the ranks over dp and cp.

    The first rank of a replica takes a prompt and tells the replica's other ranks, which all call `take` at
    the same time. Without `stealing` every replica has a queue of its own, and the ranks over cp exchange
    only results.
    """

    def __init__(self, groups: ParallelGroups, *, stealing: bool) -> None:
        coordinate = groups.at
        self._parallel = groups
        self._replicas = groups.replicas_control
        self._is_shared = stealing and self._replicas.size > 1
        self._line = self._replicas.index if self._is_shared else 0
        self._cp = groups.layout.cp  # Replicas of a data shard; the first one collects its results.
        ranks: list[int] = groups.layout.grid[:, coordinate.dp, coordinate.cp, :].ravel().tolist()
        # (If a replica has its own queue, all of its ranks take the same prompts by themselves.)
        self._leader, *self._followers = ranks if self._is_shared else [groups.rank]
        self._waiting: list[list[PromptGroup]] = []
        self._lines: Lines | None = None
        self._is_over = True
        self._stolen: dict[int, int] = {}  # Sample id -> the data shard it belongs to.
        self._sent: list[Pending] = []

    @property
    def is_over(self) -> bool:
        """Whether no prompt is left, as far as this replica knows."""
        return self._is_over

    def gather(self, document: Any) -> list[Any]:
        """Gather a JSON document from each replica that shares the queue. All ranks call this."""
        return self._replicas.all_gather_json(document) if self._is_shared else [document]

    def put(self, groups: Sequence[PromptGroup]) -> list[PromptGroup]:
        """Make `groups` this replica's line; return the groups of all lines, which `take` may return.

        All ranks call this, once.
        """
        self._waiting = [[PromptGroup(*group) for group in line] for line in self.gather(groups)]
        self._is_over = not any(self._waiting)
        if self._leader == self._parallel.rank and not self._is_over:
            name = f"waiting/{self._replicas.ranks}"
            store = self._parallel.world.unused_store(name) if self._is_shared else dist.HashStore()
            self._lines = Lines([len(line) for line in self._waiting], self._line, store)
        return [group for line in self._waiting for group in line]

    def take(self) -> PromptGroup | None:
        """Take a prompt for a free slot, or None when there are no more. All ranks of a replica call this."""
        if self._is_over:
            return None
        control = self._parallel.world.control
        if self._lines is None:
            message = torch.empty(2, dtype=torch.long)
            control.exchange([], [(self._leader, message)], tag=tags.PROMPT)
        else:
            message = torch.tensor(self._lines.take() or (-1, -1))
            messages = [(rank, message) for rank in self._followers]
            self._sent.append(control.post(messages, [], tag=tags.PROMPT))
        line, number = message.tolist()
        if line < 0:
            self._is_over = True
            return None
        group = self._waiting[line][number]
        if line != self._line:
            self._stolen |= dict.fromkeys(group.ids, line // self._cp)
        return group

    def collect_results(self, generated: Batch, ids: Sequence[int]) -> Batch:
        """Return the samples `ids` of this rank's data shard, in this order, from the replicas that generated
        them. `generated` are those of this rank. All ranks call this; only result ranks get columns."""
        thieves = self._thieves()
        for pending in self._sent:
            pending.wait()
        if self._lines is not None:  # Nobody takes a prompt any more.
            self._lines.forget()
        if not generated.fields:
            return generated
        home = self._parallel.at.dp
        index = self._replicas.index
        collector = home * self._cp
        rows: dict[int, list[int]] = {home: []}
        for row, sample in enumerate(generated.ids):
            rows.setdefault(self._stolen.get(sample, home), []).append(row)
        sent = [
            self._replicas.send_bytes(generated.select(chosen).pack(), [shard * self._cp])
            for shard, chosen in rows.items() if shard * self._cp != index]
        received = [
            Batch.unpack(self._replicas.recv_bytes(peer)) for peer, shards in enumerate(thieves)
            if index == collector != peer and (peer // self._cp == home or home in shards)]
        for pending in sent:
            pending.wait()
        if index != collector:
            return Batch([])
        whole = Batch.concat([generated, *received]) if received else generated
        row_of = {sample: row for row, sample in enumerate(whole.ids)}
        assert len(row_of) == len(whole), "a sample has been continued twice"
        assert not (lost := set(ids) - row_of.keys()), f"nobody has continued samples {sorted(lost)}"
        return whole if whole.ids == list(ids) else whole.select([row_of[sample] for sample in ids])

    def _thieves(self) -> list[list[int]]:
        """Return for each replica the data shards that it has stolen samples from. No `take` may follow."""
        if not self._is_shared or not any(self._waiting):
            return [[]] * self._replicas.size
        return self._replicas.all_gather_json(sorted(set(self._stolen.values()) - {self._parallel.at.dp}))
