"""SampleStore: the outputs of calls that this rank holds, by call, and samples that are unfinished."""

from collections.abc import Collection, Mapping, Sequence

from safetensors.torch import load, save

from realhf.data.batch import Batch
from realhf.data.order import prompt_of
from realhf.layout import Layout, even_split


class _Chunk:
    """Samples of one call: a batch that does not change, and the places in it of those not yet forgotten.

    So what it costs to select or forget samples depends on their number alone, however many there are.
    """

    def __init__(self, batch: Batch, places: Mapping[int, int] | None = None) -> None:
        """Take a batch and the place of each sample that is left; None: all are."""
        self._batch = batch
        self._places = dict(zip(batch.ids, range(len(batch)), strict=True) if places is None else places)

    def __len__(self) -> int:
        return len(self._places)

    def copied(self) -> "_Chunk":
        """Return a chunk of the same samples, which later changes of this one leave as it is."""
        return _Chunk(self._batch, self._places)

    def rows(self) -> Batch:
        """Return the samples that are left."""
        is_whole = len(self._places) == len(self._batch)
        return self._batch if is_whole else self._batch.select(list(self._places.values()))

    def select(self, keys: Sequence[str], ids: Collection[int]) -> Batch:
        """Return these columns of the samples `ids` that are here."""
        picked = self._batch.pick(keys) if self._batch.fields else self._batch
        places = [self._places[sample] for sample in self._known(ids)]
        return picked if len(places) == len(self._batch) else picked.select(places)

    def forget(self, ids: Collection[int]) -> None:
        """Forget the samples `ids`; free their memory once that is at least half of the chunk's."""
        for sample in self._known(ids):
            del self._places[sample]
        if 2 * len(self._places) <= len(self._batch) > 0:
            self._batch = self.rows()
            self._places = dict(zip(self._batch.ids, range(len(self._batch)), strict=True))

    def _known(self, ids: Collection[int]) -> list[int]:
        """Return the samples `ids` that are here."""
        if len(ids) <= len(self._places):
            return [sample for sample in ids if sample in self._places]
        return [sample for sample in self._places if sample in ids]


class SampleStore:
    """The outputs of calls on this rank: `complete` ones, and samples that are `unfinished` after a round."""

    def __init__(self) -> None:
        self.complete: dict[str, list[_Chunk]] = {}
        self.unfinished: dict[str, Batch] = {}
        self.held_by_engine: set[str] = set()
        """The calls whose engine holds the unfinished samples, too, with its cache; other engines get them
        again for each round. Checkpoints do not say so: a resumed run begins without caches."""

    def copied(self) -> "SampleStore":
        """Return a store with the same samples, which later changes of this one leave as it is."""
        copy = SampleStore()
        copy.complete = {
            name: [chunk.copied() for chunk in chunks] for name, chunks in self.complete.items()}
        copy.unfinished = dict(self.unfinished)
        return copy

    def pack(self) -> bytes:
        """Return all samples in the form of a safetensors file; it is empty without samples.

        It includes batches without samples, because these have the types of columns.
        """
        packed = {f"unfinished/{name}": batch.pack() for name, batch in self.unfinished.items() if batch.ids}
        if not packed and not any(len(chunk) for chunks in self.complete.values() for chunk in chunks):
            return b""
        for name, chunks in self.complete.items():
            packed |= {f"complete/{name}/{i}": chunk.rows().pack() for i, chunk in enumerate(chunks)}
        return save(packed)

    def unpack(self, data: bytes) -> None:
        """Add the samples of `pack`."""
        for key, packed in load(data).items():
            kind, _, name = key.partition("/")
            batch = Batch.unpack(packed)
            if kind == "complete":
                self.put(name.rpartition("/")[0], batch)
            else:
                self.unfinished[name] = Batch.concat([self.unfinished.get(name, Batch([])), batch])

    def deal(self, layouts: Mapping[str, Layout], rank: int, *, group_size: int) -> None:
        """Keep this rank's share of the samples, after `unpack` has added those of all ranks.

        `layouts` are the layouts of the calls, whose result ranks get equal shares of whole groups.
        """
        for name in self.complete:
            self.complete[name] = [_Chunk(_share(self._rows_of(name), layouts[name], rank, group_size))]
        for name, batch in self.unfinished.items():
            self.unfinished[name] = _share(batch, layouts[name], rank, group_size)

    def put(self, producer: str, batch: Batch) -> None:
        """Add samples that a call has completed. Each chunk has more samples than the next one."""
        chunks = self.complete.get(producer, [])
        filled = [chunk for chunk in chunks if len(chunk)]
        if batch.ids or not filled:
            filled.append(_Chunk(batch))
        while len(filled) > 1 and len(filled[-2]) <= len(filled[-1]):  # Few chunks, even with large pools.
            last = filled.pop().rows()
            filled[-1] = _Chunk(Batch.concat([filled[-1].rows(), last]))
        self.complete[producer] = filled

    def select(self, producer: str, keys: Sequence[str], ids: Collection[int]) -> Batch:
        """Return these columns of the samples `ids`, as far as they are here, in any order.

        If none of them is here, the columns are empty. If the producer never had samples here, there are no
        columns.
        """
        chunks = self.complete.get(producer, [])
        return Batch.concat([chunk.select(keys, ids) for chunk in chunks] or [Batch([])])

    def unfinished_of(self, call: str) -> Batch:
        """Return the samples that a call has left unfinished."""
        return self.unfinished.get(call, Batch([]))

    def forget(self, ids: Collection[int], *, producers: Collection[str] | None = None) -> None:
        """Free the memory of these samples, of some calls or of all.

        A chunk without samples remains, because it has the types of columns.
        """
        if not ids:
            return
        for producer in self.complete if producers is None else self.complete.keys() & producers:
            chunks = self.complete[producer]
            for chunk in chunks:
                chunk.forget(ids)
            filled = [chunk for chunk in chunks if len(chunk)]
            self.complete[producer] = filled or chunks[:1]

    def _rows_of(self, producer: str) -> Batch:
        """Return all samples of a call."""
        return Batch.concat([chunk.rows() for chunk in self.complete[producer]])


def _share(batch: Batch, layout: Layout, rank: int, group_size: int) -> Batch:
    """Return the samples of this rank's share of the groups: none if it is no result rank of the layout."""
    prompts = sorted({prompt_of(sample, group_size) for sample in batch.ids})
    ranks = layout.result_ranks
    mine: set[int] = set()
    if rank in ranks:
        mine = set(prompts[slice(*even_split(len(prompts), len(ranks), ranks.index(rank)))])
    return batch.select([i for i, sample in enumerate(batch.ids) if prompt_of(sample, group_size) in mine])
