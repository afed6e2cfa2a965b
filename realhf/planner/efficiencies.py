"""Efficiencies of accelerators and paths of engines: the figures by which costs differ from a roofline.

Efficiencies of accelerators are the shares of their peaks that kernels and links reach, and host times. A
cluster file names its `accelerator`; the table here has the figures for it, each with its source. They hold
for all models, layouts and engines. A profile replaces the rates that it has measured.

Engine paths are what an engine launches, reads and pads in its passes. Engines on the same accelerator differ
in these counts only. Ours are counted from the code of `nn` and `inference`; the path of another engine,
counted from its code, prices its steps by the same efficiencies.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from realhf.cluster import Cluster
from realhf.models.model_config import MegatronConfig, ModelConfig


@dataclass(frozen=True)
class Efficiencies:
    """The figures of one accelerator. The defaults describe a device that reaches all of its peaks."""

    matmul: float = 1.0  # Share of peak FLOP/s in a product of many tiles.
    grouped_matmul: float = 1.0  # The same in a grouped product, of the rows of several experts.
    attention: float = 1.0  # Share of peak FLOP/s in causal attention over packed sequences.
    memory: float = 1.0  # Share of memory bandwidth.
    link: float = 1.0  # Share of a link's bandwidth.
    tile: int = 1  # Rows and columns of the part of a product that one unit computes at a time.
    units: int = 0  # Units that compute tiles side by side; 0: time is proportional to the FLOPs.
    kernel_seconds: float = 0.0  # Least time of a kernel on the device: its start and its end.
    launch_seconds: float = 0.0  # Host time to launch a kernel.
    pass_seconds: float = 0.0  # Host time of a micro-batch besides its blocks: split, head, loss.
    step_seconds: float = 0.0  # Host time of a decode step: scheduling, tables of blocks, drawn tokens.
    row_seconds: float = 0.0  # The same for each row of the step.
    turn_seconds: float = 0.0  # The same for each turn of a sample with an environment.
    call_seconds: float = 0.0  # Host time around a call: distributing samples, packing columns.
    message_seconds: float = 0.0  # Time to send a message to one more peer of an all-to-all.
    question_seconds: float = 0.0  # Time of a process for the messages of a question: of either process.

    @classmethod
    def of(cls, cluster: Cluster) -> "Efficiencies":
        return EFFICIENCIES[cluster.accelerator_name]


_MAMF = "in the best of shapes (ML Engineering, maximum achievable matmul FLOPS), less in others"
_GRAPHS = "NVIDIA, Getting Started with CUDA Graphs"
_GUESS = "estimate; a quarter more or less moves the mean of the published steps by at most 3 %"
_MEASURE = "estimate, which `realhf profile` replaces by the machine's own rates"
_TURN = (
    "chat template and messages to two processes: 0.3 ms if these wait for them, 1.5 ms on two busy cores")
_QUESTION = "packing, two gloo messages and a change of threads, measured on two cores of a virtual machine"
_GPU: Mapping[str, tuple[float, str]] = {
    "grouped_matmul": (0.55, f"{_GUESS}: tiles of one expert end before the next begins"),
    "memory": (0.8, "copies reach 0.9 (arXiv:2402.13499); decoding kernels read less evenly"),
    "link": (0.8, "370 of 450 GB/s after NVLink's protocol: github.com/NVIDIA/nccl-tests/issues/212"),
    "tile": (128, "rows and columns of the tiles of large products in cuBLAS and CUTLASS"),
    "kernel_seconds": (3.4e-6, f"short kernels in a recorded graph follow in 3.4 us: {_GRAPHS}"),
    "launch_seconds": (1e-5, f"the launch alone 3.8 us ({_GRAPHS}); the rest is torch's dispatch: {_GUESS}"),
    "pass_seconds": (5e-4, f"50 launches; {_GUESS}"),
    "step_seconds": (2e-3, f"scheduler, tables and 35 launches for a draw; {_GUESS}"),
    "row_seconds": (1e-5, f"Python's work for a row; {_GUESS}"),
    "turn_seconds": (1e-3, _TURN),
    "call_seconds": (0.02, f"messages of the controller, measured with gloo; {_GUESS}"),
    "message_seconds": (2e-6, f"one RDMA message; {_GUESS}"),
    "question_seconds": (6.5e-4, _QUESTION)}
_HOPPER: Mapping[str, tuple[float, str]] = {
    "matmul": (0.7, f"0.80 {_MAMF}"),
    "attention": (0.35, "FlashAttention-2, which torch runs, on H100: arXiv:2407.08608, abstract"),
    "units": (132, "streaming multiprocessors: vendor"),
    **_GPU}
TABLE: Mapping[str, Mapping[str, tuple[float, str]]] = {
    "h100": _HOPPER,
    "h200": _HOPPER,  # The same chip with more memory, which the cluster file says.
    "a100": {
        "matmul": (0.75, f"0.86 {_MAMF}"),
        "attention": (0.6, "FlashAttention-2, 0.5 to 0.73: arXiv:2307.08691, abstract"),
        "units": (108, "streaming multiprocessors: vendor"),
        **_GPU,
    },
    "cpu": {
        "matmul": (0.7, _MEASURE),
        "grouped_matmul": (0.7, "one product after the other (nn/moe.py)"),
        "attention": (0.4, _MEASURE),
        "memory": (0.8, _MEASURE),
        "link": (0.8, _MEASURE),
        "launch_seconds": (9e-6, f"0.2 ms for the operators of a block; {_MEASURE}"),
        "pass_seconds": (1.5e-3, _MEASURE),
        "step_seconds": (4e-4, _MEASURE),
        "turn_seconds": (1e-3, _TURN),
        "call_seconds": (0.02, _MEASURE),
        "message_seconds": (1e-4, "gloo on one machine: 0.15 ms for an exchange of small messages"),
        "question_seconds": (6.5e-4, _QUESTION),
    },
}
"""Accelerator -> field of Efficiencies -> figure and source. Fields that a CPU lacks have no effect there."""
EFFICIENCIES = {
    name: Efficiencies(**{field: value for field, (value, _) in figures.items()})  # type: ignore[arg-type]
    for name, figures in TABLE.items()}


@dataclass(frozen=True)
class EnginePath:
    """The passes of an engine. Numbers of kernels are those of one block in the forward direction."""

    kernels: int  # In training and prefill.
    expert_kernels: int  # Those that experts add: router, permutations, grouped products.
    decode_kernels: int  # Of a dense block in a decode step, besides collectives.
    decode_expert_kernels: int  # Those that experts add to them,
    shared_kernels: int = 0  # and shared experts,
    shared_gate_kernels: int = 0  # and their gate,
    latent_kernels: int = 0  # and latent attention,
    sum_kernels: int = 0  # and the sums over tensor-parallel ranks.
    kernels_per_expert: int = 0  # Those of each expert that runs by itself, in training and prefill.
    recorded: bool = False  # Whether decode steps replay recorded kernels, so that the host launches none.
    gathers: bool = True
    """Whether decode steps gather the tokens of all ranks that share experts, so that their shapes are known;
    else tokens go to the ranks of their experts."""
    gathered_kernels: int = 8  # Those that gathering adds to `decode_expert_kernels`, besides collectives.
    shares_prompts: bool = False  # A prompt's blocks are read once for all of its rows.
    shares_prefixes: bool = False  # A pass computes once what its sequences begin with.
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
    pass_speed: float = 1.0
    """FLOP/s of the products in blocks of training and prefill, relative to those in the model's dtype."""
    decode_speed: float = 1.0  # The same in the blocks of decode steps.
    decode_weight_bytes: float | None = None  # A parameter of a block in decode steps; None: as in memory.

    @classmethod
    def of(cls, cluster: Cluster) -> "EnginePath":
        return OUR_CPU if cluster.device_type == "cpu" else OUR_CUDA

    def of_role(self, config: ModelConfig) -> "EnginePath":
        """Return the path of the engine that trains a model, if this is that of the native engine."""
        return MEGATRON if isinstance(config, MegatronConfig) else self

    def of_decode_block(self, config: ModelConfig, *, has_experts: bool, tp: int = 1, ep: int = 1) -> int:
        """Return the kernels of a block in a decode step, besides collectives."""
        kernels = self.decode_kernels
        kernels += self.latent_kernels if config.mla is not None else 0
        kernels += self.sum_kernels if tp > 1 else 0
        if has_experts:
            assert config.moe is not None
            kernels += self.decode_expert_kernels
            kernels += self.shared_kernels if config.moe.shared_width else 0
            kernels += self.shared_gate_kernels if config.moe.shared_gate else 0
            kernels += self.gathered_kernels if self.gathers and ep > 1 else 0
        return kernels


OUR_CUDA = EnginePath(
    kernels=17, expert_kernels=17, decode_kernels=9, decode_expert_kernels=5, shared_kernels=4,
    shared_gate_kernels=3, latent_kernels=6, sum_kernels=2, recorded=True)
"""Training and prefill: counted as the operators of a block that torch dispatches
(tests/planner/test_rates.py). Decoding: the launches that the engine's test counts (tests/nn/test_fused.py)
with PagedTokens, which read the pages of each row in place, and DecodeGraphs."""
OUR_CPU = EnginePath(
    kernels=17, expert_kernels=17, decode_kernels=26, decode_expert_kernels=18, shares_prompts=True,
    shares_prefixes=True, reads_blocks=True)
"""Decoding reads blocks in place, those of a prompt once for all of its rows (BlockAttention)."""


MEGATRON = EnginePath(
    kernels=25, expert_kernels=38, kernels_per_expert=6, decode_kernels=26, decode_expert_kernels=18,
    pads_stages=True)
"""Megatron-Core's local layers with our norms and attention, counted as above
(tests/megatron/test_planner.py). The native engine decodes."""


NEMO = EnginePath(
    kernels=25, expert_kernels=60, decode_kernels=12, decode_expert_kernels=9, recorded=True, gathers=False,
    pads_stages=True, splits_experts=False, overlap=1.0,
)
"""NeMo RL v0.4, counted from its code. Training by Megatron-Core with Transformer Engine, which launches two
products for each of a rank's 16 experts; generation by vLLM 0.10, whose decoding is compiled and recorded. A
pass through stages pads packed sequences to the limit, experts are not split
(expert_tensor_parallel_size 1), and gradients are reduced during the backward pass (overlap_grad_reduce)."""
_VLLM = replace(
    OUR_CUDA, decode_kernels=NEMO.decode_kernels, decode_expert_kernels=NEMO.decode_expert_kernels,
    shared_kernels=NEMO.shared_kernels, shared_gate_kernels=NEMO.shared_gate_kernels,
    latent_kernels=NEMO.latent_kernels, sum_kernels=NEMO.sum_kernels, gathers=False)
_FP8: Mapping[str, Any] = {"decode_speed": 2.0, "decode_weight_bytes": 1.0}
ENGINES: Mapping[str, EnginePath | None] = {
    "realhf": None,
    "vllm": _VLLM,
    "vllm-fp8": replace(_VLLM, **_FP8),
    "nemo-rl": NEMO,
    "nemo-rl-fp8": replace(NEMO, pass_speed=2.0, **_FP8),
}
"""Name of an engine -> its path on a GPU; None: this engine's. `vllm` decodes as vLLM and trains as this
engine. In FP8, products reach the same share of a peak that is twice as high (vendor's figures for H100),
which is an upper bound, as values are converted in between. Heads, caches, messages and the account of memory
are those of the dtype."""


def padded_sizes(counts: Any) -> Any:
    """Return the sizes to which recorded passes round up (kv_blocks.padded_size), for an array of counts."""
    whole = np.maximum(1.0, np.ceil(counts))
    step = np.where(whole <= 256, 32.0, 64.0)
    return np.where(whole <= 32, np.exp2(np.ceil(np.log2(whole))), np.ceil(whole / step) * step)
