"""Routing samples from the ranks that hold a call's inputs to the ranks that run it.

Every participant learns all sample ids and lengths, derives the same assignment of samples to data shards,
and sends or receives one packed message per peer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from realhf.data.batch import Batch, Packed, concat_fields, select_field
from realhf.dist.group import Pending, World
from realhf.engine.micro_batch import balance
from realhf.layout import Layout, even_split


@dataclass(frozen=True)
class Source:
    """Columns held by the heads of one layout; `batch` is this rank's part, None where it is no head."""

    layout: Layout
    keys: tuple[str, ...]
    batch: Batch | None

    def column(self, key: str) -> Any:
        assert self.batch is not None, "only a head holds columns"
        return self.batch[key]


@dataclass(frozen=True)
class Routing:
    """How samples are dealt out: `group_size` consecutive ids belong together; mini-batches are the same
    under every layout.
    """

    group_size: int = 1
    num_minibatches: int = 1
    keep_groups: bool = False


def assign(costs: dict[int, float], *, dp: int, routing: Routing) -> list[list[list[int]]]:
    """Sample ids by mini-batch and data shard, each list in rising order."""
    groups: dict[int, list[int]] = {}
    for sample_id in sorted(costs):
        groups.setdefault(sample_id // routing.group_size, []).append(sample_id)
    ordered = list(groups.values())
    minibatches = []
    for i in range(routing.num_minibatches):
        chosen = ordered[slice(*even_split(len(ordered), routing.num_minibatches, i))]
        units = chosen if routing.keep_groups else [[sample_id] for group in chosen for sample_id in group]
        parts = balance([sum(costs[s] for s in unit) for unit in units], dp)
        minibatches.append([[s for u in part for s in units[u]] for part in parts])
    return minibatches


class Exchange:
    """Moves Batches between layouts over one group of all ranks."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._data = world.group(tuple(range(world.size)))

    def move(self, sources: Sequence[Source], target: Layout, routing: Routing) -> list[Batch] | None:
        """This rank's share of the samples, one Batch per mini-batch; None on ranks outside `target`.

        Every head of a source and every rank of the target must call this.
        """
        rank = self._world.rank
        pending: list[Pending] = []
        senders = sorted({head for source in sources for head in source.layout.heads})
        participants = sorted({*senders, *target.ranks})
        headers = self._share_headers(sources, senders, participants, pending)
        costs, where = _locate(sources, headers)
        assignment = assign(costs, dp=target.dp, routing=routing)
        wanted = {r: [i for part in assignment for i in part[target.coordinate(r).dp]] for r in target.ranks}
        if rank in senders:
            self._send(sources, where, wanted, pending)
        result = None
        if rank in target:
            columns = self._receive(sources, senders, headers, where, wanted[rank])
            whole = Batch(wanted[rank], columns)
            cuts = [len(part[target.coordinate(rank).dp]) for part in assignment]
            starts = [sum(cuts[:i]) for i in range(len(cuts))]
            result = (
                [whole.select(range(s, s + n)) for s, n in zip(starts, cuts, strict=True)]
                if len(cuts) > 1
                else [whole]
            )
        for message in pending:
            message.wait()
        return result

    def _share_headers(
        self, sources: Sequence[Source], senders: list[int], participants: list[int], pending: list[Pending]
    ) -> dict[int, dict[int, Any]]:
        """Rank -> source index -> ids, and per key its type and lengths."""
        control, rank = self._world.control, self._world.rank
        headers: dict[int, dict[int, Any]] = {}
        if rank in senders:
            mine = {i: _header(s.batch, s.keys) for i, s in enumerate(sources) if s.batch is not None}
            headers[rank] = mine
            pending.append(control.send_json(list(mine.items()), [p for p in participants if p != rank]))
        for sender in senders:
            if sender != rank:
                headers[sender] = dict(map(tuple, control.recv_json(sender)))
        return headers

    def _send(
        self,
        sources: Sequence[Source],
        where: list[dict[int, tuple[int, int]]],
        wanted: dict[int, list[int]],
        pending: list[Pending],
    ) -> None:
        rank = self._world.rank
        packed: dict[tuple[int, ...], tuple[torch.Tensor, list | None]] = {}
        for receiver, ids in wanted.items():
            if receiver == rank:
                continue
            shard = tuple(ids)
            if shard not in packed:
                parts = [_rows(where[i], ids, rank) for i in range(len(sources))]
                packed[shard] = self._pack(sources, parts)
            data, lists = packed[shard]
            if data.numel():
                pending.append(self._data.post([(receiver, data)], []))
            if lists:
                pending.append(self._world.control.send_json(lists, [receiver]))

    def _pack(self, sources: Sequence[Source], parts: list[list[int]]) -> tuple[torch.Tensor, list]:
        tensors: list[torch.Tensor] = []
        lists: list = []
        for source, indices in zip(sources, parts, strict=True):
            if source.batch is None or not indices:
                continue
            for key in source.keys:
                column = select_field(source.column(key), indices)
                if isinstance(column, list):
                    lists.append(column)
                else:
                    tensors.append(column.values if isinstance(column, Packed) else column)
        # The widest element types first, so that every part of the buffer is aligned for its type.
        tensors.sort(key=lambda t: -t.element_size())
        flat = [t.contiguous().view(-1).view(torch.uint8) for t in tensors if t.numel()]
        return (torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)).to(self._world.device), lists

    def _receive(
        self,
        sources: Sequence[Source],
        senders: list[int],
        headers: dict[int, dict[int, Any]],
        where: list[dict[int, tuple[int, int]]],
        ids: list[int],
    ) -> dict[str, Any]:
        pieces: dict[str, list[Any]] = {}
        order: list[list[int]] = [[] for _ in sources]
        for sender in senders:
            chosen = [(i, _rows(where[i], ids, sender)) for i in headers[sender]]
            chosen = [(i, indices) for i, indices in chosen if indices]
            if sender == self._world.rank:
                parts = {
                    (i, key): select_field(sources[i].column(key), rows)
                    for i, rows in chosen
                    for key in sources[i].keys
                }
            else:
                parts = self._receive_from(
                    sender, [(i, sources[i].keys, rows, headers[sender][i]) for i, rows in chosen]
                )
            for i, indices in chosen:
                at = headers[sender][i]["ids"]
                order[i] += [at[index] for index in indices]
                for key in sources[i].keys:
                    pieces.setdefault(key, []).append(parts[i, key])
        columns: dict[str, Any] = {}
        for i, source in enumerate(sources):
            position = {sample_id: n for n, sample_id in enumerate(order[i])}
            for key in source.keys:
                if key in pieces:
                    columns[key] = select_field(concat_fields(pieces[key]), [position[s] for s in ids])
                else:
                    template = next(h[i]["keys"][key] for h in headers.values() if i in h)
                    columns[key] = _empty(template, device=self._world.device)
        return columns

    def _receive_from(self, sender: int, wanted: list[tuple[int, tuple[str, ...], list[int], Any]]) -> dict:
        """One packed message, and one JSON message if there are Python columns."""
        slots = []
        lists = []
        for i, keys, rows, header in wanted:
            for key in keys:
                meta = header["keys"][key]
                if meta["kind"] == "list":
                    lists.append((i, key))
                    continue
                lengths = [meta["lengths"][r] for r in rows] if meta["kind"] == "packed" else None
                shape = [sum(lengths) if lengths is not None else len(rows), *meta["tail"]]
                slots.append((i, key, getattr(torch, meta["dtype"]), shape, lengths))
        slots.sort(key=lambda slot: -slot[2].itemsize)
        sizes = [math.prod(shape) * dtype.itemsize for _, _, dtype, shape, _ in slots]
        data = torch.empty(sum(sizes), dtype=torch.uint8, device=self._world.device)
        if data.numel():
            self._data.exchange([], [(sender, data)])
        parts: dict[tuple[int, str], Any] = {}
        for (i, key, dtype, shape, lengths), raw in zip(slots, data.split(sizes), strict=True):
            values = raw.view(dtype).view(shape)
            parts[i, key] = values if lengths is None else Packed(values, lengths)
        if lists:
            parts |= dict(zip(lists, self._world.control.recv_json(sender), strict=True))
        return parts


def _header(batch: Batch, keys: Sequence[str]) -> dict[str, Any]:
    described: dict[str, Any] = {}
    for key in keys:
        column = batch[key]
        if isinstance(column, list):
            described[key] = {"kind": "list"}
            continue
        tensor = column.values if isinstance(column, Packed) else column
        described[key] = {"dtype": str(tensor.dtype).removeprefix("torch."), "tail": list(tensor.shape[1:])}
        if isinstance(column, Packed):
            described[key] |= {"kind": "packed", "lengths": column.lengths}
        else:
            described[key]["kind"] = "tensor"
    return {"ids": batch.ids, "keys": described}


def _locate(
    sources: Sequence[Source], headers: dict[int, dict[int, Any]]
) -> tuple[dict[int, float], list[dict[int, tuple[int, int]]]]:
    """Cost (tokens of the longest column, at least 1) of every sample, and per source: sample -> (rank, index
    there).
    """
    costs: dict[int, float] = {}
    where: list[dict[int, tuple[int, int]]] = [{} for _ in sources]
    for rank, by_source in headers.items():
        for i, header in by_source.items():
            for index, sample_id in enumerate(header["ids"]):
                where[i][sample_id] = (rank, index)
                lengths = [m["lengths"][index] for m in header["keys"].values() if m["kind"] == "packed"]
                costs[sample_id] = max([costs.get(sample_id, 1.0), *map(float, lengths)])
    for i, located in enumerate(where):
        assert located.keys() == costs.keys(), f"source {i} holds other samples than the others"
    return costs, where


def _rows(where: dict[int, tuple[int, int]], ids: Sequence[int], rank: int) -> list[int]:
    """Positions on `rank` of those of `ids` that it holds, in the order of `ids`."""
    return [where[s][1] for s in ids if where[s][0] == rank]


def _empty(meta: dict[str, Any], *, device: torch.device) -> Any:
    if meta["kind"] == "list":
        return []
    values = torch.empty([0, *meta["tail"]], dtype=getattr(torch, meta["dtype"]), device=device)
    return Packed(values, []) if meta["kind"] == "packed" else values
