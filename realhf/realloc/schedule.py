"""Which box of which parameter goes from which rank to which, when a model moves from one Layout to another.

All ranks compute the same Schedule from the same arguments. Quantities are counted in elements.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    sent_elements: Mapping[int, int]
    received_elements: Mapping[int, int]
    bound_elements: int

    @property
    def over_bound(self) -> float:
        """Load of the busiest port over its lower bound; 1.0 when nothing moves."""
        busiest = max(*self.sent_elements.values(), *self.received_elements.values())
        return busiest / self.bound_elements if self.transfers else 1.0

    def rounds(self, max_elements: int) -> list[list[Transfer]]:
        """Transfers, large ones cut; per round no rank sends plus receives more than `max_elements`."""
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


_Owners = tuple[tuple[Region, tuple[int, ...]], ...]
"""Who has which box of a parameter: distinct regions, each with its ranks."""


def make_schedule(spec: ModelSpec, *, source: Layout, target: Layout) -> Schedule:
    """The schedule that moves a model from `source` to `target`; the two may share any or no ranks.

    Of several holders, the one with the least to send so far sends (ties: the least to receive); boxes with
    few holders are placed first, large ones before small ones.
    """
    holders, wanters = _owners_by_name(spec, source), _owners_by_name(spec, target)
    alike: dict[tuple[_Owners, _Owners], list[str]] = {}
    for name, owners in wanters.items():
        alike.setdefault((holders[name], owners), []).append(name)
    cells = [(cell, name) for key, names in alike.items() for cell in _cells(*key) for name in names]
    local_copies = tuple(Transfer(r, r, name, cell.region) for cell, name in cells for r in cell.local)
    cells.sort(key=lambda item: (len(item[0].holders), -item[0].size))
    load = {rank: [0, 0, rank] for rank in (*source.ranks, *target.ranks)}  # sent, received, rank
    leaving = Counter[tuple[int, ...]]()  # elements that must leave these holders, at least once
    transfers: list[Transfer] = []
    for cell, name in cells:
        for rank in cell.lacking:
            sender = min(load[holder] for holder in cell.holders)
            transfers.append(Transfer(sender[2], rank, name, cell.region))
            sender[0] += cell.size
            load[rank][1] += cell.size
        if cell.lacking:
            leaving[cell.holders] += cell.size
    # What all senders together must send counts as one more such case.
    leaving[tuple({rank for holders in leaving for rank in holders})] = leaving.total()
    sent, received = ({rank: part[i] for rank, part in load.items()} for i in (0, 1))
    bound = max([*received.values(), *(-(-size // max(1, len(who))) for who, size in leaving.items())])
    return Schedule(tuple(transfers), local_copies, sent, received, bound)


class _Cell(NamedTuple):
    """A box that a rank has whole or not at all; those that want it are either `local` or `lacking`."""

    region: Region
    size: int
    holders: tuple[int, ...]
    local: list[int]
    lacking: list[int]


def _owners_by_name(spec: ModelSpec, layout: Layout) -> dict[str, _Owners]:
    owners: dict[str, dict[Region, list[int]]] = {}
    for rank in layout.ranks:
        for name, region in spec.held_by(layout, rank).items():
            owners.setdefault(name, {}).setdefault(region, []).append(rank)
    return {n: tuple((box, tuple(ranks)) for box, ranks in boxes.items()) for n, boxes in owners.items()}


def _cells(holders: _Owners, wanters: _Owners) -> Iterator[_Cell]:
    """A parameter, cut along every border of a held or wanted region."""
    borders = zip(*(region for region, _ in (*holders, *wanters)), strict=True)
    cuts = [sorted({edge for span in spans for edge in span}) for spans in borders]
    for region in itertools.product(*(itertools.pairwise(c) for c in cuts)):
        having, wanting = (sorted(_owners_of(region, owners)) for owners in (holders, wanters))
        local = [rank for rank in wanting if rank in having]
        lacking = [rank for rank in wanting if rank not in having]
        yield _Cell(region, region_size(region), tuple(having), local, lacking)


def _owners_of(cell: Region, owners: _Owners) -> Iterator[int]:
    for region, ranks in owners:
        if all(low <= start < high for (start, _), (low, high) in zip(cell, region, strict=True)):
            yield from ranks


def _pieces(region: Region, max_elements: int) -> Iterator[Region]:
    """A region in boxes of at most `max_elements`, each with whole trailing dims where that is possible."""
    if region_size(region) <= max_elements:
        yield region
        return
    dim, (start, stop) = next((d, span) for d, span in enumerate(region) if span[1] - span[0] > 1)
    step = max(1, max_elements * (stop - start) // region_size(region))
    for low in range(start, stop, step):
        yield from _pieces((*region[:dim], (low, min(low + step, stop)), *region[dim + 1 :]), max_elements)
