"""ResponseBuffer: the samples of a generation, and the tokens that have been drawn for them so far."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from realhf.attention.interface import token_positions
from realhf.calls import Generate, SampleId
from realhf.data.batch import Packed
from realhf.data.light_tokenizer import word_tokens
from realhf.devices.pinned import upload
from realhf.inference.kv_cache import Integers
from realhf.inference.sampling import Draws, Floats, LogitProcessors
from realhf.inference.scheduler import BufferRow, Prompt
from realhf.inference.stops import Insertions, PhraseInserter, StopStrings, stop_matcher

Processing = Callable[[torch.Tensor], torch.Tensor]
"""Returns changed logits of samples, from which their next tokens are drawn."""


class Size(NamedTuple):
    """The sizes of a PromptGroup."""

    num_tokens: int
    num_samples: int
    num_drawn: int = 0

    @property
    def num_undrawn(self) -> int:
        """Tokens that have not been drawn."""
        return self.num_tokens - self.num_drawn


class PromptGroup(NamedTuple):
    """A prompt, and the ids of the samples that continue it.

    The tokens of samples that were begun in an earlier round are a prompt, too; `num_drawn` of them were
    drawn. Each sample may have a limit of its own for the tokens of its response, over all rounds.

    The tokens of samples that go on from an earlier turn are a prompt, too, of which `num_before` follow the
    sample's start. The limit is then that of the turn.
    """

    tokens: list[int]
    ids: list[SampleId]
    num_drawn: int = 0
    limit: int | None = None
    num_before: int = 0

    @property
    def size(self) -> Size:
        return Size(len(self.tokens), len(self.ids), self.num_drawn)


def join_equal(groups: Sequence[PromptGroup]) -> list[PromptGroup]:
    """Join adjacent groups that have equal tokens."""
    runs = groupby(groups, key=lambda group: group._replace(ids=[]))
    return [key._replace(ids=[i for group in run for i in group.ids]) for key, run in runs]


class ResponseBuffer:
    """One row for each sample, or for each of its turns, in the order of arrival; it grows beyond `capacity`.

    A sample ends as `work.sampling` says: at an end-of-sequence token, at a stop, or when it has its most
    tokens; and for this round when `budget` tokens have been drawn (None: there is no such limit). Tokens of
    an inserted phrase count as drawn.
    """

    def __init__(
        self, capacity: int, *, work: Generate, eos_ids: Sequence[int], seed: int, device: torch.device,
        vocab_range: tuple[int, int] | None, budget: int | None = None,
    ) -> None:
        """`vocab_range` is the shard of the vocabulary from which this rank samples; None: it does not."""
        sampling = work.sampling
        max_new_tokens = sampling.max_new_tokens
        self.prompts: list[list[int]] = []
        self.ids = np.zeros(capacity, np.int64)
        """The sample of each row."""
        self.lengths = np.zeros(capacity, np.int64)
        """Tokens drawn for each row in this round."""
        self.num_drawn = np.zeros(capacity, np.int64)
        """Tokens drawn for each row in earlier rounds."""
        self.num_before = np.zeros(capacity, np.int64)
        """Tokens of the response before the row's turn, those of an environment included."""
        self._most_drawn = np.zeros(capacity, np.int64)
        """The most tokens that each row may have, over all rounds."""
        self.finished = np.zeros(capacity, bool)
        self.num_ended = 0
        """Rows that get no more tokens in this round."""
        self.num_tokens = 0
        """Tokens drawn in this round, for all rows."""
        self._most = max_new_tokens if budget is None else min(budget, max_new_tokens)
        self.tokens = torch.zeros(capacity, self._most + 1, dtype=torch.long, device=device)
        """Column 0 is for the last token before the round, the others are for the tokens of the round."""
        self.logprobs = torch.zeros(capacity, self._most + 1, dtype=torch.float64, device=device)
        self.inserted = torch.zeros(capacity, self._most + 1, dtype=torch.bool, device=device)
        """Whether a token is one of the phrase, and not sampled; known where log-probs are."""
        phrase = work.interruption
        self._inserter = None if phrase is None else PhraseInserter(phrase, device)
        self._max_new_tokens = max_new_tokens
        self._min_new_tokens = sampling.min_new_tokens
        self._draws = Draws(seed)
        self._end_ids = [*(() if sampling.ignore_eos else eos_ids), *sampling.stop_token_ids]
        self._stops: StopStrings | None = None
        if sampling.stop:
            assert work.tokenizer is not None, "Generate requires it"
            self._stops = StopStrings(stop_matcher(work.tokenizer, sampling.stop))
        self._processors: LogitProcessors | None = None
        if vocab_range is not None:
            self._processors = _processors(work, self._end_ids, eos_ids, vocab_range, device)

    def add(self, group: PromptGroup) -> Prompt:
        """Add a row for each sample of a group, and return the group in the scheduler's form."""
        first = len(self.prompts)
        self.prompts += [group.tokens] * len(group.ids)
        if (lacking := len(self.prompts) - len(self.ids)) > 0:
            self._grow(max(lacking, len(self.ids) // 8))
        self.ids[first : len(self.prompts)] = group.ids
        self.num_drawn[first : len(self.prompts)] = group.num_drawn
        self.num_before[first : len(self.prompts)] = group.num_before
        limit = self._max_new_tokens if group.limit is None else min(group.limit, self._max_new_tokens)
        self._most_drawn[first : len(self.prompts)] = limit
        return Prompt(group.tokens, [BufferRow(i) for i in range(first, len(self.prompts))])

    def _grow(self, count: int) -> None:
        self.ids, self.lengths, self.num_drawn, self.num_before, self._most_drawn = (
            np.pad(numbers, (0, count))
            for numbers in (self.ids, self.lengths, self.num_drawn, self.num_before, self._most_drawn))
        self.finished = np.pad(self.finished, (0, count))
        self.tokens, self.logprobs, self.inserted = (
            torch.cat([x, x.new_zeros(count, x.shape[1])])
            for x in (self.tokens, self.logprobs, self.inserted))

    def history(self, row: BufferRow) -> list[int]:
        """Return the prompt of a row and all of its drawn tokens."""
        return self.prompts[row] + self.tokens[row, 1 : 1 + self.lengths[row]].tolist()

    def as_groups(self, rows: Sequence[BufferRow]) -> list[PromptGroup]:
        """Return the samples of rows with all of their tokens as prompts of a later round."""
        tokens = self.tokens.cpu()  # One copy from a GPU is faster than one for each sample.
        groups = []
        for row in rows:
            length = self.lengths[row]
            history = self.prompts[row] + tokens[row, 1 : 1 + length].tolist()
            num_drawn = int(self.num_drawn[row] + length)
            limit = int(self._most_drawn[row])
            groups.append(PromptGroup(history, [SampleId(int(self.ids[row]))], num_drawn, limit))
        return groups

    def may_go_on(self, row: BufferRow) -> bool:
        """Return whether a row may get tokens in later rounds."""
        drawn = self.num_drawn[row] + self.lengths[row]
        return bool(not self.finished[row] and drawn < self._most_drawn[row])

    def set_last_tokens(self, rows: Sequence[BufferRow]) -> None:
        """Write the last token before the round of these rows, which continue from a cache."""
        last = [self.prompts[row][-1] for row in rows]
        device = self.tokens.device
        at = upload(np.array(rows, np.int64), device)
        self.tokens[at, 0] = upload(np.array(last, np.int64), device)

    def draws(self, rows: Sequence[BufferRow]) -> torch.Tensor:
        """Return the random number in [0, 1) for the next token of each of these rows."""
        return upload(self.draws_on_host(rows), self.tokens.device)

    def draws_on_host(self, rows: Sequence[BufferRow]) -> Floats:
        """Return the same as `draws`, on the host."""
        rows_B = np.array(rows, np.int64)
        positions_B = self.num_before[rows_B] + self.num_drawn[rows_B] + self.lengths[rows_B]
        return self._draws(rows_B, sample_ids=self.ids[rows_B], positions=positions_B)

    @property
    def has_processing(self) -> bool:
        """Whether anything changes logits before tokens are sampled from them."""
        return self._processors is not None

    def processing(self, rows: Sequence[BufferRow]) -> Processing | None:
        """Return what changes the logits of the next tokens of these rows; None if nothing does.

        All calls for tokens that are then sampled come in turn.
        """
        if self._processors is None or not rows:
            return None
        rows_B = np.array(rows, np.int64)
        drawn_B = upload(self.num_drawn[rows_B] + self.lengths[rows_B], self.tokens.device)
        return partial(self._processors, rows_B=self._processors.prepare(self, rows), drawn_B=drawn_B)

    def insertions(self, rows: Sequence[BufferRow]) -> Insertions | None:
        """Return what replaces the tokens to be sampled for these rows, if anything does."""
        return None if self._inserter is None or not rows else self._inserter.insertions(self, rows)

    def record(
        self, at: tuple[torch.Tensor, torch.Tensor], tokens_B: torch.Tensor, logprobs_B: torch.Tensor,
        insertions: Insertions | None,
    ) -> torch.Tensor:
        """Store what is known only where tokens are sampled; return the tokens to append."""
        if insertions is not None:
            tokens_B, logprobs_B = insertions.apply(tokens_B, logprobs_B)
            self.inserted[at] = insertions.is_inserted_B
        self.logprobs[at] = logprobs_B
        return tokens_B

    def append(self, rows: Sequence[BufferRow], tokens_B: torch.Tensor) -> list[bool]:
        """Append one token to each of these rows; return for each whether that was its last of the
        round."""
        self.tokens[self.at(rows)] = tokens_B
        are_full = self.count(rows)
        return (are_full | self.finish(rows, tokens_B.cpu().numpy(), self.lengths[rows])).tolist()

    def count(self, rows: Sequence[BufferRow]) -> NDArray[np.bool_]:
        """Count one more token of each of these rows; return which of them have the most tokens of the
        round."""
        self.lengths[rows] += 1
        self.num_tokens += len(rows)
        return self.lengths[rows] >= self.limits(rows)

    def finish(
        self, rows: Sequence[BufferRow], tokens_B: Integers, lengths_B: Integers
    ) -> NDArray[np.bool_]:
        """Read the tokens of these rows with which they had `lengths_B` tokens, and return which rows end
        with theirs, whatever the limits are. Tokens that have been counted since do not count for these."""
        rows_B = np.array(rows, np.int64)
        finished = np.zeros(len(rows_B), bool)
        for end in self._end_ids:
            finished |= tokens_B == end
        if self._stops is not None:
            finished |= self._stops.advance(self, rows_B, tokens_B)
        if self._min_new_tokens:
            finished &= self.num_drawn[rows_B] + lengths_B > self._min_new_tokens
        self.finished[rows_B] = finished
        self.num_tokens -= int((self.lengths[rows_B] - lengths_B)[finished].sum())
        self.lengths[rows_B[finished]] = lengths_B[finished]
        ended = finished | (lengths_B >= self.limits(rows))
        self.num_ended += int(ended.sum())
        if self._processors is not None:
            self._processors.release(rows_B[ended].tolist())
        return finished

    def limits(self, rows: Sequence[BufferRow]) -> Integers:
        """Return the most tokens that each of these rows may get in this round."""
        return np.minimum(self._most, self._most_drawn[rows] - self.num_drawn[rows])

    def num_left(self, rows: Sequence[BufferRow]) -> list[int]:
        """Return how many more tokens each of these rows may get in this round."""
        lefts: list[int] = (self.limits(rows) - self.lengths[rows]).tolist()
        return lefts

    def at(self, rows: Sequence[BufferRow], *, back: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the index in `tokens` and `logprobs` of each row's next token, or of the one `back`
        positions before."""
        pairs_2B = upload(np.stack(self.columns(rows, back=back)), self.tokens.device)
        return pairs_2B[0], pairs_2B[1]

    def columns(self, rows: Sequence[BufferRow], *, back: int = 0) -> tuple[Integers, Integers]:
        """Return the same as `at`, on the host."""
        rows_B = np.array(rows, np.int64)
        return rows_B, self.lengths[rows_B] + 1 - back


def _processors(
    work: Generate, end_ids: Sequence[int], eos_ids: Sequence[int], vocab_range: tuple[int, int],
    device: torch.device,
) -> LogitProcessors | None:
    """Return what changes logits before sampling; None if the settings do not ask for it.

    As in transformers, an end-of-sequence token is no bad word.
    """
    sampling = work.sampling
    texts = () if work.tokenizer is None else word_tokens(work.tokenizer, sampling.bad_words)
    bad_words = [word for word in (*sampling.bad_word_ids, *texts) if word not in [(i,) for i in eos_ids]]
    if not (sampling.logit_bias or sampling.penalizes or bad_words or sampling.min_new_tokens):
        return None
    return LogitProcessors(
        sampling, end_ids=end_ids, bad_words=bad_words, vocab_range=vocab_range, device=device)


def output_columns(parts: Sequence[ResponseBuffer], *, wide: torch.dtype) -> list:
    """Return the first four columns of `Generate`: sequences, response mask, log-probs and finished flags.

    Tokens of earlier rounds count as the prompt. The mask is 0 on inserted tokens.
    """
    device = parts[0].tokens.device
    floats = torch.zeros(0, dtype=wide, device=device)
    sequences, masks, logprobs, finished = [floats.long()], [floats], [floats], [floats]
    lengths: list[int] = []
    for part in parts:
        count = len(part.prompts)
        prompt_lens = np.array([len(prompt) for prompt in part.prompts], np.int64)
        whole = (prompt_lens + part.lengths[:count]).tolist()
        row_T, position_T, _ = token_positions(whole, torch.device("cpu"))
        at_T = position_T - torch.from_numpy(prompt_lens)[row_T]
        drawn_T = at_T >= 0
        tokens_T = torch.empty(len(row_T), dtype=torch.long)
        tokens_T[~drawn_T] = torch.from_numpy(np.fromiter(chain.from_iterable(part.prompts), np.int64))
        at = row_T[drawn_T].to(device), at_T[drawn_T].to(device) + 1
        drawn_T = drawn_T.to(device)
        tokens_T = tokens_T.to(device).masked_scatter_(drawn_T, part.tokens[at])
        sequences.append(tokens_T)
        mask_T = drawn_T.to(wide)
        logprobs.append(mask_T.masked_scatter(drawn_T, part.logprobs[at].to(wide)))
        masks.append(mask_T.masked_scatter(drawn_T, (~part.inserted[at]).to(wide)))
        lengths += whole
        finished.append(torch.from_numpy(part.finished[:count]).to(floats))
    packed = [Packed(torch.cat(column), lengths) for column in (sequences, masks, logprobs)]
    return [*packed, torch.cat(finished)]
