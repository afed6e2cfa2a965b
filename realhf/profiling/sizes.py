"""The model shapes to measure, and the sizes at which they are measured."""

import dataclasses
from dataclasses import dataclass
from itertools import cycle, islice

from realhf.graph import FunctionCall
from realhf.models.model_config import ModelConfig

_LARGEST_PASS = 1 << 14  # Tokens of the largest pass.
_NUM_SIZES = 4


@dataclass(frozen=True)
class MeasuredModel:
    """A model shape to measure; `calls` are the calls of the experiment that run it."""

    config: ModelConfig
    dtype: str
    calls: tuple[FunctionCall, ...]

    def with_blocks(self, count: int, head: str) -> ModelConfig:
        """Return the config with `count` blocks, with experts if the model has any, and no end-of-sequence
        token."""
        c = self.config
        moe = self.config.moe
        hf = {name: value for name, value in c.hf.items() if name != "eos_token_id"}
        return dataclasses.replace(
            c, num_layers=count, head=head, hf=hf, generation={},
            windows=tuple(islice(cycle(c.windows), count)) if c.windows else (),
            rope_layers=tuple(islice(cycle(c.rope_layers), count)) if c.rope_layers else (),
            moe=None if moe is None else dataclasses.replace(moe, num_dense_layers=0))

    @property
    def outputs(self) -> dict[str, bool]:
        """The outputs of forward and train calls, each with whether one of them runs a backward pass."""
        trains: dict[str, bool] = {}
        for call in self.calls:
            if call.kind != "generate":
                output = call.work.output
                trains[output] = trains.get(output, False) or call.kind == "train_step"
        return trains or {"logprobs": False}

    @property
    def generates(self) -> bool:
        return any(call.kind == "generate" for call in self.calls)


@dataclass(frozen=True)
class Sizes:
    """Means over one step of the experiment."""

    prompt_tokens: int
    tokens: int  # Of a whole sequence.
    samples: int
    group_size: int  # Samples per prompt.

    @property
    def sequence_tokens(self) -> tuple[int, int]:
        longest = max(8, self.tokens)
        return max(4, longest // 4), longest

    @property
    def pass_tokens(self) -> list[int]:
        longest = self.sequence_tokens[-1]
        most = max(4, min(self.samples, _LARGEST_PASS // longest))
        counts = {round(2 * (most / 2) ** (i / (_NUM_SIZES - 1))) for i in range(_NUM_SIZES)}
        # Small passes take longer for each token.
        return [max(4, longest // 4), longest, *(longest * count for count in sorted(counts))]

    @property
    def rows(self) -> list[int]:
        return sorted({1, max(2, self.samples // 16), max(4, self.samples // 4), max(8, self.samples)})
