"""ParallelGroups: the communication groups of one layout, seen from one rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from realhf.distributed.group import Group
from realhf.distributed.world import World
from realhf.layout import Coordinate, Layout


@dataclass(frozen=True)
class ParallelGroups:
    """The coordinate of a rank in a layout, and its groups.

    `all` has every rank of the layout. `ends` joins the first and the last pipeline stage; it is None on the
    stages between them and without pipelining. `ep` has the consecutive dp ranks that share one set of
    experts. `pp_back` has the ranks of `pp`, and sends sampled tokens back to the first stage. It uses gloo
    on any device, as all groups named `..._control` do; `replicas_control` has the ranks over dp and cp.
    """

    layout: Layout
    rank: int
    at: Coordinate
    tp: Group
    cp: Group
    pp: Group
    pp_back: Group
    dp_control: Group
    replicas_control: Group
    ep: Group
    ep_control: Group
    passes_control: Group
    """The ranks that pass through layers together: those of the tp groups of an ep group."""
    all: Group
    ends: Group | None
    world: World

    @classmethod
    def create(cls, world: World, layout: Layout) -> "ParallelGroups":
        """Create the groups of this rank.

        Every rank of the layout must call this, in the same order relative to its other group requests.
        """
        rank = world.rank
        coordinate = layout.coordinate(rank)
        line = {axis: next(g for g in layout.groups(axis) if rank in g) for axis in ("tp", "cp", "dp", "pp")}
        first = coordinate.dp - coordinate.dp % layout.ep
        line["ep"] = line["dp"][first : first + layout.ep]
        together = layout.grid[coordinate.pp, first : first + layout.ep, coordinate.cp].ravel().tolist()
        is_end = layout.pp > 1 and coordinate.pp in (0, layout.pp - 1)
        ends = world.group((line["pp"][0], line["pp"][-1])) if is_end else None
        return cls(
            layout=layout, rank=rank, at=coordinate, world=world, ends=ends,
            **{axis: world.group(line[axis]) for axis in ("tp", "cp", "pp", "ep")},
            pp_back=world.group(line["pp"], purpose="tokens"),
            dp_control=world.group(line["dp"], purpose="control"),
            replicas_control=world.group(layout.replicas(rank), purpose="control"),
            ep_control=world.group(line["ep"], purpose="control"),
            passes_control=world.group(together, purpose="control"),
            all=world.group(layout.ranks),
        )

    def tp_subgroup(self, indices: Sequence[int]) -> Group:
        """Return the group of some members of the tp group, which must include this rank."""
        return self.world.group(tuple(self.tp.ranks[i] for i in indices))

    @property
    def is_first_stage(self) -> bool:
        return self.at.pp == 0

    @property
    def is_last_stage(self) -> bool:
        return self.at.pp == self.layout.pp - 1
