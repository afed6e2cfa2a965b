"""Calls that several algorithms share: generate, score, reference log-probs, evaluation."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from realhf.engine.work import Generate, HostFunction, LogProbs, SamplingConfig, Scores
from realhf.graph import DataflowGraph, FunctionCall
from realhf.rewards.scoring import RewardCall, RewardFunction, reward_columns

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch, Packed


def actor_generate(sampling: SamplingConfig, *, max_rows: int = 512) -> FunctionCall:
    return FunctionCall(
        name="actor_generate",
        kind="generate",
        role="actor",
        inputs=("prompt_ids",),
        outputs=("sequence_ids", "response_mask", "gen_logprobs", "finished"),
        work=Generate(sampling=sampling, max_rows=max_rows),
    )


def log_probs(role: str, *, output: str, temperature: float = 1.0) -> FunctionCall:
    """`<role>_forward`: log-probs of the responses under a role."""
    return FunctionCall(
        name=f"{role}_forward",
        kind="forward",
        role=role,
        inputs=("sequence_ids", "response_mask"),
        outputs=(output,),
        work=LogProbs(temperature=temperature or 1.0),
    )


def reward_forward(function: RewardFunction | None, scores: Scores | None = None) -> FunctionCall:
    """Scores by a reward function, or by the role `reward` when there is none."""
    if function is None:
        work = scores or Scores()
        return FunctionCall("reward_forward", "forward", ("sequence_ids",), ("score",), role="reward", work=work)
    columns = reward_columns(function)
    return FunctionCall(
        name="reward_forward",
        kind="host",
        inputs=("prompt", "sequence_ids", "response_mask", *columns),
        outputs=("score", "completion"),
        work=HostFunction(RewardCall(function, columns), splittable=True),
    )


def graph_of(*calls: FunctionCall) -> DataflowGraph:
    """The graph of these calls over a dataset that brings the prompts and whatever columns a reward function
    names.
    """
    functions = [call.work.function for call in calls if isinstance(call.work, HostFunction)]
    columns = [
        name for function in functions if isinstance(function, RewardCall) for name in function.columns
    ]
    keys = dict.fromkeys(["prompt_ids", "prompt", *columns])
    read = {key for call in calls for key in call.inputs}
    return DataflowGraph(calls, tuple(key for key in keys if key in read))


def greedy_evaluation(sampling: SamplingConfig, function: RewardFunction | None) -> DataflowGraph:
    """Greedy answers to held-out prompts, and their scores."""
    calls = [actor_generate(replace(sampling, temperature=0.0, top_k=0, top_p=1.0)), reward_forward(function)]
    if function is None:
        decode = HostFunction(_decode, splittable=True)
        calls.append(
            FunctionCall(
                "eval_decode", "host", ("sequence_ids", "response_mask"), ("completion",), work=decode
            )
        )
    return graph_of(*calls)


def _decode(batch: Batch, context: Any) -> dict[str, list[str]]:
    pairs = zip(batch["sequence_ids"].split(), batch["response_mask"].split(), strict=True)
    return {
        "completion": [
            context.tokenizer.decode(t[m.bool()].tolist(), skip_special_tokens=True) for t, m in pairs
        ]
    }


def response_counts(mask: Packed) -> Tensor:
    """Response tokens per sample, shape (num_samples,)."""
    return mask.values.new_tensor([float(part.sum()) for part in mask.split()])


def per_token(values: Tensor, mask: Packed) -> Tensor:
    """Spreads one value per sample over its tokens, shape (num_tokens,)."""
    return values.repeat_interleave(values.new_tensor(mask.lengths).long())


def rollout_metrics(batch: Batch) -> dict[str, float]:
    """Reward and length statistics of a batch with `score`, `response_mask` and `finished`."""
    score, lengths = batch["score"].double(), response_counts(batch["response_mask"])
    return {
        "reward/mean": score.mean().item(),
        "reward/std": score.std(correction=0).item(),
        "response_length/mean": lengths.mean().item(),
        "response_length/max": lengths.max().item(),
        "response_length/clip_ratio": 1.0 - batch["finished"].double().mean().item(),
    }
