"""CopyVersions: counts updates, to tell which copies of parameter sets are outdated. Free of torch."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from realhf.layout import Layout
from realhf.runtime.compile.actions import Action, Reallocate

Copy = tuple[str, Layout]
"""A parameter set and the layout in which it is held."""
_NEVER = -1
"""Version of a copy that has never been made."""


class CopyVersions:
    """The version of each copy of a parameter set; all ranks count alike, and so agree.

    `homes` are complete at the start. A home in `sharded` is outdated after each update, which changes only
    the optimizer's copy, of which every replica has a part.
    """

    def __init__(self, homes: Collection[Copy], names: Iterable[str], *, sharded: Collection[Copy]) -> None:
        self._updates = dict.fromkeys(names, 0)
        self._versions = dict.fromkeys(homes, 0)
        self._sharded = frozenset(sharded)

    def count_update(self, home: Copy) -> None:
        """Count a train step of a parameter set."""
        self._updates[home[0]] += 1
        if home not in self._sharded:
            self._versions[home] += 1

    def begin(self, action: Reallocate) -> bool:
        """Mark the target of a reallocation as up to date; return False if it was already.

        The update of a moving average always returns True.
        """
        target = (action.target_set, action.target)
        if action.follow_rate is not None:
            self._updates[action.target_set] += 1
            self._versions[target] += 1
            return True
        version = self._newest(action)
        if self._versions.get(target, _NEVER) >= version:
            return False
        self._versions[target] = version
        return True

    def _newest(self, action: Reallocate) -> int:
        """Return the version that the action's source has."""
        if action.sharded:
            return self._updates[action.source_set]
        return self._versions[action.source_set, action.source]

    def to_json(self) -> dict[str, Any]:
        """Return the versions for a checkpoint."""
        copies = [[name, str(layout), version] for (name, layout), version in self._versions.items()]
        return {"updates": self._updates.copy(), "copies": copies}

    def outdate_sharded(self) -> None:
        """Mark the homes in `sharded` as outdated, after optimizers were read from a checkpoint."""
        for name, _ in self._sharded:
            self._updates[name] += 1

    def restore(
        self, saved: Mapping[str, Any], actions: Iterable[Action], start: Callable[[Reallocate], object]
    ) -> None:
        """Continue with the versions of a checkpoint, when only the homes have its parameters.

        Call `start` with the `actions` whose targets were up to date in the checkpoint, to fill them again.
        """
        saved_versions = {(name, Layout.parse(layout)): version for name, layout, version in saved["copies"]}
        self._updates = dict(saved["updates"])
        self._versions = {
            home: _NEVER if home in self._sharded else saved_versions[home] for home in self._versions
        }
        for action in actions:
            if isinstance(action, Reallocate) and action.follow_rate is None:
                exists = action.sharded or (action.source_set, action.source) in self._versions
                if exists and saved_versions.get((action.target_set, action.target)) == self._newest(action):
                    start(action)
