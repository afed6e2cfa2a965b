"""TransformersEngine: runs calls on a model of one of transformers' own classes, by its forward and generate.

Shape suffixes: T tokens of all sequences end to end, N tokens whose outputs are wanted, B rows of a padded
batch, L its length, X outputs of the head for a token, V the vocabulary.
"""

import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from realhf.calls import Generate, OptimizerConfig
from realhf.data.batch import Batch, Packed
from realhf.dist.activity import Report, no_report, prefixed
from realhf.dist.group import World
from realhf.dist.parallel import ParallelGroups
from realhf.engine.base import BaseEngine, Outputs, output_batch
from realhf.engine.hf_module import TransformersModel
from realhf.engine.protocol import DTYPES, Shards
from realhf.engine.router_losses import Routers
from realhf.graph import FunctionCall
from realhf.inference.kv_budget import check_not_empty, check_positions
from realhf.inference.sampling import for_vocabulary, sample, uniform
from realhf.layout import Layout
from realhf.lora import LoraConfig
from realhf.param_spec import ModelSpec


class TransformersEngine(BaseEngine):
    """An engine for unsharded models of any family under data parallelism. See Engine for the settings."""

    def __init__(
        self, spec: ModelSpec, layout: Layout, world: World,
        *, dtype: str, optimizer: OptimizerConfig | None = None, memory: Tensor | None = None,
        lora: LoraConfig | None = None, adapter_memory: Tensor | None = None,
    ) -> None:  # fmt: skip
        assert lora is None and adapter_memory is None, "a Role with this engine has no adapters"
        groups = ParallelGroups.create(world, layout)
        self.model = TransformersModel(spec, groups, dtype=DTYPES[dtype], memory=memory)
        super().__init__(self.model, trained=self.model, optimizer=optimizer)

    def adapter_shards(self) -> Shards:
        raise AssertionError("this engine has no adapters")

    @property
    def adapter_flat(self) -> Tensor:
        raise AssertionError("this engine has no adapters")

    def load_base(self, directory: Path | None, *, seed: int) -> None:
        self.model.load(directory, seed=seed)

    def export_shards(self) -> Shards:
        return self.model.file_tensors()

    def _generate(self, call: FunctionCall, work: Generate, batch: Batch, report: Report) -> Batch:
        columns = generate(
            self.model, batch, work, prompt_key=call.inputs[0], stream=call.name, report=report)
        return output_batch(call, batch.ids, columns)

    def _micro_batches(self, lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Return micro-batches of samples of similar length, as many as fit when they are padded."""
        parts: list[list[int]] = []
        for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= max_tokens:
                parts[-1].append(i)
            else:
                parts.append([i])
        return parts

    def _compute(
        self, tokens: Packed, hidden: Tensor | None,
        *, recompute: bool, routers: Routers | None, layer_done: Callable[[int], None] | None,
    ) -> Tensor:  # fmt: skip
        return self.model(tokens, recompute=recompute)

    def _finish(
        self, x: Tensor, samples: Batch, finish: Callable[[Outputs, Batch], Tensor],
        *, key: str, settings: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        mask = samples.fields.get("response_mask")
        return finish(self._outputs(x, samples[key], mask=mask, **settings), samples)

    def _outputs(
        self, x: Tensor, tokens: Packed, *, mask: Packed | None, output: str, temperature: float = 1.0,
        entropy: bool = False,
    ) -> Outputs:  # fmt: skip
        """Return the same outputs as `compute_outputs`, from all logits at once."""
        lengths_B = torch.tensor(tokens.lengths, device=x.device)
        if output == "scores":
            return {"scores": x[torch.arange(len(x), device=x.device), lengths_B - 1, 0].to(self.model.wide)}
        row_T = torch.arange(len(x), device=x.device).repeat_interleave(lengths_B)
        column_T = torch.arange(len(row_T), device=x.device) - (lengths_B.cumsum(0) - lengths_B)[row_T]
        wanted_T = column_T > 0
        if mask is not None:
            wanted_T &= mask.values != 0
        at = wanted_T.nonzero()[:, 0]
        x_NX = x[row_T[at], column_T[at] - 1].to(self.model.wide)  # The previous state chooses a token.

        def scatter(values_N: Tensor) -> Tensor:
            return values_N.new_zeros(len(row_T)).index_put((at,), values_N)

        if output == "values":
            return {"values": scatter(x_NX[:, 0])}
        logprobs_NV = (x_NX / temperature).log_softmax(-1)
        found = {"logprobs": scatter(logprobs_NV.gather(1, tokens.values[at, None])[:, 0])}
        if entropy:
            found["entropy"] = scatter(_Entropy.apply(logprobs_NV))
        return found


class _Entropy(torch.autograd.Function):
    """The entropy of distributions given as log-probs.

    It saves nothing but the log-probs, which log_softmax saves anyway, and costs nothing in the backward pass
    unless the loss uses it.
    """

    @staticmethod
    def forward(ctx: Any, logprobs_NV: Tensor) -> Tensor:
        ctx.save_for_backward(logprobs_NV)
        return -(logprobs_NV.exp() * logprobs_NV).sum(-1)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> Tensor:
        (logprobs_NV,) = ctx.saved_tensors
        return (logprobs_NV + 1).mul_(logprobs_NV.exp()).mul_(-grad_N[:, None])


def generate(
    model: TransformersModel, batch: Batch, work: Generate, *, prompt_key: str, stream: str,
    report: Report = no_report,
) -> list:
    """Return the columns of `Generate`; at most `work.max_rows` rows run at a time, padded on the left.

    Raises UserError on all replicas when a prompt of any of them is empty, or exceeds the model's positions
    together with its response.
    """
    prompts = batch[prompt_key].split()
    _check(model, batch.ids, [len(prompt) for prompt in prompts], work)
    floats = torch.zeros(0, dtype=model.wide, device=model.flat.device)
    rows: dict[int, tuple[Tensor, ...]] = {}
    seed = (work.seed << 32) | zlib.crc32(stream.encode())  # The native engine uses the same seed.
    order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))  # This needs little padding.
    for start in range(0, len(order), work.max_rows):
        part = order[start : start + work.max_rows]
        prefix = f"{start} of {len(order)} samples of this rank have ended, "
        draw = _Draw(
            model, work, [batch.ids[i] for i in part], seed=seed,
            report=prefixed(report, prefix))
        tokens_BL, logprobs_BL = draw.run([prompts[i] for i in part])
        ends_BL = torch.isin(tokens_BL, draw.eos_ids)
        lengths = (ends_BL.long().cumsum(1) - ends_BL.long() == 0).sum(1).tolist()
        finished_B = ends_BL.any(1).to(model.wide)
        drawn = zip(part, lengths, tokens_BL, logprobs_BL.to(model.wide), finished_B, strict=True)
        for i, length, tokens_L, logprobs_L, finished in drawn:
            before = logprobs_L.new_zeros(len(prompts[i]))
            made = logprobs_L[:length]
            mask, logprobs = (torch.cat([before, x]) for x in (torch.ones_like(made), made))
            rows[i] = torch.cat([prompts[i], tokens_L[:length]]), mask, logprobs, finished[None]
    columns = [[rows[i][number] for i in range(len(prompts))] for number in range(4)]
    packed = [Packed.of(c, empty=floats.long() if not n else floats) for n, c in enumerate(columns[:3])]
    return [*packed, torch.cat([floats, *columns[3]])]


def _check(model: TransformersModel, ids: list[int], lengths: list[int], work: Generate) -> None:
    empty = [i for i, length in zip(ids, lengths, strict=True) if length == 0]
    gathered = model.groups.dp_control.all_gather_json([empty, max(lengths, default=None)])
    check_not_empty([i for some, _ in gathered for i in some])
    for longest in [longest for _, longest in gathered if longest is not None]:
        check_positions(longest, work.sampling.max_new_tokens, model.config.num_positions)


class _Draw:
    """A logits processor for transformers' generate that draws the tokens itself.

    It uses the same random numbers as the native engine, so that the tokens depend neither on a random state
    nor, in float64 and float32, on the layout.
    """

    def __init__(
        self, model: TransformersModel, work: Generate, sample_ids: list[int], *, seed: int, report: Report
    ) -> None:
        self._model = model
        self._seed = seed
        self._report = report
        self._sampling = for_vocabulary(work.sampling, model.config.vocab_size)
        self._sample_ids = np.array(sample_ids, dtype=np.int64)
        self.eos_ids = torch.tensor(model.config.eos_token_ids, dtype=torch.long, device=model.flat.device)
        self._tokens: list[Tensor] = []
        self._logprobs: list[Tensor] = []

    @torch.no_grad()
    def run(self, prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return tokens and log-probs (B, new tokens) of rows; after a row's end they mean nothing."""
        eos = self.eos_ids.tolist()
        pad = torch.nn.utils.rnn.pad_sequence
        masks = [torch.ones_like(prompt) for prompt in prompts]
        ids_BL, mask_BL = (pad(rows, batch_first=True, padding_side="left") for rows in (prompts, masks))
        config = import_module("transformers").GenerationConfig(
            max_new_tokens=self._sampling.max_new_tokens, do_sample=False, use_cache=True,
            eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0)
        self._model.hf.generate(
            input_ids=ids_BL, attention_mask=mask_BL, generation_config=config, logits_processor=[self])
        return torch.stack(self._tokens, 1), torch.stack(self._logprobs, 1)

    def __call__(self, input_ids: Tensor, logits_BV: Tensor) -> Tensor:
        """Draw tokens and return logits that leave no other token possible."""
        positions = np.full_like(self._sample_ids, len(self._tokens))
        draws = torch.from_numpy(uniform(self._seed, sample_ids=self._sample_ids, positions=positions))
        tokens_B, logprobs_B = sample(
            logits_BV, draws.to(logits_BV.device), config=self._sampling, vocab_start=0,
            group=self._model.groups.tp)
        self._tokens.append(tokens_B)
        self._logprobs.append(logprobs_B)
        most = self._sampling.max_new_tokens
        self._report(f"{len(self._sample_ids)} have {len(self._tokens)} tokens of at most {most}")
        return torch.full_like(logits_BV, -torch.inf).scatter(1, tokens_B[:, None], 0.0)
