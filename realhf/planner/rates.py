"""Rates: seconds of a decoder block, a head, a collective, on one device of a cluster, by its roofline.

A matrix product takes the longer of its FLOPs at peak and its bytes at the memory's bandwidth (Williams et
al. 2009); a collective takes alpha + bytes / beta per link class, with the volume that the algorithm really
sends. How near kernels come to the peaks is in `Assumptions`; a profile (profile.py) replaces all of it by
what was measured.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from realhf.cluster import Cluster, Link
from realhf.model_config import ModelConfig
from realhf.planner.problem import ModelRole

_WIDE = 4  # bytes of float32: logits, gradients, the optimizer's copies


@dataclass(frozen=True)
class Assumptions:
    """Shares of the peaks that kernels reach, where nothing was measured; typical of large shapes on GPUs."""

    matmul: float = 0.7
    attention: float = 0.4
    memory: float = 0.8
    link: float = 0.8
    overlap: float = 0.0  # Share of a backward pass behind which gradients are reduced; ours is not counted.
    block_seconds: float = 4e-5  # Host time of one block: launching its kernels.
    pass_seconds: float = 5e-4  # Host time of a micro-batch besides its blocks: cutting, head, loss.
    call_seconds: float = 0.02  # Host time around a call: dealing out samples, packing columns.

    @classmethod
    def of(cls, cluster: Cluster) -> "Assumptions":
        """On CPU nothing is launched ahead: operators themselves cost host time (measured on two cores)."""
        return cls(block_seconds=2e-4, pass_seconds=1.5e-3) if cluster.device_type == "cpu" else cls()


class BlockShape(NamedTuple):
    """Parameters and widths of the mean decoder block. `expert` is of one expert, of `num_experts`."""

    attention: float
    mlp: float  # What every token passes: the dense or shared MLP and the router.
    expert: float
    num_experts: int
    experts_per_token: int
    width: float  # Of what a token passes of MLPs, summed.
    moe_share: float  # Of blocks that have experts.


@lru_cache(maxsize=256)
def block_shape(config: ModelConfig) -> BlockShape:
    c = config
    h = config.hidden_size
    moe = config.moe
    mla = config.mla
    if mla is not None:
        q = h * c.num_heads * c.head_dim
        if mla.q_lora_rank is not None:
            q = mla.q_lora_rank * (h + c.num_heads * c.head_dim)
        kv = h * (mla.kv_lora_rank + mla.qk_rope_head_dim)
        kv += mla.kv_lora_rank * c.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
        attention = q + kv + c.num_heads * mla.v_head_dim * h
    else:
        attention = h * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    dense = (3 if c.gated else 2) * h * c.intermediate_size
    if moe is None:
        return BlockShape(attention, dense, 0, 0, 0, c.intermediate_size, 0.0)
    share = 1 - moe.num_dense_layers / c.num_layers
    routed = 3 * h * moe.shared_width + h * moe.num_experts
    width = share * (moe.shared_width + moe.num_experts_per_token * moe.expert_width)
    width += (1 - share) * c.intermediate_size
    mlp = share * routed + (1 - share) * dense
    expert = 3 * h * moe.expert_width
    return BlockShape(attention, mlp, expert, moe.num_experts, moe.num_experts_per_token, width, share)


class Span(NamedTuple):
    """A group of ranks: `size` members, `per_host` of them on each host (all of them: it is inside one)."""

    size: int
    per_host: int

    @property
    def hosts(self) -> int:
        return -(-self.size // self.per_host)


class Cost(NamedTuple):
    """Seconds of computing and of communicating."""

    compute: float
    wires: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.wires

    def times(self, count: float) -> "Cost":
        return Cost(self.compute * count, self.wires * count)

    def plus(self, other: "Cost") -> "Cost":
        return Cost(self.compute + other.compute, self.wires + other.wires)


class SharedPrompts(NamedTuple):
    """Of rows that decode: how many prompts they have, of which so many tokens are read once for all rows."""

    prompts: np.ndarray
    tokens: float


class Rates:
    """Rooflines of one cluster. `tokens` are those of one pass on one rank, `squared` the sum of the squared
    lengths of its sequences, `rows` sequences of a decode step."""

    def __init__(self, cluster: Cluster, assumptions: Assumptions | None = None) -> None:
        self.cluster = cluster
        self.assume = assumptions or Assumptions.of(cluster)
        self._memory = cluster.memory_bandwidth_bytes_per_second * self.assume.memory
        self.known_blocks: dict[tuple[object, ...], Cost] = {}

    def call_seconds(self, kind: str, *, samples: float) -> float:
        """What a call of this kind takes on a rank besides its passes."""
        return self.assume.call_seconds

    # Links

    def all_reduce(self, num_bytes: float, span: Span) -> float:
        return self.all_gather(num_bytes, span) + self.reduce_scatter(num_bytes, span)

    def reduce_scatter(self, num_bytes: float, span: Span) -> float:
        return self.all_gather(num_bytes, span)

    def all_gather(self, num_bytes: float, span: Span) -> float:
        """Every member gets `num_bytes` in all, its own part included: each receives (n - 1) / n of them.

        Over several hosts the members of a host share their ports: what comes from outside comes once per
        host, (hosts - 1) / hosts of it, over all of its members' ports (rings over all NICs, as NCCL's).
        """
        n = span.size
        k = min(span.per_host, span.size)
        hosts = span.hosts
        if n == 1:
            return 0.0
        inside = self.cluster.intra_host
        outside = self.cluster.outward
        seconds = (n - 1) / n * num_bytes / self._bandwidth(inside) if k > 1 else 0.0
        latency = math.ceil(math.log2(n)) * (outside if hosts > 1 else inside).latency_seconds
        if hosts > 1:
            ports = k * self._bandwidth(outside)
            seconds = max(seconds, (hosts - 1) / hosts * num_bytes / ports)
        return seconds + latency

    def all_to_all(self, num_bytes: float, span: Span) -> float:
        """Every member sends `num_bytes` in all, in equal parts to all members."""
        if span.size == 1:
            return 0.0
        outside = 1 - min(span.per_host, span.size) / span.size
        link = self.cluster.outward if outside else self.cluster.intra_host
        inside_bytes = (1 - outside - 1 / span.size) * num_bytes
        seconds = max(
            inside_bytes / self._bandwidth(self.cluster.intra_host),
            outside * num_bytes / self._bandwidth(self.cluster.outward),
        )
        return seconds + link.latency_seconds

    def send(self, num_bytes: float, *, within_host: bool) -> float:
        link = self.cluster.intra_host if within_host else self.cluster.outward
        return link.latency_seconds + num_bytes / self._bandwidth(link)

    def samples(self, num_bytes: float) -> float:
        """Samples handed from call to call, from host memory to host memory."""
        return self.send(num_bytes, within_host=False)

    def host_copy(self, num_bytes: float) -> float:
        """Between a device and its host's memory. Raises ValueError when the cluster file does not say."""
        link = self.cluster.host_memory
        if link is None:
            raise ValueError("the cluster has no host_memory link")
        return link.latency_seconds + num_bytes / link.bandwidth_bytes_per_second

    def _bandwidth(self, link: Link) -> float:
        return link.bandwidth_bytes_per_second * self.assume.link

    # Computing

    def peak(self, role: ModelRole) -> float:
        """FLOP/s of matrix products. Raises ValueError when the cluster file lacks the role's dtype."""
        peaks = self.cluster.peak_flops
        if role.dtype not in peaks:
            has = f"it has {', '.join(peaks)}"
            raise ValueError(f"the cluster's peak_flops has no entry for dtype {role.dtype}: {has}")
        return peaks[role.dtype]

    def matmul(self, role: ModelRole, *, tokens: float, params: float, weight_reads: float = 1.0) -> float:
        """tokens x (params as one matrix): 2 tokens params FLOPs, or reading the matrix."""
        flops = 2 * tokens * params / (self.peak(role) * self.assume.matmul)
        return max(flops, weight_reads * params * role.itemsize / self._memory)

    def traffic(self, num_bytes: float) -> float:
        """Operations that only read and write."""
        return num_bytes / self._memory

    def block(
        self, role: ModelRole, tp: Span, ep: Span, *, tokens: float, squared: float, backward: bool = False
    ) -> Cost:
        """One block forward, or backward alone: twice the matrix products (once where weights are frozen
        under adapters), 2.5 times the attention (flash attention computes its scores again, Dao et al. 2022).
        """
        c = role.config
        shape = block_shape(role.config)
        n = tp.size
        dense = (shape.attention + shape.mlp) / n
        compute = self.matmul(role, tokens=tokens, params=dense)
        wires = 2 * self.all_reduce(tokens * c.hidden_size * role.itemsize, tp)
        if shape.num_experts:
            routed = tokens * shape.experts_per_token
            touched = min(shape.num_experts, routed) / ep.size
            per_matrix = shape.expert / n * max(1.0, touched)
            flops = 2 * routed * shape.expert / n / (self.peak(role) * self.assume.matmul)
            reading = per_matrix * role.itemsize / self._memory
            compute += shape.moe_share * max(flops, reading)
            exchange = 2 * self.all_to_all(routed * c.hidden_size * role.itemsize, ep)
            wires += shape.moe_share * exchange
        attention = 2 * squared * c.num_heads / n * c.head_dim  # causal: half of 4 * squared * heads * dim
        elementwise = tokens * (12 * c.hidden_size + 6 * shape.width / n) * role.itemsize
        compute *= 2 if backward and role.lora is None else 1
        if role.lora is not None:
            adapters = role.trained_spec.numel / c.num_layers / n
            compute += (2 if backward else 1) * self.matmul(role, tokens=tokens, params=adapters)
        compute += (2.5 if backward else 1) * attention / (self.peak(role) * self.assume.attention)
        compute += (2 if backward else 1) * self.traffic(elementwise)
        return Cost(float(self._launched(compute)), wires)

    def head(
        self, role: ModelRole, tp: Span, *, tokens: float, output: str, backward: bool = False
    ) -> Cost:
        """Embedding of a pass and its head at `tokens` positions: float32 logits that softmax goes over."""
        c = role.config
        n = tp.size
        embedding = self.traffic(3 * tokens * c.hidden_size * role.itemsize)
        embedding += 0.0 if backward else self.assume.pass_seconds
        if output != "logprobs" or c.head != "lm":
            return Cost(embedding)
        params = c.vocab_size * c.hidden_size / n
        passes = 5 if backward else 6
        compute = self.matmul(role, tokens=tokens, params=params)
        compute *= 2 if backward and role.lora is None else 1
        compute += self.traffic(passes * tokens * c.vocab_size / n * _WIDE)
        wires = 0.0 if n == 1 else self.all_reduce(tokens * c.hidden_size * role.itemsize, tp)
        return Cost(embedding + compute, wires)

    def _launched(self, compute: Any) -> Any:
        """Seconds of a block: kernels are launched while earlier ones run, operators on CPU are not."""
        if self.cluster.device_type == "cpu":
            return compute + self.assume.block_seconds
        return np.maximum(compute, self.assume.block_seconds)

    def decode_block(
        self, role: ModelRole, tp: Span, ep: Span, *, rows: np.ndarray, context: np.ndarray,
        shared: SharedPrompts | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """One block of decode steps: it reads its weights and the keys and values once."""
        c = role.config
        shape = block_shape(role.config)
        n = tp.size
        params = (shape.attention + shape.mlp) / n
        touched = np.zeros_like(rows)
        if shape.num_experts:
            # Of E experts, b rows with k each touch E (1 - (1 - k/E)^b), spread over ep.
            spared = (1 - shape.experts_per_token / shape.num_experts) ** (rows * ep.size)
            touched = shape.moe_share * shape.num_experts * (1 - spared) / ep.size * shape.expert / n
        active = params + shape.moe_share * shape.experts_per_token * shape.expert / n
        flops = 2 * rows * active + 4 * rows * context * c.num_heads / n * c.head_dim
        cached = rows * context
        if shared is not None:
            cached = cached - (rows - shared.prompts) * shared.tokens
        read = (params + touched + cached * cache_width(c, n)) * role.itemsize
        compute = np.maximum(flops / (self.peak(role) * self.assume.matmul), read / self._memory)
        one = self.all_reduce(1.0, tp)
        wires = 2 * (one + rows * c.hidden_size * role.itemsize * (self.all_reduce(1e9, tp) - one) / 1e9)
        if shape.num_experts and ep.size > 1:
            sent = rows * shape.experts_per_token * c.hidden_size * role.itemsize
            least = self.all_to_all(0.0, ep)
            wires = wires + 2 * shape.moe_share * (least + sent * (self.all_to_all(1e9, ep) - least) / 1e9)
        return self._launched(compute), wires

    def decode_head(self, role: ModelRole, tp: Span, *, rows: np.ndarray) -> np.ndarray:
        """Logits and sampling of one token per row."""
        c = role.config
        n = tp.size
        params = c.vocab_size * c.hidden_size / n
        flops = 2 * rows * params / (self.peak(role) * self.assume.matmul)
        compute = np.maximum(flops, params * role.itemsize / self._memory)
        sampling = 8 * rows * c.vocab_size / n * _WIDE / self._memory
        exchange = 3 * self.all_gather(1.0, tp)
        return compute + sampling + exchange + 2 * self.assume.block_seconds

    def accumulate(self, role: ModelRole, params: float) -> float:
        """Adds one micro-batch's gradients to the float32 buffer: products read and write it, and where they
        have another dtype, they are written and read first."""
        wide = role.wide_itemsize
        product = role.itemsize if role.itemsize < wide else 0
        return self.traffic(params * 2 * (product + wide))

    def update(self, role: ModelRole, *, owned: float) -> float:
        """AdamW on the owned part: gradient, master copy and two moments read; all but the first written, and
        the parameters where they are narrower than that copy."""
        wide = role.wide_itemsize
        return self.traffic(owned * (7 * wide + (role.itemsize if role.itemsize < wide else 0)))


def cache_width(config: ModelConfig, tp: int) -> float:
    """Numbers that the KV cache keeps per token and block on one tensor-parallel rank."""
    if config.mla is not None:
        return config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    return 2 * config.head_dim * max(1, config.num_kv_heads // tp)
