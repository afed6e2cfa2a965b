"""TransformersEngine: runs calls on a model of one of transformers' own classes, by its forward and generate.

Shape suffixes: B rows of a padded batch, L its length, X outputs of the head for a token, V the vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from realhf.calls import OptimizerConfig, SamplingConfig
from realhf.data.batch import Batch
from realhf.data.micro_batch import padded_micro_batches
from realhf.distributed.activity import Report, prefixed
from realhf.distributed.parallel import ParallelGroups
from realhf.distributed.pieces import Shards, whole_parameters
from realhf.distributed.world import World
from realhf.engine.base import GeneratingEngine, PassSettings, output_batch
from realhf.engine.chunked_loss import compute_outputs, side_by_side
from realhf.engine.hf_module import TransformersModel, rows_of_tokens
from realhf.engine.pipeline import run_pipeline
from realhf.engine.protocol import DTYPES
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.inference.cache_memory import agreed_sizes, check_positions
from realhf.inference.rollout_buffer import RolloutBuffer, output_columns
from realhf.inference.rounds import Round, prompt_groups
from realhf.inference.sampling import for_vocabulary, sample, stream_seed
from realhf.layout import Layout
from realhf.models.lora import LoraConfig
from realhf.models.param_spec import ModelSpec


class TransformersEngine(GeneratingEngine):
    """An engine for unsharded models of any family under data parallelism."""

    def __init__(
        self, spec: ModelSpec, layout: Layout, world: World,
        *, dtype: str, optimizer: OptimizerConfig | None = None, memory: Tensor | None = None,
        lora: LoraConfig | None = None, adapter_memory: Tensor | None = None,
        float32_head: bool = False,
    ) -> None:  # fmt: skip
        assert lora is None and adapter_memory is None, "a Role with this engine has no adapters"
        assert not float32_head, "a Role with this engine has no head in float32"
        groups = ParallelGroups.create(world, layout)
        self.model = TransformersModel(spec, groups, dtype=DTYPES[dtype], memory=memory)
        super().__init__(self.model, optimizer=optimizer)

    def load_base(self, directory: Path | None, *, seed: int) -> None:
        self.model.load(directory, seed=seed)

    def export_shards(self) -> Shards:
        return whole_parameters(self.model.file_tensors())

    def _generate(
        self, call: FunctionCall, batch: Batch, round_: Round, report: Report
    ) -> tuple[Batch, Batch]:
        """Generate; at most `work.max_rows` rows run at a time, padded on the left.

        Raises UserError when the call keeps its cache between rounds; and on all replicas when a prompt of
        any of them is empty, or exceeds the model's positions together with its response.
        """
        work = call.work
        if work.cache_on_update == "keep" and round_.budget is not None:
            raise UserError(
                f"{call.name}: cache_on_update is 'keep', and the transformers engine keeps no cache: set it "
                "to 'recompute'")
        config = self.model.config
        sampling = for_vocabulary(work.sampling, config.vocab_size)
        groups = [*round_.groups(call), *prompt_groups(batch, call.inputs)]
        for size in agreed_sizes(groups, self.groups.dp_control.all_gather_json):
            check_positions(size.num_undrawn, sampling.max_new_tokens, config.num_positions)
        samples = RolloutBuffer(
            len(groups), work=work, eos_ids=config.eos_token_ids,
            seed=stream_seed(work.seed, call.name), device=self.flat.device, budget=round_.budget,
            vocab_range=(0, config.vocab_size))
        for group in groups:
            samples.add(group)
        order = sorted(range(len(groups)), key=lambda i: (len(groups[i].tokens), i))  # Little padding.
        for start in range(0, len(order), work.max_rows):
            rows = order[start : start + work.max_rows]
            prefix = f"{start} of {len(order)} samples of this rank have ended, "
            _Sampler(self.model, sampling, samples, rows, prefixed(report, prefix)).run()
        ids = [i for group in groups for i in group.ids]
        columns = output_batch(call, ids, output_columns([samples], wide=self.model.wide))
        return round_.join(call, columns, batch)

    def flush_cache(self, call: str) -> None:
        """Do nothing, as no call keeps a cache."""

    def _micro_batches(
        self, lengths: Sequence[int], groups: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        return padded_micro_batches(lengths, max_tokens=max_tokens, groups=groups)

    def _run_passes(self, micro_batches: list[Batch], settings: PassSettings, report: Report) -> list[Any]:
        def forward(i: int, _: Tensor | None) -> Tensor:
            report(f"micro-batch {i + 1} of {len(micro_batches)}")
            return self._run_micro_batch(micro_batches[i], settings)

        shapes: list[tuple[int, ...]] = [()] * len(micro_batches)
        results = run_pipeline(forward, self.groups, hidden_shapes=shapes, dtype=self.flat.dtype)
        if torch.is_grad_enabled():
            self.optimizer.sums.complete()
        return results

    def _run_micro_batch(self, samples: Batch, settings: PassSettings) -> Tensor:
        tokens = samples[settings.key]
        options = dict(settings.outputs)
        outputs = compute_outputs(
            self.model, self.model(tokens, recompute=settings.recompute).flatten(0, 1), tokens,
            mask=samples.fields.get("response_mask"),
            ids_TK=side_by_side(samples, options.pop("token_ids", ())),
            row_of_token=rows_of_tokens(tokens), **options)
        return settings.result_of(outputs, samples)


@dataclass
class _Sampler:
    """A logits processor for transformers' generate that draws the tokens of some samples itself.

    It uses the same random numbers as the native engine, so that the tokens depend neither on a random state
    nor, in float64 and float32, on the layout.
    """

    model: TransformersModel
    sampling: SamplingConfig
    samples: RolloutBuffer
    rows: Sequence[int]  # Their numbers in the buffer.
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
