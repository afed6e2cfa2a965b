"""Published steps of NeMo RL v0.4 and v0.6, and what its engine does, counted from its code and recipes.

Rows: docs/about/performance-summary.md of github.com/NVIDIA-NeMo/RL, releases 0.4 and 0.6 (DGX-H100, bf16,
GRPO on OpenMathInstruct-2). Limits and group sizes that the page leaves out:
examples/configs/recipes/llm/performance at tag v0.4.0, on top of examples/configs/grpo_math_1B.yaml.

The constants stand on v0.4; nothing was set for a row of v0.6. The engine is described as that of v0.4 for
both: the same layout became 4 to 38 % faster between the releases, without a change of machine.
"""

from dataclasses import replace
from typing import NamedTuple

from realhf.models.model_config import ModelConfig
from realhf.planner.efficiencies import NEMO, EnginePath

NEMO_UNFUSED = replace(NEMO, expert_kernels=120, expert_passes=17)
"""NEMO with `moe_permute_fusion` false, the default of v0.4, which only the recipes of DeepSeek-V3 and
Qwen3-235B change: rows are found by masked_select, sorted by splitting and joining 128 chunks twice, and
summed by scatter_add."""
PROMPT_TOKENS = 150  # A problem of OpenMathInstruct-2 in its template.
HOST_SECONDS = 4.0
"""Work of the single controller in a step: preparing log-probs and training, data, sampling from the buffer:
1.34 + 1.06 + 0.23 + 1.38 s (github.com/NVIDIA-NeMo/RL/pull/1052)."""
WAKE_SECONDS = 7.5
"""Of a colocated generator: sleeping, waking, allocating the cache, emptying the allocator: 17.2 s of a refit
less 9.67 s of transfer and update (Qwen3-30B-A3B, github.com/NVIDIA-NeMo/RL/pull/3294)."""
TENSOR_SECONDS = 4e-4
"""Host time to convert and load one tensor of the Hugging Face checkpoint: the same refit's 9.67 s for 18,867
tensors, less their transfer."""
PAGEABLE_BYTES_PER_SECOND = 10e9  # Copies between devices and memory that is not pinned.
DEVICE_BYTES = 79.1 * 2**30  # Total memory of an H100 as CUDA reports it, of which vLLM takes a share.
VLLM_RESERVE_BYTES = 4e9  # Activations, recorded graphs and communicators of vLLM, out of its share.


class PublishedStep(NamedTuple):
    """A row: `train` has tp, cp, ep and pp of Megatron; experts may be spread over dp, cp and tp."""

    model: str
    devices: int
    is_lagged: bool
    max_tokens: int
    mean_tokens: int
    samples: int
    group_size: int
    generation_tp: int
    train: tuple[int, int, int, int]
    recompute: bool
    path: EnginePath
    seconds: float
    version: str = "0.4"

    @property
    def name(self) -> str:
        mode = "one step off" if self.is_lagged else "on policy"
        return f"{self.model}, {mode}" + (f", {self.devices}" if self.version != "0.4" else "")

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.load(self.model)


_L, _D, _Q, _M, _B = "llama-3.1-8b", "deepseek-v3", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b"
ROWS = (
    PublishedStep(_L, 16, False, 4096, 1060, 2048, 32, 1, (1, 1, 1, 2), True, NEMO, 97.7),
    PublishedStep(_L, 16, True, 4096, 1129, 2048, 32, 1, (1, 1, 1, 2), True, NEMO, 74.6),
    PublishedStep(_D, 256, False, 1536, 745, 512, 16, 32, (1, 1, 16, 16), True, NEMO, 154.0),
    PublishedStep(_D, 512, True, 1536, 744, 512, 16, 32, (1, 1, 16, 16), True, NEMO, 77.9),
    PublishedStep(_B, 128, False, 8192, 5671, 512, 32, 16, (2, 2, 16, 8), True, NEMO, 506.0),
    PublishedStep(_B, 256, True, 8192, 5691, 512, 32, 8, (4, 1, 16, 8), True, NEMO, 241.0),
    PublishedStep(_M, 32, False, 4096, 3154, 2048, 32, 4, (2, 1, 8, 1), False, NEMO_UNFUSED, 225.0),
    PublishedStep(_M, 32, True, 4096, 3158, 2048, 32, 4, (2, 1, 8, 1), False, NEMO_UNFUSED, 244.0),
    # The page has other layouts for the row above, those of v0.6: 2 and (1, 1, 8, 2). These are the recipe's.
    PublishedStep(_Q, 32, False, 4096, 3206, 2048, 32, 4, (4, 1, 1, 4), False, NEMO, 393.0),
    PublishedStep(_Q, 64, True, 4096, 3207, 2048, 32, 4, (4, 1, 1, 4), False, NEMO, 215.0),
)
NEWER_ROWS = tuple(row._replace(version="0.6") for row in (
    PublishedStep(_D, 256, False, 1536, 701, 512, 16, 32, (1, 1, 16, 16), True, NEMO, 134.0),
    PublishedStep(_B, 128, False, 8192, 5698, 512, 32, 16, (2, 2, 16, 8), True, NEMO, 395.0),
    PublishedStep(_B, 256, False, 8192, 5713, 512, 32, 16, (2, 2, 16, 8), True, NEMO, 312.0),
    PublishedStep(_B, 256, True, 8192, 5721, 512, 32, 8, (4, 1, 16, 8), True, NEMO, 231.0),
    PublishedStep(_M, 32, False, 4096, 3203, 2048, 32, 2, (1, 1, 8, 1), False, NEMO_UNFUSED, 192.0),
    PublishedStep(_M, 32, True, 4096, 3201, 2048, 32, 2, (1, 1, 8, 2), False, NEMO_UNFUSED, 152.0),
))
"""Rows that no constant has seen."""
UPDATE_SAMPLES = 512  # T-GBS of all rows.
