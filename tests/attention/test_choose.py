"""The choice of backends as a table."""

import pytest
import torch

from realhf.attention.choose import Installed, attention_backend, choose
from realhf.attention.cpu import CpuAttention
from realhf.attention.interface import AttentionKind
from realhf.attention.page_sizes import page_tokens
from realhf.errors import UserError
from realhf.models.model_config import ModelConfig
from realhf.sizes.kv_blocks import block_size, cached_heads
from tests.models.test_shipped_models import NUM_PARAMS

PLAIN, WINDOW = AttentionKind(0.1), AttentionKind(0.1, window=4096)
SOFTCAP = AttentionKind(0.1, softcap=50.0)
BF16, FP16 = torch.bfloat16, torch.float16
FLASH = Installed((2, 8), varlen_pages=True, triton=True, capability=(9, 0))
NEW = Installed(None, varlen_pages=True, triton=True, capability=(9, 0))
OLD = Installed(None, varlen_pages=False, triton=True, capability=(8, 0))
BARE = Installed(None, varlen_pages=False, triton=False, capability=(8, 0))
PACKED = {"packed": True, "paged": False}
PAGED = {"packed": False, "paged": True}
BOTH = {"packed": True, "paged": True}
VARLEN, TRITON, FLEX = "torch's varlen_attn", "realhf's Triton kernel", "torch's flex_attention"

TABLE = [
    # Installed, kind, dims of keys and values, methods, the backend and its tokens per page.
    (FLASH, PLAIN, (128, 128), PACKED, "flash-attn", 256),
    (FLASH, SOFTCAP, (256, 256), PACKED, "flash-attn", 256),
    (FLASH, SOFTCAP, (256, 256), PAGED, "flash-attn", 256),
    (FLASH, PLAIN, (192, 128), PACKED, "flash-attn", 256),  # Latent attention in training and prefill.
    (FLASH, PLAIN, (576, 512), PAGED, TRITON, 16),  # Latent attention in decoding.
    (FLASH, PLAIN, (100, 100), PAGED, TRITON, 16),
    (FLASH, WINDOW, (128, 128), BOTH, "flash-attn", 256),
    (NEW, PLAIN, (128, 128), PACKED, VARLEN, 256),
    (NEW, WINDOW, (128, 128), PAGED, f"{VARLEN} for pieces of prompts, {TRITON} for decoding", 256),
    (NEW, PLAIN, (192, 128), PAGED, TRITON, 16),
    (NEW, SOFTCAP, (256, 256), BOTH,
     f"{FLEX} for packed sequences, {TRITON} for pieces of prompts, {TRITON} for decoding", 16),
    (NEW, SOFTCAP, (256, 256), PACKED, FLEX, 1),
    (NEW, SOFTCAP, (256, 256), PAGED, TRITON, 16),
    (OLD, WINDOW, (128, 128), PACKED, VARLEN, 256),
    (OLD, WINDOW, (128, 128), PAGED, TRITON, 16),
    (OLD, PLAIN, (64, 64), BOTH,
     f"{VARLEN} for packed sequences, {TRITON} for pieces of prompts, {TRITON} for decoding", 16),
    (BARE, PLAIN, (128, 128), PACKED, VARLEN, 256),
    (Installed(None, varlen_pages=True, triton=False), PLAIN, (64, 64), BOTH, VARLEN, 256),
    (Installed((2, 5), varlen_pages=True, triton=False), PLAIN, (64, 64), PAGED, VARLEN, 256),
]


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("installed, kind, dims, methods, name, page_tokens", TABLE)
def test_the_choice_on_cuda(installed, kind, dims, methods, name, page_tokens, dtype):
    chosen = choose(installed, kind, dim=dims[0], value_dim=dims[1], dtype=dtype, **methods)
    assert (chosen.name, chosen.page_tokens) == (name, page_tokens)
    for name, is_used in methods.items():
        refusal = chosen.refuses(kind, dim=dims[0], value_dim=dims[1], dtype=dtype, paged=name == "paged")
        assert not is_used or refusal is None


@pytest.mark.parametrize(
    "installed, kind, dims, methods, sentence",
    [
        (BARE, PLAIN, (128, 128), PAGED,
         "attention in bfloat16 with heads of 128 dims: no installed kernel can prefill over a KV cache "
         f"(torch's varlen_attn: that of torch {torch.__version__} has no block table); not installed: "
         "flash-attn and triton"),
        (BARE, SOFTCAP, (64, 32), PACKED,
         "attention in bfloat16 with heads of 64 and 32 dims, a soft cap of 50: no installed kernel can "
         "train or prefill (torch's varlen_attn: it has no soft cap); not installed: flash-attn and triton"),
        (FLASH, PLAIN, (640, 640), PAGED, "realhf's Triton kernel: a value has at most 512 dims, not 640"),
        (Installed((2, 8), True, True, (7, 5)), WINDOW, (64, 64), PACKED,
         "a window of 4096 tokens needs a GPU of compute capability 8.0 or newer, and this one has 7.5"),
    ],
)  # fmt: skip
def test_a_refusal_is_a_sentence(installed, kind, dims, methods, sentence):
    with pytest.raises(UserError) as raised:
        choose(installed, kind, dim=dims[0], value_dim=dims[1], dtype=BF16, **methods)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    "device, dtype",
    [("cpu", BF16), ("cpu", torch.float32), ("meta", BF16), ("cuda", torch.float32), ("cuda", torch.float64)],
)
def test_other_devices_and_wide_dtypes(device, dtype):
    chosen = attention_backend(torch.device(device), SOFTCAP, dim=7, value_dim=900, dtype=dtype)
    assert isinstance(chosen, CpuAttention)


def test_the_choice_is_printed_once(capsys):
    device = torch.device("cuda", 0)
    kind = AttentionKind(0.125, window=77)
    for _ in range(2):
        backend = attention_backend(device, kind, dim=64, value_dim=64, dtype=BF16, paged=False)
        attention_backend(torch.device("cuda", 1), kind, dim=64, value_dim=64, dtype=BF16, paged=False)
    line = f"realhf: attention in bfloat16 with heads of 64 dims, a window of 77 tokens: {backend.name}\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("name", sorted(NUM_PARAMS))
def test_the_planner_knows_the_pages_of_a_model(name):
    """With flash-attn, or without it where there is no soft cap."""
    config = ModelConfig.load(name)
    heads = cached_heads(config, 1)
    for dtype in (BF16, FP16):
        for installed in (FLASH, NEW) if config.attention_softcap is None else (FLASH,):
            backend = choose(
                installed, AttentionKind.of(config, 0), dim=heads.head_dim,
                value_dim=heads.value_dim or heads.head_dim, dtype=dtype, packed=False, paged=True)
            tokens = page_tokens(config, str(dtype).removeprefix("torch."))
            assert backend.page_tokens == tokens
            assert block_size([(9, 1)], max_new_tokens=9, page_tokens=tokens) == (64 if config.mla else 256)
