"""Batch: samples with ids and columns, which are packed sequences, tensors or lists of Python values.

The suffix T of a tensor means one entry per packed token.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

from realhf.devices.pinned import upload, upload_tensor

_JSON = "//json"  # The entry beside the columns, none of which has this name.


@dataclass
class Packed:
    """Sequences of different lengths, end to end in `values` of shape (sum(lengths), ...)."""

    values: torch.Tensor
    lengths: list[int]
    on_host: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """The same values in host memory, if they came from there: reading them does not wait for a GPU."""

    def __post_init__(self) -> None:
        assert self.values.shape[0] == sum(self.lengths), (self.values.shape, sum(self.lengths))

    def __len__(self) -> int:
        return len(self.lengths)

    def split(self) -> tuple[torch.Tensor, ...]:
        """Return one view per sample."""
        return self.values.split(self.lengths)

    @cached_property
    def _starts(self) -> list[int]:
        """The place in `values` at which each sequence begins."""
        return list(accumulate(self.lengths, initial=0))

    def like(self, values: torch.Tensor) -> "Packed":
        """Return other values with these lengths."""
        return Packed(values, self.lengths)

    def select(self, indices: Sequence[int]) -> "Packed":
        """Return the sequences at these places, in this order."""
        starts = self._starts
        sequences = [self.values[starts[i] : starts[i] + self.lengths[i]] for i in indices]
        selected = Packed.of(sequences, empty=self.values[:0])
        if self.on_host is not None:
            selected.on_host = self.like(self.on_host).select(indices).values
        return selected

    def to(self, device: torch.device) -> "Packed":
        """Return the values on a device. A copy of one number per token also stays on the host."""
        if device.type == "cuda" and self.values.device.type == "cpu" and self.values.dim() == 1:
            return Packed(upload_tensor(self.values, device), self.lengths, self.values)
        return Packed(self.values.to(device), self.lengths, self.on_host)

    def in_response(self) -> torch.Tensor:
        """Return, for a response mask, which tokens are part of a response, inserted ones included.

        A response mask is 1 on the tokens that were sampled. A response begins at the first of these and goes
        on to the end of its sequence. Inside it, the mask is 0 on tokens that were inserted (`realhf.calls`).
        """
        sampled_T = self.values != 0
        count_T = sampled_T.long().cumsum(0)
        before_T = count_T - sampled_T.long()
        lengths = count_T.new_tensor(self.lengths)
        starts = (lengths.cumsum(0) - lengths)[lengths > 0]
        before_sequence_T = before_T[starts].repeat_interleave(
            lengths[lengths > 0], output_size=len(self.values))
        return count_T > before_sequence_T

    def response_lengths(self) -> torch.Tensor:
        """Return, for a response mask, the number of tokens of each response, inserted ones included."""
        lengths = self.values.new_tensor(self.lengths).long()
        row_T = lengths.new_tensor(range(len(self))).repeat_interleave(lengths, output_size=len(self.values))
        return lengths.new_zeros(len(self)).index_add(0, row_T, self.in_response().long())

    @property
    def host_values(self) -> torch.Tensor:
        return self.values.cpu() if self.on_host is None else self.on_host

    @classmethod
    def of(cls, sequences: Sequence[torch.Tensor], *, empty: torch.Tensor | None = None) -> "Packed":
        """Pack sequences end to end. If there are none, the values are `empty`, which must then be given."""
        values = torch.cat(list(sequences)) if sequences or empty is None else empty
        return cls(values, [len(s) for s in sequences])


@dataclass
class Batch:
    """Columns of the same samples, whose `ids` are unique over the whole run.

    A column is token-level (Packed), a tensor of shape (num_samples, ...), or a list of Python values.
    """

    ids: list[int]
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key, column in self.fields.items():
            if len(column) != len(self.ids):
                raise ValueError(f"column {key!r} has {len(column)} entries for {len(self.ids)} samples")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def select(self, indices: Sequence[int]) -> "Batch":
        """Return the samples at these places, in this order."""
        numbers = np.array(indices, np.int64)
        places: dict[torch.device, torch.Tensor] = {}  # The indices on each device that has tensors.
        fields = {}
        for key, column in self.fields.items():
            if isinstance(column, torch.Tensor):
                if column.device not in places:
                    places[column.device] = upload(numbers, column.device)
                fields[key] = column[places[column.device]]
            else:
                fields[key] = _select(column, indices)
        return Batch([self.ids[i] for i in indices], fields)

    def pick(self, keys: Sequence[str]) -> "Batch":
        """Return these columns of all samples."""
        return Batch(self.ids, {key: self.fields[key] for key in keys})

    def to(self, device: torch.device) -> "Batch":
        moved = {key: column.to(device) for key, column in self.fields.items() if hasattr(column, "to")}
        return Batch(self.ids, self.fields | moved)

    @classmethod
    def concat(cls, batches: Sequence["Batch"]) -> "Batch":
        """Concatenate the samples of batches with equal keys; a batch without samples may have no keys."""
        batches = [batch for batch in batches if batch.fields or batch.ids] or batches[:1]
        ids = [i for batch in batches for i in batch.ids]
        return cls(ids, {key: _concat([b[key] for b in batches]) for key in batches[0].fields})

    def pack(self) -> torch.Tensor:
        """Return the batch as safetensors bytes in host memory; ids, lengths and lists are JSON inside."""
        packed = {key: column for key, column in self.fields.items() if isinstance(column, Packed)}
        lists = {key: column for key, column in self.fields.items() if isinstance(column, list)}
        tensors = self.fields | {key: column.values for key, column in packed.items()}
        tensors = {key: tensors[key].detach().cpu().clone() for key in tensors.keys() - lists.keys()}
        lengths = {key: column.lengths for key, column in packed.items()}
        metadata = {"ids": self.ids, "lengths": lengths, "lists": lists}
        tensors[_JSON] = torch.frombuffer(bytearray(json.dumps(metadata).encode()), dtype=torch.uint8)
        return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)

    @classmethod
    def unpack(cls, data: torch.Tensor) -> "Batch":
        fields: dict[str, Any] = dict(load(data.numpy().tobytes()))
        metadata = json.loads(fields.pop(_JSON).numpy().tobytes())
        fields |= {key: Packed(fields[key], lengths) for key, lengths in metadata["lengths"].items()}
        return cls(metadata["ids"], fields | metadata["lists"])


def num_tokens_of(column: Any) -> int:
    """Return the tokens of a column, or its entries if these are no sequences."""
    return sum(column.lengths) if isinstance(column, Packed) else len(column)


def _select(column: Any, indices: Sequence[int]) -> Any:
    if isinstance(column, Packed):
        return column.select(indices)
    return [column[i] for i in indices]


def _concat(columns: Sequence[Any]) -> Any:
    if isinstance(columns[0], Packed):
        return Packed(torch.cat([c.values for c in columns]), [n for c in columns for n in c.lengths])
    if isinstance(columns[0], torch.Tensor):
        return torch.cat(list(columns))
    return [value for column in columns for value in column]
