"""RolloutLog: which samples of training are logged in rollouts.jsonl, and how much of their texts."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from realhf.user_input.field_types import check_types, require

_MEGABYTE = 1_000_000
_COMPARED_ROWS = 1 << 20
"""Rows that are compared at a time."""


@dataclass(frozen=True)
class RolloutLog:
    """Which samples of training are logged in rollouts.jsonl, and how large the file may become.

    Of a chosen prompt all samples are, so that they can be compared. The choice depends on the seed, the
    step and the numbers of prompts and rows only, so it is the same under every plan.
    """

    prompts_per_step: int = 4  # Prompts logged of each batch that is scored; 0: none.
    follow_rows: int = 4
    """Rows of the dataset whose prompts are logged whenever they come up, in every epoch; 0: none. Rows of
    large files, which are read when they come up, are not followed."""
    every: int = 1  # Log `prompts_per_step` of every so many steps; followed rows are logged in all steps.
    max_megabytes: int = 256
    """Most megabytes of the file. When it is full, every second of the steps in it is dropped."""
    max_characters: int = 20_000  # Longer texts lose their middle.
    tokens: bool = False
    """Whether the token ids of each response are logged, with the response mask and the log-probs with which
    the tokens were sampled, so that anyone can check them. Their advantages and versions are logged, too."""
    digest_megabytes: int = 64
    """Most megabytes of digests.jsonl, by which `realhf report` finds where two runs part; 0: it is not
    written. When the file is full, the samples of later steps are left out."""

    def __post_init__(self) -> None:
        check_types(self, "rollouts.")
        for name in ("prompts_per_step", "follow_rows"):
            require(getattr(self, name) >= 0, f"rollouts.{name}", getattr(self, name), "not be negative")
        for name in ("every", "max_megabytes"):
            require(getattr(self, name) >= 1, f"rollouts.{name}", getattr(self, name), "be at least 1")
        require(
            self.digest_megabytes >= 0, "rollouts.digest_megabytes", self.digest_megabytes, "not be negative")
        require(self.max_characters >= 100, "rollouts.max_characters", self.max_characters, "be at least 100")

    @property
    def is_on(self) -> bool:
        """Whether any sample is logged."""
        return self.prompts_per_step > 0 or self.follow_rows > 0

    @property
    def max_bytes(self) -> int:
        """Most bytes of the file."""
        return self.max_megabytes * _MEGABYTE

    @property
    def digest_bytes(self) -> int:
        """Most bytes of digests.jsonl."""
        return self.digest_megabytes * _MEGABYTE

    def sampled(self, prompts: Sequence[int], *, step: int, seed: int) -> set[int]:
        """Return the numbers of those prompts of a batch that are logged in this step."""
        if step % self.every and step != 1:
            return set()
        return _chosen(prompts, self.prompts_per_step, seed)

    def followed(self, num_rows: int, *, seed: int) -> frozenset[int]:
        """Return the indices of the rows that are followed."""
        chosen: set[int] = set()
        for start in range(0, num_rows, _COMPARED_ROWS):  # So that many rows need little memory.
            chunk = range(start, min(start + _COMPARED_ROWS, num_rows))
            chosen = _chosen([*chosen, *_chosen(chunk, self.follow_rows, seed)], self.follow_rows, seed)
        return frozenset(chosen)

    def shortened(self, text: str) -> str:
        """Return a text without its middle if it is too long."""
        if len(text) <= self.max_characters:
            return text
        half = self.max_characters // 2
        return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"

    def shortened_value(self, value: Any) -> Any:
        """Return a JSON value, or its text without the middle if that is too long."""
        if isinstance(value, str):
            return self.shortened(value)
        text = json.dumps(value, ensure_ascii=False)
        return value if len(text) <= self.max_characters else self.shortened(text)


def _chosen(numbers: Iterable[int], count: int, seed: int) -> set[int]:
    """Return the `count` numbers with the lowest hashes."""
    values = np.fromiter(numbers, dtype=np.uint64)
    order = np.lexsort((values, _hashes(values, seed)))
    return {int(value) for value in values[order[:count]]}


def _hashes(values: NDArray[np.uint64], seed: int) -> NDArray[np.uint64]:
    """Return the SplitMix64 hash (Steele et al. 2014) of each number under this seed."""
    with np.errstate(over="ignore"):
        x = (values + np.uint64(seed % 2**63 + 1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
