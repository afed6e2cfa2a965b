"""Bytes that a rank needs for a call of any kind at the moment of its peak, besides the model's states.

The formulas follow `nn` and `engine` operator by operator; tests/planner/test_memory.py compares them with
what real processes allocate.
"""

import math
from collections.abc import Callable
from functools import cached_property

from realhf.models.kv_blocks import padded_size, page_tokens, tokens_for
from realhf.plan import CallPlan
from realhf.planner.memory.activation_memory import INDEX_BYTES, CallMemory, CallPieces, Stage
from realhf.planner.memory.model_states import weights_bytes
from realhf.planner.memory.shard import num_params
from realhf.planner.memory.train_memory import TrainMoments
from realhf.planner.workload.problem import PlannedCall, Problem

_ID_BYTES = 8  # Bytes of a token's id.
_RESULT_BYTES = 17.0  # Bytes of a new token's id, log-prob in float64, and whether it was inserted.
_SAMPLING_BYTES = 24  # Bytes of a logit's scaled value, exponential and running sum, in float64 each.
_TOP_COPIES = 2.75
"""Finding the most probable tokens takes a copy of the logits, running counts (int32) and three masks (bool):
so many times the bytes of float32 logits."""


class RunningMemory:
    """The memory that ranks need only while a call runs.

    The cache of a generation has room for all rows that decode at once.
    """

    def __init__(self, problem: Problem, planned: PlannedCall, call_plan: CallPlan) -> None:
        self._role = role = problem.roles[planned.role]
        self._strategy = call_plan.layout.strategy
        self._offloads = call_plan.offload
        self._peaks = CallPeaks(planned.kind, CallPieces(
            role, planned.workload.with_rows(call_plan.max_rows), self._strategy,
            call_plan.micro_batch_tokens, call_plan.recompute, problem.cluster.device_type == "cuda"))

    def on(self, stage: int) -> CallMemory:
        """Return the memory of a rank of a stage."""
        memory = self._peaks.on(stage)
        if self._offloads:
            memory = memory._replace(loaded_weights=weights_bytes(self._role, self._strategy, stage))
        return memory


class CallPeaks:
    """The memory that a call adds on the fullest rank of each stage, at the moment when it adds most.

    Top-p sampling is not counted. If sequences differ in length, micro-batches are assumed to hold up to
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
        self._block = pieces.forward_temporaries(pieces.micro_batch.tokens)

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
            chunk = pieces.logit_itemsize * pieces.logits_at_once(numel)
            copies = _TOP_COPIES if pieces.workload.top_k else 0
            logits = max(pieces.logits_bytes(numel, copies=copies), chunk + widened)
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
        strategy = pieces.strategy
        self._samples = -(-work.rounds * work.most_samples("generate", strategy.dp) // strategy.cp)
        self._num_cohorts = max(1, min(strategy.pp, self._samples, work.max_rows))
        self._cohort = max(1, -(-self._samples // self._num_cohorts))
        self._rows = min(self._cohort, -(-work.max_rows // self._num_cohorts))

    def on(self, stage: Stage) -> list[CallMemory]:
        """Return what a rank of a stage needs at each moment."""
        pieces = self._pieces
        role = pieces.role
        merged = 0.0
        if role.lora is not None and role.lora.merge:  # Assumed for all weights.
            merged = role.itemsize * float(num_params(role.spec, pieces.strategy, stage.number))
        base = self._base._replace(kv_cache=self._cache_bytes(stage), merged=merged)
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
        return self._pieces.forward_temporaries(max(self._pass_tokens, gathered), earlier=earlier)

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
        """Bytes of logits in a wide dtype, and of what sampling computes from them."""
        pieces = self._pieces
        widths = pieces.widths
        logits = float(self._rows * widths.vocabulary * (pieces.role.wide_itemsize + _SAMPLING_BYTES))
        # Copies of operands in float32 are freed before the logits exist.
        return max(logits, pieces.widened_bytes([(widths.hidden, widths.vocabulary)], self._rows))

    def _cache_bytes(self, stage: Stage) -> float:
        """Return the bytes of the caches of all cohorts."""
        pieces = self._pieces
        limit = pieces.workload.kv_cache_gib
        token_bytes = pieces.widths.cached * pieces.role.itemsize * stage.num_layers
        needed = float(self._num_cohorts * self._cached_tokens * token_bytes)
        return needed if limit is None else min(needed, limit * 2**30)

    @cached_property
    def _cached_tokens(self) -> int:
        """Tokens in the cache of a cohort, whose slots have the longest rows.

        The rows of each age have what they got in earlier rounds, and room for this one. A cache that is kept
        between rounds holds all rows at once, as far as they can grow.
        """
        pieces = self._pieces
        work = pieces.workload
        samples = -(-self._cohort // work.rounds)
        rows = self._cohort if work.keeps_cache else self._rows
        cached_tokens = 0
        for age in reversed(range(work.num_ages)):
            had = age * work.round_tokens
            slots = min(rows, samples)
            rows -= slots
            if slots:
                cached_tokens += tokens_for(
                    math.ceil(work.longest_prompt) + had, work.samples_per_prompt if age == 0 else 1,
                    num_slots=slots, num_samples=samples,
                    max_new_tokens=work.max_new_tokens - had if work.keeps_cache
                    else min(work.max_new_tokens - had, work.round_tokens),
                    page_tokens=page_tokens(pieces.role.config, pieces.role.dtype) if pieces.fused else None)
        return cached_tokens


_MOMENTS: dict[str, type[ForwardMoments] | type[GenerationMoments] | type[TrainMoments]] = {
    "generate": GenerationMoments, "forward": ForwardMoments, "train_step": TrainMoments}
