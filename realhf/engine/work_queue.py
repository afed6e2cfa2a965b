"""WorkQueue: prompts that wait for a slot somewhere, and go to the replica that has one first.

Each replica has a line of them. It takes from the front of its own, and when that is used up from the back of
others. How many have been taken is counted in the store, so that each goes to one replica without any of them
waiting for another.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from realhf.data.batch import Batch
from realhf.dist.group import Pending
from realhf.dist.parallel import ParallelGroups
from realhf.engine.samples import Job

_TAG = 1 << 21  # Of what a replica's first rank tells its others; nobody else uses it.


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
            if line != self._index and self._store.add(f"{line}/taken", 1) <= self._counts[line]:
                # Together front and back have given away no more than there are, so they never meet.
                return line, self._counts[line] - self._store.add(f"{line}/from_back", 1)
            self._left.pop(0)
        return None

    def _reserve(self) -> bool:
        """Takes some of its own at once, as each look into the store costs time: no more than half of its
        share of what is left (guided self-scheduling, Polychronopoulos & Kuck 1987)."""
        wanted, count = max(1, self._num_waiting // (2 * len(self._counts))), self._counts[self._index]
        num_taken = self._store.add(f"{self._index}/taken", wanted)
        self._num_waiting = max(0, count - num_taken)
        self._num_reserved = max(0, min(wanted, wanted + count - num_taken))
        return self._num_reserved > 0

    def forget(self) -> None:
        """Deletes what the store has of this replica's line, when nobody takes any more."""
        for name in ("taken", "from_back"):
            self._store.delete_key(f"{self._index}/{name}")


class WorkQueue:
    """The waiting prompts of one generation, for a rank of one of its replicas: the ranks over dp and cp.

    The first rank of a replica takes prompts and tells the others which; all of them ask at the same time.
    """

    def __init__(self, groups: ParallelGroups) -> None:
        self._groups, self._replicas, at = groups, groups.replicas, groups.at
        self.num_stolen = 0
        """Prompts that this replica has taken from others."""
        ranks: list[int] = groups.layout.grid[:, at.dp, at.cp, :].ravel().tolist()
        # (In one replica alone everybody decides the same.)
        self._leader, *self._followers = ranks if self._replicas.size > 1 else [groups.rank]
        self._waiting: list[list[Job]] = []
        self._lines: Lines | None = None
        self._is_over = True
        self._stolen: dict[int, int] = {}  # Sample id -> the data shard that has it.
        self._told: list[Pending] = []

    def put(self, jobs: Sequence[Job]) -> list[Job]:
        """This replica's line, which is shared from now on; what waits in all lines. All ranks call this."""
        replicas, store = self._replicas, None
        self._waiting = [list(jobs)]
        if replicas.size > 1:
            lines = replicas.all_gather_json(list(jobs))
            self._waiting = [[Job(*job) for job in line] for line in lines]
            store = self._groups.world.store(f"waiting/{replicas.ranks}")
        self._is_over = not any(self._waiting)
        if self._leader == self._groups.rank and not self._is_over:
            counts = [len(line) for line in self._waiting]
            self._lines = Lines(counts, replicas.index, store or dist.HashStore())
        return [job for line in self._waiting for job in line]

    def take(self) -> Job | None:
        """A prompt for a free slot; None when there are no more. All ranks of a replica call this."""
        place = None if self._is_over else self._take()
        if place is None:
            self._is_over = True
            return None
        line, number = place
        job = self._waiting[line][number]
        if line != self._replicas.index:
            self.num_stolen += 1
            self._stolen |= dict.fromkeys(job.ids, line // self._groups.layout.cp)
        return job

    def _take(self) -> tuple[int, int] | None:
        control = self._groups.world.control
        if self._lines is None:
            told = torch.empty(2, dtype=torch.long)
            control.exchange([], [(self._leader, told)], tag=_TAG)
            line, number = told.tolist()
            return (line, number) if line >= 0 else None
        place = self._lines.take()
        if self._followers:
            tells = torch.tensor(place or (-1, -1))
            self._told.append(control.post([(rank, tells) for rank in self._followers], [], tag=_TAG))
        return place

    def bring_home(self, made: Batch, ids: Sequence[int]) -> Batch:
        """`ids`, the samples of this rank's data shard in their order, out of what has been `made` of them
        everywhere. All ranks call this; those without columns have none afterwards either."""
        replicas, cp = self._replicas, self._groups.layout.cp
        home, index = self._groups.at.dp, replicas.index
        thieves = self._close()
        if not made.fields or (cp == 1 and not any(thieves) and made.ids == list(ids)):
            return made
        rows: dict[int, list[int]] = {home: []}
        for row, sample in enumerate(made.ids):
            rows.setdefault(self._stolen.get(sample, home), []).append(row)
        parts, sent = [made.select(rows[home])], []
        for shard, chosen in rows.items():
            if peers := [i for i in range(shard * cp, (shard + 1) * cp) if i != index]:
                sent.append(replicas.send_bytes(made.select(chosen).pack(), peers))
        for peer, shards in enumerate(thieves):
            if peer != index and (peer // cp == home or home in shards):
                parts.append(Batch.unpack(replicas.recv_bytes(peer)))
        for pending in sent:
            pending.wait()
        whole = Batch.concat(parts)
        row_of = {sample: row for row, sample in enumerate(whole.ids)}
        return whole.select([row_of[sample] for sample in ids])

    def _close(self) -> list[list[int]]:
        """Per replica the data shards of which it has samples without being theirs."""
        for pending in self._told:
            pending.wait()
        if self._replicas.size == 1 or not any(self._waiting):
            return [[]] * self._replicas.size
        home = self._groups.at.dp
        thieves = self._replicas.all_gather_json(sorted(set(self._stolen.values()) - {home}))
        if self._lines is not None:
            self._lines.forget()
        return thieves
