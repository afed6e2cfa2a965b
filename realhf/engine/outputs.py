"""From the last stage's hidden states to what calls and losses ask for."""

import torch

from realhf.data.batch import Packed
from realhf.dist.autograd import sum_over_group
from realhf.nn.context_parallel import token_range
from realhf.nn.transformer import Transformer
from realhf.nn.vocab_parallel import vocab_parallel_entropy, vocab_parallel_logprobs


def compute_outputs(
    model: Transformer, hidden_TH: torch.Tensor, tokens: Packed,
    *, mask: Packed | None, output: str, temperature: float = 1.0, entropy: bool = False,
) -> dict[str, torch.Tensor]:
    """`logprobs` (and `entropy`) or `values` per token, or `scores` per sequence; in at least float32.

    Of the hidden states every rank of a cp group has its own tokens', of the outputs all.
    """
    counts = torch.tensor(tokens.lengths, dtype=torch.long, device=hidden_TH.device)
    ends, cp = counts.cumsum(0), model.groups.cp
    start, stop = token_range(len(tokens.values), cp)

    def scatter(values_N: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
        return sum_over_group(values_N.new_zeros(size).index_put((positions,), values_N), cp)

    if output == "scores":
        here = ((ends > start) & (ends <= stop)).nonzero()[:, 0]
        return {"scores": scatter(model.scores(hidden_TH[ends[here] - 1 - start]), here, len(ends))}
    wanted_T = torch.ones_like(tokens.values, dtype=torch.bool) if mask is None else mask.values != 0
    wanted_T[(ends - counts)[counts > 0]] = False
    positions, num_tokens = wanted_T.nonzero()[:, 0], len(wanted_T)
    positions = positions[(positions > start) & (positions <= stop)]  # The state before chooses a token.
    states_NH = hidden_TH[positions - 1 - start]
    if output == "values":
        return {"values": scatter(model.scores(states_NH), positions, num_tokens)}
    logits_NV, labels_N, group = model.logits(states_NH), tokens.values[positions], model.groups.tp
    logprobs_N = vocab_parallel_logprobs(
        logits_NV, labels_N, vocab_start=model.vocab_range[0], group=group, temperature=temperature)
    outputs = {"logprobs": scatter(logprobs_N, positions, num_tokens)}
    if entropy:
        entropy_N = vocab_parallel_entropy(logits_NV, group=group, temperature=temperature)
        outputs["entropy"] = scatter(entropy_N, positions, num_tokens)
    return outputs
