"""Generation: prefill every distinct prompt once, then decode all rows together until each has ended.

Under pipeline parallelism the rows form one cohort per stage, so that all stages work at the same time;
hidden states flow to later stages, tokens back to earlier ones. All ranks of a data shard follow all cohorts.

Under expert parallelism the ranks of an ep group pass through the experts together: those that have no rows
(left) take part in the steps of the others with none.
"""

import zlib
from collections.abc import Sequence
from functools import partial
from itertools import groupby, product

import torch

from realhf.data.batch import Batch, Packed
from realhf.dist.group import Pending
from realhf.engine.sampling import sample, uniform
from realhf.engine.work import Generate, SamplingConfig
from realhf.layout import even_split
from realhf.nn.kv_cache import KVCache
from realhf.nn.transformer import Transformer

_COMPACT_BELOW = 0.75  # Once fewer than this share of the cache's rows still run, the others are dropped.


def generate(model: Transformer, batch: Batch, work: Generate, *, prompt_key: str, stream: str) -> list:
    """The columns of `Generate`, on the last stage; `stream` (the call's name) has its own random numbers."""
    prompts = [prompt.tolist() for prompt in batch[prompt_key].split()]
    samples = list(zip(prompts, batch.ids, strict=True))
    seed = (work.seed << 32) | zlib.crc32(stream.encode())
    cohorts: list[_Cohort] = []
    num_rounds, pp = -(-len(samples) // work.max_rows), model.groups.layout.pp
    if model.groups.ep.size > 1:
        num_rounds = max(model.groups.ep_control.all_gather_json(num_rounds))
    with torch.no_grad():
        for start in range(0, num_rounds * work.max_rows, work.max_rows):
            rows = samples[start : start + work.max_rows]
            num_cohorts = pp if model.groups.ep.size > 1 else min(pp, len(rows))
            parts = [rows[slice(*even_split(len(rows), num_cohorts, i))] for i in range(num_cohorts)]
            now = [_Cohort(model, work.sampling, seed, part) for part in parts]
            for _, cohort in product(range(work.sampling.max_new_tokens + 1), now):
                cohort.advance()
            cohorts += now
    return _columns(cohorts, model) if model.groups.is_last_stage else []


class _Cohort:
    """Rows (prompt, sample id) that advance together. The cache's rows shrink: `_rows` has their numbers."""

    def __init__(
        self, model: Transformer, sampling: SamplingConfig, seed: int, rows: Sequence[tuple[list[int], int]]
    ) -> None:
        self._model, self._groups, self._sampling, self._seed = model, model.groups, sampling, seed
        self._integers = integers = partial(torch.tensor, dtype=torch.long, device=model.flat.device)
        self.prompts, self._num_running = [prompt for prompt, _ in rows], len(rows)
        self._sample_ids, self._eos_ids = integers([i for _, i in rows]), integers(model.config.eos_token_ids)
        self.lengths = torch.zeros_like(self._sample_ids)
        self.finished = torch.zeros_like(self._sample_ids, dtype=torch.bool)
        self.tokens = self.lengths[:, None].repeat(1, sampling.max_new_tokens)
        self.logprobs = torch.zeros_like(self.tokens, dtype=torch.float64)
        self._rows, self._last, self._step = integers(range(len(rows))), integers([]), 0
        self._cache: KVCache | None = None
        self._has_company = self._groups.ep.size > 1
        """Some rank of the ep group still has rows of its cohort of this number."""
        self._sent = Pending()

    def advance(self) -> None:
        """Takes over the tokens of the step before and starts the next, whose messages travel meanwhile."""
        self._sent.wait()
        if self._cache is not None and self._num_running > 0:
            self._receive_tokens()
        wants = self._step < self._sampling.max_new_tokens and self._num_running > 0
        if wants or self._has_company:
            self._has_company = self._groups.ep.size > 1 and any(
                self._groups.ep_control.all_gather_json(wants))
        if wants:
            self._compute()
        elif self._has_company:
            self._model(self._nothing(), [])

    def _compute(self) -> None:
        """This stage's part of one step: prefill or decode, and on the last stage the sampling."""
        model, groups, cache = self._model, self._groups, self._cache
        if cache is None:
            runs = [(prompt, len(list(run))) for prompt, run in groupby(self.prompts)]
            hidden = self._prefill(*map(list, zip(*runs, strict=True)))
        elif self._crosses_limit():
            rows = zip(self._rows.tolist(), self.tokens[self._rows, : self._step].tolist(), strict=True)
            sequences = [self.prompts[row] + tokens for row, tokens in rows]
            hidden = self._prefill(sequences, [1] * len(sequences))
        else:
            hidden = model.decode(self._input(self._last), cache)
        if not groups.is_last_stage:
            self._sent = groups.pp.post([(groups.at.pp + 1, hidden.contiguous())], [])
            return
        positions = torch.full_like(self._rows, self._step)
        draws = uniform(self._seed, sample_ids=self._sample_ids[self._rows], positions=positions)
        logits, start = model.logits(hidden), model.vocab_range[0]
        drawn = sample(logits, draws, config=self._sampling, vocab_start=start, group=groups.tp)
        self._last, self.logprobs[self._rows, self._step] = drawn
        self._sent = groups.pp_back.post([(stage, self._last) for stage in range(groups.at.pp)], [])

    def _receive_tokens(self) -> None:
        """Also drops rows that have ended from the cache."""
        groups, rows = self._groups, self._rows
        if not groups.is_last_stage:
            self._last = torch.empty_like(rows)
            groups.pp_back.exchange([], [(groups.layout.pp - 1, self._last)])
        self.tokens[rows, self._step] = self._last
        self.lengths[rows] += (~self.finished[rows]).long()
        self.finished[rows] |= torch.isin(self._last, self._eos_ids)
        self._step += 1
        running = ~self.finished[rows]
        self._num_running = int(running.sum())
        if self._step == self._sampling.max_new_tokens or self._num_running == 0:
            self._cache = None  # Its memory is for the next rows.
            return
        if self._num_running < _COMPACT_BELOW * len(rows):
            keep = running.nonzero()[:, 0]
            assert self._cache is not None
            self._cache.keep(keep)
            self._rows, self._last = rows[keep], self._last[keep]

    def _crosses_limit(self) -> bool:
        """Whether a row now grows past the length from which on its cache holds no longer."""
        limit = self._model.cache_limit
        rows = self._rows.tolist() if limit is not None else []
        return any(len(self.prompts[row]) + self._step - 1 == limit for row in rows)

    def _prefill(self, sequences: list[list[int]], counts: list[int]) -> torch.Tensor:
        """Fills a new cache with each sequence, `counts` rows of it: hidden states of all tokens, at the last
        stage of rows' last ones."""
        lengths, repeats = [len(sequence) for sequence in sequences], self._integers(counts)
        tokens = self._integers([token for sequence in sequences for token in sequence])
        still = self._sampling.max_new_tokens - self._step
        self._cache = self._model.new_cache(len(sequences), max(lengths) + still)
        hidden = self._model(self._input(tokens), lengths, cache=self._cache)
        self._cache.repeat(repeats)
        if not self._groups.is_last_stage:
            return hidden
        return hidden[(self._integers(lengths).cumsum(0) - 1).repeat_interleave(repeats)]

    def _nothing(self) -> torch.Tensor:
        """This stage's input for no token at all."""
        width, first = self._model.config.hidden_size, self._groups.is_first_stage
        return self._integers([]) if first else self._model.flat.new_empty(0, width)

    def _input(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens on the first stage, the previous stage's hidden states of them on others."""
        if self._groups.is_first_stage:
            return tokens
        hidden = self._model.flat.new_empty(len(tokens), self._model.config.hidden_size)
        self._groups.pp.exchange([], [(self._groups.at.pp - 1, hidden)])
        return hidden


def _columns(cohorts: Sequence[_Cohort], model: Transformer) -> list:
    """Sequences, response mask, log-probs and finished flags, as `Generate` promises them."""
    floats = torch.zeros(0, dtype=model.wide, device=model.flat.device)
    finished = torch.cat([floats, *(cohort.finished.to(model.wide) for cohort in cohorts)])
    sequences, masks, logprobs = [], [], []
    for cohort in cohorts:
        for i, (prompt, length) in enumerate(zip(cohort.prompts, cohort.lengths.tolist(), strict=True)):
            sequences.append(torch.cat([cohort.tokens.new_tensor(prompt), cohort.tokens[i, :length]]))
            padding, row = (len(prompt), 0), cohort.logprobs[i, :length].to(model.wide)
            logprobs.append(torch.nn.functional.pad(row, padding))
            masks.append(torch.nn.functional.pad(torch.ones_like(row), padding))
    floating = [Packed.of(rows, empty=floats) for rows in (masks, logprobs)]
    return [Packed.of(sequences, empty=floats.long()), *floating, finished]
