"""The gradients of 16-bit weights are added up in float32, and no micro-batch's is rounded before."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from realhf.data.batch import Packed
from realhf.devices import half_precision
from realhf.distributed.world import ParallelGroups, World
from realhf.engine.hf_factory import class_spec
from realhf.engine.transformers import TransformersModel
from realhf.layout import Layout
from realhf.models.families import FAMILIES
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig, TransformersConfig
from realhf.nn import mlp, norm
from realhf.nn.linear import Weight, add_bias, embedding, linear, wide
from realhf.nn.lora import Adapter, Adapters
from realhf.nn.moe import RowGroups, grouped_linear
from realhf.nn.vocab_parallel import Head, head_logprobs
from tests.families import CASES, MOE_CASES
from tests.gpu.host_traffic import host_traffic
from tests.gpu.pretended import pretended_device
from tests.nn.tiny import SEQ_LENS, build, hf_config, step, tokens
from tests.samples import marked

BF16 = torch.bfloat16
MICRO_BATCHES = 4
COUNTS = [5, 0, 40, 19]  # Rows of experts.


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _weight(*shape, seed=7):
    weight = Weight(_random(*shape, seed=seed) / 4, requires_grad=False)
    weight.collect(torch.full(shape, torch.nan))
    return weight


class _Silu:
    activation, gated = "silu", False


def _grouped(x, weight):
    return grouped_linear(x, weight, RowGroups(torch.tensor(COUNTS).cumsum(0).int()))


def _grouped_formula(x, weight):
    weights = weight.view(len(COUNTS), -1, x.shape[1])
    return torch.cat([part @ w.T for part, w in zip(x.split(COUNTS), weights, strict=True)])


def _rms(x, weight, offset=0.0):
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight + offset)


def _kernel_rms(x, weight):
    return norm._Normed.apply(x, weight, None, 1e-5, 1.0)


def _adapted(x, up):
    """The second factor of the adapter of a layer whose first 16 outputs of 24 have one."""
    base = Weight(torch.zeros(24, 32, dtype=BF16), requires_grad=False)
    down = Weight(torch.eye(32, dtype=BF16), requires_grad=False)
    down.collect(torch.zeros(32, 32))
    return Adapter(base, down, [(up, 16), (None, 8)], scale=0.3)(x, None)


LAYERS = {
    "linear": (linear, F.linear, [(48, 32)]),
    "a bias of a linear layer": (linear, F.linear, [(48, 32), (48,)]),
    "a bias alone": (lambda x, b: add_bias(x, b), torch.add, [(32,)]),
    "rows that are added": (
        lambda x, w: embedding(torch.arange(64) % 5, w) + x,
        lambda x, w: w[torch.arange(64) % 5] + x, [(5, 32)]),
    "RMSNorm": (lambda x, w: norm.rms_norm(x, w, 1e-5), _rms, [(32,)]),
    "RMSNorm with an offset": (
        lambda x, w: norm.rms_norm(x, w, 1e-5, offset=1.0), lambda x, w: _rms(x, w, 1.0), [(32,)]),
    "RMSNorm by torch's kernel": (_kernel_rms, lambda x, w: _rms(x, w, 1.0), [(32,)]),
    "LayerNorm": (
        lambda x, w, b: norm.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5), [(32,), (32,)]),
    "experts": (_grouped, _grouped_formula, [(4 * 24, 32)]),
    "a router in float32": (lambda x, w: F.linear(x.float(), wide(w)), F.linear, [(6, 32)]),
    "LoRA": (_adapted, lambda x, up: F.pad(0.3 * x @ up.T, (0, 8)), [(16, 32)]),
    "the down-projection": (
        lambda x, w: mlp.activated_linear(_Silu, x, w), lambda x, w: F.silu(x).to(BF16).to(x) @ w.T,
        [(16, 32)]),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_micro_batches_are_not_rounded(name):
    """Against float64, given the same 16-bit operands: what is left is the rounding of float32 sums.

    Rounding every micro-batch to bfloat16 gives an error of 1.7e-3.
    """
    layer, formula, shapes = LAYERS[name]
    weights = [_weight(*shape, seed=7 + i) for i, shape in enumerate(shapes)]
    exact = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    for seed in range(MICRO_BATCHES):
        x = _random(64, 32, seed=seed)
        y = layer(x.clone().requires_grad_(), *weights)
        grad = _random(*y.shape, seed=100 + seed)
        y.backward(grad.to(y.dtype))
        plain = [w.detach().double().requires_grad_() for w in weights]
        grads = torch.autograd.grad(formula(x.double(), *plain), plain, grad.double())
        exact = [a + b for a, b in zip(exact, grads, strict=True)]
    for weight, wanted in zip(weights, exact, strict=True):
        assert weight.grad is None
        assert (weight.total.double() - wanted).norm() < 2e-6 * wanted.norm(), weight.shape


def test_gradients_of_the_input_of_kernel_norms_are_those_of_autograd():
    for function, plain in (
        (_kernel_rms, lambda x, w: norm._by_kernel(x, w, None, 1e-5, 1.0)),
        (lambda x, w: norm.layer_norm(x, w, w, 1e-5), lambda x, w: F.layer_norm(x, w.shape, w, w, 1e-5)),
    ):
        x, weight = _random(9, 32), _weight(32)
        grads = []
        for compute, w in ((function, weight), (plain, weight.detach().requires_grad_())):
            leaf = x.clone().requires_grad_()
            compute(leaf, w).backward(_random(9, 32, seed=3))
            grads.append(leaf.grad)
        assert torch.equal(*grads)


@pytest.mark.parametrize("float32", [False, True])
def test_the_gradient_of_a_tied_head_is_not_rounded(float32):
    """In several chunks; it is added to that of the embedding."""
    weight = _weight(40, 32)
    head = Head(weight, 0, World().group((0,)), float32=float32)
    hidden = _random(64, 32).requires_grad_()
    labels = torch.randint(40, (64,), generator=torch.Generator().manual_seed(5))
    head_logprobs(hidden, labels, head, chunk_tokens=7)[0].sum().backward()
    wanted = torch.zeros(40, 32, dtype=torch.float64)
    for rows in range(64):  # The gradient of the logits is in bfloat16, unless the head is in float32.
        logits = F.linear(hidden[rows].detach().float(), weight.detach().float())
        logits = logits if float32 else logits.to(BF16).float()
        grad = F.one_hot(labels[rows], 40) - logits.softmax(0)
        grad = grad if float32 else grad.to(BF16)
        wanted += grad.double()[:, None] * hidden[rows].detach().double()
    assert (weight.total.double() - wanted).norm() < 2e-4 * wanted.norm()
    assert _share_of_wide(weight.total) > 0.9
    embedding(labels, weight).backward(torch.ones(64, 32, dtype=BF16))
    wanted += labels.bincount(minlength=40)[:, None]
    assert (weight.total.double() - wanted).norm() < 2e-4 * wanted.norm()


def _share_of_wide(gradient):
    """Return the share of numbers, other than 0, that bfloat16 cannot hold."""
    numbers = gradient[gradient != 0]
    return (numbers.to(BF16).float() != numbers).float().mean().item() if len(numbers) else 1.0


def _rounded(grads):
    """Return the names of gradients that have been rounded. (Rows of embeddings may have been added once.)"""
    return [name for name, grad in grads if "embed" not in name and "wpe" not in name
            and _share_of_wide(grad) < 0.1]


def _hf(case):
    arguments = case.hf()
    config = transformers.AutoConfig.for_model(arguments.pop("model_type"), **arguments)
    return {**config.to_dict(), "architectures": [FAMILIES[case.family].architecture("lm")]}


NEVER_ROUNDED = {name: _hf(case) for name, case in {**CASES, **MOE_CASES}.items()}
SOME = [
    list(NEVER_ROUNDED).index(name)
    for name in ("qwen2", "gemma-2", "gpt2", "llama-bias", "olmo-2", "mixtral", "deepseek-v3")]


@pytest.mark.parametrize("name", marked(list(NEVER_ROUNDED), quick=SOME))
def test_no_gradient_of_any_family_is_rounded(name):
    model = build(NEVER_ROUNDED[name], dtype=BF16)
    grads = [(name, grad) for name, _, grad in step(model)[1] if "correction_bias" not in name]
    assert _rounded(grads) == []
    assert sum(grad.any().item() for _, grad in grads) > 0.8 * len(grads)


def _train(world, hf, layout, options):
    if world.rank not in Layout.parse(layout):
        return None
    if (lora := options.get("lora")) is None:
        model = build(hf, world=world, layout=layout, dtype=BF16)
    else:
        groups = ParallelGroups.create(world, Layout.parse(layout))
        adapters = Adapters(ModelConfig.from_hf(hf), lora, groups, dtype=BF16)
        adapters.init_random(1)
        for _, tensor in adapters.shards().items():
            tensor.copy_(_random(*tensor.shape) / 4)
        model = build(hf, world=world, layout=layout, dtype=BF16, adapters=adapters)
    return [(name, grad) for name, _, grad in step(model, recompute=options.get("recompute", False))[1]]


LORA = LoraConfig(rank=4, alpha=6, target_modules=("q_proj", "v_proj", "o_proj", "down_proj", "up_proj"))
LAYOUTS = [
    (hf_config(tied=True), "t2p2@0-3", {}), (hf_config(), "d2t2@0-3", {"recompute": True}),
    (NEVER_ROUNDED["mixtral"], "d2e2@0-1", {}), (hf_config(), "t2@0-1", {"lora": LORA}),
    (hf_config(), "p2@0-1", {"lora": LORA}), (NEVER_ROUNDED["olmo-2"], "t2@0-1", {}),
    (NEVER_ROUNDED["gpt2"], "t2@0-1", {}), (NEVER_ROUNDED["deepseek-v3"], "t2@0-1", {}),
]


@pytest.mark.parametrize(("hf", "layout", "options"), marked(LAYOUTS, quick=[0, 3]))
def test_no_gradient_is_rounded_under_any_layout(pool, hf, layout, options):
    for grads in pool.run(_train, hf, layout, options):
        if grads is not None:
            assert _rounded([(name, grad) for name, grad in grads if "correction_bias" not in name]) == []


def test_linear_layers_of_transformers_do_not_round():
    config = TransformersConfig.from_hf(NEVER_ROUNDED["llama"])
    groups = ParallelGroups.create(World(), Layout.parse("d1@0"))
    model = TransformersModel(class_spec(config), groups, dtype=BF16)
    model.load(None, seed=0)
    model.enable_grad()
    logits = model(Packed(tokens(), SEQ_LENS))
    logits.backward(_random(*logits.shape, seed=2))
    model.finish_grads()
    grads = model.grad_shards().items()
    assert {name for name in _rounded(grads)} == {name for name, _ in grads if "norm" in name}


@pytest.mark.parametrize("in_product", [True, False])
def test_a_gpu_adds_products_to_the_sum_at_once(monkeypatch, in_product):
    """Of two micro-batches, each in one launch where torch offers that; the first one overwrites the sum."""
    parts = [(_random(9, 24, seed=i), _random(9, 16, seed=i + 2)) for i in range(2)]
    wanted = sum(grad.double().T @ x.double() for grad, x in parts)
    with pretended_device() as device:
        assert half_precision.adds_in_product(device)
        monkeypatch.setattr(half_precision, "adds_in_product", lambda _: in_product)
        weight = Weight(_random(24, 16).to(device), requires_grad=False)
        weight.collect(torch.full((24, 16), torch.nan).to(device))
        with host_traffic() as traffic:
            for grad, x in parts:
                weight.add_product(grad.to(device), x.to(device), scale=0.5)
        total = weight.total.cpu()
    assert traffic.launches == (2 if in_product else 5) and len(traffic.waits) == 4  # The operands' uploads.
    torch.testing.assert_close(total.double(), 0.5 * wanted, rtol=1e-6, atol=1e-6)
