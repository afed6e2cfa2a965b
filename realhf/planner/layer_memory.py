"""Bytes of the pieces of a call: inputs, hidden states, norms, the layers' activations and logits.

Letters: T tokens of a micro-batch (over cp, a rank's part of them), R response tokens in it, e bytes of an
element in the model's dtype, w bytes of one that needs precision (float32; float64 in a float64 model).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from realhf.chunk_sizes import PART_NUMEL, block_numel, chunk_numel, slice_numel
from realhf.layout import ParallelStrategy
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.shard import Widths, exchanged, float32_bytes, widths

Parts = dict[str, float]

_SAMPLE_BYTES = 64  # Bytes per token in a call's inputs: ids, mask and columns of the loss, twice.
INDEX_BYTES = 40  # Bytes per token of a micro-batch for its row, position and other integers.


@dataclass(frozen=True)
class CallPieces:
    """The sizes of one call on one pipeline stage, and the bytes of the pieces of its passes."""

    role: ModelRole
    workload: Workload
    strategy: ParallelStrategy
    stage: int
    micro_batch_tokens: int
    recompute: bool
    fused: bool

    # Sizes

    @cached_property
    def _widths(self) -> Widths:
        """Widths on the fullest rank."""
        return widths(self.role.config, self.strategy.tp, self.strategy.ep)

    @cached_property
    def _num_layers(self) -> int:
        return len(self.role.spec.stage_layers(self.strategy, self.stage))

    @property
    def _is_first(self) -> bool:
        return self.stage == 0

    @property
    def _is_last(self) -> bool:
        return self.stage == self.strategy.pp - 1

    @property
    def _has_logits(self) -> bool:
        return self._is_last and self.role.config.head == "lm" and self.workload.output == "logprobs"

    @cached_property
    def _micro_batches(self) -> tuple[int, float, float]:
        """Number of micro-batches; tokens and response tokens of a cp rank in the largest one (see
        engine/micro_batch.py)."""
        w = self.workload
        cp = self.strategy.cp
        limit = self.micro_batch_tokens
        samples = w.most_samples("train_step", self.strategy.dp)
        length = max(w.tokens, 1.0)
        number = max(-(-int(samples * length) // limit), min(self.strategy.pp, samples), 1)
        if w.response_tokens >= w.max_new_tokens:  # All sequences are alike.
            rows = max(1, min(-(-samples // number), int(limit // length)))
            return max(1, -(-samples // rows)), rows * length / cp, rows * w.response_tokens / cp
        longest = w.prompt_tokens + w.max_new_tokens
        tokens = max(longest, min(limit, samples * length / number + longest / 2))
        tokens /= cp
        return number, tokens, tokens * max(w.response_tokens / length, w.max_new_tokens / longest)

    def _inputs(self, tokens: float) -> Parts:
        w = self.workload
        rows = -(-w.num_samples // self.strategy.dp)
        return {"samples": _SAMPLE_BYTES * rows * w.tokens + INDEX_BYTES * self.strategy.cp * tokens}

    # Pieces, in bytes

    def _hidden(self, tokens: float) -> float:
        return self.role.itemsize * self._widths.hidden * tokens

    def _norm_saved(self, hidden: float) -> float:
        """Return the bytes per token that a norm of `hidden` elements saves besides its output."""
        num_statistics = 2 if self.role.config.norm == "layer" else 1
        return self.role.itemsize * hidden + self.role.wide_itemsize * num_statistics

    def _norm_temporaries(self, numel: float, *, backward: bool) -> float:
        """Return the bytes of a norm's output, and of copies of the part that it works on."""
        e = self.role.itemsize
        w = self.role.wide_itemsize
        if self.fused or self.role.config.norm == "layer":
            return e * numel
        copies = 2 * (e < w) + (2 if backward else 0)
        return e * numel + w * copies * self._working_numel(numel)

    def _working_numel(self, numel: float) -> float:
        """Return how many of `numel` elements norms and activations work on at a time."""
        return numel if self.fused else min(numel, PART_NUMEL)

    @property
    def _num_mlp_saved(self) -> int:
        """Number of tensors of an MLP's width that are saved: gate and up, or up; with experts or adapters
        also their product."""
        config = self.role.config
        return (2 if config.gated else 1) + (config.moe is not None or self.role.lora is not None)

    def _weight_gradient(self, numel: float) -> float:
        """Return the bytes of a weight's gradient before it is added to the buffer; 0 where dtypes agree."""
        if self.role.itemsize == self.role.wide_itemsize or self.role.lora is not None:
            return 0.0
        return self.role.itemsize * min(numel, block_numel(is_cuda=self.fused))

    def _sum_temporaries(self, num_bytes: float) -> float:
        """Return the temporary bytes of a sum over tp."""
        tp = self.strategy.tp
        return 0.0 if tp == 1 else num_bytes * self._sum_copies(tp)

    def _sum_copies(self, size: int) -> float:
        """Return the copies for a sum over `size` ranks: a clone, and over gloo the data that
        `Group.all_reduce` receives."""
        return 1.0 + (0.0 if self.fused else 2.0 if size == 2 else (size - 1) / size)

    def _block_saved(self, tokens: float) -> float:
        """Return the bytes that autograd saves for one decoder layer (nn/transformer.py).

        In order they are: input of the norm | its output, for qkv | qkv, with queries and keys rotated |
        output and logsumexp of attention | input of the norm | its output, for gate and up | gate and up.
        Inputs of norms are the sums of the residual stream. In families with norms after attention and MLP,
        these norms save their inputs; norms of queries and keys also save qkv before them.
        """
        a = self._widths
        e = self.role.itemsize
        norms = a.norms * self._norm_saved(a.hidden) + 2 * e * a.hidden
        if self.role.config.qk_norm:
            norms += e * a.qkv + self.role.wide_itemsize * a.heads
        outputs, inputs = 1, self._attention_inputs
        if self.strategy.cp > 1:  # Inputs come from other ranks; the output is also kept as it comes back.
            outputs, inputs = 2, self._exchanged
        attention = e * (a.latents + inputs + outputs * a.attention) + 4 * a.heads
        mlp = e * (self._num_mlp_saved * a.mlp + a.routed + self._adapter_ranks)
        return tokens * (norms + attention + mlp)

    @property
    def _attention_inputs(self) -> int:
        """Elements per token of the queries, keys and values that attention reads."""
        return self._widths.qkv + (self._widths.rotated if self.role.config.mla is not None else 0)

    @cached_property
    def _adapter_ranks(self) -> int:
        """Elements per token between A and B, over all adapters of a layer."""
        if self.role.lora is None:
            return 0
        last = self.role.config.num_layers - 1
        table = self.role.trained_spec.params
        return sum(p.shape[0] for p in table if p.layer == last and p.part.endswith("lora_A"))

    @cached_property
    def _exchanged(self) -> int:
        """Elements per token of the all-to-all over cp before attention."""
        s = self.strategy
        return exchanged(self.role.config, s.tp, s.cp) if s.cp > 1 else 0

    def _chunk(self, numel: float) -> float:
        """Return how many of `numel` logits exist at a time."""
        return min(numel, max(self._widths.vocabulary, chunk_numel(is_cuda=self.fused)))

    def _logits(self, numel: float, *, copies: int) -> float:
        """Return the bytes of a chunk of logits, and of `copies` copies in w of one slice of it.

        Logits of another dtype are also copied to w, and the previous slice is freed only after the next is
        there.
        """
        limit = slice_numel(is_cuda=self.fused)
        chunk = self._chunk(numel)
        e = self.role.itemsize
        w = self.role.wide_itemsize
        copies += (1 + (chunk > limit)) * (e < w)
        return e * chunk + w * copies * min(chunk, limit)

    def _forward_temporaries(self, tokens: float) -> float:
        """Return the peak bytes of one layer without autograd: in a norm, in attention or in the MLP."""
        a = self._widths
        e = self.role.itemsize
        hidden = self._hidden(tokens)
        norm = hidden + self._norm_temporaries(a.hidden * tokens, backward=False)
        outputs = 1 if self.fused else 2
        projected = e * tokens * (a.latents + self._attention_inputs)
        turned = e * tokens * a.rotated / 2  # A copy of one half while it is rotated in place.
        attending = e * tokens * outputs * a.attention
        if self.strategy.cp > 1:  # Data sent and received; then the output of attention, also sent.
            attending = e * tokens * (self._exchanged + max(self._exchanged, (outputs + 1) * a.attention))
        output = hidden + self._sum_temporaries(hidden)
        attention = 2 * hidden + projected + max(turned, attending + hidden, output)
        routed = e * tokens * a.routed * (2 if self.strategy.ep > 1 else 1)  # Sent and received.
        width = e * tokens * a.mlp
        up = 2 if self.role.config.gated else 1
        part = e * self._working_numel(tokens * a.mlp)  # A part before all are joined.
        activating = width + max(hidden, part * (part < width))
        mlp = 3 * hidden + routed + up * width + max(activating, output)
        rest = self._widened(a.in_layer(num_ups=up), tokens) + e * a.head_dim * tokens
        return max(norm, attention, mlp) + rest

    def _widened(self, products: Sequence[tuple[int, int]], tokens: float) -> float:
        return float32_bytes(products, tokens) * (self.role.dtype == "bfloat16" and not self.fused)
