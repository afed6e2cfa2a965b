"""PromptQueue: prompts that wait for a slot somewhere, and go to the replica that has one first.

Each replica has a line of them. It takes from the front of its own, and when that is used up from the back of
others. How many have been taken is counted in the store, so that each goes to one replica without any of them
waiting for another.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from realhf.data.batch import Batch
from realhf.dist import tags
from realhf.dist.group import Pending, naming_store
from realhf.dist.parallel import ParallelGroups
from realhf.inference.rollout_buffer import PromptGroup, pack_groups, unpack_groups


class Lines:
    """So many items in each replica's line, handed out by number, as replica `index` sees them."""

    def __init__(self, counts: Sequence[int], index: int, store: dist.Store) -> None:
        self._counts, self._index, self._store = counts, index, store
        behind = [*range(index, len(counts)), *range(index)]  # Each thief tries another one first.
        self._left = [replica for replica in behind if counts[replica] > 0]
        self._num_own = self._num_reserved = 0
        self._num_waiting = counts[index]  # In its own line, as far as this replica knows.

    def take(self) -> tuple[int, int] | None:
        """The line and the number of an item that nobody else has or gets; None when there are no more."""
        while self._left:
            line = self._left[0]
            if line == self._index and (self._num_reserved or self._reserve()):
                self._num_reserved -= 1
                self._num_own += 1
                return line, self._num_own - 1
            if line != self._index and self._add(f"{line}/taken", 1) <= self._counts[line]:
                # Together front and back have given away no more than there are, so they never meet.
                return line, self._counts[line] - self._add(f"{line}/from_back", 1)
            self._left.pop(0)
        return None

    def _reserve(self) -> bool:
        """Takes some of its own at once, as each look into the store costs time: no more than half of its
        share of what is left (guided self-scheduling, Polychronopoulos & Kuck 1987)."""
        wanted, count = max(1, self._num_waiting // (2 * len(self._counts))), self._counts[self._index]
        num_taken = self._add(f"{self._index}/taken", wanted)
        self._num_waiting = max(0, count - num_taken)
        self._num_reserved = max(0, min(wanted, wanted + count - num_taken))
        return self._num_reserved > 0

    def _add(self, key: str, number: int) -> int:
        """The counter's new value."""
        with naming_store():
            return self._store.add(key, number)

    def forget(self) -> None:
        """Deletes what the store has of this replica's line, when nobody takes any more."""
        with naming_store():
            for name in ("taken", "from_back"):
                self._store.delete_key(f"{self._index}/{name}")


class PromptQueue:
    """The waiting prompts of one generation, for a rank of one of its replicas: the ranks over dp and cp.

    The first rank of a replica takes prompts and tells the others which; all of them ask at the same time.
    Without `stealing` every replica has a queue of its own, and only results travel, between ranks over cp.
    """

    def __init__(self, groups: ParallelGroups, *, stealing: bool) -> None:
        self._groups, self._replicas, at = groups, groups.replicas_control, groups.at
        self._is_shared = stealing and self._replicas.size > 1
        self._line = self._replicas.index if self._is_shared else 0
        self._heads = range(0, self._replicas.size, groups.layout.cp)  # By data shard its first replica.
        self._shard_of = [shard for shard in range(groups.layout.dp) for _ in range(groups.layout.cp)]
        ranks: list[int] = groups.layout.grid[:, at.dp, at.cp, :].ravel().tolist()
        # (In one replica alone everybody decides the same.)
        self._leader, *self._followers = ranks if self._is_shared else [groups.rank]
        self._waiting: list[list[PromptGroup]] = []
        self._lines: Lines | None = None
        self._is_over = True
        self._stolen: dict[int, int] = {}  # Sample id -> the data shard that has it.
        self._told: list[Pending] = []

    def gather(self, document: Any) -> list[Any]:
        """What the replicas that share the queue say (JSON). All ranks call this."""
        return self._replicas.all_gather_json(document) if self._is_shared else [document]

    def put(self, jobs: Sequence[PromptGroup]) -> list[PromptGroup]:
        """Makes `jobs` this replica's line. All ranks call this, once. What waits in all lines, as any of it
        may come out of `take`."""
        self._waiting = [list(jobs)]
        if self._is_shared:
            self._waiting = [unpack_groups(line) for line in self._replicas.all_gather_bytes(pack_groups(jobs))]
        self._is_over = not any(self._waiting)
        if self._leader == self._groups.rank and not self._is_over:
            world, name = self._groups.world, f"waiting/{self._replicas.ranks}"
            store = world.unused_store(name) if self._is_shared else dist.HashStore()
            self._lines = Lines([len(line) for line in self._waiting], self._line, store)
        return [job for line in self._waiting for job in line]

    def take(self) -> PromptGroup | None:
        """A prompt for a free slot; None when there are no more. All ranks of a replica call this."""
        place = None if self._is_over else self._take()
        if place is None:
            self._is_over = True
            return None
        line, number = place
        job = self._waiting[line][number]
        if line != self._line:
            self._stolen |= dict.fromkeys(job.ids, self._shard_of[line])
        return job

    def _take(self) -> tuple[int, int] | None:
        control = self._groups.world.control
        if self._lines is None:
            told = torch.empty(2, dtype=torch.long)
            control.exchange([], [(self._leader, told)], tag=tags.PROMPT)
            line, number = told.tolist()
            return (line, number) if line >= 0 else None
        place = self._lines.take()
        if self._followers:
            tells = torch.tensor(place or (-1, -1))
            self._told.append(control.post([(rank, tells) for rank in self._followers], [], tag=tags.PROMPT))
        return place

    def bring_home(self, made: Batch, ids: Sequence[int]) -> Batch:
        """`ids`, the samples of this rank's data shard in their order, out of what has been `made` of them
        everywhere. All ranks call this; those that are not heads of the layout have no columns afterwards."""
        thieves = self._thieves()
        self._clean_up()
        if not made.fields:
            return made
        home, index = self._groups.at.dp, self._replicas.index
        head = self._heads[home]
        rows: dict[int, list[int]] = {home: []}
        for row, sample in enumerate(made.ids):
            rows.setdefault(self._stolen.get(sample, home), []).append(row)
        sent = [
            self._replicas.send_bytes(made.select(chosen).pack(), [self._heads[shard]])
            for shard, chosen in rows.items() if self._heads[shard] != index]
        came = [
            Batch.unpack(self._replicas.recv_bytes(peer)) for peer, shards in enumerate(thieves)
            if index == head != peer and (self._shard_of[peer] == home or home in shards)]
        for pending in sent:
            pending.wait()
        if index != head:
            return Batch([])
        whole = Batch.concat([made, *came]) if came else made
        row_of = {sample: row for row, sample in enumerate(whole.ids)}
        assert len(row_of) == len(whole), "a sample has been continued twice"
        assert not (lost := set(ids) - row_of.keys()), f"nobody has continued samples {sorted(lost)}"
        return whole if whole.ids == list(ids) else whole.select([row_of[sample] for sample in ids])

    def _thieves(self) -> list[list[int]]:
        """Per replica the other data shards of which it has samples. After this nobody takes any more."""
        if not self._is_shared or not any(self._waiting):
            return [[]] * self._replicas.size
        return self._replicas.all_gather_json(sorted(set(self._stolen.values()) - {self._groups.at.dp}))

    def _clean_up(self) -> None:
        """When nobody takes any more."""
        for pending in self._told:
            pending.wait()
        if self._lines is not None:
            self._lines.forget()
