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
    """The samples that a step program may still use, by the numbers of their prompts; equal on all ranks.

    The end of a step takes time for the samples that nothing holds, and none for those that wait in pools.
    """

    def __init__(self, parts: Collection[str]) -> None:
        self._usable_until: dict[int, int] = {}
        """Prompt -> the last step that may use its samples, unless they are held."""
        self._num_holders: dict[int, int] = {}
        """Prompt -> how many pools, and unfinished batches, hold its samples; those that nothing holds are
        left out."""
        self._not_held: dict[int, None] = {}
        """The prompts that nothing holds, as a set in a fixed order."""
        self._updates_before: dict[int, int] = {}
        """Prompt -> how many updates the generating role had had when the prompt's generation began."""
        self._done: dict[str, set[int]] = {part: set() for part in parts}
        """The prompts on which each part has run to its end."""

    def begin(self, prompts: Collection[int], *, until: int) -> None:
        """Add samples that may be used up to a step."""
        self._usable_until |= dict.fromkeys(prompts, until)
        self._not_held |= dict.fromkeys(prompts)

    def hold(self, prompts: Collection[int]) -> None:
        """Let samples be used until they are released as often as they are held."""
        for prompt in prompts:
            self._num_holders[prompt] = self._num_holders.get(prompt, 0) + 1
            self._not_held.pop(prompt, None)

    def release(self, prompts: Collection[int]) -> None:
        """Take back a `hold`."""
        for prompt in prompts:
            self._num_holders[prompt] -= 1
            if not self._num_holders[prompt]:
                del self._num_holders[prompt]
                self._not_held[prompt] = None

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

    def outlive(self, prompts: Collection[int], *, step: int) -> bool:
        """Return whether all of these samples may be used after a step, even if nothing holds them."""
        return all(self._usable_until.get(prompt, step) > step for prompt in prompts)

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

    def forget(self, *, step: int) -> list[int]:
        """Remove the samples that no later step may use, and return their prompts."""
        gone = [prompt for prompt in self._not_held if self._usable_until[prompt] <= step]
        for prompt in gone:
            del self._not_held[prompt]
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
        self._not_held = dict.fromkeys(self._usable_until)
        self._num_holders = {}
        self._updates_before = {prompt: updates for prompt, updates in saved["updates_before"]}
        self._done = {part: set(saved["done"].get(part, ())) for part in self._done}


def named(prompts: Sequence[int]) -> str:
    """Return prompts in words, such as "prompts 0 to 31"."""
    count = len(prompts)
    if count > 2 and prompts[-1] - prompts[0] == count - 1 and list(prompts) == sorted(set(prompts)):
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
        self._present: set[int] = set()
        """The same prompts as `prompts`, to be looked up."""
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
        self.hold(added)
        self._owner.count_operation(f"pool {self._name} adds {named(added)}")

    def hold(self, prompts: Collection[int]) -> None:
        """Put in the prompts that are not there. Only this class, and a resumed step runner, call this."""
        new = [prompt for prompt in prompts if prompt not in self._present]
        self.prompts += new
        self._present.update(new)
        self._owner.ledger.hold(new)

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
            self._remove(chosen)
        return Samples(tuple(sorted(chosen))) if chosen else None

    def drop(self, *, max_age: int | None = None, max_size: int | None = None) -> int:
        """Remove samples, and return how many prompts that were.

        With `max_age` these are samples whose generation began more than so many updates ago. With `max_size`
        the pool then has at most so many prompts: those that came first are removed.
        """
        where = f"run.pool({self._name!r}).drop"
        if max_age is None and max_size is None:
            raise UserError(f"{where}(): give max_age, in updates, or max_size, in prompts")
        if max_size is not None and max_size < 1:
            raise UserError(f"{where}(max_size={max_size}): the number must be at least 1")
        old: list[int] = []
        if max_age is not None:
            now = self._owner.generator_updates
            ledger = self._owner.ledger
            old = [prompt for prompt in self.prompts if ledger.age(prompt, updates=now) > max_age]
            self._remove(old)
        if max_size is not None:
            first = self.prompts[: max(0, len(self.prompts) - max_size)]
            self._remove(first)
            old += first
        self._owner.count_operation(f"pool {self._name} drops {named(sorted(old))}")
        return len(old)

    def _remove(self, prompts: Sequence[int]) -> None:
        """Remove prompts from the pool. Later operations of the step may still use their samples."""
        if not prompts:
            return
        self._present.difference_update(prompts)
        if self.prompts[: len(prompts)] == list(prompts):
            del self.prompts[: len(prompts)]
        else:
            self.prompts = [prompt for prompt in self.prompts if prompt in self._present]
        self._owner.ledger.release(prompts)
        self._owner.ledger.prolong(prompts, until=self._owner.number)
