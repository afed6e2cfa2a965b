"""Generation: prefill every distinct prompt once, then decode all rows together until each has ended.

Under pipeline parallelism the rows form one cohort per stage, so that all stages work at the same time:
hidden states flow to later stages, sampled tokens back to earlier ones. Every rank of a data shard follows
every cohort.
"""

import zlib
from collections.abc import Sequence
from itertools import groupby

import torch

from realhf.data.batch import Batch, Packed
from realhf.dist.group import Pending
from realhf.engine.random import uniform
from realhf.engine.sampling import sample
from realhf.engine.work import Generate, SamplingConfig
from realhf.layout import even_split
from realhf.nn.kv_cache import KVCache
from realhf.nn.transformer import Transformer

_COMPACT_BELOW = 0.75
"""Finished rows are dropped from the cache once fewer than this share of its rows are still running."""


def generate(model: Transformer, batch: Batch, work: Generate, *, prompt_key: str, stream: str) -> list:
    """The columns of `Generate` for the samples of `batch`; an empty list on all but the last pipeline stage.

    `stream` (the call's name) separates the random numbers of several generating calls on the same samples.
    """
    prompts = [prompt.tolist() for prompt in batch[prompt_key].split()]
    seed = (work.seed << 32) | zlib.crc32(stream.encode())
    cohorts: list[_Cohort] = []
    with torch.no_grad():
        for start in range(0, len(prompts), work.max_rows):
            chunk = range(start, min(start + work.max_rows, len(prompts)))
            num_cohorts = min(model.groups.layout.pp, len(chunk))
            now = []
            for i in range(num_cohorts):
                part = slice(*(start + at for at in even_split(len(chunk), num_cohorts, i)))
                now.append(_Cohort(model, work.sampling, seed, prompts[part], batch.ids[part]))
            _run(now, num_steps=work.sampling.max_new_tokens)
            cohorts += now
    return _columns(cohorts, model) if model.groups.is_last_stage else []


def _run(cohorts: Sequence["_Cohort"], *, num_steps: int) -> None:
    """Takes turns, so that a cohort's tokens travel while the others compute."""
    for step in range(num_steps + 1):
        for cohort in cohorts:
            if step > 0 and cohort.num_running > 0:
                cohort.receive_tokens()
            if step < num_steps and cohort.num_running > 0:
                cohort.compute()
    for cohort in cohorts:
        cohort.close()


class _Cohort:
    """Rows that advance together. The cache's rows shrink as rows end: `_rows` has their original numbers."""

    def __init__(
        self,
        model: Transformer,
        sampling: SamplingConfig,
        seed: int,
        prompts: list[list[int]],
        ids: list[int],
    ) -> None:
        self._model, self._groups, self._sampling, self._seed = model, model.groups, sampling, seed
        self._device = device = model.flat.device
        self._sample_ids = torch.tensor(ids, dtype=torch.long, device=device)
        self._eos_ids = torch.tensor(model.config.eos_token_ids, dtype=torch.long, device=device)
        num, limit = len(prompts), sampling.max_new_tokens
        self.prompts = prompts
        self.tokens = torch.zeros(num, limit, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(num, limit, dtype=torch.float64, device=device)
        self.lengths = torch.zeros(num, dtype=torch.long, device=device)
        self.finished = torch.zeros(num, dtype=torch.bool, device=device)
        self.num_running = num
        self._rows = torch.arange(num, device=device)
        self._last = torch.zeros(0, dtype=torch.long, device=device)
        self._step = 0
        self._cache: KVCache | None = None
        self._sent: list[Pending] = []

    def compute(self) -> None:
        """This stage's part of one step: prefill or decode, and on the last stage the sampling."""
        model, groups = self._model, self._groups
        self.close()
        if self._cache is None:
            hidden = self._prefill()
        else:
            hidden = model.decode(self._input(self._last), self._cache)
        if not groups.is_last_stage:
            self._sent.append(groups.pp.post([(groups.at.pp + 1, hidden.contiguous())], []))
            return
        positions = torch.full_like(self._rows, self._step)
        draws = uniform(self._seed, sample_ids=self._sample_ids[self._rows], positions=positions)
        logits, start = model.logits(hidden), model.vocab_range[0]
        tokens, logprobs = sample(logits, draws, config=self._sampling, vocab_start=start, group=groups.tp)
        self._last = tokens
        self.logprobs[self._rows, self._step] = logprobs
        self._sent.append(groups.pp_back.post([(stage, tokens) for stage in range(groups.at.pp)], []))

    def receive_tokens(self) -> None:
        """Takes over the tokens of the last `compute`, and drops rows that have ended."""
        groups, rows = self._groups, self._rows
        if not groups.is_last_stage:
            self._last = torch.empty_like(rows)
            groups.pp_back.exchange([], [(groups.layout.pp - 1, self._last)])
        self.tokens[rows, self._step] = self._last
        was_running = ~self.finished[rows]
        self.lengths[rows] += was_running.long()
        self.finished[rows] |= torch.isin(self._last, self._eos_ids)
        self._step += 1
        running = ~self.finished[rows]
        self.num_running = int(running.sum())
        if 0 < self.num_running < _COMPACT_BELOW * len(rows):
            keep = running.nonzero()[:, 0]
            assert self._cache is not None
            self._cache.keep(keep)
            self._rows, self._last = rows[keep], self._last[keep]

    def close(self) -> None:
        """Waits until this cohort's messages have left."""
        for message in self._sent:
            message.wait()
        self._sent.clear()

    def _prefill(self) -> torch.Tensor:
        """Runs each distinct prompt once and gives every sample of it a copy of its keys and values.

        Hidden states of all tokens, or on the last stage of each sample's last one.
        """
        runs = [(prompt, len(list(run))) for prompt, run in groupby(self.prompts)]
        lengths = [len(prompt) for prompt, _ in runs]
        tokens = torch.tensor(
            [t for prompt, _ in runs for t in prompt], dtype=torch.long, device=self._device
        )
        self._cache = self._model.new_cache(len(runs), max(lengths) + self._sampling.max_new_tokens)
        hidden = self._model(self._input(tokens), lengths, cache=self._cache)
        repeats = torch.tensor([count for _, count in runs], device=self._device)
        self._cache.repeat(repeats)
        if not self._groups.is_last_stage:
            return hidden
        ends = torch.tensor(lengths, device=self._device).cumsum(0) - 1
        return hidden[ends.repeat_interleave(repeats)]

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
    sequences, masks, logprobs = [], [], []
    for cohort in cohorts:
        for i, (prompt, length) in enumerate(zip(cohort.prompts, cohort.lengths.tolist(), strict=True)):
            zeros = floats.new_zeros(len(prompt))
            sequences.append(torch.cat([cohort.tokens.new_tensor(prompt), cohort.tokens[i, :length]]))
            masks.append(torch.cat([zeros, zeros.new_ones(length)]))
            logprobs.append(torch.cat([zeros, cohort.logprobs[i, :length].to(model.wide)]))
    finished = torch.cat([floats, *(cohort.finished.to(model.wide) for cohort in cohorts)])
    tokens = Packed.of(sequences, empty=floats.long())
    return [tokens, Packed.of(masks, empty=floats), Packed.of(logprobs, empty=floats), finished]
