"""HomeState: a parameter set that a run changes, as a checkpoint holds it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from realhf.checkpoint.run_state import Saved, SavedTensors
from realhf.distributed.pieces import Shards
from realhf.engine.optimizer import ShardedAdamW
from realhf.layout import Layout
from realhf.models.param_spec import ModelSpec, Placement
from realhf.models.region import Region
from realhf.realloc.routes import disjoint

_KINDS = {True: ("master", "exp_avg", "exp_avg_sq"), False: ("weights",)}
"""Whether the set is trained -> names of the tensors that a checkpoint holds of every parameter."""


@dataclass(frozen=True)
class HomeState:
    """A parameter set at home: trained (with an optimizer on the ranks of the layout) or a moving average.

    `tensors` are this rank's, by kind and parameter; ranks outside the layout have none.
    """

    name: str
    spec: ModelSpec
    layout: Layout
    trained: bool
    tensors: Mapping[str, Shards]
    optimizer: ShardedAdamW | None = None
    placements: Sequence[Placement] | None = None
    """Which ranks hold which boxes of each parameter; None if the spec says it."""

    @property
    def kinds(self) -> tuple[str, ...]:
        return _KINDS[self.trained]

    @property
    def counts(self) -> tuple[int, int]:
        """The optimizer's steps, and those that it has skipped in a row."""
        optimizer = self.optimizer
        return (0, 0) if optimizer is None else (optimizer.num_steps, optimizer.num_skipped)

    def pieces(self) -> Iterator[tuple[str, Region, int]]:
        """Yield boxes that make up every parameter, each with the rank that writes it; equal on all ranks.

        If several ranks hold a box, they take turns from parameter to parameter.
        """
        placements = self.placements or self.spec.placements(self.layout, sharded=self.trained)
        for number, (param, placement) in enumerate(zip(self.spec.params, placements, strict=True)):
            for region, holders in disjoint(placement):
                yield param.name, region, holders[number % len(holders)]

    def describe(self, files: Sequence[str], counts: Sequence[int]) -> Saved:
        """Return the manifest's entry, given the file of each rank and the optimizer's `counts`."""
        pieces: dict[str, list[tuple[str, Region]]] = {}
        for param, region, rank in self.pieces():
            pieces.setdefault(param, []).append((files[rank], region))
        num_steps, num_skipped = counts
        return Saved(self.kinds, pieces, num_steps, num_skipped, self.spec.config.to_hf())

    def read(self, saved: SavedTensors) -> None:
        """Fill this rank's tensors from a checkpoint."""
        for kind, shards in self.tensors.items():
            for param, pieces in shards.items():
                for region, tensor in pieces:
                    saved.read(kind, param, region, tensor)

    def difference(self, saved: Saved) -> str:
        """Return the difference between the saved model and this one in words; empty if there is none."""
        ours = {param.name: param.shape for param in self.spec.params}
        theirs = {
            name: tuple(max(stop for _, stop in bounds) for bounds in _columns(parts))
            for name, parts in saved.pieces.items()
        }
        if ours == theirs and saved.kinds == self.kinds:
            return ""
        config = self.spec.config.to_hf()
        for field in sorted(config.keys() | saved.model.keys()):
            if config.get(field) != saved.model.get(field):
                both = f"{saved.model.get(field)!r} in the checkpoint and {config.get(field)!r} now"
                return f"the config of {self.name} has {field} {both}"
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                both = f"{theirs.get(name, 'absent')} in the checkpoint and {ours.get(name, 'absent')} now"
                return f"{self.name}'s parameter {name} is {both}"
        return f"{self.name} was {'not ' * self.trained}trained"


def _columns(parts: list[tuple[str, Region]]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield for each dim the bounds of all parts."""
    return iter(zip(*(region for _, region in parts), strict=True))
