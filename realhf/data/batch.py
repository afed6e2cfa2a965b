"""Batch: samples with their ids and per key packed sequences, or one number or Python value per sample."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import load, save

_JSON = "//json"  # no column is called so


@dataclass
class Packed:
    """Variable-length sequences end to end: `values` of shape (sum(lengths), ...), one length per sample."""

    values: torch.Tensor
    lengths: list[int]

    def __post_init__(self) -> None:
        assert self.values.shape[0] == sum(self.lengths), (self.values.shape, sum(self.lengths))

    def split(self) -> tuple[torch.Tensor, ...]:
        """One view per sample."""
        return self.values.split(self.lengths)

    def select(self, indices: Sequence[int]) -> "Packed":
        parts = self.split()
        chosen = [parts[i] for i in indices]
        return Packed(torch.cat(chosen) if chosen else self.values[:0], [self.lengths[i] for i in indices])

    def like(self, values: torch.Tensor) -> "Packed":
        """Other values with these lengths."""
        return Packed(values, self.lengths)

    @classmethod
    def of(cls, sequences: Sequence[torch.Tensor], *, empty: torch.Tensor | None = None) -> "Packed":
        """The sequences end to end; `empty` if there may be none."""
        values = torch.cat(list(sequences)) if sequences or empty is None else empty
        return cls(values, [len(s) for s in sequences])


Field = Packed | torch.Tensor | list
"""A column of a Batch: token-level, one number per sample of shape (num_samples, ...), or Python values."""


@dataclass
class Batch:
    """Columns over the same samples. `ids` are unique over the whole run."""

    ids: list[int]
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, column in self.fields.items():
            length = len(column.lengths) if isinstance(column, Packed) else len(column)
            if length != len(self.ids):
                raise ValueError(f"column {key!r} has {length} entries for {len(self.ids)} samples")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def select(self, indices: Sequence[int]) -> "Batch":
        """The samples at these positions, in this order."""
        fields = {key: select_field(column, indices) for key, column in self.fields.items()}
        return Batch([self.ids[i] for i in indices], fields)

    def pick(self, keys: Sequence[str]) -> "Batch":
        return Batch(self.ids, {key: self.fields[key] for key in keys})

    def to(self, device: torch.device) -> "Batch":
        fields = dict(self.fields)
        for key, column in fields.items():
            if isinstance(column, Packed):
                fields[key] = column.like(column.values.to(device))
            elif isinstance(column, torch.Tensor):
                fields[key] = column.to(device)
        return Batch(self.ids, fields)

    @classmethod
    def concat(cls, batches: Sequence["Batch"]) -> "Batch":
        """Samples of several batches with the same keys, one batch after the other."""
        ids = [i for batch in batches for i in batch.ids]
        return cls(ids, {key: concat_fields([b[key] for b in batches]) for key in batches[0].fields})

    def pack(self) -> torch.Tensor:
        """The batch as bytes, in host memory: safetensors, with ids, lengths and Python values as JSON inside."""
        tensors: dict[str, torch.Tensor] = {}
        rest: dict[str, Any] = {"ids": self.ids, "lengths": {}, "lists": {}}
        for key, column in self.fields.items():
            if isinstance(column, list):
                rest["lists"][key] = column
                continue
            if isinstance(column, Packed):
                rest["lengths"][key] = column.lengths
            tensors[key] = column.values if isinstance(column, Packed) else column
        tensors = {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
        tensors[_JSON] = torch.frombuffer(bytearray(json.dumps(rest).encode()), dtype=torch.uint8)
        return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)

    @classmethod
    def unpack(cls, data: torch.Tensor) -> "Batch":
        fields: dict[str, Any] = dict(load(data.numpy().tobytes()))
        rest = json.loads(fields.pop(_JSON).numpy().tobytes())
        fields |= {key: Packed(fields[key], lengths) for key, lengths in rest["lengths"].items()}
        return cls(rest["ids"], fields | rest["lists"])


def select_field(column: Any, indices: Sequence[int]) -> Any:
    if isinstance(column, Packed):
        return column.select(indices)
    if isinstance(column, torch.Tensor):
        return column[torch.tensor(list(indices), dtype=torch.long, device=column.device)]
    return [column[i] for i in indices]


def concat_fields(columns: Sequence[Any]) -> Any:
    first = columns[0]
    if isinstance(first, Packed):
        return Packed(torch.cat([c.values for c in columns]), [n for c in columns for n in c.lengths])
    if isinstance(first, torch.Tensor):
        return torch.cat(list(columns))
    return [value for column in columns for value in column]
