"""Mixture of experts and latent attention: against transformers, and every layout against one process."""

import pytest
import torch
import transformers

from realhf.checkpoint.hf import load_weights
from realhf.devices.half_precision import split_into
from realhf.distributed.world import World
from realhf.engine.pipeline import forward_passes
from realhf.inference.kv_cache import KVCache
from realhf.layout import Layout
from realhf.nn.attention import token_range
from realhf.nn.moe import RouterLosses, RowGroups, gathering, grouped_linear
from tests.families import MOE_CASES, YARN
from tests.inference.cached import CachedRows
from tests.nn.tiny import SEQ_LENS, backward_of_both, build
from tests.samples import marked

YARN_MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}
VARIANTS = {
    **{name: (case, {}) for name, case in MOE_CASES.items()},
    "deepseek-v3-yarn": (MOE_CASES["deepseek-v3"], {
        "q_lora_rank": None, "rope_parameters": YARN_MSCALE, "n_group": 1, "first_k_dense_replace": 2}),
    "deepseek-v3-halves": (MOE_CASES["deepseek-v3"], {"rope_interleave": False, "norm_topk_prob": False}),
}


def hf_config(name):
    """Return a config.json as transformers would write it."""
    case, changes = VARIANTS[name]
    config = transformers.AutoConfig.for_model(**case.hf(**changes))
    prefix = type(config).__name__.removesuffix("Config")
    return {**config.to_dict(), "architectures": [f"{prefix}ForCausalLM"]}


def tokens(seq_lens=tuple(SEQ_LENS)):
    """Return random tokens without the padding token, whose embedding has no gradient in transformers."""
    return torch.randint(1, 67, (sum(seq_lens),), generator=torch.Generator().manual_seed(1))


def _reference(name, directory):
    case, changes = VARIANTS[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**case.hf(**changes), attn_implementation="sdpa")
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, value in [*model.named_parameters(), *model.named_buffers()]:
            if key.endswith(("bias", "norm.weight", "gate.weight")):
                value.normal_()
    model.save_pretrained(directory)
    return model


def _by_expert(grads, spec):
    """Return transformers' gradients by their names in checkpoints, where each expert has its own tensors."""
    found = {}
    for p in spec.params:
        if p.expert is None:
            found[p.name] = grads.get(p.name.replace("block_sparse_moe", "mlp"))
            continue
        fused = "down_proj" if p.short_name == "expert_down.weight" else "gate_up_proj"
        whole = grads[f"model.layers.{p.layer}.mlp.experts.{fused}"][p.expert]
        half = {"expert_gate.weight": 0, "expert_up.weight": 1}.get(p.short_name)
        found[p.name] = whole if half is None else whole.chunk(2)[half]
    return found


@pytest.mark.parametrize("name", ["deepseek-v3-yarn", "deepseek-v3-halves"])
def test_logits_and_gradients_are_those_of_transformers(tmp_path, name):
    reference = _reference(name, tmp_path)
    model = build(hf_config(name), dtype=torch.float32)
    assert load_weights(tmp_path, model) == []
    model.enable_grad()
    torch.testing.assert_close(*backward_of_both(model, reference, tokens()), rtol=1e-5, atol=1e-5)
    grads = _by_expert({key: value.grad for key, value in reference.named_parameters()}, model.spec)
    for key, grad in model.grad_shards().items():
        if key.endswith("e_score_correction_bias"):
            assert not grad.any() and model.shards()[key].any()
            continue
        scale = grads[key].abs().max()
        assert scale > 0 or ".experts." in key, key
        torch.testing.assert_close(grad / (scale or 1), grads[key] / (scale or 1), rtol=0, atol=1e-4, msg=key)


MESHES = ("p2e2@0-3", "d4e2@0-3", "e2c2@0-3")
LAYOUTS = [
    *(("e2t2@0-3", name) for name in MOE_CASES),
    *((layout, name) for name in ("qwen2-moe", "deepseek-v3") for layout in MESHES),
]
HIDDEN = 32


def _micro_batches(layout, rank):
    """Return the sequences of each micro-batch of this dp replica, which can have fewer than another."""
    at = layout.coordinate(rank)
    mine = [list(range(i, len(SEQ_LENS), layout.dp)) for i in range(layout.dp)][at.dp]
    parts = [mine[i : i + 1] for i in range(len(mine))]
    most = -(-len(SEQ_LENS) // layout.dp)
    return parts + [[]] * (most - len(parts)) if layout.ep > 1 else parts


def _train(world, hf, text, recompute):
    """Train on random logit weights and router losses; return this rank's logits, gradients and losses."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    model = build(hf, world=world, layout=text)
    _spread_choice(model)
    model.enable_grad()
    parts = _micro_batches(layout, world.rank)
    ids, cp = tokens().split(SEQ_LENS), model.groups.cp
    start, stop = model.vocab_range
    losses = [RouterLosses(balance_scale=3.0, z_scale=0.1) for _ in parts]
    found = {}
    ranges = [token_range(sum(SEQ_LENS[j] for j in part), cp) for part in parts]
    shapes = [(last - first, HIDDEN) for first, last in ranges]
    outputs = {}
    for i, hidden in forward_passes(model.groups, outputs, hidden_shapes=shapes, dtype=torch.float64):
        lens = [SEQ_LENS[j] for j in parts[i]]
        x = torch.cat([ids[0][:0], *(ids[j] for j in parts[i])]) if hidden is None else hidden
        outputs[i] = x = model(x, lens, recompute=recompute, router_losses=losses[i])
        if not model.groups.is_last_stage:
            continue
        logits = model.logits(x)
        mine = slice(*token_range(sum(lens), cp))
        at = [(j, t) for j in parts[i] for t in range(SEQ_LENS[j])][mine]
        found.update(zip(at, logits.detach(), strict=True))
        weights = [_weights(SEQ_LENS[j], seed=j)[:, start:stop] for j in parts[i]]
        outputs[i] = (logits * torch.cat([logits.new_zeros(0, stop - start), *weights])[mine]).sum()
    model.finish_grads()
    grads = model.grad_shards()
    pieces = [(name, region, grads[name]) for name, region in model.regions.items()]
    return (start, stop), found, pieces, sum(loss.sums() for loss in losses)


def _weights(length, seed):
    return torch.randn(length, 67, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _spread_choice(model):
    """Set the bias of DeepSeek's choice of experts, which is zero in a new model."""
    for name, shard in model.shards().items():
        if name.endswith("e_score_correction_bias"):
            split_into(shard, torch.linspace(-0.2, 0.2, shard.shape[1]))


@pytest.mark.parametrize("layout, name", marked(LAYOUTS, quick=range(0, len(LAYOUTS), 6)))
def test_logits_gradients_and_router_losses_are_those_of_one_process(pool, layout, name):
    hf, parsed = hf_config(name), Layout.parse(layout)
    _, expected, whole, expected_losses = _train(World(), hf, "d1@0", False)
    recompute = layout in ("p2e2@0-3", "e2t2@0-3")
    results = {r: result for r, result in enumerate(pool.run(_train, hf, layout, recompute)) if result}
    sums = {key: torch.zeros_like(grad) for key, _, grad in whole}
    counts = {key: torch.zeros_like(grad) for key, _, grad in whole}
    losses, seen = torch.zeros(2, dtype=torch.float64), set()
    for rank, ((start, stop), outputs, pieces, found) in results.items():
        at = parsed.coordinate(rank)
        for token, logits in outputs.items():
            seen.add(token)
            torch.testing.assert_close(logits, expected[token][start:stop], rtol=1e-10, atol=1e-10)
        for key, region, grad in pieces:
            box = tuple(slice(*extent) for extent in region)
            sums[key][box] += grad
            counts[key][box] += 1
        losses += found if at.tp == 0 else 0
    assert seen == expected.keys()
    torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=1e-10)
    for key, _, grad in whole:  # Replicas over dp and cp are to be added, equal copies on tp ranks are not.
        replicas = parsed.dp * parsed.strategy.cp // (parsed.ep if ".experts." in key else 1)
        copies = counts[key] / replicas
        assert (copies >= 1).all(), key
        torch.testing.assert_close(sums[key] / copies, grad, rtol=1e-9, atol=1e-9, msg=f"{layout} {key}")


def test_balance_loss_is_that_of_transformers_on_one_sequence_and_layer():
    """transformers' loss lacks the division by experts per token (equation 18)."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func  # (It takes seconds.)

    hf = {**hf_config("olmoe"), "num_hidden_layers": 1}
    model = build(hf)
    model.enable_grad()
    logits = []
    losses = RouterLosses(balance_scale=1.0, z_scale=0.5)
    block = model.blocks[0]
    moe, norm = block.mlp, block.mlp_norm
    block.mlp_norm = lambda x: logits.append((y := norm(x)) @ moe.router.T) or y
    hidden = model(tokens()[:9], [9], router_losses=losses)
    (hidden * 0).sum().backward()
    expected = load_balancing_loss_func((logits[0],), 6, 2) / 2
    z = logits[0].exp().sum(-1).log().square().sum()
    torch.testing.assert_close(losses.sums(), torch.stack((expected.double(), z)).detach(), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(expected + 0.5 * z, moe.router)
    name = "model.layers.0.mlp.gate.weight"
    torch.testing.assert_close(model.grad_shards()[name], grad, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3-yarn", "deepseek-v3-halves", "qwen3-moe"])
def test_decoding_with_the_cache_is_the_full_forward(name):
    model = build(hf_config(name))
    sequences, lens, rows = list(tokens().split(SEQ_LENS)), SEQ_LENS, CachedRows(model, SEQ_LENS)
    with torch.no_grad():
        full = model(tokens(), SEQ_LENS)
        torch.testing.assert_close(rows.prefill(tokens()), full, rtol=1e-12, atol=1e-12)
        for step in range(3):
            new = torch.randint(1, 67, (len(lens),), generator=torch.Generator().manual_seed(step))
            sequences = [torch.cat((s, t[None])) for s, t in zip(sequences, new, strict=True)]
            lens = [len(s) for s in sequences]
            full = model(torch.cat(sequences), lens)[torch.tensor(lens).cumsum(0) - 1]
            torch.testing.assert_close(rows.decode(new), full, rtol=1e-11, atol=1e-11)


def test_a_chunk_attends_to_cached_latents():
    model, ids = build(hf_config("deepseek-v3")), tokens()
    rows = CachedRows(model, [len(ids)])
    with torch.no_grad():
        pieces = torch.cat([rows.prefill(ids[:7], first=7), rows.extend(ids[7:], 0)])
        torch.testing.assert_close(pieces, model(ids, [len(ids)]), rtol=1e-11, atol=1e-11)


def test_the_cache_of_latent_attention_holds_latents():
    model = build(hf_config("deepseek-v3"))
    assert [kv.shape for kv in KVCache.of(model, 3, 16).layers] == [(1, 3, 16, 1, 10 + 4)] * 4


def _gathered(world, hf, text):
    """Return a rank's outputs of each layer: with tokens that go to the experts, and gathered."""
    if world.rank not in Layout.parse(text):
        return None
    model = build(hf, world=world, layout=text)
    x = torch.randn(5 + world.rank, HIDDEN, dtype=torch.float64)  # Ranks of a tp group have equal tokens.
    x = x if model.groups.tp.size == 1 else torch.ones_like(x[:5])
    layers = [block.mlp for block in model.blocks]
    with torch.no_grad():
        plain = [layer(x) for layer in layers]
        with gathering(layers, 9):
            return list(zip(plain, (layer(x) for layer in layers), strict=True))


@pytest.mark.parametrize("layout, name", [("d4e4@0-3", "qwen2-moe"), ("d2e2t2@0-3", "deepseek-v3")])
def test_gathered_tokens_give_the_same_outputs(pool, layout, name):
    for outputs in pool.run(_gathered, hf_config(name), layout):
        for plain, gathered in outputs:
            assert plain.abs().max() > 1e-3
            torch.testing.assert_close(gathered, plain, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 0], [0, 5, 0]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(8, 16), (7, 5)])
def test_grouped_products_and_their_gradients(counts, dtype, sizes):
    x = torch.randn(sum(counts), sizes[0]).to(dtype).requires_grad_()
    weight = torch.randn(3, sizes[1], sizes[0]).to(dtype).requires_grad_()
    grad = torch.randn(sum(counts), sizes[1]).to(dtype)
    outs = [
        grouped_linear(x, weight.flatten(0, 1), RowGroups(torch.tensor(counts).cumsum(0).int())),
        torch.cat([part.double() @ w.double().T for part, w in zip(x.split(counts), weight, strict=True)]),
    ]
    (ours, *our_grads), (expected, *grads) = (
        (out, *torch.autograd.grad(out, (x, weight), grad.to(out.dtype))) for out in outs)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert ours.dtype == dtype
    torch.testing.assert_close(ours.double(), expected, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(our_grads, grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["qwen2-moe", "deepseek-v3"])
def test_no_tokens_go_backward_through_all_weights(name):
    """An empty micro-batch has the same backward pass as a full one, whatever is frozen."""
    model = build(hf_config(name))
    found = []
    for ids, lens in ((tokens(), SEQ_LENS), (tokens()[:0], [])):
        weights = [w.requires_grad_() for w in model.weights()]
        x = model.logits(model(ids, lens)).sum()
        found.append([g is not None for g in torch.autograd.grad(x, weights, allow_unused=True)])
    assert found[0] == found[1] and sum(found[0]) > len(found[0]) / 2
