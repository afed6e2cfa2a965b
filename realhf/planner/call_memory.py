"""Bytes that a rank needs for a call of any kind at the moment of its peak, besides the model's states.

The formulas follow `nn` and `engine` operator by operator; tests/planner/test_memory.py compares them with
what real processes allocate.
"""

import math

from realhf.attention.page_sizes import page_tokens
from realhf.kv_blocks import padded_size, tokens_for
from realhf.layout import ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.activation_memory import INDEX_BYTES, CallMemory, CallPieces
from realhf.planner.model_states import weights_bytes
from realhf.planner.problem import ModelRole, PlannedCall, Problem, Workload
from realhf.planner.shard import num_params
from realhf.planner.train_memory import TrainMoments


def running_memory(problem: Problem, planned: PlannedCall, call_plan: CallPlan, stage: int) -> CallMemory:
    """Return the memory that a rank of a stage needs only while the call runs.

    The cache of a generation has room for all rows that decode at once.
    """
    role = problem.roles[planned.role]
    work = planned.workload
    strategy = call_plan.layout.strategy
    memory = peak_memory(
        role, planned.kind, work.with_rows(call_plan.max_rows), strategy, stage,
        micro_batch_tokens=call_plan.micro_batch_tokens, recompute=call_plan.recompute,
        fused=problem.cluster.device_type == "cuda",
    )  # fmt: skip
    if call_plan.offload:
        memory = memory._replace(loaded_weights=weights_bytes(role, strategy, stage))
    return memory


def peak_memory(
    role: ModelRole, kind: str, workload: Workload, strategy: ParallelStrategy, stage: int,
    *, micro_batch_tokens: int, recompute: bool = False, fused: bool = False,
) -> CallMemory:  # fmt: skip
    """Return the memory that the call adds at its peak on the fullest rank of a stage.

    `fused` means CUDA's kernels and NCCL: an RMSNorm keeps its input only, attention keeps its output once,
    and collectives work in place. Otherwise the formulas are for CPU with gloo. Top-p sampling is not
    counted. If sequences differ in length, micro-batches are assumed to hold up to their limit or the longest
    sequence. All rows that decode at once are assumed to have the longest prompt.
    """
    pieces = CallPieces(role, workload, strategy, stage, micro_batch_tokens, recompute, fused)
    if kind == "generate":
        moments = generation_moments(pieces)
    elif kind == "forward":
        moments = forward_moments(pieces)
    else:
        moments = TrainMoments(pieces).by_name()
    return max(moments.values(), key=lambda memory: memory.num_bytes)


def forward_moments(pieces: CallPieces) -> dict[str, CallMemory]:
    """Return the moments of a pass without autograd."""
    num_micro_batches, tokens, response_tokens = pieces.micro_batch
    base = pieces.inputs(top_copies=1)
    if pieces.strategy.pp > 1:  # A send of hidden states is waited for two micro-batches later.
        num_sends = 0 if pieces.is_last else min(num_micro_batches, 3)
        messages = pieces.hidden_bytes(tokens) * (num_sends + (not pieces.is_first))
        base = base._replace(messages=messages)
    moments = {"block": base._replace(activations=pieces.forward_temporaries(tokens))}
    if pieces.has_logits:
        states = pieces.hidden_bytes(tokens + response_tokens)
        numel = response_tokens * pieces.widths.vocabulary
        widened = pieces.widened_head_bytes(response_tokens, backward=False)
        chunk = pieces.logit_itemsize * pieces.logits_at_once(numel)
        # The most probable tokens take a copy of the logits, running counts (int32) and three masks.
        copies = 2.75 if pieces.workload.top_k else 0
        logits = max(pieces.logits_bytes(numel, copies=copies), chunk + widened)
        moments["logits"] = base._replace(activations=states, logits=logits)
        if pieces.workload.top_k:  # Columns of micro-batches, joined, and in the order of samples.
            moments["results"] = pieces.inputs(top_copies=3)
    return moments


def generation_moments(pieces: CallPieces) -> dict[str, CallMemory]:
    """Return the moments of generation: the largest pass of prompts and decoding rows, and sampling.

    Each pipeline stage works on one cohort of samples at a time, of which `rows` decode at once. With several
    rounds, no sample is assumed to end before its last one.
    """
    work = pieces.workload
    strategy = pieces.strategy
    role = pieces.role
    widths = pieces.widths
    samples = -(-work.rounds * work.most_samples("generate", strategy.dp) // strategy.cp)
    num_cohorts = max(1, min(strategy.pp, samples, work.max_rows))
    cohort = max(1, -(-samples // num_cohorts))
    rows = min(cohort, -(-work.max_rows // num_cohorts))
    prompts = -(-rows // work.samples_per_prompt) + (rows % work.samples_per_prompt > 0)
    longest = work.longest_prompt
    all_tokens = prompts * longest
    if work.rounds > 1:  # Most rows are prefilled with what they have so far.
        all_tokens = rows * (longest + (work.rounds - 1) * work.round_tokens)
    prefill_tokens = min(all_tokens, work.prefill_tokens)
    if not pieces.fused:  # A CPU attends to what precedes a piece of a prompt with copies of it.
        prefill_tokens = max(longest, prefill_tokens)
    # All passes of prompts except the first also decode rows.
    is_single_prefill = cohort == rows and all_tokens <= work.prefill_tokens
    pass_tokens = max(prefill_tokens, rows) if is_single_prefill else prefill_tokens + rows
    results = 17.0 * samples * max(work.max_new_tokens, 1) + 8 * samples * work.prompt_tokens
    merged = 0.0
    if role.lora is not None and role.lora.merge:  # Assumed for all weights.
        merged = role.itemsize * float(num_params(role.spec, strategy, pieces.stage))
    base = CallMemory(
        samples=results + INDEX_BYTES * prefill_tokens,
        kv_cache=_kv_cache_bytes(pieces, num_cohorts=num_cohorts, cohort=cohort, rows=rows),
        merged=merged,
        messages=0.0 if strategy.pp == 1 else pieces.hidden_bytes(pass_tokens) * 2,
    )
    # Decoding gathers the rows of all ranks that share experts (nn/moe.py). Even short prompts are continued:
    # after a turn, or when a row is computed again.
    gathered = padded_size(rows) * strategy.ep if strategy.ep > 1 else 0
    activations = pieces.forward_temporaries(
        max(pass_tokens, gathered), earlier=cohort * (longest + work.max_new_tokens))
    moments = {"block": base._replace(activations=activations)}
    if pieces.is_last:
        # Logits in a wide dtype; scaled logits, exponentials and sums in float64.
        logits = float(rows * widths.vocabulary * (role.wide_itemsize + 24))
        # Copies of operands in float32 are freed before the logits exist.
        logits = max(logits, pieces.widened_bytes([(widths.hidden, widths.vocabulary)], rows))
        moments["sampling"] = base._replace(logits=logits, activations=pieces.hidden_bytes(rows))
    return moments


def _kv_cache_bytes(pieces: CallPieces, *, num_cohorts: int, cohort: int, rows: int) -> float:
    """Return the bytes of the caches of all cohorts, whose slots have the longest rows.

    The rows of each age have what they got in earlier rounds, and room for this one. A cache that is kept
    between rounds holds all rows at once, as far as they can grow.
    """
    work = pieces.workload
    samples = -(-cohort // work.rounds)
    rows = cohort if work.keeps_cache else rows
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
    token_bytes = pieces.widths.cached * pieces.role.itemsize * pieces.num_layers
    needed = float(num_cohorts * cached_tokens * token_bytes)
    return needed if work.kv_cache_gib is None else min(needed, work.kv_cache_gib * 2**30)
