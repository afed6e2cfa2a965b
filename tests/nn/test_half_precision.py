"""On a CPU without units for 16-bit numbers, products are right and none is computed in 16 bits."""

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from realhf.calls import Generate, OptimizerConfig, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.devices import half_precision
from realhf.distributed.world import World
from realhf.engine.native import NativeEngine
from realhf.graph import FunctionCall
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import model_spec
from tests.engine.training import CALL, minibatch
from tests.families import CASES, MOE_CASES
from tests.realloc.test_memory import Storages
from tests.samples import marked

BF16 = torch.bfloat16
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "linear", "_grouped_mm", "einsum")
PRODUCTS += ("_scaled_dot_product_flash_attention_for_cpu_backward",)


@pytest.fixture
def without_units(monkeypatch):
    monkeypatch.setattr(half_precision, "_has_units", lambda dtype: False)


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def _is_rounded(found, exact):
    """Assert that a result differs from the exact one only by its final rounding."""
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("numel", [1, 40, 1 << 19])
@pytest.mark.parametrize("tokens", [0, 1, 9])
def test_products_in_parts(monkeypatch, without_units, tokens, numel):
    monkeypatch.setattr(half_precision, "WIDENED_WEIGHT_NUMEL", numel)
    monkeypatch.setattr(half_precision, "WIDENED_TOKENS_NUMEL", numel)
    x, grad = _random(tokens, 16), _random(tokens, 12, seed=3)
    weight, bias = _random(12, 16, seed=1), _random(12, seed=2)
    wide = x.double() @ weight.double().T
    _is_rounded(half_precision.affine(x, weight), wide)
    _is_rounded(half_precision.affine(x, weight, bias), wide + bias.double())
    _is_rounded(half_precision.product(grad, weight), grad.double() @ weight.double())
    torch.testing.assert_close(half_precision.affine_float32(x, weight).double(), wide, rtol=1e-5, atol=1e-5)
    _is_rounded(
        half_precision.product(grad.float() / 3, weight, out=torch.empty_like(x)),
        (grad.float() / 3).double() @ weight.double())
    total, product = torch.full((12, 16), torch.nan), grad.double().T @ x.double()
    half_precision.add_product(total, grad, x, is_empty=True)
    torch.testing.assert_close(total.double(), product, rtol=1e-5, atol=1e-5)
    half_precision.add_product(total, grad, x, is_empty=False)
    torch.testing.assert_close(total.double(), 2 * product, rtol=1e-5, atol=1e-5)


SHAPES = [(20000, 32, 4000), (500, 5000, 3000), (1, 64, 90000)]


@pytest.mark.parametrize(("tokens", "width", "outputs"), marked(SHAPES, quick=[2]))
def test_little_memory_is_taken_beside_the_result(without_units, tokens, width, outputs):
    """Products take at most 30 MiB beside their results, whatever their sizes."""
    x, weight = torch.zeros(tokens, width, dtype=BF16), torch.zeros(outputs, width, dtype=BF16)
    grad, total = torch.zeros(tokens, outputs, dtype=BF16), torch.zeros(outputs, width)
    for run, held in (
        (lambda: half_precision.affine(x, weight), grad.nbytes),
        (lambda: half_precision.product(grad, weight), x.nbytes),
        (lambda: half_precision.add_product(total, grad, x, is_empty=False), 0),
    ):
        with Storages() as storages:
            run()
        assert storages.peak - held < 30 << 20


class _Products(TorchDispatchMode):
    """A list of the products whose operands have 16 bits."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.partition(".")[0]
        narrow_args = [x for x in args if isinstance(x, torch.Tensor) and x.dtype == BF16]
        if name in PRODUCTS and narrow_args:
            self.found.append((name, [tuple(x.shape) for x in narrow_args]))
        return func(*args, **(kwargs or {}))


def _engine(name, dtype, lora):
    hf = transformers.AutoConfig.for_model(**{**CASES, **MOE_CASES}[name].hf())
    architecture = transformers.AutoModelForCausalLM._model_mapping[type(hf)].__name__
    config = ModelConfig.from_hf(hf.to_dict() | {"architectures": [architecture]})
    optimizer = OptimizerConfig(lr=1e-3)
    engine = NativeEngine(
        model_spec(config), Layout.parse("d1@0"), World(), dtype=dtype, optimizer=optimizer, lora=lora)
    engine.load(None, seed=0)
    return engine


def _train_and_generate(name, dtype, lora):
    """Train a step and generate; return the 16-bit products, and the metrics and gradients of the step."""
    engine = _engine(name, dtype, lora)
    rows = [([3, 5, 9, 30], [7, 2]), ([4] * 9, [11] * 12), ([8], [13, 14, 15])]
    tokens = [torch.tensor([5, 6, 7])] * 2 + [torch.full((length,), 9) for length in (2, 11)]
    prompts = Batch([0, 1, 2, 3], {"prompts": Packed.of(tokens)})
    work = Generate(SamplingConfig(max_new_tokens=5), prefill_tokens=6)
    call = FunctionCall("g", "generate", ("prompts",), ("s", "m", "l", "f"), role="actor", work=work)
    with _Products() as products:
        batches = [minibatch(rows[:2]), minibatch(rows[2:])]
        metrics = engine.train(CALL, batches, micro_batch_tokens=1000)
        gradients = engine._trained.grad_buffer.clone()
        engine.generate(call, prompts)
    return products.found, metrics, gradients


FAMILIES = ("qwen2", "gemma-2", "mistral", "gpt2", "mixtral", "qwen2-moe", "deepseek-v3")
ADAPTERS = LoraConfig(rank=4, alpha=8)
KINDS = [*((name, None) for name in FAMILIES), ("qwen2", ADAPTERS), ("deepseek-v3", ADAPTERS)]
KINDS += [("qwen2", LoraConfig(rank=4, alpha=8, merge=True))]


@pytest.mark.parametrize(("name", "lora"), marked(KINDS, quick=(1, 8)))
def test_no_product_of_16_bits_is_left(without_units, name, lora):
    found, metrics, gradients = _train_and_generate(name, "bfloat16", lora)
    assert found == []
    _, exact_metrics, exact = _train_and_generate(name, "float32", lora)
    assert metrics["loss"] == pytest.approx(exact_metrics["loss"], rel=0.05)
    similarity = torch.nn.functional.cosine_similarity(gradients.double(), exact.double(), dim=0)
    assert similarity > 0.95


def test_units_are_used_where_they_are(monkeypatch):
    monkeypatch.setattr(half_precision, "_has_units", lambda dtype: True)
    found, *_ = _train_and_generate("qwen2", "bfloat16", None)
    assert found != []
