"""Moments of a train step at which a rank may need most memory.

Comments say what runs at a moment: an operator of `nn`, or a sum of gradients. As in activation_memory.py, w
is the number of bytes of an element that needs precision.
"""

from functools import cached_property

from realhf.data.micro_batch import passes_in_flight
from realhf.devices.chunk_sizes import OPTIMIZER_SLICE_NUMEL
from realhf.planner.memory.activation_memory import INDEX_BYTES, CallMemory, CallPieces, Stage
from realhf.planner.memory.model_states import num_states, trained_params
from realhf.planner.memory.shard import held_params, in_section


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
        return self.hidden if self.pieces.recompute else self.pieces.block_saved_bytes(self.tokens)

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
        logits = pieces.logits_bytes(numel, copies=int(pieces.workload.entropy))
        chunk = pieces.logit_itemsize * pieces.logits_at_once(numel)
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
        return self.pieces.block_saved_bytes(self.tokens) if self.pieces.recompute else 0.0

    @cached_property
    def _mlp(self) -> float:
        """Bytes of a tensor of the MLP's width."""
        return self.role.itemsize * self.tokens * self.pieces.widths.mlp

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
        temporaries = 3 * self.role.itemsize * self.pieces.working_numel(self.tokens * self.pieces.widths.mlp)
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
        freed = pieces.num_mlp_saved * self._mlp  # Activations of the MLP, once they are used.
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
