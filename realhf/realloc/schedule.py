"""Which box of which parameter goes from which rank to which, when a model moves from one Layout to another.

All ranks compute the same Schedule from the same arguments. Quantities are counted in elements.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from realhf.layout import Layout
from realhf.param_spec import ModelSpec, Region, region_size


class Transfer(NamedTuple):
    """`region` of parameter `name`, in global indices, goes from rank `source` to rank `target`."""

    source: int
    target: int
    name: str
    region: Region


@dataclass(frozen=True)
class Schedule:
    """Every element that a target rank wants comes once: by a transfer or from itself (`local_copies`).

    Under no schedule, not even one in which targets forward what they got, does the busiest port (what one
    rank sends, or what it receives) carry less than `bound_elements`.
    """

    transfers: tuple[Transfer, ...]
    local_copies: tuple[Transfer, ...]
    bound_elements: int

    @cached_property
    def _loads(self) -> tuple[Counter[int], Counter[int]]:
        """Elements sent and received, by rank."""
        sent, received = Counter[int](), Counter[int]()
        for source, target, _, region in self.transfers:
            sent[source] += region_size(region)
            received[target] += region_size(region)
        return sent, received

    def sent_elements(self, rank: int) -> int:
        return self._loads[0][rank]

    def received_elements(self, rank: int) -> int:
        return self._loads[1][rank]

    @property
    def total_elements(self) -> int:
        """What all ranks together send: the elements that each target rank lacks, summed over ranks."""
        return self._loads[0].total()

    @property
    def max_port_elements(self) -> int:
        """The most that any rank sends, or receives."""
        return max((size for load in self._loads for size in load.values()), default=0)

    @property
    def over_bound(self) -> float:
        """Load of the busiest port over its lower bound; 1.0 when nothing moves."""
        return self.max_port_elements / self.bound_elements if self.transfers else 1.0

    def bytes_total(self, itemsize: int) -> int:
        return self.total_elements * itemsize

    def rounds(self, max_elements: int) -> list[list[Transfer]]:
        """Transfers, large ones cut; per round no rank sends plus receives more than `max_elements`."""
        assert max_elements >= 1
        rounds: list[list[Transfer]] = []
        largest = max(1, max_elements // 4)
        load: Counter[tuple[int, int]] = Counter()  # elements by (rank, round)
        full: Counter[int] = Counter()  # of each rank, the rounds without room for every piece, as bits
        for transfer in self.transfers:
            for region in _pieces(transfer.region, largest):
                busy = full[transfer.source] | full[transfer.target]
                at = (~busy & (busy + 1)).bit_length() - 1  # lowest bit that is 0
                for rank in (transfer.source, transfer.target):
                    load[rank, at] += region_size(region)
                    if load[rank, at] + largest > max_elements:
                        full[rank] |= 1 << at
                rounds.extend([] for _ in range(len(rounds), at + 1))
                rounds[at].append(transfer._replace(region=region))
        return rounds


_Regions = Mapping[int, Mapping[str, Region]]
"""Rank -> parameter name -> region."""


def make_schedule(spec: ModelSpec, *, source: Layout, target: Layout) -> Schedule:
    """The schedule that moves a model from `source` to `target`; the two may share any or no ranks."""
    held = {rank: spec.held_by(source, rank) for rank in source.ranks}
    wanted = {rank: spec.held_by(target, rank) for rank in target.ranks}
    return schedule_regions(held, wanted=wanted)


def schedule_regions(held: _Regions, *, wanted: _Regions) -> Schedule:
    """The schedule that gives every rank the regions that it wants, from the ranks that hold them.

    Of several holders, the one with the least to send so far sends (ties: the least to receive); boxes with
    few holders are placed first, large ones before small ones.
    """
    holders, wanters = _by_parameter(held), _by_parameter(wanted)
    classes: dict[tuple[_Owners, _Owners], list[str]] = {}
    for name, owners in wanters.items():
        classes.setdefault((holders[name], owners), []).append(name)
    cells = [(cell, name) for key, names in classes.items() for cell in _cells(*key) for name in names]
    local_copies = tuple(Transfer(r, r, name, cell.region) for cell, name in cells for r in cell.local)
    cells.sort(key=lambda item: (len(item[0].holders), -item[0].size))
    load = {rank: [0, 0, rank] for rank in (*held, *wanted)}  # sent, received, rank
    transfers: list[Transfer] = []
    for cell, name in cells:
        for rank in cell.lacking:
            sender = min(load[holder] for holder in cell.holders)
            transfers.append(Transfer(sender[2], rank, name, cell.region))
            sender[0] += cell.size
            load[rank][1] += cell.size
    return Schedule(tuple(transfers), local_copies, _bound(cell for cell, _ in cells))


_Owners = tuple[tuple[Region, tuple[int, ...]], ...]
"""Who has which box of a parameter: distinct regions, each with its ranks."""


class _Cell(NamedTuple):
    """A box that a rank has whole or not at all; those that want it are either `local` or `lacking`."""

    region: Region
    size: int
    holders: tuple[int, ...]
    local: tuple[int, ...]
    lacking: tuple[int, ...]


def _by_parameter(regions: _Regions) -> dict[str, _Owners]:
    owners: dict[str, dict[Region, list[int]]] = {}
    for rank, by_name in regions.items():
        for name, region in by_name.items():
            owners.setdefault(name, {}).setdefault(region, []).append(rank)
    return {n: tuple((box, tuple(ranks)) for box, ranks in boxes.items()) for n, boxes in owners.items()}


def _cells(holders: _Owners, wanters: _Owners) -> list[_Cell]:
    """The wanted boxes of a parameter, cut along every border of a held or wanted region."""
    borders = zip(*(region for region, _ in (*holders, *wanters)), strict=True)
    cuts = [sorted({edge for span in spans for edge in span}) for spans in borders]
    cells: list[_Cell] = []
    for region in itertools.product(*(itertools.pairwise(c) for c in cuts)):
        having = tuple(sorted(_owners_of(region, holders)))
        wanting = sorted(_owners_of(region, wanters))
        assert having or not wanting, f"nobody holds {region}"
        if wanting:
            local = tuple(rank for rank in wanting if rank in having)
            lacking = tuple(rank for rank in wanting if rank not in having)
            cells.append(_Cell(region, region_size(region), having, local, lacking))
    return cells


def _owners_of(cell: Region, owners: _Owners) -> Iterator[int]:
    for region, ranks in owners:
        if all(low <= start < high for (start, _), (low, high) in zip(cell, region, strict=True)):
            yield from ranks


def _bound(cells: Iterable[_Cell]) -> int:
    """Each rank receives what it lacks, and each lacking element leaves its holders at least once."""
    received, leaving = Counter[int](), Counter[tuple[int, ...]]()
    for cell in cells:
        for rank in cell.lacking:
            received[rank] += cell.size
        if cell.lacking:
            leaving[cell.holders] += cell.size
    senders = {rank for holders in leaving for rank in holders}
    loads = [*received.values(), *(-(-size // len(holders)) for holders, size in leaving.items())]
    return max((*loads, -(-leaving.total() // max(1, len(senders)))))


def _pieces(region: Region, max_elements: int) -> Iterator[Region]:
    """A region in boxes of at most `max_elements`, each with whole trailing dims where that is possible."""
    if region_size(region) <= max_elements:
        yield region
        return
    dim = next(d for d, (start, stop) in enumerate(region) if stop - start > 1)
    start, stop = region[dim]
    step = max(1, max_elements * (stop - start) // region_size(region))
    for low in range(start, stop, step):
        yield from _pieces((*region[:dim], (low, min(low + step, stop)), *region[dim + 1 :]), max_elements)
