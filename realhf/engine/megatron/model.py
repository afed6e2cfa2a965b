"""MegatronModel: a chunk of one rank's stage of a model, whose layers are Megatron-Core's.

The embedding and the head are our own: they split the vocabulary as our parameter table does, so that it
needs no padding, and the head never holds the logits of all tokens (nn/vocab_parallel.py).

Shape suffixes: T tokens of all sequences and of the padding, B batch (always 1), H hidden; with tensor
parallelism, hidden states inside the model have only this rank's share of the tokens.
"""

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from realhf.attention.interface import Sequences, token_positions
from realhf.distributed.parallel import ParallelGroups
from realhf.engine.megatron.layers import Packing, block_spec
from realhf.models.param_spec import ModelSpec
from realhf.nn.rope import Rotary
from realhf.nn.vocab_parallel import Head, head_logprobs, head_top_logprobs


class MegatronModel(MegatronModule):
    """A chunk of a pipeline stage: the embedding (first chunk of the first stage), Megatron-Core's layers,
    and the head (last chunk of the last stage). Stages have one chunk, unless chunks are interleaved.

    Calling it runs a micro-batch through the chunk. On the last one, `rows` turns the result into hidden
    states, and `logprobs`, `scores` and `top_logprobs` turn these into outputs.
    """

    share_embeddings_and_output_weights = False  # The engine sums the gradients of tied weights itself.
    def __init__(
        self, spec: ModelSpec, groups: ParallelGroups, collection: ProcessGroupCollection,
        config: TransformerConfig, *, chunk: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        layout = groups.layout
        self.spec = spec
        self.groups = groups
        self.shape = spec.config
        self.model_type = ModelType.encoder_or_decoder
        self.vp_stage = chunk if layout.vp > 1 else None
        self.pre_process = groups.is_first_stage and chunk == 0
        self.post_process = groups.is_last_stage and chunk == layout.vp - 1
        self.wide = torch.promote_types(config.params_dtype, torch.float32)
        """Dtype of values that need precision."""
        self._tp = collection.tp
        param = next(p for p in spec.params if p.short_name == "embedding.weight")
        self.vocab_range = param.region(layout.tp, groups.at.tp)[0]
        """Global token ids of this rank's rows of the embedding: [start, stop)."""
        num_rows = self.vocab_range[1] - self.vocab_range[0]
        self.embedding = self._matrix(num_rows) if self.pre_process else None
        self.layers = spec.chunk_layers(layout.strategy, groups.at.pp)[chunk]
        self.decoder = TransformerBlock(
            config=config, spec=block_spec(spec.config, self.layers, config), pre_process=self.pre_process,
            post_process=self.post_process, pg_collection=collection, vp_stage=self.vp_stage)
        self.output = None
        """Weight of the head, unless it is the embedding of this chunk."""
        if self.post_process and not (spec.config.tied and self.pre_process):
            self.output = self._matrix(1 if spec.config.head == "score" else num_rows)
        dtype = config.params_dtype
        self._embedding_scale = float(torch.tensor(spec.config.embedding_scale, dtype=dtype))
        self._rotary = None
        if spec.config.positions == "rope":
            self._rotary = Rotary(spec.config, dtype=dtype, device=groups.world.device)

    @property
    def matrices(self) -> list[torch.nn.Parameter]:
        """The embedding and the weight of the head that this chunk holds."""
        return [matrix for matrix in (self.embedding, self.output) if matrix is not None]

    def _matrix(self, num_rows: int) -> torch.nn.Parameter:
        shape = (num_rows, self.shape.hidden_size)
        empty = torch.empty(shape, dtype=self.config.params_dtype, device=self.groups.world.device)
        return torch.nn.Parameter(empty)

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """Take the hidden states of the stage before; Megatron-Core's schedule calls this."""
        self.decoder.set_input_tensor(input_tensor[0])

    def forward(self, ids_T: Tensor, seq_lens: Sequence[int]) -> Tensor:
        """Run packed sequences through the chunk; return hidden_TBH of this rank's share of the tokens."""
        packing = self._packing(seq_lens)
        hidden_TBH = self._embed(ids_T) if self.embedding is not None else None
        result = self.decoder(hidden_states=hidden_TBH, attention_mask=None, packed_seq_params=packing)
        assert isinstance(result, Tensor)
        return result

    def _packing(self, seq_lens: Sequence[int]) -> Packing:
        angles = None
        if self._rotary is not None:
            _, position_T, length_T = token_positions(seq_lens, self.groups.world.device)
            angles = self._rotary(position_T, length_T)
        sequences = Sequences.of(seq_lens, self.groups.world.device)
        return Packing(qkv_format="sbhd", sequences=sequences, angles=angles)

    def _embed(self, ids_T: Tensor) -> Tensor:
        assert self.embedding is not None
        if self.groups.tp.size == 1:
            x_TBH = F.embedding(ids_T, self.embedding)[:, None]
        else:
            start, stop = self.vocab_range
            here_T = (ids_T >= start) & (ids_T < stop)
            x_TH = F.embedding(torch.where(here_T, ids_T - start, 0), self.embedding) * here_T[:, None]
            x_TBH = reduce_scatter_to_sequence_parallel_region(x_TH[:, None], group=self._tp)
        return x_TBH if self._embedding_scale == 1 else x_TBH * self._embedding_scale

    def rows(self, hidden_TBH: Tensor) -> Tensor:
        """Return hidden_TH of all tokens, on the last stage."""
        if self.groups.tp.size > 1:  # The gradient is whole on every rank (see `Head`), so each takes a part.
            hidden_TBH = gather_from_sequence_parallel_region(
                hidden_TBH, tensor_parallel_output_grad=False, group=self._tp)
        return hidden_TBH[:, 0]

    @cached_property
    def head(self) -> Head:
        """The output head over `vocab_range`, on the last stage."""
        weight = self.embedding if self.output is None else self.output
        assert weight is not None
        return Head(
            weight, self.vocab_range[0], self.groups.tp, scale=self.shape.logit_scale,
            softcap=self.shape.logit_softcap)

    def logprobs(
        self, hidden_TH: Tensor, labels: Tensor, *, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the labels' log-probs, and the entropies if `entropy`; see `head_logprobs`."""
        return head_logprobs(hidden_TH, labels, self.head, temperature=temperature, entropy=entropy)

    def top_logprobs(self, hidden_TH: Tensor, k: int, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the ids and the log-probs of the `k` most probable tokens; see `head_top_logprobs`."""
        return head_top_logprobs(hidden_TH, self.head, k, temperature=temperature)

    def scores(self, hidden_TH: Tensor) -> Tensor:
        """Return scores_T, in dtype `wide`, on the last stage of a model with a score head."""
        assert self.output is not None
        return F.linear(hidden_TH, self.output)[:, 0].to(self.wide)
