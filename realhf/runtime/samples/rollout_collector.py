"""RolloutCollector: describes, on each rank, what its calls have computed for the samples that are logged.

No samples are sent for this. The rank that scored a sample describes its score, the rank that generated it
its length, and the rank that reads the dataset its prompt; rank 0 merges these (see `rollout_file.merged`).
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from realhf.calls import GenerateOutputs, response_keys
from realhf.data.batch import Batch, Packed
from realhf.data.dataset import DATASET_ROW, LOADER_KEYS, DatasetConfig, DatasetMixture, column_of
from realhf.data.loader import Loader, MixedLoader
from realhf.data.order import block_counts, mixture_position, prompt_of, row_order, samples_of
from realhf.distributed.world import World
from realhf.runtime.compile.actions import dataset_layout
from realhf.runtime.compile.program import Program
from realhf.runtime.samples.sample_store import SampleStore

DATASET_KEYS = ("prompt", DATASET_ROW)
"""Keys of the dataset that every rollout has."""
_OF_SCORES = ("score", "reward_scores", "reward_extra", "completion")
_ADVANTAGES = "advantages"
_DIGITS = 6
"""Significant digits of numbers: they differ between plans by the order of floating-point sums only."""
_LOGPROB_DIGITS = 9
"""Significant digits of log-probs, as many as a float32 has."""


class RolloutCollector:
    """Describes, as JSON objects, the logged samples of a step as far as this rank knows them.

    A sample is logged in the step in which it is scored or, in graphs without scores, trained on.
    """

    def __init__(
        self, program: Program, *, rows_of: Callable[[Sequence[int]], Sequence[int | None]],
        followed: Collection[int], read: Callable[[Sequence[int]], Batch] | None,
    ) -> None:
        """`rows_of` returns the indices of the rows of some prompts; rows in `followed` are always logged.

        `read` returns the batch of some prompts, on the rank that reads the dataset.
        """
        experiment = program.experiment
        graph = program.graph
        self._log = experiment.rollouts
        self._group_size = experiment.group_size
        self._seed = experiment.seed
        self._rows_of = rows_of
        self._followed = followed
        self._read = read
        self._columns = [key for key in graph.inputs if key not in LOADER_KEYS]
        parts = experiment.parts(graph)
        self._part_of = {call: part for part, calls in parts.items() for call in calls}
        scoring = graph.producer("score") or next(iter(graph.of_kind("train_step")))
        self._scoring_part = self._part_of[scoring.name]
        self._decodes = graph.producer("completion") is None
        keys = response_keys(graph)
        assert keys is not None, "the graph has responses"
        self._response_keys = keys
        self._keys: dict[str, list[str]] = {}
        """Call -> the keys of its outputs that are described."""
        logged = [key for key in keys if key is not None and (self._log.tokens or key != keys.logprobs)]
        for described in (*logged, *_OF_SCORES, _ADVANTAGES):
            if (call := graph.producer(described)) is not None:
                self._keys.setdefault(call.name, []).append(described)
        self._masks: dict[str, str] = {}
        """Key of sequences or versions -> that of the response mask that the same call writes, if it does."""
        for key in (keys.sequences, keys.versions):
            if key is None or (call := graph.producer(key)) is None:
                continue
            mask = GenerateOutputs.of(call).mask if call.kind == "generate" else keys.mask
            if mask in call.outputs:
                self._masks[key] = mask
                if mask not in self._keys[call.name]:
                    self._keys[call.name].append(mask)
        self._step = 0
        self._is_followed: dict[int, bool] = {}
        """Prompt that is logged in this step -> whether its row is followed."""

    def collect(
        self, part: str, prompts: Sequence[int], samples: SampleStore, context: Any
    ) -> list[dict[str, Any]]:
        """Return this rank's descriptions of the samples to log, after a part has run on `prompts`."""
        if context.step != self._step:
            self._step = context.step
            self._is_followed = {}
        is_scored = part == self._scoring_part
        if is_scored:
            self._choose(prompts)
        chosen = [prompt for prompt in prompts if prompt in self._is_followed]
        if not chosen:
            return []
        described = self._describe_prompts(chosen) if is_scored and self._read is not None else []
        ids = set(samples_of(chosen, self._group_size))
        for call, keys in self._keys.items():
            if is_scored or self._part_of[call] == part:
                batch = samples.select(call, keys, ids)
                if batch.ids:
                    described += self._describe_samples(batch, context)
        return described

    def _choose(self, prompts: Sequence[int]) -> None:
        """Choose which of the prompts are logged in this step: a sample, and those of followed rows."""
        sampled = self._log.sampled(prompts, step=self._step, seed=self._seed)
        for prompt, row in zip(prompts, self._rows_of(prompts), strict=True):
            if row in self._followed or prompt in sampled:
                self._is_followed[prompt] = row in self._followed

    def _describe_prompts(self, prompts: Sequence[int]) -> list[dict[str, Any]]:
        assert self._read is not None
        batch = self._read(prompts)
        described = []
        for i in range(0, len(batch), self._group_size):
            prompt = prompt_of(batch.ids[i], self._group_size)
            described.append({
                "prompt_number": prompt, "followed": self._is_followed[prompt],
                "dataset_row": batch[DATASET_ROW][i], "prompt": self._log.shortened_value(batch["prompt"][i]),
                "columns": {column_of(key): self._log.shortened_value(batch[key][i]) for key in self._columns
                            if isinstance(batch[key], list)}})
        return described

    def _logged(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that reward functions have logged for a sample."""
        return {name: _rounded(value) if isinstance(value, float) else self._log.shortened_value(value)
                for name, value in values.items()}

    def _describe_samples(self, batch: Batch, context: Any) -> list[dict[str, Any]]:
        described: list[dict[str, Any]] = [
            {"sample": sample, "prompt_number": prompt_of(sample, self._group_size)} for sample in batch.ids]
        for name, values in self._described_columns(batch, context):
            for sample, value in zip(described, values, strict=True):
                sample[name] = value
        return described

    def _described_columns(self, batch: Batch, context: Any) -> list[tuple[str, Sequence[Any]]]:
        """Return the described columns of a batch: the name, and a JSON value for each sample."""
        columns = batch.fields
        described: list[tuple[str, Sequence[Any]]] = []
        if "score" in columns:
            described.append(("score", [_rounded(score) for score in columns["score"].tolist()]))
        if "reward_scores" in columns:
            by_name = [{name: _rounded(score) for name, score in scores.items()}
                       for scores in columns["reward_scores"]]
            described.append(("rewards", by_name))
        if "reward_extra" in columns:
            described.append(("extra", [self._logged(values) for values in columns["reward_extra"]]))
        if "completion" in columns:
            described.append(("completion", [self._log.shortened(text) for text in columns["completion"]]))
        described += self._described_responses(columns, context)
        if _ADVANTAGES in columns:
            advantages = columns[_ADVANTAGES].split()
            described.append(("advantage", [_mean_advantage(x) for x in advantages]))
            if self._log.tokens:
                described.append(("advantages", [[_rounded(x) for x in row.tolist()] for row in advantages]))
        return described

    def _described_responses(
        self, columns: Mapping[str, Any], context: Any
    ) -> Iterator[tuple[str, Sequence[Any]]]:
        """Yield what the calls that write responses know of them."""
        keys = self._response_keys
        if keys.mask in columns:
            mask = _packed(columns[keys.mask])
            yield "length", mask.response_lengths().tolist()
            if self._log.tokens:
                yield "response_mask", [values.long().tolist() for values in mask.split()]
        if keys.sequences in columns:
            sequences = _packed(columns[keys.sequences])
            if self._decodes and keys.sequences in self._masks:
                mask = _packed(columns[self._masks[keys.sequences]])
                yield "completion", self._decoded(sequences, mask, context)
            if self._log.tokens:
                yield "token_ids", [ids.tolist() for ids in sequences.split()]
        if keys.logprobs in columns:
            rows = _packed(columns[keys.logprobs]).split()
            yield "logprobs", [[_rounded(x, _LOGPROB_DIGITS) for x in row.tolist()] for row in rows]
        if keys.rollout is not None and keys.rollout in columns:
            rollouts = columns[keys.rollout]
            yield "stop", [rollout["stop"] for rollout in rollouts]
            yield "turns", [rollout["turns"] for rollout in rollouts]
            yield "messages", [[self._logged(message) for message in r["messages"]] for r in rollouts]
            yield "environment_seconds", [_rounded(rollout["seconds"]) for rollout in rollouts]
            yield "failure", [rollout["sentence"] for rollout in rollouts]
        if keys.finished in columns:
            finished = columns[keys.finished]
            values = finished if isinstance(finished, list) else finished.tolist()
            yield "finished", [bool(value) for value in values]
        if keys.versions is not None and keys.versions in columns and keys.versions in self._masks:
            yield "versions", _spans(columns[keys.versions], columns[self._masks[keys.versions]])
            if self._log.tokens:
                yield "token_versions", [row.tolist() for row in _packed(columns[keys.versions]).split()]

    def _decoded(self, sequences: Packed, mask: Packed, context: Any) -> list[str]:
        """Return the texts of the responses without special tokens."""
        pairs = zip(sequences.split(), mask.like(mask.in_response()).split(), strict=True)
        responses = [tokens[chosen].tolist() for tokens, chosen in pairs]
        decode = context.tokenizer.decode
        return [self._log.shortened(decode(ids, skip_special_tokens=True)) for ids in responses]


def logs_rollouts(program: Program) -> bool:
    """Return whether rollouts are logged: the experiment asks for it, and its graph has responses."""
    return program.experiment.rollouts.is_on and response_keys(program.graph) is not None


def _packed(column: Any) -> Packed:
    """Return a column of sequences, which a host call may have returned as lists."""
    if isinstance(column, Packed):
        return column
    return Packed.of([torch.tensor(row) for row in column], empty=torch.zeros(0))


def make_collector(
    program: Program, world: World, loader: Loader | MixedLoader | None
) -> RolloutCollector | None:
    """Return this rank's collector, or None if no rollouts are logged. Every rank calls this."""
    if not logs_rollouts(program):
        return None
    experiment = program.experiment
    # Rows that are read as they come up are not followed: only the rank that reads them knows which they are.
    mine = [] if loader is None else [0 if part.is_lazy else len(part) for part in loader.parts]
    sizes = max(world.control.all_gather_json(mine))  # Ranks without a loader send an empty list.
    reads = loader is not None and world.rank in dataset_layout(program.graph, program.plan)
    return RolloutCollector(
        program, followed=experiment.rollouts.followed(sum(sizes), seed=experiment.seed),
        rows_of=rows_of_run(experiment.dataset, sizes, seed=experiment.seed),
        read=loader.batch if loader is not None and reads else None)


def rows_of_run(
    config: DatasetConfig, sizes: Sequence[int], *, seed: int
) -> Callable[[Sequence[int]], list[int | None]]:
    """Return a function from the numbers of prompts to the indices of their rows in a data set.

    `sizes` are the numbers of rows of its parts, whose rows are counted one part after another. Rows of a
    part with the size 0 are unknown (None).
    """
    counts = block_counts(config.weights) if isinstance(config, DatasetMixture) else None
    starts = [0, *accumulate(sizes)]

    def row_of(prompt: int) -> int | None:
        part, number = (0, prompt) if counts is None else mixture_position(prompt, counts, seed=seed)
        own = config.parts[part]
        if not sizes[part]:
            return None
        (index,) = row_order(
            sizes[part], start=number, count=1, seed=seed, shuffle=own.shuffle, replacement=own.replacement)
        return starts[part] + index

    return lambda prompts: [row_of(prompt) for prompt in prompts]


def _spans(versions: Packed, mask: Packed) -> list[list[int] | None]:
    """Return the lowest and the highest version of the tokens of each response."""
    spans: list[list[int] | None] = []
    for of_sample, mask_of_sample in zip(versions.split(), mask.split(), strict=True):
        sampled = of_sample[mask_of_sample != 0]
        spans.append([int(sampled.min()), int(sampled.max())] if len(sampled) else None)
    return spans


def _mean_advantage(advantages: torch.Tensor) -> float | None:
    """Return the mean advantage of the tokens that are trained on; prompts have 0, excluded tokens NaN.

    It is None if no token is trained on, because a reward failed or the sample is too old.
    """
    values = advantages.double()
    if values.isnan().any() and not values.nan_to_num().any():
        return None
    values = values[~values.isnan() & (values != 0)]
    return _rounded(values.mean().item()) if len(values) else 0.0


def _rounded(value: float | None, digits: int = _DIGITS) -> float | None:
    """Return a number with so many significant digits; None for NaN, the score of a failed reward."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:z.{digits}g}")
