"""RolloutFile: rollouts.jsonl, which never grows beyond its bound. Imports no torch."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.user_input.files import read_lines

ROLLOUTS = "rollouts.jsonl"
_HEAD = re.compile(rb'\{"step": (\d+), "followed": (true|false), ')
"""Beginning of every line."""
_EASED = 0.75
"""Share of the bound to which a full file is reduced."""
_FIELDS = (
    "sample", "prompt_number", "dataset_row", "score", "rewards", "extra", "length", "finished", "versions",
    "advantage", "stop", "turns", "environment_seconds", "failure", "prompt", "completion", "messages",
    "columns", "token_ids", "response_mask", "logprobs", "advantages", "token_versions")

_Kind = tuple[int, bool]
"""The step of a line, and whether its row is followed."""


def merged(fragments: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the ranks' descriptions of a step's samples (see RolloutCollector) into one rollout per sample.

    They are in the order of their sample ids. Fields that no rank has described are left out.
    """
    prompts: dict[int, dict[str, Any]] = {}
    rollouts: dict[int, dict[str, Any]] = {}
    for fragment in fragments:
        into = rollouts if "sample" in fragment else prompts
        into.setdefault(fragment.get("sample", fragment["prompt_number"]), {}).update(fragment)
    generated = [rollouts[sample] for sample in sorted(rollouts) if "length" in rollouts[sample]]
    whole = [prompts.get(rollout["prompt_number"], {}) | rollout for rollout in generated]
    return [
        {"followed": bool(rollout.get("followed"))} | {key: rollout[key] for key in _FIELDS if key in rollout}
        for rollout in whole
    ]


class RolloutFile:
    """A file with one line of JSON per rollout, in the order of steps, which has at most `max_bytes`.

    If a step does not fit, every second step is dropped from the file: first the lines of rows that are not
    followed, and if that is not enough, those of followed rows. So older steps are dropped more often. If a
    step does not fit into an empty file, some of its prompts are dropped.
    """

    def __init__(
        self, path: Path, *, max_bytes: int, last_step: int = 0, earlier: Path | None = None
    ) -> None:
        """Continue a file after `last_step`: drop the lines of later steps, and an incomplete last line.

        `earlier` is the file of the run that this one continues, if that is in another directory.
        """
        self._path = path
        self._max_bytes = max_bytes
        self._sizes = Counter[_Kind]()
        if earlier is not None and earlier.is_file() and not path.exists():
            shutil.copyfile(earlier, path)
        if path.exists():
            for kind, line in _lines(path):
                if kind[0] <= last_step:
                    self._sizes[kind] += len(line)
            self._rewrite()
        self._file = path.open("ab")

    def add(self, step: int, rollouts: Sequence[Mapping[str, Any]]) -> None:
        """Write the rollouts of a step. Raises OSError if that is impossible."""
        groups: dict[Any, list[tuple[_Kind, bytes]]] = {}
        for rollout in rollouts:
            kind = step, bool(rollout["followed"])
            line = _encoded({"step": step, **rollout})
            groups.setdefault(rollout["prompt_number"], []).append((kind, line))
        size = sum(len(line) for group in groups.values() for _, line in group)
        if self._num_bytes + size > self._max_bytes:
            self._thin(max(0, int(_EASED * self._max_bytes) - size))
        for group in groups.values():
            data = b"".join(line for _, line in group)
            if self._num_bytes + len(data) <= self._max_bytes:
                self._file.write(data)
                self._sizes.update({kind: 0 for kind, _ in group})
                for kind, line in group:
                    self._sizes[kind] += len(line)
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    @property
    def _num_bytes(self) -> int:
        return self._sizes.total()

    def _thin(self, max_bytes: int) -> None:
        """Drop every second step until at most `max_bytes` are left; the first step stays longest."""
        while self._num_bytes > max_bytes:
            for is_followed in (False, True):
                kinds = sorted(kind for kind in self._sizes if kind[1] == is_followed)
                for kind in kinds[1::2] if len(kinds) > 1 else kinds:
                    del self._sizes[kind]
                if self._num_bytes <= max_bytes:
                    break
        self._file.close()
        self._rewrite()
        self._file = self._path.open("ab")

    def _rewrite(self) -> None:
        """Replace the file by one with only those lines that are counted in `_sizes`."""
        part = self._path.with_name(f"{self._path.name}.part")
        with part.open("wb") as file:
            file.writelines(line for kind, line in _lines(self._path) if kind in self._sizes)
        part.replace(self._path)


def _encoded(rollout: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(rollout, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # A text with half of a surrogate pair.
        return (json.dumps(rollout) + "\n").encode()


def _lines(path: Path) -> Iterator[tuple[_Kind, bytes]]:
    """Yield the complete lines of a file, each with its step and whether its row is followed."""
    for line in read_lines(path):
        head = _HEAD.match(line)
        if head is not None and line.endswith(b"\n"):
            yield (int(head[1]), head[2] == b"true"), line
