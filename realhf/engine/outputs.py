"""From the last stage's hidden states to what calls and losses ask for: log-probs, entropy, values, scores."""

import torch

from realhf.data.batch import Batch, Packed
from realhf.nn.transformer import Transformer
from realhf.nn.vocab_parallel import vocab_parallel_entropy, vocab_parallel_logprobs


def predicted_positions(
    lengths: list[int], mask_T: torch.Tensor | None, *, device: torch.device
) -> torch.Tensor:
    """Positions t of packed sequences whose token is predicted from t-1: all but the first of each, where the mask is 1."""
    wanted_T = torch.ones(sum(lengths), dtype=torch.bool, device=device)
    if mask_T is not None:
        wanted_T &= mask_T.bool()
    starts = torch.tensor([0, *lengths[:-1]], device=device).cumsum(0)[: len(lengths)]
    wanted_T[starts[torch.tensor(lengths, device=device) > 0]] = False
    return wanted_T.nonzero()[:, 0]


def compute_outputs(
    model: Transformer,
    hidden_TH: torch.Tensor,
    tokens: Packed,
    *,
    mask: Packed | None,
    output: str,
    temperature: float = 1.0,
    entropy: bool = False,
) -> dict[str, torch.Tensor]:
    """`logprobs` (and `entropy`) or `values` per token, or `scores` per sequence; in at least float32."""
    if output == "scores":
        last = torch.tensor(tokens.lengths, device=hidden_TH.device).cumsum(0) - 1
        return {"scores": model.scores(hidden_TH[last])}
    mask_T = None if mask is None else mask.values
    positions = predicted_positions(tokens.lengths, mask_T, device=hidden_TH.device)
    states_NH = hidden_TH[positions - 1]
    if output == "values":
        return {"values": _scatter(model.scores(states_NH), positions, len(hidden_TH))}
    logits_NV = model.logits(states_NH)
    group, start = model.groups.tp, model.vocab_range[0]
    labels_N = tokens.values[positions]
    logprobs_N = vocab_parallel_logprobs(
        logits_NV, labels_N, vocab_start=start, group=group, temperature=temperature
    )
    outputs = {"logprobs": _scatter(logprobs_N, positions, len(hidden_TH))}
    if entropy:
        entropy_N = vocab_parallel_entropy(logits_NV, group=group, temperature=temperature)
        outputs["entropy"] = _scatter(entropy_N, positions, len(hidden_TH))
    return outputs


def _scatter(values_N: torch.Tensor, positions_N: torch.Tensor, length: int) -> torch.Tensor:
    return values_N.new_zeros(length).index_put((positions_N,), values_N)


def response_mask(batch: Batch) -> Packed | None:
    """The conventional column that restricts work to response tokens; None when the batch has none."""
    return batch.fields.get("response_mask")
