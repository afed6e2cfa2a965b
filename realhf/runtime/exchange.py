"""Routing samples from the ranks that hold a call's inputs to the ranks that run it.

A head sends what it has to one rank of the target layout, its depot there, as soon as it has it; nobody need
wait. When all ranks of the target are free, they tell one another which samples of which lengths have come,
derive the same assignment of samples to data shards, and send one packed message to every rank that lacks
something. Samples are small beside parameters: they travel from host memory to host memory, over the control
group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from realhf.data.batch import Batch, Packed
from realhf.dist.group import Outbox, World
from realhf.engine.micro_batch import balance
from realhf.layout import Layout, even_split

Located = dict[int, tuple[int, int]]
"""Sample id -> the rank that holds it, and its index there."""


@dataclass(frozen=True)
class Source:
    """Columns made by the heads of one layout, which travel under `tag`.

    `batch` is this rank's part, None where it is no head.
    """

    layout: Layout
    keys: tuple[str, ...]
    batch: Batch | None
    tag: int

    def depots(self, target: Layout) -> dict[int, int]:
        """Head -> the rank of the target that gets its samples first; a head there keeps its own."""
        ranks = target.ranks
        return {h: h if h in target else ranks[i % len(ranks)] for i, h in enumerate(self.layout.heads)}


@dataclass(frozen=True)
class _Stock:
    """The samples of one Source when they have come to the target: on these ranks, `batch` on this one."""

    holders: tuple[int, ...]
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
    """Moves Batches between layouts. What it posts, the outbox keeps until it is taken."""

    def __init__(self, world: World, outbox: Outbox) -> None:
        self._rank, self._control, self._outbox = world.rank, world.control, outbox

    def send(self, source: Source, target: Layout) -> None:
        """Posts this rank's part of a source to a rank of the target. Every head calls this."""
        depot = source.depots(target)[self._rank]
        if depot != self._rank:
            assert source.batch is not None, "a head has a part"
            data = source.batch.pick(source.keys).pack()
            self._outbox.add(self._control.send_bytes(data, [depot], tag=source.tag))

    def receive(
        self, sources: Sequence[Source], target: Layout, routing: Routing, *, tag: int
    ) -> list[Batch]:
        """This rank's share of the samples, one Batch per mini-batch. Every rank of the target calls this."""
        stocks = [self._take(source, target) for source in sources]
        costs, located = self._locate(stocks, target, tag)
        assignment = assign(costs, dp=target.dp, routing=routing)
        shards = [[s for minibatch in assignment for s in minibatch[dp]] for dp in range(target.dp)]
        wanted = {rank: shards[target.coordinate(rank).dp] for rank in target.ranks}
        for stock, where in zip(stocks, located, strict=True):
            self._deal_out(stock, where, wanted, tag)
        mine, found = wanted[self._rank], zip(stocks, located, strict=True)
        parts = [self._gather(stock, where, mine, tag) for stock, where in found]
        whole = Batch(parts[0].ids, {key: part[key] for part in parts for key in part.fields})
        sizes = [len(minibatch[target.coordinate(self._rank).dp]) for minibatch in assignment]
        return [whole.select(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(len(sizes))]

    def _take(self, source: Source, target: Layout) -> _Stock:
        """What has been sent to this rank, and what it has made itself."""
        depots = source.depots(target)
        pieces = []
        for head in (head for head, depot in depots.items() if depot == self._rank):
            if head == self._rank:
                assert source.batch is not None, "a head has a part"
                pieces.append(source.batch.pick(source.keys))
            else:
                pieces.append(Batch.unpack(self._control.recv_bytes(head, tag=source.tag)))
        return _Stock(tuple(dict.fromkeys(depots.values())), Batch.concat(pieces) if pieces else None)

    def _locate(
        self, stocks: Sequence[_Stock], target: Layout, tag: int
    ) -> tuple[dict[int, float], list[Located]]:
        """Costs of samples (tokens of the longest column, at least 1), and where each stock has them."""
        holders = sorted({holder for stock in stocks for holder in stock.holders})
        mine = [None if stock.batch is None else _costs(stock.batch) for stock in stocks]
        if self._rank in holders:
            others = [rank for rank in target.ranks if rank != self._rank]
            self._outbox.add(self._control.send_json(mine, others, tag=tag))
        costs: dict[int, float] = {}
        located: list[Located] = [{} for _ in stocks]
        for holder in holders:
            theirs = mine if holder == self._rank else self._control.recv_json(holder, tag=tag)
            for where, part in zip(located, theirs, strict=True):
                for index, (sample_id, cost) in enumerate(part or ()):
                    where[sample_id] = (holder, index)
                    costs[sample_id] = max(costs.get(sample_id, 1.0), cost)
        for where in located:
            assert where.keys() == costs.keys(), "two inputs are of other samples"
        return costs, located

    def _deal_out(self, stock: _Stock, where: Located, wanted: dict[int, list[int]], tag: int) -> None:
        if stock.batch is None:
            return
        receivers: dict[tuple[int, ...], list[int]] = {}
        for receiver, ids in wanted.items():
            if receiver != self._rank and _answers(stock, self._rank, where, ids):
                receivers.setdefault(tuple(_rows(where, ids, self._rank)), []).append(receiver)
        for rows, ranks in receivers.items():
            data = stock.batch.select(rows).pack()
            self._outbox.add(self._control.send_bytes(data, ranks, tag=tag))

    def _gather(self, stock: _Stock, where: Located, ids: list[int], tag: int) -> Batch:
        pieces = []
        for holder in stock.holders:
            if holder == self._rank:
                assert stock.batch is not None, "a holder has a part"
                pieces.append(stock.batch.select(_rows(where, ids, holder)))
            elif _answers(stock, holder, where, ids):
                pieces.append(Batch.unpack(self._control.recv_bytes(holder, tag=tag)))
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


def _answers(stock: _Stock, holder: int, where: Located, ids: Sequence[int]) -> bool:
    """Whether `holder` has something for a rank that wants `ids`. The first holder always answers: an empty
    shard learns its columns from it."""
    return holder == stock.holders[0] or any(where[s][0] == holder for s in ids)
