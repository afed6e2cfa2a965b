"""HostContext: what host functions get besides their samples."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from realhf.data.loader import load_tokenizer


@dataclass
class HostContext:
    """The context of a host function: tokenizer, number of the step, updates so far, and its own state."""

    tokenizer_dir: str
    step: int = 0
    updates: dict[str, int] = field(default_factory=dict)
    """Train steps of each role so far."""
    state: dict[str, Any] = field(default_factory=dict)
    """JSON values that the present call keeps from step to step on this rank."""
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The `state` of every host call of this rank, by its name; checkpoints hold them."""
    run_state: Mapping[str, Any] = field(default_factory=dict)
    """`run.state` of the step program, equal on all ranks; host functions may only read it."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """The answers that an evaluation has just kept on this rank."""

    @contextmanager
    def of_call(self, name: str) -> Iterator["HostContext"]:
        """Let `state` be that of a call. No other call sees it, on whichever ranks a plan puts them."""
        self.state = self.states.setdefault(name, {})
        yield self
        self.states[name] = self.state

    @cached_property
    def tokenizer(self) -> Any:
        return load_tokenizer(self.tokenizer_dir)
