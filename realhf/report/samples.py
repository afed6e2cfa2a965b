"""The rollouts that a page shows: whole groups, evenly over the steps of the run."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from realhf.data.light_tokenizer import LightTokenizer
from realhf.errors import UserError
from realhf.report.run_data import RunFiles
from realhf.runtime.records.rollout_file import ROLLOUTS
from realhf.user_input.files import read_lines

_MOST_BYTES = 9_000_000
"""Bytes of rollouts in a page."""
_HEAD = re.compile(rb'\{"step": (\d+), .*?"prompt_number": (\d+)')
_LONGEST = 6_000
"""Characters of a text; what is longer loses its middle."""
_MOST_TOKENS = 4_000
"""Longer rollouts are shown as texts, without their tokens."""
_TOKEN_KEYS = ("token_ids", "response_mask", "logprobs", "advantages", "token_versions")
_DIGITS = 4


def rollouts_to_show(run: RunFiles) -> tuple[list[dict[str, Any]], str]:
    """Return rollouts for the page, and a sentence about those that were left out."""
    path = run.path / ROLLOUTS
    if not path.is_file():
        return [], f"The run has no {ROLLOUTS}: its experiment logs no samples, or generates none."
    sizes: dict[tuple[int, int], int] = {}
    total = 0
    for step, prompt, line in _lines(path):
        sizes[step, prompt] = sizes.get((step, prompt), 0) + len(line)
        total += 1
    chosen = _chosen(sizes, _MOST_BYTES)
    pieces = Pieces(run)
    rollouts = [_shown(json.loads(line), pieces) for step, prompt, line in _lines(path)
                if (step, prompt) in chosen]
    command = f"`realhf rollouts {run.path}` reads all that were logged"
    if len(rollouts) < total:
        note = (f"{len(rollouts):,} of {total:,} logged rollouts are in this page, whole groups evenly over "
                f"the steps; {command}.")
    else:
        note = f"All {total:,} logged rollouts are in this page; {command}."
    if rollouts and not any("token_ids" in rollout for rollout in rollouts):
        note += " Their tokens were not logged: with `rollouts.tokens` they are, and can be coloured."
    return rollouts, note


def _lines(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield the step, the prompt and the text of each whole line."""
    try:
        for line in read_lines(path):
            head = _HEAD.match(line)
            if head is not None and line.endswith(b"\n"):
                yield int(head[1]), int(head[2]), line
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _chosen(sizes: Mapping[tuple[int, int], int], most: int) -> set[tuple[int, int]]:
    """Return groups of at most `most` bytes: the first of each step, then the second of each, and so on; if
    not even the first ones fit, those of steps at equal distances."""
    by_step: dict[int, list[tuple[int, int]]] = {}
    for key in sizes:
        by_step.setdefault(key[0], []).append(key)
    chosen: set[tuple[int, int]] = set()
    left = most
    for place in range(max(map(len, by_step.values()), default=0)):
        keys = [groups[place] for groups in by_step.values() if len(groups) > place]
        need = sum(sizes[key] for key in keys)
        if need > left:
            count = max(1 if not chosen else 0, int(len(keys) * left / need))
            keys = [keys[i * len(keys) // count] for i in range(count)]
        for key in keys:
            if sizes[key] <= left or not chosen:
                chosen.add(key)
                left -= sizes[key]
        if need > left and place:
            break
    return chosen


def _shown(rollout: dict[str, Any], pieces: "Pieces") -> dict[str, Any]:
    """Return a rollout as the page needs it."""
    shown: dict[str, Any] = {key: rollout[key] for key in (
        "step", "sample", "dataset_row", "score", "length", "versions", "advantage", "failure")
        if key in rollout}
    shown["rewards"] = rollout.get("rewards") or {}
    shown["columns"] = {name: _short(value) for name, value in (rollout.get("columns") or {}).items()}
    if rollout.get("stop"):
        shown["ending"] = rollout["stop"]
    elif "finished" in rollout:
        shown["ending"] = "end of text" if rollout["finished"] else "cut off"
    ids = rollout.get("token_ids")
    if ids and len(ids) <= _MOST_TOKENS and rollout.get("response_mask"):
        shown |= {key: _rounded(rollout[key]) for key in _TOKEN_KEYS if rollout.get(key) is not None}
        if (texts := pieces.of(ids)) is not None:
            shown["pieces"] = texts
    if "pieces" not in shown:
        shown["prompt"] = _short(rollout.get("prompt"))
        shown["completion"] = _short(rollout.get("completion"))
        if rollout.get("messages"):
            shown["messages"] = [{key: _short(value) for key, value in message.items()}
                                 for message in rollout["messages"]]
    return shown


def _rounded(values: Sequence[Any]) -> list[Any]:
    return [float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value for value in values]


def _short(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _LONGEST:
        half = _LONGEST // 2
        return f"{value[:half]} [... {len(value) - 2 * half:,} characters left out ...] {value[-half:]}"
    if isinstance(value, list):
        return [_short(one) for one in value]
    if isinstance(value, dict):
        return {key: _short(one) for key, one in value.items()}
    return value


class Pieces:
    """The texts of single tokens, by the tokenizer of a run if it is still there."""

    def __init__(self, run: RunFiles) -> None:
        self._tokenizer: LightTokenizer | None = None
        self._known: dict[int, str] = {}
        exports = sorted(
            (run.path / "hf").glob("step_*"), key=lambda path: path.stat().st_mtime, reverse=True)
        for directory in (run.about.get("tokenizer"), *map(str, exports)):
            if directory and (Path(directory) / "tokenizer.json").is_file():
                try:
                    self._tokenizer = LightTokenizer(directory)
                except (UserError, ValueError, OSError):
                    continue
                return

    def of(self, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        for token in set(ids) - self._known.keys():
            self._known[token] = self._tokenizer.decode([token])
        return [self._known[token] for token in ids]
