"""Round: what a generation is given besides new prompts, and how its results are joined with earlier rounds.

An unfinished sample has the columns of a finished one. Its prompt ends at the first 1 of its response mask,
and its tokens from there on have been drawn, or inserted, for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from realhf.calls import GenerateOutputs
from realhf.data.batch import Batch, Packed
from realhf.data.responses import response_lengths
from realhf.errors import UserError
from realhf.graph import FunctionCall
from realhf.inference.rollout_buffer import PromptGroup


def prompt_groups(prompts: Batch, inputs: Sequence[str]) -> list[PromptGroup]:
    """Return new samples, one in each group, from the inputs of a call (see Generate)."""
    samples = zip(prompts.ids, prompts[inputs[0]].split(), _limits(prompts, inputs), strict=True)
    return [PromptGroup(prompt.tolist(), [i], limit=limit) for i, prompt, limit in samples]


def _limits(samples: Batch, inputs: Sequence[str]) -> list[int | None]:
    """Return the limit of each sample's response; None: it has none of its own."""
    if len(inputs) < 2 or inputs[1] not in samples.fields:
        return [None] * len(samples)
    limits = [int(limit) for limit in samples[inputs[1]]]
    for i, limit in zip(samples.ids, limits, strict=True):
        if limit < 1:
            raise UserError(f"{inputs[1]} of sample {i} is {limit}: it must be at least 1")
    return [*limits]


@dataclass(frozen=True)
class Round:
    """One round of a generation. Weights may change between rounds, not in them.

    `unfinished` are the samples of earlier rounds, with all columns of the call's outputs, and of its second
    input if it has one: the most tokens of their responses. Every sample gets at most `budget` tokens in this
    round (None: as many as the call allows), all of the same `version`.
    """

    unfinished: Batch = field(default_factory=lambda: Batch([]))
    budget: int | None = None
    version: int = 0

    def __post_init__(self) -> None:
        assert self.budget is None or self.budget >= 1, f"a round of {self.budget} tokens"

    def groups(self, call: FunctionCall) -> list[PromptGroup]:
        """Return the unfinished samples, one in each group."""
        if not self.unfinished.ids:
            return []
        outputs = GenerateOutputs.of(call)
        sequences = self.unfinished[outputs.sequences].split()
        num_drawn = response_lengths(self.unfinished[outputs.mask]).tolist()
        limits = _limits(self.unfinished, call.inputs)
        samples = zip(sequences, self.unfinished.ids, num_drawn, limits, strict=True)
        return [PromptGroup(tokens.tolist(), [i], *rest) for tokens, i, *rest in samples]

    def after(self, held: Batch) -> "Round":
        """Return the same round with further unfinished samples, which come first."""
        parts = [batch for batch in (held, self.unfinished) if batch.ids]
        return replace(self, unfinished=Batch.concat(parts) if parts else Batch([]))

    def join(self, call: FunctionCall, made: Batch, new: Batch) -> tuple[Batch, Batch]:
        """Return finished and unfinished samples with whole columns, given what this round has `made`.

        `new` are the inputs of the samples that have begun in this round. The first columns of `made` are the
        outputs of `call`; its response masks and log-probs are 0 on all tokens of earlier rounds. A batch
        without columns stays one.
        """
        if not made.fields:
            return made, Batch([])
        fields = dict(made.fields)
        outputs = GenerateOutputs.of(call)
        old_keys = [outputs.mask, outputs.logprobs]
        if outputs.versions is not None:
            mask = made[outputs.mask]
            fields[outputs.versions] = mask.like(mask.values.long() * self.version)
            old_keys.append(outputs.versions)
        if self.unfinished.ids:
            for key in old_keys:
                self._copy_old(fields[key], made.ids, key)
        whole = Batch(made.ids, fields)
        if self.budget is None:
            return whole, Batch([])
        num_drawn = response_lengths(whole[outputs.mask]).tolist()
        most = self._most_drawn(call, made.ids, new)
        flags = zip(whole[outputs.finished].tolist(), num_drawn, most, strict=True)
        has_ended = [bool(finished) or drawn >= limit for finished, drawn, limit in flags]
        ended = whole.select([i for i, end in enumerate(has_ended) if end])
        unfinished = whole.select(going_on := [i for i, end in enumerate(has_ended) if not end])
        for key in call.inputs[1:2]:
            unfinished.fields[key] = [most[i] for i in going_on]
        return ended, unfinished

    def _most_drawn(self, call: FunctionCall, ids: Sequence[int], new: Batch) -> list[int]:
        """Return the most tokens of the responses of samples that are unfinished or new."""
        limit_of: dict[int, int | None] = {}
        for samples in (self.unfinished, new):
            limit_of |= zip(samples.ids, _limits(samples, call.inputs), strict=True)
        limits = [limit_of.get(i) for i in ids]
        most: int = call.work.sampling.max_new_tokens
        return [most if limit is None else min(limit, most) for limit in limits]

    def _copy_old(self, column: Packed, ids: Sequence[int], key: str) -> None:
        """Overwrite the values of tokens of earlier rounds with those of the unfinished samples."""
        old = dict(zip(self.unfinished.ids, self.unfinished[key].split(), strict=True))
        for i, values in zip(ids, column.split(), strict=True):
            if i in old:
                values[: len(old[i])] = old[i]
