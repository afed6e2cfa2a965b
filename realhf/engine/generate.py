"""Generation with continuous batching: the scheduler decides, the ranks of a replica follow it in lockstep.

Under pipeline parallelism the samples form one cohort per stage, so that all stages work at the same time;
hidden states flow to later stages, tokens back to earlier ones. All ranks of a data shard follow all cohorts.

Under expert parallelism the ranks of an ep group pass through the experts together: those that have no tokens
(left) take part in the passes of the others with none.
"""

import zlib
from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch

from realhf.cache_blocks import block_size, blocks_for, num_blocks
from realhf.data.batch import Batch, Packed
from realhf.dist.group import Pending
from realhf.engine.block_manager import BlockManager
from realhf.engine.sampling import sample, uniform
from realhf.engine.scheduler import Prompt, Scheduler, Step
from realhf.engine.work import Generate
from realhf.errors import UserError
from realhf.layout import even_split
from realhf.nn.block_tables import BlockTables
from realhf.nn.kv_cache import KVCache
from realhf.nn.transformer import Transformer

_GIB = 1 << 30


def generate(model: Transformer, batch: Batch, work: Generate, *, prompt_key: str, stream: str) -> list:
    """The columns of `Generate`, on the last stage; `stream` (the call's name) has its own random numbers.

    Raises UserError when a sample cannot fit in the model's positions or in the budget of the KV cache.
    """
    prompts = [prompt.tolist() for prompt in batch[prompt_key].split()]
    samples = list(zip(prompts, batch.ids, strict=True))
    seed = (work.seed << 32) | zlib.crc32(stream.encode())
    pp, in_lockstep = model.groups.layout.pp, model.groups.ep.size > 1
    num_cohorts = pp if in_lockstep else min(pp, len(samples), work.max_rows)
    parts = [samples[slice(*even_split(len(samples), num_cohorts, i))] for i in range(num_cohorts)]
    with torch.no_grad():
        cohorts = [_Cohort(model, work, seed, part, num_cohorts=num_cohorts) for part in parts]
        while any([cohort.advance() for cohort in cohorts]):
            pass
    return _columns(cohorts, model) if model.groups.is_last_stage else []


class _Cohort:
    """Samples (prompt, sample id) that share a cache and a number of slots."""

    def __init__(
        self, model: Transformer, work: Generate, seed: int, samples: Sequence[tuple[list[int], int]],
        *, num_cohorts: int,
    ) -> None:  # fmt: skip
        self._model, self._groups, self._sampling, self._seed = model, model.groups, work.sampling, seed
        self._device, count, max_new = model.flat.device, len(samples), work.sampling.max_new_tokens
        self.prompts = [prompt for prompt, _ in samples]
        self._ids = np.array([sample_id for _, sample_id in samples], np.int64)
        self.lengths = np.zeros(count, np.int64)
        """Tokens that each sample has."""
        self.tokens = torch.zeros(count, max_new, dtype=torch.long, device=self._device)
        self.logprobs = torch.zeros(count, max_new, dtype=torch.float64, device=self._device)
        self.finished = np.zeros(count, bool)
        self._ends = torch.zeros(model.config.vocab_size, dtype=torch.bool, device=self._device)
        self._ends[[i for i in model.config.eos_token_ids if i < len(self._ends)]] = True
        self._step: Step | None = None
        self._drawn = torch.zeros(0, dtype=torch.long)
        self._has_company = self._groups.ep.size > 1
        """Some rank of the ep group may still have samples."""
        self._sent: list[Pending] = []
        self._scheduler: Scheduler | None = None
        self._cache: KVCache | None = None
        if samples:
            self._reserve(work, -(-work.max_rows // num_cohorts), num_cohorts)

    def _reserve(self, work: Generate, most_rows: int, num_cohorts: int) -> None:
        """Memory for as many rows as may run at once, within the budget."""
        prompts, max_new = _by_prompt(self.prompts), work.sampling.max_new_tokens
        num_slots = min(most_rows, len(self.prompts))
        longest = max(map(len, self.prompts)) + max_new
        limit = self._model.config.num_positions
        if limit is not None and longest > limit:
            raise UserError(
                f"a prompt has {longest - max_new} tokens and sampling.max_new_tokens is {max_new}: "
                f"the model has learned {limit} positions")
        sizes = [(len(prompt.tokens), len(prompt.samples)) for prompt in prompts]
        size = block_size(sizes, max_new_tokens=max_new)
        wanted = blocks_for(sizes, size=size, num_slots=num_slots, max_new_tokens=max_new)
        if work.kv_cache_gib is not None:
            block_bytes = self._model.cache_token_bytes * size
            budget = int(work.kv_cache_gib * _GIB / num_cohorts) // block_bytes
            if budget < (least := num_blocks(longest, size) + 1):
                least_gib = least * num_cohorts * block_bytes / _GIB
                raise UserError(
                    f"kv_cache_gib is {work.kv_cache_gib:g}: one sample of {longest} tokens (prompt and "
                    f"sampling.max_new_tokens) needs {least_gib:.3g}")
            wanted = min(wanted, budget)
        self._cache, blocks = self._model.new_cache(wanted, size), BlockManager(wanted)
        self._tables = BlockTables(
            num_slots=num_slots, num_blocks=wanted, block_size=size,
            blocks_per_row=num_blocks(longest, size),
            max_sharers=max(len(prompt.samples) for prompt in prompts))
        self._scheduler = Scheduler(
            prompts, num_slots=num_slots, blocks=blocks, tables=self._tables, history=self._history,
            prefill_tokens=work.prefill_tokens, restart_at=self._model.cache_limit)

    def _history(self, index: int) -> list[int]:
        return self.prompts[index] + self.tokens[index, : self.lengths[index]].tolist()

    def advance(self) -> bool:
        """Takes over the tokens of the step before and starts the next, whose messages travel meanwhile;
        whether there was one."""
        for sent in self._sent:
            sent.wait()
        self._sent = []
        if self._step is not None:
            self._take_tokens(self._step)
        self._step = None if self._scheduler is None else self._scheduler.plan()
        if self._step is None:
            self._scheduler = self._cache = None  # Its memory is for others.
        if self._has_company:
            self._keep_company()
        elif self._step is not None:
            self._compute(self._step)
        return self._step is not None or self._has_company

    def _keep_company(self) -> None:
        """All ranks of the ep group make as many passes as the one that makes most."""
        num_passes = 0 if self._step is None else self._step.num_passes
        most = max(self._groups.ep_control.all_gather_json(num_passes))
        self._has_company = most > 0
        if self._step is not None:
            self._compute(self._step)
        for _ in range(most - num_passes):
            self._model(self._nothing(), [])

    def _compute(self, step: Step) -> None:
        """This stage's part of a step, and on the last stage the sampling."""
        hidden, samples = list(self._passes(step)), step.samples
        self._drawn = self._integers([])
        if not self._groups.is_last_stage or not samples:
            return
        logits, start = self._model.logits(torch.cat(hidden)), self._model.vocab_range[0]
        draws = uniform(self._seed, sample_ids=self._ids[samples], positions=self.lengths[samples])
        draws_B = torch.from_numpy(draws).to(self._device)
        self._drawn, logprobs_B = sample(
            logits, draws_B, config=self._sampling, vocab_start=start, group=self._groups.tp)
        self.logprobs[self._at(samples)] = logprobs_B
        back = [(stage, self._drawn) for stage in range(self._groups.at.pp)]
        self._sent.append(self._groups.pp_back.post(back, []))

    def _passes(self, step: Step) -> Iterator[torch.Tensor]:
        """Runs the step's passes; on the last stage the hidden states that its samples' tokens come from."""
        model, cache, size = self._model, self._cache, self._tables.block_size
        assert cache is not None
        if step.copies:
            cache.copy(*zip(*step.copies, strict=True))
        if step.rows:
            decoding = self._tables.advance(self._device)
            last_B = self.tokens[self._at(step.rows, back=1)]
            yield self._handed_on(model.decode(self._input(last_B), cache, decoding))
        if step.further is not None:
            piece = step.further
            tokens, places_L = piece.prompt.tokens, self._integers(piece.places(size))
            ids_T = self._integers(tokens[piece.start : piece.stop])
            hidden = model.extend(self._input(ids_T), cache, places_L, whole_len=len(tokens))
            yield self._handed_on(hidden)[-1:].expand(len(piece.prompt.samples) * piece.is_last, -1)
        if fresh := step.fresh:
            ids_T = self._integers([t for piece in fresh for t in piece.prompt.tokens[: piece.stop]])
            places_T = self._integers([place for piece in fresh for place in piece.places(size)])
            lens, whole = [piece.stop for piece in fresh], [len(piece.prompt.tokens) for piece in fresh]
            hidden = model.prefill(self._input(ids_T), lens, cache, places_T, whole_lens=whole)
            hidden = self._handed_on(hidden)
            ends = self._integers(lens).cumsum(0) - 1
            counts = self._integers([len(piece.prompt.samples) * piece.is_last for piece in fresh])
            yield hidden[ends.repeat_interleave(counts)] if self._groups.is_last_stage else hidden

    def _take_tokens(self, step: Step) -> None:
        samples, groups = step.samples, self._groups
        if not groups.is_last_stage:
            self._drawn = self._integers(samples)
            groups.pp_back.exchange([], [(groups.layout.pp - 1, self._drawn)])
        self.tokens[self._at(samples)] = self._drawn
        finished = self._ends[self._drawn].cpu().numpy()
        self.lengths[samples] += 1
        self.finished[samples] = finished
        assert self._scheduler is not None
        ended = finished | (self.lengths[samples] == self._sampling.max_new_tokens)
        self._scheduler.update(ended.tolist())

    def _at(self, samples: list[int], *, back: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Where in `tokens` these samples' next ones go, or so many places before."""
        return self._integers(samples), torch.from_numpy(self.lengths[samples] - back).to(self._device)

    def _integers(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self._device)

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

    def _handed_on(self, hidden: torch.Tensor) -> torch.Tensor:
        """Also sends it to the next stage, if there is one."""
        if not self._groups.is_last_stage:
            self._sent.append(self._groups.pp.post([(self._groups.at.pp + 1, hidden.contiguous())], []))
        return hidden


def _by_prompt(prompts: Sequence[list[int]]) -> list[Prompt]:
    """Samples of equal prompts that are neighbours go together."""
    runs = [list(run) for _, run in groupby(range(len(prompts)), key=prompts.__getitem__)]
    return [Prompt(prompts[run[0]], run) for run in runs]


def _columns(cohorts: Sequence[_Cohort], model: Transformer) -> list:
    """Sequences, response mask, log-probs and finished flags, as `Generate` promises them."""
    floats = torch.zeros(0, dtype=model.wide, device=model.flat.device)
    finished = [torch.from_numpy(cohort.finished).to(floats) for cohort in cohorts]
    sequences, masks, logprobs = [], [], []
    for cohort in cohorts:
        for i, (prompt, length) in enumerate(zip(cohort.prompts, cohort.lengths.tolist(), strict=True)):
            sequences.append(torch.cat([cohort.tokens.new_tensor(prompt), cohort.tokens[i, :length]]))
            padding, row = (len(prompt), 0), cohort.logprobs[i, :length].to(model.wide)
            logprobs.append(torch.nn.functional.pad(row, padding))
            masks.append(torch.nn.functional.pad(torch.ones_like(row), padding))
    floating = [Packed.of(rows, empty=floats) for rows in (masks, logprobs)]
    return [Packed.of(sequences, empty=floats.long()), *floating, torch.cat([floats, *finished])]
