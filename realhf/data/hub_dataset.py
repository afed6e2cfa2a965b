"""Finds data sets by their names on the Hugging Face hub. Imports no torch.

The library `datasets` downloads them once per host and keeps them as Arrow files. We record the paths of
these files in its cache, so that later processes map the files and ask neither the hub nor the library.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from realhf.data.row_files import ArrowFile, mapped_batches
from realhf.errors import UserError
from realhf.user_input.files import read_object
from realhf.user_input.hub import HubName, asking_hub, host_lock


@dataclass(frozen=True)
class HubDataset:
    """The prepared files of a configuration of a data set."""

    commit: str
    splits: dict[str, tuple[tuple[str, ...], int]]
    """Name of a split -> its Arrow files and the number of its rows."""


def datasets_cache() -> Path:
    """Return the directory in which `datasets` keeps its files, with a folder of our own."""
    from huggingface_hub import constants

    return Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")


def open_split(path: str, *, name: str | None, split: str, revision: str | None) -> list[ArrowFile]:
    """Return the rows of a split, such as `train`, `train[:1000]` or `train+test`.

    Raises UserError if the hub has no such data set, configuration or split.
    """
    prepared = find_dataset(path, name=name, revision=revision)
    parts = split_ranges(path, split, {name: rows for name, (_, rows) in prepared.splits.items()})
    return [_rows(path, part, *prepared.splits[part], start, stop) for part, start, stop in parts]


@lru_cache(maxsize=64)
def find_dataset(path: str, *, name: str | None, revision: str | None) -> HubDataset:
    """Return the files of a configuration; they are downloaded if they are not in the cache."""
    key = hashlib.sha256(json.dumps([path, name, revision]).encode()).hexdigest()[:20]
    record = datasets_cache() / "realhf" / f"{path.replace('/', '--')}-{key}.json"
    if (recorded := _read(record)) is not None:
        return recorded
    with host_lock(f"datasets--{path.replace('/', '--')}"):
        if (recorded := _read(record)) is not None:  # Another process has prepared it.
            return recorded
        prepared = _prepare(path, name, revision)
        record.parent.mkdir(parents=True, exist_ok=True)
        temporary = record.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"commit": prepared.commit, "splits": prepared.splits}))
        temporary.rename(record)
        return prepared


def _read(record: Path) -> HubDataset | None:
    """Return the files that an earlier process has recorded, if all of them still exist."""
    try:
        content = read_object(record)
    except ValueError:
        return None
    splits = {split: (tuple(files), rows) for split, (files, rows) in content["splits"].items()}
    is_there = all(Path(file).is_file() for files, _ in splits.values() for file in files)
    return HubDataset(content["commit"], splits) if is_there else None


def _prepare(path: str, name: str | None, revision: str | None) -> HubDataset:
    import datasets
    from huggingface_hub import HfApi, constants

    with asking_hub(HubName(path, revision), kind="data set"):
        # With a commit, `datasets` asks no other server than the hub.
        commit = None if constants.HF_HUB_OFFLINE else HfApi().dataset_info(path, revision=revision).sha
        try:
            loaded = datasets.load_dataset(path, name, revision=commit)
        except ValueError as error:
            raise _refusal(path, name, commit, error) from error
        except RuntimeError as error:
            if "script" not in str(error):
                raise
            raise UserError(
                f"{path!r} is made by a script, and no code of the hub is run: take a revision with data "
                "files, such as refs/convert/parquet") from error
    splits = {
        str(split): (tuple(file["filename"] for file in rows.cache_files), rows.num_rows)
        for split, rows in loaded.items()}
    first = next(files[0] for files, _ in splits.values())
    return HubDataset(commit or Path(first).parent.name, splits)


def _refusal(path: str, name: str | None, commit: str | None, error: ValueError) -> UserError:
    """Return the error about a configuration that the data set does not have, or about its files."""
    import datasets

    try:
        names = datasets.get_dataset_config_names(path, revision=commit)
    except Exception:
        names = []
    if names and name not in names:
        return UserError(f"{path!r}: name is {name!r}: it must be one of {', '.join(names)}")
    return UserError(f"{path!r} cannot be read: {' '.join(str(error).split())}")


def split_ranges(path: str, split: str, sizes: dict[str, int]) -> list[tuple[str, int, int]]:
    """Return the splits that a text names, each with the range [first, stop) of its rows.

    `sizes` has the number of rows of each split. Raises UserError if the text names another split.
    """
    if split in sizes:
        return [(split, 0, sizes[split])]
    import datasets

    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
        return [(part.splitname, part.from_, part.to) for part in parts]
    except (ValueError, AssertionError, KeyError) as error:
        names = list(sizes)
        raise UserError(
            f"{path!r}: split is {split!r}: it must be {' or '.join(names)}, "
            f"or a part such as {names[0]}[:100]") from error


def _rows(path: str, split: str, files: tuple[str, ...], num_rows: int, start: int, stop: int) -> ArrowFile:
    import pyarrow

    batches: list[Any] = [batch for file in files for batch in mapped_batches(Path(file))]
    if (start, stop) != (0, num_rows):
        table = pyarrow.Table.from_batches(batches)
        batches = table.slice(start, stop - start).to_batches()
    num_bytes = sum(Path(file).stat().st_size for file in files)
    share = (stop - start) / max(1, num_rows)
    return ArrowFile(f"{path} {split}", batches, num_bytes=int(num_bytes * share), start=start)
