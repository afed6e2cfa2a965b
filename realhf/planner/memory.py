"""Bytes that a rank needs for a call, part by part, at the moments of which one is its peak.

The formulas follow `nn` and `engine` operator by operator; tests/planner/test_memory.py compares them with
what real processes allocate. layer_memory.py has the pieces from which the moments here are put together.
"""

import math
from dataclasses import replace

from realhf.graph import FunctionCall
from realhf.kv_blocks import tokens_for
from realhf.layout import ParallelStrategy
from realhf.plan import CallPlan
from realhf.planner.layer_memory import INDEX_BYTES, CallPieces, Parts
from realhf.planner.model_states import trained_params, weights_bytes
from realhf.planner.problem import ModelRole, Problem, Workload
from realhf.planner.shard import held_params, in_section, num_params

_GRAPHS = 1.25  # Rows times blocks of a recorded CUDA graph, relative to the real ones (decode_graphs.py).


def running_bytes(problem: Problem, call: FunctionCall, how: CallPlan, stage: int) -> Parts:
    """Return the bytes that a rank of a stage holds only while the call runs, by part.

    The cache of a generation has room for all rows that decode at once.
    """
    role = problem.model_role(call)
    work = problem.workloads[call.name]
    parts = call_bytes(
        role, call.kind, replace(work, max_rows=how.max_rows or work.max_rows), how.layout.strategy, stage,
        micro_batch_tokens=how.micro_batch_tokens, recompute=how.recompute,
        fused=problem.cluster.device_type == "cuda",
    )  # fmt: skip
    if how.offload:
        parts["loaded weights"] = weights_bytes(role, how.layout.strategy, stage)
    return parts


def call_bytes(
    role: ModelRole, kind: str, workload: Workload, strategy: ParallelStrategy, stage: int,
    *, micro_batch_tokens: int, recompute: bool = False, fused: bool = False,
) -> Parts:  # fmt: skip
    """Return the bytes that the call adds at its peak on the fullest rank of a stage, by part.

    `fused` means CUDA's kernels and NCCL: an RMSNorm keeps its input only, attention keeps its output once,
    and collectives work in place. Otherwise the formulas are for CPU with gloo. Top-p sampling is not
    counted. If the mean response is shorter than `max_new_tokens`, micro-batches are assumed to hold up to
    their limit or the longest sequence; for prompts only the mean is known.
    """
    call = _Call(role, workload, strategy, stage, micro_batch_tokens, recompute, fused)
    moments = {"generate": call.generate, "forward": call.forward, "train_step": call.train}[kind]()
    peak = max(moments, key=lambda parts: sum(parts.values()))
    return {name: part for name, part in peak.items() if part}


class _Call(CallPieces):
    """The moments of one call on one stage, each as bytes by part."""

    def forward(self) -> list[Parts]:
        """Return the moments of a pass without autograd: in a layer, and in the logits on the last stage."""
        number, tokens, responses = self._micro_batches
        base = self._inputs(tokens)
        if self.strategy.pp > 1:  # A send of hidden states is waited for two micro-batches later.
            sends = 0 if self._is_last else min(number, 3)
            base["messages"] = self._hidden(tokens) * (sends + (not self._is_first))
        moments = [base | {"activations": self._forward_temporaries(tokens)}]
        if self._has_logits:
            states = {"activations": self._hidden(tokens + responses)}
            logits = self._logits(responses * self._widths.vocabulary, copies=0)
            moments.append(base | states | {"logits": logits})
        return moments

    def train(self) -> list[Parts]:
        """Return the moments of a training step: a micro-batch's passes with others in flight (1F1B), and
        the optimizer."""
        number, tokens, responses = self._micro_batches
        in_flight = min(number, self.strategy.pp - self.stage)
        e = self.role.itemsize
        w = self.role.wide_itemsize
        hidden = self._hidden(tokens)
        block = self._block_saved(tokens)
        kept = self._num_layers * (hidden if self.recompute else block)
        kept += e * self._widths.head_dim * tokens + INDEX_BYTES * tokens
        base = self._inputs(tokens)
        messages = 0.0
        if self.strategy.pp > 1:
            # Hidden states sent, and received ones unless a layer saves them anyway.
            copied = e < w and not self.fused and not self.recompute
            messages += in_flight * hidden * ((not self._is_first and copied) + (not self._is_last))
            # A gradient received, and gradients sent for up to two micro-batches before.
            messages += hidden * ((not self._is_last) + min(number - 1, 2) * (not self._is_first))
        base |= {"activations": in_flight * kept, "messages": messages}
        moments = self._ends_of_training(base, kept, tokens, responses)
        if self.recompute:  # One layer at a time has all its activations.
            base["activations"] += block
        # The backward pass of the last layer goes through the MLP, whose activations are then freed, and
        # through attention.
        mlp = e * tokens * self._widths.mlp
        product = self._weight_gradient(self._widths.widest_weight)
        freed = self._num_mlp_saved * mlp
        up = (2 if self.role.config.gated else 1) * mlp
        qkv = e * tokens * self._widths.qkv
        part = 3 * e * self._working_numel(tokens * self._widths.mlp)
        if self.role.config.moe is not None:  # Experts' weights have separate gradients.
            product = max(product, float(e * self._widths.widest_weight))
        widest = mlp + up + max(part, product)
        if self.role.lora is not None:  # The gradients of two linear layers for one input, and their sum.
            widest = max(3 * mlp, up + part)
        for temporaries in (
            hidden + self._sum_temporaries(hidden),  # This moment is still in the forward pass.
            hidden + widest, 2 * hidden - freed + up + product,
            -freed + hidden + self._norm_temporaries(self._widths.hidden * tokens, backward=True),
            -freed + 2 * hidden + self._sum_temporaries(hidden), -freed + 2 * hidden + 2 * qkv,
        ):
            moments.append(base | {"gradients": temporaries})
        for number in (1, 2):  # Gradients of 1 or 2 sections are summed; their activations are free.
            if (left := 1 - number * self._section_share) > 0 < self._received:
                sums = {"gradients": hidden + widest + self._received * number / 2}
                moments.append(base | {"activations": left * base["activations"]} | sums)
        return [*moments, self._inputs(tokens) | {"optimizer": self._optimizer_temporaries}]

    def _ends_of_training(self, base: Parts, kept: float, tokens: float, responses: float) -> list[Parts]:
        """Return the moments before the first layer and after the last."""
        a = self._widths
        e = self.role.itemsize
        w = self.role.wide_itemsize
        hidden = self._hidden(tokens)
        moments = []
        if self._is_first:  # The other micro-batches, and rows for the embedding's gradient.
            others = base | {"activations": base["activations"] - kept}
            moments.append(others | {"gradients": 2 * hidden + (w * a.hidden * tokens if e < w else 0.0)})
        if self._is_last:  # The tensors that the last norm saves, and its output.
            norm = tokens * self._norm_saved(a.hidden)
            base = base | {"activations": base["activations"] + norm + self._hidden(responses)}
            norm = hidden + self._norm_temporaries(a.hidden * tokens, backward=True)
            moments.append(base | {"gradients": norm})
        if self._has_logits:
            numel = responses * a.vocabulary
            states = self._hidden(responses)
            logits = self._logits(numel, copies=int(self.workload.entropy))
            moments.append(base | {"logits": logits, "gradients": states})
            chunk = e * self._chunk(numel)
            product = self._weight_gradient(a.vocabulary * a.hidden)
            moments.append(base | {"logits": chunk, "gradients": product + states})
        return moments

    @property
    def _optimizer_temporaries(self) -> float:
        """Peak bytes of gradient sums over ranks that share parameters.

        They are the sums over tp ranks (key-value heads, adapters), and over gloo those of a tied embedding
        on its two stages and of this replica's slices.
        """
        s = self.strategy
        w = self.role.wide_itemsize
        config = self.role.config
        shared = 0.0
        sharers = s.tp // config.num_kv_heads
        if sharers > 1:
            weights = self._num_layers * 2 * config.head_dim * (config.hidden_size + config.qkv_bias)
            shared = w * weights * self._sum_copies(sharers)
        trained = trained_params(self.role, s, self.stage)
        if self.role.lora is not None:  # The bound assumes that all adapters have a shared side.
            shared = w * trained * self._sum_copies(s.tp) if s.tp > 1 else 0.0
        is_end = s.pp > 1 and (self._is_first or self._is_last)
        is_tied = config.tied and is_end and self.role.lora is None and not self.fused
        tied = 2.0 * w * self._widths.vocabulary * self._widths.hidden if is_tied else 0.0
        return max(shared, tied, self._received)

    @property
    def _received(self) -> float:
        """Bytes that other replicas send over gloo for two sections of the gradients (ModelSpec.sections)."""
        if self.fused:
            return 0.0
        s = self.strategy
        where = (self.role.config, self.strategy, self.stage, self.role.lora)
        sections = in_section(*where, self.role.trained_spec.section_numel)
        parts = zip(held_params(*where), sections, (s.num_replicas, s.num_expert_replicas), strict=True)
        return max(self.role.wide_itemsize * min(part, 2 * most) * (1 - 1 / n) for part, most, n in parts)

    @property
    def _section_share(self) -> float:
        """Fraction of the trained parameters on this stage that a section of the gradients has at least."""
        held = held_params(self.role.config, self.strategy, self.stage, self.role.lora)
        return self.role.trained_spec.section_numel / sum(held)

    def generate(self) -> list[Parts]:
        """Return the moments of generation: the passes of prompts and of decoding rows, and sampling."""
        a = self._widths
        e = self.role.itemsize
        w = self.workload
        samples = -(-w.most_samples("generate", self.strategy.dp) // self.strategy.cp)
        cohorts = max(1, min(self.strategy.pp, samples, w.max_rows))
        share = max(1, -(-samples // cohorts))  # Samples of a cohort; `cohort` of them decode at once.
        cohort = min(share, -(-w.max_rows // cohorts))
        prompts = -(-cohort // w.samples_per_prompt) + (cohort % w.samples_per_prompt > 0)
        tokens = max(w.prompt_tokens, min(prompts * w.prompt_tokens, w.prefill_tokens))
        # All passes of prompts except the first also decode rows.
        at_once = share == cohort and prompts * w.prompt_tokens <= w.prefill_tokens
        most = max(tokens, cohort) if at_once else tokens + cohort
        cached_tokens = tokens_for(
            math.ceil(w.prompt_tokens), w.samples_per_prompt, num_slots=cohort, num_samples=share,
            max_new_tokens=w.max_new_tokens)
        cache = float(cohorts * cached_tokens * a.cached * e * self._num_layers)
        if w.kv_cache_gib is not None:
            cache = min(cache, w.kv_cache_gib * 2**30)
        results = 16.0 * samples * max(w.max_new_tokens, 1) + 8 * samples * w.prompt_tokens
        base = {"samples": results + INDEX_BYTES * tokens, "kv_cache": cache}
        if self.role.lora is not None and self.role.lora.merge:  # Assumed for all weights.
            base["merged"] = e * float(num_params(self.role.spec, self.strategy, self.stage))
        base["messages"] = 0.0 if self.strategy.pp == 1 else self._hidden(most) * 2
        # On a GPU rows read copies of a layer's keys and values, both in a graph and in a first pass.
        copied = (1 + _GRAPHS) * cohort * (math.ceil(w.prompt_tokens) + w.max_new_tokens) * self.fused
        moments = [base | {"activations": self._forward_temporaries(most) + copied * a.cached * e}]
        if self._is_last:  # Logits in w; scaled logits, exponentials and sums in float64.
            logits = float(cohort * a.vocabulary * (self.role.wide_itemsize + 24))
            # Copies of operands in float32 are freed before the logits exist.
            logits = max(logits, self._widened([(a.hidden, a.vocabulary)], cohort))
            moments.append(base | {"logits": logits, "activations": self._hidden(cohort)})
        return moments
