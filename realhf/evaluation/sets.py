"""Evaluation: a set of held-out rows and how it is evaluated. Free of torch."""

import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from math import isfinite
from typing import Any

from realhf.calls import SamplingConfig
from realhf.data.dataset import DatasetConfig
from realhf.user_input.field_types import check_types, require

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
"""Legal names of sets, which are also names of folders."""


@dataclass(frozen=True)
class Evaluation:
    """A set of held-out rows, the samples of each prompt, and how they are drawn and scored.

    Its rows are read in the order of the file.
    """

    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    samples: int = 1  # Answers to each prompt.
    sampling: SamplingConfig | None = None
    """How answers are drawn. None: greedily if `samples` is 1, else as in training."""
    max_rows: int = 0  # Most rows, spread evenly over those of the dataset; 0: all of them.
    function: Any = None
    """Scores the answers, in the place of the experiment's `eval_function` or `reward_function`."""
    correct_by: str | None = None
    """Name of the reward that decides which answers are right, in pass@k, majority@k and the other metrics of
    several samples; None: the first reward. The score is the weighted sum of all rewards."""
    correct_above: float | None = None
    """An answer counts as right if that reward is above this; None: what the reward itself says, else 0.5."""

    def __post_init__(self) -> None:
        check_types(self, "Evaluation.")
        require(self.samples >= 1, "Evaluation.samples", self.samples, "be at least 1")
        require(self.max_rows >= 0, "Evaluation.max_rows", self.max_rows, "not be negative")
        finite = self.correct_above is None or isfinite(self.correct_above)
        require(finite, "Evaluation.correct_above", self.correct_above, "be finite")
        if self.sampling is not None:
            self._require_random(self.sampling, "Evaluation.sampling.temperature")

    def answer_sampling(self, training: SamplingConfig) -> SamplingConfig:
        """Return how answers are drawn in an experiment with this sampling. Raises ValueError if all samples
        of a prompt would be equal."""
        if self.sampling is not None:
            return self.sampling
        if self.samples == 1:
            return training.greedy()
        self._require_random(training, "sampling.temperature")
        return training

    def _require_random(self, sampling: SamplingConfig, name: str) -> None:
        rule = f"be above 0, as Evaluation.samples is {self.samples}"
        require(self.samples == 1 or sampling.temperature > 0, name, sampling.temperature, rule)

    def chosen_rows(self, num_rows: int, keeps: Callable[[int], bool] = lambda row: True) -> list[int]:
        """Return the numbers of the rows to evaluate: all, or `max_rows` of them, spread evenly.

        `keeps` says whether a row is not left out. For a row that is left out, a following one takes part:
        the first rows of equal stretches of the data set are tried, then the second ones, and so on.
        """
        count = self.max_rows if 0 < self.max_rows < num_rows else num_rows
        starts = [i * num_rows // count for i in range(count + 1)]
        longest = max(stop - start for start, stop in pairwise(starts))
        tried = (start + i for i in range(longest) for start, stop in pairwise(starts) if start + i < stop)
        return sorted(islice(filter(keeps, tried), count))


EvalSets = DatasetConfig | Evaluation | Mapping[str, DatasetConfig | Evaluation]
"""The held-out rows of an experiment: one set, or several by name."""


def named_sets(given: EvalSets | None) -> dict[str, Evaluation]:
    """Return the sets of an experiment by name; a single one has an empty name.

    Raises ValueError if a name is illegal, or a set has a field with an illegal value.
    """
    if given is None:
        return {}
    if isinstance(given, DatasetConfig):
        return {"": Evaluation(given)}
    sets = given if isinstance(given, Mapping) else {"": given}
    evaluations = {}
    for name, entry in sets.items():
        if isinstance(given, Mapping) and not _NAME.fullmatch(name):
            raise ValueError(
                f"eval_dataset has a set named {name!r}: a name must have letters, digits, '.', '_' and '-', "
                "and begin with a letter or a digit")
        evaluation = entry if isinstance(entry, Evaluation) else Evaluation(entry)
        check_types(evaluation.dataset, f"{set_field(name)}.")
        evaluations[name] = replace(evaluation, dataset=replace(evaluation.dataset, shuffle=False))
    return evaluations


def set_field(name: str) -> str:
    """Return how messages call the set of this name."""
    return f"eval_dataset.{name}" if name else "eval_dataset"


def metric_prefix(name: str) -> str:
    """Return the beginning of the names of a set's metrics."""
    return f"eval/{name}/" if name else "eval/"


def sampling_seed(seed: int, name: str) -> int:
    """Return the seed of a set's answers: different for each set, and different from that of training."""
    return seed ^ zlib.crc32(metric_prefix(name).encode())
