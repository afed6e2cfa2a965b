"""The choice of backends as a table."""

import pytest
import torch

from realhf.attention.choose import (
    Installed,
    choose_packed,
    choose_paged,
    choose_partial,
    kernel_choices,
    packed_backend,
    paged_backend,
    partial_backend,
)
from realhf.attention.dense import DenseAttention
from realhf.attention.interface import AttentionKind, AttentionShape
from realhf.errors import UserError
from realhf.models.kv_blocks import block_size, cached_heads, page_tokens
from realhf.models.model_config import ModelConfig
from tests.families import CASES, MOE_CASES
from tests.models.test_shipped_models import NUM_PARAMS

PLAIN, WINDOW = AttentionKind(0.1), AttentionKind(0.1, window=4096)
SOFTCAP = AttentionKind(0.1, softcap=50.0)
BF16, FP16 = torch.bfloat16, torch.float16
FLASH = Installed((2, 8), varlen_pages=True, triton=True, capability=(9, 0))
NEW = Installed(None, varlen_pages=True, triton=True, capability=(9, 0))
OLD = Installed(None, varlen_pages=False, triton=True, capability=(8, 0))
BARE = Installed(None, varlen_pages=False, triton=False, capability=(8, 0))
VARLEN, TRITON, FLEX = "torch's varlen_attn", "realhf's Triton kernel", "torch's flex_attention"

PACKED_TABLE = [
    # Installed, kind, dims of keys and values, the backend.
    (FLASH, PLAIN, (128, 128), "flash-attn"),
    (FLASH, SOFTCAP, (256, 256), "flash-attn"),
    (FLASH, PLAIN, (192, 128), "flash-attn"),  # Latent attention in training and prefill.
    (FLASH, WINDOW, (128, 128), "flash-attn"),
    (NEW, PLAIN, (128, 128), VARLEN),
    (NEW, SOFTCAP, (256, 256), FLEX),
    (OLD, WINDOW, (128, 128), VARLEN),
    (BARE, PLAIN, (128, 128), VARLEN),
]
PAGED_TABLE = [
    # Installed, kind, dims of keys and values, the backend and its tokens per page.
    (FLASH, SOFTCAP, (256, 256), "flash-attn", 256),
    (FLASH, PLAIN, (576, 512), TRITON, 16),  # Latent attention in decoding.
    (FLASH, PLAIN, (100, 100), TRITON, 16),
    (FLASH, WINDOW, (128, 128), "flash-attn", 256),
    (NEW, WINDOW, (128, 128), f"{VARLEN} for pieces of prompts, {TRITON} for decoding", 256),
    (NEW, PLAIN, (192, 128), TRITON, 16),
    (NEW, SOFTCAP, (256, 256), TRITON, 16),
    (OLD, WINDOW, (128, 128), TRITON, 16),
    (OLD, PLAIN, (64, 64), TRITON, 16),
    (Installed(None, varlen_pages=True, triton=False), PLAIN, (64, 64), VARLEN, 256),
    (Installed((2, 5), varlen_pages=True, triton=False), PLAIN, (64, 64), VARLEN, 256),
]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("installed, kind, dims, name", PACKED_TABLE)
def test_the_choice_for_packed_sequences_on_cuda(installed, kind, dims, name, dtype):
    shape = AttentionShape(kind, *dims, dtype)
    chosen = choose_packed(installed, shape)
    assert chosen.name == name
    assert chosen.refuses(shape, paged=False) is None


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("installed, kind, dims, name, page_tokens", PAGED_TABLE)
def test_the_choice_for_pages_on_cuda(installed, kind, dims, name, page_tokens, dtype):
    shape = AttentionShape(kind, *dims, dtype)
    chosen = choose_paged(installed, shape)
    assert (chosen.name, chosen.page_tokens) == (name, page_tokens)
    assert chosen.refuses(shape, paged=True) is None


def _choices(name, dtype, installed, **options):
    hf = {**CASES, **MOE_CASES}[name].hf(architectures=[ARCHITECTURES[name]])
    return [tuple(row) for row in kernel_choices(
        ModelConfig.from_hf(hf), dtype, installed, generates=True, **options)]


ARCHITECTURES = {
    "gemma-2": "Gemma2ForCausalLM", "deepseek-v3": "DeepseekV3ForCausalLM",
    "qwen3-moe": "Qwen3MoeForCausalLM"}


def test_all_choices_of_a_model_come_with_reasons():
    """They are those of the tables above, beside what computes chains, samples and experts."""
    rows = _choices("gemma-2", BF16, NEW)
    assert len(rows) == 2 * 3 + 2  # Layers with and without a window.
    absent = "flash-attn is not installed"
    capped = f"{absent}; {VARLEN}: it has no soft cap"
    assert [row[1:] for row in rows[:3]] == [(FLEX, capped), (TRITON, capped), (TRITON, absent)]
    assert rows[-1] == ("sampling", "realhf's Triton kernels", "")
    latent = _choices("deepseek-v3", BF16, FLASH, splits_logits=True)
    assert [row[1] for row in latent[:3]] == ["flash-attn", TRITON, TRITON]
    assert latent[-2:] == [
        ("sampling", "torch's operations", "each rank has a part of the vocabulary"),
        ("experts", "torch's grouped_mm", "")]
    bare = _choices("qwen3-moe", FP16, NEW)
    assert bare[-1][1:] == (
        "one product for each expert", "torch makes the host wait in other dtypes than bfloat16")
    wide = _choices("qwen3-moe", torch.float32, NEW)
    assert wide[0][1:] == ("torch's dense kernels", "in float32, which is for tests")
    assert wide[1][1] == TRITON and wide[1][2].endswith("it computes in float16 and bfloat16, not in float32")
    on_cpu = _choices("qwen3-moe", BF16, None)
    by_torch = ("torch's operations", "a CPU has no launches to save")
    assert [row[1:] for row in on_cpu] == [
        ("torch's dense kernels", "as on all CPUs"), by_torch, by_torch, ("torch's grouped_mm", "")]
    with pytest.raises(UserError, match="no installed kernel can prefill"):
        _choices("deepseek-v3", BF16, BARE)


@pytest.mark.parametrize("installed, name", [(FLASH, "flash-attn"), (NEW, VARLEN), (BARE, VARLEN)])
def test_the_choice_for_some_of_the_keys_on_cuda(installed, name):
    assert choose_partial(installed, AttentionShape(PLAIN, 192, 128, BF16)).name == name


@pytest.mark.parametrize(
    "installed, kind, dims, choose, sentence",
    [
        (BARE, PLAIN, (128, 128), choose_paged,
         "attention in bfloat16 with heads of 128 dims: no installed kernel can prefill over a KV cache "
         f"(torch's varlen_attn: that of torch {torch.__version__} has no block table); not installed: "
         "flash-attn and triton"),
        (BARE, SOFTCAP, (64, 32), choose_packed,
         "attention in bfloat16 with heads of 64 and 32 dims, a soft cap of 50: no installed kernel can "
         "train or prefill (torch's varlen_attn: it has no soft cap); not installed: flash-attn and triton"),
        (FLASH, PLAIN, (640, 640), choose_paged,
         "realhf's Triton kernel: a value has at most 512 dims, not 640"),
        (Installed((2, 8), True, True, (7, 5)), WINDOW, (64, 64), choose_packed,
         "a window of 4096 tokens needs a GPU of compute capability 8.0 or newer, and this one has 7.5"),
    ],
)
def test_a_refusal_is_a_sentence(installed, kind, dims, choose, sentence):
    with pytest.raises(UserError) as raised:
        choose(installed, AttentionShape(kind, *dims, BF16))
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    "device, dtype",
    [("cpu", BF16), ("cpu", torch.float32), ("meta", BF16), ("cuda", torch.float32), ("cuda", torch.float64)],
)
def test_other_devices_and_wide_dtypes(device, dtype):
    shape = AttentionShape(SOFTCAP, 7, 900, dtype)
    for choose in (packed_backend, partial_backend, paged_backend):
        assert isinstance(choose(torch.device(device), shape), DenseAttention)


def test_float32_attends_to_pages_by_our_kernel_on_a_gpu():
    """The pages need not be gathered, and decoding passes are recorded."""
    shape = AttentionShape(SOFTCAP, 64, 64, torch.float32)
    assert isinstance(choose_packed(NEW, shape), DenseAttention)
    for installed in (FLASH, NEW, OLD):
        assert choose_paged(installed, shape).name == TRITON and choose_paged(installed, shape).in_graph
    for installed in (BARE, Installed(None, varlen_pages=True, triton=True, capability=(7, 5))):
        assert isinstance(choose_paged(installed, shape), DenseAttention)


def test_the_choice_is_printed_once(capsys):
    device = torch.device("cuda", 0)
    shape = AttentionShape(AttentionKind(0.125, window=77), 64, 64, BF16)
    for _ in range(2):
        backend = packed_backend(device, shape)
        partial_backend(device, shape)
        packed_backend(torch.device("cuda", 1), shape)
    line = f"realhf: attention in bfloat16 with heads of 64 dims, a window of 77 tokens: {backend.name}\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("name", sorted(NUM_PARAMS))
def test_the_planner_knows_the_pages_of_a_model(name):
    """With flash-attn, or without it where there is no soft cap."""
    config = ModelConfig.load(name)
    heads = cached_heads(config, 1)
    for dtype in (BF16, FP16):
        for installed in (FLASH, NEW) if config.attention_softcap is None else (FLASH,):
            value_dim = heads.value_dim or heads.head_dim
            kind = AttentionKind.of(config, 0)
            backend = choose_paged(installed, AttentionShape(kind, heads.head_dim, value_dim, dtype))
            tokens = page_tokens(config, str(dtype).removeprefix("torch."))
            assert backend.page_tokens == tokens
            assert block_size([(9, 1)], max_new_tokens=9, page_tokens=tokens) == (64 if config.mla else 256)
