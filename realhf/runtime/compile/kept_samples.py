"""The calls of an evaluation that keep its scored samples. Free of torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realhf.calls import HostFunction, response_keys
from realhf.data.dataset import DATASET_ROW, LOADER_KEYS, column_of
from realhf.experiment import RolloutLog
from realhf.graph import DataflowGraph, FunctionCall

RECORD = "eval_record"
"""The call that keeps the samples."""
SHOWN = ("prompt", "answer", "ground_truth", "completion", "score")
"""Fields of a sample that eval.jsonl has."""
REWARD_SCORES = "reward_scores"
"""Key of the scores by reward: a dict for each sample."""
REWARD_EXTRA = "reward_extra"
"""Key of the values that rewards have passed to `log_extra`: a dict for each sample."""
_NAMES = {REWARD_SCORES: "scores", REWARD_EXTRA: "extra"}
"""Key -> field of a sample, where their names differ."""


def with_record(
    graph: DataflowGraph, rows: Sequence[Mapping[str, Any]],
    *, samples_per_prompt: int, keeps_all: bool, log: RolloutLog,
) -> DataflowGraph:
    """Return the graph with a last call that keeps the samples, if it scores samples.

    `rows` are those of the dataset. Without `keeps_all`, only the first sample of each prompt is kept. `log`
    says how long the values of columns may be.
    """
    if graph.producer("score") is None:
        return graph
    shown = [key for key in ("answer", "ground_truth") if all(key in row for row in rows)]
    columns = [key for key in graph.inputs if key not in (*LOADER_KEYS, *shown)]
    names = response_keys(graph)
    mask = None if names is None or graph.producer(names.mask) is None else names.mask
    finished = None if names is None or graph.producer(names.finished) is None else names.finished
    by_reward = [key for key in _NAMES if graph.producer(key) is not None]
    keep = KeepSamples(
        samples_per_prompt, keeps_all=keeps_all, shown=("prompt", *shown), columns=(*shown, *columns),
        mask=mask, finished=finished, answer_of=_answer_of(graph), log=log)
    lengths = () if mask is None or finished is None else (mask, finished)
    keys = ("prompt", *shown, *columns, DATASET_ROW, "completion", "score", *by_reward, *lengths)
    record = FunctionCall(RECORD, "host", keys, work=HostFunction(keep))
    from_dataset = [key for key in ("prompt", *shown, DATASET_ROW) if graph.producer(key) is None]
    return graph.add(record, inputs=[key for key in from_dataset if key not in graph.inputs])


def _answer_of(graph: DataflowGraph) -> Any:
    """Return the method by which a reward extracts the answer from a completion, if there is one."""
    methods = (getattr(call.work.function, "answer_of", None) for call in graph.of_kind("host"))
    return next((method for method in methods if callable(method)), None)


@dataclass(frozen=True)
class KeepSamples:
    """A host function that keeps the scored samples of an evaluation as `context.kept_samples`.

    A sample is a dict: the row of its prompt in the file, the number of the sample among the prompt's, the
    prompt's columns `shown`, completion and score, and a dict of the columns that calls read. If they are
    known, it also has: scores by reward, values that rewards have logged, length in tokens, whether it ended
    by itself, and the final answer in it.
    """

    samples_per_prompt: int
    keeps_all: bool = False
    """Whether all samples of a prompt are kept; else the first one is, as the samples of a pair have the same
    prompt, and so the same greedy response."""
    shown: tuple[str, ...] = ("prompt",)
    columns: tuple[str, ...] = ()  # Keys of the columns of the dataset that calls read.
    mask: str | None = None  # Keys of the response mask, and of whether the response has ended.
    finished: str | None = None
    answer_of: Any = None
    log: RolloutLog = RolloutLog()

    def __call__(self, batch: Any, context: Any) -> dict[str, Any]:
        indices = [i for i, sample in enumerate(batch.ids) if self.keeps_all or not self._number(sample)]
        batch = batch.select(indices)
        samples: list[dict[str, Any]] = [
            {"dataset_row": row, "sample": self._number(sample)}
            for row, sample in zip(batch[DATASET_ROW], batch.ids, strict=True)]
        for key in (*self.shown, "completion", "score", *_NAMES):
            if key in batch.fields:
                self._add(samples, _NAMES.get(key, key), batch[key])
        if self.columns:
            rows = zip(*(batch[key] for key in self.columns), strict=True)
            names = [column_of(key) for key in self.columns]
            self._add(samples, "columns", [
                dict(zip(names, map(self.log.shortened_value, row), strict=True)) for row in rows])
        if self.mask is not None and self.finished is not None:
            self._add(samples, "length", batch[self.mask].response_lengths())
            self._add(samples, "finished", [bool(ended) for ended in batch[self.finished].tolist()])
        if self.answer_of is not None:
            final_answers = [self.answer_of(text) for text in batch["completion"]]
            texts = [None if answer is None else str(answer) for answer in final_answers]
            self._add(samples, "final_answer", texts)
        context.kept_samples = samples
        return {}

    def _number(self, sample: int) -> int:
        return sample % self.samples_per_prompt

    def _add(self, samples: list[dict[str, Any]], key: str, column: Any) -> None:
        values = column if isinstance(column, list) else column.tolist()
        for sample, value in zip(samples, values, strict=True):
            sample[key] = value
