"""SampleLedger: which samples of a run exist, what has run on them, and how long they are kept."""

from collections.abc import Collection, Mapping, Sequence

from realhf.errors import UserError
from realhf.steps.part_executor import Json


class SampleLedger:
    """The samples that a step program may still use, by the numbers of their prompts; equal on all ranks."""

    def __init__(self, parts: Collection[str]) -> None:
        self._kept_until: dict[int, int] = {}
        """Prompt -> the last step that may use its samples, unless a pool has them."""
        self._updates_before: dict[int, int] = {}
        """Prompt -> how many updates the generating role had had when the prompt's generation began."""
        self._done: dict[str, set[int]] = {part: set() for part in parts}
        """The prompts on which each part has run to its end."""

    def begin(self, prompts: Collection[int], *, until: int) -> None:
        """Add samples, and keep them up to a step."""
        self._kept_until |= dict.fromkeys(prompts, until)

    def keep(self, prompts: Collection[int], *, until: int) -> None:
        """Keep samples at least up to a step."""
        for prompt in prompts:
            self._kept_until[prompt] = max(self._kept_until.get(prompt, 0), until)

    def require(self, prompts: Sequence[int], *, step: int) -> None:
        """Raise UserError unless all of these samples exist."""
        if gone := [prompt for prompt in prompts if prompt not in self._kept_until]:
            raise UserError(
                f"step() uses prompt {gone[0]} in step {step}, "
                "which was not handed out, or its samples were forgotten")

    def has_all(self, prompts: Collection[int]) -> bool:
        """Return whether all of these samples exist."""
        return self._kept_until.keys() >= set(prompts)

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
        gone = [p for p, last in self._kept_until.items() if last <= step and p not in in_use]
        for prompt in gone:
            del self._kept_until[prompt]
            self._updates_before.pop(prompt, None)
            for done in self._done.values():
                done.discard(prompt)
        return gone

    def to_json(self) -> dict[str, Json]:
        """Return the ledger for a checkpoint."""
        return {
            "kept_until": list(self._kept_until.items()),
            "updates_before": list(self._updates_before.items()),
            "done": {part: sorted(done) for part, done in self._done.items()},
        }

    def restore(self, saved: Mapping[str, Json]) -> None:
        """Continue with the ledger of a checkpoint."""
        self._kept_until = {prompt: last for prompt, last in saved["kept_until"]}
        self._updates_before = {prompt: updates for prompt, updates in saved["updates_before"]}
        self._done = {part: set(saved["done"].get(part, ())) for part in self._done}
