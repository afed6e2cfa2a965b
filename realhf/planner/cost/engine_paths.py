"""Engine paths: what an engine launches, reads and pads in its passes.

Engines on the same accelerator differ in these counts and not in the efficiencies of kernels and links
(efficiencies.py). Ours are counted from the code of `nn` and `inference`; the path of another engine, counted
from its code, prices its steps by the same efficiencies.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from realhf.cluster import Cluster
from realhf.models.engine_configs import MegatronConfig
from realhf.models.model_config import ModelConfig


@dataclass(frozen=True)
class EnginePath:
    """The passes of an engine. Numbers of kernels are those of one block in the forward direction."""

    kernels: int  # In training and prefill.
    expert_kernels: int  # Those that experts add: router, permutations, grouped products.
    decode_kernels: int
    decode_expert_kernels: int
    kernels_per_expert: int = 0  # Those of each expert that runs by itself, in training and prefill.
    recorded: bool = False  # Whether decode steps replay recorded kernels, so that the host launches none.
    gathers: bool = True
    """Whether decode steps gather the tokens of all ranks that share experts, so that their shapes are known;
    else tokens go to the ranks of their experts."""
    gathered_kernels: int = 8  # Those that gathering adds to `decode_expert_kernels`, besides collectives.
    shares_prompts: bool = False  # A prompt's blocks are read once for all of its rows.
    reads_blocks: bool = False
    """Whether decoding reads each row's blocks whole, up to the longest row, and those of ended rows that lie
    between the blocks of running ones."""
    sampling_passes: int = 8  # Reads and writes of float32 logits until a token and its log-prob are drawn.
    expert_passes: int = 9
    """Reads and writes of the experts' rows: permutations before and after the exchange, sums of outputs."""
    pads_stages: bool = False  # Under a pipeline, micro-batches are padded to the limit of their tokens.
    splits_experts: bool = True  # Tensor-parallel ranks split each expert; else they hold different experts.
    overlap: float = 0.0
    """Fraction of a mini-batch's passes beside which gradients are reduced and parameters gathered."""

    @classmethod
    def of(cls, cluster: Cluster) -> "EnginePath":
        """Return the path of this engine on a cluster's devices."""
        return OUR_CPU if cluster.device_type == "cpu" else OUR_CUDA

    def of_role(self, config: ModelConfig) -> "EnginePath":
        """Return the path of the engine that trains a model, if this is that of the native engine."""
        return MEGATRON if isinstance(config, MegatronConfig) else self


OUR_CUDA = EnginePath(
    kernels=17, expert_kernels=17, decode_kernels=19, decode_expert_kernels=18, recorded=True)
"""Counted as the operators of a block that torch dispatches (tests/planner/test_rates.py).
Decoding: PagedTokens, which read the pages of each row in place, and DecodeGraphs."""
OUR_CPU = EnginePath(
    kernels=17, expert_kernels=17, decode_kernels=26, decode_expert_kernels=18, shares_prompts=True,
    reads_blocks=True)
"""Decoding reads blocks in place, those of a prompt once for all of its rows (BlockAttention)."""


MEGATRON = EnginePath(
    kernels=25, expert_kernels=38, kernels_per_expert=6, decode_kernels=26, decode_expert_kernels=18,
    pads_stages=True)
"""Megatron-Core's local layers with our norms and attention, counted as above
(tests/megatron/test_planner.py). The native engine decodes."""


def padded_sizes(counts: Any) -> Any:
    """Return the sizes to which recorded passes round up (kv_blocks.padded_size), for an array of counts."""
    whole = np.maximum(1.0, np.ceil(counts))
    step = np.where(whole <= 256, 32.0, 64.0)
    return np.where(whole <= 32, np.exp2(np.ceil(np.log2(whole))), np.ceil(whole / step) * step)
