"""Exchange: sends samples from the ranks that hold a call's inputs to the ranks that run it.

Every result rank of the source sends its samples to one rank of the target as soon as it has them, without
waiting. When all ranks of the target are free, they tell each other the ids and lengths of the samples that
they have received, derive the same assignment of samples to data shards, and send one packed message to every
rank that lacks some of its samples. Samples are small beside parameters, so they go from host memory to host
memory over the control group.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from realhf.data.batch import Batch, Packed
from realhf.data.micro_batch import balance
from realhf.data.order import groups_of
from realhf.distributed.group import Outbox
from realhf.distributed.world import World
from realhf.layout import Layout, even_split

Locations = dict[int, tuple[int, int]]
"""Maps a sample id to the rank that holds the sample, and to its index there."""


@dataclass(frozen=True)
class Source:
    """Columns that the result ranks of one layout have computed, sent under `tag`.

    `batch` is this rank's part; it is None unless the rank is a result rank of the layout.
    """

    layout: Layout
    batch: Batch | None
    tag: int

    def receivers(self, target: Layout) -> dict[int, int]:
        """Return for each result rank which rank of the target gets its samples: itself, if it is one."""
        ranks = target.ranks
        return {
            sender: sender if sender in target else ranks[i % len(ranks)]
            for i, sender in enumerate(self.layout.result_ranks)
        }


@dataclass(frozen=True)
class _Arrived:
    """The samples of one Source after they have come to the ranks `holders`; `batch` is this rank's part.

    After a restart a rank may not know the columns yet, and then `batch` has none; the first holder does.
    """

    holders: tuple[int, ...]
    batch: Batch | None


@dataclass(frozen=True)
class Routing:
    """Rules for assigning samples to mini-batches and data shards.

    A mini-batch has whole groups of samples (see `data.order`), and with `keep_groups` a data shard, too.
    With `filtered`, only samples that all inputs have are assigned. The shards of a mini-batch get about
    equally many tokens or, with `equal_costs`, samples. With `shuffles`, the samples are cut into
    mini-batches that often, each time in another order, which depends on the seed and the samples alone.
    """

    group_size: int = 1
    num_minibatches: int = 1
    keep_groups: bool = False
    filtered: bool = False
    equal_costs: bool = False
    shuffles: int = 0
    seed: int = 0

    def orders(self, groups: Sequence[list[int]]) -> Iterator[list[list[int]]]:
        """Yield the order in which each epoch cuts groups of samples into mini-batches: as given, without
        shuffles."""
        if not self.shuffles:
            yield list(groups)
        for epoch in range(self.shuffles):
            first = groups[0][0] if groups else 0
            yield random.Random(f"{self.seed}/{epoch}/{first}").sample(groups, len(groups))


def assign(costs: dict[int, float], *, dp: int, routing: Routing) -> list[list[list[int]]]:
    """Return sample ids by mini-batch and data shard, in rising order; `dp` does not change mini-batches.

    With shuffles, the mini-batches of all epochs follow each other.
    """
    ids = sorted(costs)
    groups = [[ids[i] for i in group] for group in groups_of(ids, routing.group_size)]
    minibatches = []
    parts_of_epochs = [
        sorted(order[slice(*even_split(len(groups), routing.num_minibatches, i))])
        for order in routing.orders(groups) for i in range(routing.num_minibatches)]
    for chosen in parts_of_epochs:
        units = chosen if routing.keep_groups else [[sample_id] for group in chosen for sample_id in group]
        if dp == 1:  # Calls of small networks have many mini-batches.
            minibatches.append([[sample for unit in units for sample in unit]])
            continue
        parts = balance([sum(costs[s] for s in unit) for unit in units], dp)
        minibatches.append([[sample for index in part for sample in units[index]] for part in parts])
    return minibatches


class Exchange:
    """Moves Batches between layouts; the outbox keeps its messages until they are received."""

    def __init__(self, world: World, outbox: Outbox) -> None:
        self._rank = world.rank
        self._control = world.control
        self._outbox = outbox

    def send(self, source: Source, target: Layout) -> None:
        """Send this rank's part of a source to a rank of the target.

        Every result rank of the source calls this.
        """
        receiver = source.receivers(target)[self._rank]
        if receiver != self._rank:
            assert source.batch is not None, "a result rank has a part"
            data = source.batch.pack()
            self._outbox.add(self._control.send_bytes(data, [receiver], tag=source.tag))

    def receive(
        self, sources: Sequence[Source], target: Layout, routing: Routing, *, tag: int
    ) -> list[Batch]:
        """Return this rank's samples, one Batch per mini-batch. Every rank of the target calls this."""
        inputs = [self._collect(source, target) for source in sources]
        costs, located, inputs = self._locate(inputs, target, tag, routing)
        assignment = assign(costs, dp=target.dp, routing=routing)
        shards = [
            list(dict.fromkeys(s for minibatch in assignment for s in minibatch[dp]))
            for dp in range(target.dp)]
        wanted = {rank: shards[target.coordinate(rank).dp] for rank in target.ranks}
        for arrived, where in zip(inputs, located, strict=True):
            self._send_wanted(arrived, where, wanted, tag)
        mine = wanted[self._rank]
        pairs = zip(inputs, located, strict=True)
        parts = [self._gather(arrived, where, mine, tag) for arrived, where in pairs]
        whole = Batch(parts[0].ids, {key: part[key] for part in parts for key in part.fields})
        place = {sample: i for i, sample in enumerate(mine)}
        dp = target.coordinate(self._rank).dp
        return [whole.select([place[sample] for sample in minibatch[dp]]) for minibatch in assignment]

    def _collect(self, source: Source, target: Layout) -> _Arrived:
        """Return the samples that were sent to this rank, together with those that it has computed itself."""
        receivers = source.receivers(target)
        pieces = []
        for sender in (sender for sender, receiver in receivers.items() if receiver == self._rank):
            if sender == self._rank:
                assert source.batch is not None, "a result rank has a part"
                pieces.append(source.batch)
            else:
                pieces.append(Batch.unpack(self._control.recv_bytes(sender, tag=source.tag)))
        return _Arrived(tuple(dict.fromkeys(receivers.values())), Batch.concat(pieces) if pieces else None)

    def _locate(
        self, inputs: Sequence[_Arrived], target: Layout, tag: int, routing: Routing
    ) -> tuple[dict[int, float], list[Locations], list[_Arrived]]:
        """Return the cost of each sample, the locations of samples by input, and the inputs.

        A sample costs the tokens of its longest column, at least 1. The first holder of a returned input is
        one that knows the columns, if any does.
        """
        holders = sorted({holder for arrived in inputs for holder in arrived.holders})
        mine = [_costs(batch) if batch is not None and batch.fields else None
                for batch in (arrived.batch for arrived in inputs)]
        if self._rank in holders:
            others = [rank for rank in target.ranks if rank != self._rank]
            self._outbox.add(self._control.send_json(mine, others, tag=tag))
        costs: dict[int, float] = {}
        located: list[Locations] = [{} for _ in inputs]
        with_columns: list[set[int]] = [set() for _ in inputs]  # The holders that know the columns.
        for holder in holders:
            theirs = mine if holder == self._rank else self._control.recv_json(holder, tag=tag)
            for where, knowing, of_input in zip(located, with_columns, theirs, strict=True):
                if of_input is not None:
                    knowing.add(holder)
                for index, (sample_id, cost) in enumerate(of_input or ()):
                    where[sample_id] = (holder, index)
                    costs[sample_id] = max(costs.get(sample_id, 1.0), cost)
        for where in located:
            if routing.filtered:
                costs = {sample_id: cost for sample_id, cost in costs.items() if sample_id in where}
            else:
                assert where.keys() == costs.keys(), "two inputs have different samples"
        ordered = [
            replace(arrived, holders=tuple(sorted(arrived.holders, key=lambda holder: holder not in knowing)))
            for arrived, knowing in zip(inputs, with_columns, strict=True)]
        return dict.fromkeys(costs, 1.0) if routing.equal_costs else costs, located, ordered

    def _send_wanted(
        self, arrived: _Arrived, where: Locations, wanted: dict[int, list[int]], tag: int
    ) -> None:
        """Send every rank the samples that it wants from this rank."""
        if arrived.batch is None:
            return
        receivers: dict[tuple[int, ...], list[int]] = {}
        for receiver, ids in wanted.items():
            if receiver != self._rank and _sends_to(arrived, self._rank, where, ids):
                receivers.setdefault(tuple(_rows(where, ids, self._rank)), []).append(receiver)
        for rows, ranks in receivers.items():
            data = arrived.batch.select(rows).pack()
            self._outbox.add(self._control.send_bytes(data, ranks, tag=tag))

    def _gather(self, arrived: _Arrived, where: Locations, ids: list[int], tag: int) -> Batch:
        """Return the samples `ids`, from this rank and from other holders."""
        pieces = []
        for holder in arrived.holders:
            if holder == self._rank:
                assert arrived.batch is not None, "a holder has a part"
                pieces.append(arrived.batch.select(_rows(where, ids, holder)))
            elif _sends_to(arrived, holder, where, ids):
                pieces.append(Batch.unpack(self._control.recv_bytes(holder, tag=tag)))
        whole = Batch.concat(pieces)
        position = {sample_id: i for i, sample_id in enumerate(whole.ids)}
        return whole.select([position[s] for s in ids])


def _costs(batch: Batch) -> list[tuple[int, float]]:
    lengths = [column.lengths for column in batch.fields.values() if isinstance(column, Packed)]
    longest = [max(sizes) for sizes in zip(*lengths, strict=True)] or [1] * len(batch)
    return [(sample_id, float(size)) for sample_id, size in zip(batch.ids, longest, strict=True)]


def _rows(where: Locations, ids: Sequence[int], rank: int) -> list[int]:
    """Return, for the samples of `ids` that `rank` holds, their indices there, in the order of `ids`."""
    return [where[s][1] for s in ids if where[s][0] == rank]


def _sends_to(arrived: _Arrived, holder: int, where: Locations, ids: Sequence[int]) -> bool:
    """Return whether `holder` sends a message to a rank that wants `ids`.

    The first holder always does, as an empty shard learns its columns from this message.
    """
    return holder == arrived.holders[0] or any(where[s][0] == holder for s in ids)
