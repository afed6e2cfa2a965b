"""Log-probs, entropy and most probable tokens in chunks, with the vocabulary whole or split, against
torch.log_softmax and torch.topk."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from realhf.devices.chunk_sizes import KEPT_CHUNKS
from realhf.distributed.world import World
from realhf.layout import even_split
from realhf.nn.linear import Weight
from realhf.nn.vocab_parallel import Head, head_logprobs, head_top_logprobs, top_tokens
from tests.realloc.test_memory import Storages

T, H, V = 41, 12, 101
PLAIN, CAPPED = {}, {"scale": 0.7, "softcap": 3.0}
BOTH = ("logprobs", "entropy")


def _inputs():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(T, H, generator=generator, dtype=torch.float64) * 2
    hidden[3] *= 300.0
    weight = torch.randn(V, H, generator=generator, dtype=torch.float64)
    labels = torch.randint(V, (T,), generator=generator)
    factors = torch.randn(2, T, generator=generator).double()
    return hidden, weight, labels, factors  # `factors` weight log-probs and entropies.


def _run(world, ranks, temperature, settings, chunk, uses=BOTH):
    """Return this rank's log-probs, entropy, gradient of the hidden states, and of its part of the weight."""
    hidden, weight, labels, factors = _inputs()
    group = world.group(ranks)
    start, stop = even_split(V, group.size, group.index)
    hidden.requires_grad_()
    mine = weight[start:stop].clone().requires_grad_()
    logprobs, entropy = head_logprobs(
        hidden, labels, Head(mine, start, group, **settings), temperature=temperature, entropy=True,
        chunk_tokens=chunk)
    _value(factors, logprobs, entropy, uses).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, mine.grad


def _value(factors, logprobs, entropy, uses):
    """Return a loss that uses only the outputs named in `uses`."""
    parts = {"logprobs": (factors[0] * logprobs).sum(), "entropy": (factors[1] * entropy).sum()}
    return sum(parts[name] for name in uses)


def _expected(temperature, settings, uses=BOTH):
    hidden, weight, labels, factors = _inputs()
    hidden.requires_grad_(), weight.requires_grad_()
    logits = hidden @ weight.T * settings.get("scale", 1)
    if (cap := settings.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    logp = (logits / temperature).log_softmax(-1)
    logprobs, entropy = logp[torch.arange(T), labels], -(logp * logp.exp()).sum(-1)
    _value(factors, logprobs, entropy, uses).backward()
    return logprobs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk", [1, 7, T, 1000])
@pytest.mark.parametrize("settings", [PLAIN, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_rank(temperature, settings, chunk):
    expected = _expected(temperature, settings)
    torch.testing.assert_close(_run(World(), (0,), temperature, settings, chunk), expected)


@pytest.mark.parametrize("uses", [("logprobs",), ("entropy",)])
@pytest.mark.parametrize("chunk", [7, T])
def test_one_output_alone(chunk, uses):
    expected = _expected(0.7, CAPPED, uses)
    torch.testing.assert_close(_run(World(), (0,), 0.7, CAPPED, chunk, uses), expected)


class _Kernels(TorchDispatchMode):
    """A list of the names of the kernels that run, except detach."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names += [func.name()] if func.name() != "aten::detach" else []
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [7, T])
def test_an_entropy_that_is_only_measured_costs_nothing_backward(chunk):
    hidden, weight, labels, factors = _inputs()
    found = []
    for entropy in (False, True):
        inputs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprobs, measured = head_logprobs(
            inputs[0], labels, Head(inputs[1], 0, World().group((0,))), entropy=entropy, chunk_tokens=chunk)
        loss = (factors[0] * logprobs).sum()
        metric = None if measured is None else measured.detach().sum()
        with _Kernels() as kernels:
            loss.backward()
        found.append((kernels.names, *(x.grad for x in inputs)))
        assert (metric is None) != entropy
    (names, *grads), (names_with_entropy, *grads_with_entropy) = found
    assert len(names) > 10 and names_with_entropy == names
    assert all(torch.equal(x, y) for x, y in zip(grads, grads_with_entropy, strict=True))


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_split_vocabulary(pool, num_ranks, chunk):
    results = pool.run(_run, tuple(range(num_ranks)), 0.7, CAPPED, chunk, num_ranks=num_ranks)
    logprobs, entropy, grad_hidden, grad_weight = _expected(0.7, CAPPED)
    for result in results:
        torch.testing.assert_close(result[:3], (logprobs, entropy, grad_hidden))
        assert all(torch.equal(x, y) for x, y in zip(result[:3], results[0][:3], strict=True))
    torch.testing.assert_close(torch.cat([r[3] for r in results]), grad_weight)


@pytest.mark.parametrize("chunk", [2, 5])
def test_gradients_by_differences(chunk):
    """Gradients are right even if one forward pass has several backward passes, as in gradcheck."""
    hidden, weight, labels, _ = _inputs()
    inputs = hidden[:5].clone().requires_grad_(), weight[:9].clone().requires_grad_()

    def outputs(hidden, weight):
        head = Head(weight, 0, World().group((0,)), **CAPPED)
        return head_logprobs(
            hidden, labels[:5] % 9, head, temperature=0.7, entropy=True, chunk_tokens=chunk)

    assert torch.autograd.gradcheck(outputs, inputs)


def test_a_weight_that_collects_its_gradients():
    hidden, plain, labels, factors = _inputs()
    for dtype, chunk in ((torch.float64, 10), (torch.bfloat16, 10), (torch.float32, T)):
        weight = Weight(plain.to(dtype), requires_grad=False)
        weight.collect(torch.full((V, H), torch.nan, dtype=torch.promote_types(dtype, torch.float32)))
        head = Head(weight, 0, World().group((0,)))
        for _ in range(2):
            logprobs, _ = head_logprobs(hidden.to(dtype), labels, head, chunk_tokens=chunk)
            (factors[0] * logprobs).sum().backward()
        tolerance = {"rtol": 0.05, "atol": 0.2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(
            weight.total, 2 * _expected(1.0, PLAIN, ("logprobs",))[3].to(weight.total.dtype), **tolerance)
        assert weight.grad is None


@pytest.mark.parametrize("trained", [False, True])
def test_no_more_logits_than_some_chunks(trained):
    hidden, weight = torch.randn(600, 16), torch.randn(4000, 16).requires_grad_(trained)
    labels, head = torch.randint(4000, (600,)), Head(weight, 0, World().group((0,)))
    hidden.requires_grad_(trained)
    with Storages() as storages:
        logprobs, _ = head_logprobs(hidden, labels, head, entropy=True, chunk_tokens=50)
        if trained:
            logprobs.sum().backward()
    chunk, slices = 50 * 4000 * 4, 4 * (1 << 18) * 4
    held = (KEPT_CHUNKS + 1 if trained else 1) * chunk
    assert storages.peak < held + slices + 3 * weight.nbytes < 600 * 4000 * 4


def test_many_slices_give_the_same():
    hidden, weight, labels = torch.randn(700, 8), torch.randn(1500, 8), torch.randint(1500, (700,))
    group = World().group((0,))
    logprobs, _ = head_logprobs(hidden, labels, Head(weight, 0, group))
    expected = (hidden @ weight.T).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    half, _ = head_logprobs(hidden, labels, Head(weight, 0, group))
    assert half.dtype == torch.float32
    logits = torch.nn.functional.linear(hidden, weight).float()
    torch.testing.assert_close(half, logits.log_softmax(-1).gather(1, labels[:, None])[:, 0])
    assert head_logprobs(hidden[:0], labels[:0], Head(weight, 0, group))[0].shape == (0,)


def _run_half(world, ranks, chunk, settings):
    """Return what `_run` does for a head in float32 whose weight and hidden states are in bfloat16."""
    hidden, weight, labels, factors = _inputs()
    group = world.group(ranks)
    start, stop = even_split(V, group.size, group.index)
    hidden = hidden.bfloat16().requires_grad_()
    mine = Weight(weight[start:stop].bfloat16(), requires_grad=False)
    mine.collect(torch.full(mine.shape, torch.nan, dtype=torch.float32))
    head = Head(mine, start, group, float32=True, **settings)
    with torch.no_grad():
        logits = head.logits(hidden)
    logprobs, entropy = head_logprobs(hidden, labels, head, entropy=True, chunk_tokens=chunk)
    _value(factors, logprobs, entropy, BOTH).backward()
    return logits, logprobs.detach(), entropy.detach(), hidden.grad, mine.total


@pytest.mark.parametrize("settings", [PLAIN, CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("chunk", [7, 1000])
def test_a_float32_head_rounds_nothing(chunk, settings):
    """Logits, log-probs and gradients are those of a plain float32 head on the bfloat16 hidden states."""
    hidden, weight, labels, factors = (x.bfloat16() if x.is_floating_point() else x for x in _inputs())
    hidden, weight, factors = hidden.float().requires_grad_(), weight.float().requires_grad_(), _inputs()[3]
    logits = hidden @ weight.T * settings.get("scale", 1)
    if (cap := settings.get("softcap")) is not None:
        logits = cap * torch.tanh(logits / cap)
    logp = logits.log_softmax(-1)
    logprobs, entropy = logp[torch.arange(T), labels], -(logp * logp.exp()).sum(-1)
    _value(factors, logprobs, entropy, BOTH).backward()
    found = _run_half(World(), (0,), chunk, settings)
    near = {"rtol": 1e-5, "atol": 1e-4}  # Logits are up to 3000.
    for ours, theirs in zip(found[:3], (logits, logprobs, entropy), strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs.detach(), **near)
    torch.testing.assert_close(found[3].float(), hidden.grad, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(found[4], weight.grad, rtol=1e-4, atol=1e-3)


def test_a_float32_head_with_a_split_vocabulary(pool):
    whole = _run_half(World(), (0,), 5, PLAIN)
    results = pool.run(_run_half, (0, 1), 5, PLAIN, num_ranks=2)
    torch.testing.assert_close(torch.cat([r[0] for r in results], 1), whole[0], rtol=1e-6, atol=1e-4)
    for result in results:
        torch.testing.assert_close(result[1:3], whole[1:3], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(result[3], whole[3], rtol=2**-6, atol=0.05)
    torch.testing.assert_close(torch.cat([r[4] for r in results]), whole[4], rtol=1e-4, atol=1e-3)


def _several_labels():
    """Return six labels per token, one of them twice, and their factors in a loss."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(V, (T, 6), generator=generator)
    labels[:, 5] = labels[:, 0]
    return labels, torch.randn(T, 6, generator=generator).double()


def _run_several(world, ranks, chunk):
    hidden, weight, _, _ = _inputs()
    labels, factors = _several_labels()
    group = world.group(ranks)
    start, stop = even_split(V, group.size, group.index)
    hidden.requires_grad_()
    mine = weight[start:stop].clone().requires_grad_()
    logprobs, entropy = head_logprobs(
        hidden, labels, Head(mine, start, group, **CAPPED), temperature=0.7, entropy=True, chunk_tokens=chunk)
    ((factors * logprobs.exp()).sum() + 0.1 * entropy.sum()).backward()
    return logprobs.detach(), hidden.grad, mine.grad


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_several_labels_per_token(pool, num_ranks, chunk):
    results = pool.run(_run_several, tuple(range(num_ranks)), chunk, num_ranks=num_ranks)
    hidden, weight, _, _ = _inputs()
    labels, factors = _several_labels()
    hidden.requires_grad_(), weight.requires_grad_()
    logp = (3.0 * torch.tanh(hidden @ weight.T * 0.7 / 3.0) / 0.7).log_softmax(-1)
    expected = logp.gather(1, labels)
    ((factors * expected.exp()).sum() - 0.1 * (logp * logp.exp()).sum()).backward()
    for result in results:
        torch.testing.assert_close(result[:2], (expected.detach(), hidden.grad))
    torch.testing.assert_close(torch.cat([r[2] for r in results]), weight.grad)


def _top(world, ranks, hidden, weight, k, chunk):
    group = world.group(ranks)
    start, stop = even_split(V, group.size, group.index)
    head = Head(weight[start:stop], start, group, **CAPPED)
    return head_top_logprobs(hidden, head, k, temperature=0.7, chunk_tokens=chunk)


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("k", [1, 7, 60, V])  # (60: more than a shard of two ranks has.)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_most_probable_tokens(pool, num_ranks, k, chunk):
    hidden, weight, _, _ = _inputs()
    logp = (3.0 * torch.tanh(hidden @ weight.T * 0.7 / 3.0) / 0.7).log_softmax(-1)
    for ids, logprobs in pool.run(
            _top, tuple(range(num_ranks)), hidden, weight, k, chunk, num_ranks=num_ranks):
        torch.testing.assert_close(logprobs, logp.topk(k).values)
        torch.testing.assert_close(logp.gather(1, ids), logprobs)
        assert all(len(set(row)) == k for row in ids.tolist())


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ties_go_to_lower_ids_wherever_the_vocabulary_is_split(pool, num_ranks):
    """Products of small whole numbers are exact, so equal logits are equal on all ranks."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randint(-1, 2, (T, 3), generator=generator).double()
    weight = torch.randint(-1, 2, (V, 3), generator=generator).double()
    logits = (hidden @ weight.T).tolist()
    expected = [sorted(range(V), key=lambda i, row=row: (-row[i], i))[:20] for row in logits]
    assert all(len(set(row)) <= 7 for row in logits)  # Most tokens have equals.
    for ids, _ in pool.run(_top, tuple(range(num_ranks)), hidden, weight, 20, 5, num_ranks=num_ranks):
        assert ids.tolist() == expected


def test_logits_that_are_not_numbers_give_legal_ids():
    x = torch.randn(3, 9)
    x[1] = torch.nan
    x[2, 4:] = torch.nan
    top, at = top_tokens(x, 5)
    assert at.shape == (3, 5) and at.min() >= 0 and at.max() < 9
    torch.testing.assert_close(top[0], x[0].topk(5).values)
    assert set(at[2, :4].tolist()) == {0, 1, 2, 3}


def test_most_probable_tokens_take_no_more_memory_than_a_chunk():
    hidden, weight = torch.randn(600, 16), torch.randn(4000, 16)
    with Storages() as storages:
        head_top_logprobs(hidden, Head(weight, 0, World().group((0,))), 8, chunk_tokens=50)
    chunk, slices = 50 * 4000 * 4, 5 * (1 << 18) * 4
    assert storages.peak < chunk + slices < 600 * 4000 * 4
