"""Exchange between random layouts on four processes; assign and merge_metrics against brute force."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from realhf.data.batch import Batch, Packed
from realhf.distributed.group import Outbox
from realhf.layout import DeviceMesh, Layout, ParallelStrategy
from realhf.runtime.execute.executor import StepRecord
from realhf.runtime.records.step_record import merge_metrics
from realhf.runtime.samples.exchange import Exchange, Routing, Source, assign

NUM_CASES = 40
KEYS = (("tokens", "flags", "text"), ("logp", "half", "states"), ("score", "matrix", "rows"))
"""Columns by producer."""


def _random_layout(rng):
    pp, dp, tp = rng.choice(
        [(1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (2, 1, 2)]
    )
    ranks = rng.sample(range(4), pp * dp * tp)
    return Layout(ParallelStrategy(pp=pp, dp=dp, tp=tp), DeviceMesh(tuple(ranks)))


def _whole(rng, ids):
    """Return all columns of all samples, with values that differ between keys and samples."""
    lengths = [rng.randrange(6) for _ in ids]
    total = sum(lengths)
    noise = torch.randn(total, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
    tokens = [1000 * i + t for i, n in zip(ids, lengths, strict=True) for t in range(n)]
    fields = {
        "tokens": Packed(torch.tensor(tokens, dtype=torch.long), lengths),
        "flags": Packed(noise > 0, lengths),
        "logp": Packed(noise.double(), lengths),
        "half": Packed(noise.bfloat16(), lengths),
        "states": Packed(noise.repeat_interleave(3).view(total, 3), lengths),
        "score": torch.tensor([i / 7 for i in ids]),
        "matrix": torch.tensor([[i, -i] for i in ids], dtype=torch.int32).view(-1, 2),
        "text": [f"sample {i} \u00e4" for i in ids],
        "rows": [{"id": i, "part": [None, 1.5, True]} for i in ids],
    }
    return Batch(ids, fields)


def _case(seed):
    """Return the whole batch, the sources as (layout, keys, indices by shard), target and routing."""
    rng = random.Random(seed)
    group_size, num_groups = rng.choice([1, 2, 3]), rng.randint(1, 6)
    first = group_size * rng.randrange(5)
    whole = _whole(rng, list(range(first, first + group_size * num_groups)))
    sources = []
    for keys in rng.sample(KEYS, rng.randint(1, 3)):
        layout, shuffled = _random_layout(rng), rng.sample(range(len(whole)), len(whole))
        if rng.random() < 0.3:
            cuts = [0, *[len(whole)] * layout.dp]  # everything in the first shard, the others empty
        else:
            cuts = [0, *sorted(rng.randint(0, len(whole)) for _ in range(layout.dp - 1)), len(whole)]
        sources.append((layout, keys, [shuffled[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]))
    routing = Routing(
        group_size, rng.choice([1, 1, 2, 4]), keep_groups=rng.random() < 0.5,
        shuffles=rng.choice([0, 0, 1, 3]), seed=seed)
    return whole, sources, _random_layout(rng), routing


def _move(world, seed):
    outbox, results = Outbox(), []
    exchange = Exchange(world, outbox)
    for case in range(NUM_CASES):
        whole, sources, target, routing = _case(seed + case)
        given = []
        for tag, (layout, keys, shards) in enumerate(sources):
            mine = None
            if world.rank in layout.result_ranks:
                mine = whole.select(shards[layout.coordinate(world.rank).dp]).pick(keys)
            given.append(Source(layout, mine, 10 + tag))
        for source in reversed(given):  # In another order than they are received.
            if source.batch is not None:
                exchange.send(source, target)
        results.append(exchange.receive(given, target, routing, tag=9) if world.rank in target else None)
        outbox.next_step()
    outbox.wait()
    return results


def _assert_equal(ours, expected):
    assert ours.ids == expected.ids and ours.fields.keys() == expected.fields.keys()
    for key, column in expected.fields.items():
        mine = ours[key]
        if isinstance(column, Packed):
            assert mine.lengths == column.lengths, key
            column, mine = column.values, mine.values
        if isinstance(column, torch.Tensor):
            assert mine.dtype == column.dtype and mine.shape == column.shape and torch.equal(mine, column), (
                key
            )
        else:
            assert mine == column, key


def test_every_layout_receives_everything_once(pool):
    """Compare each target rank's samples with those of the same ids; together the shards are the whole."""
    by_rank = pool.run(_move, 0)
    num_empty_shards = 0
    for case in range(NUM_CASES):
        whole, sources, target, routing = _case(case)
        whole = whole.pick([key for _, keys, _ in sources for key in keys])
        seen = []
        for rank, results in enumerate(by_rank):
            batches = results[case]
            if rank not in target:
                assert batches is None
                continue
            assert len(batches) == routing.num_minibatches * max(1, routing.shuffles)
            for batch in batches:
                _assert_equal(batch, whole.select([i - whole.ids[0] for i in batch.ids]))
            num_empty_shards += not any(len(batch) for batch in batches)
        for shard in range(target.dp):
            same = [[batch.ids for batch in by_rank[rank][case]] for rank in target.grid[:, shard].ravel()]
            assert all(ids == same[0] for ids in same)
            seen += [(i, number) for number, ids in enumerate(same[0]) for i in ids]
        for epoch in range(max(1, routing.shuffles)):
            numbers = range(epoch * routing.num_minibatches, (epoch + 1) * routing.num_minibatches)
            of_epoch = [(i, number - numbers[0]) for i, number in seen if number in numbers]
            minibatch_of = dict(of_epoch)
            assert len(of_epoch) == len(minibatch_of) and sorted(minibatch_of) == whole.ids
            by_hand = _minibatches_by_hand(whole.ids, routing)
            if not routing.shuffles:
                assert minibatch_of == by_hand
            assert Counter(minibatch_of.values()) == Counter(by_hand.values())
    assert num_empty_shards > 5


def _move_one(world):
    """Send a sample that the second of two heads has; the first has no columns, as after a restart."""
    source = Layout.parse("d2@0-1")
    target = Layout.parse("d2@2-3")
    outbox = Outbox()
    exchange = Exchange(world, outbox)
    batch = {0: Batch([]), 1: _whole(random.Random(0), [7])}.get(world.rank)
    given = Source(source, batch, 10)
    if batch is not None:
        exchange.send(given, target)
    received = exchange.receive([given], target, Routing(), tag=9) if world.rank in target else None
    outbox.wait()
    return received


def test_an_empty_shard_gets_the_columns_of_a_head_that_has_some(pool):
    whole = _whole(random.Random(0), [7])
    *_, (first,), (second,) = pool.run(_move_one)
    assert sorted([first.ids, second.ids]) == [[], [7]]
    for batch in (first, second):
        _assert_equal(batch, whole.select([0] if batch.ids else []))


def _minibatches_by_hand(ids, routing):
    """Return each sample's mini-batch: consecutive groups in parts as even as possible."""
    groups = sorted({i // routing.group_size for i in ids})
    num = routing.num_minibatches
    ends = np.arange(1, num + 1) * len(groups) // num
    parts = np.searchsorted(ends, np.arange(len(groups)), side="right")
    assert max(np.bincount(parts, minlength=num)) <= -(-len(groups) // num)
    return {i: int(parts[groups.index(i // routing.group_size)]) for i in ids}


@pytest.mark.parametrize("keep_groups", [True, False])
def test_assign_balances_shards_and_keeps_groups_together(keep_groups):
    rng = random.Random(0)
    for _ in range(100):
        group_size, dp, num_minibatches = rng.randint(1, 4), rng.randint(1, 5), rng.randint(1, 3)
        ids = list(range(7 * group_size, (7 + rng.randint(0, 9)) * group_size))
        ids = [i for i in ids if rng.random() < 0.8]  # A filter has dropped the others.
        costs = {i: float(rng.randint(1, 30)) for i in rng.sample(ids, len(ids))}
        routing = Routing(group_size, num_minibatches, keep_groups=keep_groups)
        parts = assign(costs, dp=dp, routing=routing)
        assert [len(part) for part in parts] == [dp] * num_minibatches
        assert sorted(i for part in parts for shard in part for i in shard) == ids
        for part in parts:
            assert all(shard == sorted(shard) for shard in part)
            groups = [{i // group_size for i in shard} for shard in part]
            if keep_groups:
                assert sum(map(len, groups)) == len(set().union(*groups))
            units = [sum(costs[i] for i in ids if i // group_size == g) for s in groups for g in s]
            loads = [sum(costs[i] for i in shard) for shard in part]
            largest = max(units if keep_groups else [costs[i] for s in part for i in s], default=0)
            assert max(loads) - min(loads) <= largest  # the property of any greedy list schedule
    assert assign({3: 1.0, 2: 9.0, 1: 1.0}, dp=2, routing=Routing()) == [[[2], [1, 3]]]


def test_every_epoch_has_other_mini_batches_which_no_layout_changes():
    ids = range(40, 80)
    costs = {i: float(1 + i % 7) for i in ids}
    routing = Routing(4, 5, shuffles=3, seed=1)
    found = {
        dp: [sorted(i for shard in part for i in shard) for part in assign(costs, dp=dp, routing=routing)]
        for dp in (1, 2, 3)}
    assert found[1] == found[2] == found[3]
    epochs = [found[1][5 * epoch : 5 * epoch + 5] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(i for part in epoch for i in part) == list(ids)
        assert all(len({i // 4 for i in part}) == 2 and len(part) == 8 for part in epoch)
    assert len({str(sorted(epoch)) for epoch in epochs}) == 3
    others = [Routing(4, 5, shuffles=3, seed=2), Routing(4, 5)]
    first = assign(costs, dp=1, routing=routing)
    assert all(assign(costs, dp=1, routing=other)[:5] != first[:5] for other in others)
    later = assign({i + 40: cost for i, cost in costs.items()}, dp=1, routing=routing)
    assert [[i - 40 for i in part[0]] for part in later[:5]] != [part[0] for part in first[:5]]


def test_merge_metrics_averages_by_weight_and_takes_the_slowest():
    rng = random.Random(0)
    records = [StepRecord() for _ in range(3)]
    entries = [("reward/mean", rng.random(), rng.randint(1, 9)) for _ in range(5)] + [
        ("actor/loss", 2.5, 1.0)
    ]
    for entry in entries:
        rng.choice(records).metrics.append(entry)
    seconds = [0.5, 2.0, 1.25]
    for rank, (record, duration) in enumerate(zip(records, seconds, strict=True)):
        times = {"rank": rank, "start": 100.0 + rank, "end": 100.0 + rank + duration}
        record.events.append({**times, "name": "actor_train", "kind": "train_step", "num_tokens": 10 + rank})
        record.events.append({**times, "name": "ref_forward", "kind": "move"})
        moved = {"sent_bytes": 100 * rank, "received_bytes": 0, "over_bound": 1.0 + rank}
        moved |= {"transfer": "d1@1-2->d1@0", "senders": []}
        record.events.append({**times, "name": "actor", "kind": "realloc", **moved})
    values, weights = zip(
        *[(value, weight) for name, value, weight in entries if name == "reward/mean"], strict=True
    )
    assert merge_metrics(records) == pytest.approx(
        {
            "reward/mean": np.average(values, weights=weights),
            "actor/loss": 2.5,
            "timing_s/actor_train": 2.0,
            "timing_s/realloc/actor": 2.0,
            "realloc_bytes/actor": 300,
            "realloc_over_bound/actor": 3.0,
            "tokens/trained": 33,
            "perf/trained_tokens_per_s": 33 / 2.0,
        }
    )


def test_the_bandwidth_of_reallocations_is_measured_from_when_both_ends_are_ready():
    """Rank 0 waits two seconds for its sender, rank 2, and then receives 3 GB in half a second. Later in the
    step it receives 1 GB in 1.5 seconds by the same transfer."""
    records = [StepRecord() for _ in range(3)]

    def moved(rank, start, end, received, *senders):
        records[rank].events.append({
            "rank": rank, "name": "actor", "kind": "realloc", "start": start, "end": end,
            "transfer": "t2@1-2->d1@0", "sent_bytes": 0, "received_bytes": received, "senders": list(senders),
            "over_bound": 1.0,
        })

    moved(0, 10.0, 12.5, 3 * 10**9, 2)
    moved(1, 19.0, 19.5, 10**6, 2)  # It receives less, and nobody waits for it.
    moved(2, 12.0, 12.5, 0)
    moved(0, 20.0, 21.5, 10**9, 2)
    moved(2, 20.0, 21.5, 0)
    metrics = merge_metrics(records)
    assert metrics["perf/realloc_gbytes_per_s/actor"] == pytest.approx((3 + 1) / (0.5 + 1.5))
    assert metrics["realloc_over_bound/actor"] == 1.0  # (another figure: computed from the schedule)
