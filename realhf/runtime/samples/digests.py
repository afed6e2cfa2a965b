"""DigestTaker: hashes, on each rank, what the calls of a step have computed (see records/digest_file.py)."""

import hashlib
import json
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from realhf.calls import GenerateOutputs
from realhf.data.batch import Batch, Packed
from realhf.data.order import prompt_of
from realhf.runtime.compile.program import Program
from realhf.runtime.records.digest_file import DATASET, Column, DigestPiece, encoded

_OF_TOKENS = 0.5
"""Share of a rank's bytes that tokens may take; hashes of samples get the rest."""


class DigestTaker:
    """Hashes the outputs of calls on this rank; what it returns has at most `max_bytes` in a run."""

    def __init__(self, program: Program, *, max_bytes: int) -> None:
        self._left = max_bytes
        self._tokens_left = int(_OF_TOKENS * max_bytes)
        self._group_size = program.experiment.group_size
        self._sequences = {
            call.name: {GenerateOutputs.of(call).sequences} for call in program.graph.of_kind("generate")}
        self._seen: tuple[int, set[int]] = (0, set())
        """The step, and the prompts whose rows have been hashed in it."""

    def of_call(self, call: str, batch: Batch) -> list[DigestPiece]:
        """Return what a call has computed on this rank; nothing if it has no samples here."""
        return [self._piece(call, batch, self._sequences.get(call, ()))] if batch.ids else []

    def of_rows(self, step: int, batch: Batch) -> list[DigestPiece]:
        """Return the rows of the dataset that this rank has read, each once in a step."""
        if self._seen[0] != step:
            self._seen = (step, set())
        new = []
        for index, sample in enumerate(batch.ids):
            prompt = prompt_of(sample, self._group_size)
            if prompt not in self._seen[1]:
                self._seen[1].add(prompt)
                new.append(index)
        if not new:
            return []
        rows = batch if len(new) == len(batch) else batch.select(new)
        return [self._piece(DATASET, rows, rows.fields)]

    def _piece(self, call: str, batch: Batch, sequences: Collection[str]) -> DigestPiece:
        columns = {key: self._column(batch.ids, column, keeps_tokens=key in sequences)
                   for key, column in batch.fields.items()}
        piece: DigestPiece = {"call": call, "ids": encoded(np.array(batch.ids), np.int64), "columns": columns}
        size = len(piece["ids"]) + sum(
            len(text) for column in columns.values() for text in column.values() if isinstance(text, str))
        self._left -= size
        if self._left < 0:
            del piece["ids"]
            for column in columns.values():
                for name in ("hashes", "means", "lengths", "values"):
                    column.pop(name, None)  # type: ignore[misc]
        return piece

    def _column(self, ids: Sequence[int], column: Any, *, keeps_tokens: bool) -> Column:
        if (means := _means(column)) is not None:
            return {"kind": "numbers", "total": 0, "means": encoded(means, np.float32)}
        texts = _bytes_of(column)
        hashes = np.array([_hash(sample, text) for sample, text in zip(ids, texts, strict=True)], np.uint64)
        made: Column = {
            "kind": "exact", "total": int(hashes.sum(dtype=np.uint64)),
            "hashes": encoded(hashes & np.uint64(0xFFFFFFFF), np.uint32)}
        if keeps_tokens and (tokens := _tokens_of(column)) is not None:
            made["kind"] = "tokens"
            if self._tokens_left > 0:
                made["lengths"] = encoded(np.array(tokens[0]), np.int32)
                made["values"] = encoded(tokens[1], np.int32)
                self._tokens_left -= len(made["lengths"]) + len(made["values"])
        return made


def _tokens_of(column: Any) -> tuple[Sequence[int], NDArray[Any]] | None:
    """Return the lengths and the values of tokens, or of one whole number for each sample; else None."""
    if isinstance(column, Packed):
        return column.lengths, _host(column.host_values)
    if isinstance(column, list) and all(type(value) is int for value in column):
        return [1] * len(column), np.array(column)
    return None


def _means(column: Any) -> NDArray[np.float64] | None:
    """Return the mean of each sample of a column of floats, or of dicts of floats; None if it is another one.

    NaN and None count as 0.
    """
    if isinstance(column, Packed):
        if not column.values.is_floating_point():
            return None
        values = np.nan_to_num(_host(column.values).astype(np.float64))
        if values.ndim > 1:
            values = values.reshape(len(values), -1).mean(axis=1)
        sums = np.diff(np.concatenate([[0.0], np.cumsum(values)])[np.cumsum([0, *column.lengths])])
        return sums / np.maximum(column.lengths, 1)
    if isinstance(column, torch.Tensor):
        if not column.is_floating_point():
            return None
        values = np.nan_to_num(_host(column).astype(np.float64))
        return values if values.ndim == 1 else values.reshape(len(values), -1).mean(axis=1)
    groups = [list(value.values()) if isinstance(value, dict) else [value] for value in column]
    parts = [part for group in groups for part in group]
    is_number = all(isinstance(part, int | float | None) for part in parts)
    if not is_number or not any(isinstance(part, float) for part in parts):
        return None
    return np.array([
        sum(float(np.nan_to_num(value or 0.0)) for value in group) / max(1, len(group)) for group in groups])


def _bytes_of(column: Any) -> list[bytes]:
    """Return each sample of a column as bytes."""
    if isinstance(column, Packed):
        values = _host(column.host_values)
        ends = np.cumsum([0, *column.lengths])
        return [values[a:b].tobytes() for a, b in zip(ends[:-1], ends[1:], strict=True)]
    if isinstance(column, torch.Tensor):
        return [row.tobytes() for row in _host(column)]
    return [json.dumps(value, sort_keys=True, default=str).encode() for value in column]


def _host(values: torch.Tensor) -> NDArray[Any]:
    values = values.detach().cpu()
    if values.is_floating_point():
        values = values.double()
    return np.ascontiguousarray(values.numpy())


def _hash(sample: int, text: bytes) -> int:
    digest = hashlib.blake2b(text, digest_size=8, key=sample.to_bytes(8, "little", signed=True))
    return int.from_bytes(digest.digest(), "little")
