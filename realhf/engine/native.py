"""NativeEngine: runs calls on one role's shard of the parallel transformer, on this rank under one layout."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from realhf.attention.interface import AttentionBackend
from realhf.calls import Generate, OptimizerConfig, SampleId, TrainStep, TurnSettings, TurnSource
from realhf.checkpoint.hf import load_adapters, load_weights
from realhf.data.batch import Batch
from realhf.data.micro_batch import attention_share, micro_batches
from realhf.distributed.pieces import Shards
from realhf.distributed.process import Report, no_report
from realhf.distributed.world import ParallelGroups, World
from realhf.engine.base import (
    DTYPES,
    CallResult,
    GeneratingEngine,
    Metrics,
    Outputs,
    PassSettings,
    Routers,
    generated,
    output_batch,
)
from realhf.engine.chunked_loss import run_head
from realhf.engine.pipeline import forward_passes
from realhf.engine.shared_prefixes import keep_prompts_together, pass_tokens
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.inference.cache_memory import PassMemory
from realhf.inference.generation import Generation
from realhf.inference.page_pool import PagePool, page_pool
from realhf.inference.prompt_queue import PromptQueue
from realhf.inference.response_buffer import PromptGroup, Size
from realhf.inference.rounds import Round, prompt_groups
from realhf.inference.turns import SharedTurnSource
from realhf.layout import Layout, even_split
from realhf.models.lora import LoraConfig
from realhf.models.param_spec import ModelSpec
from realhf.nn.attention import token_range
from realhf.nn.lora import Adapters
from realhf.nn.transformer import Transformer
from realhf.planner.call_memory import CallPieces, GenerationMoments
from realhf.planner.problem import ModelRole, Workload


class NativeEngine(GeneratingEngine):
    """An engine for the parallel transformer of `nn`, under any layout."""

    def __init__(
        self, spec: ModelSpec, layout: Layout, world: World,
        *, dtype: str, optimizer: OptimizerConfig | None = None, memory: torch.Tensor | None = None,
        lora: LoraConfig | None = None, adapter_memory: torch.Tensor | None = None,
        float32_head: bool = False, paged: AttentionBackend | None = None,
    ) -> None:
        """Generation attends to its cache by the backend `paged`; None: by the best one of a GPU, or block by
        block on a CPU."""
        groups = ParallelGroups.create(world, layout)
        self.adapters = None
        if lora is not None:
            self.adapters = Adapters(spec.config, lora, groups, dtype=DTYPES[dtype], memory=adapter_memory)
        self.model = Transformer(
            spec, groups, dtype=DTYPES[dtype], memory=memory, adapters=self.adapters,
            float32_head=float32_head, int8=layout.form == "int8")
        super().__init__(self.model, adapters=self.adapters, optimizer=optimizer)
        self._paged = paged
        self.last_num_computed = 0
        """Tokens that have passed through this stage in the last call that generated."""
        self._resting: dict[str, tuple[Generation, Batch]] = {}
        """Call -> its generation, whose cache rests between rounds; the samples are on result ranks."""

    @cached_property
    def pages(self) -> PagePool | None:
        """The pages of all generations of this engine; None: each generation has its own."""
        return page_pool(self.model, self._paged)

    def load_base(self, directory: Path | None, *, seed: int) -> None:
        self.model.init_random(seed, names=None if directory is None else load_weights(directory, self.model))

    def load_adapters(self, *, seed: int) -> None:
        if self.adapters is not None:
            self.adapters.init_random(seed)
            for name, weight in self.adapters.of_layer(None).items():  # The head is trained, too.
                weight.data.copy_(self.model.of_layer(None)[name])
            if self.adapters.lora.adapter is not None:
                load_adapters(self.adapters.lora.adapter, self.adapters)
        super().load_adapters(seed=seed)

    def export_shards(self) -> Shards:
        if self.adapters is None:
            return self.model.pieces()
        merges = self.adapters.lora.export_merged
        return self.model.merged_model().pieces() if merges else self.adapters.pieces()

    def generate(
        self, call: FunctionCall, batch: Batch, *, unfinished: Batch | None = None, budget: int | None = None,
        version: int = 0, report: Report = no_report,
    ) -> CallResult:
        """Generate; ranks over cp act as replicas, each of which begins with a part of the samples."""
        prompts = batch.to(self.groups.world.device)
        this_round = Round.of(call, unfinished, budget, version)
        work = call.work_as(Generate)
        keeps_cache = work.cache_on_update == "keep" and this_round.budget is not None
        generation, resting = self._generation(call, keeps_cache=keeps_cache)
        if work.environment is None:
            queue = PromptQueue(self.groups, stealing=work.work_stealing and not keeps_cache)
            generation.submit(self._share(prompt_groups(prompts, call.inputs)))
            generation.resume(self._share(this_round.groups(call)))
            with self._merged_weights():
                generation.advance(queue, budget=this_round.budget, report=report)
            ids, columns = generation.take()
        else:
            queue = PromptQueue(self.groups, stealing=False)  # An environment stays on its replica.
            turn_source = self._open_turn_source(call, prompts, this_round)
            with self._merged_weights():
                generation.advance(queue, turn_source=turn_source, report=report)
            ids, columns = generation.take_turns(turn_source)
        whole_round = this_round.after(resting)
        made = queue.collect_results(
            output_batch(call, [*ids], columns), [*whole_round.unfinished.ids, *prompts.ids])
        ended, going_on = whole_round.join(call, made, prompts)
        if keeps_cache:
            self._resting[call.name] = (generation, going_on)
        self.last_cache_bytes = generation.cache_bytes
        self.last_environment_time = generation.environment_time
        self.last_num_computed = generation.num_computed
        return generated(call, ended, going_on, rank=self.groups.rank)

    def _generation(self, call: FunctionCall, *, keeps_cache: bool) -> tuple[Generation, Batch]:
        """Return the generation of a call and the samples whose cache rests in it: those of the last round if
        it `keeps_cache`."""
        work = call.work_as(Generate)
        limit = self.cache_limits.of(call.name)
        if limit.num_bytes is None and work.kv_cache_gib is None:
            self.release("cache")  # What is free is measured without the pages of other calls.
        fresh = Generation(
            self.model, work, stream=call.name, limit=limit, pass_bytes=partial(pass_bytes, self.model, work),
            pool=self.pages, cache_rests=keeps_cache)
        if not keeps_cache:
            return fresh, Batch([])
        return self._resting.setdefault(call.name, (fresh, Batch([])))

    @contextmanager
    def _merged_weights(self) -> Iterator[None]:
        """Let passes read weights into which the adapters are merged, if the settings ask for it, and packed
        copies of others."""
        merges = self.adapters is not None and self.adapters.lora.merge
        with self.model.merged() if merges else nullcontext(), self.model.packed():
            yield
            self.last_packed_bytes = self.model.packed_bytes
        if self.pages is None:  # No recorded pass reads the merged weights.
            self.model.release_merged()

    def _open_turn_source(self, call: FunctionCall, batch: Batch, this_round: Round) -> TurnSource:
        """Start the environments of this replica's samples, or go on with them, on one of its ranks."""
        work = call.work_as(Generate)
        assert work.environment is not None
        if self.model.rope_boundary is not None:
            raise UserError(
                f"{call.name} has an environment, and a longrope model must compute its cache again at "
                f"{self.model.rope_boundary} tokens: this does not work together yet")
        if work.cache_on_update == "keep" and this_round.budget is not None:
            raise UserError(
                f"{call.name} has an environment: cache_on_update must be 'recompute' in rounds, between "
                "which a rollout may move to another rank")
        config = self.model.config
        groups = self.groups
        ranks = groups.layout.grid[:, groups.at.dp, groups.at.cp, :].ravel().tolist()
        leads = groups.is_last_stage and groups.at.tp == 0
        own = None
        if leads:
            rows = {
                SampleId(batch.ids[i]): {key: batch[key][i] for key in call.inputs[1:]}
                for i in self._own(batch)}
            settings = TurnSettings(
                work.seed, work.sampling.max_new_tokens, config.context_tokens, config.eos_token_ids,
                this_round.budget, work.deterministic)
            unfinished = this_round.rollouts(call, self._own(this_round.unfinished))
            own = work.environment.start(rows, settings, unfinished=unfinished)
        if len(ranks) == 1:
            assert own is not None
            return own
        return SharedTurnSource(groups.world.group(ranks, purpose="control"), own)

    def _own(self, samples: Batch) -> range:
        """Return which samples of its cp group this rank begins with, by their places."""
        return range(*even_split(len(samples.ids), self.groups.cp.size, self.groups.cp.index))

    def _share(self, prompts: list[PromptGroup]) -> list[PromptGroup]:
        """Return this rank's share of the prompts of its cp group."""
        return prompts[slice(*even_split(len(prompts), self.groups.cp.size, self.groups.cp.index))]

    def flush_cache(self, call: str) -> None:
        if call in self._resting:
            generation, _ = self._resting.pop(call)
            generation.release()

    def release(self, *what: Literal["gradients", "cache", "graphs"]) -> None:
        super().release(*what)
        merged = self.model.merged_bytes if "cache" in what else 0
        if self._pool is not None:
            if "graphs" in what or merged:  # They hold the addresses of merged weights.
                self._pool.drop_graphs()
            if "cache" in what:
                self._pool.release()
        if merged:
            self.model.release_merged()

    def settle_cache_limits(self) -> None:
        self.cache_limits.settle(besides=self._resting)

    @property
    def mapped_bytes(self) -> int:
        return 0 if self._pool is None else self._pool.mapped_bytes

    @property
    def _pool(self) -> PagePool | None:
        """The pages of an engine that has generated; others need no kernels for pages."""
        return vars(self).get("pages")

    @property
    def caches(self) -> Mapping[str, int]:
        graphs = 0
        if self._pool is not None:
            cache = self._pool.num_bytes
            graphs = self._pool.graph_bytes
        else:
            cache = sum(generation.resting_bytes for generation, _ in self._resting.values())
        return {"cache": cache, "merged": self.model.merged_bytes, "graphs": graphs}

    def _micro_batches(
        self, lengths: Sequence[int], groups: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        """Return micro-batches, equally many on all ranks of an ep group, which pass through the experts
        together; some ranks' last ones are empty."""
        parts = micro_batches(
            lengths, max_tokens=max_tokens, groups=groups, at_least=self.groups.layout.pp,
            attention=attention_share(self.model.spec))
        if self.groups.ep.size > 1:
            parts += [[]] * (max(self.groups.ep_control.all_gather_json(len(parts))) - len(parts))
        return parts

    def _kept_together(
        self, samples: Batch, key: str, groups: Sequence[Sequence[int]], max_tokens: int
    ) -> Sequence[Sequence[int]]:
        if not self.model.shares_prefixes(max(samples[key].lengths, default=0)):
            return groups
        return keep_prompts_together(samples, key, groups, max_tokens=max_tokens)

    def _run_passes(
        self, micro_batches: list[Batch], settings: PassSettings, report: Report
    ) -> list[Outputs]:
        passed = [pass_tokens(self.model, samples, settings.key) for samples in micro_batches]
        ranges = [token_range(len(tokens.ids_T), self.groups.cp) for tokens in passed]
        shapes = [(stop - start, self.model.config.hidden_size) for start, stop in ranges]
        outputs: dict[int, Any] = {}
        results: list[Outputs] = []
        passes = forward_passes(self.groups, outputs, hidden_shapes=shapes, dtype=self.flat.dtype)
        for i, hidden in passes:
            report(f"micro-batch {i + 1} of {len(micro_batches)}")
            tokens = passed[i]
            layer_done = None
            if self._optimizer is not None and i == len(micro_batches) - 1:  # It completes the gradients.
                layer_done = self._optimizer.sums.layer_is_done
            outputs[i] = self.model(
                tokens.ids_T if hidden is None else hidden, tokens.lens, prefixes=tokens.prefixes,
                recompute=settings.recompute,
                router_losses=None if settings.routers is None else settings.routers.next_pass(),
                layer_done=layer_done)
            if self.groups.is_last_stage:
                outputs[i], parts = run_head(
                    self.model, outputs[i], micro_batches[i], settings, row_of_token=tokens.row_of_token)
                results += parts
        if torch.is_grad_enabled():
            self.optimizer.sums.complete()
        return results

    def _routers(self, work: TrainStep, totals: Metrics) -> Routers | None:
        return None if self.model.config.moe is None else Routers(self.model, work, totals)


def pass_bytes(
    model: Transformer, work: Generate, sizes: Sequence[Size], *, num_samples: int
) -> PassMemory:
    """Return the most bytes of prefill, logits, sampling and results beside the cache on this rank, and those
    of merged and packed copies of weights that do not exist now, as the planner counts them.

    The prompts have the given sizes, and a replica has at most `num_samples` samples.
    """
    layout = model.groups.layout
    adapters = model.adapters
    role = ModelRole(
        model.config, str(model.flat.dtype).removeprefix("torch."),
        lora=None if adapters is None else adapters.lora, float32_head=model.float32_head,
        int8=layout.form == "int8")
    workload = Workload(
        num_samples * layout.dp * layout.cp, max((size.num_tokens for size in sizes), default=1),
        max_new_tokens=work.sampling.max_new_tokens, max_rows=work.max_rows,
        prefill_tokens=work.prefill_tokens)
    pieces = CallPieces(
        role, workload, layout.strategy, micro_batch_tokens=1, recompute=False, fused=model.flat.is_cuda,
        packed_itemsize=model.packed_itemsize)
    moments = GenerationMoments(pieces).on(pieces.stage(model.groups.at.pp))
    copies = moments[0].merged + moments[0].packed
    passes = max(
        memory.num_bytes - memory.kv_cache - memory.merged - memory.packed for memory in moments)
    return PassMemory(passes, absent=copies - model.merged_bytes - model.packed_bytes)
