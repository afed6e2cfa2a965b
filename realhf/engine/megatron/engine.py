"""MegatronEngine: trains a role, and computes its forward passes, with Megatron-Core.

Micro-batches pass through the pipeline stages by Megatron-Core's schedules: 1F1B, or interleaved 1F1B if
stages have several chunks of the model. The native engine generates for such a role, from a copy of its
weights.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from torch import Tensor

from realhf.calls import OptimizerConfig
from realhf.checkpoint.hf import read_shards
from realhf.data.batch import Batch, Packed
from realhf.data.micro_batch import attention_share, interleaved_group, micro_batches
from realhf.distributed.pieces import Shards
from realhf.distributed.process import Report
from realhf.distributed.world import ParallelGroups, World
from realhf.engine.base import DTYPES, Outputs, PassSettings, SequenceEngine
from realhf.engine.chunked_loss import run_head
from realhf.engine.megatron.model import MegatronModel, make_config
from realhf.engine.megatron.optimizer import MegatronTrainer
from realhf.engine.megatron.pieces import blocks_of, by_name
from realhf.engine.megatron.process_groups import StageMessages, make_collection
from realhf.errors import UserError
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.param_spec import ModelSpec
from realhf.nn.parameters import draw_parameters


class MegatronEngine(SequenceEngine):
    """An engine for the models and layouts that `MegatronConfig` accepts."""

    def __init__(
        self, spec: ModelSpec, layout: Layout, world: World,
        *, dtype: str, optimizer: OptimizerConfig | None = None, memory: torch.Tensor | None = None,
        lora: LoraConfig | None = None, adapter_memory: torch.Tensor | None = None,
        float32_head: bool = False, overlap: bool | None = None,
    ) -> None:
        """With `overlap`, which is the default on CUDA, gradients are summed during the backward pass."""
        assert memory is None and lora is None and not float32_head, "a Role with this engine has none"
        _start_globals()
        groups = ParallelGroups.create(world, layout)
        collection = make_collection(groups)
        config = make_config(spec.config, layout, dtype=DTYPES[dtype], device=world.device)
        self.chunks = [MegatronModel(spec, groups, collection, config, chunk=i) for i in range(layout.vp)]
        self.model = self.chunks[-1]
        """The last chunk of this stage: on the last stage the one with the head."""
        super().__init__(self.model, optimizer=None)
        self._blocks = blocks_of(self.chunks)
        self._trainer = None
        if optimizer is not None:
            overlap = world.device.type == "cuda" if overlap is None else overlap
            self._trainer = MegatronTrainer(
                self.chunks, config, collection, optimizer, blocks=self._blocks, overlap=overlap)
            self._optimizer = self._trained = self._trainer  # type: ignore[assignment]
        for chunk in self.chunks:
            chunk.requires_grad_(False)
        self._runs = [*self.chunks] if self._trainer is None else [*self._trainer.wrapped]
        """The chunks, or their wrappers for training."""
        self._config = config
        self._schedule = get_forward_backward_func(
            pp_size=layout.pp, vp_size=layout.vp if layout.vp > 1 else None)
        self._options: dict[str, Any] = {"pg_collection": collection}
        if layout.pp > 1:
            self._options["p2p_communicator"] = StageMessages(groups, collection.pp, config)

    @property
    def flat(self) -> torch.Tensor:
        """One of the parameters, by which engines that share their memory are known; this one never does."""
        return next(self.model.parameters()).detach()

    def memory(self) -> Mapping[str, int]:
        """Return the bytes of the device that each part of this engine takes now, without empty parts."""
        weights = (param.nbytes for chunk in self.chunks for param in chunk.parameters())
        parts = {"weights": sum(weights)}
        if self._trainer is not None:
            parts |= {"gradients": self._trainer.grad_bytes, "optimizer": self._trainer.state_bytes}
        return {part: size for part, size in parts.items() if size}

    @cached_property
    def _shards(self) -> Shards:
        return by_name((block.name, block.piece()) for block in self._blocks)

    def shards(self) -> Shards:
        return self._shards

    def export_shards(self) -> Shards:
        return self._shards

    def load_base(self, directory: Path | None, *, seed: int) -> None:
        spec, layout = self.model.spec, self.groups.layout
        missing = None
        if directory is not None:
            is_first = self.groups.rank == layout.ranks[0]
            missing = read_shards(directory, spec, self._shards, announce=is_first)
        draw_parameters(spec, self._shards, seed=seed, names=missing)

    def _micro_batches(
        self, lengths: Sequence[int], groups: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        """Return micro-batches, of which some may be empty.

        There is at least one, and one for each stage if chunks are interleaved. The ranks of an ep group,
        whose micro-batches pass through the experts together, have equally many.
        """
        layout = self.groups.layout
        parts = micro_batches(
            lengths, max_tokens=max_tokens, groups=groups, at_least=layout.pp,
            attention=attention_share(self.model.spec))
        count = max(len(parts), layout.pp if layout.vp > 1 else 1)
        if self.groups.ep.size > 1:
            count = max(self.groups.ep_control.all_gather_json(count))
        return parts + [[]] * (count - len(parts))

    def _run_passes(
        self, micro_batches: list[Batch], settings: PassSettings, report: Report
    ) -> list[Outputs]:
        train = torch.is_grad_enabled()
        layout = self.groups.layout
        config = self._config
        config.recompute_granularity = "full" if settings.recompute else None
        config.recompute_method = "uniform" if settings.recompute else None
        config.recompute_num_layers = 1 if settings.recompute else None
        if train:
            assert self._trainer is not None
            self._trainer.start()
        count = len(micro_batches)
        packed = [samples[settings.key] for samples in micro_batches]
        sizes = padded_sizes(packed, layout)
        results: list[Outputs] = []

        def forward(numbers: Iterator[int], model: torch.nn.Module) -> tuple[Tensor, Any]:
            number = next(numbers)
            ids_T, seq_lens = padded(packed[number], sizes[number])
            return model(ids_T, seq_lens), partial(loss_of, number)

        def loss_of(number: int, hidden: Tensor, non_loss_data: bool = False) -> Any:
            report(f"micro-batch {number + 1} of {count}")
            hidden_TH = self.model.rows(hidden)[: len(packed[number].values)]
            loss, parts = run_head(self.model, hidden_TH, micro_batches[number], settings)
            results.extend(parts)
            # A loss, the number of tokens by which nothing is divided, and what the schedule collects.
            return (loss, torch.ones((), dtype=torch.int, device=hidden.device), {}) if train else {}

        numbers = [iter(range(count)) for _ in self._runs]
        is_interleaved = layout.vp > 1
        if is_interleaved:
            config.microbatch_group_size_per_vp_stage = interleaved_group(count, layout.pp)
        self._schedule(
            forward_step_func=forward, data_iterator=numbers if is_interleaved else numbers[0],
            model=self._runs if is_interleaved else self._runs[0], num_microbatches=count,
            seq_length=sizes[0], micro_batch_size=1, forward_only=not train, collect_non_loss_data=not train,
            **self._options)
        return results


def _start_globals() -> None:
    """Make the two globals that Megatron-Core needs even with explicit groups.

    These are a buffer for gathered activations, and random states; without dropout it draws no numbers.
    `parallel_state` has no groups, so that whatever reads one from there raises.
    """
    logging.getLogger("megatron.core").setLevel(logging.WARNING)
    try:
        torch.cuda.current_device()
    except (AssertionError, RuntimeError) as error:
        mend = "use engine native on this machine"
        raise UserError(f"engine megatron needs a GPU ({error}): {mend}") from error
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    if not get_cuda_rng_tracker().is_initialized():
        model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)


def padded_sizes(micro_batches: Sequence[Packed], layout: Layout) -> list[int]:
    """Return the size of each micro-batch: a multiple of tp, and under a pipeline the same for all.

    Messages between stages of different sizes would have to be announced, for which the host waits.
    """
    sizes = [max(1, -(-len(tokens.values) // layout.tp)) * layout.tp for tokens in micro_batches]
    return sizes if layout.pp == 1 else [max(sizes)] * len(sizes)


def padded(tokens: Packed, size: int) -> tuple[Tensor, list[int]]:
    """Return packed tokens with a last sequence of padding up to this size, and the sequences' lengths."""
    num_padding = size - len(tokens.values)
    if not num_padding:
        return tokens.values, list(tokens.lengths)
    return torch.nn.functional.pad(tokens.values, (0, num_padding)), [*tokens.lengths, num_padding]
