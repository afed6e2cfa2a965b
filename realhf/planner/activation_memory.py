"""Bytes of the tensors that make up a call: inputs, hidden states, norms, layers' activations, and logits.

Letters: e bytes of an element in the model's dtype, w bytes of one that needs precision (float32; float64 in
a float64 model). Tokens are those of a micro-batch; over cp, a rank's part of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from realhf.devices import chunk_sizes
from realhf.layout import ParallelStrategy
from realhf.planner.micro_batches import LargestMicroBatch, largest_micro_batch
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.shard import Widths, exchanged, float32_bytes, widths

_SAMPLE_BYTES = 64  # Bytes per token in a call's inputs: ids, mask and columns of the loss, twice.
INDEX_BYTES = 40  # Bytes per token of a micro-batch for its row, position and other integers.


_LABELS = {"loaded_weights": "loaded weights"}
"""Uses that reports call otherwise than the fields of CallMemory."""


def top_bytes(workload: Workload, *, itemsize: int = 4) -> int:
    """Return the bytes per token of the columns of most probable tokens: ids (int64) and log-probs."""
    return (8 + itemsize) * workload.top_k


class CallMemory(NamedTuple):
    """The bytes that a rank holds for a call at one moment, by use; numbers, or arrays over ranks."""

    samples: float = 0.0
    kv_cache: Any = 0.0
    merged: float = 0.0  # Copies of weights with the adapters merged in.
    activations: float = 0.0
    messages: float = 0.0
    logits: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    loaded_weights: Any = 0.0  # Those that wait in host memory while other calls run.

    @property
    def num_bytes(self) -> Any:
        return sum(self)

    def by_use(self) -> dict[str, Any]:
        """Return the bytes of every use that takes some, as reports name them."""
        sizes = zip(self._fields, self, strict=True)
        return {_LABELS.get(use, use): size for use, size in sizes if np.any(size)}


class Stage(NamedTuple):
    """A pipeline stage, and the number of its decoder blocks."""

    number: int
    num_layers: int
    is_first: bool
    is_last: bool


@dataclass(frozen=True)
class CallPieces:
    """The sizes of one call, and the bytes of the pieces of its passes, which are the same on all stages.

    `fused` means CUDA's kernels and NCCL: an RMSNorm keeps its input only, attention keeps its output once,
    and collectives work in place. Otherwise the formulas are for CPU with gloo.
    """

    role: ModelRole
    workload: Workload
    strategy: ParallelStrategy
    micro_batch_tokens: int
    recompute: bool
    fused: bool

    # Sizes

    @cached_property
    def widths(self) -> Widths:
        """Widths on the fullest rank."""
        return widths(self.role.config, self.strategy.tp, self.strategy.ep)

    def stage(self, index: int) -> Stage:
        num_layers = len(self.role.spec.stage_layers(self.strategy, index))
        return Stage(index, num_layers, index == 0, index == self.strategy.pp - 1)

    @property
    def computes_logits(self) -> bool:
        """Whether the last stage computes logits."""
        return self.role.config.head == "lm" and self.workload.output == "logprobs"

    @cached_property
    def micro_batch(self) -> LargestMicroBatch:
        """The largest micro-batch, from which memory follows."""
        return largest_micro_batch(self.workload, self.strategy, self.micro_batch_tokens)

    def inputs(self, *, top_copies: int = 2) -> CallMemory:
        """Return the call's samples on this rank, and the indices of a micro-batch.

        There are `top_copies` of the most probable tokens: a train step selects those of its micro-batches.
        """
        rows = -(-self.workload.num_samples // self.strategy.dp)
        indices = INDEX_BYTES * self.strategy.cp * self.micro_batch.tokens
        top = top_copies * top_bytes(self.workload, itemsize=self.role.wide_itemsize)
        return CallMemory(samples=(_SAMPLE_BYTES + top) * rows * self.workload.tokens + indices)

    # Pieces, in bytes

    def hidden_bytes(self, tokens: float) -> float:
        return self.role.itemsize * self.widths.hidden * tokens

    def norm_saved(self, hidden: float) -> float:
        """Return the bytes per token that a norm of `hidden` elements saves besides its output."""
        num_statistics = 2 if self.role.config.norm == "layer" else 1
        return self.role.itemsize * hidden + self.role.wide_itemsize * num_statistics

    def norm_temporaries(self, numel: float, *, backward: bool) -> float:
        """Return the bytes of a norm's output, and of copies of the part that it works on."""
        e = self.role.itemsize
        w = self.role.wide_itemsize
        if self.fused or self.role.config.norm == "layer":
            return e * numel
        copies = 2 * (e < w) + (2 if backward else 0)
        return e * numel + w * copies * self.working_numel(numel)

    def working_numel(self, numel: float) -> float:
        """Return how many of `numel` elements norms and activations work on at a time."""
        return numel if self.fused else min(numel, chunk_sizes.PART_NUMEL)

    @property
    def num_mlp_saved(self) -> int:
        """Saved tensors of an MLP: gate and up, or up; with experts or adapters also their product."""
        config = self.role.config
        return (2 if config.gated else 1) + (config.moe is not None or self.role.lora is not None)

    def weight_gradient(self, inputs: float, outputs: float, tokens: float) -> float:
        """Return the bytes that it takes to add a weight's gradient to the buffer; 0 where dtypes agree.

        A GPU computes a part of the gradient in float32, and a CPU parts of its operands (`add_product` in
        devices/half_precision.py).
        """
        if self.role.itemsize == self.role.wide_itemsize:
            return 0.0
        if self.fused:
            return self.role.wide_itemsize * min(inputs * outputs, chunk_sizes.block_numel(is_cuda=True))
        share = chunk_sizes.WIDENED_TOKENS_NUMEL // chunk_sizes.WIDENED_WEIGHT_NUMEL
        tokens = min(tokens, max(1, chunk_sizes.WIDENED_TOKENS_NUMEL // max(1, inputs)))
        rows = chunk_sizes.WIDENED_WEIGHT_NUMEL // max(1, inputs, tokens // share)
        return self.role.wide_itemsize * tokens * (inputs + min(outputs, max(1, rows)))

    def sum_temporaries(self, num_bytes: float) -> float:
        """Return the temporary bytes of a sum over tp."""
        tp = self.strategy.tp
        return 0.0 if tp == 1 else num_bytes * self.sum_copies(tp)

    def sum_copies(self, size: int) -> float:
        """Return the copies for a sum over ranks: a clone, and over gloo what `Group.all_reduce` receives."""
        return 1.0 + (0.0 if self.fused else 2.0 if size == 2 else (size - 1) / size)

    def block_saved_bytes(self, tokens: float) -> float:
        """Return the bytes that autograd saves for one decoder layer (nn/transformer.py).

        In order they are: input of the norm | its output, for qkv | qkv, with queries and keys rotated |
        output and logsumexp of attention | input of the norm | its output, for gate and up | gate and up.
        Inputs of norms are the sums of the residual stream. In families with norms after attention and MLP,
        these norms save their inputs; norms of queries and keys also save qkv before them.
        """
        per_token = self.widths
        e = self.role.itemsize
        norms = per_token.norms * self.norm_saved(per_token.hidden) + 2 * e * per_token.hidden
        if self.role.config.qk_norm:
            norms += e * per_token.qkv + self.role.wide_itemsize * per_token.num_heads
        outputs, inputs = 1, self._attention_inputs
        if self.strategy.cp > 1:  # Inputs come from other ranks; the output is also kept as it comes back.
            outputs, inputs = 2, self._exchanged
        attention = e * (per_token.latents + inputs + outputs * per_token.attention) + 4 * per_token.num_heads
        mlp = e * (self.num_mlp_saved * per_token.mlp + per_token.routed + self._adapter_ranks)
        return tokens * (norms + attention + mlp)

    @property
    def _attention_inputs(self) -> int:
        """Elements per token of the queries, keys and values that attention reads."""
        return self.widths.qkv + (self.widths.rotated if self.role.config.mla is not None else 0)

    @cached_property
    def _adapter_ranks(self) -> int:
        """Elements per token between A and B, over all adapters of a layer."""
        if self.role.lora is None:
            return 0
        last = self.role.config.num_layers - 1
        table = self.role.trained_spec.params
        return sum(p.shape[0] for p in table if p.layer == last and p.short_name.endswith("lora_A"))

    @cached_property
    def _exchanged(self) -> int:
        """Elements per token of the all-to-all over cp before attention."""
        s = self.strategy
        return exchanged(self.role.config, s.tp, s.cp) if s.cp > 1 else 0

    def logits_at_once(self, numel: float) -> float:
        """Return how many of `numel` logits exist at a time."""
        return min(numel, max(self.widths.vocabulary, chunk_sizes.chunk_numel(is_cuda=self.fused)))

    @property
    def logit_itemsize(self) -> int:
        """Bytes of a product of the head."""
        return self.role.wide_itemsize if self.role.widens_head else self.role.itemsize

    def widened_head_bytes(self, tokens: float, *, backward: bool) -> float:
        """Return the bytes of what devices/half_precision.py has in float32 at a time for the head.

        These are parts of the hidden states and of the head's weight. On a GPU they exist only in the
        backward pass, beside parts of the gradient.
        """
        if not self.role.widens_head or (self.fused and not backward):
            return 0.0
        parts = chunk_sizes.CUDA_PARTS if self.fused else 1
        states = min(tokens * self.widths.hidden, chunk_sizes.WIDENED_TOKENS_NUMEL * parts)
        weight = min(self.widths.vocabulary * self.widths.hidden, chunk_sizes.WIDENED_WEIGHT_NUMEL * parts)
        gradient = 3 * chunk_sizes.WIDENED_TOKENS_NUMEL * parts if self.fused else 0
        return self.role.wide_itemsize * (states + weight + gradient)

    def logits_bytes(self, numel: float, *, copies: float) -> float:
        """Return the bytes of a chunk of logits, and of `copies` copies in w of one slice of it.

        Logits of another dtype are also copied to w, and the previous slice is freed only after the next is
        there.
        """
        limit = chunk_sizes.slice_numel(is_cuda=self.fused)
        chunk = self.logits_at_once(numel)
        e = self.logit_itemsize
        w = self.role.wide_itemsize
        copies += (1 + (chunk > limit)) * (e < w)
        return e * chunk + w * copies * min(chunk, limit)

    def expanded_bytes(self, tokens: float, earlier: float) -> float:
        """Return the bytes of the keys and values that tokens attend to, of `earlier` ones whose latents are
        cached, as far as they exist at a time (ExpandedPieces in inference/forward_batch.py).

        They are the latents, their keys and values in one tensor, the keys with rotated dims, and the values
        with as many dims as keys. The output is added up in w, with its part, twice, and that of the kernel.
        """
        mla = self.role.config.mla
        if mla is None or not self.fused or not earlier:
            return 0.0
        heads = self.widths.num_heads
        key_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        per_token = self.widths.cached + heads * (mla.qk_nope_head_dim + mla.v_head_dim + 2 * key_dim)
        part = self.role.itemsize * per_token * min(earlier, chunk_sizes.EXPANDED_TOKENS)
        output = heads * (3 * self.role.wide_itemsize * mla.v_head_dim + self.role.itemsize * key_dim)
        return part + output * tokens

    def forward_temporaries(self, tokens: float, *, earlier: float = 0) -> float:
        """Return the peak bytes of one layer without autograd: in a norm, in attention or in the MLP.

        With latent attention, the tokens may continue sequences of `earlier` ones in all.
        """
        per_token = self.widths
        e = self.role.itemsize
        hidden = self.hidden_bytes(tokens)
        norm = hidden + self.norm_temporaries(per_token.hidden * tokens, backward=False)
        outputs = 1 if self.fused else 2
        projected = e * tokens * (per_token.latents + self._attention_inputs)
        rotating = e * tokens * per_token.rotated / 2  # A copy of one half while it is rotated in place.
        attending = e * tokens * outputs * per_token.attention
        if self.strategy.cp > 1:  # Data sent and received; then the output of attention, also sent.
            received = max(self._exchanged, (outputs + 1) * per_token.attention)
            attending = e * tokens * (self._exchanged + received)
        attending += self.expanded_bytes(tokens, earlier)
        output = hidden + self.sum_temporaries(hidden)
        attention = 2 * hidden + projected + max(rotating, attending + hidden, output)
        routed = e * tokens * per_token.routed * (2 if self.strategy.ep > 1 else 1)  # Sent and received.
        width = e * tokens * per_token.mlp
        up = 2 if self.role.config.gated else 1
        activated = e * self.working_numel(tokens * per_token.mlp)  # A part before all are joined.
        activating = width + max(hidden, activated * (activated < width))
        mlp = 3 * hidden + routed + up * width + max(activating, output)
        widened = self.widened_bytes(per_token.in_layer(num_ups=up), tokens)
        angles = e * per_token.head_dim * tokens
        return max(norm, attention, mlp) + (widened + angles)

    def widened_bytes(self, products: Sequence[tuple[int, int]], tokens: float) -> float:
        """Return the bytes of float32 copies in the largest of the matrix products that need them."""
        return float32_bytes(products, tokens) * (self.role.dtype == "bfloat16" and not self.fused)
