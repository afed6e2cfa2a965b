"""LogitProcessors: change the logits before sampling, by what each sample's prompt and response have.

They are those of transformers: SequenceBiasLogitsProcessor (for single tokens),
RepetitionPenaltyLogitsProcessor, NoBadWordsLogitsProcessor and MinNewTokensLengthLogitsProcessor, in this
order, with OpenAI's presence and frequency penalties after the repetition penalty, as in vLLM.

Shape suffixes: B samples that get a token, V the rank's shard of the vocabulary, R rows of the tables, P last
tokens of a sample, W bad words of equal length.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from realhf.calls import SamplingConfig
from realhf.devices.pinned import upload
from realhf.inference.drawn_samples import DrawnSamples
from realhf.inference.sampling import rows_at_a_time


class TokenHistory:
    """Tables of the tokens that running samples have, on the ranks that sample.

    A sample has a row from its first token of a round until it ends, wherever it runs, and also while it has
    no slot. Only the tables that are wanted exist.
    """

    def __init__(
        self, vocab_range: tuple[int, int], device: torch.device,
        *, counts: bool, seen: bool, num_last: int,
    ) -> None:  # fmt: skip
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

    def rows(self, samples: DrawnSamples, numbers: Sequence[int]) -> Tensor:
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

    def _begin(self, samples: DrawnSamples, numbers: Sequence[int]) -> None:
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
    ) -> None:  # fmt: skip
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

    def prepare(self, samples: DrawnSamples, numbers: Sequence[int]) -> Tensor | None:
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
        """Apply the penalties, in place."""
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
