"""The part of a model that a rank holds: parameters, widths of layers, and the bytes of its states.

States are weights, gradients and the optimizer. What a device has available for them is the rest of its
memory after the fixed parts of the reserve.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from realhf.calls import states_of_weights
from realhf.cluster import Cluster
from realhf.devices import chunk_sizes
from realhf.devices.chunk_sizes import SMALL_PRODUCT
from realhf.layout import ParallelStrategy
from realhf.models.kv_blocks import cached_heads
from realhf.models.lora import LoraConfig, adapter_spec
from realhf.models.model_config import ModelConfig, ModuleConfig, TransformersConfig
from realhf.models.param_spec import ModelSpec, ParamSpec, chunk_body, region_size
from realhf.planner.problem import ModelRole, parameter_table
from realhf.realloc.schedule import STAGING_BYTES

_NORMS = ("attn_norm.weight", "attn_out_norm.weight", "mlp_norm.weight", "mlp_out_norm.weight")


@dataclass(frozen=True)
class Widths:
    """Elements per token that one decoder layer computes on the fullest tp rank, and those of the model's
    ends.

    With experts, `mlp` covers all top-k experts of a token, if routing is even.
    """

    hidden: int
    num_heads: int  # Attention heads.
    qkv: int  # Output of the last projections to queries, keys and values, which is one tensor.
    latents: int  # Outputs of DeepSeek's down-projections and their norms.
    rotated: int  # Rotated queries and keys, with rotary positions.
    attention: int
    cached: int  # Keys and values of a token in the KV cache.
    mlp: int  # Width of an MLP: of gate, up, activation and product, or of up and activation.
    experts: int  # What of `mlp` is that of experts; 0 without experts.
    norms: int  # Number of norms of the hidden states in one layer.
    routed: int  # Hidden states copied to experts and back, in elements, and the router's scores.
    vocabulary: int
    head_dim: int

    def in_layer(self, *, num_ups: int) -> list[tuple[int, int]]:
        """Return the input and output widths of the layer's matrix products."""
        return [
            (self.hidden, self.qkv), (self.attention, self.hidden), (self.hidden, num_ups * self.mlp),
            (self.mlp, self.hidden)]


def float32_bytes(products: Sequence[tuple[int, int]], tokens: float) -> float:
    """Return the bytes of operands and result of the largest product that is computed in float32.

    Small products of bfloat16 on CPU are (nn/linear.py).
    """
    small = [(i, o) for i, o in products if tokens * i * o <= SMALL_PRODUCT]
    return 4 * max((tokens * (i + o) + i * o for i, o in small), default=0.0)


def exchanged(config: ModelConfig, tp: int, cp: int) -> int:
    """Return the elements of queries, keys and values that a token sends to the ranks over cp, itself
    included.

    Key-value heads go to every rank that has one of their query heads (nn/attention.py).
    """
    query_heads = config.num_heads // tp
    queries_per_kv = 1
    if config.mla is None:
        queries_per_kv = query_heads // max(1, config.num_kv_heads // tp)
    kv_heads = query_heads // math.gcd(query_heads // cp, queries_per_kv)
    value_dim = config.head_dim if config.mla is None else config.mla.v_head_dim
    return query_heads * config.head_dim + kv_heads * (config.head_dim + value_dim)


def num_params(spec: ModelSpec, strategy: ParallelStrategy, stage: int) -> int:
    """Return the number of parameters on the fullest tp and ep rank of a pipeline stage."""
    return sum(held_params(spec.config, strategy, stage))


@lru_cache(maxsize=1 << 16)
def held_params(
    config: ModelConfig, strategy: ParallelStrategy, stage: int, lora: LoraConfig | None = None
) -> tuple[int, int]:
    """Return the number of parameters that every replica has, and the number in this ep rank's experts.

    With `lora` they are those of the adapters.
    """
    shared, experts = _on_stage(config, _split(strategy), stage, lora).sum(axis=1).tolist()
    return shared, experts


@lru_cache(maxsize=1 << 16)
def int8_params(config: ModelConfig, strategy: ParallelStrategy, stage: int) -> tuple[int, int]:
    """Return the parameters that a copy has in int8 on the fullest rank of a stage, and their rows."""
    layers = np.array(_table(config).stage_layers(strategy, stage)) + 1
    num_experts = config.moe.num_experts if config.moe else 1
    numel = rows = 0
    for (param, is_expert), counts in parameter_kinds(config, None, int8=True).items():
        count = int(counts[layers].sum())
        count = count * -(-num_experts // strategy.ep) // num_experts if is_expert else count
        regions = [param.region(strategy.tp, index) for index in range(strategy.tp)]
        numel += count * max(map(region_size, regions))
        rows += count * max(stop - start for (start, stop), *_ in regions)
    return numel, rows


def packed_itemsize(dtype: str, cluster: Cluster) -> int:
    """Return the bytes of an element of a packed weight of this dtype (nn/linear.py); 0: none is packed.

    A CPU that is faster in a 16-bit dtype than in float32 has units for it, and packs bfloat16 as it is; one
    without them packs in float32.
    """
    if cluster.device_type == "cuda" or dtype == "float64":
        return 0
    peaks = cluster.peak_flops
    has_units = dtype in peaks and "float32" in peaks and peaks[dtype] > peaks["float32"]
    return {"bfloat16": 2, "float16": 0}[dtype] if has_units else 4


def packed_params(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the parameters of the weights that a CPU packs for decoding (nn/linear.py), on the fullest rank
    of a stage.

    They are the large ones among those that `nn.linear` multiplies: not experts, nor weights in int8, nor a
    head whose products are in float32, nor weights into which adapters are merged. The transformers engine
    packs none.
    """
    if role.dtype == "float64" or isinstance(role.config, TransformersConfig):
        return 0
    merged = role.lora if role.lora is not None and role.lora.merge else None
    least = chunk_sizes.LEAST_PACKED_NUMEL
    return _multiplied_params(
        role.config, _split(strategy), stage, merged, role.int8, not role.widens_head, False, least)


def adapted_params(config: ModelConfig, strategy: ParallelStrategy, stage: int, lora: LoraConfig) -> int:
    """Return the parameters of the weights that have adapters, on the fullest rank of a stage."""
    return _multiplied_params(config, _split(strategy), stage, lora, False, False, True, 1)


@lru_cache(maxsize=1 << 16)
def _multiplied_params(
    config: ModelConfig, strategy: ParallelStrategy, stage: int, lora: LoraConfig | None, without_int8: bool,
    with_head: bool, is_adapted: bool, least: int,
) -> int:
    """Return the parameters, on the fullest rank of a stage, of those weights with or without adapters that
    have at least so many."""
    on_stage = set(_table(config).stage_layers(strategy, stage))
    if stage == strategy.pp - 1 and with_head:
        on_stage.add(config.num_layers)
    by_rank = [0] * strategy.tp
    for weight, layers in _linear_weights(config, lora).items():
        if weight.is_adapted != is_adapted or (without_int8 and weight.takes_int8):
            continue
        count = len(on_stage.intersection(layers))
        for index in range(strategy.tp):
            numel = sum(region_size(param.region(strategy.tp, index)) for param in weight.params)
            by_rank[index] += count * numel if numel >= least else 0
    return max(by_rank)


class _LinearWeight(NamedTuple):
    """A weight that `nn.linear` multiplies: its parameters, such as q, k and v, without their names."""

    params: tuple[ParamSpec, ...]
    takes_int8: bool
    is_adapted: bool


@lru_cache(maxsize=64)
def _linear_weights(config: ModelConfig, lora: LoraConfig | None) -> dict[_LinearWeight, list[int]]:
    """Return the layers of each kind of weight, without experts; those of the head are all the layers there
    are."""
    adapted = set()
    if lora is not None:
        adapted = {(p.layer, p.short_name.rpartition(".")[0]) for p in _table(config, lora).params}
    fused: dict[tuple[int, str], list[ParamSpec]] = {}
    table = _table(config)
    for p in table.params:
        name = p.short_name
        if name == "embedding.weight" and config.tied:
            fused[config.num_layers, name] = [p]
        elif len(p.shape) == 2 and p.expert is None and p.layer != -1:
            layer = config.num_layers if p.layer is None else p.layer
            fused.setdefault((layer, table.fused_name(p)), []).append(p)
    kinds: dict[_LinearWeight, list[int]] = {}
    for (layer, _), params in fused.items():
        kind = _LinearWeight(
            tuple(ParamSpec("", p.shape, None, p.split_dim, p.num_units) for p in params),
            all(p.takes_int8 for p in params),
            any((p.layer, p.short_name.rpartition(".")[0]) in adapted for p in params))
        kinds.setdefault(kind, []).append(layer)
    return kinds


@lru_cache(maxsize=1 << 16)
def in_section(
    config: ModelConfig, strategy: ParallelStrategy, stage: int, lora: LoraConfig | None, section_numel: int
) -> tuple[int, int]:
    """Return the two numbers of `held_params` for the largest section (ModelSpec.sections) of each kind."""
    shared, experts = _section_sizes(config, strategy, stage, lora, section_numel)
    return max(shared, default=0), max(experts, default=0)


@lru_cache(maxsize=1 << 16)
def fullest_chunks(
    config: ModelConfig, strategy: ParallelStrategy, stage: int, lora: LoraConfig | None, section_numel: int
) -> int:
    """Return the parameters of a stage whose optimizer the fullest replica has, at most."""
    sections = _section_sizes(config, strategy, stage, lora, section_numel)
    replicas = (strategy.num_replicas, strategy.num_expert_replicas)
    kinds = zip(sections, replicas, strict=True)
    return sum(n - (r - 1) * chunk_body(n, r) for sizes, r in kinds for n in sizes)


def _section_sizes(
    config: ModelConfig, strategy: ParallelStrategy, stage: int, lora: LoraConfig | None, section_numel: int
) -> tuple[list[int], list[int]]:
    """Return the sizes of the sections (ModelSpec.sections) of both kinds of `held_params`."""
    sections: tuple[list[int], list[int]] = ([], [])
    by_kind = _on_stage(config, _split(strategy), stage, lora).tolist()
    for sizes, counts in zip(sections, by_kind, strict=True):
        for count in counts:
            if not sizes or sizes[-1] >= section_numel:
                sizes.append(0)
            sizes[-1] += count
    return sections


def _split(strategy: ParallelStrategy) -> ParallelStrategy:
    """Return the smallest strategy that splits parameters in the same way."""
    s = strategy
    return ParallelStrategy(pp=s.pp, dp=s.ep, tp=s.tp, ep=s.ep, vp=s.vp)


@lru_cache(maxsize=1 << 16)
def _on_stage(
    config: ModelConfig, strategy: ParallelStrategy, stage: int, lora: LoraConfig | None
) -> np.ndarray:
    """Return the parameters of the fullest tp rank of a stage, shape (shared or experts, layer)."""
    layers = _table(config).stage_layers(strategy, stage)
    by_layer = _by_layer(config, strategy.tp, strategy.ep, lora)
    is_last = stage == strategy.pp - 1
    indices = [layer + 1 for layer in layers] + [config.num_layers + 1] * is_last
    if stage == 0 or (is_last and config.tied):
        indices = [0, *indices]
    on_stage = by_layer[:, :, indices]
    fullest: np.ndarray = on_stage[:, on_stage.sum(axis=(0, 2)).argmax()]
    return fullest


@lru_cache(maxsize=64)
def _table(config: ModelConfig, lora: LoraConfig | None = None) -> ModelSpec:
    """Return the parameter table of a model, or of its adapters, by its config, which hashes fast."""
    return parameter_table(config) if lora is None else adapter_spec(config, lora)


@lru_cache(maxsize=64)
def parameter_kinds(
    config: ModelConfig, lora: LoraConfig | None, *, int8: bool = False
) -> dict[tuple[ParamSpec, bool], np.ndarray]:
    """Return the number of parameters of each kind by layer; a kind has one shape, split and use by experts.

    With `int8` they are only those that generation may hold in it. Layers count from 1; index 0 is the
    embedding, the last index is for the parameters after the last layer.
    """
    counts: Counter[tuple[tuple[int, ...], int | None, int, bool, int]] = Counter()
    for p in _table(config, lora).params:
        if int8 and not p.takes_int8:
            continue
        layer = config.num_layers if p.layer is None else p.layer
        layer = 0 if p.short_name == "positions.weight" else layer  # They are on the first stage only.
        counts[p.shape, p.split_dim, p.num_units, p.expert is not None, layer + 1] += 1
    kinds: dict[tuple[ParamSpec, bool], np.ndarray] = {}
    for (shape, split_dim, num_units, is_expert, layer), count in counts.items():
        key = (ParamSpec("", shape, None, split_dim, num_units), is_expert)
        kinds.setdefault(key, np.zeros(config.num_layers + 2, np.int64))[layer] = count
    return kinds


@lru_cache(maxsize=1 << 10)
def _by_layer(config: ModelConfig, tp: int, ep: int, lora: LoraConfig | None) -> np.ndarray:
    """Return the parameters of the ep rank with most experts, shape (shared or experts, tp index, layer)."""
    total = np.zeros((2, tp, config.num_layers + 2), np.int64)
    num_experts = config.moe.num_experts if config.moe else 1
    for (param, is_expert), counts in parameter_kinds(config, lora).items():
        numel = np.array([region_size(param.region(tp, index)) for index in range(tp)])
        here = counts * -(-num_experts // ep) // num_experts if is_expert else counts
        total[int(is_expert)] += numel[:, None] * here
    return total


@lru_cache(maxsize=64)
def _last_layer(config: ModelConfig) -> list[ParamSpec]:
    """Return the parameters of the last layer, with those of the first expert only."""
    last = config.num_layers - 1
    return [param for param in _table(config).params if param.layer == last and not param.expert]


@lru_cache(maxsize=1 << 12)
def widths(config: ModelConfig, tp: int, ep: int = 1) -> Widths:
    """Return the widths of the last layer on the fullest of `tp` ranks.

    Those of a module are not known; all of its outputs count as `mlp`.
    """
    c = config
    if isinstance(config, ModuleConfig):
        outputs = sum(param.shape[0] for param in _table(config).params if len(param.shape) > 1)
        return Widths(
            hidden=1, num_heads=1, qkv=0, latents=0, rotated=0, attention=0, cached=0, mlp=outputs, experts=0,
            norms=0, routed=0, vocabulary=1, head_dim=1)
    table = _last_layer(config)
    rows: dict[str, int] = {}
    for param in table:
        if param.split_dim == 0:
            spans = (param.region(tp, index)[0] for index in range(tp))
            rows[param.short_name.removesuffix(".weight")] = max(stop - start for start, stop in spans)
    num_heads = c.num_heads // tp
    if c.mla is None:
        q, k = rows["q"], rows["k"]
        qkv = q + 2 * k
        latents = 0
        rotated = q + k
        attention = q
        rotated = 0 if c.positions == "learned" else rotated
    else:
        mla = c.mla
        q = rows["q" if mla.q_lora_rank is None else "q_b"]
        qkv = q + rows["kv_b"]
        rotated = 2 * q
        latents = 2 * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim)
        attention = num_heads * mla.v_head_dim
    mlp = rows.get("up", 0)
    experts = 0
    routed = 0
    if c.moe:
        shared = rows.get("shared_up", 0)
        experts = c.moe.num_experts_per_token * rows["expert_up"]
        mlp = shared + experts
        routed = 2 * c.moe.num_experts_per_token * c.hidden_size + 2 * c.moe.num_experts
    norms = sum(p.short_name in _NORMS for p in table)
    embedding = _table(config).params[0]
    vocabulary = max(stop - start for start, stop in (embedding.region(tp, i)[0] for i in range(tp)))
    return Widths(
        hidden=c.hidden_size, num_heads=num_heads, qkv=qkv, latents=latents, rotated=rotated,
        attention=attention, cached=cached_heads(c, tp).width, mlp=mlp, experts=experts, norms=norms,
        routed=routed, vocabulary=vocabulary, head_dim=c.head_dim)


CONTEXT_BYTES = 1 << 30
"""For CUDA's context and kernels; a Python process on CPU needs as much."""
WORKSPACE_BYTES = 4 * (32 << 20)
"""For the workspaces of cuBLAS and cuBLASLt, 32 MiB each on an H100 (docs.nvidia.com/cuda/cublas,
cublasSetWorkspace), on the stream that computes and on the one that records graphs."""
FRAGMENTATION = 0.05
"""The fraction of a device's memory that stays free, as the allocator cannot use all that is free."""
HOST_SHARE = 0.8
"""The fraction of a host's memory that offloaded weights and optimizers together may take."""


def available_bytes(cluster: Cluster) -> float:
    """Return the bytes of a device's memory that plans may use: all but the fixed parts of the reserve."""
    return max(0.0, cluster.device_memory_bytes - sum(fixed_reserve(cluster).values()))


def fixed_reserve(cluster: Cluster) -> dict[str, float]:
    """Return the parts of the reserve that are the same for all plans, in bytes.

    Communicators are the part that depends on the plan (`communicator_memory.py`).
    """
    fragmentation = FRAGMENTATION * cluster.device_memory_bytes
    workspaces = WORKSPACE_BYTES if cluster.device_type == "cuda" else 0
    return {
        "context": CONTEXT_BYTES, "workspaces": workspaces, "staging": STAGING_BYTES,
        "fragmentation": fragmentation}


def weights_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of one copy of the weights on the fullest rank of a stage, adapters included."""
    return base_weights_bytes(role, strategy, stage) + adapter_bytes(role, strategy, stage)


def base_weights_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of one copy of the weights without adapters."""
    num_bytes = num_params(role.spec, strategy, stage) * role.itemsize
    if not role.int8:
        return num_bytes
    numel, rows = int8_params(role.config, strategy, stage)
    return num_bytes - numel * (role.itemsize - 1) + rows * role.itemsize


def adapter_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    return 0 if role.lora is None else trained_params(role, strategy, stage) * role.itemsize


def trained_params(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the number of parameters on the fullest rank of a stage that training changes."""
    return sum(held_params(role.config, strategy, stage, role.lora))


def training_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of gradients and optimizer, which training needs besides the weights."""
    return gradient_bytes(role, strategy, stage) + optimizer_bytes(role, strategy, stage)


def gradient_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of the buffer of gradients (float32), which exists during train steps only."""
    return trained_params(role, strategy, stage) * role.wide_itemsize


def optimizer_bytes(role: ModelRole, strategy: ParallelStrategy, stage: int) -> int:
    """Return the bytes of the optimizer.

    All of it is in float32 with ZeRO stage 1 (Rajbhandari et al. 2020): a replica has its share of the
    moments and, where the weights have a narrower dtype, of a master copy. The last replica has the most,
    because the others have equal, aligned chunks of each section. The optimizer of experts is shared by 1/ep
    as many replicas.
    """
    section_numel = role.trained_spec.section_numel
    sharded = fullest_chunks(role.config, strategy, stage, role.lora, section_numel)
    return num_states(role) * sharded * role.wide_itemsize


def num_states(role: ModelRole) -> int:
    """Return how many values the optimizer holds of a parameter."""
    return len(states_of_weights(is_narrow=role.itemsize < role.wide_itemsize))
