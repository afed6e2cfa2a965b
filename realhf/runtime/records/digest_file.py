"""digests.jsonl: hashes of what calls have computed, by step, call and sample, to compare runs. No torch.

A line has the samples of one call in one step, as far as one rank has them:

    {"step": 1, "call": "actor_generate", "columns": {"sequence_ids": {"kind": "tokens", "total": 123, ...}}}

A column is of one of three kinds. `exact` and `tokens` have a hash of 32 bits for each sample, and `tokens`
the numbers themselves, too, while there is room. `numbers` have the mean of each sample, because sums differ
in their last bits between plans. `total` is the sum of hashes of 64 bits over all samples: it does not depend
on the plan, and it stays when the file is full and lines have nothing else.
"""

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from realhf.user_input.files import read_json_lines

DIGESTS = "digests.jsonl"
DATASET = "dataset"
"""Stands in the place of a call for the rows of the dataset."""
_TOTAL = 1 << 64
_MAX_ARRAY_BYTES = 256 << 20
_FAST = 1  # Level of compression: hashes and tokens hardly become smaller with more.
ColumnKind = Literal["exact", "tokens", "numbers"]


class Column(TypedDict):
    """A column of a call's samples; arrays are compressed, in base64."""

    kind: ColumnKind
    total: int
    hashes: NotRequired[str]
    """uint32 of each sample."""
    means: NotRequired[str]
    """float32 of each sample."""
    lengths: NotRequired[str]
    """int32 of each sample: the number of its tokens."""
    values: NotRequired[str]
    """int32 of each token of all samples."""


class DigestPiece(TypedDict):
    """The samples of a call on one rank; without `ids`, only the totals of its columns are known."""

    call: str
    ids: NotRequired[str]
    """int64 of each sample."""
    columns: dict[str, Column]


def encoded(array: NDArray[Any], kind: type[np.generic]) -> str:
    """Return an array as text."""
    return base64.b64encode(zlib.compress(array.astype(kind).tobytes(), _FAST)).decode()


def decoded(text: str, kind: type[np.generic]) -> NDArray[Any]:
    """Return the array of `encoded`. Raises ValueError if it is none, or larger than any that is written."""
    try:
        decompressor = zlib.decompressobj()
        data = decompressor.decompress(base64.b64decode(text, validate=True), _MAX_ARRAY_BYTES)
    except zlib.error as error:
        raise ValueError(f"an array cannot be read: {error}") from error
    if not decompressor.eof:
        raise ValueError(f"an array is not whole, or has more than {_MAX_ARRAY_BYTES} bytes")
    return np.frombuffer(data, dtype=kind)


def without_samples(pieces: Sequence[DigestPiece]) -> list[DigestPiece]:
    """Return one piece for each call, with nothing but the totals of its columns over all ranks."""
    merged: dict[str, dict[str, Column]] = {}
    for piece in pieces:
        columns = merged.setdefault(piece["call"], {})
        for key, column in piece["columns"].items():
            total = columns.get(key, column | {"total": 0})["total"] + column["total"]
            columns[key] = {"kind": column["kind"], "total": total % _TOTAL}
    return [{"call": call, "columns": columns} for call, columns in merged.items()]


class DigestFile:
    """The writer of digests.jsonl, on rank 0. When the file is full, lines have totals only."""

    def __init__(self, path: Path, *, max_bytes: int, last_step: int = 0) -> None:
        """Continue a file after `last_step`; the lines of later steps are dropped."""
        kept = []
        if path.exists():
            kept = [line for _, line in read_json_lines(path) if line["step"] <= last_step]
        part = path.with_name(f"{path.name}.part")
        part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        part.replace(path)
        self._max_bytes = max_bytes
        self._file = path.open("a")

    def add(self, step: int, pieces: Sequence[DigestPiece]) -> None:
        """Write the pieces of a step, of all ranks. Raises OSError if that is impossible."""
        incomplete = {piece["call"] for piece in pieces if "ids" not in piece}
        whole = [piece for piece in pieces if piece["call"] not in incomplete]
        short = without_samples([piece for piece in pieces if piece["call"] in incomplete])
        text = _lines(step, [*whole, *short])
        if self._file.tell() + len(text) > self._max_bytes:
            text = _lines(step, without_samples(pieces))
        self._file.write(text)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _lines(step: int, pieces: Iterable[DigestPiece]) -> str:
    return "".join(json.dumps({"step": step, **piece}) + "\n" for piece in pieces)


@dataclass(frozen=True)
class CallDigest:
    """The results of a call in a step: totals by column, and if they are known, its samples."""

    totals: Mapping[str, int]
    kinds: Mapping[str, ColumnKind]
    ids: tuple[int, ...] | None = None
    """The samples in rising order; None if the file was full."""
    values: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Column -> hash or mean of each sample."""
    tokens: Mapping[str, Sequence[NDArray[Any]]] = field(default_factory=dict)
    """Column -> the tokens of each sample, as far as they are known."""


def read_digests(path: Path) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Return the lines of a file by step and call; `digest_of` decodes those of one call."""
    found: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for _, line in read_json_lines(path):
        found.setdefault(line["step"], {}).setdefault(line["call"], []).append(line)
    return found


def digest_of(pieces: Sequence[Mapping[str, Any]]) -> CallDigest:
    """Return the pieces of one call in one step as a whole."""
    totals: dict[str, int] = {}
    kinds: dict[str, ColumnKind] = {}
    for piece in pieces:
        for key, column in piece["columns"].items():
            totals[key] = (totals.get(key, 0) + column["total"]) % _TOTAL
            kinds[key] = column["kind"]
    if not all("ids" in piece for piece in pieces):
        return CallDigest(totals, kinds)
    ids = np.concatenate([decoded(piece["ids"], np.int64) for piece in pieces])
    order = np.argsort(ids, kind="stable")
    values: dict[str, NDArray[Any]] = {}
    tokens: dict[str, Sequence[NDArray[Any]]] = {}
    for key, kind in kinds.items():
        columns = [piece["columns"][key] for piece in pieces if key in piece["columns"]]
        name, number = ("means", np.float32) if kind == "numbers" else ("hashes", np.uint32)
        parts = [decoded(column[name], number) for column in columns]
        if sum(map(len, parts)) != len(ids):  # A rank has other columns; nothing can be compared.
            continue
        values[key] = np.concatenate(parts)[order]
        if kind == "tokens" and all("values" in column for column in columns):
            split = [sequence for column in columns for sequence in _split(column)]
            tokens[key] = [split[i] for i in order]
    return CallDigest(totals, kinds, tuple(ids[order].tolist()), values, tokens)


def _split(column: Mapping[str, Any]) -> list[NDArray[Any]]:
    lengths = decoded(column["lengths"], np.int32)
    return np.split(decoded(column["values"], np.int32), np.cumsum(lengths)[:-1]) if len(lengths) else []
