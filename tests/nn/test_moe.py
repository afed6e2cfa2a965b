"""Mixture of experts and latent attention: against transformers, and every layout against one process."""

import pytest
import torch
import transformers
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from realhf.data.batch import Batch, Packed
from realhf.dist.group import World
from realhf.engine.native import NativeEngine
from realhf.engine.pipeline import run_pipeline
from realhf.engine.work import Generate, LogProbs, SamplingConfig
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.model_config import ModelConfig
from realhf.nn.grouped import grouped_linear
from realhf.nn.hf import load_weights
from realhf.nn.moe import RouterLosses
from realhf.param_spec import model_spec
from tests.families import MOE_CASES, YARN
from tests.nn.tiny import SEQ_LENS, build

YARN_MSCALE = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5}
VARIANTS = {
    **{name: (case, {}) for name, case in MOE_CASES.items()},
    "deepseek-v3-yarn": (MOE_CASES["deepseek-v3"], {
        "q_lora_rank": None, "rope_parameters": YARN_MSCALE, "n_group": 1, "first_k_dense_replace": 2}),
    "deepseek-v3-halves": (MOE_CASES["deepseek-v3"], {"rope_interleave": False, "norm_topk_prob": False}),
}  # fmt: skip


def hf_config(name):
    """config.json as transformers would write it."""
    case, changes = VARIANTS[name]
    config = transformers.AutoConfig.for_model(**case.hf(**changes))
    prefix = type(config).__name__.removesuffix("Config")
    return {**config.to_dict(), "architectures": [f"{prefix}ForCausalLM"]}


def tokens(seq_lens=tuple(SEQ_LENS)):
    """No padding token: transformers gives its embedding no gradient."""
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
    """transformers' gradients by the names of checkpoints: it holds the experts of a layer as one tensor."""
    found = {}
    for p in spec.params:
        if p.expert is None:
            found[p.name] = grads.get(p.name.replace("block_sparse_moe", "mlp"))
            continue
        fused = "down_proj" if p.part == "expert_down.weight" else "gate_up_proj"
        whole = grads[f"model.layers.{p.layer}.mlp.experts.{fused}"][p.expert]
        half = {"expert_gate.weight": 0, "expert_up.weight": 1}.get(p.part)
        found[p.name] = whole if half is None else whole.chunk(2)[half]
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_and_gradients_are_those_of_transformers(tmp_path, name):
    reference = _reference(name, tmp_path)
    model = build(hf_config(name), dtype=torch.float32)
    assert load_weights(tmp_path, model) == []
    model.enable_grad()
    ids = tokens()
    logits = model.logits(model(ids, SEQ_LENS))
    expected = torch.cat([reference(part[None]).logits[0] for part in ids.split(SEQ_LENS)])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn(logits.shape)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    grads = _by_expert({key: value.grad for key, value in reference.named_parameters()}, model.spec)
    for key, grad in model.grad_shards().items():
        if key.endswith("e_score_correction_bias"):
            assert not grad.any() and model.shards()[key].any()
            continue
        scale = grads[key].abs().max()
        assert scale > 0 or ".experts." in key, key
        torch.testing.assert_close(grad / (scale or 1), grads[key] / (scale or 1), rtol=0, atol=1e-4, msg=key)


LAYOUTS = ["t2@0,1", "p2@0,1", "d2@0,1", "e2@0,1", "e2t2@0-3", "d4e2@0-3", "p2e2@0-3", "e4@0-3"]
HIDDEN = 32


def _micro_batches(layout, rank):
    """Numbers of the sequences in each of this dp replica's micro-batches; some of an ep group have fewer."""
    at = layout.coordinate(rank)
    mine = [list(range(i, len(SEQ_LENS), layout.dp)) for i in range(layout.dp)][at.dp]
    parts = [mine[i : i + 1] for i in range(len(mine))]
    most = -(-len(SEQ_LENS) // layout.dp)
    return parts + [[]] * (most - len(parts)) if layout.ep > 1 else parts


def _train(world, hf, text, recompute):
    """Gradients of sum(logits * weights) and the router losses: (name, region, gradient) of every shard."""
    layout = Layout.parse(text)
    if world.rank not in layout:
        return None
    model = build(hf, world=world, layout=text)
    _spread_choice(model)
    model.enable_grad()
    parts = _micro_batches(layout, world.rank)
    ids = tokens().split(SEQ_LENS)
    start, stop = model.vocab_range
    losses = [RouterLosses(balance_scale=3.0, z_scale=0.1) for _ in parts]
    outputs = {}

    def forward(i, hidden):
        lens = [SEQ_LENS[j] for j in parts[i]]
        x = torch.cat([ids[0][:0], *(ids[j] for j in parts[i])]) if hidden is None else hidden
        x = model(x, lens, recompute=recompute, router_losses=losses[i])
        if not model.groups.is_last_stage:
            return x
        logits = model.logits(x)
        outputs.update(zip(parts[i], logits.detach().split(lens), strict=True))
        weights = [_weights(SEQ_LENS[j], seed=j)[:, start:stop] for j in parts[i]]
        return (logits * torch.cat([logits.new_zeros(0, stop - start), *weights])).sum()

    shapes = [(sum(SEQ_LENS[j] for j in part), HIDDEN) for part in parts]
    run_pipeline(forward, model.groups, hidden_shapes=shapes, dtype=torch.float64)
    model.finish_grads()
    grads = model.grad_shards()
    pieces = [(name, region, grads[name]) for name, region in model.regions.items()]
    return (start, stop), outputs, pieces, sum(found.sums() for found in losses)


def _weights(length, seed):
    return torch.randn(length, 67, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _spread_choice(model):
    """Gives DeepSeek's choice of experts its bias, which a new model lacks."""
    for name, shard in model.shards().items():
        if name.endswith("e_score_correction_bias"):
            shard.copy_(torch.linspace(-0.2, 0.2, len(shard)))


@pytest.mark.parametrize("name", MOE_CASES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_gradients_and_router_losses_are_those_of_one_process(pool, layout, name):
    hf, parsed = hf_config(name), Layout.parse(layout)
    _, expected, whole, expected_losses = _train(World(), hf, "d1@0", False)
    recompute = layout in ("p2@0,1", "e2t2@0-3")
    results = {r: result for r, result in enumerate(pool.run(_train, hf, layout, recompute)) if result}
    sums = {key: torch.zeros_like(grad) for key, _, grad in whole}
    counts = {key: torch.zeros_like(grad) for key, _, grad in whole}
    losses, seen = torch.zeros(2, dtype=torch.float64), set()
    for rank, ((start, stop), outputs, pieces, found) in results.items():
        at = parsed.coordinate(rank)
        for j, logits in outputs.items():
            seen.add(j)
            torch.testing.assert_close(logits, expected[j][:, start:stop], rtol=1e-10, atol=1e-10)
        for key, region, grad in pieces:
            box = tuple(slice(*extent) for extent in region)
            sums[key][box] += grad
            counts[key][box] += 1
        losses += found if at.tp == 0 else 0
    assert seen == set(range(len(SEQ_LENS)))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-10, atol=1e-10)
    for key, _, grad in whole:  # Replicas of dp are to be added, equal copies on tp ranks are not.
        replicas = parsed.dp // (parsed.ep if ".experts." in key else 1)
        copies = counts[key] / replicas
        assert (copies >= 1).all(), key
        torch.testing.assert_close(sums[key] / copies, grad, rtol=1e-9, atol=1e-9, msg=f"{layout} {key}")


def test_balance_loss_is_that_of_transformers_on_one_sequence_and_layer(tmp_path):
    """Theirs lacks the division by experts per token (equation 18)."""
    hf = {**hf_config("olmoe"), "num_hidden_layers": 1}
    model = build(hf)
    model.enable_grad()
    logits = []
    losses = RouterLosses(balance_scale=1.0, z_scale=0.5)
    moe = model.blocks[0].mlp
    moe.register_forward_pre_hook(lambda _, args: logits.append(torch.nn.functional.linear(args[0], moe.router)))
    hidden = model(tokens()[:9], [9], router_losses=losses)
    (hidden * 0).sum().backward()
    expected = load_balancing_loss_func((logits[0],), 6, 2) / 2
    z = logits[0].exp().sum(-1).log().square().sum()
    torch.testing.assert_close(losses.sums(), torch.stack((expected.double(), z)).detach(), rtol=1e-6, atol=0)
    (grad,) = torch.autograd.grad(expected + 0.5 * z, moe.router)
    name = "model.layers.0.mlp.gate.weight"
    torch.testing.assert_close(model.grad_shards()[name], grad, rtol=1e-6, atol=1e-9)
