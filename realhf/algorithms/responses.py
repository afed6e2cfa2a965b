"""Sums and means over the responses of packed samples. The suffix T means one entry per packed token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from statistics import fmean, pstdev
from typing import TYPE_CHECKING

from realhf.data.order import prompt_of

if TYPE_CHECKING:
    from torch import Tensor

    from realhf.data.batch import Batch, Packed


REWARD_LOGS = ("reward_scores", "reward_metrics")
"""Columns with a dict for each sample: the value of each reward by name, and what rewards have logged."""


def without_dropped(mask: Packed, values_T: Tensor) -> tuple[Packed, Tensor]:
    """Return the mask and the values with 0 for tokens that are left out, whose values are NaN.

    Samples whose reward has failed (RewardLimits), tokens that are too old (AgeLimit), and what else has an
    advantage of NaN, are left out.
    """
    dropped_T = values_T.isnan()
    return mask.like(mask.values.masked_fill(dropped_T, 0.0)), values_T.masked_fill(dropped_T, 0.0)


def truncated_tokens(batch: Batch) -> Tensor:
    """Return which packed tokens are those of responses that were cut by a limit, before they had ended."""
    mask = batch["response_mask"]
    return per_token(batch["finished"] == 0, mask) & mask.values.bool()


def num_trained_tokens(mask: Packed) -> Tensor:
    """Return how many tokens of every response the loss counts, shape (num_samples,).

    Inserted tokens, and those that `without_dropped` left out, are not among them; `response_lengths` counts
    them all.
    """
    return response_sums(mask.values, mask)


def response_sums(values_T: Tensor, mask: Packed) -> Tensor:
    """Return the sum over the response tokens of every sample, shape (num_samples,)."""
    masked_T = values_T if values_T is mask.values else values_T * mask.values
    return masked_T.new_zeros(len(mask)).index_add(0, _sample_of_tokens(mask), masked_T)


def per_token(values: Tensor, mask: Packed) -> Tensor:
    """Repeat every sample's value for each of its tokens, shape (num_tokens,)."""
    return values[_sample_of_tokens(mask)]


def _sample_of_tokens(mask: Packed) -> Tensor:
    """Return the index of every token's sample, without making the host wait for the device."""
    counts = mask.values.new_tensor(mask.lengths).long()
    return counts.new_tensor(range(len(mask))).repeat_interleave(counts, output_size=len(mask.values))


def deviations(values: Tensor) -> Tensor:
    """Return the values minus their mean over the last dim, in float64; exactly 0 where all are equal. NaN
    values do not count and stay.

    The mean of equal numbers may differ from them by rounding. So the first number is subtracted before: the
    difference of equal numbers is 0, and so is the mean of such differences.
    """
    is_number = ~values.isnan()
    first = values.gather(-1, is_number.long().argmax(-1, keepdim=True))
    from_first = values.double() - first.double()
    counts = is_number.sum(-1, keepdim=True).clamp(min=1)
    return from_first - from_first.nansum(-1, keepdim=True) / counts


def standard_deviation(values: Tensor, *, correction: int = 0) -> Tensor:
    """Return the standard deviation over the last dim, in float64; exactly 0 if all values are equal. NaN
    values do not count.

    `correction` is 0 for the standard deviation of a population and 1 for that of a sample.
    """
    counts = (~values.isnan()).sum(-1) - correction
    return (deviations(values).square().nansum(-1) / counts.clamp(min=1)).sqrt()


def normalized(values: Tensor, *, correction: int = 0, eps: float = 1e-8) -> Tensor:
    """Return values with mean 0 and variance 1, in float64; NaN values do not count and stay.

    Equal values become exactly 0. `correction` is that of `standard_deviation`.
    """
    values = values.double()
    is_number = ~values.isnan()
    numbers = values[is_number]
    if len(numbers) <= correction:  # There is no deviation: a single value is its own mean.
        return values * 0
    ratios = deviations(numbers) / (standard_deviation(numbers, correction=correction) + eps)
    return values.masked_scatter(is_number, ratios)


def rollout_metrics(batch: Batch, *, group_size: int = 1) -> dict[str, float]:
    """Return reward and length statistics of a batch with `score`, `response_mask` and `finished`.

    With several samples to each prompt, `reward/group_std` is the mean of the deviations within groups: the
    spread from which the model learns, while `reward/std` has the differences between prompts as well. If the
    batch has the columns of `REWARD_LOGS`, there are the means of all rewards over the samples to which they
    apply, too.
    """
    if not len(batch):
        return {}
    score = batch["score"].double()
    failed = score.isnan()
    failures = {"reward/failed": failed.double().mean().item()} if failed.any() else {}
    if failed.all():
        return failures | length_metrics(batch)
    spread = _group_std(batch.ids, score.tolist(), group_size)
    score = score[~failed]
    return failures | _reward_logs(batch) | {
        "reward/mean": score.mean().item(),
        "reward/std": standard_deviation(score).item(),
        **spread, **length_metrics(batch)}


def _group_std(ids: Sequence[int], scores: Sequence[float], group_size: int) -> dict[str, float]:
    """Return the mean over prompts of the deviation of their scores, without failed ones."""
    groups: dict[int, list[float]] = {}
    for sample, score in zip(ids, scores, strict=True):
        if not isnan(score):
            groups.setdefault(prompt_of(sample, group_size), []).append(score)
    spreads = [pstdev(group) for group in groups.values() if len(group) > 1]
    return {"reward/group_std": fmean(spreads)} if spreads else {}


def _reward_logs(batch: Batch) -> dict[str, float]:
    """Return the mean of what each reward has logged, and mean and deviation of each reward by name.

    A sample to which an environment has not given a reward of a name has 0 of it.
    """
    logged, scores = (batch.fields.get(key, []) for key in ("reward_metrics", "reward_scores"))
    metrics = {name: fmean(values) for name, values in _by_name(logged).items()}
    nothing = dict.fromkeys((name for row in scores for name in row), 0.0)
    for name, values in _by_name([nothing | row for row in scores]).items():
        metrics |= {f"reward/{name}/mean": fmean(values), f"reward/{name}/std": pstdev(values)}
    return metrics


def _by_name(rows: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """Return the values that are not None by name."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                found.setdefault(name, []).append(value)
    return found


def length_metrics(batch: Batch) -> dict[str, float]:
    """Return statistics of the responses' lengths of a batch with `response_mask` and `finished`."""
    lengths = batch["response_mask"].response_lengths()
    interrupted = lengths > num_trained_tokens(batch["response_mask"])
    interruptions = {}
    logged = batch.fields.get("reward_metrics", [])
    if interrupted.any() and not any("environment/turns" in metrics for metrics in logged):
        interruptions["response_length/interrupted"] = interrupted.double().mean().item()
    return interruptions | {
        "response_length/mean": lengths.double().mean().item(),
        "response_length/max": float(lengths.max()),
        "response_length/clip_ratio": 1.0 - batch["finished"].double().mean().item()}
