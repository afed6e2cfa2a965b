"""DrawnSamples: the samples of a round, as stop strings, inserted phrases and logit processors read them."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from realhf.inference.block_tables import Integers


class DrawnSamples(Protocol):
    """The samples of a RolloutBuffer; its readers cannot import that class, because it constructs them."""

    prompts: list[list[int]]
    lengths: Integers
    num_drawn: Integers
    tokens: Tensor

    def at(self, numbers: Sequence[int], *, back: int = 0) -> tuple[Tensor, Tensor]:
        """Return the index in `tokens` of each sample's token `back` positions before its next one."""
