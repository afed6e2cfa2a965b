"""Efficiencies of accelerators: the shares of their peaks that kernels and links reach, and host times.

A cluster file names its `accelerator`; the table here has the figures for it, each with its source. They hold
for all models, layouts and engines; what an engine launches and reads is in `engine_paths.py`. A profile
replaces the rates that it has measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from realhf.cluster import Cluster


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
    call_seconds: float = 0.0  # Host time around a call: distributing samples, packing columns.
    message_seconds: float = 0.0  # Time to send a message to one more peer of an all-to-all.

    @classmethod
    def of(cls, cluster: Cluster) -> "Efficiencies":
        """Return the figures of a cluster's accelerator."""
        return EFFICIENCIES[cluster.accelerator_name]


_MAMF = "largest product of all shapes, measured: ML Engineering (Bekman), maximum achievable matmul FLOPS"
_HOPPER: Mapping[str, tuple[float, str]] = {
    "matmul": (0.7, f"0.80 is the {_MAMF}; mean over the shapes of transformers"),
    "grouped_matmul": (0.55, "CUTLASS grouped GEMM as in MegaBlocks (arXiv:2211.15841) and DeepGEMM, H800"),
    "attention": (0.4, "FlashAttention-2 on H100, causal: arXiv:2407.08608, figure 5, 370 to 400 TFLOP/s"),
    "memory": (0.8, "STREAM-like kernels reach 0.9, decoding kernels 0.7 to 0.85: arXiv:2402.13499"),
    "link": (
        0.8,
        "370 of 450 GB/s of NVLink after the protocol's share: github.com/NVIDIA/nccl-tests/issues/212",
    ),
    "tile": (128, "CUTLASS's default tile for Hopper, 128 x 128 and 128 x 256"),
    "units": (132, "streaming multiprocessors, vendor"),
    "kernel_seconds": (4e-6, "start and end of kernels in a CUDA graph, 2 to 5 us"),
    "launch_seconds": (1e-5, "an eager PyTorch operator takes the host 5 to 10 us, more with autograd"),
    "pass_seconds": (5e-4, "about 60 launches"),
    "step_seconds": (2e-3, "calibrated"),
    "row_seconds": (1e-5, "calibrated"),
    "call_seconds": (0.02, "our measurement on CPU hosts"),
    "message_seconds": (2e-6, "an RDMA message, vendor"),
}
TABLE: Mapping[str, Mapping[str, tuple[float, str]]] = {
    "h100": _HOPPER,
    "h200": _HOPPER,
    "a100": _HOPPER,
    "cpu": {},
}
"""Accelerator -> field of Efficiencies -> figure and source."""
EFFICIENCIES = {
    name: Efficiencies(**{field: value for field, (value, _) in figures.items()})  # type: ignore[arg-type]
    for name, figures in TABLE.items()
}
