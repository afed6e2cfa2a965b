"""The samples of a step program: the ledger of all that exist, and pools in which they wait between steps.

A pool, and a StepRunner, reach the rank on which they run through a PartExecutor.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from realhf.errors import UserError

Json = Any


@dataclass(frozen=True)
class Samples:
    """All samples of some prompts. A prompt's number is its place in the run (see data/order.py)."""

    prompts: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(set(self.prompts)) < len(self.prompts):
            twice = next(prompt for prompt in self.prompts if self.prompts.count(prompt) > 1)
            raise UserError(f"Samples({self.prompts}) has prompt {twice} twice")

    def __len__(self) -> int:
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

    def passed(self, call: str, operation: int) -> list[int]:
        """Return the prompts whose samples all passed a filtering call in this operation."""

    def decision(self, call: str, operation: int) -> Json:
        """Return the decision of a call in this operation."""

    def forget(self, prompts: Sequence[int]) -> None:
        """Free the memory of these samples."""

    def note(self, number: int, text: str, digest: str) -> None:
        """Tell the watcher what operation follows, and the digest of all operations so far."""

    def log(self, metric: str, value: float) -> None:
        """Add a metric to the step's record."""


class SampleLedger:
    """The samples that a step program may still use, by the numbers of their prompts; equal on all ranks."""

    def __init__(self, parts: Collection[str]) -> None:
        self._usable_until: dict[int, int] = {}
        """Prompt -> the last step that may use its samples, unless a pool has them."""
        self._updates_before: dict[int, int] = {}
        """Prompt -> how many updates the generating role had had when the prompt's generation began."""
        self._done: dict[str, set[int]] = {part: set() for part in parts}
        """The prompts on which each part has run to its end."""

    def begin(self, prompts: Collection[int], *, until: int) -> None:
        """Add samples that may be used up to a step."""
        self._usable_until |= dict.fromkeys(prompts, until)

    def prolong(self, prompts: Collection[int], *, until: int) -> None:
        """Let samples be used at least up to a step."""
        for prompt in prompts:
            self._usable_until[prompt] = max(self._usable_until.get(prompt, 0), until)

    def require(self, prompts: Sequence[int], *, step: int) -> None:
        """Raise UserError unless all of these samples exist."""
        if gone := [prompt for prompt in prompts if prompt not in self._usable_until]:
            raise UserError(
                f"step() uses prompt {gone[0]} in step {step}, "
                "which was not handed out, or its samples were forgotten")

    def has_all(self, prompts: Collection[int]) -> bool:
        return self._usable_until.keys() >= set(prompts)

    def start(self, prompts: Collection[int], *, updates: int) -> None:
        """Note that the generation of these prompts begins, after so many updates of the generating role."""
        self._updates_before |= dict.fromkeys(prompts, updates)

    def age(self, prompt: int, *, updates: int) -> int:
        """Return how many updates ago the generation of a prompt began; 0 for samples of the dataset."""
        return updates - self._updates_before.get(prompt, updates)

    def complete(self, part: str, prompts: Collection[int]) -> None:
        """Note that a part has run to its end."""
        self._done[part].update(prompts)

    def repeat(self, part: str, prompts: Collection[int]) -> None:
        """Note that a part has to run on these prompts (again) before it has completed them."""
        self._done[part].difference_update(prompts)

    def lacking(self, part: str, prompts: Collection[int]) -> set[int]:
        """Return the prompts on which a part has not run to its end."""
        return set(prompts) - self._done[part]

    def forget(self, *, step: int, in_use: Collection[int]) -> list[int]:
        """Remove the samples that no later step may use, and return their prompts."""
        gone = [p for p, last in self._usable_until.items() if last <= step and p not in in_use]
        for prompt in gone:
            del self._usable_until[prompt]
            self._updates_before.pop(prompt, None)
            for done in self._done.values():
                done.discard(prompt)
        return gone

    def to_json(self) -> dict[str, Json]:
        return {
            "kept_until": list(self._usable_until.items()),
            "updates_before": list(self._updates_before.items()),
            "done": {part: sorted(done) for part, done in self._done.items()},
        }

    def restore(self, saved: Mapping[str, Json]) -> None:
        self._usable_until = {prompt: last for prompt, last in saved["kept_until"]}
        self._updates_before = {prompt: updates for prompt, updates in saved["updates_before"]}
        self._done = {part: set(saved["done"].get(part, ())) for part in self._done}


def named(prompts: Sequence[int]) -> str:
    """Return prompts in words, such as "prompts 0 to 31"."""
    if len(prompts) > 2 and list(prompts) == list(range(prompts[0], prompts[-1] + 1)):
        return f"prompts {prompts[0]} to {prompts[-1]}"
    return f"{'prompt' if len(prompts) == 1 else 'prompts'} {', '.join(map(str, prompts)) or '(none)'}"


class PoolOwner(Protocol):
    """The step runner, as its pools see it."""

    number: int

    @property
    def ledger(self) -> SampleLedger:
        """The samples that exist."""

    @property
    def operation_seed(self) -> str:
        """A seed for random choices: the experiment's seed and the operation's number, as on all ranks."""

    @property
    def generator_updates(self) -> int:
        """Updates so far of the role that generates."""

    def passed_by(self, call: str, prompts: Sequence[int], pool: str) -> list[int]:
        """Return those prompts whose samples all passed a filtering host call."""

    def count_operation(self, text: str) -> None:
        """Count an operation. All ranks execute the same ones."""

    def log(self, metric: str, value: float) -> None:
        """Add a metric to the record of the step."""


class Pool:
    """Samples that wait for use, across steps, in the order in which they came; `len` counts prompts."""

    def __init__(self, owner: PoolOwner, name: str, *, keeps: bool) -> None:
        self.keeps = keeps
        self.prompts: list[int] = []
        self._owner = owner
        self._name = name

    def __len__(self) -> int:
        return len(self.prompts)

    def add(self, samples: Samples | None, *, where: str | None = None) -> None:
        """Add samples; with `where`, only those of prompts whose samples all passed this filter.

        `where` names a call with `HostFunction(..., filters=True)`; all ranks wait for its result.
        """
        added = list(samples.prompts if samples else ())
        self._owner.ledger.require(added, step=self._owner.number)
        if where is not None and added:
            added = self._owner.passed_by(where, added, self._name)
        present = set(self.prompts)
        self.prompts += [prompt for prompt in added if prompt not in present]
        self._owner.count_operation(f"pool {self._name} adds {named(added)}")

    def take(self, n: int, *, order: Literal["oldest", "random"] = "oldest") -> Samples | None:
        """Return `n` prompts with their samples, or all if there are fewer; None if there are none.

        A batch that is short is counted in the metric `pool/<name>/missing`. Random choices depend on the
        experiment's seed and on the operation only.
        """
        where = f"run.pool({self._name!r}).take"
        if n < 1:
            raise UserError(f"{where}({n}): the number must be at least 1")
        if order not in ("oldest", "random"):
            raise UserError(f"{where}: order is {order!r}; legal are 'oldest' and 'random'")
        chosen = self.prompts[:n]
        if order == "random":
            rng = random.Random(f"{self._owner.operation_seed}/{self._name}")
            chosen = rng.sample(self.prompts, min(n, len(self.prompts)))
        self._owner.count_operation(f"pool {self._name} gives {named(chosen)}")
        self._owner.log(f"pool/{self._name}/missing", n - len(chosen))
        if not self.keeps:
            self._remove(set(chosen))
        return Samples(tuple(sorted(chosen))) if chosen else None

    def drop(self, *, max_age: int) -> int:
        """Remove samples whose generation began more than `max_age` updates ago; return how many prompts."""
        now = self._owner.generator_updates
        old = {prompt for prompt in self.prompts if self._owner.ledger.age(prompt, updates=now) > max_age}
        self._remove(old)
        self._owner.count_operation(f"pool {self._name} drops {named(sorted(old))}")
        return len(old)

    def _remove(self, prompts: set[int]) -> None:
        """Remove prompts from the pool. Later operations of the step may still use their samples."""
        self.prompts = [prompt for prompt in self.prompts if prompt not in prompts]
        self._owner.ledger.prolong(prompts, until=self._owner.number)
