"""StepPasses: what a pipeline stage computes and sends in the steps of a cohort.

Hidden states flow to later pipeline stages. Tokens flow back to earlier ones, from host to host: on NCCL they
would have to wait for hidden states of other cohorts, whose senders may wait for them (docs/reallocation.md).

Shape suffixes: S rows of the buffer that get a token, B those of them that decode, T tokens of chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from realhf.calls import Generate
from realhf.devices.pinned import Download, upload
from realhf.distributed.group import Pending
from realhf.inference.cpu_decoding import DecodingSteps, cpu_segments
from realhf.inference.forward_batch import ChunkPages, chunk_pages, paged_chunks, paged_rows, prefill
from realhf.inference.kv_cache import BlockTables, RowPages
from realhf.inference.page_pool import Decoded, DecodeGraphs, PagePool
from realhf.inference.response_buffer import Processing, ResponseBuffer
from realhf.inference.sampling import draw_tokens, for_vocabulary
from realhf.inference.scheduler import MOST_STEPS, BufferRow, DecodeWindow, Step
from realhf.nn.attention import Segment
from realhf.nn.transformer import Transformer


class StepInputs(NamedTuple):
    """The numbers that the device needs for a step, besides weights and cache.

    The host computes them as numpy arrays, and all of them go to the device in one copy.
    """

    row_pages: RowPages[Tensor] | None  # Only on the paged path.
    chunk_pages: ChunkPages[Tensor] | None  # Only on the paged path.
    row_S: Tensor  # The rows that get a token; those that decode come first.
    column_S: Tensor  # The column of that token in the buffer.
    draw_S: Tensor  # The random number in [0, 1) with which it is sampled.
    last_column_B: Tensor  # The column of the last token so far of each row that decodes.
    prompt_T: Tensor  # The tokens of chunks.
    last_S: Tensor  # The index in the pass of the token that each row continues, if there are chunks.


NO_INPUTS = StepInputs(None, None, *[torch.empty(0)] * 6)
"""The inputs of a step that only other ranks have."""


@dataclass
class StartedStep:
    """A step that has been started, and what is known of its results."""

    step: Step
    at: tuple[Tensor, Tensor]  # Where the buffer keeps the tokens and log-probs.
    drawn_S: Tensor  # On the last stage: the token of each of the step's rows.
    download: Download  # The same tokens on the host.
    lengths: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    """Once the step has been counted: how many tokens each of its rows has with that of the step."""
    ended_before: set[BufferRow] = field(default_factory=set)
    """Rows that had ended before the step, as has been found out since."""

    def live_rows(self) -> list[BufferRow]:
        """Return the rows that get a token."""
        if not self.ended_before:
            return self.step.rows
        return [row for row in self.step.rows if row not in self.ended_before]


class StepPasses:
    """The passes of one cohort through this stage, and their messages to other stages.

    The messages of a step are in flight until `wait_for_sent`.
    """

    def __init__(
        self, model: Transformer, work: Generate, *, pool: PagePool, tables: BlockTables,
        buffer: ResponseBuffer,
    ) -> None:
        self._model = model
        self._work = work
        self._pool = pool
        self._tables = tables
        self._buffer = buffer
        self._parallel = model.groups
        self._device = model.flat.device
        self._sampling = for_vocabulary(work.sampling, model.config.vocab_size)
        self._upload = StepUpload(self._device)
        self._decoding = DecodingSteps(tables)
        self._sent: list[Pending] = []
        self.table_width = pool.table_width(tables.blocks_per_row)
        """Pages of a row in the tables of a pass."""
        self.num_computed = 0
        """Tokens that have passed through this stage."""

    @cached_property
    def _graphs(self) -> DecodeGraphs | None:
        """The recorded passes, asked for when all cohorts have their pages; a round does not change them."""
        return self._pool.graphs if self._work.cuda_graphs else None

    def tables_have_grown(self) -> None:
        """Note that the tables are wider, or the cache larger, than at the last step."""
        self.table_width = self._pool.table_width(self._tables.blocks_per_row)
        vars(self).pop("_graphs", None)

    def start(self, step: Step, window: DecodeWindow) -> StartedStep:
        """Compute this stage's part of a step; on the last stage also sample."""
        insertions = self._buffer.insertions(step.rows) if self._parallel.is_last_stage else None
        processing = self._buffer.processing(step.rows)
        fresh = [] if self._pool.backends is not None else step.fresh  # Pages have no kernels for it.
        if len(fresh) > 1 and self._model.shares_prefixes(max(chunk.stop for chunk in fresh)):
            step = step.with_shared_prefix()
        inputs = self._inputs(step, window)
        self.num_computed += len(step.decoding) + len(inputs.prompt_T)
        self.copy(step.copies)
        drawn = self._pass(step, inputs, window, processing)
        at = (inputs.row_S, inputs.column_S)
        nothing = torch.zeros(0, dtype=torch.long)
        started = StartedStep(step, at, inputs.row_S[:0], Download(nothing))
        if drawn is None:
            return started
        started.drawn_S = self._buffer.record(at, *drawn, insertions)
        started.download = Download(started.drawn_S)
        if started.download.is_here:
            self._send_back(started)
        return started

    def start_empty(self, window: DecodeWindow) -> None:
        """Take part in a step that other ranks of the ep group have."""
        self._pass(Step([], [], []), NO_INPUTS, window, None)

    def receive(self, started: StartedStep) -> None:
        """Receive the tokens of a step from the last stage, or send them to earlier ones."""
        if not self._parallel.is_last_stage:
            tokens_S = torch.empty(len(started.step.rows), dtype=torch.long)
            self._parallel.pp_back.exchange([], [(self._parallel.layout.pp - 1, tokens_S)])
            started.drawn_S = upload(tokens_S.numpy(), self._device)
            started.download = Download(tokens_S)
        elif not started.download.is_here:
            self._send_back(started)
        self._buffer.tokens[started.at] = started.drawn_S

    def _send_back(self, started: StartedStep) -> None:
        """Send sampled tokens to all earlier stages: from a CPU at once, from a GPU when it is the cohort's
        turn again, so that the host starts steps of other cohorts instead of waiting."""
        if stages := range(self._parallel.at.pp):
            tokens_S = torch.from_numpy(started.download.wait())
            self._sent.append(self._parallel.pp_back.post([(stage, tokens_S) for stage in stages], []))

    def wait_for_sent(self) -> None:
        for sent in self._sent:
            sent.wait()
        self._sent = []

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the cache, given as (from, to)."""
        if copies:
            self._pool.cache.copy(*zip(*copies, strict=True))

    def _inputs(self, step: Step, window: DecodeWindow) -> StepInputs:
        """Send all numbers that the device needs for a step, in one copy."""
        row_S, column_S = self._buffer.columns(step.rows)
        num_rows = len(step.decoding)
        own = (
            row_S, column_S, self._buffer.draws_on_host(step.rows), column_S[:num_rows] - 1,
            np.array([i for chunk in step.chunks for i in chunk.tokens], np.int64),
            np.array(step.last_tokens if step.chunks else (), np.int64))
        rows: Sequence[NDArray[Any]] = ()
        chunks: Sequence[NDArray[Any]] = ()
        if self._pool.backends is not None:
            if step.decoding:
                padded = num_rows if self._graphs is None else window.num_rows
                rows = self._tables.advance_pages(padded, window.num_pages)
            if paged := self._paged_chunks(step):
                chunks = chunk_pages(paged, page_size=self._tables.block_size)
        tensors = iter(self._upload([*rows, *chunks, *own]))
        return StepInputs(
            RowPages(*islice(tensors, len(rows))) if rows else None,
            ChunkPages(*islice(tensors, len(chunks))) if chunks else None, *tensors)

    def _paged_chunks(self, step: Step) -> list:
        """Return the pieces of prompts that attend to the cache.

        A latent is expanded for tokens that attend to one another, which takes fewer FLOPs.
        """
        return step.continued if self._model.config.mla is not None else step.chunks

    def _pass(
        self, step: Step, inputs: StepInputs, window: DecodeWindow, processing: Processing | None,
    ) -> tuple[Tensor, Tensor] | None:
        """Run the pass of a step; the last stage returns the tokens of its rows, if any, and their log-probs.

        Rows and chunks go through two passes if passes are recorded, or if experts are on several ranks: rows
        are then gathered, and an empty step takes part in both passes.
        """
        last_tokens = self._buffer.tokens[:0, 0]
        if step.decoding:
            last_tokens = self._buffer.tokens[inputs.row_S[: len(step.decoding)], inputs.last_column_B]
        x = self._input(last_tokens, [inputs.prompt_T] if step.chunks else [])
        num_rows = len(step.decoding)
        is_last = self._parallel.is_last_stage
        draws = is_last and not self._buffer.has_processing  # In the recorded pass.
        drawn: list[tuple[Tensor, Tensor]] = []
        if self._graphs is None and self._parallel.ep.size == 1:
            hidden = self._extend(x, self._segments(step, inputs))
        else:
            parts = []
            if window.num_rows:
                decoded = self._decode(x[:num_rows], step, inputs, window, draws=draws)
                parts.append(decoded.hidden_BH)
                if decoded.tokens_B is not None and decoded.logprobs_B is not None and step.decoding:
                    # Other cohorts overwrite the tokens, perhaps before they have been read.
                    drawn.append((decoded.tokens_B.clone(), decoded.logprobs_B))
            if window.prefills:
                chunks = replace(step, decoding=[])
                parts.append(self._extend(x[num_rows:], self._segments(chunks, inputs)))
            hidden = parts[0] if len(parts) == 1 else torch.cat(parts)
        if not is_last:
            self._sent.append(self._parallel.pp.post([(self._parallel.at.pp + 1, hidden.contiguous())], []))
            return None
        num_drawn = num_rows if drawn else 0
        if len(step.rows) > num_drawn:
            hidden = hidden[inputs.last_S[num_drawn:]] if step.chunks else hidden
            drawn.append(draw_tokens(
                self._model, hidden, inputs.draw_S[num_drawn:], config=self._sampling,
                processing=processing))
        if len(drawn) < 2:
            return drawn[0] if drawn else None
        tokens, logprobs = zip(*drawn, strict=True)
        return torch.cat(tokens), torch.cat(logprobs)

    def _decode(
        self, x: Tensor, step: Step, inputs: StepInputs, window: DecodeWindow, *, draws: bool
    ) -> Decoded:
        """Compute the rows of a step, and if it `draws` perhaps their tokens; other ranks of the ep group may
        have more or fewer of them."""
        if self._graphs is None:
            with self._model.gathering(window.num_rows):
                return Decoded(self._extend(x, self._segments(replace(step, chunks=[]), inputs)))
        pages = inputs.row_pages or self._graphs.padding(window.num_rows, window.num_pages)
        if draws:
            return self._graphs(
                x, pages, uniform_B=inputs.draw_S[: len(step.decoding)], sampling=self._sampling)
        decoded = self._graphs(x, pages)
        # Other cohorts overwrite it, perhaps before it has been sent.
        return decoded if self._parallel.is_last_stage else Decoded(decoded.hidden_BH.clone())

    def _extend(self, x: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Run tokens through this stage; without any, only its experts compute something."""
        if not segments:
            return self._model(x, [])
        return self._model.advance(x, self._pool.cache, segments)

    def _segments(self, step: Step, inputs: StepInputs) -> list[Segment]:
        """Return the segments of a pass over the rows of a step, if there are any, and the chunks."""
        size = self._tables.block_size
        backends = self._pool.backends
        if backends is None:
            return list(cpu_segments(self._decoding if step.decoding else None, step.chunks, page_size=size))
        segments: list[Segment] = []
        if step.decoding:
            assert inputs.row_pages is not None
            longest = int(self._tables.lens[self._tables.running()].max())
            segments.append(paged_rows(backends, inputs.row_pages, page_size=size, longest=longest))
        if chunks := self._paged_chunks(step):
            assert inputs.chunk_pages is not None
            segments.append(paged_chunks(backends, inputs.chunk_pages, chunks))
        if len(chunks) < len(step.chunks):
            segments.append(prefill(step.fresh, page_size=size, device=self._device))
        return segments

    def _input(self, last_tokens: Tensor, prompts: Sequence[Tensor]) -> Tensor:
        """Return the tokens of a pass on the first stage, the previous stage's hidden states on others."""
        if self._parallel.is_first_stage:
            return torch.cat([last_tokens, *prompts]) if prompts else last_tokens
        num_tokens = len(last_tokens) + sum(map(len, prompts))
        hidden = self._model.flat.new_empty(num_tokens, self._model.config.hidden_size)
        self._parallel.pp.exchange([], [(self._parallel.at.pp - 1, hidden)])
        return hidden


_NUM_BUFFERS = MOST_STEPS + 3  # When a step's buffer is written again, a later step has been read.
_ALIGNMENT = 16  # Bytes; kernels load several numbers at a time.


class StepUpload:
    """Sends all numbers of a step to the device in one copy.

    The copies start from a ring of pinned buffers. The host waits for the last copy from a buffer before it
    writes to it again. While rows decode, that copy has ended: the tokens of a later step have been read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ring = [torch.empty(0, dtype=torch.uint8)] * (0 if device.type == "cpu" else _NUM_BUFFERS)
        self._next = 0
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._ring)
        """The ends of the last copies from the buffers."""

    def __call__(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Return the arrays as tensors on the device; a CPU shares the arrays' memory."""
        if not self._ring:
            return [torch.from_numpy(array) for array in arrays]
        padded_sizes = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
        *starts, stop = accumulate(padded_sizes, initial=0)
        num_bytes = max(_ALIGNMENT, stop)
        number = self._next
        self._next = (number + 1) % len(self._ring)
        buffer = self._buffer(number, num_bytes)
        on_host = buffer.numpy()
        for start, array in zip(starts, arrays, strict=True):
            on_host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device = buffer[:num_bytes].to(self._device, non_blocking=True)
        copied = self._copied[number] = torch.cuda.Event()
        copied.record()
        return [
            on_device[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
            for start, array in zip(starts, arrays, strict=True)
        ]

    def _buffer(self, number: int, num_bytes: int) -> Tensor:
        """Return a buffer of the ring, of at least so many bytes, that no copy reads any more."""
        copied = self._copied[number]
        if copied is not None and not copied.query():
            copied.synchronize()
        if len(self._ring[number]) < num_bytes:
            size = 1 << (num_bytes - 1).bit_length()
            self._ring[number] = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._ring[number]
