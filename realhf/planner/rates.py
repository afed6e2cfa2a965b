"""Seconds of a decoder block, a head or a collective on one device of a cluster, by its roofline.

A matrix product takes the longer of its FLOPs at peak and its bytes at the memory's bandwidth (Williams et
al. 2009). A collective takes alpha + bytes / beta per class of link, with the volume that the algorithm
sends. `Efficiencies` say how near kernels come to the peaks, and an `EnginePath` what the engine launches and
reads; a profile (profiled_rates.py) replaces them by measurements.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from realhf.calls import OPTIMIZER_STATE, Output
from realhf.cluster import Cluster
from realhf.models.model_config import ModelConfig
from realhf.models.model_flops import attention_flops, dense_params
from realhf.planner.efficiencies import Efficiencies, EnginePath, padded_sizes
from realhf.planner.links import LinkRates, Span, ports_alone
from realhf.planner.problem import ModelRole, parameter_table
from realhf.planner.shard import packed_itemsize, widths

_LOGIT_BYTES = 4  # Logits are float32.
_EXCHANGED_PASSES = 4  # The part of EnginePath.expert_passes that is on the far side of an exchange.
_MASKED_PASSES = 2  # Those that clear the rows of other ranks' experts, which a rank that gathers moves, too.
_SMALLEST_TILE = 16  # Rows of the smallest tile of a grouped product.
SKEW = 0.5
"""Standard deviation of the experts' shares of tokens, relative to their mean. Routers without a balancing
loss, as in reinforcement learning, favour experts: with 0.5, 16 experts a rank and 8 ranks, the busiest rank
has 1.2 times the mean. Training Qwen3-235B on H100s is 1.24 times slower than with forced balance
(github.com/yanring/Megatron-MoE-ModelZoo, best_practice/Qwen3: 295 against 237 TFLOP/s)."""


class BlockShape(NamedTuple):
    """Parameters and widths of the mean decoder block."""

    dense: float  # The parameters in matrix products of all tokens: attention, dense or shared MLP, router.
    width: float  # Sum of the widths of the MLPs that a token passes.
    expert: int  # The parameters of one expert.
    moe_share: float  # Fraction of blocks that have experts.
    split: float  # Sum, over the dense products whose terms tp splits, of the terms that each adds up.
    whole: float  # The same over the products whose terms it does not split.
    decode_attention: float  # FLOPs of a new token and one in the cache.


@lru_cache(maxsize=256)
def block_shape(config: ModelConfig) -> BlockShape:
    """Return the means over all decoder blocks of a model."""
    c = config
    spec = parameter_table(config)
    dense = dense_params(spec) / config.num_layers
    ups = (p for p in spec.params if p.short_name in ("up.weight", "shared_up.weight"))
    width = sum(p.shape[0] for p in ups) / config.num_layers
    attention = attention_flops(config)
    outputs = c.num_heads * c.head_dim
    whole = float(c.hidden_size)  # Queries, keys and values.
    if c.mla is not None:  # Queries and outputs are multiplied with the latent that is cached.
        latent = c.mla.kv_lora_rank
        outputs = c.num_heads * c.mla.v_head_dim
        whole += (c.mla.q_lora_rank or 0) + latent
        attention = 2 * c.num_heads * (2 * latent + c.mla.qk_rope_head_dim)
    split = outputs + width
    whole += c.hidden_size if width else 0
    if (moe := config.moe) is None:
        return BlockShape(dense, width, 0, 0.0, split, whole, attention)
    share = 1 - moe.num_dense_layers / config.num_layers
    width += share * moe.num_experts_per_token * moe.expert_width
    expert = 3 * config.hidden_size * moe.expert_width
    return BlockShape(dense, width, expert, share, split, whole, attention)


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


class Rates(LinkRates):
    """Rooflines of one cluster.

    `tokens` are those of one pass on one rank, `squared` is the sum of the squared lengths of its sequences,
    and `rows` are the sequences of a decode step.
    """

    def __init__(
        self, cluster: Cluster, efficiencies: Efficiencies | None = None, path: EnginePath | None = None
    ) -> None:
        """Set up the rates, by default for the accelerator's efficiencies and the path of this engine."""
        super().__init__(cluster, efficiencies or Efficiencies.of(cluster))
        self._given = efficiencies, path
        self.path = path or EnginePath.of(cluster)
        self._memory = cluster.memory_bandwidth_bytes_per_second * self.efficiencies.memory
        self.known_blocks: dict[tuple[object, ...], Cost] = {}
        self.known_updates: dict[tuple[object, ...], tuple[float, float]] = {}
        self.known_generations: dict[tuple[object, ...], Any] = {}

    def on(self, cluster: Cluster) -> "Rates":
        """Return the rates of another cluster; what this one was given replaces that one's efficiencies."""
        return Rates(cluster, *self._given)

    def with_efficiencies(self, efficiencies: Efficiencies) -> "Rates":
        """Return rates of this cluster and engine with other efficiencies."""
        return Rates(self.cluster, efficiencies, self._given[1])

    def at(self, ranks: Collection[int]) -> "Rates":
        """Return the rates of the kind of hosts that has these ranks; if several kinds have them, rates as if
        all hosts had the worst figures of any."""
        kind = self.cluster.kind_index(ranks)
        return self if kind is None or len(self.cluster.kinds) == 1 else self._of_kinds[kind]

    @cached_property
    def ports(self) -> "Rates":
        """The rates if nothing but the ports of hosts took time."""
        return Rates(ports_alone(self.cluster), Efficiencies(link=self.efficiencies.link), self.path)

    @cached_property
    def _of_kinds(self) -> "list[Rates]":
        return [self.on(kind) for kind in self.cluster.kinds]

    def call_seconds(self, kind: str, *, samples: float) -> float:
        """Return the seconds of a call of this kind on a rank besides its passes."""
        return self.efficiencies.call_seconds

    def crowding(self, kind: str, num_busy: int) -> float:
        """Return how many times longer than measured a call of this kind takes while so many ranks of a host
        are busy. It is 1 unless they share cores."""
        return self.cluster.crowding(num_busy)

    def whole_call(self, kind: str, role: ModelRole, tp: Span, ep: Span) -> float:
        """Return how many times longer a whole call takes than its parts add up to, where it was measured."""
        return 1.0

    def peak(self, role: ModelRole) -> float:
        """Return the FLOP/s of matrix products. Raises ValueError when the cluster file lacks the role's
        dtype."""
        peaks = self.cluster.peak_flops
        if role.dtype not in peaks:
            has = f"it has {', '.join(peaks)}"
            raise ValueError(f"the cluster's peak_flops has no entry for dtype {role.dtype}: {has}")
        return peaks[role.dtype]

    def matmul(
        self, role: ModelRole, *, tokens: Any, params: float, depth: float = 0.0, speed: float = 1.0,
        weight_bytes: float | None = None,
    ) -> Any:
        """Return the seconds of 2 * tokens * params FLOPs or of reading the matrix, whichever is longer.

        `tokens` may be an array. `depth` is the sum, over the products, of the terms that each adds up. In
        each product the units compute tiles of the result in waves, and half of the last wave is idle on
        average (NVIDIA, "Matrix Multiplication Background User's Guide", wave quantization). `speed` and
        `weight_bytes` are those of an engine's path that computes in another dtype than the role's.
        """
        e = self.efficiencies
        idle = np.minimum(tokens, e.tile) * e.tile * e.units * depth
        flops = (2 * tokens * params + idle) / (self.peak(role) * e.matmul * speed)
        return np.maximum(flops, params * (weight_bytes or role.itemsize) / self._memory)

    def grouped_matmul(
        self, role: ModelRole, *, tokens: Any, groups: Any, params: float, depth: float, speed: float = 1.0,
        weight_bytes: float | None = None,
    ) -> Any:
        """Return the seconds of a product in which `groups` matrices of `params` have `tokens` each.

        Each group has tiles of its own, of which the last is half full on average.
        """
        e = self.efficiencies
        tile = np.clip(tokens, min(_SMALLEST_TILE, e.tile), e.tile)
        padded = np.maximum(tokens, 1.0) + (tile - 1) / 2 if e.tile > 1 else tokens
        idle = tile * e.tile * e.units * depth
        flops = (2 * groups * padded * params + idle) / (self.peak(role) * e.grouped_matmul * speed)
        return np.maximum(flops, groups * params * (weight_bytes or role.itemsize) / self._memory)

    def traffic(self, num_bytes: Any) -> Any:
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
        depth = shape.whole + shape.split / n
        path = self.path.of_role(c)
        compute = self.matmul(
            role, tokens=tokens, params=shape.dense / n, depth=depth, speed=path.pass_speed)
        communication = 2 * self.all_reduce(tokens * c.hidden_size * role.itemsize, tp)
        kernels = float(path.kernels)
        moved = exchanged = 0.0
        if c.moe is not None:
            experts, moved, exchanged = self._experts(role, tp, ep, tokens=tokens)
            compute += experts
            communication += exchanged
            by_expert = path.kernels_per_expert * c.moe.num_experts / ep.size
            kernels += shape.moe_share * (path.expert_kernels + by_expert)
        attention = squared / 2 * attention_flops(c) / n  # Causal: a token sees half of its sequence.
        elementwise = tokens * (12 * c.hidden_size + 6 * shape.width / n) * role.itemsize + moved
        compute *= 2 if backward and role.lora is None else 1
        if role.lora is not None:
            adapters = role.trained_spec.numel / c.num_layers / n
            compute += (2 if backward else 1) * self.matmul(role, tokens=tokens, params=adapters)
        compute += (2.5 if backward else 1) * attention / (self.peak(role) * self.efficiencies.attention)
        compute += (2 if backward else 1) * self.traffic(elementwise)
        kernels *= 2 if backward else 1
        return Cost(float(self._launched(compute, kernels, waits=exchanged > 0)), communication)

    def _experts(self, role: ModelRole, tp: Span, ep: Span, *, tokens: float) -> tuple[float, float, float]:
        """Return what the experts of a block add on the busiest rank of an ep group: seconds of products,
        bytes that permutations read and write, and seconds of its two exchanges."""
        c = role.config
        moe = c.moe
        assert moe is not None
        shape = block_shape(c)
        n = tp.size
        group = ep
        if not self.path.splits_experts:  # The ranks of tp have different tokens and different experts.
            group = Span(ep.size * n, min(ep.per_host * n, self.cluster.devices_per_host), ep.beside)
            tokens /= n
            n = 1
        size = group.size
        load = busiest_load(tokens * moe.num_experts_per_token * size, size, moe.num_experts)
        used = max(1.0, used_experts(moe.num_experts, moe.num_experts_per_token, tokens * size) / size)
        routed = tokens * moe.num_experts_per_token * load
        products = self.grouped_matmul(
            role, tokens=routed / used, groups=used, params=shape.expert / n,
            depth=c.hidden_size + moe.expert_width / n, speed=self.path.of_role(c).pass_speed)
        row = c.hidden_size * role.itemsize
        passes = self.path.expert_passes - (_EXCHANGED_PASSES if size == 1 else 0)
        exchange = 2 * self.all_to_all(routed * row, group)
        share = shape.moe_share
        return share * float(products), share * passes * routed * row, share * exchange

    def head(
        self, role: ModelRole, tp: Span, *, tokens: float, output: Output, backward: bool = False
    ) -> Cost:
        """Return the cost of a pass besides its blocks: embedding, head and float32 logits at `tokens`
        positions."""
        c = role.config
        n = tp.size
        embedding = self.traffic(3 * tokens * c.hidden_size * role.itemsize)
        embedding += 0.0 if backward else self.efficiencies.pass_seconds
        if not output.needs_logits or c.head != "lm":
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
        three products (devices/half_precision.py).
        """
        is_cuda = self.cluster.device_type == "cuda"
        if role.widens_head and not (is_cuda and role.dtype == "bfloat16"):
            return self.matmul(replace(role, dtype="float32"), tokens=tokens, params=params)
        products = 3 if role.widens_head and backward else 1
        return products * self.matmul(role, tokens=tokens, params=params)

    def _launched(self, compute: Any, kernels: float, *, recorded: bool = False, waits: bool = False) -> Any:
        """Return the seconds of a block with its kernels' starts and their launches.

        On a GPU kernels are launched while earlier ones run, unless the host waits for results in every
        block (`waits`), such as the numbers of tokens that experts get; on CPU the host time is added.
        """
        e = self.efficiencies
        compute = compute + kernels * e.kernel_seconds
        if recorded:
            return compute
        launches = kernels * e.launch_seconds
        if waits or self.cluster.device_type == "cpu":
            return compute + launches
        return np.maximum(compute, launches)

    def decode_block(
        self, role: ModelRole, tp: Span, ep: Span, *, rows: np.ndarray, context: np.ndarray,
        shared: SharedPrompts | None = None, longest: np.ndarray | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of computation and of communication of one block in decode steps.

        A step reads the weights once, and the cached keys and values as the engine's path does. `longest` is
        the context of the longest row, by default the mean.
        """
        c = role.config
        shape = block_shape(role.config)
        n = tp.size
        path = self.path
        padded = padded_sizes(rows) if path.recorded else rows
        depth = shape.whole + shape.split / n
        compute = self.matmul(
            role, tokens=padded, params=shape.dense / n, depth=depth, speed=path.decode_speed,
            weight_bytes=path.decode_weight_bytes or self._stored_bytes(role))
        communication = 2 * self.all_reduce(padded * c.hidden_size * role.itemsize, tp) + np.zeros_like(rows)
        kernels = float(path.of_decode_block(c, has_experts=False, tp=n))
        if c.moe is not None:
            experts, moved, exchanged = self._decode_experts(role, tp, ep, rows=padded)
            compute = compute + experts + self.traffic(moved)
            communication = communication + exchanged
            of_experts = path.of_decode_block(c, has_experts=True, tp=n, ep=ep.size)
            kernels += shape.moe_share * (of_experts - kernels)
        read = self._cache_bytes(role, n, rows=rows, context=context, shared=shared)
        scores = rows * context * shape.decode_attention / n / (self.peak(role) * self.efficiencies.matmul)
        compute = compute + np.maximum(scores, read / self._memory)
        waits = ep.size > 1 and not path.gathers
        return self._launched(compute, kernels, recorded=path.recorded, waits=waits), communication

    def _stored_bytes(self, role: ModelRole) -> int | None:
        """Return the bytes that a kernel reads of a parameter in int8; None if it reads converted ones. On a
        CPU float32 with converted weights was as fast as with full ones (docs/generation.md)."""
        return 1 if role.int8 and (self.cluster.device_type == "cuda" or role.dtype == "bfloat16") else None

    def _cache_bytes(
        self, role: ModelRole, tp: int, *, rows: np.ndarray, context: np.ndarray,
        shared: SharedPrompts | None,
    ) -> np.ndarray:
        """Return the bytes of keys and values that one layer reads in decode steps."""
        token_bytes = widths(role.config, tp).cached * role.itemsize
        cached = rows * context
        if shared is not None and self.path.shares_prompts:
            cached = cached - (rows - shared.prompts) * shared.tokens
        return cached * token_bytes

    def _decode_experts(
        self, role: ModelRole, tp: Span, ep: Span, *, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Any]:
        """Return the same as `_experts`, for decode steps of `rows` on each rank."""
        c = role.config
        moe = c.moe
        assert moe is not None
        shape = block_shape(c)
        n = tp.size
        per_token = moe.num_experts_per_token
        used = used_experts(moe.num_experts, per_token, rows * ep.size) / ep.size
        routed = rows * per_token * busiest_load(rows * per_token * ep.size, ep.size, moe.num_experts)
        is_cpu = self.cluster.device_type == "cpu"
        products = self.grouped_matmul(
            role, tokens=routed / used, groups=used, params=shape.expert / n,
            depth=c.hidden_size + moe.expert_width / n, speed=self.path.decode_speed,
            weight_bytes=self.path.decode_weight_bytes or (self._stored_bytes(role) if is_cpu else None))
        row = c.hidden_size * role.itemsize
        if self.path.gathers and ep.size > 1:
            exchange = self.all_reduce(rows * ep.size * row, ep)  # An all-gather and a reduce-scatter.
            passes = self.path.expert_passes - _EXCHANGED_PASSES + _MASKED_PASSES
            moved = passes * rows * ep.size * per_token * row
        else:
            exchange = 2 * self.all_to_all(routed * row, ep)
            moved = (self.path.expert_passes - (_EXCHANGED_PASSES if ep.size == 1 else 0)) * routed * row
        if role.int8 and not is_cpu:  # All experts of a layer are converted first (nn/moe.py).
            moved = moved + moe.num_experts / ep.size * shape.expert / n * (1 + role.itemsize)
        return shape.moe_share * products, shape.moe_share * moved, shape.moe_share * exchange

    def decode_head(self, role: ModelRole, tp: Span, *, rows: np.ndarray) -> np.ndarray:
        """Return the seconds of a decode step besides its blocks: logits, sampling and the host's work."""
        c = role.config
        n = tp.size
        e = self.efficiencies
        compute = self._head_product(role, tokens=rows, params=c.vocab_size * c.hidden_size / n)
        sampling = self.path.sampling_passes * rows * c.vocab_size / n * _LOGIT_BYTES / self._memory
        exchange = 3 * self.all_gather(1.0, tp)
        return compute + sampling + exchange + e.step_seconds + rows * e.row_seconds

    def packing(self, role: ModelRole, tp: Span, ep: Span, *, params: float) -> float:
        """Return the seconds in which a generation packs so many parameters on a CPU: they are read and
        written."""
        return self.traffic(params * (role.itemsize + packed_itemsize(role.dtype, self.cluster)))

    def decode_hop(self, role: ModelRole, *, rows: np.ndarray) -> np.ndarray:
        """Return the seconds of a pipeline stage in a decode step of `rows` besides its blocks and head.

        Messages are taken to be sent while the stage works on another cohort.
        """
        return np.zeros_like(rows)

    def accumulate(self, role: ModelRole, params: float) -> float:
        """Return the seconds to add a micro-batch's gradients to the float32 buffer.

        The buffer is read and written; gradients of another dtype are written and read before that.
        """
        wide = role.wide_itemsize
        product = role.itemsize if role.itemsize < wide else 0
        return self.traffic(params * 2 * (product + wide))

    def update(self, role: ModelRole, *, owned: float) -> float:
        """Return the seconds of AdamW on the owned part.

        It reads the gradient and its state, and writes the state; it also writes the parameters where they
        are narrower than the master copy.
        """
        wide = role.wide_itemsize
        moved = (1 + 2 * len(OPTIMIZER_STATE)) * wide
        return self.traffic(owned * (moved + (role.itemsize if role.itemsize < wide else 0)))


# Loads of experts: tokens of the busiest rank of a group, and experts in use


@lru_cache
def expected_maximum(count: int) -> float:
    """Return the expected maximum of so many normal numbers, about the (n - 3/8) / (n + 1/4) quantile (Blom
    1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def busiest_load(num_tokens: Any, num_ranks: int, num_experts: int) -> Any:
    """Return the expected load of the busiest rank, relative to the mean.

    `num_tokens` routed tokens (a number, or an array) fall on ranks at random, and the ranks' shares differ
    by the mean skew of their experts.
    """
    if num_ranks == 1:
        return 1.0
    by_chance = (num_ranks - 1) / np.maximum(num_tokens, 1.0)
    by_skew = SKEW**2 * num_ranks / num_experts
    deviation = (by_chance + by_skew) ** 0.5
    return np.minimum(float(num_ranks), 1 + expected_maximum(num_ranks) * deviation)


@lru_cache(maxsize=1 << 14)
def greatest_load(
    num_tokens: float, num_ranks: int, num_experts: int, *, num_draws: int, num_layers: int = 1
) -> float:
    """Return the load that no rank exceeds in any of some draws, with a chance of 0.99, relative to the mean.

    A draw is the mean load of `num_layers` layers in one pass. The shares of experts are those of gamma
    numbers that add up to 1. Their sums have a longer tail than a normal number, here by the approximation of
    Wilson and Hilferty (1931).
    """
    if num_ranks == 1:
        return 1.0
    by_chance = (num_ranks - 1) / max(num_tokens, 1.0)
    by_skew = (num_ranks - 1) / (num_experts / SKEW**2 + 1)
    ninth = (by_chance + by_skew) / num_layers / 9
    quantile = NormalDist().inv_cdf(1 - 0.01 / (num_ranks * num_draws))
    return min(float(num_ranks), (1 - ninth + quantile * ninth**0.5) ** 3)


def used_experts(num_experts: int, num_per_token: int, num_tokens: Any) -> Any:
    """Return how many experts at least one of the tokens chooses, if each chooses at random.

    b tokens with k of E experts each use E (1 - (1 - k / E)^b) experts.
    """
    return num_experts * (1 - (1 - num_per_token / num_experts) ** num_tokens)
