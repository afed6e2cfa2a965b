"""Doubts about rewards: their functions, weights and shapings."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from realhf.calls import HostFunction, longest_response
from realhf.data.light_tokenizer import special_tokens
from realhf.data.rows import extra_columns
from realhf.data.tokenized import TokenizedRows
from realhf.graph import DataflowGraph
from realhf.runtime.compile.program import Program


@runtime_checkable
class ScoredByRewards(Protocol):
    """A host function that calls reward functions."""

    def unseen(self, special_tokens: Sequence[str]) -> Iterator[str]: ...

    def doubts(self, prompt: str) -> Iterator[str]: ...

    def unescaped(self) -> Iterator[str]: ...

    def unstable(self) -> Iterator[str]: ...

    def misspelt(self, columns: Sequence[str]) -> Iterator[str]: ...


@runtime_checkable
class _ShapingByLength(Protocol):
    """A shaping that knows whether answers of at most `longest` tokens are too short for it."""

    def doubt(self, longest: int) -> str | None: ...


def unweighted(program: Program) -> Iterator[str]:
    """Yield a warning if all reward functions have the weight 0."""
    for call in program.graph.of_kind("host"):
        rewards = getattr(call.work_as(HostFunction).function, "rewards", ())
        if rewards and all(reward.weight == 0 for reward in rewards):
            yield f"call {call.name}: every reward has the weight 0, so every answer has the score 0"


def idle_shaping(program: Program) -> Iterator[str]:
    """Yield warnings about shapings of rewards that concern longer answers than there can be."""
    experiment = program.experiment
    longest = longest_response(program.graph)
    for shaping in (getattr(experiment, "score_shaping", None), *getattr(experiment, "token_rewards", ())):
        if isinstance(shaping, _ShapingByLength) and (doubt := shaping.doubt(longest)) is not None:
            yield f"{doubt}, and sampling.max_new_tokens is {longest}"


def faulty_rewards(program: Program) -> Iterator[str]:
    """Yield warnings about reward functions that ask for columns in vain, or whose values do not repeat."""
    for function in (work.function for work in program.graph.works(HostFunction)):
        if isinstance(function, ScoredByRewards):
            yield from function.unstable()
            yield from function.unescaped()
            yield from function.misspelt(extra_columns(program.experiment.dataset))


def doubted_rewards(
    program: Program, graph: DataflowGraph, name: str, rows: TokenizedRows
) -> Iterator[str]:
    """Yield warnings about rewards that look for what completions cannot have."""
    for function in (work.function for work in graph.works(HostFunction)):
        if isinstance(function, ScoredByRewards):
            yield from function.unseen(special_tokens(rows.tokenizer))
            prompt = rows.tokenizer.decode(rows.rows[0]["prompt_ids"])
            yield from (f"{name}: {sentence}" for sentence in function.doubts(prompt))
