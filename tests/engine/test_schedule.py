"""Pipeline order and micro-batches: simulated, counted and searched by brute force."""

import random
from itertools import accumulate, pairwise, product

import pytest

from realhf.data.micro_batch import (
    attention_share,
    balance,
    micro_batches,
    padded_micro_batches,
)
from realhf.data.order import groups_of
from realhf.engine.chunked_loss import _chunk_bounds
from realhf.engine.pipeline import one_forward_one_backward
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec


def _simulate(num_micro_batches, num_stages):
    """Runs all stages at one pass per tick; returns ticks and each stage's largest number in flight.

    A message sent in a tick can be received from the next tick on; receivers match messages in order.
    """
    passes = [
        one_forward_one_backward(num_micro_batches, stage=s, num_stages=num_stages) for s in range(num_stages)
    ]
    for order in passes:
        done = [order.index(("forward", i)) < order.index(("backward", i)) for i in range(num_micro_batches)]
        assert all(done) and len(order) == len(set(order)) == 2 * num_micro_batches
    up = [[] for _ in range(num_stages)]  # hidden states waiting for stage s
    down = [[] for _ in range(num_stages)]  # gradients waiting for stage s
    at, in_flight, most, ticks = [0] * num_stages, [0] * num_stages, [0] * num_stages, 0
    while any(i < len(order) for i, order in zip(at, passes, strict=True)):
        sent, before = [], list(at)
        for stage in range(num_stages):
            if at[stage] == len(passes[stage]):
                continue
            kind, i = passes[stage][at[stage]]
            last = stage == num_stages - 1
            inbox = up[stage] if kind == "forward" else down[stage]
            if not (stage == 0 if kind == "forward" else last):
                if not inbox:
                    continue
                assert inbox.pop(0) == i
            at[stage] += 1
            in_flight[stage] += 1 if kind == "forward" else -1
            most[stage] = max(most[stage], in_flight[stage])
            if kind == "forward" and not last:
                sent.append((up[stage + 1], i))
            if kind == "backward" and stage:
                sent.append((down[stage - 1], i))
        for inbox, i in sent:
            inbox.append(i)
        ticks += 1
        assert at != before, f"deadlock at {at}"
    assert not any(up) and not any(down)
    return ticks, most


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
def test_one_forward_one_backward_flows_and_bounds_what_is_in_flight(num_stages):
    for num_micro_batches in range(12):
        ticks, most = _simulate(num_micro_batches, num_stages)
        for stage, number in enumerate(most):
            assert number == min(num_stages - stage, num_micro_batches)
        if num_micro_batches:  # the bubble of the paper: (p - 1) forward and backward slots
            assert ticks == 2 * (num_micro_batches + num_stages - 1)


def _best_maximum(costs, num_parts):
    def maximum(choice):
        return max(
            sum(c for c, p in zip(costs, choice, strict=True) if p == part) for part in range(num_parts)
        )

    return min(map(maximum, product(range(num_parts), repeat=len(costs))))


def test_balance_is_a_partition_within_the_bound_of_lpt():
    rng = random.Random(0)
    for _ in range(60):
        costs, num_parts = [rng.randint(1, 20) for _ in range(rng.randint(0, 7))], rng.randint(1, 3)
        parts = balance(costs, num_parts)
        assert len(parts) == num_parts
        assert sorted(i for part in parts for i in part) == list(range(len(costs)))
        assert all(part == sorted(part) for part in parts)
        best = _best_maximum(costs, num_parts)
        largest = max(sum(costs[i] for i in part) for part in parts)
        assert largest <= best * (4 / 3 - 1 / (3 * num_parts)) + 1e-9


def _grouped(rng, num_samples):
    """Return a group size and rising ids, of which some groups lack samples."""
    group_size = rng.choice([1, 1, 2, 3])
    return group_size, sorted(rng.sample(range(20 + 2 * num_samples), num_samples))


def test_micro_batches_keep_their_promises():
    rng = random.Random(1)
    for _ in range(300):
        lengths = [rng.choice([0, 1, 3, 7, 8, 30]) for _ in range(rng.randint(0, 12))]
        group_size, ids = _grouped(rng, len(lengths))
        groups = groups_of(ids, group_size)
        assert [{ids[i] // group_size for i in group} for group in groups] == [
            {number} for number in sorted({i // group_size for i in ids})]
        max_tokens, at_least = rng.randint(1, 40), rng.randint(1, 5)
        options = {"at_least": at_least, "attention": rng.choice([0.0, 0.1])}
        parts = micro_batches(lengths, max_tokens=max_tokens, groups=groups, **options)
        padded = padded_micro_batches(lengths, max_tokens=max_tokens, groups=groups)
        sizes = {tuple(group): sum(lengths[i] for i in group) for group in groups}
        for parts_, width in ((parts, sum), (padded, lambda sizes: len(sizes) * max(sizes))):
            assert sorted(i for part in parts_ for i in part) == list(range(len(lengths)))
            for part in parts_:
                whole = [group for group in groups if group[0] in part]
                assert sorted(i for group in whole for i in group) == sorted(part)  # No group is cut,
                for group in whole:  # and its samples are adjacent.
                    assert part[part.index(group[0]) :][: len(group)] == group
                assert len(whole) == 1 or width([lengths[i] for i in part]) <= max_tokens
        assert all(parts) and len(parts) >= min(at_least, len(groups))
        for part in parts:
            in_order = [sizes[tuple(group)] for i in part for group in groups if group[0] == i]
            assert in_order == sorted(in_order)
        # Not more than twice what any packing needs, apart from what `at_least` asks for.
        need = -(-sum(lengths) // max_tokens)
        alone = sum(size > max_tokens / 2 for size in sizes.values())
        assert len(parts) <= max(2 * need + 1, alone + need, at_least)


def test_parts_of_a_loss_cut_no_group():
    rng = random.Random(2)
    for _ in range(300):
        counts = [rng.choice([0, 1, 5, 9]) for _ in range(rng.randint(1, 12))]
        group_size, ids = _grouped(rng, len(counts))
        limit = rng.randint(1, 20)
        sums = list(accumulate(counts))
        bounds = _chunk_bounds(sums, limit, groups=groups_of(ids, group_size))
        assert bounds[0] == 0 and bounds[-1] == len(ids) and bounds == sorted(set(bounds))
        for first, last in pairwise(bounds):
            numbers = {i // group_size for i in ids[first:last]}
            assert sum(counts[first:last]) <= limit or len(numbers) == 1
            assert not numbers & {i // group_size for i in [*ids[:first], *ids[last:]]}


def test_micro_batches_balance_attention_too():
    """A long sequence costs as much as more tokens of short ones, within the limit of tokens."""
    lengths = [100] + [10] * 20
    options = {"attention": 0.01, "groups": [[i] for i in range(21)]}
    parts = micro_batches(lengths, max_tokens=200, **options)
    spread = [sum(lengths[i] for i in part) for part in parts]
    assert sorted(spread) == [110, 190]  # 100 + 0.01 * 100^2 = 200; 11 for each of the others.
    assert [len(part) for part in micro_batches(lengths, max_tokens=150, **options)] == [6, 15]


@pytest.mark.parametrize("name", ["llama-7b", "qwen2.5-0.5b", "qwen3-30b-a3b"])
def test_attention_share_is_that_of_flops(name):
    spec = model_spec(ModelConfig.load(name))
    c = spec.config
    active = {"llama-7b": 6.607e9, "qwen2.5-0.5b": 0.494e9, "qwen3-30b-a3b": 3.04e9}[name]  # (published)
    n = 4096
    linear, attention = 2 * active * n, c.num_layers * 2 * n**2 * c.num_heads * c.head_dim
    assert attention_share(spec) * n == pytest.approx(attention / linear, rel=0.03)
