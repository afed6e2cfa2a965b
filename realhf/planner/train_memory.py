"""Moments of a train step at which a rank may need most memory.

The name of a moment says what runs: an operator of `nn`, or a sum of gradients. As in activation_memory.py, w
is the number of bytes of an element that needs precision.
"""

from functools import cached_property

from realhf.micro_batch import passes_in_flight
from realhf.planner.activation_memory import INDEX_BYTES, CallMemory, CallPieces
from realhf.planner.model_states import num_states, trained_params
from realhf.planner.shard import held_params, in_section


class TrainMoments:
    """The moments of a train step on one stage: a micro-batch's passes beside others in flight (1F1B), and
    the optimizer."""

    def __init__(self, pieces: CallPieces) -> None:
        self.pieces = pieces
        self.role = pieces.role
        self.strategy = pieces.strategy
        self.tokens = pieces.micro_batch.tokens
        self.hidden = pieces.hidden_bytes(self.tokens)

    def by_name(self) -> dict[str, CallMemory]:
        return {
            **self._embedding(), **self._last_norm(), **self._head(), **self._block(),
            **self._sums_of_sections(),
            "optimizer step": self.pieces.inputs()._replace(
                optimizer=max(self._optimizer_temporaries(), self._optimizer_buffers())),
        }  # fmt: skip

    # What is alive between the operators

    @cached_property
    def _saved(self) -> float:
        """Bytes that a micro-batch keeps from its forward to its backward pass through a chunk."""
        per_layer = self.hidden if self.pieces.recompute else self.pieces.block_saved_bytes(self.tokens)
        angles = self.role.itemsize * self.pieces.widths.head_dim * self.tokens
        num_layers = self.pieces.num_layers // self.strategy.vp
        return num_layers * per_layer + angles + INDEX_BYTES * self.tokens

    @cached_property
    def _in_flight(self) -> CallMemory:
        """The samples, and the activations and messages of all micro-batches in flight."""
        pieces = self.pieces
        num_micro_batches = pieces.micro_batch.num_micro_batches
        num_in_flight = passes_in_flight(self.strategy, pieces.stage, num_micro_batches)
        has_previous = not pieces.is_first or self.strategy.vp > 1
        has_next = not pieces.is_last or self.strategy.vp > 1
        messages = 0.0
        if self.strategy.pp > 1:
            # Hidden states sent, and received ones unless a layer saves them anyway.
            is_narrow = self.role.itemsize < self.role.wide_itemsize
            copied = is_narrow and not pieces.fused and not pieces.recompute
            messages += num_in_flight * self.hidden * ((has_previous and copied) + has_next)
            # A gradient received, and gradients sent for up to two micro-batches before.
            messages += self.hidden * (has_next + min(num_micro_batches - 1, 2) * has_previous)
        return pieces.inputs()._replace(activations=num_in_flight * self._saved, messages=messages)

    def _beside_in_flight(
        self, *, activations: float, gradients: float = 0.0, logits: float = 0.0
    ) -> CallMemory:
        """Return what is in flight, with more activations, and with gradients and logits."""
        activations += self._in_flight.activations
        return self._in_flight._replace(activations=activations, gradients=gradients, logits=logits)

    # Ends of the model

    def _embedding(self) -> dict[str, CallMemory]:
        if not self.pieces.is_first:
            return {}
        w = self.role.wide_itemsize
        # Weight.add_rows copies the gradients of rows to the dtype of the gradient buffer.
        widened_rows = w * self.pieces.widths.hidden * self.tokens if self.role.itemsize < w else 0.0
        # The micro-batch's own activations are free by then.
        moment = self._beside_in_flight(activations=-self._saved, gradients=2 * self.hidden + widened_rows)
        return {"embedding, backward": moment}

    @cached_property
    def _after_last_block(self) -> float:
        """Bytes that the last norm saves, and of its output where the head reads it."""
        norm = self.tokens * self.pieces.norm_saved(self.pieces.widths.hidden)
        return norm + self.pieces.hidden_bytes(self.pieces.micro_batch.response_tokens)

    def _last_norm(self) -> dict[str, CallMemory]:
        if not self.pieces.is_last:
            return {}
        norm = self.pieces.norm_temporaries(self.pieces.widths.hidden * self.tokens, backward=True)
        moment = self._beside_in_flight(activations=self._after_last_block, gradients=self.hidden + norm)
        return {"last norm, backward": moment}

    def _head(self) -> dict[str, CallMemory]:
        pieces = self.pieces
        if not pieces.has_logits:
            return {}
        response_tokens = pieces.micro_batch.response_tokens
        vocabulary = pieces.widths.vocabulary
        numel = response_tokens * vocabulary
        states = pieces.hidden_bytes(response_tokens)  # The gradient of the head's input.
        logits = pieces.logits_bytes(numel, copies=int(pieces.workload.entropy))
        chunk = pieces.logit_itemsize * pieces.logits_at_once(numel)
        weight_gradient = pieces.weight_gradient(vocabulary * pieces.widths.hidden)
        widened = pieces.widened_head_bytes(response_tokens, backward=True)
        if self.role.widens_head:
            weight_gradient = 0.0  # Products in float32 are added to the gradient buffer directly.
        saved = self._after_last_block
        return {
            "logits and their gradient": self._beside_in_flight(
                activations=saved, logits=max(logits, chunk + widened), gradients=states),
            "weight gradient of the head": self._beside_in_flight(
                activations=saved, logits=chunk + widened, gradients=weight_gradient + states),
        }  # fmt: skip

    # A decoder block: the last one of the stage, since then all activations are alive

    @cached_property
    def _block_recomputed(self) -> float:
        """Bytes of the activations of the one layer that has them with recompute."""
        return self.pieces.block_saved_bytes(self.tokens) if self.pieces.recompute else 0.0

    @cached_property
    def _mlp(self) -> float:
        """Bytes of a tensor of the MLP's width."""
        return self.role.itemsize * self.tokens * self.pieces.widths.mlp

    @cached_property
    def _gate_and_up(self) -> float:
        return (2 if self.role.config.gated else 1) * self._mlp

    @cached_property
    def _weight_gradient(self) -> float:
        """Bytes of the largest gradient of a block's weight that is not in the gradient buffer yet."""
        widest = self.pieces.widths.widest_weight
        gradient = self.pieces.weight_gradient(widest)
        if self.role.config.moe is not None:  # Experts' weights have separate gradients.
            gradient = max(gradient, float(self.role.itemsize * widest))
        return gradient

    @cached_property
    def _activated_linear(self) -> float:
        """Bytes in the backward pass of the activation and the down projection, besides the gradient of
        their output."""
        # The activation works on a part of the tokens at a time.
        temporaries = 3 * self.role.itemsize * self.pieces.working_numel(self.tokens * self.pieces.widths.mlp)
        if self.role.lora is not None:  # The gradients of two linear layers for one input, and their sum.
            return max(3 * self._mlp, self._gate_and_up + temporaries)
        return self._mlp + self._gate_and_up + max(temporaries, self._weight_gradient)

    def _block(self) -> dict[str, CallMemory]:
        """Return the moments in a block: the end of its forward pass, then its backward pass."""
        pieces = self.pieces
        hidden = self.hidden
        sum_over_tp = pieces.sum_temporaries(hidden)
        norm = pieces.norm_temporaries(pieces.widths.hidden * self.tokens, backward=True)
        qkv = self.role.itemsize * self.tokens * pieces.widths.qkv
        freed = pieces.num_mlp_saved * self._mlp  # Activations of the MLP, once they are used.
        gradients = {
            # The output of the down projection (no gradient yet).
            "MLP, forward, sum_over_group": hidden + sum_over_tp,
            # The gradients of the output, of the down projection's input, and of gate and up.
            "activated_linear, backward": hidden + self._activated_linear,
            # The gradients of the output, of gate and up, and of the MLP's input.
            "gate and up, backward": 2 * hidden - freed + self._gate_and_up + self._weight_gradient,
            # The gradient of the norm's output; that of its input is among the temporaries.
            "MLP norm, backward": hidden - freed + norm,
            # The gradients of the output and of the MLP's input.
            "MLP, backward, copy_to_group": 2 * hidden - freed + sum_over_tp,
            # The gradients of the block's output and of attention's output, and of queries, keys and values
            # before and after rotation.
            "attention, backward": 2 * hidden - freed + 2 * qkv,
        }
        return {
            name: self._beside_in_flight(activations=self._block_recomputed, gradients=num_bytes)
            for name, num_bytes in gradients.items()
        }

    # Sums of gradients over ranks

    def _sums_of_sections(self) -> dict[str, CallMemory]:
        """Return the moments in which gradients of 1 or 2 sections are summed; their activations are free."""
        moments = {}
        activations = self._in_flight.activations + self._block_recomputed
        for num_sections in (1, 2):
            share_left = 1 - num_sections * self._section_share
            if share_left > 0 and self._received > 0:
                received = self._received * num_sections / 2
                gradients = self.hidden + self._activated_linear + received
                moments[f"backward, sum of {num_sections} sections"] = self._in_flight._replace(
                    activations=share_left * activations, gradients=gradients)
        return moments

    @cached_property
    def _received(self) -> float:
        """Bytes that other replicas send over gloo for two sections of the gradients (ModelSpec.sections)."""
        if self.pieces.fused:
            return 0.0
        s = self.strategy
        shard = (self.role.config, s, self.pieces.stage, self.role.lora)
        held_by_kind = held_params(*shard)
        section_by_kind = in_section(*shard, self.role.trained_spec.section_numel)
        kinds = zip(held_by_kind, section_by_kind, (s.num_replicas, s.num_expert_replicas), strict=True)
        w = self.role.wide_itemsize
        return max(w * min(held, 2 * section) * (1 - 1 / replicas) for held, section, replicas in kinds)

    @cached_property
    def _section_share(self) -> float:
        """Fraction of the trained parameters on this stage that a section of the gradients has at least."""
        return self.role.trained_spec.section_numel / trained_params(
            self.role, self.strategy, self.pieces.stage)

    def _optimizer_buffers(self) -> float:
        """Return the bytes of the two buffers through which an offloaded optimizer's states pass."""
        if not self.role.offloads_optimizer:
            return 0.0
        s = self.strategy
        shard = (self.role.config, s, self.pieces.stage, self.role.lora)
        kinds = zip(
            held_params(*shard), in_section(*shard, self.role.trained_spec.section_numel),
            (s.num_replicas, s.num_expert_replicas), strict=True)
        slices = max(min(held, 2 * section) / replicas for held, section, replicas in kinds)
        return num_states(self.role) * self.role.wide_itemsize * slices

    def _optimizer_temporaries(self) -> float:
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
            weights = pieces.num_layers * 2 * config.head_dim * (config.hidden_size + config.qkv_bias)
            shared = w * weights * pieces.sum_copies(sharers)
        if self.role.lora is not None:  # The bound assumes that all adapters have a shared side.
            trained = trained_params(self.role, s, pieces.stage)
            shared = w * trained * pieces.sum_copies(s.tp) if s.tp > 1 else 0.0
        is_end = s.pp > 1 and (pieces.is_first or pieces.is_last)
        is_tied = config.tied and is_end and self.role.lora is None and not pieces.fused
        tied = 2.0 * w * pieces.widths.vocabulary * pieces.widths.hidden if is_tied else 0.0
        return max(shared, tied, self._received)
