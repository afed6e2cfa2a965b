"""Log-probs and entropy against torch.log_softmax, on one rank and with the vocabulary split."""

import pytest
import torch

from realhf.dist.group import World
from realhf.layout import even_split
from realhf.nn.vocab_parallel import vocab_parallel_entropy, vocab_parallel_logprobs

T, V = 40, 101


def _inputs():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, V, generator=generator, dtype=torch.float64) * 5
    logits[3] += 1000.0
    return logits, torch.randint(V, (T,), generator=generator), torch.randn(T, generator=generator)


def _run(world, ranks, temperature):
    """This rank's log-probs, entropy and gradient of its logits."""
    logits, labels, weights = _inputs()
    group = world.group(ranks)
    start, stop = even_split(V, group.size, group.index)
    mine = logits[:, start:stop].clone().requires_grad_()
    options = {"group": group, "temperature": temperature}
    logprobs = vocab_parallel_logprobs(mine, labels, vocab_start=start, **options)
    entropy = vocab_parallel_entropy(mine, **options)
    (weights * logprobs).sum().backward()
    assert not entropy.requires_grad
    return logprobs.detach(), entropy, mine.grad


def _expected(temperature):
    logits, labels, weights = _inputs()
    logits.requires_grad_()
    logp = (logits / temperature).log_softmax(-1)
    logprobs, entropy = logp[torch.arange(T), labels], -(logp * logp.exp()).sum(-1)
    (weights * logprobs).sum().backward()
    return logprobs.detach(), entropy.detach(), logits.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_rank(temperature):
    torch.testing.assert_close(_run(World(), (0,), temperature), _expected(temperature))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_split_vocabulary(pool, num_ranks):
    results = pool.run(_run, tuple(range(num_ranks)), 0.7, num_ranks=num_ranks)
    logprobs, entropy, grad = _expected(0.7)
    for result in results:
        torch.testing.assert_close(result[:2], (logprobs, entropy))
        assert torch.equal(result[0], results[0][0]) and torch.equal(result[1], results[0][1])
    torch.testing.assert_close(torch.cat([r[2] for r in results], dim=1), grad)


def test_many_slices_give_the_same():
    logits, labels = torch.randn(700, 1500), torch.randint(1500, (700,))
    options = {"vocab_start": 0, "group": World().group((0,))}
    logprobs = vocab_parallel_logprobs(logits, labels, **options)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).gather(1, labels[:, None])[:, 0])
    logits = logits.bfloat16()
    half = vocab_parallel_logprobs(logits, labels, **options)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, logits.float().log_softmax(-1).gather(1, labels[:, None])[:, 0])
    assert vocab_parallel_logprobs(logits[:0], labels[:0], **options).shape == (0,)
