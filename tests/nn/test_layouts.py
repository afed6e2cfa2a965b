"""Every layout has the weights, logits and gradients of the one-process model."""

import pytest
import torch

from realhf.layout import Layout
from realhf.models.param_spec import region_slices
from tests.inference.cached import CachedRows
from tests.nn.tiny import SEQ_LENS, build, compare, hf_config, step, tokens
from tests.samples import drawn

LAYOUTS = [
    *("t2@0,1", "t4@0-3", "p2@0,1", "t2p2@0-3", "p4@0-3", "d2t2@0-3", "t2@3,1"),
    *("c2@0,1", "c4@0-3", "c4@3,0,2,1", "c2t2@0-3", "c2p2@0-3", "d2c2@0-3"),
]
UNTIED = ("t4@0-3", "t2p2@0-3", "p4@0-3", "d2t2@0-3", "c4@0-3", "c4@3,0,2,1", "c2p2@0-3")


def _pass_through(model, x_shape, x_ids, compute):
    """Run a forward pass through the stages by hand; return this stage's input and output."""
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


def _train(world, hf, layout, recompute):
    """Return the step's results and all shards of a rank in the layout."""
    if world.rank not in Layout.parse(layout):
        return None
    model = build(hf, world=world, layout=layout)
    shards = zip(model.regions.items(), model.shards().values(), strict=True)
    return step(model, recompute=recompute), list(shards)


@pytest.mark.parametrize(
    "layout, tied, recompute",
    drawn([
        *((layout, True, False) for layout in LAYOUTS),
        *((layout, False, False) for layout in UNTIED),
        *((layout, False, True) for layout in ("c2t2@0-3", "c2p2@0-3")),
    ], 5),
)
def test_logits_and_gradients_are_those_of_one_process(pool, layout, tied, recompute):
    hf = hf_config(tied=tied)
    alone = build(hf)
    results = [r for r in pool.run(_train, hf, layout, recompute) if r is not None]
    for _, shards in results:
        for (name, region), shard in shards:
            assert torch.equal(shard, alone.shards()[name][region_slices(region)]), name
    assert compare([found for found, _ in results], step(alone)) == ([], set(range(sum(SEQ_LENS))))


def _decode(world, hf, layout):
    """Return the hidden states of a prefill and three decoding steps, on the last stage."""
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
