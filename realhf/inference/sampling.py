"""Sampling from vocabulary shards: inverse CDF in vocabulary order, the same algorithm on all layouts.

In float64 and float32 all layouts draw the same tokens. In bfloat16 a token can flip where rounding moves a
boundary between two tokens, and then that sample differs.

Random numbers are counter-based: Philox4x32-10 (Salmon et al., SC 2011). Ranks exchange only the maxima and
sums of their logits (with top-k also the k largest, with top-p all of them). Nothing is sorted: see
`nucleus_threshold`.

LogitProcessors change the logits before sampling, by what each sample's prompt and response have. They are
those of transformers: SequenceBiasLogitsProcessor (for single tokens), RepetitionPenaltyLogitsProcessor,
NoBadWordsLogitsProcessor and MinNewTokensLengthLogitsProcessor, in this order, with OpenAI's presence and
frequency penalties after the repetition penalty, as in vLLM.

Shape suffixes: B rows, V the rank's shard of the vocabulary, C chunks of it, L tokens of a chunk, R ranks of
the tensor-parallel group. In LogitProcessors: R rows of the tables, P last tokens of a sample, W bad words of
equal length.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realhf.calls import SamplingConfig
from realhf.devices.pinned import upload
from realhf.distributed.group import Group
from realhf.inference.kv_cache import Integers
from realhf.nn.fused import chains_of

if TYPE_CHECKING:
    from realhf.inference.response_buffer import ResponseBuffer
    from realhf.nn.transformer import Transformer

Words = NDArray[np.uint64]
Floats = NDArray[np.float64]
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_CHUNK = 256  # Vocabulary tokens in a chunk, whose probabilities are summed first.
_PART_CHUNKS = 16  # Chunks that a program of a GPU sums.
_THRESHOLD_BLOCK = 4096  # Logits that a program of a GPU compares at a time.
_BLOCK_NUMEL = 1 << 18  # Logits that are processed at a time, so that they stay in a core's cache.
_CUDA_FACTOR = 256  # A GPU processes this many times more, because each block costs kernel launches.
_ROUNDING = 1.5 * 2.0**18
"""Added to a float64 number below 2^17 and taken away again, it rounds the number to a multiple of 2^-34."""
_FEW_TOKENS = 1 << 14
"""Up to so many tokens, a histogram by 8 bits of the logits is faster than one by 16."""
_AHEAD = 16  # Positions for which random numbers are computed at a time.
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox_4x32(counter: Sequence[Words], key: tuple[int, int], *, rounds: int = 10) -> list[Words]:
    """Return four 32-bit words, as uint64 arrays, for a counter of four words and a key of two numbers."""
    even = np.stack(counter[::2])
    odd = np.stack(counter[1::2])
    rounds_before = np.arange(rounds, dtype=np.uint64)[:, None, None]
    for keys in np.array([key], np.uint64).T + rounds_before * _KEY_STEPS & _MASK:
        products = (even * _MULTIPLIERS)[::-1]
        even, odd = products >> _HALF ^ odd ^ keys, products & _MASK
    return [even[0], odd[0], even[1], odd[1]]


def uniform(seed: int, *, sample_ids: Integers, positions: Integers) -> Floats:
    """Return float64 numbers in [0, 1) with 53 random bits, a function of (seed, sample id, position) alone.

    They are computed on the host, which knows sample ids and positions before the GPU has the logits.
    """
    ids = sample_ids.astype(np.uint64)
    position_words = positions.astype(np.uint64)
    counter = [ids & _MASK, ids >> _HALF, position_words, np.zeros_like(position_words)]
    words = philox_4x32(counter, (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF))
    bits = words[0] >> np.uint64(5) << np.uint64(26) | words[1] >> np.uint64(6)
    return bits.astype(np.float64) / 2.0**53


def stream_seed(seed: int, stream: str) -> int:
    """Return the seed of one stream (a call, by its name), which has its own random numbers."""
    return (seed << 32) | zlib.crc32(stream.encode())


class Draws:
    """The numbers of `uniform` for samples that advance one position at a time, from any position.

    They are computed several positions ahead, because computing a few takes as long as computing one.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._numbers = np.zeros((0, _AHEAD))
        self._starts = np.zeros(0, np.int64)
        """The first position of each row's numbers, a multiple of `_AHEAD`; -1: the row has none yet."""

    def __call__(self, rows: Integers, *, sample_ids: Integers, positions: Integers) -> Floats:
        """Return one number per sample. A sample must be at the same row in every call."""
        if (lacking := int(rows.max(initial=-1)) + 1 - len(self._numbers)) > 0:
            more = max(lacking, len(self._numbers) // 8)
            self._numbers = np.pad(self._numbers, ((0, more), (0, 0)))
            self._starts = np.pad(self._starts, (0, more), constant_values=-1)
        column = positions % _AHEAD
        starts = positions - column
        if len(fresh := np.flatnonzero(self._starts[rows] != starts)):
            ahead = starts[fresh, None] + np.arange(_AHEAD)
            ids = np.repeat(sample_ids[fresh], _AHEAD)
            draws = uniform(self._seed, sample_ids=ids, positions=ahead.flatten())
            self._numbers[rows[fresh]] = draws.reshape(-1, _AHEAD)
            self._starts[rows[fresh]] = starts[fresh]
        return self._numbers[rows, column]


def for_vocabulary(config: SamplingConfig, vocab_size: int) -> SamplingConfig:
    """Return the settings without a `top_k` that keeps every token."""
    return replace(config, top_k=0) if config.top_k >= vocab_size else config


def sample(
    logits_BV: Tensor, uniform_B: Tensor, *, config: SamplingConfig, vocab_start: int, group: Group,
    processing: Callable[[Tensor], Tensor] | None = None, widest_shard: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return token ids (int64) and their log-probs (float64), on all ranks of `group`.

    Logits that are NaN or infinite give a log-prob of NaN, and some token of the vocabulary.

    The ranks hold shards of the vocabulary; this rank's shard begins at token `vocab_start`, and the largest
    shard has `widest_shard` tokens (a group of one rank need not say). `processing` changes the logits from
    which tokens are drawn. The log-probs are those of `logits_BV` at the temperature, without processing and
    filters. Exponentials are computed in the logits' dtype and summed in float64.
    """
    greedy = config.temperature == 0
    processed_BV = logits_BV if processing is None else processing(logits_BV)
    if config.temperature not in (0, 1):
        logits_BV = logits_BV / config.temperature
        processed_BV = logits_BV if processing is None else processed_BV / config.temperature
    processed_max_B, best_B = processed_BV.max(-1)
    max_B = processed_max_B
    if processing is not None:
        max_B = logits_BV.max(-1).values
        # All tokens of a shard may be forbidden, and then have minus infinity.
        processed_max_B = processed_max_B.clamp(min=torch.finfo(max_B.dtype).min)
    allowed_BV = processed_BV if greedy else _filter(
        processed_BV, processed_max_B, config, group=group, widest_shard=widest_shard)
    cdf_BC = _chunk_sums(allowed_BV, processed_max_B).cumsum(-1)
    sum_B = cdf_BC[:, -1] if allowed_BV is logits_BV else _chunk_sums(logits_BV, max_B).sum(-1)
    shard = _Shard(logits_BV, max_B, sum_B, allowed_BV, processed_max_B, cdf_BC, best_B)
    if group.size == 1:
        return _sample_whole(shard, None if greedy else uniform_B)
    return _sample_sharded(shard, None if greedy else uniform_B, vocab_start=vocab_start, group=group)


def draw_tokens(
    model: Transformer, hidden_BH: Tensor, uniform_B: Tensor, *, config: SamplingConfig,
    processing: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the tokens and log-probs that `sample` draws from the logits of these hidden states."""
    tp = model.groups.tp
    if processing is None and tp.size == 1 and chains_of(hidden_BH) is not None:
        head = model.head
        return draw_by_kernels(
            head.product(hidden_BH), uniform_B, config=config, scale=head.scale, softcap=head.softcap)
    return sample(
        model.logits(hidden_BH), uniform_B, config=config, vocab_start=model.vocab_range[0], group=tp,
        processing=processing, widest_shard=-(-model.config.vocab_size // tp.size))


def draw_by_kernels(
    product_BV: Tensor, uniform_B: Tensor, *, config: SamplingConfig, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return what `sample` returns for the logits that `Head.to_logits` makes of `product_BV`.

    There are two kernels, or three with filters. This rank has the whole vocabulary.
    """
    from realhf.inference import sampling_kernels as kernels

    assert product_BV.is_contiguous()
    num_rows, size = product_BV.shape
    num_parts = -(-size // (_CHUNK * _PART_CHUNKS))
    filters = config.temperature != 0 and (config.top_k > 0 or config.top_p < 1 or config.min_p > 0)
    part_most, threshold_B = (
        product_BV.new_empty(shape, dtype=torch.float32) for shape in ((num_rows, num_parts), num_rows))
    part_best = torch.empty_like(part_most, dtype=torch.int32)
    part_sum = torch.empty_like(part_most, dtype=torch.float64)
    chunk_sum = part_sum.new_empty(num_rows, num_parts, _PART_CHUNKS)
    logprobs_B = torch.empty_like(uniform_B)
    tokens_B = torch.empty_like(uniform_B, dtype=torch.int64)
    of_logits = float(scale), float(softcap or 1.0), float(config.temperature or 1.0)
    sizes = {"CHUNKS": _PART_CHUNKS, "CHUNK": _CHUNK, "FILTERS": filters, "HAS_SOFTCAP": softcap is not None}
    if filters:
        kernels.thresholds[(num_rows,)](
            product_BV, threshold_B, *of_logits, float(config.top_p),
            log(config.min_p) if config.min_p else float("-inf"), size, config.top_k,
            HAS_SOFTCAP=softcap is not None, BLOCK_L=_THRESHOLD_BLOCK, num_warps=16)
    parts = (part_most, part_best, part_sum, chunk_sum)
    kernels.part_sums[(num_rows, num_parts)](
        product_BV, threshold_B, *parts, *of_logits, size, num_parts, **sizes)
    kernels.draw[(num_rows,)](
        product_BV, threshold_B, *parts, uniform_B, tokens_B, logprobs_B, *of_logits, size, num_parts,
        IS_GREEDY=config.temperature == 0, BLOCK_P=1 << (num_parts - 1).bit_length(), **sizes)
    return tokens_B, logprobs_B


class _Shard(NamedTuple):
    """A rank's shard of the vocabulary: its logits at the temperature, and those of the allowed tokens,
    which may be drawn after processing and filters. Sums are those of exp(value - maximum of the shard)."""

    logits_BV: Tensor
    max_B: Tensor
    sum_B: Tensor
    allowed_BV: Tensor
    allowed_max_B: Tensor
    allowed_cdf_BC: Tensor  # Cumulative sums, up to the end of each chunk of the vocabulary.
    best_B: Tensor  # The allowed token with the largest value, numbered within the shard.

    def chosen_logits(self, tokens_B: Tensor) -> Tensor:
        return self.logits_BV.gather(-1, tokens_B[:, None])[:, 0]


def _sample_whole(shard: _Shard, uniform_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return tokens and log-probs of a rank with the whole vocabulary; the best ones without `uniform_B`."""
    tokens_B = shard.best_B
    if uniform_B is not None:
        tokens_B = _inverse_cdf(shard, uniform_B * shard.allowed_cdf_BC[:, -1])
    return tokens_B, shard.chosen_logits(tokens_B).double().sub_(shard.max_B).sub_(shard.sum_B.log())


def _sample_sharded(
    shard: _Shard, uniform_B: Tensor | None, *, vocab_start: int, group: Group
) -> tuple[Tensor, Tensor]:
    """Return tokens and log-probs on all ranks that share the vocabulary; the best ones without `uniform_B`.

    Every rank finds out which rank owns the shard that holds the chosen token. The owner then finds the token
    in its shard, and sends it and its log-prob to the others.
    """
    sums = _gather_sums(shard, group=group)
    if uniform_B is None:
        owner_B = sums.allowed_max_RB.argmax(0)
        local_B = shard.best_B
    else:
        mass_RB = sums.allowed_mass_RB
        owner_B, inside_B = _in_shard(shard.allowed_cdf_BC, mass_RB, uniform_B, index=group.index)
        local_B = _inverse_cdf(shard, inside_B)
    logprobs_B = shard.chosen_logits(local_B) - sums.log_total_B
    answer_2B = torch.stack([(local_B + vocab_start).to(logprobs_B.dtype), logprobs_B])
    tokens_B, logprobs_B = group.all_reduce(torch.where(owner_B == group.index, answer_2B, 0.0))
    return tokens_B.long(), logprobs_B + sums.log_total_B * 0  # NaN where no rank owns the token.


class _ShardSums(NamedTuple):
    """The maxima and sums of all shards of the vocabulary (see _Shard)."""

    max_RB: Tensor
    sum_RB: Tensor
    allowed_max_RB: Tensor
    allowed_sum_RB: Tensor

    @property
    def log_total_B(self) -> Tensor:
        """The logarithm of the sum of exp(logit) over the whole vocabulary."""
        top_B = self.max_RB.max(0).values
        return top_B + (self.sum_RB * (self.max_RB - top_B).exp()).sum(0).log()

    @property
    def allowed_mass_RB(self) -> Tensor:
        """The sums of the allowed tokens, on one scale for all shards."""
        return self.allowed_sum_RB * (self.allowed_max_RB - self.allowed_max_RB.max(0).values).exp()


def _gather_sums(shard: _Shard, *, group: Group) -> _ShardSums:
    """Return the sums of all shards, gathered in one message."""
    columns = (shard.max_B, shard.sum_B, shard.allowed_max_B, shard.allowed_cdf_BC[:, -1])
    sums_4B = torch.stack([column.to(shard.sum_B.dtype) for column in columns])
    return _ShardSums(*group.all_gather(sums_4B).unbind(1))


def _chunk_sums(logits_BV: Tensor, max_B: Tensor) -> Tensor:
    """Return the sums of exp(logits - max) over each chunk of the vocabulary: sums_BC in float64."""
    blocks = []
    whole = logits_BV.shape[1] // _CHUNK * _CHUNK
    for rows in rows_at_a_time(logits_BV):
        weights = (logits_BV[rows] - max_B[rows, None]).exp_()
        sums = [weights[:, :whole].unflatten(1, (-1, _CHUNK)).sum(-1)] if whole else []
        if whole < weights.shape[1]:
            sums.append(weights[:, whole:].sum(-1, keepdim=True))
        blocks.append(sums[0] if len(sums) == 1 else torch.cat(sums, dim=1))
    return (blocks[0] if len(blocks) == 1 else torch.cat(blocks)).double()


def rows_at_a_time(logits_BV: Tensor) -> Iterator[slice]:
    numel = _BLOCK_NUMEL * (_CUDA_FACTOR if logits_BV.is_cuda else 1)
    step = max(1, numel // max(1, logits_BV.shape[1]))
    for start in range(0, len(logits_BV), step):
        yield slice(start, start + step)


def _in_shard(cdf_BC: Tensor, mass_RB: Tensor, uniform_B: Tensor, *, index: int) -> tuple[Tensor, Tensor]:
    """Return the rank whose shard holds the drawn token, and the draw's value in the CDF of this shard.

    The value has a meaning on that rank only. `index` is that of this rank.
    """
    end_RB = mass_RB.cumsum(0)
    start_RB = torch.cat([torch.zeros_like(end_RB[:1]), end_RB[:-1]])
    total_B = end_RB[-1]
    target_B = torch.minimum(uniform_B * total_B, _before(total_B))
    owner_B = (start_RB <= target_B).sum(0) - 1
    # Shards' masses are on one scale; this shard's CDF ends at its own sum.
    scale_B = cdf_BC[:, -1] / mass_RB[index].clamp(min=torch.finfo(torch.float64).tiny)
    return owner_B, (target_B - start_RB[index]) * scale_B


def _inverse_cdf(shard: _Shard, inside_B: Tensor) -> Tensor:
    """Return the token of the shard at this value of its CDF: find the chunk first, then the token in it."""
    logits_BV = shard.allowed_BV
    max_B = shard.allowed_max_B
    cdf_BC = shard.allowed_cdf_BC
    if cdf_BC.shape[1] == 1:
        cdf_BV = (logits_BV - max_B[:, None]).double().exp_().cumsum(-1)
        return _find(cdf_BV, inside_B[:, None] * (cdf_BV[:, -1:] / cdf_BC))[:, 0]
    chunk_B1 = _find(cdf_BC, inside_B[:, None])
    start_B1 = torch.where(chunk_B1 > 0, cdf_BC.gather(1, (chunk_B1 - 1).clamp(min=0)), 0.0)
    inside_B1 = torch.minimum(inside_B[:, None], _before(cdf_BC[:, -1:])) - start_B1
    at_BL = torch.arange(_CHUNK, device=logits_BV.device)[: logits_BV.shape[1]] + chunk_B1 * _CHUNK
    last = logits_BV.shape[1] - 1
    weights_BL = (logits_BV.gather(1, at_BL.clamp(max=last)) - max_B[:, None]).double().exp()
    cdf_BL = weights_BL.masked_fill(at_BL > last, 0).cumsum(-1)
    sum_B1 = cdf_BC.gather(1, chunk_B1) - start_B1
    # (The two ways to sum a chunk differ in the last digits.)
    inside_B1 = inside_B1 * (cdf_BL[:, -1:] / sum_B1.clamp(min=torch.finfo(torch.float64).tiny))
    return at_BL.gather(1, _find(cdf_BL, inside_B1))[:, 0].clamp(max=last)


def _find(cdf_BC: Tensor, inside_B1: Tensor) -> Tensor:
    """Return the first index at which the CDF is above the value. If rounding leads past the end, return the
    last index of positive weight."""
    inside_B1 = torch.minimum(inside_B1, _before(cdf_BC[:, -1:]))
    return torch.searchsorted(cdf_BC, inside_B1, right=True).clamp_(max=cdf_BC.shape[1] - 1)


def _before(x: Tensor) -> Tensor:
    return torch.nextafter(x, torch.zeros_like(x))


def _filter(
    logits_BV: Tensor, max_B: Tensor, config: SamplingConfig, *, group: Group, widest_shard: int
) -> Tensor:
    """Set logits outside top-k to minus infinity, then those outside the nucleus (Holtzman et al. 2020), then
    those below `min_p` times the highest probability (Nguyen et al. 2024). `max_B` is the shard's maximum."""
    size = logits_BV.shape[-1]
    if config.top_k > 0:
        largest = logits_BV.topk(min(config.top_k, size), -1).values
        if group.size > 1:
            largest = _gather(largest, width=config.top_k, group=group).topk(config.top_k, -1).values
        threshold_B = largest[:, -1]
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B[:, None], -torch.inf)
    if config.top_p < 1:
        assert widest_shard >= size or group.size == 1, "shards of several ranks are padded to the widest"
        whole_BV = logits_BV
        if group.size > 1:
            whole_BV = _gather(logits_BV, width=max(widest_shard, size), group=group)
        threshold_B = nucleus_threshold(whole_BV, config.top_p)
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B[:, None], -torch.inf)
    if config.min_p > 0:
        threshold_B = (max_B if group.size == 1 else group.all_gather(max_B).amax(0)) + log(config.min_p)
        logits_BV = logits_BV.masked_fill(logits_BV < threshold_B[:, None], -torch.inf)
    return logits_BV


def nucleus_threshold(logits_BV: Tensor, top_p: float) -> Tensor:
    """Return the least logit of each row's nucleus: the least value x such that all larger ones together have
    less than `top_p` of the probability. So of tokens with equal logits, all are in the nucleus, or none.

    Nothing is sorted. Probabilities are rounded to multiples of 2^-34 of the largest one, so that their sums
    are exact, and the threshold is the same in any order of the vocabulary.
    """
    num_bits = 16 if logits_BV.shape[1] > _FEW_TOKENS else 8
    blocks = [
        _nucleus_threshold(logits_BV[rows], top_p, num_bits=num_bits) for rows in rows_at_a_time(logits_BV)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _nucleus_threshold(logits_BV: Tensor, top_p: float, *, num_bits: int) -> Tensor:
    """Find the threshold `num_bits` at a time: a histogram of the probabilities by the highest bits of the
    logits tells which bits it has, and the next one, of logits that have these, the next bits."""
    max_B1 = logits_BV.amax(-1, keepdim=True)
    mass_BV = (logits_BV - max_B1).exp_().double().add_(_ROUNDING).sub_(_ROUNDING)
    target_B1 = mass_BV.sum(-1, keepdim=True) * top_p
    integers = torch.int64 if logits_BV.dtype == torch.float64 else torch.int32
    keys_BV = _in_order(logits_BV.contiguous().view(integers))
    num_digits = 1 << num_bits
    start_B1 = torch.full_like(max_B1, -num_digits // 2, dtype=integers)  # The first of the keys in question.
    above_B1 = torch.zeros_like(target_B1)  # The mass of those beyond them.
    for shift in range(8 * integers.itemsize - num_bits, -1, -num_bits):
        # The first and the last column are for keys that are not in question any more.
        mass_BD = mass_BV.new_zeros(len(keys_BV), num_digits + 2).scatter_add_(
            1, (keys_BV >> shift).sub_(start_B1).clamp_(-1, num_digits).add_(1).long(), mass_BV)
        rising_BD = mass_BD[:, 1:-1].cumsum(-1)
        larger_BD = above_B1 + rising_BD[:, -1:] - rising_BD
        digit_B1 = (larger_BD >= target_B1).sum(-1, keepdim=True).clamp_(max=num_digits - 1)
        above_B1 = larger_BD.gather(1, digit_B1)
        start_B1 = start_B1 + digit_B1.to(integers)
        if shift:
            start_B1 = start_B1 << num_bits
    return _in_order(start_B1).view(logits_BV.dtype)[:, 0]


def _in_order(bits: Tensor) -> Tensor:
    """Return integers that rise with the numbers of which these are the bits; or the reverse."""
    sign_shift = 8 * bits.itemsize - 1
    return (bits >> sign_shift).bitwise_and_((1 << sign_shift) - 1).bitwise_xor_(bits)


def _gather(logits: Tensor, *, width: int, group: Group) -> Tensor:
    """Gather the logits of all shards in one row, each padded to `width`, as shards may differ in size."""
    padded = torch.nn.functional.pad(logits, (0, width - logits.shape[-1]), value=-torch.inf)
    return group.all_gather(padded).transpose(0, 1).flatten(1)


class TokenHistory:
    """Tables of the tokens that running samples have, on the ranks that sample.

    A sample has a row from its first token of a round until it ends, wherever it runs, and also while it has
    no slot. Only the tables that are wanted exist.
    """

    def __init__(
        self, vocab_range: tuple[int, int], device: torch.device,
        *, counts: bool, seen: bool, num_last: int,
    ) -> None:
        self._start = vocab_range[0]
        num_vocab = vocab_range[1] - vocab_range[0]
        self.counts_RV = torch.zeros(0, num_vocab if counts else 0, dtype=torch.int32, device=device)
        """How often a response has each token."""
        self.seen_RV = torch.zeros(0, num_vocab if seen else 0, dtype=torch.bool, device=device)
        """Whether a prompt or response has each token."""
        self.last_RP = torch.zeros(0, num_last, dtype=torch.long, device=device)
        """The last tokens of prompt and response, -1 before the first one."""
        self._row_of = np.zeros(0, np.int64)
        """Each sample's row; -1: it has none."""
        self._free: list[int] = []

    def rows(self, samples: ResponseBuffer, numbers: Sequence[int]) -> Tensor:
        """Return the rows of samples after their newest tokens, one each since the last call, are in them."""
        at_B = np.array(numbers, np.int64)
        if (lacking := int(at_B.max(initial=-1)) + 1 - len(self._row_of)) > 0:
            more = max(lacking, len(self._row_of) // 8)
            self._row_of = np.pad(self._row_of, (0, more), constant_values=-1)
        known = at_B[self._row_of[at_B] >= 0].tolist()
        if known:
            rows = upload(self._row_of[known], self.last_RP.device)
            self._append(rows, samples.tokens[samples.at(known, back=1)])
        if len(known) < len(numbers):
            self._begin(samples, at_B[self._row_of[at_B] < 0].tolist())
        return upload(self._row_of[at_B], self.last_RP.device)

    def release(self, numbers: Sequence[int]) -> None:
        """Free the rows of samples, if they have any."""
        for number in numbers:
            if number < len(self._row_of) and self._row_of[number] >= 0:
                self._free.append(int(self._row_of[number]))
                self._row_of[number] = -1

    def _append(self, rows: Tensor, tokens_B: Tensor) -> None:
        if self.last_RP.shape[1]:
            self.last_RP[rows] = torch.cat([self.last_RP[rows, 1:], tokens_B[:, None]], dim=1)
        for table_RV in (self.counts_RV, self.seen_RV):
            if table_RV.shape[1]:
                local_B = tokens_B - self._start
                is_here_B = (local_B >= 0) & (local_B < table_RV.shape[1])
                at = rows, torch.where(is_here_B, local_B, 0)
                table_RV[at] = table_RV[at] + is_here_B.to(table_RV.dtype)

    def _begin(self, samples: ResponseBuffer, numbers: Sequence[int]) -> None:
        """Give rows to samples that have no token of this round; neighbours share prompts."""
        if (lacking := len(numbers) - len(self._free)) > 0:
            self._grow(max(lacking, len(self.last_RP)))
        written: dict[tuple[int, int], int] = {}
        for number in numbers:
            assert samples.lengths[number] == 0, "the sample's first tokens have not been read"
            row = self._free.pop()
            self._row_of[number] = row
            prompt = samples.prompts[number]
            num_drawn = int(samples.num_drawn[number])
            twin = written.setdefault((id(prompt), num_drawn), row)
            if twin != row:
                for table in (self.counts_RV, self.seen_RV, self.last_RP):
                    table[row] = table[twin]
                continue
            self._write(row, prompt, num_drawn)

    def _write(self, row: int, prompt: Sequence[int], num_drawn: int) -> None:
        num_last = self.last_RP.shape[1]
        device = self.last_RP.device
        tokens = np.array(prompt, np.int64)
        self.last_RP[row] = upload(np.pad(tokens, (num_last, 0), constant_values=-1)[len(prompt) :], device)
        response = tokens[len(prompt) - num_drawn :]
        for table_RV, counted in ((self.counts_RV, response), (self.seen_RV, tokens)):
            if num_vocab := table_RV.shape[1]:
                local = counted - self._start
                local = local[(local >= 0) & (local < num_vocab)]
                table_RV[row] = upload(np.bincount(local, minlength=num_vocab), device)

    def _grow(self, count: int) -> None:
        num_rows = len(self.last_RP)
        self.counts_RV, self.seen_RV, self.last_RP = (
            torch.cat([table, table.new_zeros(count, table.shape[1])])
            for table in (self.counts_RV, self.seen_RV, self.last_RP))
        self._free += range(num_rows + count - 1, num_rows - 1, -1)


class LogitProcessors:
    """Changes the logits of the samples of a round by `sampling`, before temperature and filters."""

    def __init__(
        self, sampling: SamplingConfig, *, end_ids: Sequence[int], bad_words: Sequence[Sequence[int]],
        vocab_range: tuple[int, int], device: torch.device,
    ) -> None:
        """`end_ids` are the tokens that end a response, and `bad_words` the sequences that may not occur."""
        self._sampling = sampling
        self._start, self._stop = vocab_range
        self._device = device
        self._bias_V = self._bias(sampling.logit_bias) if sampling.logit_bias else None
        self._is_end_V = self._flags(end_ids) if sampling.min_new_tokens else None
        single = [tokens[0] for tokens in bad_words if len(tokens) == 1]
        self._is_bad_V = self._flags(single) if single else None
        by_length = defaultdict(list)
        for tokens in bad_words:
            if len(tokens) > 1:
                by_length[len(tokens) - 1].append(tokens)
        self._long_words = [self._word_tensors(words) for _, words in sorted(by_length.items())]
        counts = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        seen = sampling.repetition_penalty != 1
        self._history: TokenHistory | None = None
        if counts or seen or by_length:
            self._history = TokenHistory(
                vocab_range, device, counts=counts, seen=seen, num_last=max(by_length, default=0))

    def _flags(self, token_ids: Sequence[int]) -> Tensor:
        """Return which tokens of the shard are among these."""
        vocabulary = torch.arange(self._start, self._stop, device=self._device)
        return torch.isin(vocabulary, upload(np.array(token_ids, np.int64), self._device))

    def _bias(self, pairs: Sequence[tuple[int, float]]) -> Tensor:
        bias_V = np.zeros(self._stop - self._start)
        for token, bias in pairs:
            if self._start <= token < self._stop:
                bias_V[token - self._start] = bias
        return upload(bias_V, self._device)

    def _word_tensors(self, words: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return words that may end in this shard: their tokens without the last, and the last's place."""
        here = [word for word in words if self._start <= word[-1] < self._stop]
        prefixes = np.array([word[:-1] for word in here], np.int64)
        lasts = np.array([word[-1] - self._start for word in here], np.int64)
        return upload(prefixes, self._device), upload(lasts, self._device)

    def prepare(self, samples: ResponseBuffer, numbers: Sequence[int]) -> Tensor | None:
        """Read the newest tokens of the samples that get one in this step; all of these calls come in turn.

        Returns what `__call__` needs, so that it need not wait for the host.
        """
        return None if self._history is None else self._history.rows(samples, numbers)

    def release(self, numbers: Sequence[int]) -> None:
        """Forget samples that get no more tokens in this round."""
        if self._history is not None:
            self._history.release(numbers)

    def __call__(self, logits_BV: Tensor, rows_B: Tensor | None, drawn_B: Tensor) -> Tensor:
        """Return other logits; `drawn_B` is how many tokens each response has."""
        changed_BV = logits_BV.clone()
        for at in rows_at_a_time(changed_BV):
            part_BV = changed_BV[at]
            if self._bias_V is not None:
                part_BV += self._bias_V
            if self._history is not None:
                assert rows_B is not None
                self._penalize(part_BV, self._history, rows_B[at])
                self._forbid_long_words(part_BV, self._history, rows_B[at])
            if self._is_bad_V is not None:
                part_BV.masked_fill_(self._is_bad_V, -torch.inf)
            if self._is_end_V is not None:
                is_short_B1 = drawn_B[at, None] < self._sampling.min_new_tokens
                part_BV.masked_fill_(is_short_B1 & self._is_end_V, -torch.inf)
        return changed_BV

    def _penalize(self, logits_BV: Tensor, history: TokenHistory, rows_B: Tensor) -> None:
        sampling = self._sampling
        penalty = sampling.repetition_penalty
        if penalty != 1:
            penalized_BV = torch.where(logits_BV < 0, logits_BV * penalty, logits_BV / penalty)
            torch.where(history.seen_RV[rows_B], penalized_BV, logits_BV, out=logits_BV)
        if history.counts_RV.shape[1]:
            counts_BV = history.counts_RV[rows_B]
            logits_BV.sub_(counts_BV, alpha=sampling.frequency_penalty)
            logits_BV.sub_(counts_BV.clamp_(max=1), alpha=sampling.presence_penalty)

    def _forbid_long_words(self, logits_BV: Tensor, history: TokenHistory, rows_B: Tensor) -> None:
        """Set the logits of tokens that would complete a bad word to minus infinity, in place."""
        for prefixes_WP, lasts_W in self._long_words:
            if len(lasts_W):
                last_BP = history.last_RP[rows_B][:, -prefixes_WP.shape[1] :]
                is_next_BW = (last_BP[:, None] == prefixes_WP).all(-1)
                added_BW = torch.zeros_like(is_next_BW, dtype=logits_BV.dtype)
                logits_BV.index_add_(1, lasts_W, added_BW.masked_fill_(is_next_BW, -torch.inf))
