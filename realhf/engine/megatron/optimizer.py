"""Training with Megatron-Core's gradient buffers and its distributed optimizer (ZeRO-1)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import Adam, ChainedOptimizer, DistributedOptimizer, OptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from realhf.calls import OPTIMIZER_STATE, learning_rate, states_of_weights
from realhf.calls import OptimizerConfig as AdamWConfig
from realhf.distributed.pieces import Piece, Shards
from realhf.engine.megatron.model import MegatronModel
from realhf.engine.megatron.pieces import MatrixBlock, by_name
from realhf.engine.optimizer import count_skipped

_KINDS = {kind: "param" if kind == "master" else kind for kind in OPTIMIZER_STATE}
"""Kind of tensor in our checkpoints -> its name in Megatron-Core's optimizer."""


class MegatronTrainer:
    """The gradients and the optimizer of a stage's chunks.

    Steps follow the same rules as those of `ShardedAdamW`. Each replica updates a part of the elements. The
    parts are gathered at the end of a step, so that the model's own weights are always up to date.
    """

    def __init__(
        self, chunks: Sequence[MegatronModel], transformer: TransformerConfig,
        collection: ProcessGroupCollection, config: AdamWConfig,
        *, blocks: Sequence[MatrixBlock], overlap: bool,
    ) -> None:
        """With `overlap`, gradients are summed over replicas during the last backward pass."""
        self.config = config
        self.num_steps = 0
        self.num_skipped = 0
        """Updates in a row that have been skipped so far."""
        self._chunks = chunks
        self._groups = chunks[0].groups
        self._blocks = blocks
        _mark(chunks, blocks)
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=overlap)
        self.wrapped = [
            DistributedDataParallel(transformer, settings, chunk, pg_collection=collection)
            for chunk in chunks
        ]
        transformer.finalize_model_grads_func = self._finish_grads
        transformer.no_sync_func = self._no_sync if overlap else None
        self._collection = collection
        kinds = (
            {i: wrapped.buffers for i, wrapped in enumerate(self.wrapped)},
            {i: wrapped.expert_parallel_buffers for i, wrapped in enumerate(self.wrapped)})
        self._optimizer = ChainedOptimizer(
            [self._make(buffers) for buffers in kinds if any(buffers.values())])

    def _make(self, by_chunk: Mapping[int, list[Any]]) -> DistributedOptimizer:
        """Return the optimizer of the parameters in some gradient buffers. Vectors have no weight decay.

        `get_megatron_optimizer` is not used, because it communicates with all ranks of the run.
        """
        config = self.config
        buffers = [buffer for of_chunk in by_chunk.values() for buffer in of_chunk]
        params = [param for buffer in buffers for param in buffer.params]
        matrices = [param for param in params if param.dim() > 1]
        vectors = [param for param in params if param.dim() == 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}]
        groups += [{"params": vectors, "weight_decay": 0.0}] if vectors else []
        adam = Adam(groups, lr=0.0, betas=config.betas, eps=config.eps)
        settings = OptimizerConfig(
            optimizer="adam", lr=0.0, use_distributed_optimizer=True, clip_grad=config.max_grad_norm,
            bf16=params[0].dtype == torch.bfloat16, params_dtype=params[0].dtype)
        optimizer = DistributedOptimizer(
            adam, settings, None, lambda *_: None, model_chunks=self.wrapped,
            per_model_buffers=by_chunk, data_parallel_group=buffers[0].data_parallel_group,
            data_parallel_group_gloo=None, data_parallel_group_idx=self._groups.layout.ranks.index(
                self._groups.rank), distributed_optimizer_instance_id=0)
        optimizer.grad_stats_parallel_group = self._collection.intra_dist_opt
        optimizer.tp_group = self._collection.tp
        for group in optimizer.optimizer.param_groups:
            for param in group["params"]:
                optimizer.optimizer.state[param] = {
                    "exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param),
                    "step": torch.zeros(())}
        return optimizer

    def _no_sync(self) -> ExitStack:
        """Return a context in which backward passes start no sums of gradients."""
        stack = ExitStack()
        for wrapped in self.wrapped:
            stack.enter_context(wrapped.no_sync())
        return stack

    def _finish_grads(self, models: Any, _: Any, *, pg_collection: Any, **options: Any) -> None:
        """Sum gradients: over replicas, of split norms over tp, and of a tied embedding over both its
        stages."""
        finalize_model_grads(models, None, pg_collection=pg_collection, **options)
        ends = self._groups.ends
        if self._chunks[0].shape.tied and ends is not None:
            (weight,) = (matrix for chunk in self._chunks for matrix in chunk.matrices)
            ends.all_reduce(weight.main_grad)  # type: ignore[attr-defined]

    def requires_grad_(self, requires_grad: bool) -> None:
        for chunk in self._chunks:
            chunk.requires_grad_(requires_grad)

    @property
    def _grad_buffers(self) -> list[torch.Tensor]:
        return [
            buffer.grad_data for wrapped in self.wrapped
            for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers)
        ]

    @property
    def grad_bytes(self) -> int:
        return sum(data.untyped_storage().nbytes() for data in self._grad_buffers)

    @property
    def state_bytes(self) -> int:
        """Bytes of the moments, and of the master copy unless the weights are it."""
        kinds = states_of_weights(is_narrow=self._chunks[0].config.params_dtype != torch.float32)
        return sum(x.nbytes for kind in kinds for boxes in self.state[kind].values() for _, x in boxes)

    def hold_grads(self) -> None:
        """Allocate the gradients, unless they are there."""
        for data in self._grad_buffers:
            data.untyped_storage().resize_(data.nbytes)

    def release_grads(self) -> None:
        """Free the memory of the gradients; views of it stay valid."""
        for data in self._grad_buffers:
            data.untyped_storage().resize_(0)

    def start(self) -> None:
        """Begin a mini-batch: set all gradients to zero."""
        self.hold_grads()
        for wrapped in self.wrapped:
            wrapped.zero_grad_buffer()
        self._optimizer.zero_grad()

    def reload(self) -> None:
        """Copy weights that were written from outside to the optimizer's copy."""
        self._optimizer.reload_model_params()

    @torch.no_grad()
    def step(self, *, gather: bool = True) -> dict[str, float]:
        """Clip, update and gather; return `grad_norm`, `lr` and `skipped_updates`, as `ShardedAdamW.step`.

        It always gathers. Raises FloatingPointError when too many gradient norms in a row are not finite.
        """
        optimizer = self._optimizer
        optimizer.prepare_grads()
        grad_norm = float(optimizer.get_grad_norm())
        self.num_skipped = count_skipped(
            grad_norm, self.config, num_steps=self.num_steps, num_skipped=self.num_skipped)
        if self.num_skipped:
            return {"skipped_updates": 1.0}
        lr = learning_rate(self.config, self.num_steps)
        self.num_steps += 1  # First, so that an interrupted update is not taken for none.
        for group in optimizer.param_groups:
            group["lr"] = lr
        for member in optimizer.chained_optimizers:
            clip_grad_by_total_norm_fp32(
                member.get_parameters(), max_norm=self.config.max_grad_norm, total_norm=grad_norm)
        optimizer.step_with_ready_grads()
        return {"grad_norm": grad_norm, "lr": lr, "skipped_updates": 0.0}

    @cached_property
    def state(self) -> Mapping[str, Shards]:
        """The tensors of this replica, which checkpoints hold: kind -> parameter name -> boxes."""
        return {kind: by_name(self._boxes(name)) for kind, name in _KINDS.items()}

    def _boxes(self, name: str) -> Iterator[tuple[str, Piece]]:
        """Yield parameter name and box of all that this replica owns of one of the optimizer's tensors."""
        for block in self._blocks:
            for member in self._optimizer.chained_optimizers:
                if block.tensor in member.model_param_gbuf_map:
                    owned = member._get_model_param_range_map(block.tensor)["param"]
                    values = member._get_main_param_and_optimizer_states(block.tensor)[name].detach()
                    for box in block.elements(owned.start, owned.end, values):
                        yield block.name, box

    def state_was_read(self, num_steps: int, num_skipped: int) -> None:
        """Continue after `num_steps` steps; `state` has been filled with that of a checkpoint."""
        self.num_steps = num_steps
        self.num_skipped = num_skipped
        for member in self._optimizer.chained_optimizers:
            for group in member.optimizer.param_groups:
                group["step"] = num_steps  # FusedAdam, of Transformer Engine and Apex, counts steps here.
                for param in group["params"]:
                    member.optimizer.state[param]["step"].fill_(num_steps)
            member._copy_main_params_to_model_params()
        for wrapped in self.wrapped:
            wrapped.start_param_sync(force_sync=True)


def _mark(chunks: Sequence[MegatronModel], blocks: Sequence[MatrixBlock]) -> None:
    """Mark parameters as Megatron-Core expects it, by which gradient norms count each value once."""
    params = {param.name: param for param in chunks[0].spec.params}
    for block in blocks:
        param = params[block.name]
        block.tensor.tensor_model_parallel = param.split_dim is not None  # type: ignore[attr-defined]
        block.tensor.partition_dim = param.split_dim or 0  # type: ignore[attr-defined]
        block.tensor.partition_stride = 1  # type: ignore[attr-defined]
    for chunk in chunks:
        for matrix in chunk.matrices:
            # In a bucket of its own: its size differs over tp, and its copy on the other end of the pipeline
            # must be split over replicas in the same way.
            matrix.shared_embedding = True  # type: ignore[attr-defined]
        if chunk.shape.tied and chunk.output is not None:
            chunk.output.shared = True  # type: ignore[attr-defined]
