"""SampleStore: the outputs of calls that this rank holds, by call, and samples that are unfinished."""

from collections.abc import Collection, Mapping, Sequence

from safetensors.torch import load, save

from realhf.data.batch import Batch
from realhf.data.order import prompt_of
from realhf.layout import Layout, even_split


class SampleStore:
    """The outputs of calls on this rank: `complete` ones, and samples that are `unfinished` after a round."""

    def __init__(self) -> None:
        self.complete: dict[str, list[Batch]] = {}
        self.unfinished: dict[str, Batch] = {}
        self.held_by_engine: set[str] = set()
        """The calls whose engine holds the unfinished samples, too, with its cache; other engines get them
        again for each round. Checkpoints do not say so: a resumed run begins without caches."""

    def copied(self) -> "SampleStore":
        """Return a store with the same samples, which later changes of this one leave as it is."""
        copy = SampleStore()
        copy.complete = {name: list(batches) for name, batches in self.complete.items()}
        copy.unfinished = dict(self.unfinished)
        return copy

    def pack(self) -> bytes:
        """Return all samples in the form of a safetensors file; it is empty without samples.

        It includes batches without samples, because these have the types of columns.
        """
        packed = {f"unfinished/{name}": batch.pack() for name, batch in self.unfinished.items() if batch.ids}
        if not packed and not any(batch.ids for batches in self.complete.values() for batch in batches):
            return b""
        for name, batches in self.complete.items():
            packed |= {f"complete/{name}/{i}": batch.pack() for i, batch in enumerate(batches)}
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
        for name, batches in self.complete.items():
            self.complete[name] = [_share(Batch.concat(batches), layouts[name], rank, group_size)]
        for name, batch in self.unfinished.items():
            self.unfinished[name] = _share(batch, layouts[name], rank, group_size)

    def put(self, producer: str, batch: Batch) -> None:
        """Add samples that a call has completed. Each batch has more samples than the next one."""
        filled = [samples for samples in self.complete.get(producer, []) if samples.ids]
        if not batch.ids and filled:
            batch = filled.pop()
        while filled and len(filled[-1]) <= len(batch):  # Few batches, even if pools keep many samples.
            batch = Batch.concat([filled.pop(), batch])
        self.complete[producer] = [*filled, batch]

    def select(self, producer: str, keys: Sequence[str], ids: Collection[int]) -> Batch:
        """Return these columns of the samples `ids`, as far as they are here, in any order.

        If none of them is here, the columns are empty. If the producer never had samples here, there are no
        columns.
        """
        return Batch.concat([_select(batch, keys, ids) for batch in self.complete.get(producer, [Batch([])])])

    def unfinished_of(self, call: str) -> Batch:
        """Return the samples that a call has left unfinished."""
        return self.unfinished.get(call, Batch([]))

    def forget(self, ids: Collection[int], *, producers: Collection[str] | None = None) -> None:
        """Free the memory of these samples, of some calls or of all.

        A batch without samples remains, because it has the types of columns.
        """
        for producer in self.complete if producers is None else self.complete.keys() & producers:
            batches = self.complete[producer]
            self.complete[producer] = []
            for batch in batches:
                indices = [i for i, sample in enumerate(batch.ids) if sample not in ids]
                self.put(producer, batch if len(indices) == len(batch) else batch.select(indices))


def _share(batch: Batch, layout: Layout, rank: int, group_size: int) -> Batch:
    """Return the samples of this rank's share of the groups: none if it is no result rank of the layout."""
    prompts = sorted({prompt_of(sample, group_size) for sample in batch.ids})
    ranks = layout.result_ranks
    mine: set[int] = set()
    if rank in ranks:
        mine = set(prompts[slice(*even_split(len(prompts), len(ranks), ranks.index(rank)))])
    return batch.select([i for i, sample in enumerate(batch.ids) if prompt_of(sample, group_size) in mine])


def _select(batch: Batch, keys: Sequence[str], ids: Collection[int]) -> Batch:
    indices = [i for i, sample in enumerate(batch.ids) if sample in ids]
    picked = batch.pick(keys) if batch.fields else batch
    return picked if len(indices) == len(batch) else picked.select(indices)
