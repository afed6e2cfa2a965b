"""ParallelStrategy, DeviceMesh and Layout: which ranks hold a model, and how it is split over them."""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from realhf.errors import shown

AXES = ("pp", "dp", "cp", "tp")
"""Mesh axes, from slowest to fastest varying rank. `ep` subdivides `dp`."""
MAX_RANKS = 1 << 12
"""Largest number of ranks; checks and plans take time and memory for each."""
_LETTERS = {"p": "pp", "v": "vp", "d": "dp", "c": "cp", "t": "tp", "e": "ep"}


def even_split(length: int, num_parts: int, index: int) -> tuple[int, int]:
    """Return the half-open range of part `index`, if `length` items are split as evenly as possible."""
    return length * index // num_parts, length * (index + 1) // num_parts


def even_part(length: int, num_parts: int, item: int) -> int:
    """Return which part of `even_split` has this item."""
    return ((item + 1) * num_parts - 1) // length


@dataclass(frozen=True)
class ParallelStrategy:
    """The sizes of the pipeline, data, context, tensor and expert axes.

    Experts are split over `ep` neighbours of `dp`: the rank at index i of dp has index i % ep of ep. A
    pipeline stage holds `vp` chunks of the model: chunk i of stage s has the layers of virtual stage
    i * pp + s, so that a pass visits every stage `vp` times (interleaved 1F1B, arXiv:2104.04473).
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    vp: int = 1

    def __post_init__(self) -> None:
        for axis, size in vars(self).items():
            if not isinstance(size, int) or size < 1:
                raise ValueError(
                    f"parallel size {axis}={size!r} is not legal: it must be an integer from 1 up")
        if self.dp % self.ep:
            raise ValueError(f"expert-parallel size ep={self.ep} does not divide dp={self.dp}")
        if self.vp > 1 and self.pp == 1:
            raise ValueError(f"vp={self.vp} needs a pipeline: write for example p2v{self.vp}")

    @property
    def num_ranks(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def num_replicas(self) -> int:
        """Number of ranks that hold the same parameters (except experts) and share their optimizer."""
        return self.dp * self.cp

    @property
    def num_expert_replicas(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.dp // self.ep * self.cp

    def __str__(self) -> str:
        sizes = {letter: getattr(self, _LETTERS[letter]) for letter in "dtpvce"}
        return "".join(f"{letter}{size}" for letter, size in sizes.items() if size > 1) or "d1"

    @classmethod
    def parse(cls, text: str) -> "ParallelStrategy":
        """Parse `d2t4p1` as ParallelStrategy(dp=2, tp=4).

        Axes of size 1 may be left out, and `e2` alone implies `d2`. Raises ValueError about other text.
        """
        if not re.fullmatch(r"(?:[a-z]\d+)*", text):
            raise ValueError(f"{shown(text)} is not a parallel strategy: write for example d2t4p1")
        sizes: dict[str, int] = {}
        for letter, size in re.findall(r"([a-z])(\d+)", text):
            if letter not in _LETTERS:
                legal = ", ".join(_LETTERS)
                raise ValueError(f"unknown axis letter {letter!r} in {shown(text)}: legal are {legal}")
            if _LETTERS[letter] in sizes:
                raise ValueError(f"axis {letter!r} is given twice in {shown(text)}")
            sizes[_LETTERS[letter]] = int(size)
        return cls(**{"dp": sizes.get("ep", 1), **sizes})


@dataclass(frozen=True)
class DeviceMesh:
    """An ordered set of ranks; text form `0-3,8-11`."""

    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.ranks)

    def __post_init__(self) -> None:
        if not self.ranks:
            raise ValueError("a device mesh needs at least one rank")
        if min(self.ranks) < 0:
            raise ValueError(f"rank {min(self.ranks)} is not legal: ranks count from 0")
        if twice := [rank for rank, count in Counter(self.ranks).items() if count > 1]:
            raise ValueError(f"rank {twice[0]} stands twice in the mesh {self}")

    def __str__(self) -> str:
        parts = []
        for _, run in groupby(enumerate(self.ranks), key=lambda item: item[1] - item[0]):
            first, *others = (rank for _, rank in run)
            parts.append(f"{first}-{others[-1]}" if others else f"{first}")
        return ",".join(parts)

    @classmethod
    def parse(cls, text: str) -> "DeviceMesh":
        ranks: list[int] = []
        for part in text.split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
            if match is None:
                raise ValueError(
                    f"{part!r} in the mesh {shown(text)} is not a rank or a range: write as in 0-3,8-11")
            first, last = int(match[1]), int(match[2] or match[1])
            if last < first:
                raise ValueError(f"the range {part!r} in {shown(text)} runs backwards: write {last}-{first}")
            if last >= MAX_RANKS:
                raise ValueError(f"rank {last} in {shown(text)} is too high: legal are 0 to {MAX_RANKS - 1}")
            ranks.extend(range(first, last + 1))
            if len(ranks) > MAX_RANKS:
                raise ValueError(f"a mesh has more than {MAX_RANKS} ranks: some stand in it twice")
        return cls(tuple(ranks))


class Coordinate(NamedTuple):
    """The indices of a rank on the axes of a layout."""

    pp: int
    dp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Layout:
    """A ParallelStrategy on a DeviceMesh; text form `d2t4p1@0-7`.

    `form` is set for a copy of the weights in another form than the role's: `native` for the engine that
    generates for Megatron-Core, `int8` for weights of that precision. It is not the same copy, even if every
    rank holds the same regions. Its text is `d2@0-1/int8`.
    """

    strategy: ParallelStrategy
    mesh: DeviceMesh
    form: str = ""

    def __post_init__(self) -> None:
        need, have = self.strategy.num_ranks, len(self.ranks)
        if need != have:
            raise ValueError(
                f"layout {self} is not legal: {self.strategy} needs {need} ranks and the mesh "
                f"{self.mesh} has {have}")

    def __str__(self) -> str:
        return f"{self.strategy}@{self.mesh}" + (f"/{self.form}" if self.form else "")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        match = re.fullmatch(r"((?:[a-z]\d+)*)@([\d,\-]+)(?:/(native|int8))?", str(text).strip())
        if match is None:
            raise ValueError(
                f"{shown(text)} is not a layout: write strategy@ranks, for example d2t4@0-7 or t2@0,3")
        return cls(ParallelStrategy.parse(match[1]), DeviceMesh.parse(match[2]), match[3] or "")

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    @property
    def dp(self) -> int:
        return self.strategy.dp

    @property
    def cp(self) -> int:
        return self.strategy.cp

    @property
    def tp(self) -> int:
        return self.strategy.tp

    @property
    def pp(self) -> int:
        return self.strategy.pp

    @property
    def ep(self) -> int:
        return self.strategy.ep

    @property
    def vp(self) -> int:
        return self.strategy.vp

    @cached_property
    def grid(self) -> np.ndarray:
        """Return the ranks as an array of shape (pp, dp, cp, tp)."""
        return np.array(self.ranks).reshape([getattr(self.strategy, axis) for axis in AXES])

    @cached_property
    def _coordinates(self) -> dict[int, Coordinate]:
        return {int(rank): Coordinate(*index) for index, rank in np.ndenumerate(self.grid)}

    def coordinate(self, rank: int) -> Coordinate:
        return self._coordinates[rank]

    def __contains__(self, rank: int) -> bool:
        return rank in self._coordinates

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return all groups of ranks that differ only on `axis`, each in the order of that axis."""
        grid = np.moveaxis(self.grid, AXES.index(axis), -1)
        return [tuple(row) for row in grid.reshape(-1, grid.shape[-1]).tolist()]

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Return the ranks over dp and cp that hold the same parameters as `rank`, except experts."""
        pp, _, _, tp = self.coordinate(rank)
        return tuple(self.grid[pp, :, :, tp].ravel().tolist())

    def expert_replicas(self, rank: int) -> tuple[int, ...]:
        """Return the replicas of `rank` that also hold the same experts."""
        pp, dp, _, tp = self.coordinate(rank)
        return tuple(self.grid[pp, dp % self.ep :: self.ep, :, tp].ravel().tolist())

    @property
    def result_ranks(self) -> tuple[int, ...]:
        """Return the rank that has the results of each data shard: last stage, first of cp and of tp."""
        return tuple(self.grid[-1, :, 0, 0].tolist())
