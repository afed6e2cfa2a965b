"""Generation: prefill every distinct prompt once, then decode all rows together until each has ended.

Under pipeline parallelism the rows form one cohort per stage, so that all stages work at the same time: hidden states
flow to later stages, sampled tokens back to earlier ones. Every rank of a data shard follows every cohort.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Context:
    model: Transformer
    sampling: SamplingConfig
    seed: int
    eos_ids: torch.Tensor
    device: torch.device


def generate(model: Transformer, batch: Batch, work: Generate, *, prompt_key: str, stream: str) -> list:
    """The columns of `Generate` for the samples of `batch`; an empty list on all but the last pipeline stage.

    `stream` (the call's name) separates the random numbers of several generating calls on the same samples.
    """
    prompts: Packed = batch[prompt_key]
    config = model.spec.config
    context = _Context(
        model=model,
        sampling=work.sampling,
        seed=(work.seed << 32) | zlib.crc32(stream.encode()),
        eos_ids=torch.tensor(config.eos_token_ids, dtype=torch.long, device=model.flat.device),
        device=model.flat.device,
    )
    rows = [p.tolist() for p in prompts.split()]
    cohorts: list[_Cohort] = []
    with torch.no_grad():
        for start in range(0, len(rows), work.max_rows):
            chunk = range(start, min(start + work.max_rows, len(rows)))
            num_cohorts = min(model.groups.layout.pp, len(chunk))
            parts = [chunk[slice(*even_split(len(chunk), num_cohorts, i))] for i in range(num_cohorts)]
            now = [_Cohort(context, [rows[i] for i in part], [batch.ids[i] for i in part]) for part in parts]
            _run(now, steps=work.sampling.max_new_tokens)
            cohorts += now
    if not model.groups.is_last_stage:
        return []
    return _columns([response for cohort in cohorts for response in cohort.responses()], rows, model)


def _run(cohorts: Sequence["_Cohort"], *, steps: int) -> None:
    for step in range(steps):
        for cohort in cohorts:
            if step > 0:
                cohort.receive_tokens()
            if cohort.num_running > 0:
                cohort.compute(first=step == 0)
    for cohort in cohorts:
        cohort.receive_tokens()
        cohort.close()


@dataclass(frozen=True)
class _Response:
    tokens: torch.Tensor
    logprobs: torch.Tensor
    finished: bool


class _Cohort:
    """Rows that advance together. `rows` maps the cache's rows, which shrink as rows end, to the original ones."""

    def __init__(self, context: _Context, prompts: list[list[int]], sample_ids: list[int]) -> None:
        self._context = context
        self._prompts = prompts
        self._sample_ids = torch.tensor(sample_ids, dtype=torch.long, device=context.device)
        num, limit, device = len(prompts), context.sampling.max_new_tokens, context.device
        self._tokens = torch.zeros(num, limit, dtype=torch.long, device=device)
        self._logprobs = torch.zeros(num, limit, dtype=torch.float64, device=device)
        self._lengths = torch.zeros(num, dtype=torch.long, device=device)
        self._running = torch.ones(num, dtype=torch.bool, device=device)
        self._rows = torch.arange(num, device=device)
        self._finished = torch.zeros(num, dtype=torch.bool, device=device)
        self._step = 0
        self._cache: KVCache | None = None
        self._last = torch.zeros(0, dtype=torch.long, device=device)
        self._waiting = False
        self._sent: list[Pending] = []
        self.num_running = num

    def compute(self, *, first: bool) -> None:
        """This stage's part of one step: prefill or decode, and on the last stage the sampling."""
        model, groups = self._context.model, self._context.model.groups
        self.close()
        hidden = self._prefill() if first else model.decode(self._input((len(self._rows),), self._last), self._cache)
        self._waiting = True
        if not groups.is_last_stage:
            self._sent.append(groups.pp.post([(groups.at.pp + 1, hidden.contiguous())], []))
            return
        if first:
            hidden = hidden[self._prompt_ends]
        positions = torch.full_like(self._rows, self._step)
        draws = uniform(self._context.seed, sample_ids=self._sample_ids[self._rows], positions=positions)
        tokens, logprobs = sample(
            model.logits(hidden), draws, config=self._context.sampling, vocab_start=model.vocab_range[0], group=groups.tp
        )
        self._last = tokens
        self._logprobs[self._rows, self._step] = logprobs
        earlier = range(groups.layout.pp - 1)
        self._sent.append(groups.pp_back.post([(stage, tokens) for stage in earlier], []))

    def receive_tokens(self) -> None:
        """Takes over the tokens of the last `compute`, and drops rows that have ended."""
        if not self._waiting:
            return
        self._waiting = False
        groups = self._context.model.groups
        if not groups.is_last_stage:
            self._last = torch.empty_like(self._rows)
            groups.pp_back.exchange([], [(groups.layout.pp - 1, self._last)])
        rows = self._rows
        self._tokens[rows, self._step] = self._last
        was_running = self._running[rows]
        ended = torch.isin(self._last, self._context.eos_ids) & was_running
        self._lengths[rows] += was_running.long()
        self._finished[rows] |= ended
        self._running[rows] &= ~ended
        self._step += 1
        running = self._running[rows]
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

    def responses(self) -> list[_Response]:
        lengths = self._lengths.tolist()
        return [
            _Response(self._tokens[i, :n], self._logprobs[i, :n], bool(self._finished[i])) for i, n in enumerate(lengths)
        ]

    def _prefill(self) -> torch.Tensor:
        """Runs each distinct prompt once and gives every sample of it a copy of its keys and values."""
        model = self._context.model
        distinct: list[list[int]] = []
        counts: list[int] = []
        for prompt in self._prompts:
            if distinct and distinct[-1] == prompt:
                counts[-1] += 1
            else:
                distinct.append(prompt)
                counts.append(1)
        lengths = [len(prompt) for prompt in distinct]
        tokens = torch.tensor([t for prompt in distinct for t in prompt], dtype=torch.long, device=self._context.device)
        self._cache = model.new_cache(len(distinct), max(lengths) + self._context.sampling.max_new_tokens)
        hidden = model(self._input((len(tokens),), tokens), lengths, cache=self._cache)
        repeats = torch.tensor(counts, device=self._context.device)
        self._cache.repeat(repeats)
        ends = torch.tensor(lengths, device=self._context.device).cumsum(0) - 1
        self._prompt_ends = ends.repeat_interleave(repeats)
        return hidden

    def _input(self, shape: tuple[int, ...], tokens: torch.Tensor) -> torch.Tensor:
        """Tokens on the first stage, the previous stage's hidden states on others."""
        model, groups = self._context.model, self._context.model.groups
        if groups.is_first_stage:
            return tokens
        hidden = torch.empty(*shape, model.spec.config.hidden_size, dtype=model.flat.dtype, device=self._context.device)
        groups.pp.exchange([], [(groups.at.pp - 1, hidden)])
        return hidden


def _columns(responses: list[_Response], prompts: list[list[int]], model: Transformer) -> list:
    """Sequences, response mask, log-probs and finished flags, as `Generate` promises them."""
    device, wide = model.flat.device, torch.float64 if model.flat.dtype == torch.float64 else torch.float32
    if not responses:
        tokens = Packed(torch.zeros(0, dtype=torch.long, device=device), [])
        floats = Packed(torch.zeros(0, dtype=wide, device=device), [])
        return [tokens, floats, floats, floats.values]
    heads = [torch.tensor(prompt, dtype=torch.long, device=device) for prompt in prompts]
    zeros = [torch.zeros(len(prompt), dtype=wide, device=device) for prompt in prompts]
    sequences = [torch.cat([h, r.tokens]) for h, r in zip(heads, responses, strict=True)]
    masks = [torch.cat([z, torch.ones_like(r.logprobs, dtype=wide)]) for z, r in zip(zeros, responses, strict=True)]
    logprobs = [torch.cat([z, r.logprobs.to(wide)]) for z, r in zip(zeros, responses, strict=True)]
    finished = torch.tensor([float(r.finished) for r in responses], dtype=wide, device=device)
    return [Packed.of(sequences), Packed.of(masks), Packed.of(logprobs), finished]
