"""Steps of a generation: which rows decode, which prompts are prefilled, and the blocks that they have."""

from dataclasses import dataclass, field


@dataclass(eq=False)
class Prompt:
    """Tokens that are prefilled once, and the samples that continue them.

    The tokens of a parked row, to which an environment has added some, are a prompt, too: the first
    `num_cached` of them are in its blocks, of which it shares the first `num_shared` with other rows.
    """

    tokens: list[int]
    samples: list[int]
    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    waiting: list[int] = field(default_factory=list)  # Samples that have their first token, but no slot.
    num_started: int = 0
    num_shared: int = 0

    def __post_init__(self) -> None:
        # An empty prompt has no hidden state: its samples would continue the token of another prompt.
        assert self.tokens, "a prompt has at least one token"


@dataclass(frozen=True)
class Chunk:
    """Tokens [start, stop) of a prompt, which one pass prefills."""

    prompt: Prompt
    start: int
    stop: int

    @property
    def tokens(self) -> list[int]:
        return self.prompt.tokens[self.start : self.stop]

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.prompt.tokens)

    def cache_positions(self, block_size: int) -> list[int]:
        """Return the cache positions of the prompt's tokens up to `stop`."""
        blocks = self.prompt.blocks
        return [blocks[i // block_size] * block_size + i % block_size for i in range(self.stop)]


@dataclass(frozen=True)
class Step:
    """Copies of blocks, and then one pass in which all rows decode and chunks of prompts are prefilled.

    Chunks that continue a prompt come before those that begin one.
    """

    copies: list[tuple[int, int]]  # Block to copy from, block to copy to.
    rows: list[int]  # Samples that decode one token, in order of their slots.
    chunks: list[Chunk]

    @property
    def continued(self) -> list[Chunk]:
        """The chunks that continue a prompt."""
        return [chunk for chunk in self.chunks if chunk.start > 0]

    @property
    def fresh(self) -> list[Chunk]:
        """The chunks that begin their prompts."""
        return [chunk for chunk in self.chunks if chunk.start == 0]

    @property
    def last_tokens(self) -> list[int]:
        """For each of `samples`, the index in the pass of the token that it continues."""
        count = len(self.rows)
        indices = list(range(count))
        for chunk in self.chunks:
            count += chunk.stop - chunk.start
            if chunk.is_last:
                indices += [count - 1] * len(chunk.prompt.samples)
        return indices

    @property
    def samples(self) -> list[int]:
        """Samples that get a token: the rows, then the samples of prompts that are now complete."""
        return [*self.rows, *(s for chunk in self.chunks if chunk.is_last for s in chunk.prompt.samples)]


@dataclass(frozen=True)
class ParkedRow:
    """The blocks of a sample that has no slot, and how it shares them (see BlockTables.start).

    Its first `num_cached` tokens are cached: all but the last, unless an environment adds some.
    """

    sample: int
    blocks: list[int]
    num_cached: int
    num_shared: int
    ordinal: int
