"""From the last stage's hidden states to what calls and losses ask for."""

import torch

from realhf.data.batch import Packed
from realhf.nn.transformer import Transformer
from realhf.nn.vocab_parallel import vocab_parallel_entropy, vocab_parallel_logprobs


def compute_outputs(
    model: Transformer, hidden_TH: torch.Tensor, tokens: Packed,
    *, mask: Packed | None, output: str, temperature: float = 1.0, entropy: bool = False,
) -> dict[str, torch.Tensor]:
    """`logprobs` (and `entropy`) or `values` per token, or `scores` per sequence; in at least float32."""
    counts = torch.tensor(tokens.lengths, dtype=torch.long, device=hidden_TH.device)
    ends = counts.cumsum(0)
    if output == "scores":
        return {"scores": model.scores(hidden_TH[ends - 1])}
    wanted_T = torch.ones_like(tokens.values, dtype=torch.bool) if mask is None else mask.values != 0
    wanted_T[(ends - counts)[counts > 0]] = False
    positions = wanted_T.nonzero()[:, 0]

    def scatter(values_N: torch.Tensor) -> torch.Tensor:
        return values_N.new_zeros(len(hidden_TH)).index_put((positions,), values_N)

    states_NH = hidden_TH[positions - 1]
    if output == "values":
        return {"values": scatter(model.scores(states_NH))}
    logits_NV, labels_N, group = model.logits(states_NH), tokens.values[positions], model.groups.tp
    logprobs_N = vocab_parallel_logprobs(
        logits_NV, labels_N, vocab_start=model.vocab_range[0], group=group, temperature=temperature)
    outputs = {"logprobs": scatter(logprobs_N)}
    if entropy:
        outputs["entropy"] = scatter(vocab_parallel_entropy(logits_NV, group=group, temperature=temperature))
    return outputs
