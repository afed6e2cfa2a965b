"""SampleStore against dictionaries: columns by producer and sample, checkpoints, and other layouts."""

import random
from collections import Counter

import pytest
import torch

from realhf.data import batch as batch_module
from realhf.data.batch import Batch, Packed
from realhf.layout import Layout
from realhf.runtime.samples.sample_store import SampleStore

COLUMNS = {
    "generate": ("tokens", "finished"),
    "judge/rule": ("score", "text"),  # Names may have slashes.
    "generate/0": ("tokens",),
}
GROUP_SIZE = 2


def value(producer, key, sample, version):
    """Return what a sample has in a column: a list of numbers, a number or text."""
    number = sum(map(ord, producer)) * 1000 + sample * 10 + version
    return {
        "tokens": [number + i for i in range(sample % 4)], "finished": number / 8,
        "score": [number, -number], "text": f"{key} {number} \u00e9",
    }[key]


def batch_of(producer, versions):
    """Return the columns of samples, given the version of each."""
    columns = {key: [value(producer, key, i, v) for i, v in versions.items()] for key in COLUMNS[producer]}
    fields = {}
    for key, column in columns.items():
        if key == "tokens":
            flat = torch.tensor([token for row in column for token in row], dtype=torch.int64)
            fields[key] = Packed(flat, [len(row) for row in column])
        elif key == "finished":
            fields[key] = torch.tensor(column, dtype=torch.float64)
        elif key == "score":
            fields[key] = torch.tensor(column, dtype=torch.int32).view(-1, 2)
        else:
            fields[key] = column
    return Batch(list(versions), fields)


def rows_of(batch):
    """Return the values by sample and column; the samples must differ."""
    assert len(set(batch.ids)) == len(batch.ids)
    rows = {sample: {} for sample in batch.ids}
    for key, column in batch.fields.items():
        parts = [part.tolist() for part in column.split()] if isinstance(column, Packed) else (
            column.tolist() if isinstance(column, torch.Tensor) else column)
        for sample, part in zip(batch.ids, parts, strict=True):
            rows[sample][key] = part
    return rows


def expected_rows(producer, versions, keys=None):
    keys = COLUMNS[producer] if keys is None else keys
    return {i: {key: value(producer, key, i, v) for key in keys} for i, v in versions.items()}


def contents(store, producer):
    """Return all rows of a producer."""
    ids = {i for chunk in store.complete.get(producer, []) for i in chunk.rows().ids}
    return rows_of(store.select(producer, COLUMNS[producer], ids))


@pytest.mark.parametrize("seed", range(10))
def test_the_store_is_a_dictionary(seed):
    rng = random.Random(seed)
    store = SampleStore()
    naive = {producer: {} for producer in COLUMNS}
    known = set()
    unfinished = {}
    for number in range(60):
        producer = rng.choice(list(COLUMNS))
        rows = naive[producer]
        operation = rng.choice(["put", "put", "select", "forget", "forget one", "pack"])
        if operation == "put":
            new = [i for i in rng.sample(range(30), rng.randint(0, 5)) if i not in rows]
            versions = dict.fromkeys(new, number % 10)
            store.put(producer, batch_of(producer, versions))
            rows |= versions
            known.add(producer)
        elif operation == "select":
            ids = rng.sample(range(30), rng.randint(0, 20))
            keys = rng.sample(COLUMNS[producer], rng.randint(1, len(COLUMNS[producer])))
            found = store.select(producer, keys, ids)
            here = {i: version for i, version in rows.items() if i in ids}
            assert rows_of(found) == expected_rows(producer, here, keys)
            assert list(found.fields) == (keys if producer in known else [])
            for key in found.fields:
                assert type(found[key]) is type(batch_of(producer, {})[key])
                assert getattr(found[key], "dtype", None) == getattr(
                    batch_of(producer, {})[key], "dtype", None)
        elif operation.startswith("forget"):
            ids = set(rng.sample(range(30), rng.randint(0, 12)))
            only = [producer, "nobody"] if operation == "forget one" else None
            store.forget(ids, producers=only)
            for name in naive:
                if only is None or name in only:
                    naive[name] = {i: v for i, v in naive[name].items() if i not in ids}
        else:
            unfinished = {i: 1 for i in rng.sample(range(40, 50), rng.randint(0, 3))}
            store.unfinished = {"generate": batch_of("generate", unfinished)}
            data = store.pack()
            assert bool(data) == bool(unfinished or any(naive.values()))
            store = SampleStore()
            if data:
                store.unpack(data)
            known = known if data else set()  # Columns without samples are packed beside others.
            rest = store.unfinished.get("generate", Batch([]))
            assert rows_of(rest) == expected_rows("generate", unfinished)
        for name in naive:
            assert contents(store, name) == expected_rows(name, naive[name])


def test_columns_outlive_their_samples():
    store = SampleStore()
    assert store.select("generate", ["tokens"], [1]).fields == {}
    store.put("generate", batch_of("generate", {1: 0, 2: 0}))
    store.forget([1, 2])
    empty = store.select("generate", ["finished"], [1])
    assert empty.ids == [] and list(empty.fields) == ["finished"]
    assert empty["finished"].dtype == torch.float64
    for sample in range(50):  # What has been forgotten takes no memory.
        store.put("generate", batch_of("generate", {sample: 0}))
        store.forget([sample])
    assert len(store.complete["generate"]) == 1


LAYOUTS = ("d1@2", "d2@0-1", "d3@1-3", "t2@2-3", "p2d2@0-3", "d4@0-3")


@pytest.mark.parametrize("seed", range(10))
def test_another_layout_gets_equal_shares_of_whole_groups(seed):
    rng = random.Random(seed)
    layouts = {name: Layout.parse(rng.choice(LAYOUTS)) for name in COLUMNS}
    before = [SampleStore() for _ in range(rng.randint(1, 4))]
    groups = {name: rng.sample(range(20), rng.randint(0, 7)) for name in COLUMNS}
    growing = rng.sample(range(30, 40), rng.randint(0, 5))
    versions = {}
    for name, chosen in groups.items():
        samples = (group * GROUP_SIZE + i for group in chosen for i in range(GROUP_SIZE))
        versions[name] = {sample: rng.randrange(9) for sample in samples}
        owners = {group: rng.choice(before) for group in chosen}
        for store in before:
            mine = {i: v for i, v in versions[name].items() if owners[i // GROUP_SIZE] is store}
            ids = rng.sample(list(mine), len(mine))
            for part in (ids[::2], ids[1::2]):
                store.put(name, batch_of(name, {i: mine[i] for i in part}))
    rows = {group * GROUP_SIZE + i: 3 for group in growing for i in range(GROUP_SIZE)}
    before[0].unfinished["generate"] = batch_of("generate", rows)
    saved = [data for store in before if (data := store.pack())]
    after = [SampleStore() for _ in range(4)]
    for rank, store in enumerate(after):
        for data in saved:
            store.unpack(data)
        store.deal(layouts, rank, group_size=GROUP_SIZE)
    for name in COLUMNS:
        check_shares([contents(store, name) for store in after], expected_rows(name, versions[name]),
                     layouts[name].result_ranks)
    unfinished = [rows_of(store.unfinished.get("generate", Batch([]))) for store in after]
    check_shares(unfinished, expected_rows("generate", rows), layouts["generate"].result_ranks)


def check_shares(by_rank, expected, heads):
    """Check that heads have equal numbers of whole groups, all samples once, and other ranks nothing."""
    assert Counter(i for rows in by_rank for i in rows) == Counter(list(expected))
    assert {i: row for rows in by_rank for i, row in rows.items()} == expected
    sizes = []
    for rank, rows in enumerate(by_rank):
        counts = Counter(i // GROUP_SIZE for i in rows)
        assert all(count == GROUP_SIZE for count in counts.values())
        if rank in heads:
            sizes.append(len(counts))
        else:
            assert not rows
    assert max(sizes) - min(sizes) <= 1


def test_many_samples_of_a_pool_are_in_few_batches():
    store = SampleStore()
    rng = random.Random(0)
    expected = {}
    for first in range(0, 600, 3):
        versions = {i: 0 for i in range(first, first + 3)}
        expected |= rows_of(batch_of("generate", versions))
        store.put("generate", batch_of("generate", versions))
        if first % 30 == 0:
            gone = set(rng.sample(sorted(expected), min(5, len(expected))))
            store.forget(gone)
            expected = {sample: row for sample, row in expected.items() if sample not in gone}
        sizes = [len(batch) for batch in store.complete["generate"]]
        assert sorted(sizes, reverse=True) == sizes and len(sizes) <= 10
    assert rows_of(store.select("generate", COLUMNS["generate"], range(600))) == expected


def test_what_is_given_costs_the_same_however_much_there_is(monkeypatch):
    """Selecting looks at what it gives, and forgetting the oldest copies each sample few times."""
    counted = []

    def counting(column, indices):
        counted.append(len(indices))
        return select_of_batch(column, indices)

    select_of_batch = batch_module._select
    monkeypatch.setattr(batch_module, "_select", counting)
    store = SampleStore()
    size = 400
    for first in range(0, 4 * size, 8):
        store.put("generate/0", batch_of("generate/0", dict.fromkeys(range(first, first + 8), 0)))
        store.forget(range(first - size, first - size + 8))
    assert sum(counted) <= 4 * size  # Not (number of puts) x size, which would be 50 times as much.
    counted.clear()
    ids = range(4 * size - 30, 4 * size)
    found = store.select("generate/0", ["tokens"], ids)
    assert sorted(found.ids) == list(ids) and sum(counted) <= 30
    left = range(3 * size, 4 * size)
    assert contents(store, "generate/0") == expected_rows("generate/0", dict.fromkeys(left, 0))


def test_a_copy_of_the_store_keeps_what_is_forgotten():
    store = SampleStore()
    store.put("generate", batch_of("generate", dict.fromkeys(range(10), 0)))
    copy = store.copied()
    store.forget([1, 2])
    assert contents(copy, "generate") == expected_rows("generate", dict.fromkeys(range(10), 0))
    assert len(contents(store, "generate")) == 8
