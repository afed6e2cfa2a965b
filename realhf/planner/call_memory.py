"""Bytes that a rank needs for a call at the moment of its peak, besides the model's states.

The formulas follow `nn` and `engine` operator by operator; tests/planner/test_memory.py compares them with
what real processes allocate. First come the tensors that make up a call: inputs, hidden states, norms,
layers' activations, and logits. Then come the moments of each kind of call. Comments in a train step say what
runs at a moment: an operator of `nn`, or a sum of gradients.

Letters: e bytes of an element in the model's dtype, w bytes of one that needs precision (float32; float64 in
a float64 model). Tokens are those of a micro-batch; over cp, a rank's part of them.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from realhf.data.micro_batch import passes_in_flight
from realhf.devices import chunk_sizes
from realhf.devices.chunk_sizes import OPTIMIZER_SLICE_NUMEL
from realhf.execution_plan import CallPlan
from realhf.layout import ParallelStrategy
from realhf.models.kv_blocks import padded_size
from realhf.planner.efficiencies import OUR_CUDA
from realhf.planner.micro_batches import LargestMicroBatch, largest_micro_batch
from realhf.planner.problem import ModelRole, PlannedCall, Problem, Workload
from realhf.planner.rates import greatest_load
from realhf.planner.rows import RankRows
from realhf.planner.shard import (
    Widths,
    adapted_params,
    exchanged,
    float32_bytes,
    held_params,
    in_section,
    num_states,
    packed_itemsize,
    packed_params,
    trained_params,
    weights_bytes,
    widths,
)

_INPUT_BYTES_PER_TOKEN = 64  # In a call's inputs: ids, mask and columns of the loss, twice.
INDEX_BYTES = 40  # Bytes per token of a micro-batch for its row, position and other integers.
_ID_BYTES = 8  # Bytes of a token's id.
_RESULT_BYTES = 17.0  # Bytes of a new token's id, log-prob in float64, and whether it was inserted.
_SEARCH_BYTES = 26  # Bytes for each logit in which the threshold of top-p is searched for.
_SAMPLING_BYTES = 24  # Bytes of a logit's scaled value, exponential and running sum, in float64 each.
_TOP_COPIES = 2.75
"""Finding the most probable tokens takes a copy of the logits, running counts (int32) and three masks (bool):
so many times the bytes of float32 logits."""
_GRAPH_KERNEL_BYTES = 64 << 10
"""Device memory of a kernel in a recorded graph: forums.developer.nvidia.com/t/244901 measured 33 MB for 500
and 63 MB for 1000."""
_LABELS = {"loaded_weights": "loaded weights"}
"""Uses that reports call otherwise than the fields of CallMemory."""


# The tensors of a call


def top_bytes(workload: Workload, *, itemsize: int = 4) -> int:
    """Return the bytes per token of the columns of most probable tokens: ids (int64) and log-probs."""
    return (8 + itemsize) * workload.top_k


class CallMemory(NamedTuple):
    """The bytes that a rank holds for a call at one moment, by use; numbers, or arrays over ranks."""

    samples: float = 0.0
    kv_cache: Any = 0.0
    merged: float = 0.0  # Copies of weights with the adapters merged in.
    packed: float = 0.0  # Copies of weights in the order in which a CPU's products read them.
    activations: float = 0.0
    messages: float = 0.0
    logits: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    loaded_weights: Any = 0.0  # Those that wait in host memory while other calls run.
    graphs: float = 0.0  # Recorded decode steps, and the memory that they share.

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
    packed_itemsize: int = 0
    """Bytes of an element of a packed weight (see `packed_itemsize`); 0: none is packed."""

    # Sizes

    @cached_property
    def widths(self) -> Widths:
        """Widths on the fullest rank."""
        return widths(self.role.config, self.strategy.tp, self.strategy.ep)

    def stage(self, index: int) -> Stage:
        num_layers = sum(map(len, self.role.spec.chunk_layers(self.strategy, index)))
        return Stage(index, num_layers, index == 0, index == self.strategy.pp - 1)

    def load(self, tokens: float, *, num_passes: int, num_layers: int = 1) -> float:
        """Return the rows of the busiest rank's experts in any layer of some passes, relative to the mean.

        With `num_layers`, it is the mean of so many layers of a rank.
        """
        moe = self.role.config.moe
        ep = self.strategy.ep
        if moe is None or ep == 1:
            return 1.0
        num_draws = max(1, num_passes * (self.role.config.num_layers // num_layers))
        rows = tokens * moe.num_experts_per_token * ep
        return greatest_load(rows, ep, moe.num_experts, num_draws=num_draws, num_layers=num_layers)

    def mlp_width(self, load: float) -> float:
        """Return the elements per token of an MLP's width on a rank whose experts have such a load."""
        return self.widths.mlp + (load - 1) * self.widths.experts

    def rows_width(self, load: float) -> float:
        """Return the elements per token of the hidden states that experts read or write."""
        moe = self.role.config.moe
        return 0.0 if moe is None else load * moe.num_experts_per_token * self.widths.hidden

    @property
    def computes_logits(self) -> bool:
        """Whether the last stage computes logits."""
        return self.role.config.head == "lm" and self.workload.output.needs_logits

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
        return CallMemory(samples=(_INPUT_BYTES_PER_TOKEN + top) * rows * self.workload.tokens + indices)

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

    def block_saved_bytes(self, tokens: float, *, load: float = 1.0) -> float:
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
        routed = per_token.routed + self.rows_width(load) - self.rows_width(1)  # What experts read.
        mlp = e * (self.num_mlp_saved * self.mlp_width(load) + routed + self._adapter_ranks)
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

    def kept_logits(self, numel: float) -> float:
        """Return how many of `numel` logits exist at a time in training: a group with more than a chunk keeps
        those of several chunks for the backward pass."""
        work = self.workload
        group = work.group_size * max(work.max_new_tokens, work.response_tokens) * self.widths.vocabulary
        most = (chunk_sizes.KEPT_CHUNKS + 1) * chunk_sizes.chunk_numel(is_cuda=self.fused)
        return max(self.logits_at_once(numel), min(numel, group, most))

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

    def logits_bytes(self, chunk: float, *, copies: float) -> float:
        """Return the bytes of so many logits, and of `copies` copies in w of one slice of them.

        Logits of another dtype are also copied to w, and the previous slice is freed only after the next is
        there.
        """
        limit = chunk_sizes.slice_numel(is_cuda=self.fused)
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

    def forward_temporaries(self, tokens: float, *, earlier: float = 0, load: float = 1.0) -> float:
        """Return the peak bytes of one layer without autograd: in a norm, in attention or in the MLP.

        With latent attention, the tokens may continue sequences of `earlier` ones in all. `load` is that of
        this rank's experts (see `load`).
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
        routed = e * tokens * per_token.routed
        if self.strategy.ep > 1:  # Sent and received.
            routed = e * tokens * (2 * per_token.routed + 2 * (self.rows_width(load) - self.rows_width(1)))
        width = e * tokens * self.mlp_width(load)
        up = 2 if self.role.config.gated else 1
        activated = e * self.working_numel(tokens * self.mlp_width(load))  # A part before all are joined.
        activating = width + max(hidden, activated * (activated < width))
        mlp = 2 * hidden + routed + up * width + max(activating, output)
        widened = self.widened_bytes(per_token.in_layer(num_ups=up), tokens)
        angles = e * per_token.head_dim * tokens
        return max(norm, attention, mlp) + (widened + angles)

    def widened_bytes(self, products: Sequence[tuple[int, int]], tokens: float) -> float:
        """Return the bytes of float32 copies in the largest of the matrix products that need them."""
        is_widened = self.role.dtype == "bfloat16" and not self.fused
        return float32_bytes(products, tokens) if is_widened else 0.0


# The moments of calls


class RunningMemory:
    """The memory that ranks need only while a call runs.

    The cache of a generation has room for all rows that decode at once.
    """

    def __init__(self, problem: Problem, planned: PlannedCall, call_plan: CallPlan) -> None:
        self._role = role = problem.roles[planned.role]
        self._strategy = call_plan.layout.strategy
        self._offloads = call_plan.offload
        self._peaks = CallPeaks(planned.kind, CallPieces(
            role, planned.workload.under(call_plan), self._strategy,
            call_plan.micro_batch_tokens, call_plan.recompute, problem.cluster.device_type == "cuda",
            packed_itemsize(role.dtype, problem.cluster)))

    def on(self, stage: int) -> CallMemory:
        memory = self._peaks.on(stage)
        if self._offloads:
            memory = memory._replace(loaded_weights=weights_bytes(self._role, self._strategy, stage))
        return memory


class CallPeaks:
    """The memory that a call adds on the fullest rank of each stage, at the moment when it adds most.

    If sequences differ in length, micro-batches are assumed to hold up to
    their limit or the longest sequence. All rows that decode at once are assumed to have the longest prompt.
    """

    def __init__(self, kind: str, pieces: CallPieces) -> None:
        self._pieces = pieces
        self._moments: Callable[[Stage], list[CallMemory]] = _MOMENTS[kind](pieces).on

    def on(self, stage: int) -> CallMemory:
        return max(self._moments(self._pieces.stage(stage)), key=sum)


class ForwardMoments:
    """The moments of a pass without autograd."""

    def __init__(self, pieces: CallPieces) -> None:
        self._pieces = pieces
        self._inputs = pieces.inputs(top_copies=1)
        num_micro_batches, tokens, _ = pieces.micro_batch
        load = pieces.load(tokens, num_passes=num_micro_batches)
        self._block = pieces.forward_temporaries(tokens, load=load)

    def on(self, stage: Stage) -> list[CallMemory]:
        """Return what a rank of a stage needs at each moment: in a block, for logits, and for results."""
        pieces = self._pieces
        num_micro_batches, tokens, response_tokens = pieces.micro_batch
        base = self._inputs
        if pieces.strategy.pp > 1:  # A send of hidden states is waited for two micro-batches later.
            has_chunks = pieces.strategy.vp > 1  # Then the last stage sends to the first one, too.
            num_sends = min(num_micro_batches, 3) if has_chunks or not stage.is_last else 0
            messages = pieces.hidden_bytes(tokens) * (num_sends + (has_chunks or not stage.is_first))
            base = base._replace(messages=messages)
        moments = [base._replace(activations=self._block)]
        if stage.is_last and pieces.computes_logits:
            states = pieces.hidden_bytes(tokens + response_tokens)
            numel = response_tokens * pieces.widths.vocabulary
            widened = pieces.widened_head_bytes(response_tokens, backward=False)
            chunk = pieces.logits_at_once(numel)
            copies = _TOP_COPIES if pieces.workload.top_k else 0
            logits = max(pieces.logits_bytes(chunk, copies=copies), pieces.logit_itemsize * chunk + widened)
            moments.append(base._replace(activations=states, logits=logits))
            if pieces.workload.top_k:  # Columns of micro-batches, joined, and in the order of samples.
                moments.append(pieces.inputs(top_copies=3))
        return moments


class GenerationMoments:
    """The moments of generation: the largest pass of prompts and decoding rows, and sampling.

    Each pipeline stage works on one cohort of samples at a time, of which `rows` decode at once. With several
    rounds, no sample is assumed to end before its last one.
    """

    def __init__(self, pieces: CallPieces) -> None:
        self._pieces = pieces
        work = pieces.workload
        rank_rows = RankRows(pieces.role, work, pieces.strategy, pieces.fused)
        self._samples = rank_rows.all_samples
        self._num_cohorts = rank_rows.num_cohorts
        self._cohort = rank_rows.samples
        self._rows = rank_rows.slots
        self._cached_tokens = rank_rows.whole_tokens

    def on(self, stage: Stage) -> list[CallMemory]:
        """Return what a rank of a stage needs at each moment."""
        pieces = self._pieces
        base = self._base._replace(
            kv_cache=self._cache_bytes(stage), merged=self._merged_bytes(stage),
            packed=self._packed_bytes(stage), graphs=self._graph_bytes(stage))
        moments = [base._replace(activations=self._block)]
        if stage.is_last:
            moments.append(base._replace(logits=self._logits, activations=pieces.hidden_bytes(self._rows)))
        return moments

    @cached_property
    def _base(self) -> CallMemory:
        """The results, the indices and the messages."""
        work = self._pieces.workload
        answers = self._samples * max(work.max_new_tokens, 1)
        results = _RESULT_BYTES * answers + _ID_BYTES * self._samples * work.prompt_tokens
        messages = 0.0 if self._pieces.strategy.pp == 1 else self._pieces.hidden_bytes(self._pass_tokens) * 2
        return CallMemory(samples=results + INDEX_BYTES * self._prefill_tokens[0], messages=messages)

    @cached_property
    def _block(self) -> float:
        # Decoding gathers the rows of all ranks that share experts (nn/moe.py). Even short prompts are
        # continued: after a turn, or when a row is computed again.
        work = self._pieces.workload
        ep = self._pieces.strategy.ep
        gathered = padded_size(self._rows) * ep if ep > 1 else 0
        earlier = self._cohort * (work.longest_prompt + work.max_new_tokens)
        passes = math.ceil(self._prefill_tokens[1] / max(1.0, work.prefill_tokens)) * self._num_cohorts
        load = self._pieces.load(self._pass_tokens, num_passes=passes)
        return max(
            self._pieces.forward_temporaries(self._pass_tokens, earlier=earlier, load=load),
            self._pieces.forward_temporaries(gathered, earlier=earlier))

    def _merged_bytes(self, stage: Stage) -> float:
        """Return the bytes of the copies of weights with adapters, into which these are merged."""
        role = self._pieces.role
        if role.lora is None or not role.lora.merge:
            return 0.0
        numel = adapted_params(role.config, self._pieces.strategy, stage.number, role.lora)
        return float(role.itemsize * numel)

    def _packed_bytes(self, stage: Stage) -> float:
        """Return the bytes of the weights that a CPU packs."""
        pieces = self._pieces
        if not pieces.packed_itemsize:
            return 0.0
        return pieces.packed_itemsize * float(packed_params(pieces.role, pieces.strategy, stage.number))

    def _graph_bytes(self, stage: Stage) -> float:
        """Return the bytes of the recorded decode steps of a GPU, one for each padded number of rows.

        They have a pool of memory, which they share, for what the largest step allocates.
        """
        pieces = self._pieces
        if not pieces.fused:
            return 0.0
        config = pieces.role.config
        s = pieces.strategy
        kernels = stage.num_layers * OUR_CUDA.of_decode_block(
            config, has_experts=config.moe is not None, tp=s.tp, ep=s.ep)
        return _GRAPH_KERNEL_BYTES * kernels * _num_padded_sizes(self._rows) + self._graph_pool

    @cached_property
    def _graph_pool(self) -> float:
        """Bytes that the largest recorded step allocates."""
        return self._pieces.forward_temporaries(padded_size(self._rows) * self._pieces.strategy.ep)

    @cached_property
    def _prefill_tokens(self) -> tuple[float, float]:
        """Tokens in the largest pass of prompts, and in all of them."""
        work = self._pieces.workload
        prompts = -(-self._rows // work.samples_per_prompt) + (self._rows % work.samples_per_prompt > 0)
        longest = work.longest_prompt
        all_tokens = prompts * longest
        if work.rounds > 1:  # Most rows are prefilled with what they have so far.
            all_tokens = self._rows * (longest + (work.rounds - 1) * work.round_tokens)
        tokens = min(all_tokens, work.prefill_tokens)
        if not self._pieces.fused:  # A CPU attends to what precedes a piece of a prompt with copies of it.
            tokens = max(longest, tokens)
        return tokens, all_tokens

    @cached_property
    def _pass_tokens(self) -> float:
        """Tokens of the largest pass; all passes of prompts except the first also decode rows."""
        tokens, all_tokens = self._prefill_tokens
        is_single = self._cohort == self._rows and all_tokens <= self._pieces.workload.prefill_tokens
        return max(tokens, self._rows) if is_single else tokens + self._rows

    @cached_property
    def _logits(self) -> float:
        """Bytes of logits in a wide dtype, and of what sampling computes from them.

        Top-p sampling gathers the whole vocabulary over tp, and searches some rows at a time for the least
        logit that it keeps.
        """
        pieces = self._pieces
        widths = pieces.widths
        w = pieces.role.wide_itemsize
        logits = float(self._rows * widths.vocabulary * (w + _SAMPLING_BYTES))
        if pieces.workload.sorts_logits:
            vocabulary = pieces.role.config.vocab_size
            whole = self._rows * vocabulary
            gathered = w * whole * (2 if pieces.strategy.tp > 1 else 0)  # Shard by shard, and in one row.
            at_once = min(whole, max(vocabulary, chunk_sizes.slice_numel(is_cuda=pieces.fused)))
            in_shard = 2 * w * self._rows * widths.vocabulary  # With and without temperature.
            logits = max(logits, float(in_shard + gathered + _SEARCH_BYTES * at_once))
        # Copies of operands in float32 are freed before the logits exist.
        return max(logits, pieces.widened_bytes([(widths.hidden, widths.vocabulary)], self._rows))

    def _cache_bytes(self, stage: Stage) -> float:
        """Return the bytes of the caches of all cohorts."""
        pieces = self._pieces
        limit = pieces.workload.kv_cache_gib
        token_bytes = pieces.widths.cached * pieces.role.itemsize * stage.num_layers
        needed = float(self._num_cohorts * self._cached_tokens * token_bytes)
        return needed if limit is None else min(needed, limit * 2**30)


@lru_cache(maxsize=1 << 12)
def _num_padded_sizes(num_rows: int) -> int:
    """Return how many sizes the recorded steps of up to so many rows have."""
    return len({padded_size(rows) for rows in range(1, num_rows + 1)})


class TrainMoments:
    """The moments of a train step: a micro-batch's passes beside others in flight (1F1B), and the optimizer.

    Properties are the same on all stages, so that they are computed once.
    """

    def __init__(self, pieces: CallPieces) -> None:
        self.pieces = pieces
        self.role = pieces.role
        self.strategy = pieces.strategy
        self.tokens = pieces.micro_batch.tokens
        self.hidden = pieces.hidden_bytes(self.tokens)

    def on(self, stage: Stage) -> list[CallMemory]:
        """Return what a rank of a stage needs at each moment."""
        in_flight = self._in_flight(stage)

        def beside(*, activations: float, gradients: float, logits: float = 0.0) -> CallMemory:
            activations += in_flight.activations
            return in_flight._replace(activations=activations, gradients=gradients, logits=logits)

        moments = [beside(activations=self._block_recomputed, gradients=self._block_gradients)]
        if stage.is_first:  # The embedding; the micro-batch's own activations are free by then.
            moments.append(beside(activations=-self._saved(stage), gradients=self._embedding_gradients))
        if stage.is_last:
            saved = self._after_last_block
            moments.append(beside(activations=saved, gradients=self.hidden + self._norm))
            if self.pieces.computes_logits:
                moments += [
                    beside(activations=saved, gradients=gradients, logits=logits)
                    for gradients, logits in self._head]
        moments += self._sums_of_sections(stage, in_flight)
        optimizer = max(self._optimizer_temporaries(stage), self._optimizer_buffers(stage))
        return [*moments, self._inputs._replace(optimizer=optimizer)]

    # What is alive between the operators

    @cached_property
    def _inputs(self) -> CallMemory:
        return self.pieces.inputs()

    @cached_property
    def _saved_by_layer(self) -> float:
        if self.pieces.recompute:
            return self.hidden
        return self.pieces.block_saved_bytes(self.tokens, load=self._mean_load)

    @cached_property
    def _load(self) -> float:
        """The greatest load of a rank's experts in any layer and micro-batch."""
        return self.pieces.load(self.tokens, num_passes=self.pieces.micro_batch.num_micro_batches)

    @cached_property
    def _mean_load(self) -> float:
        """The greatest mean load over the layers of a rank, in any micro-batch."""
        num_layers = max(1, self.role.config.num_layers // (self.strategy.pp * self.strategy.vp))
        num_passes = self.pieces.micro_batch.num_micro_batches
        return self.pieces.load(self.tokens, num_passes=num_passes, num_layers=num_layers)

    def _saved(self, stage: Stage) -> float:
        """Return the bytes that a micro-batch keeps from its forward to its backward pass through a chunk."""
        angles = self.role.itemsize * self.pieces.widths.head_dim * self.tokens
        num_layers = stage.num_layers // self.strategy.vp
        return num_layers * self._saved_by_layer + angles + INDEX_BYTES * self.tokens

    def _in_flight(self, stage: Stage) -> CallMemory:
        """Return the samples, and the activations and messages of all micro-batches in flight."""
        pieces = self.pieces
        num_micro_batches = pieces.micro_batch.num_micro_batches
        num_in_flight = passes_in_flight(self.strategy, stage.number, num_micro_batches)
        has_previous = not stage.is_first or self.strategy.vp > 1
        has_next = not stage.is_last or self.strategy.vp > 1
        messages = 0.0
        if self.strategy.pp > 1:
            # Hidden states sent, and received ones unless a layer saves them anyway.
            is_narrow = self.role.itemsize < self.role.wide_itemsize
            copied = is_narrow and not pieces.fused and not pieces.recompute
            messages += num_in_flight * self.hidden * ((has_previous and copied) + has_next)
            # A gradient received, and gradients sent for up to two micro-batches before.
            messages += self.hidden * (has_next + min(num_micro_batches - 1, 2) * has_previous)
        return self._inputs._replace(activations=num_in_flight * self._saved(stage), messages=messages)

    # Ends of the model

    @cached_property
    def _embedding_gradients(self) -> float:
        w = self.role.wide_itemsize
        # Weight.add_rows copies the gradients of rows to the dtype of the gradient buffer.
        widened_rows = w * self.pieces.widths.hidden * self.tokens if self.role.itemsize < w else 0.0
        return 2 * self.hidden + widened_rows

    @cached_property
    def _after_last_block(self) -> float:
        """Bytes that the last norm saves, and those of its output at the positions that the head reads."""
        norm = self.tokens * self.pieces.norm_saved(self.pieces.widths.hidden)
        return norm + self.pieces.hidden_bytes(self.pieces.micro_batch.response_tokens)

    @cached_property
    def _norm(self) -> float:
        """Bytes in the backward pass of a norm."""
        return self.pieces.norm_temporaries(self.pieces.widths.hidden * self.tokens, backward=True)

    @cached_property
    def _head(self) -> list[tuple[float, float]]:
        """Bytes of gradients and of logits, when the logits' gradient exists, and when the weight's does."""
        pieces = self.pieces
        response_tokens = pieces.micro_batch.response_tokens
        vocabulary = pieces.widths.vocabulary
        numel = response_tokens * vocabulary
        states = pieces.hidden_bytes(response_tokens)  # The gradient of the head's input.
        kept = pieces.kept_logits(numel)
        logits = pieces.logits_bytes(kept, copies=int(pieces.workload.entropy))
        chunk = pieces.logit_itemsize * kept
        tokens_at_once = pieces.logits_at_once(numel) / max(1, vocabulary)
        weight_gradient = pieces.weight_gradient(pieces.widths.hidden, vocabulary, tokens_at_once)
        widened = pieces.widened_head_bytes(response_tokens, backward=True)
        if self.role.widens_head or self.role.lora is not None:
            weight_gradient = 0.0  # Products in float32 are added to the gradient buffer directly.
        return [(states, max(logits, chunk + widened)), (weight_gradient + states, chunk + widened)]

    # A decoder block: the last one of the stage, since then all activations are alive

    @cached_property
    def _block_recomputed(self) -> float:
        """Bytes of the activations of the layer that is recomputed; 0 without recompute."""
        if not self.pieces.recompute:
            return 0.0
        return self.pieces.block_saved_bytes(self.tokens, load=self._load)

    @cached_property
    def _mlp(self) -> float:
        """Bytes of a tensor of the MLP's width."""
        return self.role.itemsize * self.tokens * self.pieces.mlp_width(self._load)

    @cached_property
    def _gate_and_up(self) -> float:
        return (2 if self.role.config.gated else 1) * self._mlp

    def _weight_gradient(self, inputs: int, outputs: int) -> float:
        """Return the bytes that it takes to add the gradient of such a weight of a block to the buffer."""
        if self.role.lora is not None:
            return self.pieces.weight_gradient(max(inputs, outputs), self.role.lora.rank, self.tokens)
        return self.pieces.weight_gradient(inputs, outputs, self.tokens)

    @cached_property
    def _activated_linear(self) -> float:
        """Bytes in the backward pass of activation and down projection, besides their output's gradient."""
        # The activation works on a part of the tokens at a time.
        width = self.pieces.mlp_width(self._load)
        temporaries = 3 * self.role.itemsize * self.pieces.working_numel(self.tokens * width)
        if self.role.lora is not None:  # The gradients of two linear layers for one input, and their sum.
            return max(3 * self._mlp, self._gate_and_up + temporaries)
        widths = self.pieces.widths
        return self._mlp + self._gate_and_up + max(
            temporaries, self._weight_gradient(widths.mlp, widths.hidden))

    @cached_property
    def _block_gradients(self) -> float:
        """The most bytes of gradients in a block: at the end of its forward pass, or in its backward pass."""
        pieces = self.pieces
        hidden = self.hidden
        sum_over_tp = pieces.sum_temporaries(hidden)
        qkv = self.role.itemsize * self.tokens * pieces.widths.qkv
        # Activations of the MLP, once they are used: no more than the mean layer has.
        width = pieces.mlp_width(self._mean_load)
        freed = pieces.num_mlp_saved * self.role.itemsize * self.tokens * width
        return max(
            # The sum over the tp group in the MLP's forward pass: the output of the down projection.
            hidden + sum_over_tp,
            # activated_linear, backward: the gradients of output, down projection's input, gate and up.
            hidden + self._activated_linear,
            # Gate and up, backward: the gradients of the output, of gate and up, and of the MLP's input,
            # which is computed last.
            hidden - freed + self._gate_and_up + max(hidden, self._weight_gradient(
                pieces.widths.hidden, (2 if self.role.config.gated else 1) * pieces.widths.mlp)),
            # The MLP's norm, backward: the gradient of its output; that of its input is a temporary.
            hidden - freed + self._norm,
            # copy_to_group, backward, of the MLP: the gradients of the output and of the MLP's input.
            2 * hidden - freed + sum_over_tp,
            # Attention, backward: the gradients of the block's output and of attention's output, and of
            # queries, keys and values before and after rotation.
            2 * hidden - freed + 2 * qkv)

    # Sums of gradients over ranks

    def _sums_of_sections(self, stage: Stage, in_flight: CallMemory) -> list[CallMemory]:
        """Return the moments in which gradients of 1 or 2 sections are summed; their activations are free."""
        all_received = self._received(stage)
        if all_received == 0:
            return []
        trained = trained_params(self.role, self.strategy, stage.number)
        section_share = self.role.trained_spec.section_numel / trained  # The least share of a section.
        moments = []
        activations = in_flight.activations + self._block_recomputed
        for num_sections in (1, 2):
            share_left = 1 - num_sections * section_share
            if share_left > 0:
                received = all_received * num_sections / 2
                gradients = self.hidden + self._activated_linear + received
                moments.append(in_flight._replace(activations=share_left * activations, gradients=gradients))
        return moments

    def _received(self, stage: Stage) -> float:
        """Return the bytes that other replicas send over gloo for two sections of the gradients
        (ModelSpec.sections)."""
        if self.pieces.fused:
            return 0.0
        s = self.strategy
        shard = (self.role.config, s, stage.number, self.role.lora)
        held_by_kind = held_params(*shard)
        section_by_kind = in_section(*shard, self.role.trained_spec.section_numel)
        kinds = zip(held_by_kind, section_by_kind, (s.num_replicas, s.num_expert_replicas), strict=True)
        w = self.role.wide_itemsize
        return max(w * min(held, 2 * section) * (1 - 1 / replicas) for held, section, replicas in kinds)

    def _optimizer_buffers(self, stage: Stage) -> float:
        """Return the bytes of the two buffers through which an offloaded optimizer's states pass."""
        if not self.role.offloads_optimizer:
            return 0.0
        s = self.strategy
        shard = (self.role.config, s, stage.number, self.role.lora)
        replicas = (s.num_replicas, s.num_expert_replicas)
        sections = in_section(*shard, self.role.trained_spec.section_numel)
        held = sum(numel / num for numel, num in zip(held_params(*shard), replicas, strict=True))
        largest = max(numel / num for numel, num in zip(sections, replicas, strict=True))
        buffers = min(held, 2 * min(largest, OPTIMIZER_SLICE_NUMEL))
        return num_states(self.role) * self.role.wide_itemsize * buffers

    def _optimizer_temporaries(self, stage: Stage) -> float:
        """Return the peak bytes of gradient sums over ranks that share parameters.

        They are the sums over tp ranks (key-value heads, adapters), and over gloo those of a tied embedding
        on its two stages and of this replica's slices.
        """
        pieces = self.pieces
        s = self.strategy
        w = self.role.wide_itemsize
        config = self.role.config
        shared = 0.0
        sharers = s.tp // config.num_kv_heads
        if sharers > 1:
            weights = stage.num_layers * 2 * config.head_dim * (config.hidden_size + config.qkv_bias)
            shared = w * weights * pieces.sum_copies(sharers)
        if self.role.lora is not None:  # The bound assumes that all adapters have a shared side.
            trained = trained_params(self.role, s, stage.number)
            shared = w * trained * pieces.sum_copies(s.tp) if s.tp > 1 else 0.0
        is_end = s.pp > 1 and (stage.is_first or stage.is_last)
        is_tied = config.tied and is_end and self.role.lora is None and not pieces.fused
        tied = 2.0 * w * pieces.widths.vocabulary * pieces.widths.hidden if is_tied else 0.0
        return max(shared, tied, self._received(stage))


_MOMENTS: dict[str, type[ForwardMoments] | type[GenerationMoments] | type[TrainMoments]] = {
    "generate": GenerationMoments, "forward": ForwardMoments, "train_step": TrainMoments}
