"""Loader: makes the Batch with which a step starts, from rows of a dataset."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from realhf.data.batch import Batch, Packed
from realhf.data.dataset import (
    DATASET_ROW,
    START_IDS,
    ArrayDataset,
    DatasetConfig,
    DatasetMixture,
    reads_pairs,
)
from realhf.data.light_tokenizer import LightTokenizer, panics_as_errors
from realhf.data.order import (
    NoRowError,
    SkippingOrder,
    block_counts,
    mixture_counts,
    mixture_position,
    row_order,
    samples_of,
)
from realhf.data.rows import RowFault
from realhf.data.tokenized import MixedRows, TokenizedRows, TokenizedSamples
from realhf.data.tokenizer_process import try_tokenizer
from realhf.errors import UserError, shown, warn
from realhf.user_input.files import open_regular, require_regular_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DTYPES = {
    **dict.fromkeys(("prompt_ids", START_IDS, "sequence_ids"), torch.long), "response_mask": torch.float32}
"""Types of the token-level columns."""


def load_tokenizer(directory: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer  # Imported here, as it is slow and few ranks need it.

    path = Path(directory)
    require_regular_files(path)
    if (path / "tokenizer.json").exists():
        try_tokenizer(path / "tokenizer.json")
    try:
        with panics_as_errors():
            tokenizer = AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # The library raises many kinds about malformed files.
        raise UserError(f"tokenizer {directory}: {next(iter(str(error).splitlines()), '')}") from error
    if (path / "tokenizer.json").exists():
        _warn_of_other_tokens(directory, tokenizer)
    return tokenizer


_PROBES = ("Aa  Bb\n\n12345", "\u00c9t\u00e9 \u00a0x", "x\u00b2 \ufb01 \u201cok\u201d", " 3+4=7.")
"""Texts with capitals, accents, digits, white space and characters that normalizers change."""


def _warn_of_other_tokens(directory: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Warn if transformers makes other tokens than the file says, as some of its classes do.

    `realhf check` reads the file alone, and shows the tokens that this says.
    """
    light = LightTokenizer(directory)
    for text in _PROBES:
        ours = light.encode(text, add_special_tokens=False)
        theirs = tokenizer.encode(text, add_special_tokens=False)
        if ours != theirs:
            warn(
                f"tokenizer {directory}: transformers reads it as {type(tokenizer).__name__}, which does not "
                f"follow tokenizer.json: the tokens of {text!r} are {shown(theirs)} in runs, and "
                f"{shown(ours)} in `realhf check`, which reads the file; with PreTrainedTokenizerFast as "
                "tokenizer_class in tokenizer_config.json both follow the file")
            return


class Loader(TokenizedRows):
    """The tokenised rows of a run, as batches. The `group_size` samples of a prompt have consecutive ids.

    These samples are equal, except those of a pair: the chosen and the rejected completion.
    """

    def __init__(
        self, config: DatasetConfig,
        *, keys: Sequence[str], tokenizer: PreTrainedTokenizerBase, group_size: int, seed: int, **more: Any,
    ) -> None:
        """`more` are settings of TokenizedRows."""
        super().__init__(config, keys=keys, tokenizer=tokenizer, **more)
        assert group_size == 2 or not reads_pairs(keys), "a pair has two samples"
        self._group_size = group_size
        self._seed = seed
        self._order: SkippingOrder | None = None
        """The order of rows of which some turn out to be left out."""
        if self.may_leave_out:
            self._order = SkippingOrder(
                len(self), self.has, seed=seed, shuffle=config.shuffle, replacement=config.replacement)

    def batch(self, prompts: Sequence[int]) -> Batch:
        """Return these prompts of the run, by number, each `group_size` times."""
        samples = [self.at(prompt) for prompt in prompts]
        return batch_of_samples(prompts, samples, keys=self.keys, group_size=self._group_size)

    def batch_of_rows(self, indices: Sequence[int]) -> Batch:
        """Return these rows as prompts with the numbers of the rows, each `group_size` times."""
        samples = [self._samples_at(index) for index in indices]
        return batch_of_samples(indices, samples, keys=self.keys, group_size=self._group_size)

    def at(self, prompt: int) -> TokenizedSamples:
        """Return the samples of a prompt of an endless run, by its number."""
        if self._order is not None:
            try:
                return self._samples_at(self._order[prompt])
            except NoRowError as error:
                raise UserError(self._why_none()) from error
        (index,) = row_order(
            len(self), start=prompt, count=1, seed=self._seed, shuffle=self.config.shuffle,
            replacement=self.config.replacement)
        return self._samples_at(index)

    def _samples_at(self, index: int) -> TokenizedSamples:
        samples = self.row(index)
        assert samples is not None, f"row {index} is left out"
        return samples

    def state(self, prompts: Collection[int], *, next_prompt: int) -> list[dict[str, Any] | None]:
        """Return as JSON what a resumed run needs to go on with the rows of large data sets, for each part.

        It goes on from `next_prompt`, and may read the earlier `prompts` again.
        """
        return [self._order.state(prompts, next_prompt=next_prompt) if self._order is not None else None]

    def restore(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        if self._order is not None and states[0] is not None:
            self._order.restore(states[0])


class MixedLoader(MixedRows):
    """The tokenised rows of a mixture, as batches whose prompts come from the parts in their shares."""

    def __init__(
        self, config: DatasetMixture, *, keys: Sequence[str], group_size: int, seed: int, **more: Any
    ) -> None:
        """`more` are settings of Loader."""
        loaders: list[Loader] = []
        for part in config.parts:
            loaders.append(Loader(
                part, keys=keys, group_size=group_size, seed=seed, mixture=config,
                first_row=sum(loader.num_in_file for loader in loaders), **more))
        super().__init__(loaders)
        self._loaders = loaders
        self._keys = tuple(keys)
        self._counts = block_counts(config.weights)
        self._group_size = group_size
        self._seed = seed

    def batch(self, prompts: Sequence[int]) -> Batch:
        """Return these prompts of the run, by number, each `group_size` times."""
        places = [mixture_position(prompt, self._counts, seed=self._seed) for prompt in prompts]
        samples = [self._loaders[part].at(number) for part, number in places]
        return batch_of_samples(prompts, samples, keys=self._keys, group_size=self._group_size)

    def state(self, prompts: Collection[int], *, next_prompt: int) -> list[dict[str, Any] | None]:
        """Return the state of each part, see Loader.state."""
        numbers: list[list[int]] = [[] for _ in self._loaders]
        for prompt in prompts:
            part, number = mixture_position(prompt, self._counts, seed=self._seed)
            numbers[part].append(number)
        following = mixture_counts(next_prompt, self._counts, seed=self._seed)
        parts = zip(self._loaders, numbers, following, strict=True)
        return [loader.state(mine, next_prompt=number)[0] for loader, mine, number in parts]

    def restore(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        for loader, state in zip(self._loaders, states, strict=True):
            loader.restore([state])


class ArrayLoader:
    """The rows of an ArrayDataset, as batches whose columns are tensors."""

    parts: tuple[TokenizedRows, ...] = ()
    """Its tokenised rows: none."""

    def __init__(self, config: ArrayDataset, *, keys: Sequence[str], group_size: int, seed: int) -> None:
        config.check_keys(keys)
        self.config = config
        self._group_size = group_size
        self._seed = seed
        self._num_rows = config.count()
        self._columns: dict[str, torch.Tensor] = {}
        if config.path:
            with safe_open(str(config.path), framework="pt") as file:
                self._columns = {key: file.get_tensor(key) for key in keys if key != DATASET_ROW}
        if DATASET_ROW in keys:
            self._columns[DATASET_ROW] = torch.arange(self._num_rows)

    def __len__(self) -> int:
        return self._num_rows

    def has(self, index: int) -> bool:
        return True

    @property
    def fingerprints(self) -> list[dict[str, Any]]:
        """The sizes and check sums of the file, by which a resumed run notices other rows."""
        if not self.config.path:
            return []
        with open_regular(Path(str(self.config.path))) as file:
            data = file.read()
        sizes = {"rows": self._num_rows, "bytes": len(data), "crc32": zlib.crc32(data)}
        return [{"file": str(self.config.path), **sizes}]

    def batch(self, prompts: Sequence[int]) -> Batch:
        """Return the rows of these prompts of the run, by number, each `group_size` times."""
        rows: list[int] = []
        for first, count in _runs(prompts):
            rows += row_order(
                self._num_rows, start=first, count=count, seed=self._seed, shuffle=self.config.shuffle,
                replacement=self.config.replacement)
        return self._batch(prompts, rows)

    def batch_of_rows(self, indices: Sequence[int]) -> Batch:
        """Return these rows as prompts with the numbers of the rows, each `group_size` times."""
        return self._batch(indices, indices)

    def _batch(self, prompts: Sequence[int], rows: Sequence[int]) -> Batch:
        index = torch.tensor(rows, dtype=torch.long).repeat_interleave(self._group_size)
        columns = {key: column[index] for key, column in self._columns.items()}
        return Batch(samples_of(prompts, self._group_size), columns)

    def state(self, prompts: Collection[int], *, next_prompt: int) -> list[dict[str, Any] | None]:
        """Return no state, as the order of the rows follows from their numbers."""
        return []

    def restore(self, states: Sequence[Mapping[str, Any] | None]) -> None:
        """Do nothing, as there is no state."""


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first number and the length of each run of consecutive numbers."""
    start = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[start], i - start
            start = i


AnyLoader = Loader | MixedLoader | ArrayLoader


def tokenized(loader: Loader | MixedLoader | ArrayLoader | None) -> Loader | MixedLoader | None:
    """Return a loader of texts; None for one of arrays."""
    return None if isinstance(loader, ArrayLoader) else loader


def make_loader(
    config: DatasetConfig,
    *, keys: Sequence[str], tokenizer: PreTrainedTokenizerBase | None, group_size: int, seed: int,
    row_faults: Sequence[RowFault] = (),
) -> AnyLoader:
    if isinstance(config, ArrayDataset):
        return ArrayLoader(config, keys=keys, group_size=group_size, seed=seed)
    if tokenizer is None:
        raise UserError("dataset has texts, and there is no tokenizer: set `tokenizer`, or give ArrayDataset")
    if isinstance(config, DatasetMixture):
        return MixedLoader(
            config, keys=keys, tokenizer=tokenizer, group_size=group_size, seed=seed, row_faults=row_faults)
    return Loader(
        config, keys=keys, tokenizer=tokenizer, group_size=group_size, seed=seed, row_faults=row_faults)


def batch_of_samples(
    prompts: Sequence[int], samples: Sequence[TokenizedSamples], *, keys: Sequence[str], group_size: int
) -> Batch:
    rows = [variants[k % len(variants)] for variants in samples for k in range(group_size)]
    fields: dict[str, Any] = {key: [row[key] for row in rows] for key in keys}
    for key in fields.keys() & _DTYPES.keys():
        dtype = _DTYPES[key]
        sequences = [torch.tensor(value, dtype=dtype) for value in fields[key]]
        fields[key] = Packed.of(sequences, empty=torch.zeros(0, dtype=dtype))
    return Batch(samples_of(prompts, group_size), fields)
