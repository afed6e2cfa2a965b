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


_MAMF = "in the best of shapes (ML Engineering, maximum achievable matmul FLOPS), less in others"
_GRAPHS = "NVIDIA, Getting Started with CUDA Graphs"
_GUESS = "estimate; a quarter more or less moves the mean of the published steps by at most 3 %"
_MEASURE = "estimate, which `realhf profile` replaces by the machine's own rates"
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
    "call_seconds": (0.02, f"messages of the controller, measured with gloo; {_GUESS}"),
    "message_seconds": (2e-6, f"one RDMA message; {_GUESS}")}
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
        "call_seconds": (0.02, _MEASURE),
        "message_seconds": (1e-4, "gloo on one machine: 0.15 ms for an exchange of small messages"),
    },
}
"""Accelerator -> field of Efficiencies -> figure and source. Fields that a CPU lacks have no effect there."""
EFFICIENCIES = {
    name: Efficiencies(**{field: value for field, (value, _) in figures.items()})  # type: ignore[arg-type]
    for name, figures in TABLE.items()}
