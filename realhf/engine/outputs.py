"""From the last stage's hidden states to what calls and losses ask for."""

import torch

from realhf.data.batch import Batch, Packed
from realhf.nn.transformer import Transformer
from realhf.nn.vocab_parallel import vocab_parallel_entropy, vocab_parallel_logprobs


def _predicted_positions(lengths: list[int], mask: Packed | None, device: torch.device) -> torch.Tensor:
    """Positions whose token is predicted from the one before: all but each first one, where the mask is 1."""
    wanted_T = torch.ones(sum(lengths), dtype=torch.bool, device=device)
    if mask is not None:
        wanted_T &= mask.values.bool()
    starts = torch.tensor([0, *lengths[:-1]], device=device).cumsum(0)[: len(lengths)]
    wanted_T[starts[torch.tensor(lengths, device=device) > 0]] = False
    return wanted_T.nonzero()[:, 0]


def compute_outputs(
    model: Transformer, hidden_TH: torch.Tensor, tokens: Packed,
    *, mask: Packed | None, output: str, temperature: float = 1.0, entropy: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """`logprobs` (and `entropy`) or `values` per token, or `scores` per sequence; in at least float32."""
    if output == "scores":
        last = torch.tensor(tokens.lengths, device=hidden_TH.device).cumsum(0) - 1
        return {"scores": model.scores(hidden_TH[last])}
    positions = _predicted_positions(tokens.lengths, mask, hidden_TH.device)

    def scatter(values_N: torch.Tensor) -> torch.Tensor:
        return values_N.new_zeros(len(hidden_TH)).index_put((positions,), values_N)

    states_NH = hidden_TH[positions - 1]
    if output == "values":
        return {"values": scatter(model.scores(states_NH))}
    logits_NV = model.logits(states_NH)
    group, start = model.groups.tp, model.vocab_range[0]
    labels_N = tokens.values[positions]
    logprobs_N = vocab_parallel_logprobs(
        logits_NV, labels_N, vocab_start=start, group=group, temperature=temperature
    )
    outputs = {"logprobs": scatter(logprobs_N)}
    if entropy:
        outputs["entropy"] = scatter(vocab_parallel_entropy(logits_NV, group=group, temperature=temperature))
    return outputs


def response_mask(batch: Batch) -> Packed | None:
    """The conventional column that restricts work to response tokens; None when the batch has none."""
    return batch.fields.get("response_mask")
