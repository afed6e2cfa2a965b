"""Every layout has the weights, logits and gradients of the one-process model."""

import pytest
import torch

from realhf.layout import even_split
from tests.nn.cached import CachedRows
from tests.nn.tiny import SEQ_LENS, build, hf_config, tokens

LAYOUTS = [
    *("t2@0,1", "t4@0-3", "p2@0,1", "t2p2@0-3", "p4@0-3", "d2t2@0-3", "t2@3,1"),
    *("c2@0,1", "c4@0-3", "c4@3,0,2,1", "c2t2@0-3", "c2p2@0-3", "d2c2@0-3"),
]
UNTIED = ("t4@0-3", "t2p2@0-3", "p4@0-3", "d2t2@0-3", "c4@0-3", "c4@3,0,2,1", "c2p2@0-3")


def _pass_through(model, x_shape, x_ids, compute):
    """One forward through the stages by hand; gives this stage's input and output."""
    groups, stage = model.groups, model.groups.at.pp
    x = x_ids
    if not groups.is_first_stage:
        x = torch.empty(x_shape, dtype=model.flat.dtype)
        groups.pp.exchange([], [(stage - 1, x)])
        x.requires_grad_(model.grad_buffer is not None)
    hidden = compute(x)
    if not groups.is_last_stage:
        groups.pp.exchange([(stage + 1, hidden.detach())], [])
    return x, hidden


def _train(world, hf, recompute, layout):
    """Logits of the last stage, and (HF name, region, weights, gradient) of every shard."""
    model = build(hf, world=world, layout=layout)
    model.enable_grad()
    groups, stage = model.groups, model.groups.at.pp
    ids = tokens()
    start, stop = even_split(len(ids), groups.layout.cp, groups.at.cp)
    x, hidden = _pass_through(
        model, (stop - start, 32), ids, lambda x: model(x, SEQ_LENS, recompute=recompute))
    logits = None
    if groups.is_last_stage:
        logits = model.logits(hidden)
        weights = torch.randn(len(ids), 67, dtype=logits.dtype, generator=torch.Generator().manual_seed(2))
        (logits * weights[start:stop, slice(*model.vocab_range)]).sum().backward()
    else:
        grad = torch.empty_like(hidden)
        groups.pp.exchange([], [(stage + 1, grad)])
        hidden.backward(grad)
    if not groups.is_first_stage:
        groups.pp.exchange([(stage - 1, x.grad)], [])
    model.finish_grads()
    groups.cp.all_reduce(model.grad_buffer)  # (The optimizer's part of the sum.)
    grads, shards = model.grad_shards(), model.shards()
    pieces = [(name, region, shards[name], grads[name]) for name, region in model.regions.items()]
    return logits if logits is None else ((start, stop), model.vocab_range, logits.detach()), pieces


def _on_ranks_of(world, layout, fn, *args):
    ranks = [int(r) for r in layout.split("@")[1].replace("-", ",").split(",")]
    inside = world.rank in ranks or "-" in layout
    return fn(world, *args, layout) if inside else None


def _train_on(world, hf, layout, recompute):
    return _on_ranks_of(world, layout, _train, hf, recompute)


@pytest.mark.parametrize(
    "layout, tied", [*((layout, True) for layout in LAYOUTS), *((layout, False) for layout in UNTIED)]
)
def test_logits_and_gradients_are_those_of_one_process(pool, layout, tied):
    assert _tokens_that_agree(pool, hf_config(tied=tied), layout) == set(range(sum(SEQ_LENS)))


@pytest.mark.parametrize("layout", ["c2t2@0-3", "c2p2@0-3"])
def test_recomputing_changes_nothing(pool, layout):
    assert _tokens_that_agree(pool, hf_config(), layout, recompute=True) == set(range(sum(SEQ_LENS)))


def _tokens_that_agree(pool, hf, layout, *, recompute=False):
    """Those whose logits were compared with one process's, after all weights and gradients were."""
    reference = build(hf)
    reference.enable_grad()
    ids = tokens()
    expected = reference.logits(reference(ids, SEQ_LENS))
    weights = torch.randn(len(ids), 67, dtype=expected.dtype, generator=torch.Generator().manual_seed(2))
    (expected * weights).sum().backward()
    grads, whole = reference.grad_shards(), reference.shards()
    results = [r for r in pool.run(_train_on, hf, layout, recompute) if r is not None]
    for logits, pieces in results:
        if logits is not None:
            rows, columns, values = logits
            theirs = expected[slice(*rows), slice(*columns)].detach()
            torch.testing.assert_close(values, theirs, rtol=1e-10, atol=1e-10)
        for name, region, shard, grad in pieces:
            at = tuple(slice(*extent) for extent in region)
            assert torch.equal(shard, whole[name][at]), name
            torch.testing.assert_close(grad, grads[name][at], rtol=1e-9, atol=1e-9, msg=f"{layout} {name}")
    seen = [logits for logits, _ in results if logits is not None]
    return {token for rows, _, _ in seen for token in range(*rows)}


def _decode(world, hf, layout):
    """Hidden states of a prefill and three decoding steps, on the last stage."""
    model = build(hf, world=world, layout=layout)
    ids, count, rows = tokens(), len(SEQ_LENS), CachedRows(model, SEQ_LENS)
    with torch.no_grad():
        hidden = [_pass_through(model, (len(ids), 32), ids, rows.prefill)[1]]
        for step in range(3):
            hidden.append(_pass_through(model, (count, 32), ids[step : step + count], rows.decode)[1])
    return torch.cat(hidden) if model.groups.is_last_stage else None


@pytest.mark.parametrize("layout", ["t4@0-3", "t2p2@0-3"])
def test_decoding_is_that_of_one_process(pool, layout):
    expected = _decode_alone(hf_config())
    results = [r for r in pool.run(_decode, hf_config(), layout) if r is not None]
    assert results
    for hidden in results:
        torch.testing.assert_close(hidden, expected, rtol=1e-10, atol=1e-10)


def _decode_alone(hf):
    model = build(hf)
    rows, ids = CachedRows(model, SEQ_LENS), tokens()
    with torch.no_grad():
        hidden = [rows.prefill(ids)]
        hidden += [rows.decode(ids[i : i + len(SEQ_LENS)]) for i in range(3)]
    return torch.cat(hidden)
