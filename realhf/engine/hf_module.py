"""TransformersModel: an unsharded model of one of transformers' own classes, with weights in flat memory.

Shape suffixes: T tokens of all sequences end to end, B rows of a padded batch, L its length, X outputs of the
head for a token: logits, or one score.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor

from realhf.data.batch import Packed
from realhf.dist.parallel import ParallelGroups
from realhf.engine.hf_factory import in_files, make_model, named_tensors, random_model, read_model
from realhf.errors import UserError
from realhf.nn.parameters import ShardedParameters
from realhf.param_spec import ModelSpec, ParamSpec
from realhf.transformers_config import TransformersConfig


class TransformersModel(ShardedParameters):
    """A model whose parameters are the tensors of the state dict; every rank holds all of them."""

    def __init__(
        self, spec: ModelSpec, groups: ParallelGroups, *, dtype: torch.dtype, memory: Tensor | None = None
    ) -> None:
        super().__init__(spec, groups, dtype=dtype, memory=memory)
        self._can_recompute = False
        self.hf = make_model(self._own_config, device=groups.world.device, dtype=dtype)
        # A sampled padding token is an ordinary token: its embedding must get a gradient.
        self.hf.get_input_embeddings().padding_idx = None
        # Generation follows the call's settings, not generation_config.json.
        self.hf.generation_config = import_module("transformers").GenerationConfig()
        for names, tensor in named_tensors(self.hf):
            for name in names:
                path, _, attribute = name.rpartition(".")
                module = self.hf.get_submodule(path)
                if isinstance(tensor, torch.nn.Parameter):
                    module._parameters[attribute] = self.of_layer(0)[names[0]]
                else:
                    module._buffers[attribute] = self.shards()[names[0]]

    @property
    def _own_config(self) -> TransformersConfig:
        assert isinstance(self.config, TransformersConfig)
        return self.config

    def _fused_part(self, param: ParamSpec) -> str:
        return param.part

    @torch.no_grad()
    def load(self, directory: Path | None, *, seed: int) -> None:
        """Load weights from a Hugging Face directory; draw a missing score head, or all weights, from `seed`.

        Raises ValueError that names the directory and the tensor.
        """
        if directory is None:
            made = random_model(self._own_config, seed=seed)
        else:
            made, further = read_model(str(directory), self._own_config, dtype=self.flat.dtype, seed=seed)
            if further and self.groups.rank == self.groups.layout.ranks[0]:
                more = f" and {len(further) - 1} more" if len(further) > 1 else ""
                print(f"realhf: {directory}: {further[0]}{more} is left out", file=sys.stderr)
        for names, tensor in named_tensors(made):
            self.shards()[names[0]].copy_(tensor)

    def file_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are written to this model's files."""
        return in_files(self.hf, self.shards())

    def __call__(self, tokens: Packed, *, recompute: bool = False) -> Tensor:
        """Return the head's outputs for every token: x_BLX of right-padded rows, one sequence each.

        With `recompute`, every layer keeps only its input and is computed again in the backward pass.
        """
        limit = self.config.num_positions
        longest = max(tokens.lengths, default=0)
        if limit is not None and longest > limit:
            raise UserError(f"a sequence has {longest} tokens; the model has {limit} positions")
        lengths = torch.tensor(tokens.lengths, device=tokens.values.device)
        ids_BL = torch.nn.utils.rnn.pad_sequence(list(tokens.split()), batch_first=True)
        mask_BL = (torch.arange(longest, device=lengths.device) < lengths[:, None]).long()
        inputs = {"input_ids": ids_BL, "attention_mask": mask_BL, "use_cache": False}
        with self._recomputing() if recompute else nullcontext():
            if self.config.head == "lm":
                return self.hf(**inputs).logits
            hidden = getattr(self.hf, self.hf.base_model_prefix)(**inputs)[0]
        return self.hf.score(hidden)

    @contextmanager
    def _recomputing(self) -> Iterator[None]:
        """Put layers in training mode, in which alone they recompute; as there is no dropout, nothing else
        differs."""
        if not self._can_recompute:
            if not self.hf.supports_gradient_checkpointing:
                raise UserError(f"transformers' {type(self.hf).__name__} cannot recompute: plan without it")
            new = getattr(self.hf, "activation_checkpointing_enable", None)
            (new or self.hf.gradient_checkpointing_enable)({"use_reentrant": False})
            self._can_recompute = True
        layers = [module for module in self.hf.modules() if hasattr(module, "gradient_checkpointing")]
        for module in layers:
            module.training = True
        yield
        for module in layers:  # In training mode, layers would not use a cache to generate.
            module.training = False
