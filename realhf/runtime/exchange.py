"""Routing samples from the ranks that hold a call's inputs to the ranks that run it.

Every participant learns all sample ids and lengths and derives the same assignment of samples to data shards;
then one packed message goes to every rank that lacks something. Samples are small beside parameters: they
travel from host memory to host memory, over the control group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from realhf.data.batch import Batch, Packed
from realhf.dist.group import Pending, World
from realhf.engine.micro_batch import balance
from realhf.layout import Layout, even_split

Located = dict[int, tuple[int, int]]
"""Sample id -> the rank that holds it, and its index there."""


@dataclass(frozen=True)
class Source:
    """Columns held by the heads of one layout; `batch` is this rank's part, None where it is no head."""

    layout: Layout
    keys: tuple[str, ...]
    batch: Batch | None


@dataclass(frozen=True)
class Routing:
    """How samples are dealt out: `group_size` consecutive ids form a group, which mini-batches never cut."""

    group_size: int = 1
    num_minibatches: int = 1
    keep_groups: bool = False


def assign(costs: dict[int, float], *, dp: int, routing: Routing) -> list[list[list[int]]]:
    """Sample ids by mini-batch and data shard, in rising order; mini-batches do not depend on `dp`."""
    groups: dict[int, list[int]] = {}
    for sample_id in sorted(costs):
        groups.setdefault(sample_id // routing.group_size, []).append(sample_id)
    ordered = list(groups.values())
    minibatches = []
    for i in range(routing.num_minibatches):
        chosen = ordered[slice(*even_split(len(ordered), routing.num_minibatches, i))]
        units = chosen if routing.keep_groups else [[sample_id] for group in chosen for sample_id in group]
        parts = balance([sum(costs[s] for s in unit) for unit in units], dp)
        minibatches.append([[s for u in part for s in units[u]] for part in parts])
    return minibatches


class Exchange:
    """Moves Batches between layouts."""

    def __init__(self, world: World) -> None:
        self._rank, self._control = world.rank, world.control

    def move(self, sources: Sequence[Source], target: Layout, routing: Routing) -> list[Batch] | None:
        """This rank's share of the samples, one Batch per mini-batch; None on ranks outside `target`.

        Every head of a source and every rank of the target must call this.
        """
        pending: list[Pending] = []
        costs, located = self._locate(sources, target, pending)
        assignment = assign(costs, dp=target.dp, routing=routing)
        shards = [[s for minibatch in assignment for s in minibatch[dp]] for dp in range(target.dp)]
        wanted = {rank: shards[target.coordinate(rank).dp] for rank in target.ranks}
        for source, where in zip(sources, located, strict=True):
            self._send(source, where, wanted, pending)
        result = None
        if self._rank in target:
            parts = [self._receive(s, where, wanted) for s, where in zip(sources, located, strict=True)]
            whole = Batch(parts[0].ids, {key: part[key] for part in parts for key in part.fields})
            sizes = [len(minibatch[target.coordinate(self._rank).dp]) for minibatch in assignment]
            result = [whole.select(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]
        for message in pending:
            message.wait()
        return result

    def _locate(
        self, sources: Sequence[Source], target: Layout, pending: list[Pending]
    ) -> tuple[dict[int, float], list[Located]]:
        """Costs of samples (tokens of the longest column, at least 1), and where each source has them."""
        senders = sorted({head for source in sources for head in source.layout.heads})
        mine = [None if s.batch is None else _costs(s.batch.pick(s.keys)) for s in sources]
        if self._rank in senders:
            others = [r for r in sorted({*senders, *target.ranks}) if r != self._rank]
            pending.append(self._control.send_json(mine, others))
        costs: dict[int, float] = {}
        located: list[Located] = [{} for _ in sources]
        for sender in senders:
            theirs = mine if sender == self._rank else self._control.recv_json(sender)
            for where, part in zip(located, theirs, strict=True):
                for index, (sample_id, cost) in enumerate(part or ()):
                    where[sample_id] = (sender, index)
                    costs[sample_id] = max(costs.get(sample_id, 1.0), cost)
        for source, where in zip(sources, located, strict=True):
            assert where.keys() == costs.keys(), f"{source.keys} are of other samples than the rest"
        return costs, located

    def _send(
        self, source: Source, where: Located, wanted: dict[int, list[int]], pending: list[Pending]
    ) -> None:
        if source.batch is None:
            return
        batch = source.batch.pick(source.keys)
        receivers: dict[tuple[int, ...], list[int]] = {}
        for receiver, ids in wanted.items():
            if receiver != self._rank and _answers(source, self._rank, where, ids):
                receivers.setdefault(tuple(_rows(where, ids, self._rank)), []).append(receiver)
        for rows, ranks in receivers.items():
            pending.append(self._control.send_bytes(batch.select(rows).pack(), ranks))

    def _receive(self, source: Source, where: Located, wanted: dict[int, list[int]]) -> Batch:
        ids = wanted[self._rank]
        pieces = []
        for head in source.layout.heads:
            if head == self._rank and source.batch is not None:
                pieces.append(source.batch.pick(source.keys).select(_rows(where, ids, head)))
            elif _answers(source, head, where, ids):
                pieces.append(Batch.unpack(self._control.recv_bytes(head)))
        whole = Batch.concat(pieces)
        position = {sample_id: i for i, sample_id in enumerate(whole.ids)}
        return whole.select([position[s] for s in ids])


def _costs(batch: Batch) -> list[tuple[int, float]]:
    lengths = [column.lengths for column in batch.fields.values() if isinstance(column, Packed)]
    longest = [max(sizes) for sizes in zip(*lengths, strict=True)] or [1] * len(batch)
    return [(sample_id, float(size)) for sample_id, size in zip(batch.ids, longest, strict=True)]


def _rows(where: Located, ids: Sequence[int], rank: int) -> list[int]:
    """Positions on `rank` of those of `ids` that it holds, in the order of `ids`."""
    return [where[s][1] for s in ids if where[s][0] == rank]


def _answers(source: Source, head: int, where: Located, ids: Sequence[int]) -> bool:
    """Whether `head` has something for a rank that wants `ids`. The first head always answers: an empty shard
    learns its columns from it."""
    return head == source.layout.heads[0] or any(where[s][0] == head for s in ids)
