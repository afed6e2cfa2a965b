"""Drawing tokens from vocabulary shards: inverse CDF in vocabulary order, so that all layouts draw the same.

Shapes: B rows, V the rank's shard of the vocabulary, R ranks of the tensor-parallel group.
"""

import torch

from realhf.dist.group import Group
from realhf.engine.work import SamplingConfig


def sample(
    logits_BV: torch.Tensor,
    uniform_B: torch.Tensor,
    *,
    config: SamplingConfig,
    vocab_start: int,
    group: Group,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (int64) and their log-probs (float64), the same on every rank of `group`.

    Only shards' maxima and sums cross ranks (with top-k also their k largest, with top-p all logits).
    Log-probs are those at the temperature before top-k and top-p, which the trainer sees.
    """
    greedy = config.temperature == 0
    logits_BV = logits_BV.double()
    if not greedy:
        logits_BV = logits_BV / config.temperature
    max_B, argmax_B = logits_BV.max(-1)
    kept_BV = logits_BV if greedy else _filter(logits_BV, config, group=group)
    weights_BV = (kept_BV - max_B[:, None]).exp()
    kept_sum_B = weights_BV.sum(-1)
    sum_B = kept_sum_B if kept_BV is logits_BV else (logits_BV - max_B[:, None]).exp().sum(-1)
    stats_RB3 = group.all_gather(torch.stack([max_B, sum_B, kept_sum_B], -1))
    max_RB, sum_RB, kept_RB = stats_RB3.unbind(-1)
    top_B = max_RB.max(0).values
    scale_RB = (max_RB - top_B).exp()
    log_total_B = top_B + (sum_RB * scale_RB).sum(0).log()
    if greedy:
        owner_B, local_B = max_RB.argmax(0), argmax_B
    else:
        owner_B, local_B = _inverse_cdf(weights_BV, kept_RB * scale_RB, uniform_B, index=group.index)
    mine_B = owner_B == group.index
    local_B = local_B.clamp(max=logits_BV.shape[-1] - 1)
    chosen_B = logits_BV.gather(-1, local_B[:, None])[:, 0] - log_total_B
    answer_B2 = torch.stack([(local_B + vocab_start).double(), chosen_B], -1)
    answer_B2 = group.all_reduce(torch.where(mine_B[:, None], answer_B2, 0.0))
    return answer_B2[:, 0].long(), answer_B2[:, 1]


def _inverse_cdf(
    weights_BV: torch.Tensor, mass_RB: torch.Tensor, uniform_B: torch.Tensor, *, index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank whose shard holds the drawn token, and its index there if that rank is this one (`index`)."""
    end_RB = mass_RB.cumsum(0)
    start_RB = torch.cat([torch.zeros_like(end_RB[:1]), end_RB[:-1]])
    total_B = end_RB[-1]
    target_B = torch.minimum(uniform_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
    owner_B = (start_RB <= target_B).sum(0) - 1
    cdf_BV = weights_BV.cumsum(-1)
    # The shard's own CDF ends at its own sum, which its share of the mass scales to.
    scale_B = cdf_BV[:, -1] / mass_RB[index].clamp(min=torch.finfo(torch.float64).tiny)
    inside_B = (target_B - start_RB[index]) * scale_B
    # At most the last token of positive weight, should rounding lead past the shard's end.
    inside_B = torch.minimum(inside_B, torch.nextafter(cdf_BV[:, -1], torch.zeros_like(inside_B)))
    return owner_B, torch.searchsorted(cdf_BV, inside_B[:, None], right=True)[:, 0]


def _filter(logits_BV: torch.Tensor, config: SamplingConfig, *, group: Group) -> torch.Tensor:
    """Logits; outside top-k, then outside the nucleus (Holtzman et al. 2020), minus infinity."""
    if config.top_k > 0:
        k = min(config.top_k, logits_BV.shape[-1])
        largest_BK = logits_BV.topk(k, -1).values
        if k < config.top_k:  # Shards may differ in size: pad, so that all ranks send the same shape.
            largest_BK = torch.nn.functional.pad(largest_BK, (0, config.top_k - k), value=-torch.inf)
        everywhere = group.all_gather(largest_BK).transpose(0, 1).flatten(1)
        threshold_B = everywhere.topk(config.top_k, -1).values[:, -1]
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B[:, None], -torch.inf)
    if config.top_p < 1:
        ranked = _gather_vocabulary(logits_BV, group=group).sort(-1, descending=True).values
        probs = ranked.softmax(-1)
        outside = probs.cumsum(-1) - probs >= config.top_p
        threshold_B = ranked.masked_fill(outside, torch.inf).min(-1).values
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B[:, None], -torch.inf)
    return logits_BV


def _gather_vocabulary(logits_BV: torch.Tensor, *, group: Group) -> torch.Tensor:
    """Logits of all shards in one row, padded with minus infinity where shards differ in size."""
    sizes = group.all_gather(torch.tensor([logits_BV.shape[-1]], device=logits_BV.device))
    widest = int(sizes.max())
    padded = torch.nn.functional.pad(logits_BV, (0, widest - logits_BV.shape[-1]), value=-torch.inf)
    return group.all_gather(padded).transpose(0, 1).flatten(1)
