"""How many bytes a rank needs for a role and for a call: a formula for everything that our engine holds.

The formulas follow `nn` and `engine` operator by operator; tests/planner/test_memory.py holds them against
what real processes allocate. Each call is looked at in a few moments, one of which is its peak.

Letters: T tokens of a micro-batch (over cp, a rank's part of them), R response tokens in it, e bytes of an
element in the model's dtype, w in that of what needs precision (float32; float64 of a float64 model).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from realhf.kv_blocks import tokens_for
from realhf.layout import ParallelStrategy
from realhf.planner.model_states import trained_params
from realhf.planner.problem import ModelRole, Workload
from realhf.planner.shard import Widths, exchanged, float32_bytes, held_params, in_section, num_params, widths

Parts = dict[str, float]

_SAMPLE_BYTES = 64  # Of a token in the inputs of a call: ids, mask and columns of the loss, twice.
_INDEX_BYTES = 40  # Of a token of a micro-batch: row, position and other integers.
_CHUNK_NUMEL = 1 << 24  # Logits that exist at a time on CPU, and those that are looked at at once; see
_SLICE_NUMEL = 1 << 18  # nn/vocab_parallel.py. On CUDA as many times more:
_CUDA_CHUNKS = 8
_CUDA_SLICES = 256
_PART_NUMEL = 1 << 17  # Elements that norms and activations work on at a time on CPU.
_GRAPHS = 1.25  # Rows times blocks of a recorded pass, relative to those that there are; decode_graphs.py.
_BLOCK_NUMEL = 1 << 22
_CUDA_BLOCKS = 64  # Products in another dtype (nn/grad_accumulation.py).


def call_bytes(
    role: ModelRole, kind: str, workload: Workload, strategy: ParallelStrategy, stage: int,
    *, micro_batch_tokens: int, recompute: bool = False, fused: bool = False,
) -> Parts:  # fmt: skip
    """Bytes by part that the call adds at its peak on the fullest rank of a stage; their sum is the peak.

    `fused`: with CUDA's kernels and NCCL, where an RMSNorm keeps its input only, attention its output once,
    and collectives work in place; without, as on CPU with gloo. Top-p sampling is not counted. Where
    responses are shorter than `max_new_tokens` in the mean, micro-batches are taken to hold up to their limit
    or the longest sequence; of prompts there is only a mean.
    """
    call = _Call(role, workload, strategy, stage, micro_batch_tokens, recompute, fused)
    moments = {"generate": call.generate, "forward": call.forward, "train_step": call.train}[kind]()
    peak = max(moments, key=lambda parts: sum(parts.values()))
    return {name: part for name, part in peak.items() if part}


@dataclass(frozen=True)
class _Call:
    role: ModelRole
    workload: Workload
    strategy: ParallelStrategy
    stage: int
    micro_batch_tokens: int
    recompute: bool
    fused: bool

    # Sizes

    @cached_property
    def _at(self) -> Widths:
        return widths(self.role.config, self.strategy.tp, self.strategy.ep)

    @cached_property
    def _layers(self) -> int:
        return len(self.role.spec.stage_layers(self.strategy, self.stage))

    @property
    def _is_first(self) -> bool:
        return self.stage == 0

    @property
    def _is_last(self) -> bool:
        return self.stage == self.strategy.pp - 1

    @property
    def _has_logits(self) -> bool:
        return self._is_last and self.role.config.head == "lm" and self.workload.output == "logprobs"

    @property
    def _samples(self) -> int:
        """Of this dp rank in one mini-batch."""
        return self.workload.most_samples("train_step", self.strategy.dp)

    @cached_property
    def _micro_batches(self) -> tuple[int, float, float]:
        """Their number; of the largest, a cp rank's share of tokens and of response tokens."""
        number, tokens, responses = self._whole_micro_batches
        return number, tokens / self.strategy.cp, responses / self.strategy.cp

    @cached_property
    def _whole_micro_batches(self) -> tuple[int, float, float]:
        """Their number, tokens of the largest, and response tokens in that; see engine/micro_batch.py."""
        w = self.workload
        limit = self.micro_batch_tokens
        samples = self._samples
        length = max(w.tokens, 1.0)
        number = max(-(-int(samples * length) // limit), min(self.strategy.pp, samples), 1)
        if w.response_tokens >= w.max_new_tokens:  # All sequences are alike.
            rows = max(1, min(-(-samples // number), int(limit // length)))
            return max(1, -(-samples // rows)), rows * length, rows * w.response_tokens
        longest = w.prompt_tokens + w.max_new_tokens
        tokens = max(longest, min(limit, samples * length / number + longest / 2))
        return number, tokens, tokens * max(w.response_tokens / length, w.max_new_tokens / longest)

    def _inputs(self, tokens: float) -> Parts:
        w = self.workload
        rows = -(-w.num_samples // self.strategy.dp)
        return {"samples": _SAMPLE_BYTES * rows * w.tokens + _INDEX_BYTES * self.strategy.cp * tokens}

    # Pieces, in bytes

    def _hidden(self, tokens: float) -> float:
        return self.role.itemsize * self._at.hidden * tokens

    def _norm_saved(self, hidden: float) -> float:
        """What a norm of `hidden` elements per token keeps of a token besides its output: its input."""
        return self.role.itemsize * hidden + self.role.wide_itemsize * (2 if self.role.config.norm == "layer" else 1)

    def _norm_temporaries(self, numel: float, *, backward: bool) -> float:
        """Of a norm's pass: what it gives, and copies of the part that it works on."""
        e = self.role.itemsize
        w = self.role.wide_itemsize
        if self.fused or self.role.config.norm == "layer":
            return e * numel
        copies = 2 * (e < w) + (2 if backward else 0)
        return e * numel + w * copies * self._part(numel)

    def _part(self, numel: float) -> float:
        """Of so many elements, those that norms and activations work on at a time."""
        return numel if self.fused else min(numel, _PART_NUMEL)

    @property
    def _mlp_kept(self) -> int:
        """Of an MLP's width: gate and up, or up; and what they give, where experts or adapters want it."""
        config = self.role.config
        return (2 if config.gated else 1) + (config.moe is not None or self.role.lora is not None)

    def _product(self, numel: float) -> float:
        """A gradient of a weight on its way to the gradient buffer: none is made where dtypes agree."""
        if self.role.itemsize == self.role.wide_itemsize or self.role.lora is not None:
            return 0.0
        return self.role.itemsize * min(numel, _BLOCK_NUMEL * (_CUDA_BLOCKS if self.fused else 1))

    def _reduced(self, num_bytes: float) -> float:
        """Temporaries of a sum over tp."""
        tp = self.strategy.tp
        return 0.0 if tp == 1 else num_bytes * self._reduced_copies(tp)

    def _reduced_copies(self, size: int) -> float:
        """A clone and, over gloo, what `Group.all_reduce` of so many members receives."""
        return 1.0 + (0.0 if self.fused else 2.0 if size == 2 else (size - 1) / size)

    def _block_saved(self, tokens: float) -> float:
        """What autograd keeps of one decoder layer (nn/transformer.py), in order:

        norm's input | its output, for qkv | qkv, with queries and keys rotated | attention's output and its
        logsumexp | norm's input | its output, for gate and up | gate and up. The sums with the residual
        stream are the norms' inputs. Where families have norms behind attention and MLP, they keep what these
        give; norms of queries and keys keep qkv as it was.
        """
        a = self._at
        e = self.role.itemsize
        norms = a.norms * self._norm_saved(a.hidden) + 2 * e * a.hidden
        if self.role.config.qk_norm:
            norms += e * a.qkv + self.role.wide_itemsize * a.heads
        outputs = 1
        inputs = self._attended
        if self.strategy.cp > 1:  # What came from other ranks; the output as it goes and as it comes back.
            outputs = 2
            inputs = self._exchanged
        attention = e * (a.latents + inputs + outputs * a.attention) + 4 * a.heads
        return tokens * (norms + attention + e * (self._mlp_kept * a.mlp + a.routed + self._ranks))

    @property
    def _attended(self) -> int:
        """Elements per token of queries, keys and values as attention takes them."""
        return self._at.qkv + (self._at.rotated if self.role.config.mla is not None else 0)

    @cached_property
    def _ranks(self) -> int:
        """Numbers per token between A and B of all adapters of a layer."""
        if self.role.lora is None:
            return 0
        last = self.role.config.num_layers - 1
        table = self.role.trained_spec.params
        return sum(p.shape[0] for p in table if p.layer == last and p.part.endswith("lora_A"))

    @cached_property
    def _exchanged(self) -> int:
        """Elements per token of the all-to-all over cp before attention."""
        s = self.strategy
        return exchanged(self.role.config, s.tp, s.cp) if s.cp > 1 else 0

    def _chunk(self, numel: float) -> float:
        """Of so many logits, those that exist at a time."""
        return min(numel, max(self._at.vocabulary, _CHUNK_NUMEL * (_CUDA_CHUNKS if self.fused else 1)))

    def _logits(self, numel: float, *, copies: int) -> float:
        """A chunk of the logits and copies in w of the slice of it that is looked at.

        Another dtype is copied to w, too, and the slice before goes when the next one has come.
        """
        limit = _SLICE_NUMEL * (_CUDA_SLICES if self.fused else 1)
        chunk = self._chunk(numel)
        e = self.role.itemsize
        w = self.role.wide_itemsize
        copies += (1 + (chunk > limit)) * (e < w)
        return e * chunk + w * copies * min(chunk, limit)

    def _forward_temporaries(self, tokens: float) -> float:
        """One layer without autograd at its widest: in a norm, in attention or in the MLP."""
        a = self._at
        e = self.role.itemsize
        hidden = self._hidden(tokens)
        norm = hidden + self._norm_temporaries(a.hidden * tokens, backward=False)
        outputs = 1 if self.fused else 2
        projected = e * tokens * (a.latents + self._attended)
        turned = e * tokens * a.rotated / 2  # A copy of half of it, while it is turned in place.
        attending = e * tokens * outputs * a.attention
        if self.strategy.cp > 1:  # What is sent and what is received; attention's output, that sent back.
            attending = e * tokens * (self._exchanged + max(self._exchanged, (outputs + 1) * a.attention))
        attention = 2 * hidden + projected + max(turned, attending + hidden, hidden + self._reduced(hidden))
        routed = e * tokens * a.routed * (2 if self.strategy.ep > 1 else 1)  # Both ways.
        width = e * tokens * a.mlp
        up = 2 if self.role.config.gated else 1
        part = e * self._part(tokens * a.mlp)  # On its way to what is made of several.
        activating = width + max(hidden, part * (part < width))
        mlp = 3 * hidden + routed + up * width + max(activating, hidden + self._reduced(hidden))
        rest = self._widened(a.in_layer(num_ups=up), tokens) + e * a.head_dim * tokens
        return max(norm, attention, mlp) + rest

    def _widened(self, products: Sequence[tuple[int, int]], tokens: float) -> float:
        return float32_bytes(products, tokens) * (self.role.dtype == "bfloat16" and not self.fused)

    # Moments

    def forward(self) -> list[Parts]:
        """Without autograd: in a layer; on the last stage in the logits."""
        number, tokens, responses = self._micro_batches
        base = self._inputs(tokens)
        if self.strategy.pp > 1:  # Sends of hidden states, which are waited for two micro-batches later.
            sends = 0 if self._is_last else min(number, 3)
            base["messages"] = self._hidden(tokens) * (sends + (not self._is_first))
        moments = [base | {"activations": self._forward_temporaries(tokens)}]
        if self._has_logits:
            states = {"activations": self._hidden(tokens + responses)}
            logits = self._logits(responses * self._at.vocabulary, copies=0)
            moments.append(base | states | {"logits": logits})
        return moments

    def train(self) -> list[Parts]:
        """Forward and backward pass of a micro-batch while others are in flight (1F1B); the optimizer."""
        number, tokens, responses = self._micro_batches
        in_flight = min(number, self.strategy.pp - self.stage)
        e = self.role.itemsize
        w = self.role.wide_itemsize
        hidden = self._hidden(tokens)
        block = self._block_saved(tokens)
        kept = self._layers * (hidden if self.recompute else block)
        kept += e * self._at.head_dim * tokens + _INDEX_BYTES * tokens
        base = self._inputs(tokens)
        messages = 0.0
        if self.strategy.pp > 1:
            # Hidden states received (a layer keeps them anyway, if its norm does not copy) and sent, ...
            copied = e < w and not self.fused and not self.recompute
            messages += in_flight * hidden * ((not self._is_first and copied) + (not self._is_last))
            # ... a gradient received, and those sent of up to two micro-batches before.
            messages += hidden * ((not self._is_last) + min(number - 1, 2) * (not self._is_first))
        base |= {"activations": in_flight * kept, "messages": messages}
        moments = self._ends_of_training(base, kept, tokens, responses)
        if self.recompute:  # One layer at a time has all of its activations.
            base["activations"] += block
        # The backward pass of the last layer: its MLP with activations as they are, then without; attention.
        mlp = e * tokens * self._at.mlp
        product = self._product(self._at.widest_weight)
        freed = self._mlp_kept * mlp
        up = (2 if self.role.config.gated else 1) * mlp
        qkv = e * tokens * self._at.qkv
        part = 3 * e * self._part(tokens * self._at.mlp)
        if self.role.config.moe is not None:  # Experts' weights have gradients of their own.
            product = max(product, float(e * self._at.widest_weight))
        widest = mlp + up + max(part, product)
        if self.role.lora is not None:  # Two linear layers' gradients of one input, and their sum.
            widest = max(3 * mlp, up + part)
        for temporaries in (
            hidden + self._reduced(hidden),  # (still forward)
            hidden + widest, 2 * hidden - freed + up + product,
            -freed + hidden + self._norm_temporaries(self._at.hidden * tokens, backward=True),
            -freed + 2 * hidden + self._reduced(hidden), -freed + 2 * hidden + 2 * qkv,
        ):
            moments.append(base | {"gradients": temporaries})
        for number in (1, 2):  # Sums of gradients of so many sections, whose activations are gone.
            if (left := 1 - number * self._section_share) > 0 < self._received:
                sums = {"gradients": hidden + widest + self._received * number / 2}
                moments.append(base | {"activations": left * base["activations"]} | sums)
        return [*moments, self._inputs(tokens) | {"optimizer": self._optimizer_temporaries}]

    def _ends_of_training(self, base: Parts, kept: float, tokens: float, responses: float) -> list[Parts]:
        """What is before the first layer and behind the last, at its peaks."""
        a = self._at
        e = self.role.itemsize
        w = self.role.wide_itemsize
        hidden = self._hidden(tokens)
        moments = []
        if self._is_first:  # The other micro-batches in flight, and rows for the embedding's gradient.
            others = base | {"activations": base["activations"] - kept}
            moments.append(others | {"gradients": 2 * hidden + (w * a.hidden * tokens if e < w else 0.0)})
        if self._is_last:  # What the last norm keeps, and the states that it gives.
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
            product = self._product(a.vocabulary * a.hidden)
            moments.append(base | {"logits": chunk, "gradients": product + states})
        return moments

    @property
    def _optimizer_temporaries(self) -> float:
        """Of sums of gradients: those that tp ranks share (key-value heads, adapters), put together, and over
        gloo the others' parts of them, of a tied embedding on its two stages, of this replica's slices."""
        s = self.strategy
        w = self.role.wide_itemsize
        config = self.role.config
        shared = 0.0
        sharers = s.tp // config.num_kv_heads
        if sharers > 1:
            weights = self._layers * 2 * config.head_dim * (config.hidden_size + config.qkv_bias)
            shared = w * weights * self._reduced_copies(sharers)
        trained = trained_params(self.role, s, self.stage)
        if self.role.lora is not None:  # At most all adapters have a whole side, and both of these copies.
            shared = w * trained * self._reduced_copies(s.tp) if s.tp > 1 else 0.0
        is_end = s.pp > 1 and (self._is_first or self._is_last)
        is_tied = config.tied and is_end and self.role.lora is None and not self.fused
        tied = 2.0 * w * self._at.vocabulary * self._at.hidden if is_tied else 0.0
        return max(shared, tied, self._received)

    @property
    def _received(self) -> float:
        """Over gloo, what other replicas send of two sections of the gradients (ModelSpec.sections)."""
        if self.fused:
            return 0.0
        s = self.strategy
        where = (self.role.config, self.strategy, self.stage, self.role.lora)
        sections = in_section(*where, self.role.trained_spec.section_numel)
        parts = zip(held_params(*where), sections, (s.num_replicas, s.num_expert_replicas), strict=True)
        return max(self.role.wide_itemsize * min(part, 2 * most) * (1 - 1 / n) for part, most, n in parts)

    @property
    def _section_share(self) -> float:
        """Of the parameters on this stage that are trained, those in a section of the gradients, at least."""
        held = held_params(self.role.config, self.strategy, self.stage, self.role.lora)
        return self.role.trained_spec.section_numel / sum(held)

    def generate(self) -> list[Parts]:
        """The cache, and the passes: of prompts, and of rows that decode and are sampled from."""
        a = self._at
        e = self.role.itemsize
        w = self.workload
        samples = -(-w.most_samples("generate", self.strategy.dp) // self.strategy.cp)
        cohorts = max(1, min(self.strategy.pp, samples, w.max_rows))
        share = max(1, -(-samples // cohorts))  # Samples of a cohort, and so many of them decode at once.
        cohort = min(share, -(-w.max_rows // cohorts))
        prompts = -(-cohort // w.samples_per_prompt) + (cohort % w.samples_per_prompt > 0)
        tokens = max(w.prompt_tokens, min(prompts * w.prompt_tokens, w.prefill_tokens))
        # Rows decode in the pass of prompts, but for the first.
        at_once = share == cohort and prompts * w.prompt_tokens <= w.prefill_tokens
        most = max(tokens, cohort) if at_once else tokens + cohort
        cached_tokens = tokens_for(
            math.ceil(w.prompt_tokens), w.samples_per_prompt, num_slots=cohort, num_samples=share,
            max_new_tokens=w.max_new_tokens)
        cache = float(cohorts * cached_tokens * a.cached * e * self._layers)
        if w.kv_cache_gib is not None:
            cache = min(cache, w.kv_cache_gib * 2**30)
        results = 16.0 * samples * max(w.max_new_tokens, 1) + 8 * samples * w.prompt_tokens
        base = {"samples": results + _INDEX_BYTES * tokens, "kv_cache": cache}
        if self.role.lora is not None and self.role.lora.merge:  # Taken to be of all weights.
            base["merged"] = e * float(num_params(self.role.spec, self.strategy, self.stage))
        base["messages"] = 0.0 if self.strategy.pp == 1 else self._hidden(most) * 2
        # On a GPU rows decode from copies of a layer's keys and values: in a graph, and in a first pass.
        copied = (1 + _GRAPHS) * cohort * (math.ceil(w.prompt_tokens) + w.max_new_tokens) * self.fused
        moments = [base | {"activations": self._forward_temporaries(most) + copied * a.cached * e}]
        if self._is_last:  # Logits in w; in float64: divided, exponentials, their sums.
            logits = float(cohort * a.vocabulary * (self.role.wide_itemsize + 24))
            logits = max(logits, self._widened([(a.hidden, a.vocabulary)], cohort))  # Those come before.
            moments.append(base | {"logits": logits, "activations": self._hidden(cohort)})
        return moments
