"""TransformersEngine: runs calls on a model of one of transformers' own classes, by its forward and
generate.

TransformersModel holds the model unsharded, with its weights in flat memory.

Shape suffixes: B rows of a padded batch, L its length, N some of its tokens, X outputs of the head for a
token (logits, or one score), V the vocabulary.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from realhf.calls import Generate, OptimizerConfig, SamplingConfig
from realhf.data.batch import Batch, Packed
from realhf.data.micro_batch import padded_micro_batches
from realhf.devices.pinned import upload
from realhf.distributed.pieces import Shards, whole_parameters
from realhf.distributed.process import Report, no_report, prefixed
from realhf.distributed.world import ParallelGroups, World
from realhf.engine import hf_factory
from realhf.engine.base import (
    DTYPES,
    CallResult,
    GeneratingEngine,
    Outputs,
    PassSettings,
    generated,
    output_batch,
)
from realhf.engine.chunked_loss import run_head
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.inference.cache_memory import agreed_sizes, check_positions
from realhf.inference.response_buffer import ResponseBuffer, output_columns
from realhf.inference.rounds import Round, prompt_groups
from realhf.inference.sampling import for_vocabulary, sample, stream_seed
from realhf.inference.scheduler import BufferRow
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
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

    head: None = None
    """No head of ours: the class computes the logits of all tokens at once."""

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


class TransformersEngine(GeneratingEngine):
    """An engine for unsharded models of any family under data parallelism."""

    def __init__(
        self, spec: ModelSpec, layout: Layout, world: World,
        *, dtype: str, optimizer: OptimizerConfig | None = None, memory: Tensor | None = None,
        lora: LoraConfig | None = None, adapter_memory: Tensor | None = None,
        float32_head: bool = False,
    ) -> None:
        assert lora is None and adapter_memory is None, "a Role with this engine has no adapters"
        assert not float32_head, "a Role with this engine has no head in float32"
        groups = ParallelGroups.create(world, layout)
        self.model = TransformersModel(spec, groups, dtype=DTYPES[dtype], memory=memory)
        super().__init__(self.model, optimizer=optimizer)

    def load_base(self, directory: Path | None, *, seed: int) -> None:
        self.model.load(directory, seed=seed)

    def export_shards(self) -> Shards:
        return whole_parameters(self.model.file_tensors())

    def generate(
        self, call: FunctionCall, batch: Batch, *, unfinished: Batch | None = None, budget: int | None = None,
        version: int = 0, report: Report = no_report,
    ) -> CallResult:
        """Generate; at most `work.max_rows` rows run at a time, padded on the left.

        Raises UserError when the call keeps its cache between rounds; and on all replicas when a prompt of
        any of them is empty, or exceeds the model's positions together with its response.
        """
        work = call.work_as(Generate)
        batch = batch.to(self.groups.world.device)
        round_ = Round.of(call, unfinished, budget, version)
        if work.cache_on_update == "keep" and round_.budget is not None:
            raise UserError(
                f"{call.name}: cache_on_update is 'keep', and the transformers engine keeps no cache: set it "
                "to 'recompute'")
        config = self.model.config
        sampling = for_vocabulary(work.sampling, config.vocab_size)
        groups = [*round_.groups(call), *prompt_groups(batch, call.inputs)]
        for size in agreed_sizes(groups, self.groups.dp_control.all_gather_json):
            check_positions(size.num_undrawn, sampling.max_new_tokens, config.num_positions)
        samples = ResponseBuffer(
            len(groups), work=work, eos_ids=config.eos_token_ids,
            seed=stream_seed(work.seed, call.name), device=self.flat.device, budget=round_.budget,
            vocab_range=(0, config.vocab_size))
        for group in groups:
            samples.add(group)
        order = sorted(range(len(groups)), key=lambda i: (len(groups[i].tokens), i))  # Little padding.
        for start in range(0, len(order), work.max_rows):
            rows = [BufferRow(i) for i in order[start : start + work.max_rows]]
            prefix = f"{start} of {len(order)} samples of this rank have ended, "
            _Sampler(self.model, sampling, samples, rows, prefixed(report, prefix)).run()
        ids = [i for group in groups for i in group.ids]
        columns = output_batch(call, [*ids], output_columns([samples], wide=self.model.wide))
        return generated(call, *round_.join(call, columns, batch), rank=self.groups.rank)

    def flush_cache(self, call: str) -> None:
        """Do nothing, as no call keeps a cache."""

    def _micro_batches(
        self, lengths: Sequence[int], groups: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        return padded_micro_batches(lengths, max_tokens=max_tokens, groups=groups)

    def _run_passes(
        self, micro_batches: list[Batch], settings: PassSettings, report: Report
    ) -> list[Outputs]:
        results: list[Outputs] = []
        for i, samples in enumerate(micro_batches, start=1):
            report(f"micro-batch {i} of {len(micro_batches)}")
            tokens = samples[settings.key]
            loss, parts = run_head(  # (Nothing here keeps the logits during the backward pass.)
                self.model, self.model(tokens, recompute=settings.recompute).flatten(0, 1), samples, settings,
                row_of_token=rows_of_tokens(tokens))
            results += parts
            if loss is not None:
                loss.backward()
        if torch.is_grad_enabled():
            self.optimizer.sums.complete()
        return results


@dataclass
class _Sampler:
    """A logits processor for transformers' generate that draws the tokens of some samples itself.

    It uses the same random numbers as the native engine, so that the tokens depend neither on a random state
    nor, in float64 and float32, on the layout.
    """

    model: TransformersModel
    sampling: SamplingConfig
    samples: ResponseBuffer
    rows: Sequence[BufferRow]
    report: Report

    def __post_init__(self) -> None:
        self.running = list(range(len(self.rows)))
        """Indices in `rows` of the samples that have not ended."""

    @torch.no_grad()
    def run(self) -> None:
        """Continue the samples until all have ended."""
        device = self.model.flat.device
        prompts = [torch.tensor(self.samples.prompts[row], device=device) for row in self.rows]
        masks = [torch.ones_like(prompt) for prompt in prompts]
        ids_BL, mask_BL = (
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
            for rows in (prompts, masks))
        config = import_module("transformers").GenerationConfig(
            max_new_tokens=int(self.samples.limits(self.rows).max()), do_sample=False, use_cache=True,
            eos_token_id=self.model.config.vocab_size, pad_token_id=0)  # No token: `have_ended` ends rows.
        self.model.hf.generate(
            input_ids=ids_BL, attention_mask=mask_BL, generation_config=config, logits_processor=[self],
            stopping_criteria=[self.have_ended])

    def have_ended(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """Return which rows have ended: a stopping criterion for generate, which ends when all have."""
        ended_B = torch.ones(len(self.rows), dtype=torch.bool, device=input_ids.device)
        ended_B[self.running] = False
        return ended_B

    def __call__(self, input_ids: Tensor, logits_BV: Tensor) -> Tensor:
        """Draw tokens and return logits that leave no other token possible."""
        samples = self.samples
        running = [self.rows[i] for i in self.running]
        drawn_B, logprobs_B = sample(
            logits_BV[self.running], samples.draws(running), config=self.sampling, vocab_start=0,
            group=self.model.groups.tp, processing=samples.processing(running))
        insertions = samples.insertions(running)
        drawn_B = samples.record(samples.at(running), drawn_B, logprobs_B, insertions)
        tokens_B = drawn_B.new_zeros(len(self.rows))
        tokens_B[self.running] = drawn_B
        ended = samples.append(running, drawn_B)
        self.running = [i for i, has_ended in zip(self.running, ended, strict=True) if not has_ended]
        num_drawn = samples.lengths[self.rows].max()
        most = self.samples.limits(self.rows).max()
        self.report(f"{len(self.rows)} have {num_drawn} tokens of at most {most}")
        return torch.full_like(logits_BV, -torch.inf).scatter(1, tokens_B[:, None], 0.0)
