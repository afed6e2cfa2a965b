"""PartExecutor: what a StepRunner needs of the rank on which it runs; and Samples, which it hands out.

Free of torch.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from realhf.errors import UserError

Json = Any


@dataclass(frozen=True)
class Samples:
    """All samples of some prompts. A prompt's number is its place in the run (see sample_ids.py)."""

    prompts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.prompts)) < len(self.prompts):
            twice = next(prompt for prompt in self.prompts if self.prompts.count(prompt) > 1)
            raise UserError(f"Samples({self.prompts}) has prompt {twice} twice")

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)


class PartExecutor(Protocol):
    """Carries out on this rank what a StepRunner decides. An operation has the same number on all ranks."""

    def run(
        self, part: str, prompts: Sequence[int], *, operation: int, sent: Collection[str | None],
        updates: Mapping[str, int], state: Mapping[str, Json],
    ) -> None:
        """Run a part on these samples. `send` has already sent the outputs of the calls in `sent` (None: the
        columns of the dataset). `updates` counts the train steps of each role so far, and `state` is that of
        the step program, which host functions may read."""

    def send(self, part: str, prompts: Sequence[int], producers: Collection[str | None]) -> None:
        """Start to send the outputs of these calls (None: the dataset's columns) to the ranks of a part."""

    def kept(self, call: str, operation: int) -> list[int]:
        """Return the prompts whose samples were all kept by a filtering call in this operation."""

    def decision(self, call: str, operation: int) -> Json:
        """Return the decision of a call in this operation."""

    def forget(self, prompts: Sequence[int]) -> None:
        """Free the memory of these samples."""

    def note(self, number: int, text: str, digest: str) -> None:
        """Tell the watcher what operation follows, and the digest of all operations so far."""

    def log(self, metric: str, value: float) -> None:
        """Add a metric to the step's record."""
