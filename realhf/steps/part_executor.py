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
    """All samples of some prompts, which go by their numbers in the order of the dataset."""

    prompts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.prompts)) < len(self.prompts):
            twice = next(prompt for prompt in self.prompts if self.prompts.count(prompt) > 1)
            raise UserError(f"Samples({self.prompts}) has prompt {twice} twice")

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.prompts)


class PartExecutor(Protocol):
    """Executes on this rank what a StepRunner decides. An operation has the same number on all ranks."""

    def run(
        self, part: str, prompts: Sequence[int], *, operation: int, sent: Collection[str | None],
        updates: Mapping[str, int], state: Mapping[str, Json],
    ) -> None:  # fmt: skip
        """Run a part on these samples; the outputs of the calls in `sent` are under way already (None: the
        dataset). `updates` of each role came before. Host functions may read the `state` of the program."""

    def send(self, part: str, prompts: Sequence[int], producers: Collection[str | None]) -> None:
        """Start to send what these calls, or the dataset (None), have for a part."""

    def kept(self, call: str, operation: int) -> list[int]:
        """Return the prompts all of whose samples a call has kept in this operation."""

    def decision(self, call: str, operation: int) -> Json:
        """Return the decision of a call in this operation."""

    def forget(self, prompts: Sequence[int]) -> None:
        """Free the memory of these samples."""

    def note(self, number: int, text: str, digest: str) -> None:
        """Tell the watcher what operation follows, and the digest of all operations so far."""

    def log(self, metric: str, value: float) -> None:
        """Add a metric to the step's record."""
