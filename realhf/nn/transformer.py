"""Transformer: one rank's shard of a decoder-only language model of any family.

It is built from the parameter table (param_spec.py), which says how every parameter is split. A rank holds
the layers of its pipeline stage and its part of each under tensor and expert parallelism. Layers communicate
within the rank's groups; hidden states go from stage to stage outside this module.

Shape suffixes: T tokens of all sequences end to end, H hidden, D head dim; on this rank: N query heads, K
key-value heads, V part of the vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from realhf.attention.interface import AttentionKind, Prefix, Sequences, token_positions
from realhf.devices import chunk_sizes
from realhf.distributed.group import sum_over_group
from realhf.distributed.pieces import Shards
from realhf.distributed.world import ParallelGroups
from realhf.models.kv_blocks import cached_heads
from realhf.models.model_config import ModelConfig
from realhf.models.param_spec import ModelSpec
from realhf.nn.attention import (
    Attend,
    Attention,
    LatentAttention,
    Segment,
    attend_over_group,
    packed_attention,
    token_range,
)
from realhf.nn.fused import CachePlace, chains_of
from realhf.nn.linear import PackedWeight, Weight, can_pack, embedding, linear
from realhf.nn.lora import Adapted, Adapter, Adapters
from realhf.nn.mlp import Mlp, activation
from realhf.nn.moe import Moe, RouterLosses, gathering
from realhf.nn.norm import Norm
from realhf.nn.parameters import Int8Parameters, ShardedParameters, Weights
from realhf.nn.rope import Angles, Rotary
from realhf.nn.vocab_parallel import Head, head_logprobs, head_top_logprobs


class Block:
    """A decoder layer: attention and an MLP or experts, each between the norms that the family has."""

    def __init__(
        self, config: ModelConfig, weights: Weights, layer: int, groups: ParallelGroups, adapters: Adapted
    ) -> None:
        self.config = config
        self.attn_norm = Norm(config, weights, "attn_norm")
        self.attn_out_norm = Norm(config, weights, "attn_out_norm")
        attention = Attention if config.mla is None else LatentAttention
        self.attention = attention(config, weights, layer, groups.tp, adapters)
        self.mlp_norm = Norm(config, weights, "mlp_norm")
        self.mlp_out_norm = Norm(config, weights, "mlp_out_norm")
        self.mlp: Moe | Mlp
        if config.has_experts(layer):
            has_shared = "shared_down.weight" in weights
            shared = Mlp(config, weights, groups.tp, adapters, prefix="shared_") if has_shared else None
            self.mlp = Moe(config, weights, layer, groups, activation=activation(config), shared=shared)
        else:
            self.mlp = Mlp(config, weights, groups.tp, adapters)

    def __call__(
        self, x_TH: Tensor, angles: Angles | None, attends: Sequence[Attend],
        losses: RouterLosses | None = None,
    ) -> Tensor:
        residual = Residual(x_TH, scale=self.config.residual_scale)
        self.extend(residual, angles, attends, losses=losses)
        return residual.total()

    def extend(
        self, residual: "Residual", angles: Angles | None, attends: Sequence[Attend],
        *, losses: RouterLosses | None = None, place: CachePlace | None = None,
    ) -> None:
        """Add the outputs of the layer to the residual stream, and its keys and values to a cache."""
        # Intermediate results have no names, so that they are freed at once: memory peaks here.
        residual.add(
            self.attention(residual.normed(self.attn_norm), angles, attends, place), self.attn_out_norm)
        residual.add(self.mlp(residual.normed(self.mlp_norm), losses), self.mlp_out_norm)


class Residual:
    """The residual stream of some tokens, to which layers add their outputs.

    A single kernel adds an output and computes the next norm, where there is one (nn/fused.py).
    """

    def __init__(self, x_TH: Tensor, *, scale: float) -> None:
        """Outputs are multiplied by `scale` before they are added."""
        self._x_TH = x_TH
        self._scale = scale
        self._chains = None if torch.is_grad_enabled() else chains_of(x_TH)
        self._output: tuple[Tensor, Norm] | None = None
        """The last output, which has not been added yet, and its own norm."""

    def add(self, y_TH: Tensor, norm: Norm) -> None:
        """Add an output, after its own norm."""
        if self._chains is not None:
            self._output = y_TH, norm
            return
        y_TH = norm(y_TH)
        self._x_TH = self._x_TH + (y_TH if self._scale == 1 else y_TH * self._scale)

    def normed(self, norm: Norm) -> Tensor:
        """Return the norm of the sum of all outputs so far."""
        return norm(self._x_TH) if self._chains is None else self._normed(norm)

    def _normed(self, norm: Norm | None) -> Tensor:
        assert self._chains is not None
        y_TH, out_norm = self._output or (None, None)
        self._output = None
        self._x_TH, normed_TH = self._chains.add_norm(
            self._x_TH, y_TH, scale=self._scale, out_norm=out_norm, norm=norm)
        return normed_TH

    def total(self) -> Tensor:
        """Return the sum of all outputs so far."""
        return self._x_TH if self._output is None else self._normed(None)


class Transformer(ShardedParameters):
    """A rank's shard of a model: its parameters (the base class) and the computations with them.

    Call the model for a forward pass over whole sequences, and `advance` for tokens that extend a KV cache.
    Either takes token ids on the first stage and hidden states on the others, and returns hidden states. The
    last stage turns those into `logits` or `scores`, or into log-probabilities with the `head`. `adapters`
    are separate LoRA parameters, whose outputs are added to those of the linear layers. With `float32_head`,
    the products of a 16-bit `head` are computed in float32. With `int8`, which is for generation only, the
    weights of linear layers are in int8.
    """

    def __init__(
        self, spec: ModelSpec, groups: ParallelGroups, *, dtype: torch.dtype, memory: Tensor | None = None,
        adapters: Adapters | None = None, float32_head: bool = False, int8: bool = False,
    ) -> None:
        super().__init__(spec.part(int8=False) if int8 else spec, groups, dtype=dtype, memory=memory)
        self._int8 = Int8Parameters(spec, groups, dtype=dtype) if int8 else None
        self.float32_head = float32_head
        self.adapters = adapters
        self._layers = spec.stage_layers(groups.layout.strategy, groups.at.pp)
        self._adapted: list[Adapter] = []
        self.blocks = [self._block(layer) for layer in self._layers]
        self.cache_heads = cached_heads(self.config, groups.layout.tp)
        self._final_norm = Norm(self.config, self.of_layer(None), "final_norm")
        # The scale is rounded to the model's dtype, as in transformers.
        self._embedding_scale = float(torch.tensor(self.config.embedding_scale, dtype=dtype))
        self._rope = None
        if self.config.positions == "rope":
            self._rope = Rotary(self.config, dtype=dtype, device=self.flat.device)
        param = next(p for p in spec.params if p.short_name == "embedding.weight")
        self.vocab_range = param.region(groups.layout.tp, groups.at.tp)[0]
        """Global token ids of this rank's logits: [start, stop)."""

    def of_layer(self, layer: int | None) -> Weights:
        weights = super().of_layer(layer)
        return weights if self._int8 is None else {**weights, **self._int8.of_layer(layer)}

    def fused(self, layer: int | None, weight_name: str) -> Mapping[str, int]:
        if self._int8 is not None and weight_name in self._int8.of_layer(layer):
            return self._int8.fused(layer, weight_name)
        return super().fused(layer, weight_name)

    def pieces(self) -> Shards:
        return self._all_pieces

    @cached_property
    def _all_pieces(self) -> Shards:
        pieces = super().pieces()
        return pieces if self._int8 is None else {**pieces, **self._int8.pieces()}

    @property
    def memory(self) -> list[Tensor]:
        return [self.flat] if self._int8 is None else [self.flat, *self._int8.memory]

    def _block(self, layer: int) -> Block:
        adapters = self.adapters.of_weights(self, layer) if self.adapters is not None else {}
        self._adapted += adapters.values()
        return Block(self.config, self.of_layer(layer), layer, self.groups, adapters)

    def gathering(self, num_tokens: int) -> AbstractContextManager[None]:
        """Return a context in which experts on several ranks gather tokens; see moe.gathering."""
        return gathering((block.mlp for block in self.blocks), num_tokens)

    @contextmanager
    def merged(self) -> Iterator[None]:
        """Compute, inside this context, with merged copies of the weights that have adapters.

        The memory of the copies stays, at the same addresses, until `release_merged`.
        """
        for adapter in self._adapted:
            adapter.merge()
        try:
            yield
        finally:
            for adapter in self._adapted:
                adapter.merged_weight = None

    @contextmanager
    def packed(self) -> Iterator[None]:
        """Compute, inside this context, with packed copies of the weights on a CPU where that is faster.

        Weights must not change meanwhile, and gradients are not supported.
        """
        weights = self._packable()
        packs = self.packed_itemsize > 0
        for weight in weights:
            weight.set_packs(packs)
        try:
            yield
        finally:
            for weight in weights:
                weight.set_packs(False)

    def _packable(self) -> list[Weight]:
        """Return the weights that are large enough to be packed."""
        return [
            weight for layer in self._by_layer.values() for weight in layer.values()
            if weight.dim() == 2 and weight.numel() >= chunk_sizes.LEAST_PACKED_NUMEL]

    @property
    def packed_itemsize(self) -> int:
        """Bytes of an element of a packed weight; 0 if nothing is packed on this rank's device."""
        packs = self.flat.device.type == "cpu" and bool(self._packable()) and can_pack(self.flat.dtype)
        return PackedWeight.itemsize(self.flat.dtype) if packs else 0

    @property
    def packed_bytes(self) -> int:
        """Bytes that packed copies of weights take."""
        return sum(weight.packed_bytes for weight in self.weights())

    @property
    def merged_bytes(self) -> int:
        """Bytes that merged copies of weights take, in use or not."""
        return sum(adapter.merged_bytes for adapter in self._adapted)

    def release_merged(self) -> None:
        for adapter in self._adapted:
            adapter.release()

    @torch.no_grad()
    def merged_model(self) -> "Transformer":
        """Return a copy of the model in host memory, with the adapters merged into its weights.

        All ranks of the layout must call this.
        """
        host = self.flat.to("cpu", copy=True)
        copy = Transformer(self.spec, self.groups, dtype=self.flat.dtype, memory=host)
        for adapter in self._adapted:
            start = adapter.weight.storage_offset()
            copy.flat[start:][: adapter.weight.numel()].view_as(adapter.weight).copy_(adapter.merged())
        if self._score_weight is not None:
            copy.of_layer(None)["score.weight"].copy_(self._score_weight)
        return copy

    def __call__(
        self, x: Tensor, seq_lens: list[int], *, prefixes: Sequence[Prefix] = (), recompute: bool = False,
        router_losses: RouterLosses | None = None, layer_done: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Run packed sequences through this stage, and return hidden_TH.

        `x` is ids_T of all tokens on the first stage, else hidden_TH of the stage before. With context
        parallelism, hidden_TH has the tokens of this rank's `token_range`.

        With `recompute`, each block keeps only its input and is computed again in the backward pass (Chen et
        al. 2016). Routers add their losses to `router_losses`. The backward pass calls `layer_done(layer)`
        when the gradients of that layer are complete. Raises UserError if a sequence has more tokens than the
        model has positions.

        With `prefixes`, for which `shares_prefixes` must be true, the sequences are the ends of longer ones,
        and begin at the positions behind their prefixes.
        """
        self.check_lengths(seq_lens)
        row_T, position_T, length_T = token_positions(seq_lens, x.device)
        for prefix in prefixes:
            position_T[prefix.queries] += prefix.num_keys
        cp = self.groups.cp
        mine = slice(*token_range(len(row_T), cp))
        if router_losses is not None:
            router_losses.start(row_T[mine], length_T[mine], num_sequences=len(seq_lens), group=cp)
        attend = Attend(partial(self._attend, Sequences.of(seq_lens, x.device, prefixes)))
        if cp.size > 1 and self.groups.is_first_stage:
            x = x[mine]
        return self._stage(
            x, position_T[mine], length_T[mine], lambda layer: [attend],
            recompute=recompute, router_losses=router_losses,
            layer_done=layer_done if torch.is_grad_enabled() else None,
        )

    def shares_prefixes(self, longest: int) -> bool:
        """Return whether a pass over sequences of up to so many tokens can share what these begin with.

        Only a CPU has kernels for it, and some rotations depend on the length of a sequence.
        """
        alone = self.groups.cp.size == 1 and self.flat.device.type == "cpu"
        return alone and self.copies_prefixes and self.config.can_share_prefixes(longest)

    @property
    def copies_prefixes(self) -> bool:
        """Whether tokens have the same keys and values in all sequences that begin with them."""
        return self._rope is None or not self._rope.by_length

    def advance(self, x: Tensor, cache: Any, segments: Sequence[Segment]) -> Tensor:
        """Run tokens through this stage, write their keys and values into `cache`, and return hidden_TH.

        `x` is ids_T on the first stage, else hidden_TH, segment by segment. Gradients and context parallelism
        are not supported. Raises UserError if a sequence is too long, as a forward pass does.
        """
        self.check_lengths([segment.longest for segment in segments])
        position_T, length_T = segments[0].position_T, segments[0].length_T
        if len(segments) > 1:
            position_T = torch.cat([segment.position_T for segment in segments])
            length_T = torch.cat([segment.length_T for segment in segments])
        stops = list(accumulate((len(segment.position_T) for segment in segments), initial=0))
        tokens = [slice(start, stop) for start, stop in pairwise(stops)]

        def attends(layer: int) -> list[Attend]:
            return [
                Attend(partial(segment.attend, cache, layer), segment.from_cache, span, segment.expands)
                for segment, span in zip(segments, tokens, strict=True)]

        places = [segment.cache_positions_T for segment in segments]
        positions_T = places[0] if len(places) == 1 else torch.cat(places)
        written_T = None
        if any(segment.written_T is not None for segment in segments):
            written_T = torch.cat([
                torch.arange(span.start, span.stop) if segment.written_T is None
                else segment.written_T + span.start for segment, span in zip(segments, tokens, strict=True)])

        def place(layer: int) -> CachePlace:
            return cache.place(layer, positions_T)._replace(written_T=written_T)

        with torch.no_grad():
            return self._stage(x, position_T, length_T, attends, place=place)

    def _attend(
        self, sequences: Sequences, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kind: AttentionKind
    ) -> Tensor:
        """Return the attention of this rank's tokens, which it exchanges with the other ranks over cp."""
        attention = partial(packed_attention, sequences=sequences, kind=kind)
        if self.groups.cp.size == 1:
            return attention(q_TND, k_TKD, v_TKD)
        return attend_over_group(
            attention, q_TND, k_TKD, v_TKD, group=self.groups.cp, num_tokens=sum(sequences.lens))

    def _stage(
        self, x: Tensor, position_T: Tensor, length_T: Tensor, attends: Callable[[int], Sequence[Attend]],
        *, recompute: bool = False, router_losses: RouterLosses | None = None,
        layer_done: Callable[[int], None] | None = None,
        place: Callable[[int], CachePlace | None] = lambda layer: None,
    ) -> Tensor:
        """Run the embedding (first stage), the blocks, and the final norm (last stage)."""
        x_TH = self._embed(x, position_T) if self.groups.is_first_stage else x
        angles = None if self._rope is None else self._rope(position_T, length_T)
        if not torch.is_grad_enabled():
            residual = Residual(x_TH, scale=self.config.residual_scale)
            del x_TH
            for index, (layer, block) in enumerate(zip(self._layers, self.blocks, strict=True)):
                of_layer = None if angles is None else angles(layer)
                block.extend(residual, of_layer, attends(index), losses=router_losses, place=place(index))
            return residual.normed(self._final_norm) if self.groups.is_last_stage else residual.total()
        for index, (layer, block) in enumerate(zip(self._layers, self.blocks, strict=True)):
            if layer_done is not None and x_TH.requires_grad:
                # Hooks of leaves run in any order; that of a view runs after the gradients of the layer.
                x_TH = x_TH.view_as(x_TH) if x_TH.is_leaf else x_TH
                x_TH.register_hook(lambda _, layer=layer: layer_done(layer))
            # All ranks of a tp group recompute a block at the same point of the backward pass, and stop after
            # the same saved tensor, so that their collectives match.
            checkpointed = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
            run = checkpointed if recompute else block
            x_TH = run(x_TH, None if angles is None else angles(layer), attends(index), router_losses)
        return self._final_norm(x_TH) if self.groups.is_last_stage else x_TH

    def _embed(self, ids_T: Tensor, position_T: Tensor) -> Tensor:
        """Return the embeddings of the tokens, and of their positions if the model learns these."""
        weights = self.of_layer(-1)
        start, stop = self.vocab_range
        if self.groups.tp.size == 1:
            x_TH = embedding(ids_T, weights["embedding.weight"])
        else:
            here_T = (ids_T >= start) & (ids_T < stop)
            x_TH = embedding(torch.where(here_T, ids_T - start, 0), weights["embedding.weight"])
            x_TH = sum_over_group(x_TH * here_T[:, None], self.groups.tp)
        if self._embedding_scale != 1:
            x_TH = x_TH * self._embedding_scale
        if "positions.weight" in weights:
            x_TH = x_TH + embedding(position_T, weights["positions.weight"])
        return x_TH

    @property
    def recordable(self) -> bool:
        """Whether a CUDA graph can record `advance`, because it never waits (see `gathering`)."""
        by_length = self._rope is not None and self._rope.by_length
        layers = [block.mlp for block in self.blocks if isinstance(block.mlp, Moe)]
        return not by_length and all(layer.has_kernels for layer in layers)

    @property
    def addresses(self) -> tuple[int, ...]:
        """The addresses of the weights that `advance` reads; while they stay, recorded passes are valid."""
        flats = self.memory if self.adapters is None else [*self.memory, self.adapters.flat]
        merged = [adapter.merged_weight for adapter in self._adapted if adapter.merged_weight is not None]
        return tuple(x.data_ptr() for x in (*flats, *merged))

    @property
    def rope_boundary(self) -> int | None:
        """The length beyond which longrope rotates all tokens of a sequence differently, so that cached ones
        must be computed anew; None without longrope."""
        return None if self._rope is None else self._rope.boundary

    @cached_property
    def head(self) -> Head:
        """The output head over `vocab_range`, on the last stage."""
        c = self.config
        weight = self.of_layer(-1)["embedding.weight"] if c.tied else self.of_layer(None)["lm_head.weight"]
        return Head(
            weight, self.vocab_range[0], self.groups.tp, scale=c.logit_scale, softcap=c.logit_softcap,
            float32=self.float32_head)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Return logits_TV over `vocab_range`, in dtype `wide`, on the last stage."""
        return self.head.logits(hidden_TH)

    def logprobs(
        self, hidden_TH: Tensor, labels: Tensor, *, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the labels' log-probs, and the entropies if `entropy`; see `head_logprobs`."""
        return head_logprobs(hidden_TH, labels, self.head, temperature=temperature, entropy=entropy)

    def top_logprobs(self, hidden_TH: Tensor, k: int, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the ids and the log-probs of the `k` most probable tokens; see `head_top_logprobs`."""
        return head_top_logprobs(hidden_TH, self.head, k, temperature=temperature)

    def scores(self, hidden_TH: Tensor) -> Tensor:
        """Return scores_T, in dtype `wide`, on the last stage of a model with a score head."""
        assert self._score_weight is not None
        return linear(hidden_TH, self._score_weight)[:, 0].to(self.wide)

    @property
    def _score_weight(self) -> Tensor | None:
        """The weight of the score head, on the last stage: that of the adapters if they train one."""
        trained = self.adapters.of_layer(None) if self.adapters is not None else {}
        return trained.get("score.weight", self.of_layer(None).get("score.weight"))

    @property
    def cache_token_bytes(self) -> int:
        """Bytes per token in the KV cache of the stage with the most layers; the same on all stages."""
        num_layers = -(-self.config.num_layers // self.groups.layout.pp)
        return num_layers * self.cache_heads.width * self.flat.itemsize
