"""Pool: samples that wait for use across the steps of a step program."""

import random
from collections.abc import Sequence
from typing import Literal, Protocol

from realhf.errors import UserError
from realhf.steps.part_executor import Samples
from realhf.steps.sample_ledger import SampleLedger


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

    def kept_by(self, call: str, prompts: Sequence[int], pool: str) -> list[int]:
        """Return those prompts whose samples were all kept by a filtering host call."""

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
        """Add samples; with `where`, only those of prompts whose samples were all kept by this filter.

        `where` names a call with `HostFunction(..., filters=True)`; all ranks wait for its answer.
        """
        added = list(samples.prompts if samples else ())
        self._owner.ledger.require(added, step=self._owner.number)
        if where is not None and added:
            added = self._owner.kept_by(where, added, self._name)
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
        self._owner.ledger.keep(prompts, until=self._owner.number)
