"""Runs the micro-batches of a batch through the pipeline stages by Megatron-Core's schedules: 1F1B, or
interleaved 1F1B if stages have several chunks of the model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from realhf.data.batch import Packed
from realhf.data.micro_batch import interleaved_group
from realhf.distributed.parallel import ParallelGroups
from realhf.engine.megatron.process_groups import StageMessages

ResultOf = Callable[[int, Tensor], Any]
"""(number of the micro-batch, hidden states of the last stage) -> its loss, or any result."""


class PipelineSchedule:
    """The schedule of the chunks of a stage, or of their wrappers for training."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], config: TransformerConfig,
        collection: ProcessGroupCollection, groups: ParallelGroups,
    ) -> None:  # fmt: skip
        self._chunks = list(chunks)
        self._config = config
        self._collection = collection
        self._layout = layout = groups.layout
        self._is_interleaved = len(chunks) > 1
        self._run = get_forward_backward_func(
            pp_size=layout.pp, vp_size=layout.vp if self._is_interleaved else None)
        self._messages = (
            {"p2p_communicator": StageMessages(groups, collection.pp, config)} if layout.pp > 1 else {})

    def run(self, micro_batches: Sequence[Packed], result_of: ResultOf, *, recompute: bool) -> list[Any]:
        """Return the last stage's results; run backward passes, and sum the gradients, if autograd is on.

        With `recompute`, every layer keeps only its input for the backward pass.
        """
        train = torch.is_grad_enabled()
        self._config.recompute_granularity = "full" if recompute else None
        self._config.recompute_method = "uniform" if recompute else None
        self._config.recompute_num_layers = 1 if recompute else None
        count = len(micro_batches)
        sizes = self._padded_sizes(micro_batches)
        results: list[Any] = []

        def forward(numbers: Iterator[int], model: torch.nn.Module) -> tuple[Tensor, Any]:
            number = next(numbers)
            ids_T, seq_lens = padded(micro_batches[number], sizes[number])
            return model(ids_T, seq_lens), partial(collect, number)

        def collect(number: int, hidden: Tensor, non_loss_data: bool = False) -> Any:
            result = result_of(number, hidden)
            results.append(result.detach() if train else result)
            # A loss, the number of tokens by which nothing is divided, and what the schedule collects.
            return (result, torch.ones((), dtype=torch.int, device=hidden.device), {}) if train else {}

        numbers = [iter(range(count)) for _ in self._chunks]
        if self._is_interleaved:
            self._config.microbatch_group_size_per_vp_stage = interleaved_group(count, self._layout.pp)
        self._run(
            forward_step_func=forward, data_iterator=numbers if self._is_interleaved else numbers[0],
            model=self._chunks if self._is_interleaved else self._chunks[0], num_microbatches=count,
            seq_length=sizes[0], micro_batch_size=1, forward_only=not train, collect_non_loss_data=not train,
            pg_collection=self._collection, **self._messages)  # fmt: skip
        return results

    def _padded_sizes(self, micro_batches: Sequence[Packed]) -> list[int]:
        """Return the size of each micro-batch: a multiple of tp, and under a pipeline the same for all.

        Messages between stages of different sizes would have to be announced, for which the host waits.
        """
        tp = self._layout.tp
        sizes = [max(1, -(-len(tokens.values) // tp)) * tp for tokens in micro_batches]
        return sizes if self._layout.pp == 1 else [max(sizes)] * len(sizes)


def padded(tokens: Packed, size: int) -> tuple[Tensor, list[int]]:
    """Return packed tokens with a last sequence of padding up to this size, and the sequences' lengths."""
    num_padding = size - len(tokens.values)
    if not num_padding:
        return tokens.values, list(tokens.lengths)
    return torch.nn.functional.pad(tokens.values, (0, num_padding)), [*tokens.lengths, num_padding]
