"""Seconds of a decoder block, a head or a collective on one device of a cluster, by its roofline.

A matrix product takes the longer of its FLOPs at peak and its bytes at the memory's bandwidth (Williams et
al. 2009). A collective takes alpha + bytes / beta per class of link, with the volume that the algorithm
sends. `Assumptions` say how near kernels come to the peaks; a profile (profile.py) replaces them by
measurements.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from realhf.cluster import Cluster, Link
from realhf.model_config import ModelConfig
from realhf.model_flops import attention_flops, dense_params
from realhf.param_spec import model_spec
from realhf.planner.problem import ModelRole
from realhf.planner.shard import widths

_LOGIT_BYTES = 4  # Logits are float32.


@dataclass(frozen=True)
class Assumptions:
    """Fractions of the peaks that kernels reach when nothing was measured, typical of large shapes on
    GPUs."""

    matmul: float = 0.7
    attention: float = 0.4
    memory: float = 0.8
    link: float = 0.8
    overlap: float = 0.0  # Fraction of a backward pass that hides the reduction of gradients.
    block_seconds: float = 4e-5  # Host time to launch the kernels of one block.
    pass_seconds: float = 5e-4  # Host time of a micro-batch besides its blocks: split, head, loss.
    call_seconds: float = 0.02  # Host time around a call: distributing samples, packing columns.

    @classmethod
    def of(cls, cluster: Cluster) -> "Assumptions":
        """Return the defaults for a cluster. On CPU the operators themselves cost host time, as none is
        launched ahead."""
        return cls(block_seconds=2e-4, pass_seconds=1.5e-3) if cluster.device_type == "cpu" else cls()


class BlockShape(NamedTuple):
    """Parameters and widths of the mean decoder block."""

    dense: float  # The parameters in matrix products of all tokens: attention, dense or shared MLP, router.
    width: float  # Sum of the widths of the MLPs that a token passes.
    expert: int  # The parameters of one expert.
    moe_share: float  # Fraction of blocks that have experts.


@lru_cache(maxsize=256)
def block_shape(config: ModelConfig) -> BlockShape:
    spec = model_spec(config)
    dense = dense_params(spec) / config.num_layers
    ups = (p for p in spec.params if p.part in ("up.weight", "shared_up.weight"))
    width = sum(p.shape[0] for p in ups) / config.num_layers
    if (moe := config.moe) is None:
        return BlockShape(dense, width, 0, 0.0)
    share = 1 - moe.num_dense_layers / config.num_layers
    width += share * moe.num_experts_per_token * moe.expert_width
    return BlockShape(dense, width, 3 * config.hidden_size * moe.expert_width, share)


class Span(NamedTuple):
    """A group of `size` ranks, with `per_host` of them on each host."""

    size: int
    per_host: int

    @property
    def hosts(self) -> int:
        return -(-self.size // self.per_host)


class Cost(NamedTuple):
    """Seconds of computation and of communication."""

    compute: float
    communication: float = 0.0

    @property
    def seconds(self) -> float:
        return self.compute + self.communication

    def times(self, count: float) -> "Cost":
        return Cost(self.compute * count, self.communication * count)

    def plus(self, other: "Cost") -> "Cost":
        return Cost(self.compute + other.compute, self.communication + other.communication)


class SharedPrompts(NamedTuple):
    """Numbers of distinct prompts among decoding rows; `tokens` of each are read once for all its rows."""

    prompts: np.ndarray
    tokens: float


class Rates:
    """Rooflines of one cluster.

    `tokens` are those of one pass on one rank, `squared` is the sum of the squared lengths of its sequences,
    and `rows` are the sequences of a decode step.
    """

    def __init__(self, cluster: Cluster, assumptions: Assumptions | None = None) -> None:
        self.cluster = cluster
        self.assume = assumptions or Assumptions.of(cluster)
        self._memory = cluster.memory_bandwidth_bytes_per_second * self.assume.memory
        self.known_blocks: dict[tuple[object, ...], Cost] = {}

    def call_seconds(self, kind: str, *, samples: float) -> float:
        """Return the seconds of a call of this kind on a rank besides its passes."""
        return self.assume.call_seconds

    # Links

    def all_reduce(self, num_bytes: Any, span: Span) -> Any:
        """Return the seconds of a sum, for a number of bytes or an array of them, as in other collectives."""
        return self.all_gather(num_bytes, span) + self.reduce_scatter(num_bytes, span)

    def reduce_scatter(self, num_bytes: Any, span: Span) -> Any:
        return self.all_gather(num_bytes, span)

    def all_gather(self, num_bytes: Any, span: Span) -> Any:
        """Return the seconds until every member has all `num_bytes`, of which it receives (n - 1) / n.

        On several hosts the members of a host share their ports: data from outside arrives once per host,
        (hosts - 1) / hosts of it, over the ports of all its members (as NCCL's rings over all NICs).
        """
        n = span.size
        if n == 1:
            return 0.0
        inside = (n - 1) / n if span.per_host > 1 else 0.0
        outside = (1 - 1 / span.hosts) / span.per_host
        outside *= self.cluster.slowdown(span.hosts, in_ring=True)
        return self._exchange(num_bytes, inside, outside, num_latencies=math.ceil(math.log2(n)))

    def all_to_all(self, num_bytes: Any, span: Span) -> Any:
        """Return the seconds of an exchange in which every member sends `num_bytes` in equal parts to all.

        With rails, what goes to other hosts first goes to the device of their host with the right index.
        """
        if span.size == 1:
            return 0.0
        outside = 1 - span.per_host / span.size
        inside = (span.per_host - 1) / span.size
        inside += outside * (1 - 1 / span.per_host) if self.cluster.rails else 0.0
        return self._exchange(num_bytes, inside, outside * self.cluster.slowdown(span.hosts))

    def _exchange(self, num_bytes: Any, inside: float, outside: float, *, num_latencies: int = 1) -> Any:
        """Return the seconds in which a device sends these fractions of some bytes inside its host and to
        others."""
        near = self.cluster.link(within_host=True)
        far = self.cluster.link(within_host=False)
        slope = max(inside / self._bandwidth(near), outside / self._bandwidth(far))
        return num_bytes * slope + num_latencies * (far if outside else near).latency_seconds

    def send(self, num_bytes: float, *, within_host: bool) -> float:
        slowdown = self.cluster.slowdown(self.cluster.num_hosts)
        return self._exchange(num_bytes, float(within_host), 0.0 if within_host else slowdown)

    def samples(self, num_bytes: float) -> float:
        """Return the seconds to move samples between calls, from host memory to host memory."""
        return self.send(num_bytes, within_host=False)

    def host_copy(self, num_bytes: float) -> float:
        """Return the seconds of a copy between a device and its host's memory.

        Raises ValueError when the cluster file has no such link.
        """
        link = self.cluster.host_memory
        if link is None:
            raise ValueError("the cluster has no host_memory link")
        return link.latency_seconds + num_bytes / link.bandwidth_bytes_per_second

    def _bandwidth(self, link: Link) -> float:
        return link.bandwidth_bytes_per_second * self.assume.link

    # Computing

    def peak(self, role: ModelRole) -> float:
        """Return the FLOP/s of matrix products. Raises ValueError when the cluster file lacks the role's
        dtype."""
        peaks = self.cluster.peak_flops
        if role.dtype not in peaks:
            has = f"it has {', '.join(peaks)}"
            raise ValueError(f"the cluster's peak_flops has no entry for dtype {role.dtype}: {has}")
        return peaks[role.dtype]

    def matmul(self, role: ModelRole, *, tokens: Any, params: float) -> Any:
        """Return the seconds of 2 * tokens * params FLOPs or of reading the matrix, whichever is longer.

        `tokens` may be an array.
        """
        flops = 2 * tokens * params / (self.peak(role) * self.assume.matmul)
        return np.maximum(flops, params * role.itemsize / self._memory)

    def traffic(self, num_bytes: float) -> float:
        """Return the seconds of operations that only read and write."""
        return num_bytes / self._memory

    def block(
        self, role: ModelRole, tp: Span, ep: Span, *, tokens: float, squared: float, backward: bool = False
    ) -> Cost:
        """Return the cost of one block forward, or of its backward pass alone.

        Backward takes twice the matrix products (once where weights are frozen under adapters) and 2.5 times
        the attention, as flash attention recomputes its scores (Dao et al. 2022).
        """
        c = role.config
        shape = block_shape(role.config)
        n = tp.size
        compute = self.matmul(role, tokens=tokens, params=shape.dense / n)
        communication = 2 * self.all_reduce(tokens * c.hidden_size * role.itemsize, tp)
        if c.moe is not None:
            routed = tokens * c.moe.num_experts_per_token
            used = max(1.0, min(c.moe.num_experts, routed) / ep.size)  # Experts, which share the tokens.
            experts = self.matmul(role, tokens=routed / used, params=used * shape.expert / n)
            compute += shape.moe_share * experts
            exchange = 2 * self.all_to_all(routed * c.hidden_size * role.itemsize, ep)
            communication += shape.moe_share * exchange
        attention = squared / 2 * attention_flops(c) / n  # Causal: a token sees half of its sequence.
        elementwise = tokens * (12 * c.hidden_size + 6 * shape.width / n) * role.itemsize
        compute *= 2 if backward and role.lora is None else 1
        if role.lora is not None:
            adapters = role.trained_spec.numel / c.num_layers / n
            compute += (2 if backward else 1) * self.matmul(role, tokens=tokens, params=adapters)
        compute += (2.5 if backward else 1) * attention / (self.peak(role) * self.assume.attention)
        compute += (2 if backward else 1) * self.traffic(elementwise)
        return Cost(float(self._launched(compute)), communication)

    def head(
        self, role: ModelRole, tp: Span, *, tokens: float, output: str, backward: bool = False
    ) -> Cost:
        """Return the cost of a pass besides its blocks: embedding, head and float32 logits at `tokens`
        positions."""
        c = role.config
        n = tp.size
        embedding = self.traffic(3 * tokens * c.hidden_size * role.itemsize)
        embedding += 0.0 if backward else self.assume.pass_seconds
        if output != "logprobs" or c.head != "lm":
            return Cost(embedding)
        passes = 5 if backward else 6
        params = c.vocab_size * c.hidden_size / n
        compute = self._head_product(role, tokens=tokens, params=params, backward=backward)
        compute *= 2 if backward and role.lora is None else 1
        compute += self.traffic(passes * tokens * c.vocab_size / n * _LOGIT_BYTES)
        communication = 0.0 if n == 1 else self.all_reduce(tokens * c.hidden_size * role.itemsize, tp)
        return Cost(embedding + compute, communication)

    def _head_product(self, role: ModelRole, *, tokens: Any, params: float, backward: bool = False) -> Any:
        """Return the seconds of a product with the head's weight.

        In float32 a GPU computes logits with its bfloat16 units all the same, and their gradients as sums of
        three products (nn/half_matmul.py).
        """
        is_cuda = self.cluster.device_type == "cuda"
        if role.widens_head and not (is_cuda and role.dtype == "bfloat16"):
            return self.matmul(replace(role, dtype="float32"), tokens=tokens, params=params)
        products = 3 if role.widens_head and backward else 1
        return products * self.matmul(role, tokens=tokens, params=params)

    def _launched(self, compute: Any) -> Any:
        """Return the seconds of a block with its host time.

        On a GPU kernels are launched while earlier ones run; on CPU the host time is added.
        """
        if self.cluster.device_type == "cpu":
            return compute + self.assume.block_seconds
        return np.maximum(compute, self.assume.block_seconds)

    def decode_block(
        self, role: ModelRole, tp: Span, ep: Span, *, rows: np.ndarray, context: np.ndarray,
        shared: SharedPrompts | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """Return the seconds of computation and of communication of one block in decode steps.

        A step reads the weights and the cached keys and values once.
        """
        c = role.config
        shape = block_shape(role.config)
        n = tp.size
        params = shape.dense / n
        used = np.zeros_like(rows)  # Parameters of experts that some row uses.
        per_token = 0
        if c.moe is not None:
            # b rows with k of E experts each use E (1 - (1 - k/E)^b) experts, spread over ep.
            per_token = c.moe.num_experts_per_token
            unused = (1 - per_token / c.moe.num_experts) ** (rows * ep.size)
            used = shape.moe_share * c.moe.num_experts * (1 - unused) / ep.size * shape.expert / n
        active = params + shape.moe_share * per_token * shape.expert / n
        flops = 2 * rows * active + rows * context * attention_flops(c) / n
        cached = rows * context
        if shared is not None:
            cached = cached - (rows - shared.prompts) * shared.tokens
        read = (params + used + cached * widths(c, n).cached) * role.itemsize
        compute = np.maximum(flops / (self.peak(role) * self.assume.matmul), read / self._memory)
        sent = rows * c.hidden_size * role.itemsize
        communication = 2 * self.all_reduce(sent, tp) + np.zeros_like(rows)
        if per_token:
            communication = communication + 2 * shape.moe_share * self.all_to_all(sent * per_token, ep)
        return self._launched(compute), communication

    def decode_head(self, role: ModelRole, tp: Span, *, rows: np.ndarray) -> np.ndarray:
        """Return the seconds of logits and sampling for one token per row."""
        c = role.config
        n = tp.size
        compute = self._head_product(role, tokens=rows, params=c.vocab_size * c.hidden_size / n)
        sampling = 8 * rows * c.vocab_size / n * _LOGIT_BYTES / self._memory
        exchange = 3 * self.all_gather(1.0, tp)
        return compute + sampling + exchange + 2 * self.assume.block_seconds

    def accumulate(self, role: ModelRole, params: float) -> float:
        """Return the seconds to add a micro-batch's gradients to the float32 buffer.

        The buffer is read and written; gradients of another dtype are written and read before that.
        """
        wide = role.wide_itemsize
        product = role.itemsize if role.itemsize < wide else 0
        return self.traffic(params * 2 * (product + wide))

    def update(self, role: ModelRole, *, owned: float) -> float:
        """Return the seconds of AdamW on the owned part.

        It reads gradient, master copy and two moments, and writes all but the first; it also writes the
        parameters where they are narrower than that copy.
        """
        wide = role.wide_itemsize
        return self.traffic(owned * (7 * wide + (role.itemsize if role.itemsize < wide else 0)))
