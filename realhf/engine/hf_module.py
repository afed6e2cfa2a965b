"""TransformersModel: an unsharded model of one of transformers' own classes, with weights in flat memory.

Shape suffixes: B rows of a padded batch, L its length, N some of its tokens, X outputs of the head for a
token: logits, or one score.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from realhf.data.batch import Packed
from realhf.devices.pinned import upload
from realhf.distributed.parallel import ParallelGroups
from realhf.engine import hf_factory
from realhf.errors import UserError
from realhf.models.param_spec import ModelSpec, ParamSpec
from realhf.nn.linear import collects, embedding, linear
from realhf.nn.parameters import ShardedParameters
from realhf.nn.vocab_parallel import top_tokens


def _linear(module: torch.nn.Linear, x: Tensor) -> Tensor:
    """Return the output of a linear layer, whose weight adds up its gradients in float32."""
    if not torch.is_grad_enabled() or not collects(module.weight):
        return F.linear(x, module.weight, module.bias)
    return linear(x.flatten(0, -2), module.weight, module.bias).unflatten(0, x.shape[:-1])


def _embedding(module: torch.nn.Embedding, ids: Tensor) -> Tensor:
    """Return the rows of an embedding, which adds up its gradients in float32."""
    if not torch.is_grad_enabled() or not collects(module.weight):
        return F.embedding(ids, module.weight)
    return embedding(ids.flatten(), module.weight).unflatten(0, ids.shape)


class TransformersModel(ShardedParameters):
    """A model whose parameters are the tensors of the state dict; every rank holds all of them.

    The gradients of its other 16-bit parameters, such as those of norms, are computed by autograd, which
    rounds that of each micro-batch before it is added up in float32.
    """

    def __init__(
        self, spec: ModelSpec, groups: ParallelGroups, *, dtype: torch.dtype, memory: Tensor | None = None
    ) -> None:
        super().__init__(spec, groups, dtype=dtype, memory=memory)
        self._can_recompute = False
        self.hf = hf_factory.make_model(hf_factory.config_of(spec), device=groups.world.device, dtype=dtype)
        # A sampled padding token is an ordinary token: its embedding must get a gradient.
        self.hf.get_input_embeddings().padding_idx = None
        # Generation follows the call's settings, not generation_config.json.
        self.hf.generation_config = import_module("transformers").GenerationConfig()
        for module in self.hf.modules():
            if type(module) is torch.nn.Linear:
                module.forward = partial(_linear, module)  # type: ignore[method-assign]
            elif type(module) is torch.nn.Embedding:
                module.forward = partial(_embedding, module)  # type: ignore[method-assign]
        for names, tensor in hf_factory.named_tensors(self.hf):
            for name in names:
                path, _, attribute = name.rpartition(".")
                module = self.hf.get_submodule(path)
                if isinstance(tensor, torch.nn.Parameter):
                    module._parameters[attribute] = self.of_layer(0)[names[0]]
                else:
                    module._buffers[attribute] = self.shards()[names[0]]

    def _weight_name(self, param: ParamSpec) -> str:
        return param.short_name

    @torch.no_grad()
    def load(self, directory: Path | None, *, seed: int) -> None:
        """Load weights from a Hugging Face directory; draw a missing score head, or all weights, from `seed`.

        Raises ValueError that names the directory and the tensor.
        """
        if directory is None:
            model = hf_factory.random_model(hf_factory.config_of(self.spec), seed=seed)
        else:
            model, unused = hf_factory.read_model(
                str(directory), hf_factory.config_of(self.spec), dtype=self.flat.dtype, seed=seed)
            if unused and self.groups.rank == self.groups.layout.ranks[0]:
                more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
                print(f"realhf: {directory}: {unused[0]}{more} is left out", file=sys.stderr)
        for names, tensor in hf_factory.named_tensors(model):
            self.shards()[names[0]].copy_(tensor)

    def file_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are written to this model's files."""
        return hf_factory.in_files(self.hf, self.shards())

    def __call__(self, tokens: Packed, *, recompute: bool = False) -> Tensor:
        """Return the head's outputs for every token: x_BLX of right-padded rows, one sequence each.

        With `recompute`, every layer keeps only its input and is computed again in the backward pass.
        """
        self.check_lengths(tokens.lengths)
        ids_BL = torch.nn.utils.rnn.pad_sequence(list(tokens.split()), batch_first=True)
        inputs = {"input_ids": ids_BL, "attention_mask": token_mask(tokens).long(), "use_cache": False}
        with self._recomputing() if recompute else nullcontext():
            if self.config.head == "lm":
                return self.hf(**inputs).logits
            hidden = getattr(self.hf, self.hf.base_model_prefix)(**inputs)[0]
        return self.hf.score(hidden)

    def scores(self, x_NX: Tensor) -> Tensor:
        """Return scores_N, in dtype `wide`, given outputs of a score head."""
        return x_NX[:, 0].to(self.wide)

    def logprobs(
        self, x_NX: Tensor, labels: Tensor, *, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the log-probs of one label or several per token, and the entropies if `entropy`, given
        logits. Labels beyond the vocabulary get meaningless values."""
        logprobs_NX = (x_NX.to(self.wide) / temperature).log_softmax(-1)
        entropy_N = _Entropy.apply(logprobs_NX) if entropy else None
        columns = 1 if labels.dim() == 1 else labels.shape[1]
        labels = labels.clamp(max=logprobs_NX.shape[1] - 1)
        return logprobs_NX.gather(1, labels.reshape(-1, columns)).view(labels.shape), entropy_N

    def top_logprobs(self, x_NX: Tensor, k: int, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Return the ids and the log-probs of the `k` most probable tokens, given logits."""
        logits_NX = x_NX.to(self.wide) / temperature
        top_NK, ids_NK = top_tokens(logits_NX, k)
        return ids_NK, top_NK - logits_NX.logsumexp(1, keepdim=True)

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


def token_mask(tokens: Packed) -> Tensor:
    """Return where a right-padded batch of the sequences has tokens: mask_BL."""
    lengths = upload(np.array(tokens.lengths, np.int64), tokens.values.device)
    return torch.arange(max(tokens.lengths, default=0), device=lengths.device) < lengths[:, None]


def rows_of_tokens(tokens: Packed) -> NDArray[np.int64]:
    """Return, on the host, the place of each token in a right-padded batch that is laid end to end."""
    lengths = np.array(tokens.lengths, np.int64)
    is_token_BL = np.arange(lengths.max(initial=0)) < lengths[:, None]
    return np.flatnonzero(is_token_BL)


class _Entropy(torch.autograd.Function):
    """The entropy of distributions given as log-probs.

    It saves nothing but the log-probs, which log_softmax saves anyway, and costs nothing in the backward pass
    unless the loss uses it.
    """

    @staticmethod
    def forward(ctx: Any, logprobs_NX: Tensor) -> Tensor:
        ctx.save_for_backward(logprobs_NX)
        return -(logprobs_NX.exp() * logprobs_NX).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> Tensor:
        (logprobs_NX,) = ctx.saved_tensors
        return (logprobs_NX + 1).mul_(logprobs_NX.exp()).mul_(-grad_N[:, None])
